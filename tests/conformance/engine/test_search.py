"""Counts, scans and finds, beside the owner."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from pinlaterd.engines.base import Finish, ScanAfter, Search, Searcher, StoredJob
from pinlaterd.engines.mysql import searcher as mysql_searcher
from pinlaterd.model import Job, JobChoice, JobKey, JobState
from tests.clocks import FakeClock
from tests.conformance.engine.harness import Ack, EngineHarness


class Searching:
    """Searches in the queue of the tests, at priority 1 unless others are named."""

    def __init__(self, searcher: Searcher, clock: FakeClock) -> None:
        self.searcher = searcher
        self._clock = clock

    def _search(self, state: JobState, regex: str | None = None, **fields: Any) -> Search:
        return Search("mail", state, now_ms=self._clock.now_ms(), body_regex=regex, **fields)

    def count(self, state: JobState = JobState.PENDING, **fields: Any) -> int:
        return self.searcher.count(self._search(state, **{"future": False, **fields}))

    def scan(
        self, state: JobState = JobState.PENDING, regex: str | None = None, **fields: Any
    ) -> Sequence[StoredJob]:
        defaults = {"future": False, "priorities": (1, 2, 3), "limit": 100}
        return self.searcher.scan(self._search(state, regex, **{**defaults, **fields}))

    def find(
        self, regex: str, state: JobState = JobState.PENDING, **fields: Any
    ) -> Sequence[JobKey]:
        return self.searcher.find(self._search(state, regex, **{"limit": 100, **fields}))


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer jobs than the larger tests have: as they are, a page of MySQL would hold all."""
    monkeypatch.setattr(mysql_searcher, "_SORTED_KEYS", 300)


@pytest.fixture
def search(searcher: Searcher, clock: FakeClock) -> Searching:
    return Searching(searcher, clock)


def _bring_to(store: EngineHarness, state: JobState, jobs: Sequence[Job]) -> list[JobKey]:
    """The jobs in a state, whatever their run-after, priorities 1 to 3."""
    keys = store.enqueue(*jobs)
    if state is JobState.PENDING:
        return keys
    latest_ms = max(job.run_after_ms or 0 for job in jobs)
    now_ms = store.now_ms
    store.clock.advance(max(0, latest_ms - now_ms) / 1000)
    for priority in {job.priority for job in jobs}:
        store.claim(priority=priority)
    if state is JobState.SUCCEEDED:
        store.succeed(*keys)
    elif state is JobState.FAILED:
        store.fail(*keys)
    store.clock.advance(-max(0, latest_ms - now_ms) / 1000)
    assert set(store.states(keys)) == {state}
    return keys


def _jobs(*run_after_ms: int, priority: int = 1) -> list[Job]:
    return [Job(b"body", priority, at, attempts_allowed=1) for at in run_after_ms]


@pytest.mark.parametrize("state", list(JobState))
def test_counts_are_by_state_priority_and_time(
    store: EngineHarness, search: Searching, state: JobState
):
    now_ms = store.now_ms
    _bring_to(
        store,
        state,
        _jobs(now_ms - 5, now_ms, now_ms + 1, now_ms + 9, now_ms + 99) + _jobs(now_ms, priority=2),
    )

    assert search.count(state) == 2
    assert search.count(state, future=True) == 3
    assert search.count(state, priorities=[2]) == 1
    assert search.count(state, priorities=[3]) == 0
    assert [search.count(each) for each in JobState if each is not state] == [0, 0, 0]


@pytest.mark.parametrize("state", list(JobState))
def test_a_scan_shows_whole_jobs_without_bodies(
    store: EngineHarness, search: Searching, state: JobState
):
    [key] = _bring_to(store, state, [Job(b"b", 2, store.now_ms, 1, "é\0")])

    [found] = search.scan(state)

    assert found == store.job(key)._replace(body=None)


@pytest.mark.parametrize("state", list(JobState))
def test_the_most_recent_run_after_comes_first_then_priority_then_id(
    store: EngineHarness, search: Searching, state: JobState
):
    now_ms = store.now_ms
    jobs = [
        Job(b"x", priority, now_ms - offset, attempts_allowed=1)
        for offset in (3, 1, 2, 1, 3)
        for priority in (3, 1, 2)
    ]
    _bring_to(store, state, jobs)

    found = search.scan(state)

    order = [(-job.run_after_ms, job.key.priority, job.key.local_id) for job in found]
    assert len(found) == len(jobs)
    assert order == sorted(order)
    assert search.scan(state, limit=4) == found[:4]
    assert [job.key.priority for job in search.scan(state, priorities=[2])] == [2] * 5


@pytest.mark.parametrize("state", list(JobState))
def test_a_scan_goes_on_strictly_after_a_job(
    store: EngineHarness, search: Searching, state: JobState
):
    now_ms = store.now_ms
    jobs = [Job(b"x", 1 + i % 3, now_ms - i // 6, attempts_allowed=1) for i in range(24)]
    keys = _bring_to(store, state, jobs)

    pages: list[StoredJob] = []
    after = None
    while page := search.scan(state, after=after, limit=5):
        pages += page
        last = page[-1]
        after = ScanAfter(last.run_after_ms, last.key.priority, last.key.local_id)

    assert pages == search.scan(state)
    assert {job.key for job in pages} == set(keys)


@pytest.mark.parametrize("state", list(JobState))
def test_future_jobs_are_scanned_apart(store: EngineHarness, search: Searching, state: JobState):
    now_ms = store.now_ms
    _bring_to(store, state, _jobs(now_ms, now_ms + 10, now_ms + 20))

    assert [job.run_after_ms for job in search.scan(state)] == [now_ms]
    assert [job.run_after_ms for job in search.scan(state, future=True)] == [
        now_ms + 20,
        now_ms + 10,
    ]


@pytest.mark.parametrize("state", list(JobState))
@pytest.mark.parametrize("same_time", [True, False])
def test_scans_of_many_jobs_are_complete_and_in_order(
    store: EngineHarness, search: Searching, state: JobState, same_time: bool
):
    now_ms = store.now_ms
    times = [now_ms - (0 if same_time else i * 7919 % 3000 // 4) for i in range(3_000)]
    keys: list[JobKey] = []
    for first in range(0, 3_000, 1_000):
        keys += _bring_to(store, state, _jobs(*times[first : first + 1_000]))

    found = search.scan(state, limit=10_000)

    assert {job.key for job in found} == set(keys)
    order = [(-job.run_after_ms, job.key.local_id) for job in found]
    assert order == sorted(order)
    assert search.count(state) == 3_000
    assert len(search.find("o", state, limit=10_000)) == 3_000


@pytest.mark.parametrize("newest_end_first", [True, False])
def test_a_search_pauses_after_each_few_jobs(store: EngineHarness, newest_end_first: bool):
    """Meanwhile it holds a core, and the server holds others up."""
    store.fail(*_bring_to(store, JobState.IN_PROGRESS, [Job(b"x", attempts_allowed=1)] * 300))
    looks = list[int]()
    searcher = store.engine.searcher()(lambda: looks.append(searcher.looked_at))

    found = searcher.scan(
        Search("mail", JobState.FAILED, limit=1_000, newest_end_first=newest_end_first)
    )
    searcher.close()

    assert len(found) == 300
    assert max(later - look for look, later in pairwise([*looks, 300])) <= 50


# --- bodies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", list(JobState))
def test_bodies_are_searched_anywhere(store: EngineHarness, search: Searching, state: JobState):
    bodies = [b"invoice 4711", b"prefix\0invoice\xff", b"voice", b"INVOICE", b""]
    keys = _bring_to(
        store, state, [Job(body, 1, store.now_ms, attempts_allowed=1) for body in bodies]
    )

    assert search.count(state, regex="invoice") == 2
    assert {job.key for job in search.scan(state, "invoice")} == set(keys[:2])
    assert set(search.find("invoice", state)) == set(keys[:2])
    assert set(search.find("^(voice|)$", state)) == {keys[2], keys[4]}
    assert set(search.find("(?i)invoice", state)) == {keys[0], keys[1], keys[3]}
    assert list(search.find("nothing", state)) == []


def test_a_find_takes_jobs_whatever_their_time(store: EngineHarness, search: Searching):
    keys = store.enqueue(*_jobs(store.now_ms - 5, store.now_ms + 5_000))

    assert set(search.find("body")) == set(keys)
    assert len(search.find("body", limit=1)) == 1
    assert list(search.find("body", priorities=[2])) == []


# --- the searcher itself --------------------------------------------------------------------


def test_past_its_deadline_a_search_is_given_up(store: EngineHarness, search: Searching):
    store.enqueue(b"x")

    with pytest.raises(TimeoutError):
        search.count(deadline=time.monotonic() - 1)
    with pytest.raises(TimeoutError):
        search.scan(deadline=time.monotonic() - 1)
    with pytest.raises(TimeoutError):
        search.find("x", deadline=time.monotonic() - 1)

    assert search.count() == 1


def test_its_factory_can_be_sent_to_another_process(store: EngineHarness):
    store.enqueue(b"x")
    factory = pickle.loads(pickle.dumps(store.engine.searcher()))
    searcher = factory()

    assert Searching(searcher, store.clock).count() == 1
    searcher.close()


# --- by the time of the end ------------------------------------------------------------------


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED])
def test_jobs_that_have_ended_come_by_their_ends(
    store: EngineHarness, search: Searching, state: JobState
):
    """Whatever their run-after, and however many end together; also page by page."""
    now_ms = store.now_ms
    ends: list[JobKey] = []
    for size in (1, 400, 3, 2):
        jobs = [Job(b"x", 1 + i % 3, now_ms - i * 31 % 50) for i in range(size)]
        keys = store.enqueue(*jobs, Job(b"later", 1, now_ms + 3_600_000))
        store.clock.advance(1)
        store.finish(*[Finish(key, state, 0) for key in keys])
        ends += keys

    found = search.scan(state, limit=1000, newest_end_first=True, future=None)

    order = [(-job.updated_at_ms, job.key.priority, job.key.local_id) for job in found]
    assert len(found) == len(ends)
    assert order == sorted(order)
    pages: list[StoredJob] = []
    after = None
    while page := search.scan(state, after=after, limit=60, newest_end_first=True, future=None):
        pages += page
        after = ScanAfter(page[-1].updated_at_ms, *page[-1].key)
    assert pages == found


# --- choices --------------------------------------------------------------------------------


@pytest.fixture
def failed(store: EngineHarness) -> list[JobKey]:
    """Jobs that failed a millisecond after each other, at changing places, with other messages."""
    keys = []
    for number in range(6):
        store.clock.advance(0.001)
        [key] = store.enqueue(Job(b"%d" % number, 1 + number % 2, attempts_allowed=1))
        store.claim(priority=key.priority, source=f"web:h{number % 3}")
        status = f"KeyError: {number} (a.py:{number % 2} in f)"
        store.fail(Ack(key, append_custom_status=status))
        keys.append(key)
    return keys


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        (JobChoice(status_regex="KeyError: [135]"), [5, 3, 1]),
        (JobChoice(message="KeyError: #"), [5, 4, 3, 2, 1, 0]),
        (JobChoice(message="KeyError: 1"), []),
        (JobChoice(place="a.py:0 in f"), [4, 2, 0]),
        (JobChoice(worker="web:h1"), [4, 1]),
        (JobChoice(worker="web:h1", status_regex="4"), [4]),
    ],
)
def test_jobs_are_chosen_by_their_status_and_worker(
    search: Searching, failed: list[JobKey], choice: JobChoice, chosen: list[int]
):
    found = search.scan(JobState.FAILED, newest_end_first=True, future=None, choice=choice)

    assert [failed.index(job.key) for job in found] == chosen
    assert search.count(JobState.FAILED, choice=choice, priorities=[1, 2]) == len(chosen)


@pytest.mark.parametrize("by_end", [True, False])
def test_jobs_are_chosen_by_the_time_of_their_end(
    store: EngineHarness, search: Searching, failed: list[JobKey], by_end: bool
):
    ends = [store.job(key).updated_at_ms for key in failed]
    choice = JobChoice(ended_since_ms=ends[1], ended_before_ms=ends[4])

    found = search.scan(JobState.FAILED, newest_end_first=by_end, future=None, choice=choice)

    assert {failed.index(job.key) for job in found} == {3, 2, 1}
    assert search.searcher.looked_at == (3 if by_end else 6)


def test_a_search_knows_how_far_it_got(
    store: EngineHarness, search: Searching, failed: list[JobKey]
):
    [found] = search.scan(
        JobState.FAILED, "2", newest_end_first=True, future=None, priorities=(1, 2), limit=1
    )

    assert found.key == failed[2]
    assert search.searcher.looked_at == 4
    assert search.searcher.place == ScanAfter(found.updated_at_ms, *found.key)


def test_each_search_begins_anew(search: Searching, failed: list[JobKey]):
    """Whatever the one before it has found."""
    assert len(search.scan(JobState.FAILED, newest_end_first=True, future=None)) == len(failed)

    assert len(search.find("[0-5]", JobState.FAILED, limit=1, priorities=[1])) == 1
    [newest] = search.scan(JobState.FAILED, newest_end_first=True, future=None, limit=1)
    assert newest.key == failed[-1]
