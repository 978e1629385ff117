"""`pinlater-admin shard …`: the shards, and the commands that change etc/shards.yaml.

Each of those edits the file as a person would, and returns once all processes follow it, by
`carry_out`, which commands that change etc/queues.yaml use, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

from pinlaterd.cli import command, service_status
from pinlaterd.clock import Clock, polls
from pinlaterd.config import edit, layout
from pinlaterd.config.active import load_active
from pinlaterd.config.edit_text import Value
from pinlaterd.config.layout import ETC, SHARDS_FILE, ConfigFiles
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import DEFAULT_ENGINE, ENGINES, Config
from pinlaterd.engines import make_engine
from pinlaterd.errors import ConnectionFailed, DeploymentError, ShardOwned, StorageError
from pinlaterd.lifecycle import ExitCode
from pinlaterd.status import SILENT, shards_of

_SERVE_SECONDS = 60.0
_FOLLOW_SECONDS = 60.0
_DOWN = ("stopped", "silent")  # a frozen router is held off by the shards, which refuse by then

_COLUMNS: Sequence[command.Column] = (
    ("shard", "name"),
    ("engine", "engine"),
    ("where", lambda shard: shard["where"] or "-"),
    ("state", service_status.shown_state),
    ("enqueues", service_status.enqueues),
    ("#pending", service_status.held("pending")),
    ("#scheduled", service_status.held("scheduled")),
    ("#in progress", service_status.held("in_progress")),
    ("#succeeded", service_status.held("succeeded")),
    ("#failed", service_status.held("failed")),
)


@click.group(cls=command.Group)
def shard() -> None:
    """Change the shards of the service."""


@shard.command("list")
@command.files_options
def list_shards() -> None:
    """Show each shard: where its jobs lie, how it is, how many it holds in each state.

    SCHEDULED are jobs whose run-after is still to come; PENDING are the others that wait.

    Example: pinlater-admin shard list
    """
    found = shards_of(service_status.take_sample())
    command.show(found, lambda: command.print_table(_COLUMNS, found))


# --- after an edit --------------------------------------------------------------------------
# The coordinator names the files that it has carried out, or refused, by their digest; every
# process names the configuration that it follows. A process that is down follows once it starts. Of
# what the coordinator has against the files, a refused removal concerns that shard alone, and all
# else acts. Anything else is a mistake in them, and keeps all three files from acting.


class EditRefused(DeploymentError):
    """The coordinator has something against what was written. `mistakes`: not only against the
    removal of a shard."""

    def __init__(self, problems: Mapping[str, str | None]) -> None:
        super().__init__("; ".join(map(command.printable_line, problems)))
        self.mistakes = None in problems.values()


def carry_out(
    change: Callable[[], edit.Edited], name: str, done: str, *, removed: str | None = None
) -> bool:
    """Have `change` edit etc/`name`, wait until every process follows, and tell that `done` is so.
    In a cluster the change is made again, to the new file, if an edit on another server came first.

    False if the coordinator is away: then what was written acts when it is back. Raises EditRefused
    unless all that the coordinator refuses is the removal of other shards than `removed`. Ends the
    program with a message if it takes too long."""
    etc = command.directory() / ETC
    with edit.lock_edits(etc, patient=True):
        try:
            for mine in edit.attempts(etc / name, change):
                was_changed = mine is not None
                with command.waiting("waiting until the service follows"):
                    problems = _wait_until_followed()
        except ConnectionFailed:
            click.echo(
                f"{done}: it is written, and acts when the coordinator is back; `pinlaterd status` "
                "shows how the service is",
                err=True,
            )
            return False
    tell(done, problems, was_changed=was_changed, removed=removed)
    return True


def tell(
    done: str, problems: Mapping[str, str | None], *, was_changed: bool, removed: str | None = None
) -> None:
    """Report what was done. `problems`: what the coordinator has against the files, and the shard
    whose removal it refuses by that; None for a mistake."""
    against = {text: shard for text, shard in problems.items() if shard in (None, removed)}
    if against:
        raise EditRefused(against)
    for text in problems:
        click.echo(f"warning: {command.printable_line(text)}", err=True)
    click.echo(f"{done}{'' if was_changed else ' already'}", err=True)


def _wait_until_followed() -> Mapping[str, str | None]:
    for is_late in polls(_FOLLOW_SECONDS):
        status = service_status.fetch()
        against = status["config_problems"]
        frozen = [
            f"{process['name']} does not answer"
            for process in status["processes"]
            if process["state"] == SILENT
        ]
        waits_for = "; ".join(["the coordinator has not carried it out", *against, *frozen])
        if status["config_judged"] == ConfigFiles(command.directory() / ETC).digest:
            behind = [
                process["name"]
                for process in status["processes"]
                if process["kind"] != layout.COORDINATOR
                and process["state"] not in _DOWN
                and process["config_version"] < status["config_version"]
            ]
            behind += [
                f"server {server['name']}"
                for server in status["servers"]
                if server["state"] == "alive" and server["config"] < status["config_number"]
            ]
            if not behind:
                shards = {text: name for name, text in status["refused_removals"].items()}
                return {text: shards.get(text) for text in status["config_problems"]}
            waits_for = f"{', '.join(behind)} has not followed"
        if is_late:
            command.fail(
                f"what was written does not act after {_FOLLOW_SECONDS:.0f} s: {waits_for}; "
                "see `pinlater-admin status` and run/log"
            )
    raise AssertionError("polls without end")


# --- dequeue-only ---------------------------------------------------------------------------


@shard.command("dequeue-only")
@click.argument("name")
@click.argument("state", type=click.Choice(["on", "off"]), metavar="on|off")
@command.yes_option
@command.files_options
def dequeue_only(*, name: str, state: str, yes: bool) -> None:
    """Have shard NAME take no new jobs (on), or take them again (off).

    Once this returns, no job is enqueued there any more. Asks if other shards go along, or if no
    shard would be left that takes jobs.

    Examples:
      pinlater-admin shard dequeue-only 3 on
      pinlater-admin shard dequeue-only 3 off
    """
    concerned = edit.shards_alike(command.directory() / ETC, name)
    acts = set_dequeue_only(name, on=state == "on", yes=yes)
    command.show({"shards": concerned, "dequeue_only": state == "on", "acts": acts})


def set_dequeue_only(name: str, *, on: bool, yes: bool) -> bool:
    """Return whether all follow by now, else when the coordinator is back. Fails if refused."""
    etc = command.directory() / ETC
    concerned = edit.shards_alike(etc, name)
    if len(concerned) > 1:
        command.confirm(
            f"Shards {', '.join(concerned)} are one entry, and go along. Do it?", yes=yes
        )
    shards = load_config(etc).shards.values()
    left = [s.name for s in shards if not s.dequeue_only and s.name not in concerned]
    if on and not left:
        command.confirm(
            "No shard is left that takes jobs: every enqueue will be refused. Do it?", yes=yes
        )
    done = f"shard {', '.join(concerned)} {'takes no new jobs' if on else 'takes new jobs'}"
    return carry_out(lambda: edit.set_dequeue_only(etc, name, on=on), SHARDS_FILE, done)


# --- add ------------------------------------------------------------------------------------


@shard.command()
@click.argument("name")
@command.option("--engine", type=click.Choice(ENGINES), default=DEFAULT_ENGINE)
@command.option("--server", help="In a cluster: the only server for it; files need one.")
@command.option("--file", help="sqlite: the database  [default: data/shard-NAME.sqlite]")
@command.option("--host", "master_host", help="mysql, redis: the server's host.")
@command.option("--port", "master_port", type=command.PORT, help="mysql, redis.")
@command.option("--user", help="mysql, redis.")
@command.option("--passwd-env", metavar="NAME", help="The variable that has the password.")
@command.option("--passwd-file", metavar="PATH", help="The file that has the password.")
@command.option("--dequeue-only", is_flag=True, help="It takes no new jobs.")
@command.files_options
def add(
    *,
    name: str,
    engine: str,
    file: str | None,
    master_host: str | None,
    master_port: int | None,
    dequeue_only: bool,
    **others: str | None,
) -> None:
    """Add shard NAME. Returns once it serves; every queue is there.

    --host and --port are the store's here, and the password is never an argument, which everyone on
    the machine could read.

    Examples:
      pinlater-admin shard add 4
      pinlater-admin shard add 4 --engine redis --host redis7 --port 6379
      pinlater-admin shard add 4 --engine mysql --host db7 --port 3306 --user plq \\
        --passwd-file /etc/pinlaterd/passwd
    """
    if (master_host is None) != (master_port is None):
        raise click.UsageError("give both --host and --port, or none of them")
    master: Value | None = None
    if master_host is not None and master_port is not None:
        master = {"host": master_host, "port": master_port}
    given = {"engine": engine, "file": file, "master": master, **others}
    settings: dict[str, Value] = {key: each for key, each in given.items() if each is not None}
    if dequeue_only:
        settings["dequeue_only"] = True
    etc = command.directory() / ETC
    followed = carry_out(
        lambda: edit.add_shard(etc, name, settings), SHARDS_FILE, f"shard {name} is added"
    )
    if followed:
        with command.waiting(f"waiting until shard {name} serves"):
            _wait_until_serving(name)
    command.show({"shard": name, "serves": followed})


def _wait_until_serving(name: str) -> None:
    for is_late in polls(_SERVE_SECONDS):
        found = service_status.find_shard(name)
        if found is not None and found["state"] == "serving":
            return
        if is_late:
            command.fail(
                f"shard {name} does not serve after {_SERVE_SECONDS:.0f} s; see "
                f"run/log/shard-{name}.log. It is part of the service: mend that, or "
                f"`pinlater-admin shard remove {name} --force`"
            )


# --- remove ---------------------------------------------------------------------------------


@shard.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Also with the jobs that it holds: they are given up.")
@command.yes_option
@command.files_options
def remove(*, name: str, force: bool, yes: bool) -> None:
    """Take shard NAME out of the service. Its store is left as it is.

    With it go the keys of the jobs that it kept, ended ones included: an enqueue with such a key
    stores a job again. `shard drain --move` carries the keys of scheduled jobs along.

    Refused, with the counts, while jobs are pending or in progress there, scheduled ones included:
    `shard drain` it first. --force gives them up: nobody gets them any more, until a shard
    of that name and store is added again.

    Examples:
      pinlater-admin shard remove 3
      pinlater-admin shard remove 3 --force --yes
    """
    etc = command.directory() / ETC
    if name in load_config(etc).shards:
        alike = edit.shards_alike(etc, name)
        if len(alike) > 1:
            command.fail(
                f"shards {', '.join(alike)} are one entry of {SHARDS_FILE}; edit it by hand"
            )
    jobs = _jobs_of(name)
    if force:
        command.confirm(f"Give up {_shown(jobs)} of shard {name}?", yes=yes)
    elif jobs is not None and jobs["pending"] + jobs["scheduled"] + jobs["in_progress"]:
        command.fail(f"shard {name} holds {_shown(jobs)}; {_drain_first(name)}")
    acts = _remove(etc, name, force=force)
    if acts:
        click.echo(f"the keys of the jobs that shard {name} kept have gone with it", err=True)
    if force and acts:
        edit.forget_abandoned(etc, name)
    command.show({"shard": name, "given_up": jobs if force else None, "acts": acts})


def _remove(etc: Path, name: str, *, force: bool) -> bool:
    """Edit, and wait; if the coordinator refuses, the file is as it was before. Returns whether the
    shard has gone: not yet, if the coordinator is away."""
    path = etc / SHARDS_FILE
    before = b""
    after: edit.Edited = None

    def change() -> edit.Edited:
        nonlocal before, after
        before = path.read_bytes()
        after = edit.remove_shard(etc, name, abandon=force)
        return after

    def as_before(now: bytes, _config: Config) -> bytes:
        return before if now == after else now

    try:
        return carry_out(change, SHARDS_FILE, f"shard {name} is removed", removed=name)
    except EditRefused as refused:
        edit.edit_file(etc, SHARDS_FILE, as_before)
        command.fail(str(refused) if refused.mistakes else f"{refused}. {_drain_first(name)}")


def _jobs_of(name: str) -> Mapping[str, int] | None:
    """Return what it holds; None if nobody knows."""
    try:
        found = service_status.find_shard(name)
    except ConnectionFailed:
        return None
    return found["jobs"] if found is not None else None


def _drain_first(name: str) -> str:
    return (
        f"`pinlater-admin shard drain {name} --wait` first, with --move for the scheduled ones, or "
        "abandon them with --force"
    )


def _shown(jobs: Mapping[str, int] | None) -> str:
    if jobs is None:
        return "all jobs (how many is not known: it does not serve, or counts them)"
    return (
        f"{jobs['pending']:,} pending, {jobs['scheduled']:,} scheduled and "
        f"{jobs['in_progress']:,} running jobs"
    )


# --- check ----------------------------------------------------------------------------------


@shard.command("check")
@click.argument("name")
@click.option("--repair", is_flag=True, help="Mend what is found.")
@command.files_options
def check_shard(*, name: str, repair: bool) -> None:
    """Compare what the store of shard NAME holds in several places, over all its jobs.

    The shard must be stopped. Exit 1 if anything disagrees and is not repaired.

    Examples:
      supervisorctl -c etc/supervisord.conf stop shard-1
      pinlater-admin shard check 1
      pinlater-admin shard check 1 --repair
      supervisorctl -c etc/supervisord.conf start shard-1
    """
    command.enter()
    config = load_active(command.directory() / ETC).config
    settings = config.shards.get(name)
    if settings is None:
        command.fail(f"no shard {name!r}; there are: {', '.join(config.shards) or 'none'}")
    engine = make_engine(settings, config.server)
    try:
        engine.open(Clock().now_ms())
        try:
            found = engine.check(repair=repair)
        finally:
            engine.close()
    except ShardOwned as error:
        stop = f"supervisorctl -c etc/supervisord.conf stop shard-{name}"
        command.fail(f"{error.message}; stop it first: {stop}")
    except StorageError as error:
        command.fail(error.message)
    repaired = " (repaired)" if repair else ""
    lines = [f"queue {queue}: {jobs:,} {problem}{repaired}" for queue, problem, jobs in found]
    facts = {"shard": name, "repaired": repair, "found": [one._asdict() for one in found]}
    command.show(facts, "\n".join(lines) or f"shard {name} agrees with itself")
    if found and not repair:
        sys.exit(ExitCode.FAILURE)
