"""Options and the index of keys: made when it is first used, and checked along with the jobs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from random import Random

import pytest

from pinlaterd.engines.base import Batch, EnqueueWithOptionsOp, Finding, Search
from pinlaterd.engines.sqlite import keys
from pinlaterd.errors import QueueNotFound, StorageNotCommitted
from pinlaterd.model import Job, JobKey, JobOptions, JobState
from tests.conformance.engine.harness import QUEUE, EngineHarness, keyed


def _has_table(db: sqlite3.Connection) -> bool:
    return bool(db.execute("SELECT 1 FROM sqlite_master WHERE name = 'options'").fetchall())


def test_a_file_has_no_table_of_keys_before_the_first(
    store: EngineHarness, stranger: sqlite3.Connection
):
    store.succeed(*[one.key for one in store.in_progress(b"plain")])
    store.engine.find_keys(QUEUE, ["k"])
    store.engine.delete_jobs(QUEUE, JobState.SUCCEEDED, 1, limit=1)
    store.reopen()

    assert not _has_table(stranger)
    store.enqueue_keyed(keyed("k"))
    assert _has_table(stranger)


@pytest.mark.parametrize("is_used", [False, True])
def test_a_table_from_before_its_last_columns_gets_them(
    store: EngineHarness, stranger: sqlite3.Connection, is_used: bool
):
    store.enqueue_keyed(keyed("k"))
    store.engine.close()
    for column in ("run_after_us", "expires_at_us"):
        stranger.execute(f"ALTER TABLE options DROP COLUMN {column}")
    if not is_used:
        stranger.execute("DELETE FROM meta WHERE key GLOB 'options of *'")
    store.reopen()

    exact = JobOptions("l", run_after_us=1_234_567)
    [key] = store.enqueue_keyed(Job(b"x", options=exact))
    assert store.job(key).options == exact


def test_a_table_from_before_its_last_columns_outlives_its_queue_and_can_be_searched(
    store: EngineHarness, stranger: sqlite3.Connection
):
    store.engine.create_queue("deleted", store.now_ms)
    store.keyed(keyed("k"), queue="deleted")
    store.engine.delete_queue("deleted")
    while store.engine.vacuum(limit=10):
        pass
    [key] = store.enqueue(b"x")
    store.engine.close()
    for column in ("run_after_us", "expires_at_us"):
        stranger.execute(f"ALTER TABLE options DROP COLUMN {column}")
    store.reopen()

    searcher = store.engine.searcher()()
    assert [job.key for job in searcher.scan(Search(QUEUE, JobState.PENDING))] == [key]
    searcher.close()


def test_a_commit_that_fails_leaves_neither_table_nor_keys(
    store: EngineHarness, stranger: sqlite3.Connection
):
    ops = [EnqueueWithOptionsOp(QUEUE, [keyed("k")]), EnqueueWithOptionsOp("none", [keyed("k")])]

    with pytest.raises(QueueNotFound):
        store.engine.apply(Batch(with_options=ops), store.now_ms)

    assert not _has_table(stranger)
    assert store.depths() == {}
    assert store.engine.find_keys(QUEUE, ["k"]) == {}
    store.enqueue_keyed(keyed("k"))


def test_a_key_without_its_job_is_free_and_check_removes_it(
    store: EngineHarness, stranger: sqlite3.Connection
):
    """As after `.recover`, or where a build that knows no keys has deleted the jobs."""
    store.enqueue_keyed(keyed("taken again"), keyed("left"))
    stranger.execute("DELETE FROM jobs")
    stranger.execute("DELETE FROM runs")

    store.reopen()
    [new] = store.enqueue_keyed(keyed("taken again"))
    found = store.engine.check(repair=True)

    assert found == [Finding(QUEUE, "options of jobs that are not there", 2)]
    assert store.engine.check(repair=False) == []
    assert store.engine.find_keys(QUEUE, ["taken again", "left"]) == {"taken again": new}


# --- the index ------------------------------------------------------------------------------


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have hashes go to the file soon."""
    monkeypatch.setattr(keys, "_IN_MEMORY", 20)


def _in_file(stranger: sqlite3.Connection) -> int:
    [count] = stranger.execute("SELECT count(*) FROM key_hashes").fetchone()
    return int(count)


def _assert_held(store: EngineHarness, held: Iterable[str], free: Iterable[str]) -> None:
    names = [*held, *free]
    assert store.engine.find_keys(QUEUE, names).keys() == set(held)


def _end_badly(store: EngineHarness) -> None:
    """Leave the file as a process that is killed does."""
    store.engine._abandon()  # type: ignore[attr-defined]
    store.engine = store.make()
    store.engine.open(store.now_ms)


@pytest.mark.parametrize("ends", [_end_badly, EngineHarness.reopen])
def test_keys_come_and_go_while_their_hashes_move_to_the_file(
    store: EngineHarness, stranger: sqlite3.Connection, small_memory: None, ends
):
    rng, held, free, number = Random(1), dict[str, JobKey](), set[str](), 0
    for turn in range(300):
        names = [f"k{number + nth}" for nth in range(rng.choice((1, 3, 40)))]
        number += len(names)
        again = rng.sample(sorted(free), min(2, len(free)))  # keys that were held before
        held |= zip(
            [*names, *again], store.enqueue_keyed(*map(keyed, [*names, *again])), strict=True
        )
        free.difference_update(again)
        gone = rng.sample(sorted(held), len(names) // 2)
        store.engine.delete_found(QUEUE, JobState.PENDING, [held.pop(name) for name in gone])
        free.update(gone)
        if turn % 60 == 59:
            ends(store)
        if turn % 10 == 9:
            assert store.engine.find_keys(QUEUE, [*held, *free]) == held
    assert _in_file(stranger) > 0
    assert store.engine.check(repair=False) == []


def test_a_commit_that_fails_moves_no_hashes(
    store: EngineHarness, stranger: sqlite3.Connection, small_memory: None
):
    names = [f"k{number}" for number in range(20)]
    store.enqueue_keyed(*map(keyed, names))
    new = EnqueueWithOptionsOp(QUEUE, [keyed(f"new{number}") for number in range(30)])

    stranger.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON key_hashes BEGIN SELECT RAISE(ABORT, 'full'); END"
    )
    with pytest.raises(StorageNotCommitted):
        store.engine.apply(Batch(with_options=[new]), store.now_ms)
    _assert_held(store, names, new.keys(of_all_queues=False))
    stranger.execute("DROP TRIGGER refuse")

    store.engine.apply(Batch(with_options=[new]), store.now_ms)
    _assert_held(store, [*names, *new.keys(of_all_queues=False)], [])
    _end_badly(store)
    _assert_held(store, [*names, *new.keys(of_all_queues=False)], [])


@pytest.mark.parametrize("in_file", [False, True])
def test_keys_of_one_hash_are_told_apart(
    store: EngineHarness, monkeypatch: pytest.MonkeyPatch, in_file: bool
):
    monkeypatch.setattr(keys, "hash_of", lambda _scope, key: len(key))
    held = store.enqueue_keyed(keyed("a"), keyed("b"))
    if in_file:
        store.reopen()
    held += store.enqueue_keyed(keyed("c"))

    store.engine.delete_found(QUEUE, JobState.PENDING, [held.pop(0)])

    assert store.engine.find_keys(QUEUE, ["a", "b", "c", "d"]) == dict(zip("bc", held, strict=True))


def test_hashes_that_are_missing_are_found_and_mended(
    store: EngineHarness, stranger: sqlite3.Connection
):
    """As after `.recover`, where a key could be held twice."""
    held = store.enqueue_keyed(keyed("a"), keyed("b"))
    store.reopen()
    stranger.execute("DELETE FROM key_hashes")

    found = store.engine.check(repair=True)

    assert found == [Finding(QUEUE, "keys that are not found", 2)]
    assert store.engine.check(repair=False) == []
    assert store.engine.find_keys(QUEUE, ["a", "b"]) == dict(zip("ab", held, strict=True))


def test_the_start_reads_what_the_last_sweep_left(
    store: EngineHarness, small_memory: None, monkeypatch: pytest.MonkeyPatch
):
    for number in range(0, 5_000, 100):
        store.enqueue_keyed(*[keyed(f"k{number + nth}") for nth in range(100)])
    hashed = 0
    hash_of = keys.hash_of

    def count(scope: int, key: str) -> int:
        nonlocal hashed
        hashed += 1
        return hash_of(scope, key)

    monkeypatch.setattr(keys, "hash_of", count)

    _end_badly(store)

    assert 0 < hashed < 1_000
