"""What the command lines `pinlater` and `pinlater-admin` share: failures, states, jobs as text.

Bodies and custom statuses come from strangers. On their way to a terminal everything that could
command it is escaped; in JSON they are exact.
"""

from __future__ import annotations

import base64
import errno
import json
import math
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import click

from pinlaterd.client.addresses import AddressInvalid, parse_addresses
from pinlaterd.client.client import Client
from pinlaterd.errors import ConfigError, ConnectionFailed, OutcomeUnknown, PinLaterError
from pinlaterd.interrupts import Interruptible, told
from pinlaterd.lifecycle import ExitCode
from pinlaterd.model import JobRecord, JobState

MAX_SHOWN_CHARS = 200
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
        click.echo(json.dumps({name: record_facts(record) for name, record in records.items()}))
    else:
        for record in records.values():
            click.echo("\n".join(_record_lines(record)))
    unknown = [printable(descriptor) for descriptor in descriptors if descriptor not in records]
    if unknown:
        fail(f"unknown: {', '.join(unknown)}")


def printable(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """`text` on one line, cut, with everything but printable characters escaped."""
    cut = text[:max_chars]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
    return shown if len(text) <= max_chars else f"{shown}… ({len(text)} characters)"


def printable_body(body: bytes, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """A body as text, cut, with bytes that are no printable text escaped as \\xNN."""
    shown = printable(body[: max_chars * 4].decode("utf-8", "backslashreplace"), max_chars)
    return shown if len(body) <= max_chars else f"{shown.split('… (')[0]}… ({len(body)} bytes)"


def record_facts(record: JobRecord) -> dict[str, object]:
    """A job for JSON, exactly; a body that is not UTF-8 comes as `body_base64`."""
    facts: dict[str, object] = {
        "descriptor": record.descriptor,
        "state": record.state.name,
        "attempts_allowed": record.attempts_allowed,
        "attempts_remaining": record.attempts_remaining,
        "custom_status": record.custom_status,
        "created_at_ms": record.created_at_ms,
        "run_after_ms": record.run_after_ms,
        "updated_at_ms": record.updated_at_ms,
        "claim_descriptor": record.claim_descriptor,
    }
    if record.body is not None:
        try:
            facts["body"] = record.body.decode()
        except UnicodeDecodeError:
            facts["body_base64"] = base64.b64encode(record.body).decode()
    return facts


def _record_lines(record: JobRecord) -> list[str]:
    """A job for people, a fact a line."""
    lines = [
        record.descriptor,
        f"  state          {record.state.name}",
        f"  attempts       {record.attempts_remaining} of {record.attempts_allowed} remaining",
        f"  run after      {shown_time(record.run_after_ms)}",
        f"  created        {shown_time(record.created_at_ms)}",
        f"  updated        {shown_time(record.updated_at_ms)}",
        f"  custom status  {printable(record.custom_status)}",
    ]
    if record.claim_descriptor is not None:
        lines.append(f"  claim          {printable(record.claim_descriptor)}")
    if record.body is not None:
        lines.append(f"  body           {printable_body(record.body)}")
    return [line.rstrip() for line in lines]


def shown_time(at_ms: int) -> str:
    """UTC with milliseconds; times that no calendar holds stay numbers."""
    try:
        at = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
