"""The ready index against a plain sorted list, on a store that keeps what the index does not."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pinlaterd.model import Payload, PendingKey
from pinlaterd.shard import ready as ready_module
from pinlaterd.shard.ready import KEY_BYTES, PAYLOAD_OVERHEAD_BYTES, Key, ReadyIndex, Taken

LEVELS = 3
BYTES_A_KEY = 4 * KEY_BYTES  # a quarter of the memory is for keys
LATEST_MS = 1 << 60


class Store:
    """What is PENDING, by priority, in order; counts the reads."""

    def __init__(self) -> None:
        self.pending: dict[tuple[str, int], list[PendingKey]] = {}
        self.reads: list[PendingKey | None] = []

    def add(self, queue: str, priority: int, key: PendingKey) -> None:
        insort(self.pending.setdefault((queue, priority), []), key)

    def remove(self, queue: str, priority: int, key: Key) -> None:
        self.pending[queue, priority].remove(PendingKey(*key))

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]:
        self.reads.append(after)
        return [
            key
            for key in self.pending.get((queue, priority), ())
            if (after is None or key > after) and key.run_after_ms <= until_ms
        ][:limit]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def ready(store: Store) -> ReadyIndex:
    index = ReadyIndex(
        store.read_pending, LEVELS, most_bytes=100_000_000, max_run_after_ms=LATEST_MS
    )
    index.open_queue("mail")
    return index


def payload_of(key: Key, size: int = 10) -> Payload:
    return Payload(b"%d" % key[1] + bytes(size), 2, 2)


def keys_of(taken: Sequence[Taken]) -> list[tuple[int, Key]]:
    return [(priority, key) for priority, keys, _ in taken for key in keys]


def test_nothing_is_read_while_nothing_can_be_due(ready: ReadyIndex, store: Store):
    ready.add("mail", 1, [PendingKey(500, 1)], now_ms=100)
    store.reads.clear()

    for now_ms in range(100, 500, 50):
        ready.take("mail", 10, 0, now_ms)
        ready.counts("mail", now_ms)
        assert list(ready.look(now_ms)) == []

    assert store.reads == []


def test_a_deep_queue_is_read_from_where_the_last_read_ended(store: Store):
    deep = [PendingKey(at, at) for at in range(1, 5_001)]
    for key in deep:
        store.add("mail", 1, key)
    ready = ReadyIndex(
        store.read_pending, LEVELS, most_bytes=100_000_000, max_run_after_ms=LATEST_MS
    )
    ready.open_queue("mail", nonempty=[1])

    handed_out = []
    while taken := ready.take("mail", 700, 0, now_ms=10_000):
        for priority, taken_key in keys_of(taken):
            handed_out.append(taken_key)
            store.remove("mail", priority, taken_key)

    assert handed_out == deep
    assert store.reads[0] is None
    assert None not in store.reads[1:]
    assert sorted(store.reads[1:]) == store.reads[1:]  # type: ignore[type-var]


def test_payloads_are_handed_out_with_their_jobs_as_long_as_there_is_room(store: Store):
    keys = [PendingKey(1, local_id) for local_id in range(1, 5)]
    payloads = [payload_of(key, 1_000) for key in keys]
    most_bytes = 8 * (PAYLOAD_OVERHEAD_BYTES + 1_001)  # nine twentieths are for payloads: three
    ready = ReadyIndex(store.read_pending, LEVELS, most_bytes=most_bytes, max_run_after_ms=9)
    ready.open_queue("mail")
    for key, payload in zip(keys, payloads, strict=True):
        ready.add("mail", 1, [key], 10, [payload])
    whole = ready.held_bytes

    ready.discard("mail", 1, [2])
    assert ready.held_bytes < whole - 1_000
    [taken] = ready.take("mail", 9, 0, 10)

    assert taken.payloads == [payloads[0], payloads[2], None]
    assert ready.held_bytes == 0
    ready.requeue("mail", [taken], 10)
    assert ready.take("mail", 9, 0, 10) == [taken]


def test_a_job_that_comes_back_is_handed_out_where_it_was(ready: ReadyIndex):
    early, back, late = (PendingKey(at, at) for at in (5, 10, 20))
    ready.add("mail", 1, [early, late], now_ms=30)

    ready.add("mail", 1, [back], now_ms=30)

    assert [key for _, key in keys_of(ready.take("mail", 9, 0, 30))] == [early, back, late]


def test_a_dropped_queue_leaves_nothing_behind(ready: ReadyIndex):
    ready.add("mail", 1, [PendingKey(1, 1)], now_ms=10)

    ready.drop_queue("mail")

    assert "mail" not in ready
    assert len(ready) == 0
    assert list(ready.look(1_000)) == []


class AgainstAModel(RuleBasedStateMachine):
    """Any order of enqueues, claims, put-backs, deletes, with time going on, and little room."""

    @initialize(max_keys=st.integers(2, 12), read_keys=st.integers(1, 4))
    def begin(self, max_keys: int, read_keys: int) -> None:
        self.saved = ready_module.READ_KEYS
        ready_module.READ_KEYS = read_keys
        self.store = Store()
        self.now_ms = 10
        self.next_id = 1
        self.max_keys = max(max_keys, read_keys)
        self.index = ReadyIndex(
            self.store.read_pending,
            2,
            most_bytes=self.max_keys * BYTES_A_KEY,
            max_run_after_ms=LATEST_MS,
        )
        self.index.open_queue("q")
        self.index.open_queue("r")

    def teardown(self) -> None:
        if hasattr(self, "saved"):
            ready_module.READ_KEYS = self.saved

    def due(self, queue: str, priority: int) -> list[PendingKey]:
        pending = self.store.pending.get((queue, priority), [])
        return [key for key in pending if key.run_after_ms <= self.now_ms]

    @rule(
        queue=st.sampled_from("qr"),
        priority=st.integers(1, 2),
        delays=st.lists(st.integers(-15, 15), min_size=1, max_size=5),
    )
    def enqueue(self, queue: str, priority: int, delays: list[int]) -> None:
        keys = []
        for delay in delays:
            keys.append(PendingKey(max(0, self.now_ms + delay), self.next_id))
            self.next_id += 1
        for key in keys:
            self.store.add(queue, priority, key)
        keys.sort()
        payloads = [payload_of(key) for key in keys]
        self.index.add(queue, priority, keys, self.now_ms, payloads)

    @rule(
        queue=st.sampled_from("qr"),
        limit=st.integers(1, 8),
        lowest=st.integers(0, 2),
        claimed=st.integers(0, 8),
    )
    def take(self, queue: str, limit: int, lowest: int, claimed: int) -> None:
        expected = [(p, key) for p in range(1, (lowest or 2) + 1) for key in self.due(queue, p)]
        taken = self.index.take(queue, limit, lowest, self.now_ms)
        expected = expected[:limit]
        assert keys_of(taken) == expected
        back = []
        for each in taken:
            for key, payload in zip(each.keys, each.payloads, strict=True):
                assert payload in (None, payload_of(key))
                if claimed:
                    claimed -= 1
                    self.store.remove(queue, each.priority, key)
                else:
                    back.append(Taken(each.priority, [key], [payload]))
        self.index.requeue(queue, back, self.now_ms)

    @rule(queue=st.sampled_from("qr"), priority=st.integers(1, 2), data=st.data())
    def delete(self, queue: str, priority: int, data: st.DataObject) -> None:
        pending = self.store.pending.get((queue, priority), [])
        if pending:
            key = data.draw(st.sampled_from(pending))
            self.store.remove(queue, priority, key)
            self.index.discard(queue, priority, [key.local_id])

    @rule(milliseconds=st.integers(1, 20))
    def time_goes_on(self, milliseconds: int) -> None:
        self.now_ms += milliseconds

    @rule()
    def look(self) -> None:
        list(self.index.look(self.now_ms))

    @rule(queue=st.sampled_from("qr"))
    def counts_are_zero_only_if_nothing_is_ready(self, queue: str) -> None:
        counts = self.index.counts(queue, self.now_ms)
        for priority, count in enumerate(counts, 1):
            assert count <= len(self.due(queue, priority))
            assert bool(count) == bool(self.due(queue, priority))

    @invariant()
    def nothing_due_is_slept_through(self) -> None:
        if hasattr(self, "index") and self.index.wake_ms() > self.now_ms:
            for queue in "qr":
                assert self.index.has_ready(queue, 0, self.now_ms) == any(
                    self.due(queue, priority) for priority in (1, 2)
                )

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "index"):
            most_keys = self.max_keys + 4  # one for each line
            assert len(self.index) <= most_keys
            assert self.index.held_bytes <= most_keys * KEY_BYTES + self.max_keys * BYTES_A_KEY // 2

    @rule(queue=st.sampled_from("qr"))
    def delete_all(self, queue: str) -> None:
        for priority in (1, 2):
            self.store.pending.pop((queue, priority), None)
        self.index.drop_queue(queue)
        self.index.open_queue(queue)
        if not len(self.index):
            assert self.index.held_bytes == 0


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=150, stateful_step_count=40)
