"""kill -9 of an owner in the middle of its work: a real process, really killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import pytest

from pinlaterd.engines.base import Search
from pinlaterd.errors import ShardOwned
from pinlaterd.model import Job, JobKey, JobState
from tests.clocks import FakeClock
from tests.conformance.engine.engines import EngineMaker
from tests.conformance.engine.harness import QUEUE, EngineHarness

# A spawned process shares nothing with the test: no lock, no open file.
SPAWN = multiprocessing.get_context("spawn")


def _work_until_killed(make: EngineMaker, answers: Connection) -> None:
    """A shard's life: enqueue, claim, ack, and tell of each commit once it is made."""
    store = EngineHarness(make, FakeClock())
    store.engine.create_queue(QUEUE, store.now_ms)
    while True:
        answers.send((JobState.PENDING, store.enqueue(*[b"x" * 300] * 20)))
        claimed = [one.key for one in store.claim(limit=10)]
        answers.send((JobState.IN_PROGRESS, claimed))
        store.succeed(*claimed[:5])
        answers.send((JobState.SUCCEEDED, claimed[:5]))


@pytest.fixture
def killed(make_engine: EngineMaker) -> dict[JobKey, JobState]:
    """What a process was told about its jobs before it was killed."""
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_work_until_killed, args=(make_engine, theirs), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    acknowledged: dict[JobKey, JobState] = {}
    try:
        for commits in range(10_000):
            if not ours.poll(60):
                pytest.fail("the process does nothing")
            state, keys = ours.recv()
            acknowledged.update(dict.fromkeys(keys, state))
            if commits == 30:
                with pytest.raises(ShardOwned):
                    make_engine().open(1)
                os.kill(process.pid, signal.SIGKILL)
    except EOFError:
        pass
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return acknowledged


def test_nothing_acknowledged_is_lost(
    killed: dict[JobKey, JobState], make_engine: EngineMaker, clock: FakeClock
):
    store = EngineHarness(make_engine, clock)

    # One commit may have been made that nobody was told of: a job may be further than we know.
    found = store.states(killed)
    assert all(
        state is not None and state >= known
        for state, known in zip(found, killed.values(), strict=True)
    )
    moved = sum(a is not b for a, b in zip(found, killed.values(), strict=True))
    assert moved <= 10
    assert len(killed) >= 100
    store.engine.close()


def test_depths_agree_with_the_jobs(
    killed: dict[JobKey, JobState], make_engine: EngineMaker, clock: FakeClock
):
    store = EngineHarness(make_engine, clock)
    searcher = store.engine.searcher()()

    counts = {
        (1, state): searcher.count(Search(QUEUE, state, future=False, now_ms=store.now_ms))
        for state in JobState
    }

    assert store.depths() == {key: jobs for key, jobs in counts.items() if jobs}
    searcher.close()
    store.engine.close()


def test_no_id_is_given_twice_after_an_unclean_end(
    killed: dict[JobKey, JobState], make_engine: EngineMaker, clock: FakeClock
):
    store = EngineHarness(make_engine, clock)
    [key] = store.enqueue(b"after")
    assert key.local_id > max(known.local_id for known in killed)
    store.reopen()
    [next_key] = store.enqueue(b"after a clean end")
    assert next_key.local_id > key.local_id
    store.engine.close()


def test_its_claims_can_still_be_acked_and_its_jobs_claimed(
    killed: dict[JobKey, JobState], make_engine: EngineMaker, clock: FakeClock
):
    store = EngineHarness(make_engine, clock)
    in_progress = [key for key, state in killed.items() if state is JobState.IN_PROGRESS]

    assert store.succeed(*in_progress).succeeded >= len(in_progress) - 5
    assert store.claim(limit=5)
    assert store.states(store.enqueue(Job(b"new"))) == [JobState.PENDING]
    store.engine.close()
