"""What the coordinator says of the service: shown on one screen, and waited for after an edit.

The coordinator names the files that it has carried out, or refused, by their digest; every process
names the configuration that it follows. A process that is down follows once it starts.

Of what it says against the files, a refused removal concerns that shard alone: all else that they
say acts. Anything else is a mistake in them, and keeps all three from acting.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import click

from pinlaterd.cli import options
from pinlaterd.cli.command_line import fail
from pinlaterd.cli.rendering import NUMBER_COLUMN, print_json, print_table, printable, waiting
from pinlaterd.config.layout import ETC
from pinlaterd.config.load import ConfigFiles
from pinlaterd.errors import ConnectionFailed
from pinlaterd.lifecycle import ExitCode

_WARNING = "warning"  # a fact whose name ends so is listed among the warnings
_MAX_LINE_CHARS = 2000

Status = Mapping[str, Any]  # the body of /status.json


def fetch() -> Status:
    """Raises ConnectionFailed."""
    [found] = options.ask_coordinator("/status.json")
    return cast("Status", found)


def _is_well(status: Status) -> bool:
    return bool(status["healthy"])


def report(status: Status, *, as_json: bool) -> None:
    """Print it, and end the program with exit 1 if a router or shard does not serve."""
    if as_json:
        print_json(status)
    else:
        _show(status)
    if not _is_well(status):
        sys.exit(ExitCode.FAILURE)


def _show(status: Status) -> None:
    health = "healthy" if _is_well(status) else "NOT healthy"
    click.echo(
        f"pinlaterd {status['version']} in {printable(status['deployment'])}: {health}, "
        f"Thrift {status['thrift']}, statistics {status['stats']}"
    )
    click.echo()
    print_table(
        (
            "process",
            "state",
            f"{NUMBER_COLUMN}pid",
            f"{NUMBER_COLUMN}up",
            f"{NUMBER_COLUMN}cpu s",
            f"{NUMBER_COLUMN}rss MB",
            "facts",
        ),
        [_process_row(process) for process in status["processes"]],
    )
    click.echo()
    print_table(("shard", "engine", "state", "enqueues"), [_shard_row(s) for s in status["shards"]])
    _show_list("Problems", status["problems"])
    _show_list("Problems of the configuration", status["config_problems"])
    _show_list("Changes that need a restart", status["needs_restart"])
    _show_list("Warnings", status["warnings"])


def _process_row(process: Mapping[str, Any]) -> Sequence[object]:
    facts = process["facts"].items()
    return (
        process["name"],
        process["state"],
        process["pid"] or "-",
        _duration(process["uptime_seconds"]),
        f"{process['cpu_seconds']:.1f}",
        f"{process['rss_bytes'] / 1_000_000:.0f}",
        ", ".join(f"{key} {text}" for key, text in facts if text and not key.endswith(_WARNING)),
    )


def _shard_row(shard: Mapping[str, Any]) -> Sequence[object]:
    takes = "no (dequeue-only)" if shard["dequeue_only"] else "yes"
    return shard["name"], shard["engine"], shard["state"], takes


def _show_list(title: str, lines: Sequence[str]) -> None:
    if lines:
        click.echo(f"\n{title}:")
        for line in lines:
            click.echo(f"  {printable(line, _MAX_LINE_CHARS)}")


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


_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.05
_DOWN = ("stopped", "silent")  # a frozen router is held off by the shards, which refuse by then
_MAX_LINE_CHARS = 2000


class ConfigProblem(NamedTuple):
    """What the coordinator has against the files."""

    text: str
    shard: str | None = None  # whose removal it refuses; None: it is about the files as a whole


def wait_until_followed() -> Sequence[ConfigProblem] | None:
    """Until every process follows etc/ as it is now; the coordinator's problems with the files.

    None if the coordinator is away: then what was written acts when it is back. Ends the program
    with a message if it takes too long."""
    try:
        with waiting("waiting until the service follows"):
            return _wait(time.monotonic() + _PATIENCE_SECONDS)
    except ConnectionFailed:
        return None


def say_when_followed(done: str, *, was_changed: bool) -> bool:
    """Wait, and tell that `done` is so; False if it is not yet. Fails if it was refused."""
    return tell(done, wait_until_followed(), was_changed=was_changed)


def tell(done: str, problems: Sequence[ConfigProblem] | None, *, was_changed: bool) -> bool:
    """Tell what came of it: as `say_when_followed`, with what `wait_until_followed` returned."""
    if problems is None:
        click.echo(
            f"{done}: it is written, and acts when the coordinator is back; `pinlaterd status` "
            "shows how the service is",
            err=True,
        )
        return False
    against = what_concerns(None, problems)
    if against:
        fail(shown(against))
    for problem in problems:
        click.echo(f"warning: {shown([problem])}", err=True)
    click.echo(f"{done}{'' if was_changed else ' already'}", err=True)
    return True


def what_concerns(shard: str | None, problems: Sequence[ConfigProblem]) -> Sequence[ConfigProblem]:
    """Those of the coordinator's problems that keep an edit from acting: all but the refused
    removals of other shards than `shard`. None: the edit removes none."""
    return [problem for problem in problems if problem.shard in (None, shard)]


def shown(problems: Sequence[ConfigProblem]) -> str:
    return "; ".join(printable(problem.text, _MAX_LINE_CHARS) for problem in problems)


def _wait(until: float) -> Sequence[ConfigProblem]:
    while True:
        status = fetch()
        if status["config_judged"] == ConfigFiles(options.directory() / ETC).digest:
            late = _late(status)
            if not late:
                shards = {text: name for name, text in status["refused_removals"].items()}
                return [ConfigProblem(text, shards.get(text)) for text in status["config_problems"]]
            waits_for = f"{', '.join(late)} has not followed"
        else:
            waits_for = "the coordinator has not carried it out"
        if time.monotonic() >= until:
            fail(
                f"what was written does not act after {_PATIENCE_SECONDS:.0f} s: {waits_for}; "
                "see `pinlater-admin status` and run/log"
            )
        time.sleep(_POLL_SECONDS)


def _late(status: Mapping[str, Any]) -> list[str]:
    return [
        process["name"]
        for process in status["processes"]
        if process["kind"] in ("router", "shard")
        and process["state"] not in _DOWN
        and process["config_version"] < status["config_version"]
    ]
