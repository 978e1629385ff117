"""The command line `pinlater-admin`; its larger groups are modules of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pinlaterd import __version__
from pinlaterd.cli import command, service_status
from pinlaterd.config.layout import ETC
from pinlaterd.config.load import load_config
from pinlaterd.config.password import hash_password
from pinlaterd.errors import ConfigError, how_many
from pinlaterd.lifecycle import ExitCode

if TYPE_CHECKING:
    from pinlaterd.deployment.restarts import Restarted


@click.group(
    "pinlater-admin",
    cls=command.CommandLine,
    modules={
        "job": ["queues"],
        "queue": ["queues"],
        "shard": ["shards", "drain", "failover"],
        "top": ["service_status"],
    },
    context_settings=command.WIDTH,
)
@click.version_option(__version__, prog_name="pinlater-admin")
@command.target_options
def cli() -> None:
    """Look at a pinlaterd service, and mend what is in it.

    The service is that of the deployment in the current folder, or in --dir DIR.

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
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@command.admin_options
def check(*, folder: Path | None) -> None:
    """Report every mistake in DIR/etc at once. Exit 1 if there is one.

    Warns of keys of PinLater's JSON that are ignored, and of files with passwords that others can
    read.

    Example: pinlater-admin config check /srv/pinlaterd
    """
    etc = (folder if folder is not None else command.directory()) / ETC
    try:
        found = load_config(etc)
    except ConfigError as error:
        text = "\n".join(map(command.printable_line, error.problems))
        command.show({"ok": False, "problems": error.problems, "warnings": []}, text)
        sys.exit(ExitCode.FAILURE)
    settings = f"settings of {how_many(len(found.queues), 'queue')}"
    lines = [
        *(f"warning: {command.printable_line(warning)}" for warning in found.warnings),
        f"{etc}: fine; shards {', '.join(found.shards)}; {settings}",
    ]
    facts = {"ok": True, "problems": [], "warnings": list(found.warnings)}
    facts |= {"shards": list(found.shards), "queues": list(found.queues)}
    command.show(facts, "\n".join(lines))


@cli.command("hash-password")
def hash_password_command() -> None:
    """Print the hash of a password, for admin_password_hash in etc/pinlaterd.yaml.

    The password is asked for on a terminal, without echo; in a pipe it is the first line of
    standard input. It is never an argument, which everyone on the machine could read.

    Examples:
      pinlater-admin hash-password
      pinlater-admin hash-password < /run/secrets/pinlaterd
    """
    click.echo(hash_password(command.read_password("Password", twice=True)))


@cli.command()
@command.admin_options
def status() -> None:
    """Show processes, shards, problems and warnings. Exit 1 if a router or shard does not serve.

    What else it shows, such as mistakes in etc/ and warnings, leaves exit 0. Exit 1 also if the
    coordinator does not answer.

    Examples:
      pinlater-admin status
      pinlater-admin status --json --stats-url http://queue.example.com:9999
    """
    service_status.report(service_status.fetch())


# --- restart ----------------------------------------------------------------------------------


@cli.group()
def restart() -> None:
    """Restart processes, with what is installed now, at no client's cost."""


@restart.command()
@command.admin_options
def router() -> None:
    """Restart the routers, one after the other.

    A second router serves beside each while that one is restarted, on the same listening socket: no
    connection is refused. Exit 1 if the new one does not come up; then the old one goes on.

    Example: pinlater-admin restart router
    """
    from pinlaterd.deployment.restarts import restart_routers

    _carry_out(restart_routers)


@restart.command()
@click.argument("name", metavar="NAME|all")
@command.admin_options
def shard(*, name: str) -> None:
    """Restart a shard, or all shards, one after the other.

    Calls that need it wait meanwhile, for shard_restart_grace_ms at most.

    Examples:
      pinlater-admin restart shard 1
      pinlater-admin restart shard all
    """
    from pinlaterd.deployment.restarts import restart_shards

    _carry_out(lambda folder, tell: restart_shards(folder, name, tell))


@restart.command()
@command.admin_options
def coordinator() -> None:
    """Restart the coordinator. Calls go on without it.

    Example: pinlater-admin restart coordinator
    """
    from pinlaterd.deployment.restarts import restart_coordinator

    _carry_out(restart_coordinator)


def _carry_out(work: Callable[[Path, Callable[[str], None]], Sequence[Restarted]]) -> None:
    with command.waiting("restarting") as tell:
        done = work(command.directory(), tell)
    lines = [f"{one.program} is restarted, pid {one.pid}, in {one.seconds:.1f} s" for one in done]
    command.show([one._asdict() for one in done], "\n".join(lines) if lines else None)


if __name__ == "__main__":
    cli(prog_name="pinlater-admin")
