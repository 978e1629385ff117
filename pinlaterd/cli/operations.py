"""The dashboard's operations: `pinlater-admin operation`, `job restore`.

The dashboard's process carries them out, and takes these commands at run/web.sock.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from pinlaterd.cli import command
from pinlaterd.client.coordinator import UnixConnection
from pinlaterd.config.layout import WEB_SOCKET
from pinlaterd.errors import ConnectionFailed, how_many
from pinlaterd.lifecycle import ExitCode
from pinlaterd.model import JobChoice, JobState
from pinlaterd.status import Facts

if TYPE_CHECKING:
    from pinlaterd.client import Client

_LOOK_SECONDS = 0.5
_GOES_ON = "may go on, see `pinlater-admin operation list`"
_NUMBER = click.IntRange(1, 10**9 - 1)
_number = click.argument("number", type=_NUMBER)
_COLUMNS: Sequence[command.Column] = (
    ("#number", "number"),
    ("what", lambda one: f"{one['what']} {one['state'].replace('_', ' ')} jobs"),
    ("queue", "queue"),
    ("who", "who"),
    ("reason", "reason"),
    ("outcome", "outcome"),
)


class DashboardAway(ConnectionFailed):
    """The dashboard does not answer. `cure`: what to do about that."""

    cure = "is it running? `pinlaterd up` starts it where `web_port` is not 0, --dir chooses it"


@click.group(cls=command.Group)
def operation() -> None:
    """Show, stop and resume operations: changes of many jobs that the dashboard carries out."""


@operation.command("list")
@command.files_options
def list_operations() -> None:
    """List the operations that the dashboard remembers, the latest first, and how each stands.

    Example: pinlater-admin operation list
    """
    found = _known()
    command.show(found, lambda: command.print_table(_COLUMNS, found))


@operation.command()
@_number
@command.files_options
def stop(*, number: int) -> None:
    """Have operation NUMBER end behind the batch under way. It may be resumed.

    Example: pinlater-admin operation stop 17
    """
    _show(_act(number, "stop"))


@operation.command()
@_number
@command.files_options
def resume(*, number: int) -> None:
    """Have operation NUMBER go on, which asks, was stopped or interrupted; wait for its end.

    It goes on where this command is interrupted.

    Example: pinlater-admin operation resume 17
    """
    _show(_until_ended(_act(number, "go_on")))


@click.command(cls=command.Command)
@click.argument("number", type=_NUMBER, required=False)
@command.option("--preview", is_flag=True, help="Only say how many jobs that would be.")
@command.yes_option
@command.files_options
def restore(*, number: int | None, preview: bool, yes: bool) -> None:
    """Enqueue again what the dashboard has deleted by operation NUMBER; without NUMBER list the
    deletes of which that can be done.

    The jobs have their bodies, priorities and keys, and new descriptors. They are kept for 24
    hours. It goes on where this command is interrupted; `operation stop` ends it.

    Examples:
      pinlater-admin job restore
      pinlater-admin job restore 17 --preview
      pinlater-admin job restore 17
    """
    known = _known()
    if number is None:
        found = [one for one in known if one["can_restore"]]
        command.show(found, lambda: command.print_table(_COLUMNS, found))
        return
    deleted = next((one for one in known if one["number"] == number), None)
    if deleted is not None and deleted["can_restore"]:  # else the dashboard says why
        jobs = f"{how_many(deleted['done'], 'job')} of {deleted['queue']}"
        if preview:
            command.show({"would_restore": deleted["done"]}, f"{jobs} would be enqueued again")
            return
        command.confirm(f"Enqueue {jobs} again?", yes=yes)
    _show(_until_ended(_act(number, "restore")))


def keeps_deleted() -> bool:
    """Tell whether the dashboard can delete jobs and keep them; say on stderr why it can't."""
    why = "--host or --port names the service"
    if not command.names_service():
        try:
            _known()
        except DashboardAway as error:
            why = str(error)
        else:
            return True
    click.echo(f"warning: deleted jobs are not kept, so this can't be undone: {why}", err=True)
    return False


def delete(
    queue: str, state: JobState, call: Facts, since_ms: int | None, expected: int, *, yes: bool
) -> None:
    """Have the dashboard delete the jobs that `call` chooses, which keeps them first; show how that
    has ended. It is stopped where this command is interrupted."""
    from pinlaterd.web.operations import Selection

    priority = call["priority"] or None
    selection = Selection(
        *(queue, state.name.lower(), call["choice"] or JobChoice(), call["body_regex"], since_ms),
        priority=priority,
    )
    asked = {"by": command.user_name(), "most": call["limit"], "expected": expected}
    asked["selection"] = msgspec.to_builtins(selection)
    found: Facts = {}
    kept: int | None = None
    try:
        with _may_go_on("a delete"):
            found = call_dashboard("POST", "/operations", asked)
        found = _until_ended(found)
        while found["phase"] == "asking":  # the trash is full
            kept = found["done"]
            if yes:
                click.echo(f"warning: {found['note']}", err=True)
            command.confirm(f"{found['note']}. Go on?", yes=yes)
            found = _until_ended(_act(found["number"], "go_on"))
    except (KeyboardInterrupt, click.Abort, click.UsageError):
        if found:
            _act(found["number"], "stop")
        else:
            click.echo(f"warning: a delete {_GOES_ON}", err=True)
        raise
    if found["phase"] != "done":
        command.fail(f"operation {found['number']}: {found['outcome']}")
    number, done = found["number"], found["done"]
    kept = done if kept is None else kept
    those = "them" if kept == done else f"{kept:,} of them"
    undo = f"`pinlater-admin job restore {number}` enqueues {those} again, within 24 h"
    if done and not kept:
        undo = "none of them can be enqueued again"
    facts = {"deleted": done, "kept": kept, "operation": number}
    command.show(facts, f"{how_many(done, 'job')} deleted; {undo}")


def delete_named(
    client: Client,
    queue: str,
    state: JobState,
    call: Mapping[str, Any],
    since_ms: int,
    *,
    dry_run: bool,
) -> int:
    """Delete those of the named jobs that nothing has changed since a time; return how many."""
    named = client.lookup(call["choice"].descriptors).values()
    kept = [job.descriptor for job in named if job.updated_at_ms < since_ms]
    left = {**call, "choice": call["choice"]._replace(descriptors=kept)}
    return client.delete_jobs(queue, state, dry_run=dry_run, **left) if kept else 0


def _until_ended(found: Facts) -> Facts:
    """Wait until an operation runs no more; return what is known of it then."""
    which = f"operation {found['number']}"
    with command.waiting(found["outcome"]) as tell, _may_go_on(which):
        while found["phase"] == "running":
            time.sleep(_LOOK_SECONDS)
            found = call_dashboard("GET", f"/operations/{found['number']}")
            tell(found["outcome"])
    return found


def _show(found: Facts) -> None:
    """Show how an operation stands; end the program with exit 1 if it was interrupted."""
    command.show(found, f"operation {found['number']}: {found['outcome']}")
    if found["phase"] == "interrupted":
        sys.exit(ExitCode.FAILURE)


def _known() -> Sequence[Facts]:
    found: Sequence[Facts] = call_dashboard("GET", "/operations")
    return found


def _act(number: int, what: str) -> Facts:
    asked = {"by": command.user_name()}
    with _may_go_on("a restore" if what == "restore" else f"operation {number}"):
        found: Facts = call_dashboard("POST", f"/operations/{number}/{what}", asked)
    return found


@contextlib.contextmanager
def _may_go_on(what: str) -> Iterator[None]:
    """Say of an answer that is lost what may go on all the same."""
    try:
        yield
    except DashboardAway as error:
        raise DashboardAway(f"{what} {_GOES_ON}: {error}") from error


def call_dashboard(method: str, path: str, facts: Facts | None = None) -> Any:
    """Make a call of the dashboard; end the program if it refuses. Raises DashboardAway."""
    directory = command.directory()
    with contextlib.closing(UnixConnection(directory, WEB_SOCKET)) as connection:
        try:
            connection.request(method, path, json.dumps(facts) if facts is not None else None)
            answer = connection.getresponse()
            written = answer.read()
        except (OSError, http.client.HTTPException) as error:
            reason = (getattr(error, "strerror", None) or str(error)).lower()
            raise DashboardAway(
                f"no answer from the dashboard at {directory / WEB_SOCKET}: {reason}"
            ) from error
    try:
        found = json.loads(written)
    except ValueError:  # it is not away: nothing is to be done without it
        command.fail(f"the dashboard answers {answer.status}; its log may say why")
    if isinstance(found, dict) and "error" in found:
        _, _, *number = path.split("/")
        command.fail(f"operation {number[0]}: {found['error']}" if number else found["error"])
    return found
