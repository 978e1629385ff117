"""Depths are right whatever is committed while jobs are counted."""

from __future__ import annotations

import logging
import time

import pytest

from pinlaterd.model import JobState
from tests.conformance.engine.harness import QUEUE, EngineHarness

SECONDS = 1.0  # some hundred counts


def test_a_commit_is_counted_once_while_a_count_runs(
    store: EngineHarness, caplog: pytest.LogCaptureFixture
):
    store.engine.create_queue("other", store.now_ms)
    expected = dict.fromkeys([(1, state) for state in JobState if state is not JobState.FAILED], 0)
    until = time.monotonic() + SECONDS
    with caplog.at_level(logging.WARNING):
        while time.monotonic() < until:
            for queue in (QUEUE, "other"):
                store.engine.recount(queue)
            store.engine.depths()  # a count begins, or ends
            store.enqueue(*[b"x"] * 20)
            claimed = [one.key for one in store.claim(limit=10)]
            store.succeed(*claimed[:5])
            expected[1, JobState.PENDING] += 20 - len(claimed)
            expected[1, JobState.IN_PROGRESS] += len(claimed) - 5
            expected[1, JobState.SUCCEEDED] += 5

            assert store.depths() == expected
    assert "did not match" not in caplog.text


def test_a_count_leaves_alone_what_was_deleted_meanwhile(store: EngineHarness):
    store.enqueue(b"a")
    store.engine.recount(QUEUE)
    store.engine.depths()

    store.engine.delete_queue(QUEUE)
    store.engine.create_queue(QUEUE, store.now_ms)
    store.enqueue(b"b", b"c")

    assert store.depths() == {(1, JobState.PENDING): 2}
