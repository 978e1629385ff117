"""What the coordinator says of the service: shown on one screen, and waited for after an edit.

The coordinator names the files that it has carried out, or refused, by their digest; every process
names the configuration that it follows. A process that is down follows once it starts. Of what the
coordinator has against the files, a refused removal concerns that shard alone, and all else acts.
Anything else is a mistake in them, and keeps all three files from acting.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, cast

import click

from pinlaterd.cli import command
from pinlaterd.config.layout import ETC, shard_program
from pinlaterd.errors import ConnectionFailed, DeploymentError
from pinlaterd.lifecycle import ExitCode
from pinlaterd.stats import StatsSnapshot, empty

_WARNING = "warning"  # a fact whose name ends so is listed among the warnings
_PATIENCE_SECONDS = 60.0
_DOWN = ("stopped", "silent")  # a frozen router is held off by the shards, which refuse by then
# Every queue that a shard has, and nothing else, has a peak whose name ends so.
QUEUE_AGE = "_oldest_ready_age_ms"
_COUNTING = "shard_queues_counting"  # every shard that has looked at its store has it


def fetch() -> command.Facts:
    """Raises ConnectionFailed."""
    [found] = command.ask_coordinator("/status.json")
    return cast("command.Facts", found)


def report(status: command.Facts) -> None:
    """Print it, and end the program with exit 1 if a router or shard does not serve."""
    command.show(status, lambda: _print(status))
    if not status["healthy"]:
        sys.exit(ExitCode.FAILURE)


def enqueues(shard: command.Facts) -> str:
    return "no (dequeue-only)" if shard["dequeue_only"] else "yes"


def shown_state(shard: command.Facts) -> str:
    return f"{shard['state']}, degraded" if shard["ailing"] else shard["state"]


_PROCESS_COLUMNS: Sequence[command.Column] = (
    ("process", itemgetter("name")),
    ("state", itemgetter("state")),
    ("#pid", lambda process: process["pid"] or "-"),
    ("#up", lambda process: _duration(process["uptime_seconds"])),
    ("#cpu s", lambda process: f"{process['cpu_seconds']:.1f}"),
    ("#rss MB", lambda process: f"{process['rss_bytes'] / 1_000_000:.0f}"),
    ("facts", lambda process: _facts(process["facts"])),
)
_SHARD_COLUMNS: Sequence[command.Column] = (
    ("shard", itemgetter("name")),
    ("engine", itemgetter("engine")),
    ("state", itemgetter("state")),
    ("enqueues", enqueues),
)


def _print(status: command.Facts) -> None:
    health = "healthy" if status["healthy"] else "NOT healthy"
    click.echo(
        f"pinlaterd {status['version']} in {command.printable(status['deployment'])}: {health}, "
        f"Thrift {status['thrift']}, statistics {status['stats']}"
    )
    click.echo()
    command.print_table(_PROCESS_COLUMNS, status["processes"])
    click.echo()
    command.print_table(_SHARD_COLUMNS, status["shards"])
    for title, lines in (
        ("Problems", status["problems"]),
        ("Problems of the configuration", status["config_problems"]),
        ("Changes that need a restart", status["needs_restart"]),
        ("Warnings", status["warnings"]),
    ):
        if lines:
            click.echo(f"\n{title}:")
        for line in lines:
            click.echo(f"  {command.printable(line, command.MAX_LINE_CHARS)}")


def _facts(facts: Mapping[str, str]) -> str:
    shown = (f"{key} {text}" for key, text in facts.items() if text and not key.endswith(_WARNING))
    return ", ".join(shown)


def _duration(seconds: float) -> str:
    """In the two largest units: 3 d 4 h, 12 min 5 s."""
    whole = int(seconds)
    for unit, size, smaller, smaller_size in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller_size} {smaller}"
    return f"{whole} s"


# --- shards and what they hold ------------------------------------------------------------------


class Sample(NamedTuple):
    """What the coordinator said at one moment; `at` in monotonic seconds."""

    at: float
    status: command.Facts
    stats: Mapping[str, StatsSnapshot]  # /snapshot.json: by process


def take_sample() -> Sample:
    """Raises ConnectionFailed."""
    status, stats = command.ask_coordinator("/status.json", "/snapshot.json")
    return Sample(time.monotonic(), status, stats)


def shards_of(sample: Sample) -> list[command.Facts]:
    """As `shard list` shows them."""
    processes = sample.status["processes"]
    facts = {process["name"]: process["facts"] for process in processes if process["facts"]}
    found: list[command.Facts] = []
    for shard in sample.status["shards"]:
        program = shard_program(shard["name"])
        about = facts.get(program, {})
        stats = sample.stats.get(program, empty())
        found.append(
            {
                "name": shard["name"],
                "engine": shard["engine"],
                "where": about.get("master") or about.get("file") or "",
                "state": shard["state"],
                "dequeue_only": shard["dequeue_only"],
                "ailing": bool(stats["gauges"].get("shard_ailing")),
                "jobs": _jobs_of(stats),
            }
        )
    return found


def find_shard(name: str) -> command.Facts | None:
    """None if it is not part of the service. Raises ConnectionFailed."""
    return next((shard for shard in shards_of(take_sample()) if shard["name"] == name), None)


def queue_names(stats: StatsSnapshot) -> list[str]:
    return sorted(
        name.removesuffix(QUEUE_AGE) for name in stats["peaks"] if name.endswith(QUEUE_AGE)
    )


def _jobs_of(stats: StatsSnapshot) -> Mapping[str, int] | None:
    """How many jobs a shard holds; None if it does not serve, or counts them."""
    gauges = stats["gauges"]
    if gauges.get(_COUNTING, 1):
        return None

    def total(state: str) -> int:
        return round(sum(gauges.get(f"{queue}_{state}", 0) for queue in queue_names(stats)))

    scheduled = total("scheduled")
    return {
        "pending": max(0, total("pending") - scheduled),  # due by now
        "scheduled": scheduled,
        "in_progress": total("in_progress"),
        "succeeded": total("succeeded"),
        "failed": total("failed"),
    }


# --- after an edit --------------------------------------------------------------------------


class EditRefused(DeploymentError):
    """The coordinator has something against what was written. `mistakes`: not only against the
    removal of a shard."""

    def __init__(self, problems: Mapping[str, str | None]) -> None:
        super().__init__(
            "; ".join(command.printable(text, command.MAX_LINE_CHARS) for text in problems)
        )
        self.mistakes = None in problems.values()


def follow(done: str, *, was_changed: bool, removed: str | None = None) -> bool:
    """Wait until every process follows etc/ as it is now, and tell that `done` is so.

    False if the coordinator is away: then what was written acts when it is back. Raises EditRefused
    unless all that the coordinator refuses is the removal of other shards than `removed`. Ends the
    program with a message if it takes too long."""
    try:
        with command.waiting("waiting until the service follows"):
            problems = _wait_until_followed()
    except ConnectionFailed:
        click.echo(
            f"{done}: it is written, and acts when the coordinator is back; `pinlaterd status` "
            "shows how the service is",
            err=True,
        )
        return False
    tell(done, problems, was_changed=was_changed, removed=removed)
    return True


def tell(
    done: str, problems: Mapping[str, str | None], *, was_changed: bool, removed: str | None = None
) -> None:
    """`problems`: what the coordinator has against the files, and the shard whose removal it
    refuses by that; None for a mistake."""
    against = {text: shard for text, shard in problems.items() if shard in (None, removed)}
    if against:
        raise EditRefused(against)
    for text in problems:
        click.echo(f"warning: {command.printable(text, command.MAX_LINE_CHARS)}", err=True)
    click.echo(f"{done}{'' if was_changed else ' already'}", err=True)


def _wait_until_followed() -> Mapping[str, str | None]:
    from pinlaterd.config.load import ConfigFiles

    for is_late in command.polls(_PATIENCE_SECONDS):
        status = fetch()
        waits_for = "the coordinator has not carried it out"
        if status["config_judged"] == ConfigFiles(command.directory() / ETC).digest:
            behind = [
                process["name"]
                for process in status["processes"]
                if process["kind"] in ("router", "shard")
                and process["state"] not in _DOWN
                and process["config_version"] < status["config_version"]
            ]
            if not behind:
                shards = {text: name for name, text in status["refused_removals"].items()}
                return {text: shards.get(text) for text in status["config_problems"]}
            waits_for = f"{', '.join(behind)} has not followed"
        if is_late:
            command.fail(
                f"what was written does not act after {_PATIENCE_SECONDS:.0f} s: {waits_for}; "
                "see `pinlater-admin status` and run/log"
            )
    raise AssertionError("polls without end")
