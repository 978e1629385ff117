"""The status of the service (pinlaterd.status) as text: once, and frame after frame.

On a terminal `top` takes the alternate screen until q or Ctrl-C; a frame that is higher than the
screen shows the busiest. In a pipe it is one frame of tables.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pinlaterd.cli import command
from pinlaterd.errors import ConnectionFailed
from pinlaterd.lifecycle import ExitCode
from pinlaterd.stats import natural
from pinlaterd.status import Facts, Sample, Status, shards_of, worst_first

if TYPE_CHECKING:
    from rich.console import RenderableType

_WARNING = "warning"  # a fact whose name ends so is listed among the warnings

_SECONDS = 1.0  # between two frames of `top`; figures are no fresher
_QUIT = (b"q", b"Q", b"\x04", b"")  # the last: the terminal has gone
_MAX_NOTE_CHARS = 300


def fetch(*, whole: bool = False) -> Status:
    """Fetch the status of this server, or of the `whole` cluster. Raises ConnectionFailed."""
    from pinlaterd.client.coordinator import ALL_SERVERS, fetch_json

    page = f"/status.json{ALL_SERVERS if whole else ''}"
    found: Status = fetch_json(page, directory=command.directory(), url=command.stats_url())
    return found


def take_sample() -> Sample:
    """Take a sample of all servers. Raises ConnectionFailed."""
    from pinlaterd.client import coordinator

    return coordinator.take_sample(command.directory(), command.stats_url())


def take_frame() -> Facts:
    """Take what has happened on all servers in the last seconds. Raises ConnectionFailed."""
    from pinlaterd.client import coordinator

    return coordinator.take_frame(command.directory(), command.stats_url())


def take_workers() -> Facts:
    """Fetch the sources that call for jobs. Raises ConnectionFailed."""
    from pinlaterd.client.coordinator import fetch_json

    directory, url = command.directory(), command.stats_url()
    found: Facts = fetch_json("/workers.json", directory=directory, url=url)
    return found


def find_shard(name: str) -> Facts | None:
    """Find a shard; None if it is not part of the service. Raises ConnectionFailed."""
    return next((shard for shard in shards_of(take_sample()) if shard["name"] == name), None)


def report(status: Status) -> None:
    """Print it, and end the program with exit 1 if a router or shard does not serve."""
    command.show(status, lambda: _print_status(status))
    if not status["healthy"]:
        sys.exit(ExitCode.FAILURE)


def enqueues(shard: Facts) -> str:
    """Say whether a shard gets jobs, and if not, why."""
    if shard["dequeue_only"]:
        return "no (dequeue-only)"
    return "no (degraded)" if shard["degraded"] else "yes"


def shown_state(shard: Facts) -> str:
    return f"{shard['state']}, degraded" if shard["degraded"] else shard["state"]


def _health(found: Mapping[str, Any]) -> str:
    """Say how the service is, by its status or a frame."""
    if not found["healthy"]:
        return "NOT healthy"
    return "degraded" if any(shard["degraded"] for shard in found["shards"]) else "healthy"


def _pid(process: Facts) -> object:
    return process["pid"] or "-"


def _rss_mb(process: Facts) -> str:
    return f"{process['rss_bytes'] / 1_000_000:.0f}"


def held(state: str, form: str = "") -> Callable[[Facts], str]:
    """Return a column's function that shows how many jobs in a state a shard has."""
    return lambda shard: "-" if shard["jobs"] is None else format(shard["jobs"][state], form)


_STATUS_COLUMNS: Sequence[command.Column] = (
    ("process", "name"),
    ("state", "state"),
    ("#pid", _pid),
    ("#up", lambda process: _duration(process["uptime_seconds"])),
    ("#cpu s", lambda process: f"{process['cpu_seconds']:.1f}"),
    ("#rss MB", _rss_mb),
    ("facts", lambda process: _facts(process["facts"])),
)
_STATUS_SHARD_COLUMNS: Sequence[command.Column] = (
    ("shard", "name"),
    ("engine", "engine"),
    ("state", shown_state),
    ("enqueues", enqueues),
)
SERVER_COLUMNS: Sequence[command.Column] = (
    ("server", lambda server: f"{server['name']}{' (leads)' if server['leads'] else ''}"),
    ("state", "state"),
    ("maintenance", lambda server: "on" if server["maintenance"] else "off"),
    ("Thrift", lambda server: server["thrift"] or "-"),
    ("version", lambda server: server["version"] or "-"),
    ("shards", lambda server: ", ".join(server["shards"]) or "-"),
)


def _print_status(status: Status) -> None:
    click.echo(
        f"pinlaterd {status['version']} in {command.printable(status['deployment'])}: "
        f"{_health(status)}, "
        f"Thrift {status['thrift']}, statistics {status['stats']}"
    )
    click.echo()
    command.print_table(_STATUS_COLUMNS, status["processes"])
    click.echo()
    command.print_table(_STATUS_SHARD_COLUMNS, status["shards"])
    if status["servers"]:
        click.echo()
        command.print_table(SERVER_COLUMNS, status["servers"])
    for title, lines in (
        ("Problems", status["problems"]),
        ("Problems of the configuration", status["config_problems"]),
        ("Changes that need a restart", status["needs_restart"]),
        ("Warnings", status["warnings"]),
    ):
        if lines:
            click.echo(f"\n{title}:")
        for line in lines:
            click.echo(f"  {command.printable_line(line)}")


def _facts(facts: Mapping[str, str]) -> str:
    shown = (f"{key} {text}" for key, text in facts.items() if text and not key.endswith(_WARNING))
    return ", ".join(shown)


def _duration(seconds: float) -> str:
    """Write the two largest units: 3 d 4 h, 12 min 5 s; below 10 s with a fraction."""
    whole = int(seconds)
    if 0 < seconds < 10:
        return f"{seconds:.1f} s" if whole else f"{seconds * 1000:.1f} ms"
    for unit, size, smaller, smaller_size in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller_size} {smaller}"
    return f"{whole} s"


# --- top --------------------------------------------------------------------------------


@click.command(cls=command.Command)
@click.option("--once", is_flag=True, help="Print one frame and end, as in a pipe.")
@command.files_options
def top(*, once: bool) -> None:
    """Show what each queue, shard and process does, once a second, until q or Ctrl-C.

    Examples:
      pinlater-admin top
      pinlater-admin top --once
      pinlater-admin top --json | jq '.queues[] | {name, pending}'
    """
    if not (once or command.wants_json()) and sys.stdout.isatty():
        _show_live()
        return
    found = take_frame()
    command.show(found, lambda: _print_frame(found))


# --- tables -----------------------------------------------------------------------------------


def _shown(key: str, form: str = ",.1f") -> Callable[[Facts], str]:
    return lambda row: "-" if row[key] is None else format(row[key], form)


def _age(key: str) -> Callable[[Facts], str]:
    return lambda row: "-" if row[key] is None else _duration(row[key] / 1000)


def _at_least(shown: Callable[[Facts], str]) -> Callable[[Facts], str]:
    """Mark what is known of a queue's jobs as a lower bound where the jobs of a shard are not."""

    def bounded(row: Facts) -> str:
        figure = shown(row)
        return f">={figure}" if row["missing_shards"] and figure != "-" else figure

    return bounded


_QUEUE_COLUMNS: Sequence[command.Column] = (
    ("queue", "name"),
    ("#enqueue/s", _shown("enqueues_per_second")),
    ("#dequeue/s", _shown("dequeues_per_second")),
    ("#ack/s", _shown("acks_per_second")),
    ("#failed/s", _shown("failures_per_second")),
    ("#pending", _at_least(_shown("pending", ","))),
    ("#scheduled", _at_least(_shown("scheduled", ","))),
    ("#running", _at_least(_shown("in_progress", ","))),
    ("#held", _at_least(_shown("held_by_limit", ","))),
    ("#oldest", _at_least(_age("oldest_ready_age_ms"))),
    ("#p99 delay", _age("dequeue_delay_p99_ms")),
    ("#limit/s", _shown("jobs_per_second_limit", "g")),
    ("#limited/s", _shown("limited_per_second")),
    ("verdict", lambda queue: queue["verdict"]["text"]),
)
LIST_COLUMNS: Sequence[command.Column] = [
    column
    for column in _QUEUE_COLUMNS
    if column[0] in ("queue", "#pending", "#scheduled", "#running", "#oldest", "verdict")
]
_SHARD_COLUMNS: Sequence[command.Column] = (
    ("shard", "name"),
    ("state", shown_state),
    ("enqueues", lambda shard: enqueues(shard).partition(" ")[0]),
    ("#jobs/s", _shown("jobs_per_second")),
    ("#commits/s", _shown("commits_per_second")),
    ("#jobs/commit", _shown("jobs_per_commit")),
    ("#p99 commit", _age("commit_p99_ms")),
    ("#pending", held("pending", ",")),
    ("#scheduled", held("scheduled", ",")),
    ("#running", held("in_progress", ",")),
)
_PROCESS_COLUMNS: Sequence[command.Column] = (
    ("process", "name"),
    ("state", "state"),
    ("#pid", _pid),
    ("#cpu %", _shown("cpu_percent", ".1f")),
    ("#rss MB", _rss_mb),
)


def _seconds(key: str) -> Callable[[Facts], str]:
    return lambda row: "-" if row[key] is None else _duration(row[key])


WORKER_COLUMNS: Sequence[command.Column] = (
    ("queue", "queue"),
    ("source", "source"),
    ("#dequeue", _seconds("dequeue_seconds")),
    ("#ack", _seconds("ack_seconds")),
    ("#jobs/s", _shown("jobs_per_second")),
    ("#failed", _shown("failed_share", ".1%")),
    ("#held", _shown("held", ",")),
    ("#oldest renewal", _seconds("oldest_renewal_seconds")),
    ("#near time-out", _shown("near_time_out", ",")),
)


def _print_frame(found: Facts) -> None:
    click.echo(_headline(found))
    for note in (*found["problems"], *found["warnings"]):
        click.echo(f"  {command.printable(note, _MAX_NOTE_CHARS)}")
    for columns, rows in (
        (_QUEUE_COLUMNS, found["queues"]),
        (_SHARD_COLUMNS, found["shards"]),
        (_PROCESS_COLUMNS, found["processes"]),
    ):
        click.echo()
        command.print_table(columns, rows)


def _headline(found: Facts) -> str:
    enqueued = sum(queue["enqueues_per_second"] for queue in found["queues"])
    dequeued = sum(queue["dequeues_per_second"] for queue in found["queues"])
    return (
        f"{_health(found)}; {enqueued:,.1f} jobs/s in, {dequeued:,.1f} jobs/s out, "
        f"over {found['seconds']:.1f} s"
    )


# --- frame after frame ----------------------------------------------------------------------


def _show_live() -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    # A service that is away is reported on the plain screen.
    shown: RenderableType = _screen(take_frame(), console.height)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _single_keys() as keys,
        Live(shown, console=console, screen=True, auto_refresh=False) as live,
    ):
        while not _quits_within(_SECONDS, keys):
            try:
                found = take_frame()
            except ConnectionFailed as error:
                shown = Text(command.printable(str(error), _MAX_NOTE_CHARS), style="red")
            else:
                shown = _screen(found, console.height)
            live.update(shown, refresh=True)


@contextlib.contextmanager
def _single_keys() -> Iterator[Sequence[int]]:
    """Have the terminal, if there is one, tell each key as it is pressed, unseen; yields it."""
    if not sys.stdin.isatty():
        yield ()
        return
    terminal = sys.stdin.fileno()
    settings = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)  # Ctrl-C is a signal still
    try:
        yield (terminal,)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)


def _quits_within(seconds: float, keys: Sequence[int]) -> bool:
    """Wait so long; whether a key that ends was pressed."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        readable, _, _ = select.select(keys, (), (), left)
        if readable and os.read(readable[0], 1) in _QUIT:
            return True
    return False


def _screen(found: Facts, height: int) -> RenderableType:
    """Lay out what of a frame `height` lines hold: the busiest queues and shards first."""
    from rich.console import Group
    from rich.text import Text

    notes = [*found["problems"], *found["warnings"]][: height // 6]
    headline = Text(_headline(found), style="green" if found["healthy"] else "bold red")
    shown: list[RenderableType] = [headline.append("   q ends", style="dim")]
    shown += [Text(command.printable(note, _MAX_NOTE_CHARS), style="yellow") for note in notes]
    room = height - len(notes) - 8  # headline, three lines of titles and three between
    for columns, rows, part in (
        (_QUEUE_COLUMNS, worst_first(sorted(found["queues"], key=_queue_busyness)), 2),
        (_SHARD_COLUMNS, sorted(found["shards"], key=lambda one: -one["jobs_per_second"]), 4),
        (_PROCESS_COLUMNS, found["processes"], 4),
    ):
        table = command.make_table(columns, rows, wrap=False, most=max(2, room // part))
        shown += (Text(), table)
    return Group(*shown)


def _queue_busyness(queue: Facts) -> tuple[float, int, str]:
    moved = queue["enqueues_per_second"] + queue["dequeues_per_second"]
    return -moved, -(queue["pending"] or 0), natural(queue["name"])
