"""`pinlater-admin restart …`: processes started anew while the service goes on.

A command line, so it may rely on `deployment`, which lies above; nothing imports it but `main`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status

from pinlaterd.cli import options
from pinlaterd.cli.command_line import fail
from pinlaterd.deployment import restarts
from pinlaterd.errors import DeploymentError

_Carry = Callable[[Path, Callable[[str], None]], Sequence[restarts.Restarted]]


@click.group()
def restart() -> None:
    """Start processes anew, with what is installed now, at no client's cost."""


@restart.command()
@options.json_option
@options.target_options
def router(*, as_json: bool) -> None:
    """Restart the routers, one after the other.

    A second router serves beside each while that one is restarted, on the same listening socket: no
    connection is refused. Exit 1 if the new one does not come up; then the old one goes on.

    \b
    Example:
      pinlater-admin restart router
    """
    _carry_out(restarts.restart_routers, as_json=as_json)


@restart.command()
@click.argument("name", metavar="NAME|all")
@options.json_option
@options.target_options
def shard(*, name: str, as_json: bool) -> None:
    """Restart a shard, or all shards, one after the other.

    Calls that need it wait meanwhile, for shard_restart_grace_ms at most.

    \b
    Examples:
      pinlater-admin restart shard 1
      pinlater-admin restart shard all
    """
    _carry_out(
        lambda directory, tell: restarts.restart_shards(directory, name, tell), as_json=as_json
    )


@restart.command()
@options.json_option
@options.target_options
def coordinator(*, as_json: bool) -> None:
    """Restart the coordinator. Calls go on without it.

    \b
    Example:
      pinlater-admin restart coordinator
    """
    _carry_out(restarts.restart_coordinator, as_json=as_json)


def _carry_out(carry: _Carry, *, as_json: bool) -> None:
    try:
        with Console(stderr=True).status("restarting") as shown:  # on a terminal only
            done = carry(options.directory(), _teller(shown))
    except DeploymentError as error:
        fail(str(error))
    if as_json:
        click.echo(json.dumps([one._asdict() for one in done]))
        return
    for one in done:
        click.echo(f"{one.program} is restarted, pid {one.pid}, in {one.seconds:.1f} s")


def _teller(shown: Status) -> Callable[[str], None]:
    return lambda text: shown.update(f"{text} …")
