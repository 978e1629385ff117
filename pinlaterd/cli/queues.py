"""`pinlater-admin queue …`."""

from __future__ import annotations

import os
import sys
import time
from typing import IO, Any, NoReturn

import click

from pinlaterd.cli import options, service_status
from pinlaterd.cli.command_line import MAX_SECONDS, Amount, fail
from pinlaterd.cli.rendering import NUMBER_COLUMN, print_json, print_table, printable, waiting
from pinlaterd.client.client import Client
from pinlaterd.config import edit
from pinlaterd.config.layout import ETC
from pinlaterd.errors import ConnectionFailed, PinLaterError
from pinlaterd.model import QUEUE_NAME, JobState

PASSWORD_ENVIRONMENT = "PINLATERD_ADMIN_PASSWORD"  # noqa: S105  a variable's name

# what `stats` shows -> the counter behind it, without `<queue>_`
_RATES = {
    "enqueued": "enqueue",
    "dequeued": "dequeue",
    "succeeded": "ack_succeeded",
    "failed": "ack_failed",
}


@click.group()
def queue() -> None:
    """List, create, delete queues; see what is in them; limit and pause them."""


@queue.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@options.target_options
def list_queues(*, as_json: bool) -> None:
    """List the queues, a name a line.

    \b
    Example:
      pinlater-admin queue list
    """
    with options.connect() as client:
        names = sorted(client.queue_names())
    if as_json:
        print_json(names)
    else:
        for name in names:
            click.echo(printable(name))


@queue.command()
@click.argument("name")
@options.target_options
def create(*, name: str) -> None:
    """Create a queue. One that exists is left as it is.

    \b
    Example:
      pinlater-admin queue create mail
    """
    with options.connect() as client:
        client.create_queue(name)
    click.echo(f"queue {name} is there")


@queue.command()
@click.argument("name")
@click.option(
    "--password-file", type=click.File("r"), metavar="F|-", help="Its first line is the password."
)
@options.target_options
def delete(*, name: str, password_file: IO[str] | None) -> None:
    """Delete a queue with all its jobs.

    Asks for the admin password on a terminal; else it is the first line of standard input,
    unless --password-file or the environment's PINLATERD_ADMIN_PASSWORD has it.

    \b
    Examples:
      pinlater-admin queue delete mail
      pinlater-admin queue delete mail --password-file /run/secrets/pinlaterd
    """
    if password_file is not None:
        password = password_file.readline().rstrip("\r\n")
    elif PASSWORD_ENVIRONMENT in os.environ:
        password = os.environ[PASSWORD_ENVIRONMENT]
    else:
        password = read_password("Admin password")
    with options.connect() as client:
        client.delete_queue(name, password=password)
    click.echo(f"queue {name} is gone")


@queue.command()
@click.argument("name")
@click.option(
    "--seconds",
    type=Amount(MAX_SECONDS, least=0.1),
    default=3.0,
    show_default=True,
    help="Over how long rates are taken.",
)
@options.json_option
@options.target_options
def stats(*, name: str, seconds: float, as_json: bool) -> None:
    """Show how many jobs are in each state, and how many come and go in a second.

    SCHEDULED are the PENDING ones whose run-after is still to come. Counts stop at the server's
    count_limit for each shard and priority.

    \b
    Example:
      pinlater-admin queue stats mail --seconds 10
    """
    with options.connect() as client:
        counts = _counts(client, name)
    with waiting(f"measuring for {seconds:g} s"):
        rates = _rates(name, seconds)
    if as_json:
        print_json({"queue": name, "jobs": counts, "per_second": rates})
        return
    print_table(("state", f"{NUMBER_COLUMN}jobs"), list(counts.items()))
    click.echo()
    print_table(
        ("jobs", f"{NUMBER_COLUMN}per second"),
        [(what, f"{rate:.1f}") for what, rate in rates.items()],
    )


def read_password(prompt: str, *, twice: bool = False) -> str:
    """A password from the terminal, without echo, or the first line of a pipe."""
    if sys.stdin.isatty():
        password: str = click.prompt(prompt, hide_input=True, confirmation_prompt=twice, err=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    return password or _no_password()


def _no_password() -> NoReturn:
    fail("no password was given; type it on the terminal or write it to standard input")


def _counts(client: Client, name: str) -> dict[str, int]:
    counts = {state.name: client.count(name, state) for state in JobState}
    return {"SCHEDULED": client.count(name, JobState.PENDING, future=True), **counts}


def _rates(name: str, seconds: float) -> dict[str, float]:
    """What the server's counters grew by, over at least `seconds`."""
    before, began = _counters(), time.monotonic()
    time.sleep(seconds)
    after = _counters()
    elapsed = time.monotonic() - began
    return {
        what: round((after.get(f"{name}_{c}", 0) - before.get(f"{name}_{c}", 0)) / elapsed, 2)
        for what, c in _RATES.items()
    }


def _counters() -> dict[str, int]:
    [page] = options.ask_coordinator("/stats.json")
    counters: dict[str, int] = page["counters"]
    return counters


_NONE = "none"


class _Rate(click.ParamType[float | None]):
    """Jobs per second, or none."""

    name = "JOBS_PER_SECOND|none"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | None:
        if value == _NONE:
            return None
        try:
            rate = float(value)
        except ValueError:
            rate = -1.0
        if not 0 <= rate < float("inf"):
            self.fail(f"{value!r} is neither a number of jobs per second nor none", param, ctx)
        return rate


def _check_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not QUEUE_NAME.match(value):
        raise click.BadParameter(
            f"{value!r} is no queue name; use letters, digits and underscores", ctx, param
        )
    return value


_name_argument = click.argument("name", callback=_check_name)


# a number below 0 is told to be wrong, and not taken for an option
@queue.command(context_settings={"ignore_unknown_options": True})
@_name_argument
@click.argument("rate", type=_Rate(), metavar="JOBS_PER_SECOND|none")
@options.json_option
@options.deployment_options
def limit(*, name: str, rate: float | None, as_json: bool) -> None:
    """Let no more jobs of queue NAME be dequeued in a second, over the whole cluster.

    Fractions are allowed (0.1: one in ten seconds); 0 stops dequeues; none means no limit.

    \b
    Examples:
      pinlater-admin queue limit mail 100
      pinlater-admin queue limit mail none
    """
    was_changed = edit.set_limit(options.directory() / ETC, name, rate)
    shown = "no limit" if rate is None else f"a limit of {rate:g} jobs/s"
    _finish(name, f"queue {name} has {shown}", was_changed=was_changed, as_json=as_json)


@queue.command()
@_name_argument
@options.json_option
@options.deployment_options
def pause(*, name: str, as_json: bool) -> None:
    """Let no jobs of queue NAME be dequeued until it is resumed. Its limit is kept.

    \b
    Example:
      pinlater-admin queue pause mail
    """
    was_changed = edit.set_paused(options.directory() / ETC, name, paused=True)
    _finish(name, f"queue {name} is paused", was_changed=was_changed, as_json=as_json)


@queue.command()
@_name_argument
@options.json_option
@options.deployment_options
def resume(*, name: str, as_json: bool) -> None:
    """Let jobs of queue NAME be dequeued again, under the limit that it had.

    \b
    Example:
      pinlater-admin queue resume mail
    """
    was_changed = edit.set_paused(options.directory() / ETC, name, paused=False)
    _finish(name, f"queue {name} is resumed", was_changed=was_changed, as_json=as_json)


def _finish(name: str, done: str, *, was_changed: bool, as_json: bool) -> None:
    acts = service_status.say_when_followed(done, was_changed=was_changed)
    _warn_of_unknown(name)
    if as_json:
        facts = edit.limit_settings(options.directory() / ETC, name)
        print_json({"queue": name, **facts._asdict(), "acts": acts})


def _warn_of_unknown(name: str) -> None:
    """Settings may come before their queue; mistyped ones look the same, and do nothing."""
    try:
        with options.connect() as client:
            is_known = name in client.queue_names()
    except (PinLaterError, ConnectionFailed):
        return  # whether it is there can't be told now
    if not is_known:
        click.echo(
            f"warning: there is no queue {name} yet; `pinlater-admin queue list` shows those there "
            "are",
            err=True,
        )
