"""Several servers share a shard's store: the latest term owns it, whatever the others do.

The engines' own code, on real servers. An opener is stopped before each of its commands in turn,
while another one does what breaks protocols: takes over, ends, comes back.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Talk
from pathlib import Path
from typing import Any

import pytest

from pinlaterd.engines.base import Batch, EnqueueOp, StorageEngine, Term
from pinlaterd.engines.mysql import ownership as mysql_ownership
from pinlaterd.engines.mysql.connection import MysqlConnection
from pinlaterd.engines.mysql.engine import MysqlEngine
from pinlaterd.engines.redis import store as redis_store
from pinlaterd.engines.redis.connection import RedisClient
from pinlaterd.errors import QueueNotFound, ShardOwned, StorageError, Superseded
from pinlaterd.model import Job, JobState
from tests.clocks import FakeClock
from tests.conformance.engine.engines import LEASE_SECONDS, EngineMaker, maker
from tests.conformance.engine.harness import QUEUE, Ack, EngineHarness, ack_op

SPAWN = multiprocessing.get_context("spawn")
A1, A2, B2, C2 = Term("a", 1), Term("a", 2), Term("b", 2), Term("c", 2)
# What a writer sends last: before it, nothing is kept.
LAST_WORDS = {"mysql": b"COMMIT", "redis": b"apply"}


@pytest.fixture(params=["mysql", "redis"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_engine(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> EngineMaker:
    return maker(kind, request, tmp_path)


@pytest.fixture
def store(make_engine: EngineMaker, clock: FakeClock) -> Iterator[EngineHarness]:
    """Open in server a's first term, with one queue."""
    harness = EngineHarness(make_engine, clock, A1)
    harness.engine.create_queue(QUEUE, clock.now_ms())
    yield harness
    harness.engine.close()


@pytest.fixture
def open_as(make_engine: EngineMaker, clock: FakeClock) -> Iterator[Callable[[Term], Any]]:
    opened: list[StorageEngine] = []

    def open_in(term: Term) -> StorageEngine:
        engine = make_engine()
        opened.append(engine)
        engine.open(clock.now_ms(), term)
        return engine

    yield open_in
    for engine in opened:
        engine.close()


def _writes(engine: StorageEngine) -> bool:
    try:
        engine.apply(Batch(enqueues=[EnqueueOp(QUEUE, [Job(b"x")])]), 1)
    except (StorageError, QueueNotFound):  # it was never open
        return False
    return True


# --- one after the other --------------------------------------------------------------------------


def test_a_later_term_takes_over_at_once_and_for_good(
    store: EngineHarness, open_as: Callable[[Term], StorageEngine]
):
    [kept] = store.enqueue(b"a")
    began = time.monotonic()

    second = open_as(B2)

    assert time.monotonic() - began < LEASE_SECONDS / 2
    assert not _writes(store.engine)
    store.engine.close()
    for _ in range(2):
        with pytest.raises(Superseded, match=r"server b .*epoch 2; this is a in epoch 1") as caught:
            store.engine.open(store.now_ms, A1)
        assert (caught.value.server, caught.value.epoch) == ("b", 2)
    assert [
        key.local_id
        for key in second.read_pending(QUEUE, 1, after=None, until_ms=store.now_ms, limit=9)
    ] == [kept.local_id]
    assert _writes(second)


@pytest.mark.parametrize("other", [A1, C2], ids=["older", "same epoch, other server"])
def test_who_comes_too_late_leaves_the_owner_at_work(
    make_engine: EngineMaker,
    clock: FakeClock,
    open_as: Callable[[Term], StorageEngine],
    other: Term,
):
    owner = open_as(B2)
    owner.create_queue(QUEUE, clock.now_ms())

    with pytest.raises(Superseded):
        open_as(other)

    assert _writes(owner)
    owner.heartbeat()
    owner.close()
    with pytest.raises(Superseded):  # nor is it free for them when the owner has ended
        open_as(other)


def test_the_same_term_opens_again_and_a_term_of_its_own_server_too(
    store: EngineHarness, open_as: Callable[[Term], StorageEngine]
):
    store.engine.close()
    store.engine.open(store.now_ms, A1)

    later = open_as(A2)

    assert _writes(later)
    assert not _writes(store.engine)


def test_a_shard_of_a_single_machine_is_taken_over_and_goes_back_to_one(
    make_engine: EngineMaker, clock: FakeClock, open_as: Callable[[Term], StorageEngine]
):
    single = EngineHarness(make_engine, clock)
    single.engine.create_queue(QUEUE, clock.now_ms())
    owner = open_as(B2)
    assert not _writes(single.engine)
    with pytest.raises(ShardOwned) as caught:
        make_engine().open(clock.now_ms())
    assert not isinstance(caught.value, Superseded)

    owner.close()
    single.engine.close()
    single.engine.open(clock.now_ms())

    assert _writes(single.engine)
    single.engine.close()
    with pytest.raises(Superseded):  # what is known of terms stays
        open_as(A1)


# --- planned moves --------------------------------------------------------------------------------


def test_a_planned_move_waits_for_the_owner_to_close(
    store: EngineHarness,
    open_as: Callable[[Term], StorageEngine],
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
):
    for module in (mysql_ownership, redis_store):
        monkeypatch.setattr(module, "_PLANNED_WAIT_SECONDS", 60)
    successor, opened = [], threading.Event()

    def take_over() -> None:
        successor.append(open_as(B2._replace(planned=True)))
        opened.set()

    thread = threading.Thread(target=take_over, daemon=True)
    thread.start()
    assert not opened.wait(0.5)
    [key] = store.enqueue(b"last")  # it serves on meanwhile

    store.engine.close()

    assert opened.wait(60)
    thread.join()
    assert successor[0].lookup(QUEUE, [key], include_body=False)


def test_an_owner_that_does_not_close_is_ended_after_the_wait(
    store: EngineHarness,
    open_as: Callable[[Term], StorageEngine],
    monkeypatch: pytest.MonkeyPatch,
):
    for module in (mysql_ownership, redis_store):
        monkeypatch.setattr(module, "_PLANNED_WAIT_SECONDS", 1)
    began = time.monotonic()

    successor = open_as(B2._replace(planned=True))

    assert 1 <= time.monotonic() - began < LEASE_SECONDS / 2
    assert not _writes(store.engine)
    assert _writes(successor)


# --- a frozen owner -------------------------------------------------------------------------------


def _freeze_before_its_last_words(make: EngineMaker, words: bytes, talk: Talk) -> None:
    """An owner that is stopped within a batch, and tells what came of that once it goes on."""
    store = EngineHarness(make, FakeClock(), A1)
    store.engine.create_queue(QUEUE, store.now_ms)
    claimed = store.in_progress(Job(b"high"))
    claimed += store.in_progress(Job(b"low", priority=2))
    send = socket.socket.sendall
    batch = Batch(
        acks=[ack_op(QUEUE, [], [Ack(one.key) for one in claimed])],
        enqueues=[EnqueueOp(QUEUE, [Job(b"new")])],
    )

    def send_later(sending: socket.socket, data: bytes, *flags: int) -> None:
        if words in bytes(data):
            socket.socket.sendall = send  # type: ignore[method-assign]
            talk.send([one.key for one in claimed])
            os.kill(os.getpid(), signal.SIGSTOP)
        send(sending, data, *flags)

    socket.socket.sendall = send_later  # type: ignore[method-assign, assignment]
    try:
        talk.send(store.engine.apply(batch, store.now_ms))
    except StorageError as error:
        talk.send(error)
    store.engine.close()
    try:
        talk.send(store.engine.open(store.now_ms, A1))
    except StorageError as error:
        talk.send((type(error), str(error)))


def test_of_an_owner_that_is_frozen_within_a_batch_nothing_is_kept(
    kind: str, make_engine: EngineMaker, clock: FakeClock
):
    ours, theirs = SPAWN.Pipe()
    arguments = (make_engine, LAST_WORDS[kind], theirs)
    process = SPAWN.Process(target=_freeze_before_its_last_words, args=arguments, daemon=True)
    process.start()
    assert process.pid is not None
    try:
        assert ours.poll(60)
        running = ours.recv()
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        began = time.monotonic()
        store = EngineHarness(make_engine, clock, B2)
        assert time.monotonic() - began < LEASE_SECONDS / 2
        assert store.states(running) == [JobState.IN_PROGRESS] * 2
        before = store.depths()
        store.succeed(running[0])

        os.kill(process.pid, signal.SIGCONT)

        assert ours.poll(60)
        outcome = ours.recv()
        assert isinstance(outcome, StorageError), outcome
        assert ours.poll(60)
        again, message = ours.recv()
        assert again is Superseded
        assert "epoch 2" in message
    finally:
        process.kill()
        process.join()
    assert before == {(1, JobState.IN_PROGRESS): 1, (2, JobState.IN_PROGRESS): 1}
    assert store.states(running) == [JobState.SUCCEEDED, JobState.IN_PROGRESS]
    store.reopen()
    assert sum(store.depths().values()) == 2
    store.engine.close()


# --- stopped before each command ------------------------------------------------------------------


class World:
    """One shard, which server a owns at first; `served`: the terms that have owned it, in order.

    Epochs begin behind `base`, so that a shard can be used again."""

    def __init__(self, make: EngineMaker, now_ms: int, base: int) -> None:
        self._make = make
        self._now_ms = now_ms
        self._base = base
        self.served: list[Term] = []
        self._owner: StorageEngine | None = None  # the latest, until it ends
        self.engines: dict[StorageEngine, Term] = {}  # and its latest term
        self.first = make()
        self.open("a", 1, self.first)

    def open(self, server: str, epoch: int, engine: StorageEngine | None = None) -> StorageEngine:
        """Which may be in vain."""
        engine = engine or self._make()
        term = self.engines[engine] = Term(server, self._base + epoch)
        with suppress(StorageError):
            engine.open(self._now_ms, term)
            self.served.append(term)
            self._owner = engine
        return engine

    def close(self, engine: StorageEngine) -> None:
        engine.close()
        self._ended(engine)

    def crash(self, engine: StorageEngine) -> None:
        """End its connection, with nothing noted."""
        with suppress(StorageError):
            if isinstance(engine, MysqlEngine):
                engine.db._db._sock.shutdown(socket.SHUT_RDWR)
            elif isinstance(engine, redis_store.Store):
                engine.connection.fail("it crashed")
        self._ended(engine)

    def _ended(self, engine: StorageEngine) -> None:
        if engine is self._owner:
            self._owner = None

    def check(self) -> None:
        """No earlier term was served after a later one; the owner alone writes, if one is left."""
        assert self.served == sorted(self.served, key=lambda term: term.epoch)
        assert len({term.epoch: term.server for term in self.served}) == len(set(self.served))
        writers = [engine for engine in self.engines if _writes(engine)]
        assert writers == [self._owner] if self._owner else not writers

    def end(self) -> None:
        for engine in self.engines:
            self.crash(engine)
            engine.close()


def _first_comes_back(world: World) -> None:
    world.crash(world.first)
    world.close(world.first)
    world.open("a", 1, world.first)


def _two_take_over(world: World) -> None:
    world.open("c", 3)
    world.close(world.first)
    world.open("a", 4, world.first)


EVENTS: dict[str, Callable[[World], object]] = {
    "nothing": lambda world: None,
    "a later term stays": lambda world: world.open("c", 3),
    "a later term ends in order": lambda world: world.close(world.open("c", 3)),
    "a later term crashes": lambda world: world.crash(world.open("c", 3)),
    "another server claims the same epoch": lambda world: world.open("c", 2),
    "another server has the same epoch and crashes": lambda world: world.crash(world.open("c", 2)),
    "an earlier term comes too late": lambda world: world.open("c", 1),
    "the first owner ends in order": lambda world: world.close(world.first),
    "the first owner comes back": _first_comes_back,
    "two take over": _two_take_over,
}


@contextmanager
def _stopped_before(step: int, do: Callable[[], object]) -> Iterator[list[int]]:
    """Around an opening: `do` comes before its command number `step`, counted from 0. Yields how
    many there were."""
    sent = [0]
    patched = pytest.MonkeyPatch()

    def stopping(call: Callable[..., Any]) -> Callable[..., Any]:
        def send(*arguments: Any, **options: Any) -> Any:
            sent[0] += 1
            if sent[0] > step:
                patched.undo()
                do()
            return call(*arguments, **options)

        return send

    patched.setattr(MysqlConnection, "run", stopping(MysqlConnection.run))
    patched.setattr(RedisClient, "_call", stopping(RedisClient._call))
    try:
        yield sent
    finally:
        patched.undo()


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_wherever_an_opening_stops_the_latest_term_owns_the_store(
    store: EngineHarness, make_engine: EngineMaker, event: Callable[[World], object]
):
    store.engine.close()
    for step in range(100):
        world = World(make_engine, store.now_ms, base=10 * (step + 1))
        with _stopped_before(step, lambda: event(world)) as sent:  # noqa: B023
            world.open("b", 2)
        world.check()
        world.end()
        if sent[0] <= step:
            break
    assert 2 < step < 99
