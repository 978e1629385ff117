"""`pinlater-admin top`: what a service does right now, frame after frame.

On a terminal it takes the alternate screen until q or Ctrl-C; a frame that is higher than the
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
from collections.abc import Callable, Iterator, Sequence

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pinlaterd.cli import options
from pinlaterd.cli.frames import Frame, ProcessFrame, QueueFrame, ShardFrame, frame, take_sample
from pinlaterd.cli.rendering import make_table, print_json, print_table, printable
from pinlaterd.errors import ConnectionFailed

_SECONDS = 1.0  # between two samples; figures are no fresher
_QUIT = (b"q", b"Q", b"\x04", b"")  # the last: the terminal has gone
_MAX_LINE_CHARS = 300

_QUEUE_COLUMNS = (
    "queue",
    "#enqueue/s",
    "#dequeue/s",
    "#ack/s",
    "#failed/s",
    "#pending",
    "#scheduled",
    "#running",
    "#oldest",
    "#p99 delay",
    "#limit/s",
    "#limited/s",
)
_SHARD_COLUMNS = (
    "shard",
    "state",
    "enqueues",
    "#jobs/s",
    "#commits/s",
    "#jobs/commit",
    "#p99 commit",
    "#pending",
    "#scheduled",
    "#running",
)
_PROCESS_COLUMNS = ("process", "state", "#pid", "#cpu %", "#rss MB")


@click.command()
@click.option("--once", is_flag=True, help="Print one frame and end, as in a pipe.")
@click.option("--json", "as_json", is_flag=True, help="Print one frame as JSON.")
@options.deployment_options
def top(*, once: bool, as_json: bool) -> None:
    """Show what each queue, shard and process does, once a second, until q or Ctrl-C.

    \b
    Examples:
      pinlater-admin top
      pinlater-admin top --once
      pinlater-admin top --json | jq '.queues[] | {name, pending}'
    """
    if as_json:
        print_json(_first_frame())
    elif once or not sys.stdout.isatty():
        _print(_first_frame())
    else:
        _show_live()


def _first_frame() -> Frame:
    before = take_sample()
    time.sleep(_SECONDS)
    return frame(before, take_sample())


# --- one frame ------------------------------------------------------------------------------


def _print(found: Frame) -> None:
    click.echo(_headline(found))
    for problem in (*found["problems"], *found["warnings"]):
        click.echo(f"  {printable(problem, _MAX_LINE_CHARS)}")
    for columns, rows in (
        (_QUEUE_COLUMNS, [_queue_row(queue) for queue in found["queues"]]),
        (_SHARD_COLUMNS, [_shard_row(shard) for shard in found["shards"]]),
        (_PROCESS_COLUMNS, [_process_row(process) for process in found["processes"]]),
    ):
        click.echo()
        print_table(columns, rows)


def _headline(found: Frame) -> str:
    enqueued = sum(queue["enqueues_per_second"] for queue in found["queues"])
    dequeued = sum(queue["dequeues_per_second"] for queue in found["queues"])
    health = "healthy" if found["healthy"] else "NOT healthy"
    return (
        f"{health}; {_rate(enqueued)} jobs/s in, {_rate(dequeued)} jobs/s out, "
        f"over {found['seconds']:.1f} s"
    )


def _queue_row(queue: QueueFrame) -> Sequence[str]:
    limit = queue["jobs_per_second_limit"]
    return (
        queue["name"],
        _rate(queue["enqueues_per_second"]),
        _rate(queue["dequeues_per_second"]),
        _rate(queue["acks_per_second"]),
        _rate(queue["failures_per_second"]),
        f"{queue['pending']:,}",
        f"{queue['scheduled']:,}",
        f"{queue['in_progress']:,}",
        _age(queue["oldest_ready_age_ms"]),
        _age(queue["dequeue_delay_p99_ms"]),
        "-" if limit is None else f"{limit:g}",
        _rate(queue["limited_per_second"]),
    )


def _shard_row(shard: ShardFrame) -> Sequence[str]:
    per_commit, jobs = shard["jobs_per_commit"], shard["jobs"]
    held = (
        ("-", "-", "-")
        if jobs is None
        else (f"{jobs['pending']:,}", f"{jobs['scheduled']:,}", f"{jobs['in_progress']:,}")
    )
    return (
        shard["name"],
        f"{shard['state']}, degraded" if shard["ailing"] else shard["state"],
        "no" if shard["dequeue_only"] else "yes",
        _rate(shard["jobs_per_second"]),
        _rate(shard["commits_per_second"]),
        "-" if per_commit is None else f"{per_commit:,.1f}",
        _age(shard["commit_p99_ms"]),
        *held,
    )


def _process_row(process: ProcessFrame) -> Sequence[str]:
    return (
        process["name"],
        process["state"],
        str(process["pid"] or "-"),
        f"{process['cpu_percent']:.1f}",
        f"{process['rss_bytes'] / 1_000_000:.0f}",
    )


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 or per_second == 0 else f"{per_second:.1f}"


def _age(ms: float | None) -> str:
    if ms is None:
        return "-"
    seconds = ms / 1000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    if ms == 0 or ms >= 10_000:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if ms >= 1000 else f"{ms:.1f} ms"


# --- frame after frame ----------------------------------------------------------------------


def _show_live() -> None:
    before = take_sample()  # who asks for a service that is not there is told on the plain screen
    console = Console(highlight=False)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _quit_key() as quit_within,
        Live(
            Text("measuring for a second…"), console=console, screen=True, auto_refresh=False
        ) as live,
    ):
        while not quit_within(_SECONDS):
            try:
                now = take_sample()
            except ConnectionFailed as error:
                shown: RenderableType = Text(printable(str(error), _MAX_LINE_CHARS), style="red")
            else:
                shown = _screen(frame(before, now), console.height)
                before = now
            live.update(shown, refresh=True)


@contextlib.contextmanager
def _quit_key() -> Iterator[Callable[[float], bool]]:
    """Yields what waits for so many seconds, and tells whether a key that ends was pressed."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    terminal = sys.stdin.fileno()
    settings = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)  # single keys, unseen; Ctrl-C is a signal still
    try:
        yield lambda seconds: _pressed_within(terminal, seconds)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _pressed_within(terminal: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        readable, _, _ = select.select([terminal], [], [], left)
        if readable and os.read(terminal, 1) in _QUIT:
            return True
    return False


def _screen(found: Frame, height: int) -> RenderableType:
    """As much of a frame as `height` lines hold: the busiest queues and shards first."""
    notes = [*found["problems"], *found["warnings"]][: max(0, height // 6)]
    processes = [_process_row(process) for process in found["processes"]]
    shards = [_shard_row(shard) for shard in sorted(found["shards"], key=_shard_busyness)]
    queues = [_queue_row(queue) for queue in sorted(found["queues"], key=_queue_busyness)]
    room = height - len(notes) - 8  # headline, keys, three lines of titles and three between
    process_room = min(len(processes), max(2, room // 4))
    shard_room = min(len(shards), max(2, (room - process_room) // 2))
    queue_room = max(1, room - process_room - shard_room)
    health = Text(_headline(found), style="green" if found["healthy"] else "bold red")
    return Group(
        health.append("   q ends", style="dim"),
        *(Text(printable(note, _MAX_LINE_CHARS), style="yellow") for note in notes),
        Text(),
        _part(_QUEUE_COLUMNS, queues, queue_room),
        Text(),
        _part(_SHARD_COLUMNS, shards, shard_room),
        Text(),
        _part(_PROCESS_COLUMNS, processes, process_room),
    )


def _part(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> Table:
    """A table of at most `room` rows; the last says how many are not shown."""
    if len(rows) > room:
        left = len(rows) - room + 1
        rows = [*rows[: room - 1], (f"… {left} more", *[""] * (len(columns) - 1))]
    return make_table(columns, rows, wrap=False)


def _queue_busyness(queue: QueueFrame) -> tuple[float, int, str]:
    moved = queue["enqueues_per_second"] + queue["dequeues_per_second"]
    return -moved, -queue["pending"], queue["name"]


def _shard_busyness(shard: ShardFrame) -> tuple[float, str]:
    return -shard["jobs_per_second"], shard["name"]
