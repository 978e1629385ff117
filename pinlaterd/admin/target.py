"""Which service is meant: `--dir` names a deployment, `--host` and `--port` go before its files.

The options may stand before a sub-command or after it; the last one counts. What all commands that
answer with facts have in common, `--json`, is here too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from pinlaterd.client.cli import HOST, PORT
from pinlaterd.client.client import Client
from pinlaterd.config.layout import ETC
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])

_META = "pinlaterd.admin.target."


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


def target_options(command: Command) -> Command:
    return _with((*_SERVICE_OPTIONS, *_DEPLOYMENT_OPTIONS), command)


def deployment_options(command: Command) -> Command:
    """For commands that work on a deployment's files, and call no service."""
    return _with(_DEPLOYMENT_OPTIONS, command)


def _with(options: Iterable[Callable[[Command], Command]], command: Command) -> Command:
    return functools.reduce(lambda c, option: option(c), options, command)


def directory() -> Path:
    """The deployment's folder."""
    chosen: Path | None = _recall("directory")
    return chosen if chosen is not None else Path()


def enter() -> None:
    """Make the deployment's folder the current one, for this process and all that follows."""
    os.chdir(directory())
    click.get_current_context().meta[f"{_META}directory"] = Path()


def stats_url() -> str | None:
    url: str | None = _recall("stats_url")
    return url


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
