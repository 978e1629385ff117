"""`pinlater-admin user`: who may use the HTTP interface, and for what (etc/users.yaml)."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime, timedelta

import click

from pinlaterd.cli import command
from pinlaterd.cli.shards import carry_out
from pinlaterd.config import edit
from pinlaterd.config.edit_text import Value
from pinlaterd.config.layout import ETC, USERS_FILE
from pinlaterd.config.password import hash_password
from pinlaterd.config.schema import ROLES

_TOKEN_BYTES = 32
_expires_option = command.option(
    "--expires",
    "days",
    type=click.IntRange(1, 36_500),
    metavar="DAYS",
    help="The token ends after so many days  [default: never]",
)


@click.group(cls=command.Group)
def user() -> None:
    """Add, list and remove users of the HTTP interface.

    Without any user the interface is open to every client on this machine; from the
    first user on every request needs one.
    """


@user.command()
@click.argument("name")
@command.option(
    "--role",
    "roles",
    required=True,
    multiple=True,
    type=click.Choice(ROLES),
    help="What it may do; give it again for more.",
)
@command.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="PATTERN",
    help="Of which queues, as a shell pattern; give it again for more  [default: all]",
)
@click.option("--password-stdin", is_flag=True, help="Read its password from standard input.")
@click.option("--token", "with_token", is_flag=True, help="Make a token, and print it once.")
@_expires_option
@command.files_options
def add(
    *,
    name: str,
    roles: tuple[str, ...],
    queues: tuple[str, ...],
    password_stdin: bool,
    with_token: bool,
    days: int | None,
) -> None:
    """Add the user NAME, which proves itself by a password, a token, or either.

    Only hashes are kept: nothing can show a token again. It acts within a second.

    Examples:
      printf '%s' SECRET | pinlater-admin user add ada --role admin --password-stdin
      pinlater-admin user add ci --role enqueue --queue 'mail*' --token
    """
    if not (password_stdin or with_token):
        raise click.UsageError("give --password-stdin, --token, or both")
    settings: dict[str, Value] = {"roles": list(roles)}
    if queues:
        settings["queues"] = list(queues)
    if password_stdin:
        settings["password_hash"] = hash_password(command.read_password("Password"))
    token = ""
    if with_token:
        token, kept = _new_token(days)
        settings["tokens"] = [kept]
    etc = command.directory() / ETC
    carry_out(lambda: edit.add_user(etc, name, settings), USERS_FILE, f"user {name} is added")
    _show_token(name, token)


@user.command()
@click.argument("name")
@_expires_option
@command.files_options
def token(*, name: str, days: int | None) -> None:
    """Give the user NAME one more token, and print it once.

    Example: pinlater-admin user token ci --expires 90
    """
    made, kept = _new_token(days)
    etc = command.directory() / ETC
    carry_out(lambda: edit.add_token(etc, name, kept), USERS_FILE, f"user {name} has a new token")
    _show_token(name, made)


@user.command()
@click.argument("name")
@command.files_options
def remove(*, name: str) -> None:
    """Remove the user NAME: its password and tokens are refused within a second.

    Example: pinlater-admin user remove ci
    """
    etc = command.directory() / ETC
    carry_out(lambda: edit.remove_user(etc, name), USERS_FILE, f"user {name} is removed")


@user.command("list")
@command.files_options
def list_users() -> None:
    """List the users, with what each may do.

    Example: pinlater-admin user list
    """
    from pinlaterd.config.load import load_config

    rows = [
        {
            "name": one.name,
            "roles": " ".join(one.roles),
            "queues": " ".join(one.queues),
            "password": "yes" if one.password_hash else "no",
            "tokens": len(one.tokens),
        }
        for one in load_config(command.directory() / ETC).users.values()
    ]
    columns: list[command.Column] = [
        ("user", "name"),
        ("roles", "roles"),
        ("queues", "queues"),
        ("password", "password"),
        ("#tokens", "tokens"),
    ]
    command.show(rows, lambda: command.print_table(columns, rows))


def _new_token(days: int | None) -> tuple[str, dict[str, Value]]:
    """Make a token; return it and what users.yaml keeps of it."""
    made = secrets.token_urlsafe(_TOKEN_BYTES)
    kept: dict[str, Value] = {"sha256": hashlib.sha256(made.encode()).hexdigest()}
    if days is not None:
        expires = datetime.now(UTC) + timedelta(days=days)
        kept["expires"] = expires.isoformat(timespec="seconds").replace("+00:00", "Z")
    return made, kept


def _show_token(name: str, made: str) -> None:
    """Print a token where one was made: alone on standard output, for scripts."""
    if made:
        command.show({"user": name, "token": made}, made)
