"""The common parts of the three programs: failures and exit codes, questions, options, which
service is meant; and facts as text: jobs, times, and tables, tab-separated lines in a pipe.

Options of `_remembered` are no parameters of the commands: they may stand before a sub-command or
after it, and the last one counts. `pinlaterd` imports this too, so libraries that take long to load
are imported on first use.
"""

from __future__ import annotations

import base64
import errno
import inspect
import json
import math
import os
import pwd
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NoReturn, TypeVar, cast

import click

from pinlaterd.cli import Interruptible, interrupted
from pinlaterd.config.layout import ETC, check_folders, lock
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import (
    ConfigError,
    ConnectionFailed,
    DeploymentError,
    OutcomeUnknown,
    PinLaterError,
    how_many,
)
from pinlaterd.lifecycle import ExitCode, escaped, prepare_streams
from pinlaterd.model import JobOptions, JobRecord, JobState
from pinlaterd.stats import natural
from pinlaterd.verdict import without_shards

if TYPE_CHECKING:
    from rich.table import Table

    from pinlaterd.client import Client
    from pinlaterd.client.calls import PreparedCall

Facts = Mapping[str, Any]  # as they are in JSON
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

MAX_SECONDS = 86_400.0  # of what a command is told to wait
MAX_DELAY_SECONDS = 100 * 366 * 86_400.0  # of a job

WIDTH = {"max_content_width": 100}
option = partial(click.option, show_default=True)


class Command(click.Command):
    """The examples at the end of its docstring are shown line by line; one may stand behind its
    title."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        text = inspect.cleandoc(self.help or "")
        text = re.sub(r"^Example: (.+)", r"Example:\n  \1", text, flags=re.MULTILINE)
        self.help = re.sub(r"^Examples?:", "\b\n\\g<0>", text, flags=re.MULTILINE)


class Group(Command, click.Group):
    """`modules`: for some of its commands those that are imported on first use, as all of them take
    half a second. The first one has the command."""

    command_class = Command

    def __init__(
        self, *args: Any, modules: Mapping[str, Sequence[str]] | None = None, **attributes: Any
    ) -> None:
        super().__init__(*args, **attributes)
        self._modules = modules or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._modules])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._modules:
            return super().get_command(ctx, cmd_name)
        module, *_ = [import_module(f"{__package__}.{name}") for name in self._modules[cmd_name]]
        return cast("click.Command", getattr(module, cmd_name.replace("-", "_")))


# --- failures ---------------------------------------------------------------------------------


# Arguments, variables and input that are not UTF-8 fail only as they are encoded again.
_FAILURES = (ConfigError, DeploymentError, ConnectionFailed, PinLaterError, UnicodeEncodeError)


class CommandLine(Group):
    """A program. Its failures are one clear message on stderr and exit 1."""

    group_class = Group

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the program; an input or output that fails is one line, for its help, too."""
        prepare_streams()
        try:
            try:
                return super().main(*args, **extra)
            finally:
                sys.stdout.flush()
        except OSError as error:
            _drop_unwritten_output()
            if error.errno != errno.EPIPE:
                _say(str(self.name), self.text_of(error))
            sys.exit(ExitCode.FAILURE)

    def invoke(self, ctx: click.Context) -> object:
        program = str(ctx.command.name)
        try:
            with Interruptible(program):
                return super().invoke(ctx)
        except click.Abort as error:  # of a prompt
            if isinstance(error.__context__, KeyboardInterrupt):
                raise interrupted(program) from error
            raise
        except _FAILURES as error:
            fail(self.text_of(error))

    def text_of(self, error: Exception) -> str:
        """Say what is wrong, and what to do about it."""
        match error:
            case ConnectionFailed() if not isinstance(error, OutcomeUnknown):
                chosen = "is it running? `pinlaterd up` starts it, --host and --port choose it"
                return f"{error}; {getattr(error, 'cure', chosen)}"
            case PinLaterError():
                return f"{error.code.name}: {printable_line(str(error))}"
            case UnicodeEncodeError():  # not its text, which may be a password
                return "an argument, the environment or standard input is not valid UTF-8"
            case OSError():
                why = (error.strerror or str(error)).lower()
                cure = "; run this as its owner" if isinstance(error, PermissionError) else ""
                return f"{error.filename or 'input or output failed'}: {why}{cure}"
        return str(error)


def fail(message: str) -> NoReturn:
    """End the program with exit 1 and say why."""
    _say(str(click.get_current_context().find_root().command.name), message)
    sys.exit(ExitCode.FAILURE)


def _say(program: str, message: str) -> None:
    """Write why the program fails, where that can be read."""
    with suppress(OSError):
        click.echo(f"{program}: {_printable_lines(message)}", err=True)


def _drop_unwritten_output() -> None:
    """Keep Python from exiting with 120 if it can't flush stdout, after it prints an error."""
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
    """Read a password from the terminal, without echo, or the first line of a pipe."""
    if sys.stdin.isatty():
        password: str = click.prompt(prompt, hide_input=True, confirmation_prompt=twice, err=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        fail("no password was given; type it on the terminal or write it to standard input")
    return password


def password_in(file: IO[str]) -> str:
    """Return the first line of a file, or end the program if it is no text."""
    try:
        return file.readline().rstrip("\r\n")
    except UnicodeDecodeError:
        fail(f"{file.name} is not valid UTF-8")


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


def moment(text: str) -> int:
    """Return milliseconds since 1970, from those or a time as `job lookup` shows it."""
    if text.isdecimal():
        return int(text)
    with suppress(ValueError):
        found = datetime.fromisoformat(text)
        if found.tzinfo is not None:
            return round(found.timestamp() * 1000)
    raise click.BadParameter(f"{text!r} is no time with a zone; write 2026-11-21T03:00:00Z")


def expiry(text: str) -> Callable[[], int]:
    """Return what gives milliseconds since 1970: of a time as `moment` takes it, or of as many
    seconds after it is asked as the text says."""
    with suppress(ValueError):
        seconds = float(text)
        if 0 <= seconds <= MAX_DELAY_SECONDS:
            return lambda: round((time.time() + seconds) * 1000)
    at_ms = moment(text)
    return lambda: at_ms


def past_moment(text: str) -> int:
    """Return milliseconds since 1970, from a time as `moment` takes it, or from one of the last 24
    hours, as 03:08:00, in UTC."""
    with suppress(ValueError):
        of_day, now = datetime.strptime(text, "%H:%M:%S").time(), datetime.now(UTC)  # noqa: DTZ007
        at = datetime.combine(now.date(), of_day, UTC)
        return round((at - timedelta(days=at > now)).timestamp() * 1000)
    return moment(text)


def state_of(choice: str) -> JobState:
    """Return the state that the command line's word names."""
    return JobState[choice.upper()]


# --- options ----------------------------------------------------------------------------------


def together(*options: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """Make one decorator of several options, listed in this order."""

    def decorate(command: Decorated) -> Decorated:
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
    _remembered("--host", metavar="HOST", default=_SERVER.host, help="The service's host."),
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
    _remembered("--host", metavar="HOST", help="The service's host, if not DIR's."),
    _remembered("--port", type=PORT, help="Thrift port, if not DIR's."),
)
# of commands that print facts: about the service, and about a deployment's files
admin_options = together(json_option, target_options)
files_options = together(json_option, _deployment_options)


def directory() -> Path:
    """Return the deployment's folder."""
    return _recall("dir") or Path()


def user_name() -> str:
    """Return the name of the system's user; "" if it has none."""
    with suppress(KeyError):
        return os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    return ""


def sole(path: Path, busy: str) -> BinaryIO:
    """Lock the file `path` of the deployment until this is closed; fail if another command has."""
    check_folders(directory())
    file = directory() / path
    file.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        return lock(file, patient=False)
    except BlockingIOError:
        fail(busy)


def enter() -> None:
    """Make the deployment's folder the current one, for this process and all that follows."""
    os.chdir(directory())
    check_folders(Path())
    click.get_current_context().meta[f"{__name__}.dir"] = Path()


# Of jobs: the fields of a JobChoice.
choice_options = together(
    option(
        "--since",
        "ended_since_ms",
        type=past_moment,
        metavar="TIME",
        help="Only jobs that ended at this time or later, such as 03:08:00 (UTC).",
    ),
    option(
        "--before",
        "ended_before_ms",
        type=past_moment,
        metavar="TIME",
        help="Only jobs that ended before this time.",
    ),
    option("--status-regex", metavar="RE2", help="Only jobs whose status this is found in."),
    option("--message", metavar="TEXT", help="Only jobs that `job failures` groups under this."),
    option("--place", metavar="TEXT", help="Only jobs that failed in this place, as shown there."),
    option("--worker", metavar="SOURCE", help="Only jobs that this source claimed last."),
)
partial_option = option(
    *("--partial", "accept_partial"),
    is_flag=True,
    help="Leave out shards that are unavailable; stderr names them.",
)

progress_option = option(
    "--progress/--no-progress",
    default=None,
    help="Say each second on stderr how far the search got  [default: if that is a terminal]",
)


def shows_progress(*, asked: bool | None) -> bool:
    """Tell whether a search says how far it got; None: if stderr is a terminal."""
    return sys.stderr.isatty() if asked is None else asked


def warn_without(shards: Collection[str]) -> None:
    """Name on stderr the shards whose jobs an answer lacks, if there are any."""
    if shards:
        sentence = without_shards(sorted(shards)).replace("Without", "without")
        click.echo(f"warning: {sentence.rstrip('.')}", err=True)


# --- the service ------------------------------------------------------------------------------


def connect(*, max_connections: int = 1) -> Client:
    """Return a client of the service that is meant."""
    from pinlaterd.client import AddressInvalid, Client

    server = server_settings()
    host, port = _recall("host") or server.host, _recall("port") or server.port
    try:
        return Client(host, port, max_connections=max_connections)
    except AddressInvalid as error:
        raise click.UsageError(str(error)) from None


def names_service() -> bool:
    """Tell whether --host or --port name the service, which may be another than DIR's."""
    return bool(_recall("host") or _recall("port"))


def server_settings() -> ServerSettings:
    """Return the deployment's settings, or the defaults if --host or --port name the service."""
    if names_service():
        return _SERVER
    from pinlaterd.config.load import load_config

    try:
        return load_config(directory() / ETC).server
    except ConfigError as error:
        raise ConfigError(
            [*error.problems, "mend that, choose another --dir, or give --host and --port"]
        ) from error


def stats_url() -> str | None:
    """Return --stats-url, if it was given."""
    return cast("str | None", _recall("stats_url"))


# --- output -----------------------------------------------------------------------------------


def wants_json() -> bool:
    return bool(_recall("json"))


def show(facts: object, text: str | Callable[[], object] | None = None) -> None:
    """Print the facts on one line for programs, or the text for people, or call what prints it;
    None: it is printed already."""
    if wants_json():
        click.echo(json.dumps(facts))
    elif callable(text):
        text()
    elif text is not None:
        click.echo(_printable_lines(str(text)))


def show_jobs(descriptors: Sequence[str], queue: str | None, keys: Sequence[str]) -> None:
    """Show all that is known of jobs, named by descriptors and by keys in `queue`; fail if one of
    them is unknown. In JSON a job stands under the name that was given."""
    if not (descriptors or keys):
        raise click.UsageError("name a job: its descriptor, or --queue and its --key")
    if bool(keys) != (queue is not None):
        raise click.UsageError("--queue and --key go together")
    with connect() as client:
        records = dict(client.lookup(descriptors, include_body=True)) if descriptors else {}
        if queue is not None:
            records |= client.lookup_keys(queue, keys, include_body=True)
    show(
        {name: record_facts(record) for name, record in records.items()},
        "\n".join(map(record_text, records.values())) if records else None,
    )
    unknown = [printable(name) for name in (*descriptors, *keys) if name not in records]
    if unknown:
        fail(f"unknown: {', '.join(unknown)}")


key_options = together(
    option("--queue", metavar="NAME", help="The queue of the keys."),
    option("--key", "keys", multiple=True, metavar="KEY", help="Jobs that hold these keys."),
)


def show_queue_names() -> None:
    """Print the queues' names, one a line."""
    with connect() as client:
        names = sorted(client.queue_names(), key=natural)
    show(names, "\n".join(map(printable, names)) if names else None)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show `what` on a terminal while a block of code takes a while, then the last text that the
    block tells."""
    from rich.console import Console

    with Console(stderr=True).status(what) as shown:
        yield lambda text: shown.update(f"{text} …")


def telling(call: PreparedCall[int], tell: Callable[[str], None]) -> PreparedCall[int]:
    """Return `call`, which a client may make several times, so that it tells how many jobs all of
    its answers have named."""
    from pinlaterd.client import calls

    answers: list[int] = []

    def note(jobs: int) -> None:
        answers.append(jobs)
        tell(f"{how_many(sum(answers), 'job')} so far")

    return calls.noting(call, note)


# --- jobs and times as text ---------------------------------------------------------------------
# Bodies and custom statuses come from anybody. On their way to a terminal everything that could
# command it is escaped; in JSON they are exact.

MAX_SHOWN_CHARS = 200
_MAX_LINE_CHARS = 2000


def printable(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """Return `text` on one line, cut, with everything but printable characters escaped."""
    cut = text[:max_chars]
    return escaped(cut) if len(text) <= max_chars else f"{escaped(cut)}… ({len(text)} characters)"


def printable_line(message: str) -> str:
    """Return a message on one line, which may be longer than what is shown of a job."""
    return printable(message, _MAX_LINE_CHARS)


def _printable_lines(text: str) -> str:
    """Escape lines of ours, in which texts of others may stand, without joining them."""
    return "\n".join(map(escaped, text.split("\n")))


def printable_body(body: bytes) -> str:
    """Return a body as text, cut, with bytes that are no printable text escaped as \\xNN."""
    text = body[: MAX_SHOWN_CHARS * 4].decode("utf-8", "backslashreplace")
    shown = escaped(text[:MAX_SHOWN_CHARS])
    is_whole = len(text) <= MAX_SHOWN_CHARS and len(body) <= MAX_SHOWN_CHARS * 4
    return shown if is_whole else f"{shown}… ({len(body)} bytes)"


def record_facts(record: JobRecord) -> dict[str, object]:
    """Return a job for JSON, exactly; a body that is not UTF-8 comes as `body_base64`."""
    facts = {**record._asdict(), "state": record.state.name}
    facts |= _options_of(facts.pop("options"))
    if record.body is None:
        del facts["body"]
        return facts
    try:
        facts["body"] = record.body.decode()
    except UnicodeDecodeError:
        del facts["body"]
        facts["body_base64"] = base64.b64encode(record.body).decode()
    return facts


def record_text(record: JobRecord) -> str:
    """Return a job for people, a fact a line."""
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
    for name, value in _options_of(record.options).items():
        if name.endswith("_us"):  # the same times more exactly, for JSON
            continue
        shown = shown_time(int(value)) if name.endswith("_ms") else printable(str(value))
        lines.append(f"  {name.removesuffix('_ms').replace('_', ' '):14} {shown}")
    if record.body is not None:
        lines.append(f"  body           {printable_body(record.body)}")
    return "\n".join(line.rstrip() for line in lines)


def _options_of(options: JobOptions | None) -> dict[str, str | int]:
    """Return the options that a job has, by their names."""
    named = {} if options is None else options._asdict()
    return {name: value for name, value in named.items() if value is not None}


def shown_time(at_ms: int) -> str:
    """Write a time in UTC with milliseconds; times that no calendar holds stay numbers."""
    try:
        at = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- tables -------------------------------------------------------------------------------

# A title, one that starts with # being of numbers, and what shows it of a row, or its key there.
Column = tuple[str, Callable[[Any], object] | str | int]


def print_table(columns: Sequence[Column], rows: Iterable[Any]) -> None:
    """Print rows as they come in a pipe, and as one table on a terminal."""
    from rich.console import Console  # loading it takes a while

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(make_table(columns, rows))
        return
    print("\t".join(title.removeprefix("#") for title, _ in columns))  # noqa: T201
    for row in rows:
        print("\t".join(_cells(columns, row)))  # noqa: T201


def make_table(
    columns: Sequence[Column], rows: Iterable[Any], *, wrap: bool = True, most: int | None = None
) -> Table:
    """Make a table for a terminal. Without `wrap` a row is one line, cut where the terminal ends.
    If there are more than `most` rows, the last one says how many are not shown."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, _ in columns:
        table.add_column(
            title.removeprefix("#"),
            justify="right" if title.startswith("#") else "left",
            overflow="fold" if wrap else "ellipsis",
            no_wrap=not wrap,
        )
    every = list(rows)
    shown = every if most is None or len(every) <= most else every[: most - 1]
    for row in shown:
        table.add_row(*map(Text, _cells(columns, row)))
    if len(shown) < len(every):
        table.add_row(f"… {len(every) - len(shown)} more")
    return table


def _cells(columns: Sequence[Column], row: Any) -> list[str]:
    return [printable(str(cell(row) if callable(cell) else row[cell])) for _, cell in columns]
