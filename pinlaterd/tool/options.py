"""Options that several commands of `pinlater` share, and what they accept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from pinlaterd.client.cli import COUNT, HOST, PORT, PRIORITY
from pinlaterd.config.schema import ServerSettings
from pinlaterd.tool.stamps import MIN_BODY_BYTES

_SERVER = ServerSettings()
_MAX_CONCURRENCY = 1000

Command = TypeVar("Command", bound=Callable[..., None])


def together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Several options as one decorator. The last one is listed first."""

    def decorate(command: Command) -> Command:
        return functools.reduce(lambda c, option: option(c), options, command)

    return decorate


port_option = click.option(
    "--port", type=PORT, default=_SERVER.port, show_default=True, help="Thrift port."
)
host_option = click.option(
    "--host", type=HOST, default=_SERVER.host, show_default=True, help="The service's host."
)
service_options = together(
    click.option("--json", "as_json", is_flag=True, help="Print facts as JSON."),
    port_option,
    host_option,
)
queue_option = click.option("--queue", required=True, metavar="NAME", help="The queue.")
priority_option = click.option(
    "--priority", type=PRIORITY, help="Priority of the jobs; 1 is the highest."
)
load_options = together(
    click.option(
        "--progress/--no-progress",
        default=None,
        help="A line a second on stderr  [default: if that is a terminal]",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(1, _MAX_CONCURRENCY),
        default=1,
        show_default=True,
        help="Connections that make calls at the same time.",
    ),
    click.option(
        "--batch-size",
        type=COUNT,
        default=1,
        show_default=True,
        help="Jobs in a call.",
    ),
)
success_option = click.option(
    "--dequeue-success-percent",
    type=click.IntRange(0, 100),
    default=100,
    show_default=True,
    help="So many of the jobs, chosen at random, are acknowledged as succeeded, the rest as "
    "failed.",
)


def num_queries_option(default: int | None, meaning: str) -> Callable[[Command], Command]:
    """`meaning`: of -1, and the default where that is none."""
    return click.option(
        "--num-queries",
        type=click.IntRange(min=-1),
        default=default,
        help=f"Calls to make over all connections; -1: {meaning}",
    )


body_bytes_option = click.option(
    "--body-bytes",
    type=click.IntRange(min=MIN_BODY_BYTES),
    default=200,
    show_default=True,
    help="Size of a made-up body.",
)
