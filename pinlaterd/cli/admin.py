"""The command line `pinlater-admin`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from pinlaterd import __version__
from pinlaterd.cli import options, service_status
from pinlaterd.cli.command_line import CommandLine, fail
from pinlaterd.cli.rendering import print_json, printable, waiting
from pinlaterd.config.layout import ETC
from pinlaterd.config.load import load_config
from pinlaterd.config.password import hash_password
from pinlaterd.deployment.stats_page import CoordinatorAway
from pinlaterd.errors import ConfigError, ConnectionFailed, DeploymentError
from pinlaterd.lifecycle import ExitCode
from pinlaterd.wording import how_many

if TYPE_CHECKING:
    from pinlaterd.deployment.restarts import Restarted

_Carry = Callable[[Path, Callable[[str], None]], "Sequence[Restarted]"]

# By name, the modules that are imported on first use: all of them take half a second.
_MODULES = {
    "job": ("jobs",),
    "queue": ("queues",),
    "shard": ("shards", "drain", "failover"),  # the first one has the group
    "top": ("top",),
}


class _AdminCommandLine(CommandLine):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_MODULES])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return super().get_command(ctx, cmd_name)
        module, *_ = [import_module(f"pinlaterd.cli.{name}") for name in _MODULES[cmd_name]]
        return cast("click.Command", getattr(module, cmd_name))

    def cure_of(self, error: ConnectionFailed) -> str:
        return error.cure if isinstance(error, CoordinatorAway) else super().cure_of(error)


@click.group("pinlater-admin", cls=_AdminCommandLine, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="pinlater-admin")
@options.target_options
def cli() -> None:
    """Look at a pinlaterd service, and mend what is in it.

    The service is that of the deployment in the current folder, or in --dir DIR.

    \b
    Examples:
      pinlater-admin status
      pinlater-admin top
      pinlater-admin shard drain 3 --wait
      pinlater-admin queue stats mail
      pinlater-admin job scan mail failed
      pinlater-admin --dir /srv/pinlaterd job retry mail
    """


@cli.group()
def config() -> None:
    """Check the configuration."""


@config.command()
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@options.json_option
@options.target_options
def check(*, directory: Path | None, as_json: bool) -> None:
    """Report every mistake in DIR/etc at once. Exit 1 if there is one.

    Warns of keys of PinLater's JSON that are ignored, and of files with passwords that others can
    read.

    \b
    Example:
      pinlater-admin config check /srv/pinlaterd
    """
    etc = (directory if directory is not None else options.directory()) / ETC
    try:
        found = load_config(etc)
    except ConfigError as error:
        if as_json:
            print_json({"ok": False, "problems": error.problems, "warnings": []})
        else:
            for problem in error.problems:
                click.echo(printable(problem, 2000))
        sys.exit(ExitCode.FAILURE)
    shards, queues = list(found.shards), list(found.queues)
    if as_json:
        facts = {"ok": True, "problems": [], "warnings": list(found.warnings)}
        print_json({**facts, "shards": shards, "queues": queues})
    else:
        for warning in found.warnings:
            click.echo(f"warning: {printable(warning, 2000)}")
        settings = f"settings of {how_many(len(queues), 'queue')}"
        click.echo(f"{etc}: fine; shards {', '.join(shards)}; {settings}")


@cli.command("hash-password")
def hash_password_command() -> None:
    """Print the hash of a password, for admin_password_hash in etc/pinlaterd.yaml.

    The password is asked for on a terminal, without echo; in a pipe it is the first line of
    standard input. It is never an argument, which everyone on the machine could read.

    \b
    Examples:
      pinlater-admin hash-password
      pinlater-admin hash-password < /run/secrets/pinlaterd
    """
    from pinlaterd.cli.queues import read_password  # on first use, as _MODULES

    click.echo(hash_password(read_password("Password", twice=True)))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print what the coordinator knows as JSON.")
@options.target_options
def status(*, as_json: bool) -> None:
    """Show processes, shards, problems and warnings. Exit 1 if a router or shard does not serve.

    What else it shows, such as mistakes in etc/ and warnings, leaves exit 0. Exit 1 also if the
    coordinator does not answer.

    \b
    Examples:
      pinlater-admin status
      pinlater-admin status --json --stats-url http://queue.example.com:9999
    """
    service_status.report(service_status.fetch(), as_json=as_json)


# --- restart ----------------------------------------------------------------------------------


@cli.group()
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
    from pinlaterd.deployment.restarts import restart_routers

    _carry_out(restart_routers, as_json=as_json)


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
    from pinlaterd.deployment.restarts import restart_shards

    _carry_out(lambda directory, tell: restart_shards(directory, name, tell), as_json=as_json)


@restart.command()
@options.json_option
@options.target_options
def coordinator(*, as_json: bool) -> None:
    """Restart the coordinator. Calls go on without it.

    \b
    Example:
      pinlater-admin restart coordinator
    """
    from pinlaterd.deployment.restarts import restart_coordinator

    _carry_out(restart_coordinator, as_json=as_json)


def _carry_out(carry: _Carry, *, as_json: bool) -> None:
    try:
        with waiting("restarting") as shown:
            done = carry(options.directory(), lambda text: shown.update(f"{text} …"))
    except DeploymentError as error:
        fail(str(error))
    if as_json:
        print_json([one._asdict() for one in done])
        return
    for one in done:
        click.echo(f"{one.program} is restarted, pid {one.pid}, in {one.seconds:.1f} s")


if __name__ == "__main__":
    cli(prog_name="pinlater-admin")
