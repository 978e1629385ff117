"""Jobs with keys: at most one job of a queue holds a key, as long as it is kept."""

from __future__ import annotations

from typing import Any

import pytest

from pinlaterd.engines.base import Batch, EnqueueWithOptionsOp, KeyHolder, Search
from pinlaterd.model import MOST_KEY_BYTES, Job, JobKey, JobOptions, JobState
from tests.conformance.engine.harness import QUEUE, EngineHarness, keyed

ALIKE = ["a", "A", "a ", " a", "a\0", "a\0b", "ä", "a\u0308", "%", "_", "'\"\\", "1", "01"]
LONGEST = [letter * (MOST_KEY_BYTES // len(letter.encode())) for letter in "xé🦆"]


def _in_state(store: EngineHarness, state: JobState) -> JobKey:
    """Return a job with the key `k` in `state`."""
    [key] = store.enqueue_keyed(keyed("k", attempts_allowed=1))
    if state is not JobState.PENDING:
        store.claim()
    if state is JobState.SUCCEEDED:
        store.succeed(key)
    if state is JobState.FAILED:
        store.fail(key)
    assert store.states([key]) == [state]
    return key


@pytest.mark.parametrize("state", list(JobState))
def test_a_key_is_held_in_whatever_state_its_job_is(store: EngineHarness, state: JobState):
    holder = _in_state(store, state)
    depths = store.depths()

    [answer] = store.keyed(keyed("k", b"again", priority=2))

    assert answer == KeyHolder(*holder, existed=True)
    assert store.engine.find_keys(QUEUE, ["k"]) == {"k": holder}
    assert store.depths() == depths
    assert store.job(holder).body == b"k"


def test_of_jobs_with_the_same_key_the_first_is_stored(store: EngineHarness):
    [old] = store.enqueue_keyed(keyed("old"))
    calls = [
        EnqueueWithOptionsOp(
            QUEUE, [keyed("new"), keyed("old"), keyed("new", b"second", priority=2)]
        ),
        EnqueueWithOptionsOp(QUEUE, [keyed("new"), keyed("other")]),
    ]

    first, second = store.engine.apply(Batch(with_options=calls), store.now_ms).with_options

    new, other = first[0], second[1]
    assert [new.existed, other.existed] == [False, False]
    again = new._replace(existed=True)
    assert first == [new, KeyHolder(*old, existed=True), again]
    assert second == [again, other]
    assert store.depths() == {(1, JobState.PENDING): 3}
    assert [claimed.body for claimed in store.claim()] == [b"old", b"new", b"other"]


def test_keys_are_told_apart_byte_by_byte(store: EngineHarness):
    keys = [*ALIKE, *LONGEST, *[f"order-{number}" for number in range(250)]]
    jobs = [keyed(key) for key in keys]

    stored = store.enqueue_keyed(*jobs)

    assert len(set(stored)) == len(keys)
    assert store.engine.find_keys(QUEUE, [*keys, "none"]) == dict(zip(keys, stored, strict=True))
    assert store.keyed(*jobs) == [KeyHolder(*key, existed=True) for key in stored]


def test_jobs_with_keys_keep_their_order_and_all_that_they_ask_for(store: EngineHarness):
    later_ms = store.now_ms + 60_000
    jobs = [
        keyed("a", priority=2, custom_status="sent"),
        keyed("b", run_after_ms=later_ms),
        keyed("c", attempts_allowed=5),
    ]

    stored = store.enqueue_keyed(*jobs)

    found = [store.job(key) for key in stored]
    assert [job.options for job in found] == [job.options for job in jobs]
    assert [job.body for job in found] == [b"a", b"b", b"c"]
    assert [job.key.priority for job in found] == [2, 1, 1]
    assert found[0].custom_status == "sent"
    assert found[1].run_after_ms == later_ms
    assert found[2].attempts_allowed == 5
    assert store.ready() == stored[2:]


def test_a_queue_has_its_own_keys(store: EngineHarness):
    store.engine.create_queue("other", store.now_ms)
    [mine] = store.enqueue_keyed(keyed("k"))

    assert store.engine.find_keys("other", ["k"]) == {}
    [others] = store.keyed(keyed("k"), queue="other")

    assert not others.existed
    assert store.engine.find_keys(QUEUE, ["k"]) == {"k": mine}


def _delete_jobs(store: EngineHarness, _: JobKey) -> None:
    store.engine.delete_jobs(QUEUE, JobState.SUCCEEDED, 1, limit=10)


def _delete_found(store: EngineHarness, key: JobKey) -> None:
    store.engine.delete_found(QUEUE, JobState.SUCCEEDED, [key])


def _collect_garbage(store: EngineHarness, _: JobKey) -> None:
    before_ms = store.now_ms + 60_000
    store.engine.collect_garbage(QUEUE, JobState.SUCCEEDED, updated_before_ms=before_ms, limit=10)


def _delete_queue(store: EngineHarness, _: JobKey) -> None:
    store.engine.delete_queue(QUEUE)
    store.engine.create_queue(QUEUE, store.now_ms)


@pytest.mark.parametrize("delete", [_delete_jobs, _delete_found, _collect_garbage, _delete_queue])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_key_goes_with_its_job(store: EngineHarness, delete, reopened: bool):
    old = _in_state(store, JobState.SUCCEEDED)
    delete(store, old)
    if reopened:
        store.reopen()

    assert store.engine.find_keys(QUEUE, ["k"]) == {}
    [new] = store.keyed(keyed("k", b"new"))
    while store.engine.vacuum(limit=1):
        pass

    assert not new.existed
    assert store.engine.find_keys(QUEUE, ["k"]) == {"k": JobKey(new.priority, new.local_id)}
    assert new.local_id != old.local_id
    assert [claimed.body for claimed in store.claim()] == [b"new"]


def test_a_job_that_stays_keeps_its_key(store: EngineHarness):
    gone, stays = store.enqueue_keyed(keyed("gone"), keyed("stays"))
    store.enqueue(b"plain")

    store.engine.delete_found(QUEUE, JobState.PENDING, [gone])
    store.engine.delete_found(QUEUE, JobState.FAILED, [stays])

    assert store.engine.find_keys(QUEUE, ["gone", "stays"]) == {"stays": stays}


def test_keys_outlast_the_owner(store: EngineHarness):
    holder = _in_state(store, JobState.PENDING)

    store.reopen()

    assert store.keyed(keyed("k")) == [KeyHolder(*holder, existed=True)]
    assert store.job(holder).options == JobOptions("k")


def test_scans_show_keys(store: EngineHarness):
    with_key = store.enqueue_keyed(keyed("k"))
    without = store.enqueue(b"plain")
    searcher = store.engine.searcher()()

    found = {job.key: job.options for job in searcher.scan(Search(QUEUE, JobState.PENDING))}

    assert found == {with_key[0]: JobOptions("k"), without[0]: None}
    searcher.close()


def test_a_fence_only_grows_and_outlasts_the_owner(store: EngineHarness):
    assert store.engine.fence == 0

    for number in (3, 2):
        store.engine.raise_fence(number)
        assert store.engine.fence == 3
    store.reopen()
    assert store.engine.fence == 3
    store.engine.raise_fence(4)
    store.reopen()

    assert store.engine.fence == 4


def test_plain_jobs_have_no_keys(store: EngineHarness):
    [key] = store.enqueue(Job(b"plain"))

    assert store.job(key).options is None
    assert store.engine.find_keys(QUEUE, ["k"]) == {}


# --- keys of all queues ---------------------------------------------------------------------


def _of_all(key: str, body: bytes = b"x", **fields: Any) -> Job:
    return Job(body, options=JobOptions(key, key_of_all_queues=True), **fields)


@pytest.fixture
def other(store: EngineHarness) -> str:
    store.engine.create_queue("other", store.now_ms)
    return "other"


def test_a_key_of_all_queues_is_held_once_in_all_of_them(store: EngineHarness, other: str):
    [mine] = store.keyed(_of_all("k"))
    [same] = store.keyed(_of_all("k", priority=2))
    [others] = store.keyed(_of_all("k"), queue=other)
    [own], [theirs] = store.keyed(keyed("k")), store.keyed(keyed("k"), queue=other)

    assert not mine.existed
    for holder in (same, others):
        assert holder[:3] == (*mine[:2], True)
        assert holder.queue == QUEUE
    assert not own.existed
    assert not theirs.existed
    assert store.engine.find_keys_of_all(["k", "none"]) == {"k": others}
    assert store.engine.find_keys(QUEUE, ["k"]) == {"k": JobKey(*own[:2])}
    assert store.engine.find_keys(other, ["k"]) == {"k": JobKey(*theirs[:2])}
    assert store.job(JobKey(*mine[:2])).options == JobOptions("k", key_of_all_queues=True)
    assert store.job(JobKey(*own[:2])).options == JobOptions("k")


def test_of_a_batch_the_first_holds_a_key_of_all_queues(store: EngineHarness, other: str):
    calls = [
        EnqueueWithOptionsOp(QUEUE, [keyed("k"), _of_all("k"), _of_all("k"), _of_all("m")]),
        EnqueueWithOptionsOp(other, [_of_all("k"), _of_all("n"), keyed("k")]),
        EnqueueWithOptionsOp(QUEUE, [_of_all("n")]),
    ]

    mine, others, last = store.engine.apply(Batch(with_options=calls), store.now_ms).with_options

    assert [holder.existed for holder in mine] == [False, False, True, False]
    assert mine[2][:2] == mine[1][:2] != mine[0][:2]
    assert [holder.existed for holder in others] == [True, False, False]
    assert others[0] == KeyHolder(*mine[1][:2], True, QUEUE)
    assert last == [KeyHolder(*others[1][:2], True, other)]
    assert store.depths() == {(1, JobState.PENDING): 3}


@pytest.mark.parametrize("delete", [_delete_jobs, _delete_found, _collect_garbage, _delete_queue])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_key_of_all_queues_goes_with_its_job(
    store: EngineHarness, other: str, delete, reopened: bool
):
    [holder] = store.keyed(_of_all("k"))
    old = JobKey(*holder[:2])
    store.claim()
    store.succeed(old)
    delete(store, old)
    if reopened:
        store.reopen()

    assert store.engine.find_keys_of_all(["k"]) == {}
    [new] = store.keyed(_of_all("k", b"new"), queue=other)
    while store.engine.vacuum(limit=1):
        pass

    assert not new.existed
    assert store.engine.find_keys_of_all(["k"]) == {"k": KeyHolder(*new[:2], True, other)}
    assert store.keyed(_of_all("k"))[0].queue == other


def test_keys_of_all_queues_outlast_the_owner(store: EngineHarness, other: str):
    [holder] = store.keyed(_of_all("k"), queue=other)

    store.reopen()

    assert store.engine.find_keys_of_all(["k"]) == {"k": KeyHolder(*holder[:2], True, other)}
    assert store.keyed(_of_all("k"))[0].existed
