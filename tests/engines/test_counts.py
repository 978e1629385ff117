"""Counts beside the owner: what is cancelled ends, what fails is told."""

from __future__ import annotations

import logging
import threading

import pytest

from pinlaterd.engines.counts import Counts, Depths
from pinlaterd.errors import StorageError
from pinlaterd.model import JobState
from tests.clocks import FakeClock
from tests.conftest import WaitUntil

PENDING = (1, JobState.PENDING)


class Store:
    """A search for damage fails there, as soon as it may or is cancelled."""

    def __init__(self) -> None:
        self.snapshots = 0
        self.counted: list[str] = []
        self.searches = threading.Event()
        self.may_fail = threading.Event()

    def snapshot(self) -> Store:
        self.snapshots += 1
        return self

    def find_damage(self) -> str:
        self.searches.set()
        self.may_fail.wait()
        raise StorageError("no room to sort")

    def count(self, queue: str) -> Depths:
        self.counted.append(queue)
        return {PENDING: 3}

    def cancel(self) -> None:
        self.may_fail.set()

    def close(self) -> None: ...


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def counts(store: Store, clock: FakeClock) -> Counts[str]:
    """A queue is to be counted, and damage to be looked for."""
    counts = Counts(store.snapshot, clock, str)
    counts.open_queue("mail", None)
    counts.find_damage()
    return counts


def test_nothing_is_counted_after_a_search_was_cancelled(store: Store, counts: Counts[str]):
    counts.poll()
    store.searches.wait()

    counts.cancel()

    assert store.counted == []


def test_a_search_that_fails_is_told_of_and_tried_later(
    store: Store,
    counts: Counts[str],
    wait_until: WaitUntil,
    caplog: pytest.LogCaptureFixture,
):
    store.may_fail.set()

    with caplog.at_level(logging.WARNING):
        wait_until(counts.poll)

    assert counts.of("mail") == {}  # until the owner adds what `poll` returned
    assert "jobs can't be checked now, and are in 5 s: no room to sort" in caplog.text
    counts.poll()
    assert store.snapshots == 1
    assert not counts.sound


def test_a_recount_that_is_wanted_during_a_count_takes_another_snapshot(
    store: Store, counts: Counts[str], clock: FakeClock, wait_until: WaitUntil
):
    counts.poll()
    store.searches.wait()
    counts.recount("mail")
    store.may_fail.set()
    wait_until(counts.poll)

    clock.advance(5)  # as long as a search for damage that failed is not tried again
    counts.poll()

    wait_until(lambda: store.counted == ["mail", "mail"])


def test_a_queue_with_fewer_jobs_than_none_is_suspect_until_it_is_counted(counts: Counts[str]):
    counts.open_queue("post", {PENDING: 1})

    counts.add({("post", *PENDING): -1})
    assert counts.suspects == set()
    counts.add({("post", *PENDING): -1})

    assert counts.suspects == {"post"}
    counts.recount("post")
    assert counts.suspects == set()
