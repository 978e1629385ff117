"""What `pinlater` and `pinlater-admin` share: failures, types of arguments, looking jobs up, and
asking before what can't be undone.
"""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from pinlaterd.cli.entry import Interruptible, told
from pinlaterd.cli.rendering import print_json, printable, record_facts, record_lines
from pinlaterd.client.addresses import AddressInvalid, parse_addresses
from pinlaterd.client.client import Client
from pinlaterd.errors import ConfigError, ConnectionFailed, OutcomeUnknown, PinLaterError
from pinlaterd.lifecycle import ExitCode
from pinlaterd.model import JobState

MAX_SECONDS = 86_400.0  # of what a command is told to wait

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


class _Host(click.ParamType[str]):
    """A server, as the client takes it."""

    name = "HOST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_addresses(value, default_port=1)
        except AddressInvalid:
            self.fail(
                f"{value!r} is no server; write HOST, HOST:PORT or [IPV6]:PORT, with a port from "
                "1 to 65535",
                param,
                ctx,
            )
        return str(value)


HOST = _Host()


def state_of(choice: str) -> JobState:
    """The state that the command line's word names."""
    return JobState[choice.upper()]


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
        except (AddressInvalid, ConfigError, OutcomeUnknown) as error:
            fail(str(error))
        except ConnectionFailed as error:
            fail(f"{error}; {self.cure_of(error)}")
        except PinLaterError as error:
            fail(f"{error.code.name}: {printable(str(error), 2000)}")
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # click ends without a word
            _drop_unwritten_output()
            why = (error.strerror or str(error)).lower()
            fail(f"{error.filename or 'input or output failed'}: {why}")

    def cure_of(self, error: ConnectionFailed) -> str:
        """What to do about a service that does not answer."""
        return "is it running? `pinlaterd up` starts it, --host and --port choose it"


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


def check_service(client: Client) -> None:
    """Raise ConnectionFailed if no service answers: before the work, not in its midst."""
    client.queue_names()


def show_jobs(client: Client, descriptors: Sequence[str], *, as_json: bool) -> None:
    """Print all that is known of jobs; fail if one of them is unknown."""
    records = client.lookup(descriptors, include_body=True)
    if as_json:
        print_json({name: record_facts(record) for name, record in records.items()})
    else:
        for record in records.values():
            click.echo("\n".join(record_lines(record)))
    unknown = [printable(descriptor) for descriptor in descriptors if descriptor not in records]
    if unknown:
        fail(f"unknown: {', '.join(unknown)}")


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
