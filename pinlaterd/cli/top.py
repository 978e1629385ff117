"""`pinlater-admin top`: what a service does right now, frame after frame.

On a terminal it takes the alternate screen until q or Ctrl-C; a frame that is higher than the
screen shows the busiest. In a pipe it is one frame of tables. Rates and percentiles are of the time
between two samples of the figures of all processes; the rest is as the later one has it.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

import click

from pinlaterd.cli import command, service_status
from pinlaterd.config.layout import shard_program
from pinlaterd.errors import ConnectionFailed
from pinlaterd.stats import HistogramData, StatsSnapshot, empty, merge
from pinlaterd.stats.histogram import percentiles
from pinlaterd.stats.registry import since

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_SECONDS = 1.0  # between two samples; figures are no fresher
_QUIT = (b"q", b"Q", b"\x04", b"")  # the last: the terminal has gone
_MAX_NOTE_CHARS = 300
_ENDED_BADLY = ("ack_failed", "timeout_retry", "timeout_done")


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
    before = service_status.take_sample()
    time.sleep(_SECONDS)
    found = frame(before, service_status.take_sample())
    command.show(found, lambda: _print(found))


# --- frames -----------------------------------------------------------------------------------


def frame(before: service_status.Sample, now: service_status.Sample) -> command.Facts:
    seconds = max(now.at - before.at, 1e-3)
    recent = {name: since(before.stats.get(name, empty()), s) for name, s in now.stats.items()}
    figures = merge(recent.values())
    used = {process["pid"]: process["cpu_seconds"] for process in before.status["processes"]}
    return {
        "seconds": round(seconds, 3),
        "healthy": bool(now.status["healthy"]),
        "problems": now.status["problems"],
        "warnings": now.status["warnings"],
        "queues": [
            _queue(queue, figures, seconds) for queue in service_status.queue_names(figures)
        ],
        "shards": [
            {**shard, **_commits(recent.get(shard_program(shard["name"]), empty()), seconds)}
            for shard in service_status.shards_of(now)
        ],
        "processes": [_process(process, used, seconds) for process in now.status["processes"]],
    }


def _queue(queue: str, recent: StatsSnapshot, seconds: float) -> command.Facts:
    counters, gauges = recent["counters"], recent["gauges"]
    scheduled = round(gauges.get(f"{queue}_scheduled", 0))

    def per_second(*names: str) -> float:
        return round(sum(counters.get(f"{queue}_{name}", 0) for name in names) / seconds, 2)

    return {
        "name": queue,
        "enqueues_per_second": per_second("enqueue"),
        "dequeues_per_second": per_second("dequeue"),
        "acks_per_second": per_second("ack_succeeded"),
        "failures_per_second": per_second(*_ENDED_BADLY),  # attempts
        "limited_per_second": per_second("dequeue_requests_rate_limited"),
        "jobs_per_second_limit": gauges.get(f"{queue}_rate_limit"),
        "pending": max(0, round(gauges.get(f"{queue}_pending", 0)) - scheduled),  # due by now
        "scheduled": scheduled,
        "in_progress": round(gauges.get(f"{queue}_in_progress", 0)),
        "oldest_ready_age_ms": recent["peaks"].get(f"{queue}{service_status.QUEUE_AGE}", 0),
        "dequeue_delay_p99_ms": _p99(recent["histograms"].get(f"{queue}_dequeue_delay_ms")),
    }


def _commits(recent: StatsSnapshot, seconds: float) -> command.Facts:
    """Of a shard."""
    batches = recent["histograms"].get("shard_batch_jobs")
    commits = recent["histograms"].get("shard_commit_ms")
    jobs = batches["sum"] if batches is not None else 0.0
    count = commits["count"] if commits is not None else 0
    return {
        "jobs_per_second": round(jobs / seconds, 2),
        "commits_per_second": round(count / seconds, 2),
        "jobs_per_commit": round(jobs / count, 2) if count else None,
        "commit_p99_ms": _p99(commits),
    }


def _process(process: command.Facts, used: Mapping[int, float], seconds: float) -> command.Facts:
    """`used`: CPU seconds before, by pid."""
    cpu_seconds = process["cpu_seconds"] - used.get(process["pid"], process["cpu_seconds"])
    return {
        "name": process["name"],
        "state": process["state"],
        "pid": process["pid"],
        "cpu_percent": round(max(0.0, cpu_seconds) / seconds * 100, 1),  # of one core
        "rss_bytes": process["rss_bytes"],
    }


def _p99(data: HistogramData | None) -> float | None:
    """None if nothing was measured."""
    if data is None or not data["count"]:
        return None
    return round(percentiles(data, (0.99,))[0], 3)


# --- tables -----------------------------------------------------------------------------------


def _rate(key: str) -> Callable[[command.Facts], str]:
    return lambda row: _shown_rate(row[key])


def _shown_rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 or per_second == 0 else f"{per_second:.1f}"


def _age(key: str) -> Callable[[command.Facts], str]:
    return lambda row: _shown_age(row[key])


def _shown_age(ms: float | None) -> str:
    if ms is None:
        return "-"
    seconds = ms / 1000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    if ms == 0 or ms >= 10_000:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if ms >= 1000 else f"{ms:.1f} ms"


def _number(key: str, form: str = ",") -> Callable[[command.Facts], str]:
    return lambda row: "-" if row[key] is None else format(row[key], form)


def _held(state: str) -> Callable[[command.Facts], str]:
    return lambda shard: "-" if shard["jobs"] is None else _number(state)(shard["jobs"])


_QUEUE_COLUMNS: Sequence[command.Column] = (
    ("queue", itemgetter("name")),
    ("#enqueue/s", _rate("enqueues_per_second")),
    ("#dequeue/s", _rate("dequeues_per_second")),
    ("#ack/s", _rate("acks_per_second")),
    ("#failed/s", _rate("failures_per_second")),
    ("#pending", _number("pending")),
    ("#scheduled", _number("scheduled")),
    ("#running", _number("in_progress")),
    ("#oldest", _age("oldest_ready_age_ms")),
    ("#p99 delay", _age("dequeue_delay_p99_ms")),
    ("#limit/s", _number("jobs_per_second_limit", "g")),
    ("#limited/s", _rate("limited_per_second")),
)
_SHARD_COLUMNS: Sequence[command.Column] = (
    ("shard", itemgetter("name")),
    ("state", service_status.shown_state),
    ("enqueues", lambda shard: "no" if shard["dequeue_only"] else "yes"),
    ("#jobs/s", _rate("jobs_per_second")),
    ("#commits/s", _rate("commits_per_second")),
    ("#jobs/commit", _number("jobs_per_commit", ",.1f")),
    ("#p99 commit", _age("commit_p99_ms")),
    ("#pending", _held("pending")),
    ("#scheduled", _held("scheduled")),
    ("#running", _held("in_progress")),
)
_PROCESS_COLUMNS: Sequence[command.Column] = (
    ("process", itemgetter("name")),
    ("state", itemgetter("state")),
    ("#pid", lambda process: process["pid"] or "-"),
    ("#cpu %", _number("cpu_percent", ".1f")),
    ("#rss MB", lambda process: f"{process['rss_bytes'] / 1_000_000:.0f}"),
)


def _print(found: command.Facts) -> None:
    click.echo(_headline(found))
    for note in (*found["problems"], *found["warnings"]):
        click.echo(f"  {command.printable(note, _MAX_NOTE_CHARS)}")
    tables: Iterable[tuple[Sequence[command.Column], Sequence[object]]] = (
        (_QUEUE_COLUMNS, found["queues"]),
        (_SHARD_COLUMNS, found["shards"]),
        (_PROCESS_COLUMNS, found["processes"]),
    )
    for columns, rows in tables:
        click.echo()
        command.print_table(columns, rows)


def _headline(found: command.Facts) -> str:
    enqueued = sum(queue["enqueues_per_second"] for queue in found["queues"])
    dequeued = sum(queue["dequeues_per_second"] for queue in found["queues"])
    health = "healthy" if found["healthy"] else "NOT healthy"
    return (
        f"{health}; {_shown_rate(enqueued)} jobs/s in, {_shown_rate(dequeued)} jobs/s out, "
        f"over {found['seconds']:.1f} s"
    )


# --- frame after frame ----------------------------------------------------------------------


def _show_live() -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    before = (
        service_status.take_sample()
    )  # who asks for a service that is not there is told on the plain screen
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
                now = service_status.take_sample()
            except ConnectionFailed as error:
                shown: RenderableType = Text(
                    command.printable(str(error), _MAX_NOTE_CHARS), style="red"
                )
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


def _screen(found: command.Facts, height: int) -> RenderableType:
    """As much of a frame as `height` lines hold: the busiest queues and shards first."""
    from rich.console import Group
    from rich.text import Text

    notes = [*found["problems"], *found["warnings"]][: max(0, height // 6)]
    shards = sorted(found["shards"], key=lambda shard: (-shard["jobs_per_second"], shard["name"]))
    queues = sorted(found["queues"], key=_queue_busyness)
    room = height - len(notes) - 8  # headline, keys, three lines of titles and three between
    process_room = min(len(found["processes"]), max(2, room // 4))
    shard_room = min(len(shards), max(2, (room - process_room) // 2))
    queue_room = max(1, room - process_room - shard_room)
    health = Text(_headline(found), style="green" if found["healthy"] else "bold red")
    return Group(
        health.append("   q ends", style="dim"),
        *(Text(command.printable(note, _MAX_NOTE_CHARS), style="yellow") for note in notes),
        Text(),
        _part(_QUEUE_COLUMNS, queues, queue_room),
        Text(),
        _part(_SHARD_COLUMNS, shards, shard_room),
        Text(),
        _part(_PROCESS_COLUMNS, found["processes"], process_room),
    )


def _part(columns: Sequence[command.Column], rows: Sequence[object], room: int) -> Table:
    """A table of at most `room` rows; the last says how many are not shown."""
    shown = rows if len(rows) <= room else rows[: room - 1]
    return command.make_table(columns, shown, wrap=False, left_out=len(rows) - len(shown))


def _queue_busyness(queue: command.Facts) -> tuple[float, int, str]:
    moved = queue["enqueues_per_second"] + queue["dequeues_per_second"]
    return -moved, -queue["pending"], queue["name"]
