"""Inner tables that disagree with the jobs of a file, as after `.recover`."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from typing import NoReturn

import pytest

from pinlaterd.engines.base import Finding
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.engines.sqlite.store import FileSnapshot
from pinlaterd.model import JobKey, JobState
from tests.conformance.engine.harness import QUEUE, EngineHarness
from tests.conftest import WaitUntil

LOST = "jobs in no state, which are never handed out"


def _lose_a_job(store: EngineHarness, stranger: sqlite3.Connection) -> JobKey:
    [lost] = store.enqueue(b"lost")
    store.enqueue(b"pending")
    stranger.execute("DELETE FROM runs WHERE first_id = ?", (lost.local_id,))
    return lost


@pytest.fixture
def lost(store: EngineHarness, stranger: sqlite3.Connection) -> JobKey:
    """Beside a job in each other state, one that no run has."""
    store.succeed(*[one.key for one in store.in_progress(b"succeeded")])
    store.in_progress(b"running")
    lost = _lose_a_job(store, stranger)
    stranger.execute("UPDATE meta SET value = 0 WHERE key = 'clean'")
    return lost


def _reopen_after_unclean_end(store: EngineHarness) -> None:
    store.engine._abandon()  # type: ignore[attr-defined]
    store.engine.open(store.now_ms)


def test_depths_and_claims_right_themselves_after_an_unclean_end(
    store: EngineHarness, lost: JobKey, wait_until: WaitUntil
):
    _reopen_after_unclean_end(store)

    wait_until(lambda: store.depths().get((1, JobState.IN_PROGRESS)) == 1)

    expired = store.engine.release_expired(
        QUEUE, claimed_before_ms=store.now_ms + 1, limit=10, now_ms=store.now_ms
    )
    assert len(expired.retried) == 1


def test_a_lost_job_is_told_of_after_an_unclean_end(
    store: EngineHarness, lost: JobKey, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
):
    assert store.engine.damage == ""
    _reopen_after_unclean_end(store)

    with caplog.at_level(logging.ERROR):
        wait_until(lambda: store.depths() and store.engine.damage)

    assert store.engine.damage == f"1 {LOST}"
    assert LOST in caplog.text


@pytest.mark.parametrize("found", [False, True])
def test_a_lost_job_is_told_of_after_any_number_of_orderly_ends(
    store: EngineHarness, lost: JobKey, wait_until: WaitUntil, found: bool
):
    _reopen_after_unclean_end(store)
    if found:
        wait_until(lambda: store.depths() and store.engine.damage)

    for _ in range(2):
        store.reopen()

    wait_until(lambda: store.depths() and store.engine.damage)


def _check_in_part(store: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: sqlite3.Connection) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pinlaterd.engines.sqlite.engine.find_damage", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.engine.check(repair=True)


@pytest.mark.parametrize("ends", [True, False])
def test_a_check_that_repairs_nothing_leaves_it_to_the_next_owner(
    store: EngineHarness,
    stranger: sqlite3.Connection,
    wait_until: WaitUntil,
    monkeypatch: pytest.MonkeyPatch,
    ends: bool,
):
    _lose_a_job(store, stranger)
    if ends:
        store.engine.check(repair=False)
    else:
        _check_in_part(store, monkeypatch)

    store.reopen()

    wait_until(lambda: store.depths() and store.engine.damage)


def test_a_store_that_was_repaired_is_not_searched_again(store: EngineHarness, lost: JobKey):
    _reopen_after_unclean_end(store)
    store.engine.check(repair=True)

    store.reopen()

    assert store.engine.counts.sound  # type: ignore[attr-defined]


def test_what_disagrees_is_found_and_repaired(store: EngineHarness, lost: JobKey):
    _reopen_after_unclean_end(store)
    found = set(store.engine.check(repair=False))

    assert Finding(QUEUE, LOST, 1) in found
    assert lost not in store.ready()
    assert set(store.engine.check(repair=True)) == found
    assert store.engine.check(repair=False) == []
    assert lost in store.ready()
    assert store.depths() == {
        (1, JobState.PENDING): 2,
        (1, JobState.IN_PROGRESS): 1,
        (1, JobState.SUCCEEDED): 1,
    }


def test_runs_lose_the_jobs_that_are_not_there(store: EngineHarness, stranger: sqlite3.Connection):
    kept = [one.key for one in store.in_progress(b"0", b"1", b"2", b"3")]
    [pending] = store.enqueue(b"pending")
    claims = [store.job(key).claim_descriptor for key in kept]
    stranger.execute("DELETE FROM jobs WHERE body = x'31' OR local_id = ?", (pending.local_id,))

    [found] = store.engine.check(repair=True)[:1]

    assert found.problem == "states of jobs that are not there, or are in another state, too"
    assert store.engine.check(repair=False) == []
    assert store.depths() == {(1, JobState.IN_PROGRESS): 3}
    left = [0, 2, 3]
    assert [store.job(kept[n]).claim_descriptor for n in left] == [claims[n] for n in left]
    assert store.succeed(*[kept[n] for n in left]).succeeded == 3


@pytest.mark.parametrize("state", list(JobState))
def test_a_job_in_two_states_is_claimed_or_ended(
    store: EngineHarness, stranger: sqlite3.Connection, state: JobState
):
    first, second = (one.key.local_id for one in store.in_progress(b"a", b"b"))
    if state is not JobState.IN_PROGRESS:
        store.succeed(JobKey(1, first), JobKey(1, second))
    put = "INSERT INTO runs SELECT ?, ?, queue, priority, ?, at, claimer, claim_number FROM runs"
    stranger.execute(put, (second, second + 5, int(state)))

    store.engine.check(repair=True)

    assert store.engine.check(repair=False) == []
    expected = JobState.IN_PROGRESS if state is JobState.IN_PROGRESS else JobState.SUCCEEDED
    assert store.depths() == {(1, expected): 2}


def test_a_job_that_waits_for_another_time_waits_for_its_own(
    store: EngineHarness, stranger: sqlite3.Connection
):
    [key] = store.enqueue(b"x")
    stranger.execute("UPDATE runs SET at = at + 1000000")

    store.engine.check(repair=True)

    assert store.ready() == [key]


def test_a_search_may_be_cancelled_once_it_has_ended(store: EngineHarness, path: Path):
    snapshot = FileSnapshot(path)
    snapshot.close()

    snapshot.cancel()


def test_the_lock_is_given_up_whatever_becomes_of_the_counts(
    store: EngineHarness, path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail() -> NoReturn:
        raise sqlite3.ProgrammingError("closed")

    with monkeypatch.context() as patch:
        patch.setattr(store.engine.counts, "close", fail)  # type: ignore[attr-defined]
        with pytest.raises(sqlite3.ProgrammingError):
            store.engine.close()

    successor = SqliteEngine(path)
    successor.open(store.now_ms)
    successor.close()


def test_claims_of_jobs_that_are_gone_do_not_keep_others_from_timing_out(
    store: EngineHarness, stranger: sqlite3.Connection
):
    keys = [claimed.key for claimed in store.in_progress(b"gone", b"gone", b"running")]
    stranger.execute("DELETE FROM jobs WHERE body = ?", (b"gone",))

    retried = [
        job.key.local_id
        for _ in range(2)
        for job in store.engine.release_expired(
            QUEUE, claimed_before_ms=store.now_ms + 1, limit=2, now_ms=store.now_ms
        ).retried
    ]

    assert retried == [keys[-1].local_id]
    assert store.engine.check(repair=False) == []
