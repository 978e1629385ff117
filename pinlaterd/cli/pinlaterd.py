"""The command line `pinlaterd`: a deployment's life, and the processes that supervisord runs.

Each command imports what it needs when it runs: a shard's process must not carry the libraries
of the others.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import shlex
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import click

from pinlaterd import __version__
from pinlaterd.cli import command, import_program
from pinlaterd.config.kinds import KINDS, ProcessKind
from pinlaterd.config.layout import ETC, program_name
from pinlaterd.config.schema import DEFAULT_ENGINE, ENGINES
from pinlaterd.errors import ConfigError, ConnectionFailed, DeploymentError, address_of, how_many
from pinlaterd.lifecycle import ExitCode, exit_process, set_up_log

_FOLDER = click.Path(path_type=Path, file_okay=False)
_DIRECTORY = click.argument("directory", metavar="[DIR]", required=False, default=".", type=_FOLDER)
_PORT_OR_NONE = click.IntRange(0, 65535)
_CONFIG = command.option(
    "--config",
    "etc",
    metavar="DIR/etc",
    default=str(ETC),
    type=_FOLDER,
    help="The folder of the configuration.",
)


class _CommandLine(command.CommandLine):
    def text_of(self, error: Exception) -> str:
        match error:
            case ConfigError():
                return f"the configuration has {how_many(len(error.problems), 'mistake')}:\n{error}"
            case ConnectionFailed():
                return f"{error}; is it running? `pinlaterd up` starts it"
        return super().text_of(error)


@click.group("pinlaterd", cls=_CommandLine, context_settings=command.WIDTH)
@click.version_option(__version__, prog_name="pinlaterd")
def cli() -> None:
    """A durable job queue server, compatible with PinLater.

    DIR is a deployment: DIR/etc (configuration), DIR/run (sockets, logs), DIR/data (jobs). It is
    the current folder unless given.

    Examples:
      pinlaterd init /srv/pinlaterd
      pinlaterd up /srv/pinlaterd
      pinlaterd status /srv/pinlaterd
      pinlaterd down /srv/pinlaterd
    """


# --- a deployment -------------------------------------------------------------------------


@cli.command()
@click.argument("directory", metavar="DIR", type=_FOLDER)
@command.option(
    "--engine", type=click.Choice(ENGINES), default=DEFAULT_ENGINE, help="What stores the jobs."
)
@command.option(
    "--shards",
    type=click.IntRange(1, 1024),
    default=3,
    help="How many shards, each a process of its own.",
)
@command.option("--port", type=command.PORT, help="Thrift port  [default: 9010]")
@command.option(
    "--stats-port", type=command.PORT, help="Port of statistics and health  [default: 9999]"
)
@command.option(
    "--http-port",
    type=_PORT_OR_NONE,
    help="Port of the HTTP interface; 0: there is none  [default: 9013, or 3 above --port]",
)
@command.option(
    "--web-port",
    type=_PORT_OR_NONE,
    help="Port of the dashboard; 0: there is none  [default: 9011, or 1 above --port]",
)
def init(*, directory: Path, engine: str, shards: int, **ports: int | None) -> None:
    """Write a new deployment into DIR. Never overwrites a file.

    Examples:
      pinlaterd init /srv/pinlaterd
      pinlaterd init ./try --shards 1 --port 19010 --stats-port 19999
    """
    from pinlaterd.deployment.files import write_deployment

    given = {key: number for key, number in ports.items() if number is not None}
    for path in write_deployment(directory, engine, shards, given):
        click.echo(f"wrote {path}")
    where = "" if directory == Path() else f" {shlex.quote(str(directory))}"
    click.echo(f"start it with `pinlaterd up{where}`")


@cli.command()
@_DIRECTORY
def up(*, directory: Path) -> None:
    """Start everything under supervisord; return once all serve.

    Checks the configuration first and says all that is wrong with it. What runs already goes on;
    what the configuration no longer names is stopped, a shard only once it holds no pending and no
    running job. Exit 1 if a process does not come up, with the end of its log.

    Example: pinlaterd up /srv/pinlaterd
    """
    from pinlaterd.deployment import service

    with command.waiting("starting") as tell:
        result = service.up(directory, tell)
    server = result.config.server
    state = "serving" if result.changed else "already serving"
    thrift, stats = (server.host, server.port), (server.stats_host, server.stats_port)
    http = f"HTTP on http://{server.http_address}/v2, " if server.http_port else ""
    web = f"dashboard on http://{server.web_address}/, " if server.web_port else ""
    click.echo(
        f"{state}: Thrift on {address_of(*thrift)}, {http}{web}statistics on "
        f"http://{address_of(*stats)}, shards {', '.join(result.config.shards)}"
    )


@cli.command()
@_DIRECTORY
def down(*, directory: Path) -> None:
    """Finish the calls in flight, then stop everything.

    Also stops processes that a killed supervisord left behind; no others that run in DIR.

    Example: pinlaterd down /srv/pinlaterd
    """
    from pinlaterd.deployment import service

    with command.waiting("stopping") as tell:
        stopped = service.down(directory, tell)
    click.echo("stopped" if stopped else "was not running")


@cli.command()
@_DIRECTORY
@command.json_option
def status(*, directory: Path) -> None:
    """Show processes, shards, problems and warnings. Exit 1 if a router or shard does not serve.

    What else it shows, such as mistakes in etc/ and warnings, leaves exit 0. Exit 1 also if the
    coordinator does not answer.

    Examples:
      pinlaterd status
      pinlaterd status /srv/pinlaterd --json
    """
    from pinlaterd.cli import service_status
    from pinlaterd.client import coordinator

    service_status.report(coordinator.fetch_json("/status.json", directory=directory, url=None))


# --- a cluster ----------------------------------------------------------------------------

_cluster_options = command.together(
    command.option("--name", "cluster", metavar="NAME", help="The cluster's name."),
    command.option("--server", metavar="NAME", help="This server's name in it."),
    command.option("--zookeeper", metavar="HOSTS", help="HOST:PORT,HOST:PORT of ZooKeeper."),
    command.option(
        "--peer-host",
        metavar="HOST",
        help="Address for other servers  [default: the one that ZooKeeper is reached from]",
    ),
    command.option("--peer-port", type=command.PORT, help="For coordinators  [default: 9012]"),
    command.option("--shard-ports", type=command.PORT, help="First for shards  [default: 9100]"),
    command.option("--port", type=command.PORT, help="Thrift port, if not that of all servers."),
    command.option("--stats-port", type=command.PORT, help="Port of statistics, likewise."),
    command.option("--http-port", type=_PORT_OR_NONE, help="Port of HTTP, likewise; 0: none."),
    command.option("--web-port", type=_PORT_OR_NONE, help="Of the dashboard, likewise; 0: none."),
)


@cli.group()
def cluster() -> None:
    """Several servers on one set of shards. ZooKeeper knows which server owns which shard."""


@cluster.command("init")
@_DIRECTORY
@_cluster_options
@click.option("--restore", is_flag=True, help="Fill a ZooKeeper that has lost its data.")
def init_cluster(*, directory: Path, restore: bool, **options: str | int | None) -> None:
    """Make the deployment DIR the first server of a new cluster.

    Writes DIR/etc/cluster.key, which every server of the cluster needs, and DIR/etc/local.yaml;
    pinlaterd.yaml, shards.yaml and queues.yaml are those of all servers from then on. Refused
    where ZooKeeper has a cluster of that name. --restore takes no other options: it makes the
    cluster again from this server's files.

    Examples:
      pinlaterd cluster init /srv/pinlaterd --name prod --server jobs-1 --zookeeper z1:2181,z2:2181
      pinlaterd cluster init /srv/pinlaterd --restore
    """
    from pinlaterd.deployment import cluster as deployed

    if restore:
        if any(value is not None for value in options.values()):
            raise click.UsageError("--restore takes no other options: etc/local.yaml has them")
        deployed.restore(directory)
        click.echo("ZooKeeper has the cluster again")
        return
    deployed.create(directory, _local_settings(options))
    key = shlex.quote(f"{directory / ETC}/cluster.key")
    click.echo(
        f"server {options['server']} is the first of cluster {options['cluster']}; `pinlaterd up` "
        f"(re)starts it, `pinlaterd cluster join --key {key}` adds others"
    )


@cluster.command()
@click.argument("directory", metavar="DIR", type=_FOLDER)
@click.option(
    "--key",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="A copy of etc/cluster.key of another server.",
)
@_cluster_options
def join(*, directory: Path, key: Path, **options: str | int | None) -> None:
    """Make a deployment in DIR that is one more server of a cluster.

    Its shards, queues and settings are those of the cluster; its own are in DIR/etc/local.yaml. The
    environment has to have the passwords that shards.yaml takes from it.

    Example:
      pinlaterd cluster join /srv/pinlaterd --key ./cluster.key --name prod --server jobs-2 \\
        --zookeeper z1:2181,z2:2181
    """
    from pinlaterd.deployment import cluster as deployed

    deployed.join(directory, key, _local_settings(options))
    click.echo(
        f"server {options['server']} is one of cluster {options['cluster']}; start it with "
        f"`pinlaterd up {shlex.quote(str(directory))}`"
    )


@cluster.command()
@_DIRECTORY
def leave(*, directory: Path) -> None:
    """Take the deployment DIR, which is down, out of its cluster.

    Its files stay, but nothing starts there until it joins again: its shards are others' by then.

    Example: pinlaterd cluster leave /srv/pinlaterd
    """
    from pinlaterd.deployment import cluster as deployed

    kept = deployed.leave(directory)
    click.echo(f"left the cluster; its key is {kept} now, for `pinlaterd cluster join --key`")


def _local_settings(options: Mapping[str, str | int | None]) -> Mapping[str, str | int]:
    """Return what etc/local.yaml is to say."""
    given = {key: value for key, value in options.items() if value is not None}
    missing = [key for key in ("cluster", "server", "zookeeper") if key not in given]
    if missing:
        names = ", ".join("--name" if key == "cluster" else f"--{key}" for key in missing)
        raise click.UsageError(f"missing {names}")
    if "peer_host" not in given:
        given["peer_host"] = _own_address(str(given["zookeeper"]))
    return given


def _own_address(hosts: str) -> str:
    """Return from which address ZooKeeper is reached, if another machine can use it."""
    host, _, port = hosts.partition(",")[0].rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            found = str(probe.getsockname()[0])
        if not ipaddress.ip_address(found).is_loopback:
            return found
    raise click.UsageError("this machine's address is not known; give --peer-host")


# --- what supervisord runs ----------------------------------------------------------------


def _add_process_command(kind: ProcessKind) -> None:
    def run(*, etc: Path, **member: str) -> None:
        _run_process(program_name(kind.name, *member.values()), kind.main, *member.values(), etc)

    of_kind, example = _CONFIG(run), f"pinlaterd {kind.name}"
    if kind.has_named_members:
        of_kind, example = click.argument("name")(of_kind), f"{example} 1"
    text = f"{kind.purpose} supervisord does this.\n\nExample: {example}"
    cli.command(kind.name, help=f"{text} --config /srv/pinlaterd/etc")(of_kind)


for _kind in KINDS:
    _add_process_command(_kind)


def _run_process(name: str, module: str, *arguments: object) -> NoReturn:
    """Run a process; log whatever ends it, and turn that into an exit code."""
    started_at = time.monotonic()
    code = ExitCode.FAILURE
    # There may be several routers. Until the process knows its settings:
    set_up_log(os.environ.get("SUPERVISOR_PROCESS_NAME", name), "info")
    try:
        code = import_program(module).run(*arguments)
    except (ConfigError, DeploymentError) as error:
        for problem in str(error).split("\n"):
            logging.getLogger(__name__).error("%s", problem)
        code = ExitCode.CONFIG
    except OSError as error:
        logging.getLogger(__name__).critical("%s ends: %s", name, error)
    except Exception:
        logging.getLogger(__name__).critical("%s ends: a defect", name, exc_info=True)
    exit_process(code, started_at)


if __name__ == "__main__":
    cli()
