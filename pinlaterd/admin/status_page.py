"""What the coordinator says of the service, on one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from pinlaterd.admin import stats_page, target
from pinlaterd.admin.tables import NUMBER_COLUMN, print_table
from pinlaterd.client.cli import printable

_WARNING = "warning"  # a fact whose name ends so is listed among the warnings
_MAX_LINE_CHARS = 2000

Status = Mapping[str, Any]  # the body of /status.json


def fetch() -> Status:
    """Raises ConnectionFailed."""
    found: Status = stats_page.fetch_json(
        "/status.json", directory=target.directory(), url=target.stats_url()
    )
    return found


def is_well(status: Status) -> bool:
    return bool(status["healthy"])


def show(status: Status) -> None:
    health = "healthy" if is_well(status) else "NOT healthy"
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
