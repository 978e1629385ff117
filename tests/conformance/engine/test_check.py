"""A store that agrees with itself is said to, whatever its jobs went through."""

from __future__ import annotations

from pinlaterd.model import Job
from tests.conformance.engine.harness import EngineHarness


def test_nothing_is_found_in_a_sound_store(store: EngineHarness):
    store.failed(Job(b"failed", attempts_allowed=1))
    store.succeed(*[one.key for one in store.in_progress(b"succeeded")])
    store.in_progress(b"running")
    store.enqueue(b"pending", Job(b"low", priority=3))
    before = store.depths()

    for repair in (False, True):
        assert store.engine.check(repair=repair) == []

    assert store.depths() == before
