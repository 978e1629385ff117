"""`pinlater-admin queue …`."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import IO, NoReturn

import click
from rich.console import Console

from pinlaterd.admin import stats_page, target
from pinlaterd.admin.queue_limits import limit, pause, resume
from pinlaterd.admin.tables import NUMBER_COLUMN, print_table
from pinlaterd.client.cli import MAX_SECONDS, Amount, fail, printable
from pinlaterd.client.client import Client
from pinlaterd.model import JobState

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


for command in (limit, pause, resume):
    queue.add_command(command)


@queue.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@target.target_options
def list_queues(*, as_json: bool) -> None:
    """List the queues, a name a line.

    \b
    Example:
      pinlater-admin queue list
    """
    with target.connect() as client:
        names = sorted(client.queue_names())
    if as_json:
        click.echo(json.dumps(names))
    else:
        for name in names:
            click.echo(printable(name))


@queue.command()
@click.argument("name")
@target.target_options
def create(*, name: str) -> None:
    """Create a queue. One that exists is left as it is.

    \b
    Example:
      pinlater-admin queue create mail
    """
    with target.connect() as client:
        client.create_queue(name)
    click.echo(f"queue {name} is there")


@queue.command()
@click.argument("name")
@click.option(
    "--password-file", type=click.File("r"), metavar="F|-", help="Its first line is the password."
)
@target.target_options
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
    with target.connect() as client:
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
@target.json_option
@target.target_options
def stats(*, name: str, seconds: float, as_json: bool) -> None:
    """Show how many jobs are in each state, and how many come and go in a second.

    SCHEDULED are the PENDING ones whose run-after is still to come. Counts stop at the server's
    count_limit for each shard and priority.

    \b
    Example:
      pinlater-admin queue stats mail --seconds 10
    """
    with target.connect() as client:
        counts = _counts(client, name)
    with Console(stderr=True).status(f"measuring for {seconds:g} s"):  # on a terminal only
        rates = _rates(name, seconds)
    if as_json:
        click.echo(json.dumps({"queue": name, "jobs": counts, "per_second": rates}))
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
    page = stats_page.fetch_json(
        "/stats.json", directory=target.directory(), url=target.stats_url()
    )
    counters: dict[str, int] = page["counters"]
    return counters
