"""What a run suffers: each fault is a function that hurts the site, holds, and makes it well.

A function returns what may fail by it and what it holds up (see history.py), and yields while it
lasts. Faults are chosen by a seed, singly and in pairs.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple, TypeVar

import psutil
from pymysql import OperationalError
from pymysql.connections import Connection

from pinlaterd.engines.redis import scripts
from tests.checker.clients import WORK
from tests.checker.history import History, Record
from tests.checker.site import LEASE_SECONDS, RECOVERY_SECONDS, SHARDS, Site, wait_until
from tests.checker.torn import tear_aof, tear_wal
from tests.deployment import frozen
from tests.faults.small_disk import fill
from tests.servers.mariadb import MariaDB
from tests.servers.proxy import Cut, Proxy

_OPERATOR_SECONDS = 120.0
# After a fault everything serves again within RECOVERY_SECONDS, and this for a busy machine.
_BUSY_SECONDS = 20.0
_COMMITS = {"mysql": b"COMMIT", "redis": scripts.APPLY.sha.encode()}
ROUTER = "router"
ALL_SHARDS = tuple(f"shard-{name}" for name in SHARDS)
EVERYTHING = (ROUTER, *ALL_SHARDS)
T = TypeVar("T")


class Hurt(NamedTuple):
    """Whose calls may fail; what is held up: "calls", "commits", "shard" or nothing; which shards
    hand out no jobs though no call fails; which queues are concerned, if not all are."""

    places: Sequence[str]
    holds: str = ""
    away: Sequence[str] = ()
    queues: Sequence[str] = ()


class Nemesis:
    """Chooses faults and makes them, one or two at a time, until it is stopped."""

    def __init__(
        self,
        site: Site,
        history: History,
        seed: int,
        fault_seconds: Sequence[float],
        faults: Mapping[str, Fault],
    ) -> None:
        self.site = site
        self.history = history
        self.seed = seed
        self.rng = random.Random(f"{seed}/faults")
        self.fault_seconds = fault_seconds
        self.closing = threading.Lock()  # or no shard would take jobs
        self.failures: list[str] = []
        self._faults = faults
        self._next: list[str] = []
        self.alone = True  # one fault, not two at a time
        self._pids: dict[str, int] = {}

    def run(
        self, stop: threading.Event, *, only: Sequence[str] = (), first: Sequence[str] = ()
    ) -> None:
        """`only`: the names of those to choose from; none: all but those that go alone. `first`:
        those that come first, however late it gets."""
        self._next = list(reversed(first))
        left = len(first)
        known = {name: fault for name, fault in self._faults.items() if self._is_possible(name)}
        chosen = {name: known[name] for name in only or sorted(known.keys() - BY_NAME)}
        before: Sequence[str] = ()
        while not stop.wait(self.rng.uniform(0.5, 2.0)) or left > 0:
            count = 1 if len(chosen) < 2 or self.rng.random() < 0.7 else 2
            names = [self._draw(chosen) for _ in range(count)]
            is_first_quiet = QUIET.issuperset(names) and not QUIET.issuperset(before)
            if is_first_quiet and stop.wait(RECOVERY_SECONDS):
                return  # whatever failed after the fault before would be put down to that
            before = names
            left -= len(names)
            self.alone = len(set(names)) == 1
            threads = [
                threading.Thread(target=self.make, args=(name, chosen[name]), daemon=True)
                for name in dict.fromkeys(names)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            try:
                # A server whose flushes failed may take seconds to end.
                revive, ended = self.site.revive_server, time.monotonic()
                took = self.site.deployment.wait_until_serving(seconds=90, meanwhile=revive)
                self.say(f"serving again after {took:.1f} s")
                if took > self.site.recovery_seconds and not QUIET.issuperset(names):
                    # Until then calls may fail, but the router has to answer in time.
                    self.note("recovery", ended, Hurt(ALL_SHARDS))
                if self.alone and took > RECOVERY_SECONDS + _BUSY_SECONDS:
                    self.failures.append(f"{names}: serving again after {took:.1f} s only")
                self.note_starts()
            except AssertionError as error:
                self.failures.append(str(error))
                return

    def _draw(self, chosen: dict[str, Fault]) -> str:
        """Each once before any comes again."""
        if not self._next:
            self._next = sorted(chosen)
            self.rng.shuffle(self._next)
        return self._next.pop()

    def note_starts(self) -> None:
        """The processes that have begun since the last time."""
        for program, process in self.site.running().items():
            if self._pids.get(program) == process.pid:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                # Both count from the machine's start, as the monotonic clock does.
                began = process.create_time() - psutil.boot_time()
                given = {"program": program, "pid": process.pid}
                self.history.add(Record(began, began, "nemesis", "start", given))
                self._pids[program] = process.pid

    def _is_possible(self, name: str) -> bool:
        site = self.site
        if name.startswith("store"):
            return site.store_proxy is not None
        if name.startswith("mysql"):
            return isinstance(site.server, MariaDB)
        if name == "full disk":
            return site.has_small_disk
        if name == "torn log":
            return not isinstance(site.server, MariaDB)
        if name == "failover":
            return site.replica is not None
        return True

    def hold(self) -> None:
        """For as long as a fault lasts."""
        time.sleep(self.rng.choice(self.fault_seconds))

    def operate(self, *command: str) -> str:
        """Returns what the command says."""
        return self.insist(lambda: self.site.deployment.admin(*command), AssertionError)

    def insist(self, act: Callable[[], T], failure: type[Exception]) -> T:
        """As an operator does it, who repeats what another fault kept from its end."""
        deadline = time.monotonic() + _OPERATOR_SECONDS
        while True:
            try:
                return act()
            except failure:
                if self.alone or time.monotonic() > deadline:
                    raise
                time.sleep(1)

    def say(self, text: str) -> None:
        print(f"    {text}", flush=True)

    def make(self, name: str, fault: Fault) -> None:
        started = time.monotonic()
        hurt = Hurt(EVERYTHING, "calls")
        try:
            with fault(self) as hurt:
                self.say(f"{name}: {', '.join(hurt.places) or 'nothing may fail'}")
        except Exception as error:  # noqa: BLE001 - the run fails with it, and goes on
            self.failures.append(f"{name}: {error!r}")
        self.note(name, started, hurt)

    def note(self, kind: str, started: float, hurt: Hurt) -> None:
        given = {"kind": kind, **hurt._asdict()}
        self.history.add(Record(started, time.monotonic(), "nemesis", "fault", given))


Fault = Callable[[Nemesis], AbstractContextManager[Hurt]]


def _shard(nemesis: Nemesis) -> str:
    return nemesis.rng.choice(ALL_SHARDS)


# --- processes ------------------------------------------------------------------------------


def _killed(program: Callable[[Nemesis], str], *places: str) -> Fault:
    @contextmanager
    def fault(nemesis: Nemesis) -> Iterator[Hurt]:
        name = program(nemesis)
        pid = nemesis.site.pid_of(name)
        os.kill(pid, signal.SIGKILL)
        yield Hurt(places if name not in ALL_SHARDS else [name])
        wait_until(lambda: nemesis.site.pid_of(name) != pid)

    return fault


def _stopped(program: Callable[[Nemesis], str], hurt: Hurt | None = None) -> Fault:
    @contextmanager
    def fault(nemesis: Nemesis) -> Iterator[Hurt]:
        name = program(nemesis)
        with frozen(nemesis.site.pid_of(name)):
            yield hurt or Hurt([name], "shard")
            nemesis.hold()

    return fault


def _searcher(nemesis: Nemesis, program: str) -> psutil.Process:
    """The process beside the shard in which its searches run; one that starts is waited for."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[:] = psutil.Process(nemesis.site.pid_of(program)).children()
        return bool(found)

    wait_until(is_there)
    return found[0]


@contextmanager
def _searcher_killed(nemesis: Nemesis) -> Iterator[Hurt]:
    program = _shard(nemesis)
    with contextlib.suppress(psutil.NoSuchProcess):
        _searcher(nemesis, program).kill()
    yield Hurt([program])


@contextmanager
def _searcher_stopped(nemesis: Nemesis) -> Iterator[Hurt]:
    program = _shard(nemesis)
    searcher = _searcher(nemesis, program)
    try:
        with contextlib.suppress(psutil.NoSuchProcess):
            searcher.suspend()
        yield Hurt([program])
        nemesis.hold()
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            searcher.resume()


@contextmanager
def _all_killed(nemesis: Nemesis) -> Iterator[Hurt]:
    nemesis.site.deployment.kill_programs()
    yield Hurt(EVERYTHING)
    for name in (ROUTER, *ALL_SHARDS):
        nemesis.site.pid_of(name)


@contextmanager
def _supervisord_killed(nemesis: Nemesis) -> Iterator[Hurt]:
    """Its children go on; then an operator's `up` takes over."""
    os.kill(nemesis.site.deployment.supervisord_pid(), signal.SIGKILL)
    time.sleep(1)
    yield Hurt(EVERYTHING)
    nemesis.site.deployment.up()


@contextmanager
def _second_owner(nemesis: Nemesis) -> Iterator[Hurt]:
    """A shard's owner freezes for longer than its lease beside a standby, and goes on. Calls reach
    the standby through a router that begins meanwhile."""
    deployment, program = nemesis.site.deployment, _shard(nemesis)
    routed = nemesis.rng.random() < 0.5
    standby = deployment.start_process("shard", program.removeprefix("shard-"))
    try:
        with frozen(nemesis.site.pid_of(program)):
            yield Hurt([program, ROUTER] if routed else [program], "commits")
            time.sleep(2 * LEASE_SECONDS)
            if routed:
                with _killed(_always(ROUTER), ROUTER)(nemesis):
                    pass
                time.sleep(2)
        time.sleep(1)
    finally:
        standby.kill()
        standby.wait()


@contextmanager
def _processors_taken(nemesis: Nemesis) -> Iterator[Hurt]:
    spinners = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(4)]
    for spinner in spinners:
        spinner.start()
    try:
        yield Hurt(EVERYTHING, "calls")
        time.sleep(2)
    finally:
        for spinner in spinners:
            spinner.kill()


def _spin() -> None:
    while True:
        pass


# --- networks -------------------------------------------------------------------------------


@contextmanager
def _clients_cut(nemesis: Nemesis) -> Iterator[Hurt]:
    nemesis.site.client_proxy.cut_all()
    yield Hurt([ROUTER])


def _client_proxy(nemesis: Nemesis) -> Proxy:
    return nemesis.site.client_proxy


def _store_proxy(nemesis: Nemesis) -> Proxy:
    assert nemesis.site.store_proxy is not None
    return nemesis.site.store_proxy


def _slow(proxy_of: Callable[[Nemesis], Proxy], hurt: Hurt) -> Fault:
    @contextmanager
    def fault(nemesis: Nemesis) -> Iterator[Hurt]:
        proxy = proxy_of(nemesis)
        proxy.delay_seconds = 0.1
        try:
            yield hurt
            time.sleep(1)
        finally:
            proxy.delay_seconds = 0.0

    return fault


def _held(proxy_of: Callable[[Nemesis], Proxy], hurt: Hurt) -> Fault:
    @contextmanager
    def fault(nemesis: Nemesis) -> Iterator[Hurt]:
        proxy = proxy_of(nemesis)
        proxy.hold()
        try:
            yield hurt
            nemesis.hold()
        finally:
            proxy.go_on()

    return fault


@contextmanager
def _store_cut(nemesis: Nemesis) -> Iterator[Hurt]:
    """In the middle of commits: before the server hears of them, or with their answers lost."""
    proxy = _store_proxy(nemesis)
    said = _COMMITS["mysql" if isinstance(nemesis.site.server, MariaDB) else "redis"]
    before = proxy.cuts
    proxy.cut_at(said, nemesis.rng.choice((Cut.AFTER, Cut.AFTER, Cut.BEFORE)))
    yield Hurt(ALL_SHARDS, "commits")
    wait_until(lambda: proxy.cuts > before)


# --- stores ---------------------------------------------------------------------------------


@contextmanager
def _store_killed(nemesis: Nemesis) -> Iterator[Hurt]:
    server = nemesis.site.server
    assert server is not None
    server.kill()
    yield Hurt(ALL_SHARDS, "commits")
    time.sleep(nemesis.rng.uniform(0.1, 2))
    nemesis.site.revive_server()


@contextmanager
def _store_stopped(nemesis: Nemesis) -> Iterator[Hurt]:
    assert nemesis.site.server is not None
    nemesis.site.revive_server()  # another fault may just have killed it
    with frozen(nemesis.site.server.pid):
        yield Hurt(ALL_SHARDS, "commits")
        nemesis.hold()


@contextmanager
def _flushes_fail(nemesis: Nemesis) -> Iterator[Hurt]:
    """fsync fails in every process; a server that ends by it is started again."""
    site = nemesis.site
    number = nemesis.rng.choice((errno.EIO, errno.ENOSPC))
    site.control(flush_error=number)
    try:
        yield Hurt(EVERYTHING, "commits")
        time.sleep(1)
    finally:
        site.control()
    time.sleep(0.2)
    site.revive_server()


@contextmanager
def _clock_stepped(nemesis: Nemesis) -> Iterator[Hurt]:
    """The wall clock of every process is an hour ahead or behind for a while. It may end MariaDB:
    InnoDB takes the hour for the time that a flush has taken, and aborts after ten minutes."""
    site, started = nemesis.site, time.monotonic()
    site.control(clock_seconds=nemesis.rng.choice((-3600, 3600)))
    try:
        yield Hurt(())
        time.sleep(3)
    finally:
        site.control()
    if isinstance(site.server, MariaDB) and not site.server_runs():
        site.revive_server()
        nemesis.note("server aborted", started, Hurt(ALL_SHARDS, "commits"))


@contextmanager
def _full_disk(nemesis: Nemesis) -> Iterator[Hurt]:
    filler = nemesis.site.deployment.folder / "data/filler"
    try:
        fill(filler)
        yield Hurt(EVERYTHING)
        time.sleep(2)
    finally:
        filler.unlink(missing_ok=True)


@contextmanager
def _torn_log(nemesis: Nemesis) -> Iterator[Hurt]:
    """What writes a log is killed within a write: a shard, or Redis."""
    site = nemesis.site
    if site.server is not None:
        with site.server_killed():
            tear_aof(site.server.folder, nemesis.rng)
            yield Hurt(ALL_SHARDS, "commits")
        site.revive_server()
        return
    deployment, program = site.deployment, _shard(nemesis)
    with ExitStack() as ends:
        ends.enter_context(frozen(deployment.supervisord_pid()))
        pid = site.pid_of(program)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not runs(pid))
        log = deployment.folder / f"data/{program}.sqlite-wal"
        if log.exists():
            tear_wal(log, nemesis.rng)
        yield Hurt([program])


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def _locked(nemesis: Nemesis) -> Iterator[Hurt]:
    """An operator holds locks on rows of a queue, or on its whole table."""
    server = nemesis.site.server
    assert isinstance(server, MariaDB)
    shard = nemesis.rng.choice(SHARDS)
    table = f"plq_{shard}_{WORK}.jobs_p{nemesis.rng.choice((1, 2, 3))}"
    statement = nemesis.rng.choice(
        (
            f"LOCK TABLES {table} WRITE",
            f"SELECT local_id FROM {table} ORDER BY 1 LIMIT 50 FOR UPDATE",
        )
    )

    def lock() -> Connection:
        connection = server.connect()
        connection.begin()
        with connection.cursor() as cursor:
            cursor.execute(statement)
        return connection

    connection = nemesis.insist(lock, OperationalError)
    try:
        yield Hurt([f"shard-{shard}"], "commits", queues=[WORK])
        time.sleep(nemesis.rng.choice((1, 8)))
    finally:
        connection.close()


def _always(name: str) -> Callable[[Nemesis], str]:
    return lambda _: name


FAULTS: dict[str, Fault] = {
    "kill shard": _killed(_shard),
    "kill router": _killed(_always("router"), ROUTER),
    "kill coordinator": _killed(_always("coordinator")),
    "kill searcher": _searcher_killed,
    "kill all": _all_killed,
    "kill supervisord": _supervisord_killed,
    "stop shard": _stopped(_shard),
    "stop router": _stopped(_always("router"), Hurt([ROUTER], "calls")),
    "stop coordinator": _stopped(_always("coordinator"), Hurt(())),
    "stop searcher": _searcher_stopped,
    "stop supervisord": _stopped(_always("supervisord"), Hurt(())),
    "second owner": _second_owner,
    "no processor": _processors_taken,
    "clients cut": _clients_cut,
    "clients slow": _slow(_client_proxy, Hurt([ROUTER], "calls")),
    "clients held": _held(_client_proxy, Hurt([ROUTER], "calls")),
    "store slow": _slow(_store_proxy, Hurt(ALL_SHARDS, "commits")),
    "store held": _held(_store_proxy, Hurt(ALL_SHARDS, "commits")),
    "store cut": _store_cut,
    "store killed": _store_killed,
    "store stopped": _store_stopped,
    "flushes fail": _flushes_fail,
    "clock": _clock_stepped,
    "full disk": _full_disk,
    "torn log": _torn_log,
    "mysql locks": _locked,
}
# By which no call may fail.
QUIET = {
    "kill coordinator",
    "stop coordinator",
    "stop supervisord",
    "restart",
    "dequeue-only",
    "drain",
    "clock",
}
# What has a run of its own (operators.py): it changes what may be expected, or needs a replica.
BY_NAME = {"restore", "failover"}
