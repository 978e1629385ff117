"""The table of keys: made when it is first used, and checked along with the jobs."""

from __future__ import annotations

import sqlite3

import pytest

from pinlaterd.engines.base import Batch, Finding, KeyedEnqueueOp
from pinlaterd.errors import QueueNotFound
from pinlaterd.model import JobState
from tests.conformance.engine.harness import QUEUE, EngineHarness, keyed


def _has_table(db: sqlite3.Connection) -> bool:
    return bool(db.execute("SELECT 1 FROM sqlite_master WHERE name = 'keys'").fetchall())


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


def test_a_commit_that_fails_leaves_neither_table_nor_keys(
    store: EngineHarness, stranger: sqlite3.Connection
):
    ops = [KeyedEnqueueOp(QUEUE, [keyed("k")]), KeyedEnqueueOp("none", [keyed("k")])]

    with pytest.raises(QueueNotFound):
        store.engine.apply(Batch(keyed=ops), store.now_ms)

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

    assert found == [Finding(QUEUE, "keys of jobs that are not there", 1)]
    assert store.engine.check(repair=False) == []
    assert store.engine.find_keys(QUEUE, ["taken again", "left"]) == {"taken again": new}
