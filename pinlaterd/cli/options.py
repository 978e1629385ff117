"""Options that several commands share, and which service they mean.

`pinlater-admin`: `--dir` names a deployment, `--host` and `--port` go before its files. They may
stand before a sub-command or after it; the last one counts. `pinlater` takes `--host` and `--port`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pinlaterd.cli.audit import MIN_BODY_BYTES
from pinlaterd.cli.command_line import COUNT, HOST, PORT, PRIORITY
from pinlaterd.client.client import Client
from pinlaterd.config.layout import ETC
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])

_META = "pinlaterd.cli.options."


def _remember(ctx: click.Context, parameter: click.Parameter, value: object) -> None:
    if value is not None:
        ctx.meta[f"{_META}{parameter.name}"] = value


def _recall(name: str) -> Any:
    return click.get_current_context().meta.get(f"{_META}{name}")


def _option(*names: str, **attributes: Any) -> Callable[[Command], Command]:
    return click.option(*names, expose_value=False, callback=_remember, **attributes)


_SERVICE_OPTIONS = (
    _option("--port", type=PORT, help="Thrift port, if not DIR's."),
    _option("--host", type=HOST, help="The service's host, if not DIR's."),
)
_DEPLOYMENT_OPTIONS = (
    _option("--stats-url", metavar="URL", help="The coordinator, if not DIR/run/stats.sock."),
    _option(
        "--dir",
        "directory",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="The deployment  [default: the current folder]",
    ),
)


json_option = click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")


def together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Several options as one decorator. The last one is listed first."""

    def decorate(command: Command) -> Command:
        return functools.reduce(lambda c, option: option(c), options, command)

    return decorate


# For commands that work on a deployment's files, and call no service.
deployment_options = together(*_DEPLOYMENT_OPTIONS)
target_options = together(*_SERVICE_OPTIONS, *_DEPLOYMENT_OPTIONS)


def directory() -> Path:
    """The deployment's folder."""
    chosen: Path | None = _recall("directory")
    return chosen if chosen is not None else Path()


def enter() -> None:
    """Make the deployment's folder the current one, for this process and all that follows."""
    os.chdir(directory())
    click.get_current_context().meta[f"{_META}directory"] = Path()


def ask_coordinator(*pages: str) -> list[Any]:
    """What it answers at each of them. Raises ConnectionFailed."""
    from pinlaterd.deployment.stats_page import fetch_json  # it loads http.client

    return [fetch_json(page, directory=directory(), url=_recall("stats_url")) for page in pages]


def connect() -> Client:
    """A client of the service that is meant."""
    host: str | None = _recall("host")
    port: int | None = _recall("port")
    server = server_settings()
    return Client(host if host is not None else server.host, port or server.port)


def server_settings() -> ServerSettings:
    """The deployment's; the defaults if the service is named by its host or port."""
    if _recall("host") is not None or _recall("port") is not None:
        return ServerSettings()
    try:
        return load_config(directory() / ETC).server
    except ConfigError as error:
        raise ConfigError(
            [*error.problems, "mend that, choose another --dir, or give --host and --port"]
        ) from error


_SERVER = ServerSettings()
_MAX_CONCURRENCY = 1000


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
