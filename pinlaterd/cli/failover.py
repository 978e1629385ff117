"""`pinlater-admin shard failover`: which shards are concerned, what is refused, the order of the
steps (which are the engine's), the change of shards.yaml, and the journal by which an interrupted
command is resumed.

    look -> refuse, or ask -> steps -> shards.yaml -> the old master -> wait for the shards
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import click
import msgspec

from pinlaterd.cli import command, service_status
from pinlaterd.cli.shards import shard
from pinlaterd.clock import polls
from pinlaterd.config.edit import set_servers
from pinlaterd.config.layout import ETC, RUN, replace_file, shard_program
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import Address, Config, ShardSettings
from pinlaterd.engines import has_failover, make_failover
from pinlaterd.engines.failover import Account, Handover, Pair, Step
from pinlaterd.errors import ConfigError, ConnectionFailed, DeploymentError, StorageError
from pinlaterd.wire.control import ProcessState

_SERVE_SECONDS = 60.0
_LOCK = "failover.lock"
_JOURNALS = "failover-*.json"


class FailoverRefused(DeploymentError):
    """A failover that changed nothing, or that was undone. The message says why."""


class FailoverBroken(DeploymentError):
    """A failover that ended half-way. The message says why; the same command resumes it."""


# --- one failover -----------------------------------------------------------------------------


class _Journal(msgspec.Struct):
    """The progress of a failover, kept on disk. It holds no secrets."""

    shards: Sequence[str]
    pair: Pair | None  # None: Sentinels choose the servers
    accept_loss: bool = False
    done: list[str] = []  # the names of steps
    notes: dict[str, str] = {}


class ShardFailover:
    """One failover of a server: of all shards that have it as their master. Only one at a time.

    Its journal is on disk from before the first change to a server until after the last, so that
    the next command resumes one that was interrupted; what `put` (of Notes) was given is there when
    it returns. Where Sentinels choose the servers nothing is kept: a crash leaves nothing that
    they, or time, do not bring to an end."""

    def __init__(
        self,
        directory: Path,
        shard: str,
        *,
        to: Address | None = None,
        accept_loss: bool = False,
        catch_up_seconds: float,
        administrator: Account | None = None,
        replication: Account | None = None,
    ) -> None:
        """`to`, accounts: None for what shards.yaml says. Raises ConfigError, FailoverRefused."""
        self._etc = directory / ETC
        config = load_config(self._etc)
        settings = config.shards.get(shard)
        if settings is None:
            names = ", ".join(config.shards)
            raise FailoverRefused(f"there is no shard {shard!r}; there are: {names}")
        begun = _begun(directory / RUN, shard)
        if begun is not None and begun.pair is not None and to not in (None, begun.pair.replica):
            raise FailoverRefused(
                f"a failover to {begun.pair.replica} was begun and broken off; go on with that"
                " first, without --to"
            )
        self._resumed = begun is not None
        self._journal = journal = begun or _new_journal(config, settings, to)
        journal.accept_loss |= accept_loss
        self._path = directory / RUN / _JOURNALS.replace("*", journal.shards[0])
        self.shards = journal.shards
        own = Account(settings.user, settings.passwd)
        handover = Handover(
            shards=self.shards,
            administrator=administrator or own,
            replication=replication or own,
            accept_loss=journal.accept_loss,
            catch_up_seconds=catch_up_seconds,
        )
        self._failover = make_failover(settings, journal.pair, handover, self)
        self._examination = self._failover.examine()
        self.successor = self._failover.successor
        self.close = self._failover.close

    def get(self, key: str) -> str:
        return self._journal.notes.get(key, "")

    def put(self, key: str, text: str) -> None:
        self._journal.notes[key] = text
        self._write_journal()

    def _write_journal(self) -> None:
        if self._journal.pair is not None:
            replace_file(self._path, msgspec.json.encode(self._journal), durably=True)

    def _end_journal(self) -> None:
        """Remove the journal: nothing is left to resume."""
        self._path.unlink(missing_ok=True)

    def plan(self) -> dict[str, Any]:
        """Return the plan of the failover. Raises FailoverRefused if it is impossible, or could
        lose jobs and `accept_loss` is not set.

        One that was begun is resumed: its steps prove once more what has to be proven."""
        found, accepts_loss = self._examination, self._journal.accept_loss
        if found.obstacles and not self._resumed:
            raise FailoverRefused("; ".join(found.obstacles))
        if found.risks and not accepts_loss and not self._resumed:
            raise FailoverRefused(
                f"acknowledged jobs could be lost: {'; '.join(found.risks)}. Mend that, or give"
                " --accept-loss if what is lost has to be lost"
            )
        return {
            "shards": self.shards,
            "master": found.master._asdict(),
            "replica": found.replica._asdict(),
            "accepted_risks": found.risks if accepts_loss else (),
            "remarks": found.remarks,
            "steps": [step.words for step in self._all_steps()],
            "resumed": self._resumed,
        }

    def _all_steps(self) -> Sequence[Step]:
        steps = list(self._failover.steps())
        if self._journal.pair is not None:
            swap = partial(self._swap, *self._journal.pair)
            steps.append(Step("swap", "swap master and slave in etc/shards.yaml", swap))
        return [*steps, *self._failover.last_steps()]

    def _swap(self, old: Address, new: Address) -> str:
        set_servers(self._etc, self.shards, master=new, slave=old)
        return f"etc/shards.yaml names {new} as the master"

    def carry_out(self, tell: Callable[[str], None]) -> None:
        """Do all steps until shards.yaml names the new master and the old one is seen to.

        Raises FailoverRefused if a step failed and all is as before, FailoverBroken if not."""
        self._write_journal()
        for step in self._steps_to_do():
            try:
                done = step.run()
            except (StorageError, ConfigError, KeyboardInterrupt) as error:
                why = str(error) or "interrupted"
                if step.revocable:
                    self._undo(why)
                raise FailoverBroken(
                    f"{why}. It stopped in the midst of: {step.words}. Give the same command again"
                    " once that is mended: it goes on from there"
                ) from error
            if step.name not in self._journal.done:
                self._journal.done.append(step.name)
                self._write_journal()
            tell(done)
        self._end_journal()

    def _steps_to_do(self) -> Sequence[Step]:
        """Return the steps after the last irrevocable one done: others may have been revoked."""
        steps = self._all_steps()
        for index in range(len(steps), 0, -1):
            step = steps[index - 1]
            if step.name in self._journal.done and not step.revocable:
                return steps[index:]
        return steps

    def _undo(self, why: str) -> NoReturn:
        try:
            self._failover.undo()
        except StorageError as error:
            raise FailoverBroken(
                f"{why}; and putting things back failed: {error.message}. Give the same command"
                " again, or allow writes on the old master by hand"
            ) from error
        self._end_journal()
        raise FailoverRefused(f"{why}. Everything is as it was before")


def _begun(run: Path, shard: str) -> _Journal | None:
    """Read the journal of an unfinished failover of `shard`. Raises ConfigError."""
    for path in sorted(run.glob(_JOURNALS)):
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_Journal)
            if found.pair is None:
                raise ValueError("it names no servers")
        except (OSError, ValueError) as error:
            problem = (
                f"{path}: can't be read ({error}); a failover was begun: see what both servers are,"
                " put them in order by hand, and delete this file"
            )
            raise ConfigError([problem]) from error
        if shard in found.shards:
            return found
    return None


def _new_journal(config: Config, shard: ShardSettings, to: Address | None) -> _Journal:
    """Raises FailoverRefused."""
    if not has_failover(shard):
        raise FailoverRefused(
            f"shard {shard.name} is a file ({shard.file}) and has no replica; restore a backup"
            " instead, see docs/operations.md"
        )
    if shard.sentinel is not None and to is not None:
        raise FailoverRefused(f"Sentinels choose the master of shard {shard.name}; leave out --to")
    along = [other.name for other in config.shards.values() if _same_server(other, shard)]
    return _Journal(along, None if shard.sentinel is not None else _pair(shard, to))


def _pair(shard: ShardSettings, to: Address | None) -> Pair:
    assert shard.master is not None, "the loader sees to it"
    replica = to or shard.slave
    if replica is None:
        raise FailoverRefused(
            f"shard {shard.name} has no slave in etc/shards.yaml; name its replica with"
            " --to HOST:PORT"
        )
    pair = Pair(shard.master, replica)
    if pair.replica == pair.master:
        raise FailoverRefused(f"{pair.replica} is the master of shard {shard.name} already")
    return pair


def _same_server(one: ShardSettings, other: ShardSettings) -> bool:
    if one.sentinel is not None and other.sentinel is not None:
        return one.sentinel.service == other.sentinel.service and not set(
            one.sentinel.addresses
        ).isdisjoint(other.sentinel.addresses)
    return one.master is not None and (one.engine, one.master) == (other.engine, other.master)


def _wait_until_served(shards: Sequence[str], master: Address) -> bool:
    """Wait until each shard serves from `master`. False if no service runs that could.

    Raises FailoverBroken if it takes too long."""
    for is_late in polls(_SERVE_SECONDS):
        try:
            processes = service_status.fetch(whole=True)["processes"]
        except ConnectionFailed:
            return False
        serving = {
            process["name"].rpartition("/")[2]  # without its server
            for process in processes
            if process["state"] == ProcessState.SERVING
            and process["facts"].get("master") == str(master)
        }
        away = [shard for shard in shards if shard_program(shard) not in serving]
        if not away:
            break
        if is_late:
            raise FailoverBroken(
                f"{master} is the master now, but shard {', '.join(away)} does not serve from"
                f" there within {_SERVE_SECONDS:g} s; see `pinlater-admin status`"
            )
    return True


# --- the command ----------------------------------------------------------------------------


def _place(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise click.BadParameter(f"{text!r} is not HOST:PORT")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


@shard.command()
@click.argument("name")
@command.option(
    "--to", type=_place, metavar="HOST:PORT", help="The replica  [default: the shard's slave]"
)
@command.option(
    "--accept-loss", is_flag=True, help="Also where jobs that were acknowledged could be lost."
)
@command.option("--check", is_flag=True, help="Only say what would be done, or why it is refused.")
@command.yes_option
@command.option(
    "--catch-up-seconds",
    type=command.Amount(command.MAX_SECONDS, least=0.1),
    default=60.0,
    help="The longest that the replica may take to catch up, with writes stopped.",
)
@command.option("--user", help="Who may administer both servers  [default: the shard's user]")
@command.option(
    "--passwd-file", type=click.File("r"), metavar="F|-", help="Its first line is --user's password"
)
@command.option(
    "--replication-user",
    help="As whom the old master replicates from the new one  [default: the shard's user]",
)
@command.option("--replication-passwd-file", type=click.File("r"), metavar="F|-")
@command.admin_options
def failover(
    *,
    name: str,
    check: bool,
    yes: bool,
    user: str | None,
    passwd_file: IO[str] | None,
    replication_user: str | None,
    replication_passwd_file: IO[str] | None,
    **wanted: Any,
) -> None:
    """Make the replica of shard NAME its master, and swap both in etc/shards.yaml.

    All shards on that master go along. Stops writes on the old master, waits until the replica has
    all, makes it writable, and returns once the shards serve from there. Refuses, with the reason,
    where a job that was acknowledged could be lost, as when the master does not answer. A command
    that was broken off is gone on with by giving it again.

    Examples:
      pinlater-admin shard failover 1 --check
      pinlater-admin shard failover 1
      pinlater-admin shard failover 1 --to db3.example.com:3306 --yes
      pinlater-admin shard failover 1 --accept-loss --yes
    """
    wanted["administrator"] = _account("--user", user, passwd_file)
    wanted["replication"] = _account(
        "--replication-user", replication_user, replication_passwd_file
    )
    try:
        with (
            command.sole(RUN / _LOCK, "refused: another failover runs in this deployment"),
            contextlib.closing(ShardFailover(command.directory(), name, **wanted)) as one,
        ):
            plan = one.plan()
            if check:
                command.show(plan, lambda: _print_plan(plan))
                return
            if not command.wants_json():
                _print_plan(plan)
            command.confirm("Do it?", yes=yes)
            _carry_out(one)
    except (FailoverRefused, StorageError) as error:
        command.fail(f"refused: {error}")


def _account(option: str, user: str | None, passwd_file: IO[str] | None) -> Account | None:
    if user is None:
        if passwd_file is not None:
            raise click.UsageError(f"whose password is it? Give {option}, too")
        return None
    return Account(user, "" if passwd_file is None else command.password_in(passwd_file))


def _carry_out(one: ShardFailover) -> None:
    done: list[str] = []

    def tell(text: str) -> None:
        done.append(text)
        if not command.wants_json():
            click.echo(f"  {text}")

    with command.waiting("failing over"):
        one.carry_out(tell)
    master, names = one.successor(), ", ".join(one.shards)
    with command.waiting(f"waiting until {master} serves"):
        served = _wait_until_served(one.shards, master)
    command.show(
        {"shards": one.shards, "master": str(master), "done": done, "serves": served},
        f"shard {names} is served from {master}"
        if served
        else f"no service runs here; shard {names} will use {master}",
    )


_COLUMNS: Sequence[command.Column] = (
    ("server", "server"),
    ("now", "address"),
    ("answers", lambda server: "no" if server["failure"] else "yes"),
    ("writable", lambda server: {None: "?", True: "yes", False: "no"}[server["writable"]]),
    ("replicates from", lambda server: server["replicates_from"] or "-"),
    ("position", lambda server: server["applied"] or server["written"] or "?"),
    ("behind", lambda server: _behind(server["behind_seconds"])),
)


def _behind(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.0f} s"


def _print_plan(plan: Mapping[str, Any]) -> None:
    if plan["resumed"]:
        click.echo("A failover that was broken off is gone on with.")
    click.echo(f"Failover of shard {', '.join(plan['shards'])}")
    click.echo()
    old, new = plan["master"], plan["replica"]
    command.print_table(
        _COLUMNS, [{"server": "old master", **old}, {"server": "new master", **new}]
    )
    click.echo()
    for risk in plan["accepted_risks"]:
        click.echo(f"accepted: {risk}")
    for remark in plan["remarks"]:
        click.echo(f"mind: {remark}")
    for number, step in enumerate(plan["steps"], 1):
        click.echo(f"{number}. {step}")
    click.echo()
