"""The command line `pinlaterd`: a deployment's life, and the processes that supervisord runs.

Each command imports what it needs when it runs: a shard's process must not carry the libraries
of the others.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import click

from pinlaterd import __version__
from pinlaterd.cli.entry import Interruptible
from pinlaterd.config.layout import ETC
from pinlaterd.lifecycle import ExitCode, exit_process

_WIDTH = {"max_content_width": 100}
_DIRECTORY = click.argument(
    "directory",
    metavar="[DIR]",
    required=False,
    default=".",
    type=click.Path(path_type=Path, file_okay=False),
)
_CONFIG = click.option(
    "--config",
    "etc",
    metavar="DIR/etc",
    default=str(ETC),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder of the configuration.",
)
_PORT = click.IntRange(1, 65535)


class _CommandLine(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        with Interruptible("pinlaterd"):
            return super().invoke(ctx)


@click.group(cls=_CommandLine, context_settings=_WIDTH)
@click.version_option(__version__, prog_name="pinlaterd")
def cli() -> None:
    """A durable job queue server, compatible with PinLater.

    DIR is a deployment: DIR/etc (configuration), DIR/run (sockets, logs), DIR/data (jobs). It is
    the current folder unless given.

    \b
    Examples:
      pinlaterd init /srv/pinlaterd
      pinlaterd up /srv/pinlaterd
      pinlaterd status /srv/pinlaterd
      pinlaterd down /srv/pinlaterd
    """


# --- a deployment -------------------------------------------------------------------------


@cli.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--engine",
    type=click.Choice(["sqlite", "mysql", "redis"]),
    default="sqlite",
    show_default=True,
    help="What stores the jobs.",
)
@click.option(
    "--shards",
    type=click.IntRange(1, 1024),
    default=3,
    show_default=True,
    help="How many shards, each a process of its own.",
)
@click.option("--port", type=_PORT, help="Thrift port  [default: 9010]")
@click.option("--stats-port", type=_PORT, help="Port of statistics and health  [default: 9999]")
@click.option(
    "--web-port", type=_PORT, help="Port kept for a dashboard, not in this release  [default: 9011]"
)
def init(
    *,
    directory: Path,
    engine: str,
    shards: int,
    port: int | None,
    stats_port: int | None,
    web_port: int | None,
) -> None:
    """Write a new deployment into DIR. Never overwrites a file.

    \b
    Examples:
      pinlaterd init /srv/pinlaterd
      pinlaterd init ./try --shards 1 --port 19010 --stats-port 19999
    """
    from pinlaterd.deployment.files import Choices, write_deployment

    given = {"port": port, "stats_port": stats_port, "web_port": web_port}
    ports = {key: number for key, number in given.items() if number is not None}
    with _failures():
        for path in write_deployment(directory, Choices(engine, shards, ports)):
            click.echo(f"wrote {path}")
    where = "" if directory == Path() else f" {directory}"
    click.echo(f"start it with `pinlaterd up{where}`")


@cli.command()
@_DIRECTORY
def up(*, directory: Path) -> None:
    """Start everything under supervisord; return once all serve.

    Checks the configuration first and says all that is wrong with it. What runs already goes on;
    what the configuration no longer names is stopped, a shard only once it holds no pending and no
    running job. Exit 1 if a process does not come up, with the end of its log.

    \b
    Example:
      pinlaterd up /srv/pinlaterd
    """
    from pinlaterd.deployment import service

    with _failures(), _progress() as tell:
        result = service.up(directory, tell)
    server = result.config.server
    state = "serving" if result.changed else "already serving"
    click.echo(
        f"{state}: Thrift on {server.host}:{server.port}, statistics on "
        f"http://{server.stats_host}:{server.stats_port}, shards {', '.join(result.config.shards)}"
    )


@cli.command()
@_DIRECTORY
def down(*, directory: Path) -> None:
    """Finish the requests in hand, then stop everything.

    Also stops processes that a killed supervisord left behind; no others that run in DIR.

    \b
    Example:
      pinlaterd down /srv/pinlaterd
    """
    from pinlaterd.deployment import service

    with _failures(), _progress() as tell:
        stopped = service.down(directory, tell)
    click.echo("stopped" if stopped else "was not running")


@cli.command()
@_DIRECTORY
@click.option("--json", "as_json", is_flag=True, help="Print what the coordinator knows as JSON.")
def status(*, directory: Path, as_json: bool) -> None:
    """Show processes, shards, problems and warnings. Exit 1 if a router or shard does not serve.

    What else it shows, such as mistakes in etc/ and warnings, leaves exit 0. Exit 1 also if the
    coordinator does not answer.

    \b
    Examples:
      pinlaterd status
      pinlaterd status /srv/pinlaterd --json
    """
    from pinlaterd.cli import service_status
    from pinlaterd.deployment import stats_page

    with _failures():
        found = stats_page.fetch_json("/status.json", directory=directory, url=None)
    service_status.report(found, as_json=as_json)


# --- what supervisord runs ----------------------------------------------------------------


@cli.command()
@_CONFIG
def router(*, etc: Path) -> None:
    """Run a router: Thrift in, shards behind it. supervisord does this.

    \b
    Example:
      pinlaterd router --config /srv/pinlaterd/etc
    """

    def run() -> int:
        from pinlaterd.router.main import run as run_router

        return run_router(etc)

    _run_process("router", run)


@cli.command()
@click.argument("name")
@_CONFIG
def shard(*, name: str, etc: Path) -> None:
    """Run the owner of the shard NAME. supervisord does this.

    \b
    Example:
      pinlaterd shard 1 --config /srv/pinlaterd/etc
    """

    def run() -> int:
        from pinlaterd.shard.process import run as run_shard

        return run_shard(name, etc)

    _run_process(f"shard {name}", run)


@cli.command()
@_CONFIG
def coordinator(*, etc: Path) -> None:
    """Run the coordinator: configuration, health, statistics. supervisord does this.

    \b
    Example:
      pinlaterd coordinator --config /srv/pinlaterd/etc
    """

    def run() -> int:
        from pinlaterd.coordinator.main import run as run_coordinator

        return run_coordinator(etc)

    _run_process("coordinator", run)


def _run_process(name: str, run: Callable[[], int]) -> NoReturn:
    """The outermost loop of a process: whatever ends it is logged and becomes an exit code."""
    started_at = time.monotonic()
    try:
        code = run()
    except OSError as error:
        logging.getLogger(__name__).critical("%s ends: %s", name, error)
        code = ExitCode.FAILURE
    except Exception:
        logging.getLogger(__name__).critical("%s ends: a defect", name, exc_info=True)
        code = ExitCode.FAILURE
    exit_process(code, started_at)


# --- failures and progress ----------------------------------------------------------------


@contextmanager
def _failures() -> Iterator[None]:
    """Failures are a message on stderr and exit 1, never a traceback."""
    from pinlaterd.errors import ConfigError, ConnectionFailed, DeploymentError

    try:
        yield
    except ConfigError as error:
        _fail(f"the configuration has {len(error.problems)} mistakes:\n{error}")
    except DeploymentError as error:
        _fail(str(error))
    except ConnectionFailed as error:
        _fail(f"{error}; is it running? `pinlaterd up` starts it")
    except PermissionError as error:
        _fail(f"{error.filename}: {error.strerror}; run this as the deployment's owner")


def _fail(message: str) -> NoReturn:
    click.echo(f"pinlaterd: {message}", err=True)
    sys.exit(ExitCode.FAILURE)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows the last thing told on one line of a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    shown = ""

    def tell(text: str) -> None:
        nonlocal shown
        if text != shown:
            shown = text
            click.echo(f"\r\x1b[K{text} …", err=True, nl=False)

    try:
        yield tell
    finally:
        click.echo("\r\x1b[K", err=True, nl=False)


if __name__ == "__main__":
    cli()
