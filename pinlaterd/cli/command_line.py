"""What the three programs share: failures and exit codes, questions, options, and which service
is meant.

Options of `_remembered` are no parameters of the commands: they may stand before a sub-command or
after it, and the last one counts. `pinlaterd` imports this too, so libraries that take long to load
are imported on first use.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from pinlaterd.cli.entry import Interruptible, told
from pinlaterd.cli.rendering import MAX_LINE_CHARS, printable, record_facts, record_text
from pinlaterd.config.layout import ETC
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import (
    ConfigError,
    ConnectionFailed,
    DeploymentError,
    OutcomeUnknown,
    PinLaterError,
)
from pinlaterd.lifecycle import ExitCode
from pinlaterd.model import JobState

if TYPE_CHECKING:
    from rich.status import Status

    from pinlaterd.client import Client

Command = TypeVar("Command", bound=Callable[..., Any])

MAX_SECONDS = 86_400.0  # of what a command is told to wait
_POLL_SECONDS = 0.05

WIDTH = {"max_content_width": 100}
option = partial(click.option, show_default=True)


# --- failures ---------------------------------------------------------------------------------


class CommandLine(click.Group):
    """A group whose failures are one clear message on stderr and exit 1."""

    def invoke(self, ctx: click.Context) -> object:
        program = str(ctx.command.name)
        try:
            with Interruptible(program):
                return super().invoke(ctx)
        except click.Abort as error:  # of a prompt
            if isinstance(error.__context__, KeyboardInterrupt):
                raise told(program) from error
            raise
        except (ConfigError, DeploymentError, ConnectionFailed, PinLaterError, OSError) as error:
            if isinstance(error, OSError):
                if error.errno == errno.EPIPE:
                    raise  # click ends without a word
                _drop_unwritten_output()
            fail(self.text_of(error))

    def text_of(self, error: Exception) -> str:
        """What is wrong, and what to do about it."""
        match error:
            case ConnectionFailed() if not isinstance(error, OutcomeUnknown):
                chosen = "is it running? `pinlaterd up` starts it, --host and --port choose it"
                return f"{error}; {getattr(error, 'cure', chosen)}"
            case PinLaterError():
                return f"{error.code.name}: {printable(str(error), MAX_LINE_CHARS)}"
            case OSError():
                why = (error.strerror or str(error)).lower()
                return f"{error.filename or 'input or output failed'}: {why}"
        return str(error)


def fail(message: str) -> NoReturn:
    """End the program with exit 1 and say why."""
    program = click.get_current_context().find_root().command.name
    click.echo(f"{program}: {message}", err=True)
    sys.exit(ExitCode.FAILURE)


def _drop_unwritten_output() -> None:
    """Python flushes stdout at exit; if that fails it prints an error and exits with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- questions --------------------------------------------------------------------------------

yes_option = click.option(
    "--yes", is_flag=True, help="Don't ask; needed where nobody can be asked."
)


def confirm(question: str, *, yes: bool) -> None:
    """Go on only if a person on a terminal says so, or `yes` has."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Nobody can be asked; give --yes if so")
    click.confirm(question, abort=True, err=True)


def read_password(prompt: str, *, twice: bool = False) -> str:
    """A password from the terminal, without echo, or the first line of a pipe."""
    if sys.stdin.isatty():
        password: str = click.prompt(prompt, hide_input=True, confirmation_prompt=twice, err=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        fail("no password was given; type it on the terminal or write it to standard input")
    return password


# --- parameters -------------------------------------------------------------------------------

PORT = click.IntRange(1, 65535)
# Where Thrift's types end: larger numbers can't be sent.
PRIORITY = click.IntRange(1, 127)
COUNT = click.IntRange(1, 2**31 - 1)
STATE = click.Choice([state.name.lower() for state in JobState], case_sensitive=False)


class Amount(click.FloatRange):
    """A number from `least`, or above 0, up to `most`; not `nan`, as a FloatRange takes."""

    def __init__(self, most: float, *, least: float | None = None) -> None:
        super().__init__(min=least or 0, max=most, min_open=least is None)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def _host(text: str) -> str:
    from pinlaterd.client.addresses import AddressInvalid, parse_addresses

    try:
        parse_addresses(text, default_port=1)
    except AddressInvalid:
        raise click.BadParameter(
            f"{text!r} is no server; write HOST, HOST:PORT or [IPV6]:PORT, with a port from "
            "1 to 65535"
        ) from None
    return text


def state_of(choice: str) -> JobState:
    """The state that the command line's word names."""
    return JobState[choice.upper()]


# --- options ----------------------------------------------------------------------------------


def together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Several options as one decorator, listed in this order."""

    def decorate(command: Command) -> Command:
        for each in reversed(options):
            command = each(command)
        return command

    return decorate


def _remember(ctx: click.Context, parameter: click.Parameter, value: object) -> None:
    if value is not None:
        ctx.meta[f"{__name__}.{parameter.name}"] = value


def _recall(name: str) -> Any:
    return click.get_current_context().meta.get(f"{__name__}.{name}")


_remembered = partial(option, expose_value=False, callback=_remember)
_SERVER = ServerSettings()

json_option = _remembered("--json", is_flag=True, help="Print the facts as JSON.")

# pinlater's service
server_options = together(
    _remembered(
        "--host", type=_host, metavar="HOST", default=_SERVER.host, help="The service's host."
    ),
    _remembered("--port", type=PORT, default=_SERVER.port, help="Thrift port."),
)
service_options = together(server_options, json_option)

# pinlater-admin's: that of a deployment, whose files --host and --port override
_deployment_options = together(
    _remembered(
        "--dir",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="The deployment  [default: the current folder]",
    ),
    _remembered("--stats-url", metavar="URL", help="The coordinator, if not DIR/run/stats.sock."),
)
target_options = together(
    _deployment_options,
    _remembered("--host", type=_host, metavar="HOST", help="The service's host, if not DIR's."),
    _remembered("--port", type=PORT, help="Thrift port, if not DIR's."),
)
# of commands that print facts: about the service, and about a deployment's files
admin_options = together(json_option, target_options)
files_options = together(json_option, _deployment_options)


def directory() -> Path:
    """The deployment's folder."""
    return _recall("dir") or Path()


def enter() -> None:
    """Make the deployment's folder the current one, for this process and all that follows."""
    os.chdir(directory())
    click.get_current_context().meta[f"{__name__}.dir"] = Path()


# --- the service ------------------------------------------------------------------------------


def connect(*, max_connections: int = 1) -> Client:
    """A client of the service that is meant."""
    from pinlaterd.client import AddressInvalid, Client

    host, port = _recall("host"), _recall("port")
    server = _SERVER if host or port else _deployments_server()
    try:
        return Client(host or server.host, port or server.port, max_connections=max_connections)
    except AddressInvalid as error:
        fail(str(error))


def _deployments_server() -> ServerSettings:
    from pinlaterd.config.load import load_config

    try:
        return load_config(directory() / ETC).server
    except ConfigError as error:
        raise ConfigError(
            [*error.problems, "mend that, choose another --dir, or give --host and --port"]
        ) from error


def ask_coordinator(*pages: str) -> list[Any]:
    """What it answers at each of them. Raises ConnectionFailed."""
    from pinlaterd.deployment.stats_page import fetch_json

    return [fetch_json(page, directory=directory(), url=_recall("stats_url")) for page in pages]


# --- output -----------------------------------------------------------------------------------


def wants_json() -> bool:
    return bool(_recall("json"))


def show(facts: object, text: str | Callable[[], object] | None = None) -> None:
    """The facts on one line for programs, or the text for people, or what prints it; None: it has
    been told already."""
    if wants_json():
        click.echo(json.dumps(facts))
    elif callable(text):
        text()
    elif text is not None:
        click.echo(text)


def show_jobs(descriptors: Sequence[str]) -> None:
    """All that is known of jobs; fail if one of them is unknown."""
    with connect() as client:
        records = client.lookup(descriptors, include_body=True)
    show(
        {name: record_facts(record) for name, record in records.items()},
        "\n".join(map(record_text, records.values())) if records else None,
    )
    unknown = [printable(descriptor) for descriptor in descriptors if descriptor not in records]
    if unknown:
        fail(f"unknown: {', '.join(unknown)}")


def show_queue_names() -> None:
    """One a line."""
    with connect() as client:
        names = sorted(client.queue_names())
    show(names, "\n".join(map(printable, names)) if names else None)


def waiting(what: str) -> Status:
    """A block of code that takes a while: on a terminal, `what` is shown meanwhile."""
    from rich.console import Console

    return Console(stderr=True).status(what)


def polls(seconds: float) -> Iterator[bool]:
    """For a loop that ends by itself: whether it has taken longer than it should."""
    deadline = time.monotonic() + seconds
    while True:
        yield time.monotonic() >= deadline
        time.sleep(_POLL_SECONDS)
