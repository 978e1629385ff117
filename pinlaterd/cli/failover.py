"""`pinlater-admin shard failover`: from the look at both servers until the shards serve from the
new one.

Which steps there are is the engine's (engines/failover.py). What is here is the same for all:
which shards are concerned, what is refused, the order, the change of shards.yaml, and the journal
by which a command that was broken off is gone on with.

    look -> refuse, or ask -> steps -> shards.yaml -> the old master -> wait for the shards

A server is failed over as a whole: all shards of shards.yaml that have it as their master go along.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import click

from pinlaterd.cli import options, service_status
from pinlaterd.cli.command_line import MAX_SECONDS, Amount, fail, yes_option
from pinlaterd.cli.journal import Journal
from pinlaterd.cli.rendering import print_json, print_table, waiting
from pinlaterd.cli.shards import shard
from pinlaterd.config.edit import set_servers
from pinlaterd.config.files import lock
from pinlaterd.config.layout import ETC, RUN, shard_program
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import Address, Config, ShardSettings
from pinlaterd.engines.failover import (
    Account,
    Examination,
    Failover,
    Handover,
    Pair,
    Place,
    ServerFacts,
    Step,
)
from pinlaterd.engines.registry import has_failover, make_failover
from pinlaterd.errors import ConfigError, ConnectionFailed, StorageError
from pinlaterd.wire.control import ProcessState

_SERVE_SECONDS = 60.0
_LOCK = "failover.lock"
_SWAP = "swap"  # the step that is ours: shards.yaml
_POLL_SECONDS = 0.1

Tell = Callable[[str], None]


class FailoverRefused(Exception):
    """Why nothing was done, or why all that was done was undone."""


class FailoverBroken(Exception):
    """Why it ended half-way; the same command goes on with it."""


class Wanted(NamedTuple):
    """What somebody asked for. `to`, accounts: None for what shards.yaml says."""

    shard: str
    to: Address | None
    accept_loss: bool
    administrator: Account | None
    replication: Account | None
    catch_up_seconds: float


class Plan(NamedTuple):
    """What would be done. `risks` are accepted."""

    shards: Sequence[str]
    resumed: bool
    examination: Examination
    risks: Sequence[str]
    steps: Sequence[str]


class ShardFailover:
    """One failover of a deployment's shards. To be used in `alone`."""

    def __init__(self, directory: Path, wanted: Wanted) -> None:
        """Raises ConfigError, FailoverRefused."""
        self._etc = directory / ETC
        config = load_config(self._etc)
        settings = config.shards.get(wanted.shard)
        if settings is None:
            names = ", ".join(config.shards)
            raise FailoverRefused(f"there is no shard {wanted.shard!r}; there are: {names}")
        journal = Journal.find(directory / RUN, wanted.shard)
        if journal is None:
            journal = _new_journal(directory / RUN, config, settings, wanted)
        else:
            _check_same(journal, wanted)
            if wanted.accept_loss:
                journal.accept_loss()
        self._journal = journal
        self._failover = _make(settings, journal, wanted)
        self._examination = self._failover.examine()

    def plan(self) -> Plan:
        """Raises FailoverRefused if it can't be done, or not without loss that nobody accepted.

        One that was begun is gone on with: its steps prove once more what has to be proven."""
        found, journal = self._examination, self._journal
        if found.obstacles and not journal.resumed:
            raise FailoverRefused("; ".join(found.obstacles))
        if found.risks and not journal.accepts_loss and not journal.resumed:
            raise FailoverRefused(
                f"acknowledged jobs could be lost: {'; '.join(found.risks)}. Mend that, or give"
                " --accept-loss if what is lost has to be lost"
            )
        return Plan(
            journal.shards,
            journal.resumed,
            found,
            found.risks if journal.accepts_loss else (),
            [step.words for step in self._all_steps()],
        )

    def _all_steps(self) -> Sequence[Step]:
        steps = list(self._failover.steps())
        if self._journal.pair is not None:
            steps.append(Step(_SWAP, "swap master and slave in etc/shards.yaml", self._swap))
        return [*steps, *self._failover.last_steps()]

    def _swap(self) -> str:
        assert self._journal.pair is not None
        old, new = (Address(*place) for place in self._journal.pair)
        set_servers(self._etc, self._journal.shards, master=new, slave=old)
        return f"etc/shards.yaml names {new} as the master"

    def carry_out(self, tell: Tell) -> None:
        """Until shards.yaml names the new master and the old one is seen to.

        Raises FailoverRefused if a step failed and all is as before, FailoverBroken if not."""
        journal = self._journal
        journal.begin()
        for step in self._steps_to_do():
            try:
                done = step.run()
            except (StorageError, ConfigError, KeyboardInterrupt) as error:
                why = str(error) or "interrupted"
                if step.revocable:
                    self._put_back(why)
                raise FailoverBroken(
                    f"{why}. It stopped in the midst of: {step.words}. Give the same command again"
                    " once that is mended: it goes on from there"
                ) from error
            journal.note_done(step.name)
            tell(done)
        journal.end()

    def _steps_to_do(self) -> Sequence[Step]:
        """Those behind the last one that was done for good: what can be revoked may have been."""
        steps = self._all_steps()
        done = [
            index
            for index, step in enumerate(steps)
            if self._journal.is_done(step.name) and not step.revocable
        ]
        return steps[done[-1] + 1 :] if done else steps

    def _put_back(self, why: str) -> NoReturn:
        try:
            self._failover.undo()
        except StorageError as error:
            raise FailoverBroken(
                f"{why}; and putting things back failed: {error.message}. Give the same command"
                " again, or allow writes on the old master by hand"
            ) from error
        self._journal.end()
        raise FailoverRefused(f"{why}. Everything is as it was before")

    @property
    def shards(self) -> Sequence[str]:
        return self._journal.shards

    def successor(self) -> Place:
        return self._failover.successor()

    def close(self) -> None:
        self._failover.close()


def _new_journal(run: Path, config: Config, shard: ShardSettings, wanted: Wanted) -> Journal:
    if not has_failover(shard):
        raise FailoverRefused(
            f"shard {shard.name} is a file ({shard.file}) and has no replica; restore a backup"
            " instead, see docs/operations.md"
        )
    along = [other.name for other in config.shards.values() if _same_server(other, shard)]
    if shard.sentinel is not None:
        if wanted.to is not None:
            raise FailoverRefused(
                f"Sentinels choose the master of shard {shard.name}; leave out --to"
            )
        return Journal.new(run, along, None, accept_loss=wanted.accept_loss)
    assert shard.master is not None, "the loader sees to it"
    replica = wanted.to or shard.slave
    if replica is None:
        raise FailoverRefused(
            f"shard {shard.name} has no slave in etc/shards.yaml; name its replica with"
            " --to HOST:PORT"
        )
    if replica == shard.master:
        raise FailoverRefused(f"{replica} is the master of shard {shard.name} already")
    pair = Pair(Place(*shard.master), Place(*replica))
    return Journal.new(run, along, pair, accept_loss=wanted.accept_loss)


def _check_same(journal: Journal, wanted: Wanted) -> None:
    """Raises FailoverRefused if another replica is wanted than the one that was begun with."""
    assert journal.pair is not None, "only such failovers are remembered"
    begun_with = journal.pair.replica
    if wanted.to is not None and Place(*wanted.to) != begun_with:
        raise FailoverRefused(
            f"a failover to {begun_with} was begun and broken off; go on with that first, without"
            " --to"
        )


def _same_server(one: ShardSettings, other: ShardSettings) -> bool:
    if one.sentinel is not None and other.sentinel is not None:
        return one.sentinel.service == other.sentinel.service and not set(
            one.sentinel.addresses
        ).isdisjoint(other.sentinel.addresses)
    return one.master is not None and (one.engine, one.master) == (other.engine, other.master)


def _make(settings: ShardSettings, journal: Journal, wanted: Wanted) -> Failover:
    own = Account(settings.user, settings.passwd)
    handover = Handover(
        shards=journal.shards,
        administrator=wanted.administrator or own,
        replication=wanted.replication or own,
        accept_loss=journal.accepts_loss,
        catch_up_seconds=wanted.catch_up_seconds,
    )
    return make_failover(settings, journal.pair, handover, journal)


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Keep other failovers out of a deployment. Raises FailoverRefused."""
    run = directory / RUN
    try:
        run.mkdir(mode=0o700, exist_ok=True)
        file = lock(run / _LOCK, patient=False)
    except BlockingIOError as error:
        raise FailoverRefused("another failover runs in this deployment") from error
    except OSError as error:
        raise FailoverRefused(
            f"{error.filename}: {error.strerror}; run this as the deployment's owner"
        ) from error
    with file:
        yield


# --- waiting ----------------------------------------------------------------------------------


def wait_until_served(
    fetch: Callable[[], Mapping[str, Any]], shards: Sequence[str], master: Place, seconds: float
) -> bool:
    """Until each shard serves from `master`. False if no service runs that could.

    `fetch` asks for status.json. Raises FailoverBroken if it takes too long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            processes = fetch()["processes"]
        except ConnectionFailed:
            return False
        late = [shard for shard in shards if not _serves(processes, shard, master)]
        if not late:
            return True
        if time.monotonic() > deadline:
            raise FailoverBroken(
                f"{master} is the master now, but shard {', '.join(late)} does not serve from"
                f" there within {seconds:g} s; see `pinlater-admin status`"
            )
        time.sleep(_POLL_SECONDS)


def _serves(processes: Sequence[Mapping[str, Any]], shard: str, master: Place) -> bool:
    return any(
        process["name"] == shard_program(shard)
        and process["state"] == ProcessState.SERVING
        and process["facts"].get("master") == str(master)
        for process in processes
    )


# --- the command ----------------------------------------------------------------------------


class _HostPort(click.ParamType[Address]):
    name = "HOST:PORT"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Address:
        host, colon, port = str(value).rpartition(":")
        if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            self.fail(f"{value!r} is not HOST:PORT", param, ctx)
        return Address(host.removeprefix("[").removesuffix("]"), int(port))


@shard.command()
@click.argument("name")
@click.option("--to", type=_HostPort(), help="The replica  [default: the shard's slave]")
@click.option(
    "--accept-loss", is_flag=True, help="Also where jobs that were acknowledged could be lost."
)
@click.option("--check", is_flag=True, help="Only say what would be done, or why it is refused.")
@yes_option
@click.option(
    "--catch-up-seconds",
    type=Amount(MAX_SECONDS, least=0.1),
    default=60.0,
    show_default=True,
    help="The longest that the replica may take to catch up, with writes stopped.",
)
@click.option("--user", help="Who may administer both servers  [default: the shard's user]")
@click.option(
    "--passwd-file", type=click.File("r"), metavar="F|-", help="Its first line is --user's password"
)
@click.option(
    "--replication-user",
    help="As whom the old master replicates from the new one  [default: the shard's user]",
)
@click.option("--replication-passwd-file", type=click.File("r"), metavar="F|-")
@options.json_option
@options.target_options
def failover(
    *,
    name: str,
    to: Address | None,
    accept_loss: bool,
    check: bool,
    yes: bool,
    catch_up_seconds: float,
    as_json: bool,
    **accounts: Any,
) -> None:
    """Make the replica of shard NAME its master, and swap both in etc/shards.yaml.

    All shards on that master go along. Stops writes on the old master, waits until the replica has
    all, makes it writable, and returns once the shards serve from there. Refuses, with the reason,
    where a job that was acknowledged could be lost, as when the master does not answer. A command
    that was broken off is gone on with by giving it again.

    \b
    Examples:
      pinlater-admin shard failover 1 --check
      pinlater-admin shard failover 1
      pinlater-admin shard failover 1 --to db3.example.com:3306 --yes
      pinlater-admin shard failover 1 --accept-loss --yes
    """
    wanted = Wanted(
        name,
        to,
        accept_loss,
        _account("", **accounts),
        _account("replication_", **accounts),
        catch_up_seconds,
    )
    try:
        with (
            alone(options.directory()),
            contextlib.closing(ShardFailover(options.directory(), wanted)) as one,
        ):
            plan = one.plan()
            if check:
                _show_plan(plan, as_json=as_json)
                return
            if not as_json:
                _show_plan(plan, as_json=False)
            if not yes:
                _ask()
            _carry_out(one, plan, as_json=as_json)
    except (FailoverRefused, StorageError) as error:
        fail(f"refused: {error}")
    except FailoverBroken as error:
        fail(str(error))


def _account(prefix: str, **options: Any) -> Account | None:
    user: str | None = options[f"{prefix}user"]
    passwd_file: IO[str] | None = options[f"{prefix}passwd_file"]
    if user is None:
        if passwd_file is not None:
            option = f"--{prefix}user".replace("_", "-")
            raise click.UsageError(f"whose password is it? Give {option}, too")
        return None
    return Account(user, "" if passwd_file is None else passwd_file.readline().rstrip("\r\n"))


def _ask() -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked whether to do it; give --yes if so")
    click.confirm("Do it?", abort=True, err=True)


def _carry_out(one: ShardFailover, plan: Plan, *, as_json: bool) -> None:
    done: list[str] = []

    def tell(text: str) -> None:
        done.append(text)
        if not as_json:
            click.echo(f"  {text}")

    with waiting("failing over"):
        one.carry_out(tell)
    master = one.successor()
    with waiting(f"waiting until {master} serves"):
        served = wait_until_served(service_status.fetch, plan.shards, master, _SERVE_SECONDS)
    if as_json:
        facts = {"shards": plan.shards, "master": str(master), "done": done, "serves": served}
        print_json(facts)
    elif served:
        click.echo(f"shard {', '.join(plan.shards)} is served from {master}")
    else:
        click.echo(f"no service runs here; shard {', '.join(plan.shards)} will use {master}")


def _show_plan(plan: Plan, *, as_json: bool) -> None:
    found = plan.examination
    if as_json:
        facts = {
            "shards": plan.shards,
            "master": found.master._asdict(),
            "replica": found.replica._asdict(),
            "accepted_risks": plan.risks,
            "remarks": found.remarks,
            "steps": plan.steps,
            "resumed": plan.resumed,
        }
        print_json(facts)
        return
    if plan.resumed:
        click.echo("A failover that was broken off is gone on with.")
    click.echo(f"Failover of shard {', '.join(plan.shards)}")
    click.echo()
    print_table(
        ("server", "now", "answers", "writable", "replicates from", "position", "behind"),
        [("old master", *_row(found.master)), ("new master", *_row(found.replica))],
    )
    click.echo()
    for risk in plan.risks:
        click.echo(f"accepted: {risk}")
    for remark in found.remarks:
        click.echo(f"mind: {remark}")
    for number, step in enumerate(plan.steps, 1):
        click.echo(f"{number}. {step}")
    click.echo()


def _row(server: ServerFacts) -> tuple[str, ...]:
    writable = "?" if server.writable is None else "yes" if server.writable else "no"
    behind = "" if server.behind_seconds is None else f"{server.behind_seconds:.0f} s"
    return (
        server.address,
        "no" if server.trouble else "yes",
        writable,
        server.replicates_from or "-",
        server.applied or server.written or "?",
        behind or "-",
    )
