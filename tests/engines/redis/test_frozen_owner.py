"""An owner that is frozen for longer than its lease: a real process, really stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import pytest

from pinlaterd.clock import FakeClock
from pinlaterd.errors import ShardOwned, StorageError
from pinlaterd.model import JobState
from tests.conformance.engine.engines import EngineMaker
from tests.conformance.engine.harness import QUEUE, EngineHarness

SPAWN = multiprocessing.get_context("spawn")


def _work_until_deposed(make: EngineMaker, answers: Connection) -> None:
    """Enqueue and claim, and tell of it, until the store says that it is another's."""
    store = EngineHarness(make, FakeClock())
    store.engine.create_queue(QUEUE, store.now_ms)
    try:
        while True:
            keys = store.enqueue(b"x", b"y")
            store.claim(limit=1)
            answers.send(keys)
    except StorageError as error:
        answers.send(error.message)
    try:
        store.engine.close()
        store.engine.open(store.now_ms)
    except ShardOwned as error:
        answers.send(error.message)


def test_it_can_write_nothing_after_another_took_over(make: EngineMaker, clock: FakeClock):
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_work_until_deposed, args=(make, theirs), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    for _ in range(20):
        assert ours.poll(60)
        ours.recv()

    os.kill(process.pid, signal.SIGSTOP)
    second = EngineHarness(make, clock)  # waits for the end of the lease
    keys = second.enqueue(b"ours")
    before = second.depths()
    os.kill(process.pid, signal.SIGCONT)
    said: list[str] = []
    while len(said) < 2:
        assert ours.poll(60)
        answer = ours.recv()
        if isinstance(answer, str):
            said.append(answer)
    process.join(60)

    assert not second.ownership.clean
    assert "is not ours any more, but owned by process" in said[0]
    assert f"is owned by process {os.getpid()} on" in said[1]
    assert second.depths() == before
    assert second.states(keys) == [JobState.PENDING]
    second.engine.close()
    with pytest.raises(StorageError, match="is not open"):
        second.engine.heartbeat()
