"""Queues: create, delete, names."""

from __future__ import annotations

from pinlaterd.engines.base import Search, Searcher
from pinlaterd.model import JobState
from tests.conformance.engine.harness import EngineHarness


def test_names_differ_by_case_and_may_be_as_long_as_the_limit(store: EngineHarness):
    longest = "q" * store.engine.limits.queue_name_chars

    for name in ("Mail", longest):
        store.engine.create_queue(name, store.now_ms)
    store.enqueue(b"a", queue="Mail")

    assert store.engine.queues() == {"mail", "Mail", longest}
    assert store.depths("mail") == {}
    assert store.depths("Mail") == {(1, JobState.PENDING): 1}


def test_queues_do_not_mix(store: EngineHarness):
    store.engine.create_queue("other", store.now_ms)
    [mine] = store.enqueue(b"a")
    _, others = store.enqueue(b"b", b"c", queue="other")  # an id may be given once in each queue

    assert [claimed.body for claimed in store.claim(queue="other")] == [b"b", b"c"]
    assert store.states([others]) == [None]
    assert store.succeed(others).noop == 1
    assert store.states([others], queue="other") == [JobState.IN_PROGRESS]
    assert store.states([mine]) == [JobState.PENDING]


def test_a_deleted_queue_is_gone_at_once_for_every_reader(store: EngineHarness, searcher: Searcher):
    store.enqueue(b"a", b"b")

    store.engine.delete_queue("mail")

    assert store.engine.queues() == frozenset()
    assert store.engine.depths() == {}
    assert searcher.count(Search("mail", JobState.PENDING)) == 0


def test_the_rows_of_a_deleted_queue_go_in_slices(store: EngineHarness):
    store.enqueue(*[b"x"] * 25)
    store.claim(limit=15)
    store.succeed(*[claimed.key for claimed in store.claim(limit=5)])
    store.engine.delete_queue("mail")

    slices = 1
    while store.engine.vacuum(limit=10):
        slices += 1

    assert slices <= 10
    assert not store.engine.vacuum(limit=10)
