"""Searches beside the job path, and beside each other, through the real processes."""

from __future__ import annotations

import asyncio
import math
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import psutil
import pytest

from pinlaterd.client import Client, Job, JobState, calls
from pinlaterd.errors import InvalidRequest, PinLaterError
from pinlaterd.model import CallContext, ScanResult
from tests.conftest import WaitUntil
from tests.deployment import MOST_PATIENT, Deployment, serving

pytestmark = pytest.mark.service

QUEUE, OTHER, LONG = "deep", "other", "long"
JOBS, BODY_BYTES, MARKED_EVERY = 400, 2_000, 40
# RE2 falls back to its slow way: 11 ms of a fast processor for each body, 4 s for all.
SLOW, SLOW_AND_FOUND = "a[ab]{600}c", "a[ab]{600}c|marked"
LESS_SLOW_AND_FOUND = "(a|b)*a[ab]{20}c|marked"  # some 0.4 s
LONG_BODY_BYTES = 1_000_000
# Its steps for a long body are near what is allowed: some seconds.
LONG_MATCH = "a[ab]{400}c"
TOO_LONG_MATCH = ".*(a|b).{900}.*(a|b).{900}" * 4
REQUEST_SECONDS = 1.5
PART_MS = 300
TRIES = 5  # a busy machine holds up one of them
IMPATIENT = 4
CLOSED = 2  # connections
ROUND_TRIPS = 100


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Start a service whose calls have REQUEST_SECONDS once its jobs are stored."""
    with serving(tmp_path_factory.mktemp("service"), settings=MOST_PATIENT) as deployment:
        with deployment.client() as client:
            client.create_queue(QUEUE)
            client.create_queue(OTHER)
            client.create_queue(LONG)
            client.enqueue(LONG, [bytes(random.Random(1).choices(b"ab", k=LONG_BODY_BYTES))])
            for at in range(0, JOBS, 100):
                client.enqueue(QUEUE, [_job(number) for number in range(at, at + 100)])
        file = deployment.folder / "etc/pinlaterd.yaml"
        patient = f"request_timeout_ms: {MOST_PATIENT['request_timeout_ms']}\n"
        soon = f"request_timeout_ms: {round(REQUEST_SECONDS * 1000)}\n"
        file.write_text(file.read_text().replace(patient, soon))
        deployment.up()
        deployment.wait_until_serving()  # starts the searcher, which takes a busy machine long
        yield deployment


def _job(number: int) -> Job:
    letters = bytes(random.Random(number).choices(b"ab", k=BODY_BYTES))
    return Job(
        letters + (b" marked" if number % MARKED_EVERY == 0 else b""), run_after_ms=1 + number
    )


def _searcher(service: Deployment) -> psutil.Process:
    (searcher,) = psutil.Process(service.pid_of("shard-1")).children()
    return searcher


def _seconds_used(process: psutil.Process) -> float:
    """Of the processor."""
    return sum(process.cpu_times()[:2])


def _has_used_more(process: psutil.Process, seconds: float) -> bool:
    return _seconds_used(process) > seconds


@contextmanager
def busy_cores() -> Iterator[None]:
    """Every core has more to do than it can."""
    with ExitStack() as ends:
        for _ in range(2 * (psutil.cpu_count() or 1)):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            ends.callback(process.wait)
            ends.callback(process.kill)
        yield


def test_a_viewer_is_answered_while_others_search(service: Deployment):
    """They ask again and again for what takes longer than a call may."""
    assert any(_is_answered_while_others_search(service) for _ in range(TRIES))


def _is_answered_while_others_search(service: Deployment) -> bool:
    """Each time, and before a call's time is over."""
    with ThreadPoolExecutor(IMPATIENT) as impatient, service.client("patient") as client:
        asking = [impatient.submit(_ask_in_vain, service) for _ in range(IMPATIENT)]
        times: list[float] = []
        while not all(asked.done() for asked in asking):
            began = time.monotonic()
            try:
                found = client.count(QUEUE, JobState.PENDING, body_regex="marked")
            except PinLaterError:
                times.append(math.inf)
            else:
                assert found == JOBS // MARKED_EVERY
                times.append(time.monotonic() - began)
        assert [asked.result() for asked in asking] == [None] * IMPATIENT
    return len(times) > 1 and max(times) < REQUEST_SECONDS


def _ask_in_vain(service: Deployment) -> None:
    with service.client("impatient", timeout_seconds=30) as client:
        for _ in range(2):
            with suppress(PinLaterError):  # a fast machine may answer in time
                client.count(QUEUE, JobState.PENDING, body_regex=SLOW)


def test_a_scan_that_takes_longer_than_a_call_goes_on_with_the_next_one(service: Deployment):
    """A call that finds nothing in its time says so with a continuation; and nothing is missed."""
    with service.client() as client:
        pages = list(_pages(client, SLOW_AND_FOUND))

    found = [job.run_after_ms for page in pages for job in page.jobs]
    assert len(pages) > 1
    assert found == sorted(range(1, JOBS + 1, MARKED_EVERY), reverse=True)


def _pages(client: Client, body_regex: str) -> Iterator[ScanResult]:
    call: calls.PreparedCall[ScanResult] | None = calls.scan(
        QUEUE, JobState.PENDING, body_regex=body_regex
    )
    while call is not None:
        yield (page := _page(client, call))
        call = calls.page_after(call, page)


def _page(client: Client, call: calls.PreparedCall[ScanResult]) -> ScanResult:
    """On a busy machine it may be held up between its time and the call's; it can be repeated."""
    for _ in range(TRIES - 1):
        with suppress(PinLaterError):
            return client.run(call)
    return client.run(call)


def test_a_search_answers_in_time_with_how_far_it_got(service: Deployment):
    """Also where nothing matches: each answer goes on from where the one before it ended."""
    with service.client() as client:
        call: calls.PreparedCall[ScanResult] | None
        call = calls.scan(QUEUE, JobState.PENDING, body_regex=SLOW, max_ms=PART_MS)
        pages, seconds = [], []
        while call is not None:
            began = time.monotonic()
            pages.append(_page(client, call))
            seconds.append(time.monotonic() - began)
            call = calls.page_after(call, pages[-1])

    assert len(pages) > 2
    assert len({page.continuation for page in pages}) == len(pages)
    assert sum(page.looked_at for page in pages) == JOBS
    assert {page.in_state for page in pages} == {JOBS}
    # A tenth of them, or one, may be the machine's.
    assert sorted(seconds)[len(seconds) * 9 // 10 - 1] < REQUEST_SECONDS


def test_a_search_whose_caller_gives_up_ends_at_once(service: Deployment):
    assert any(_seconds_after_a_search(service) < REQUEST_SECONDS / 6 for _ in range(TRIES))


def _seconds_after_a_search(service: Deployment) -> float:
    """Return how much of the processor it uses once its caller has given it up."""
    service.wait_until_serving()  # so that there is a searcher
    searcher = _searcher(service)
    used = []

    async def search_and_give_up() -> None:
        async with service.client().asynchronous() as client:
            call = calls.scan(QUEUE, JobState.PENDING, body_regex=SLOW)
            before = _seconds_used(searcher)
            searching = asyncio.ensure_future(client.run(call))
            while not _has_used_more(searcher, before + 0.02):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
            searching.cancel()
            with suppress(asyncio.CancelledError):
                await searching
            used.append(_seconds_used(searcher))

    asyncio.run(search_and_give_up())
    time.sleep(REQUEST_SECONDS / 2)

    return _seconds_used(searcher) - used[0]


def test_a_search_ends_with_its_connection(service: Deployment, wait_until: WaitUntil):
    """Each would go on for most of the time that a call has."""
    most = CLOSED * REQUEST_SECONDS / 6
    assert any(_seconds_after_connections(service, wait_until) < most for _ in range(TRIES))


def _seconds_after_connections(service: Deployment, wait_until: WaitUntil) -> float:
    """Return how much of the processor searches use once their connections have ended."""
    count = calls.count(QUEUE, JobState.PENDING, body_regex=SLOW).encode(1, CallContext("viewer"))
    service.wait_until_serving()  # so that there is a searcher
    searcher = _searcher(service)
    used = 0.0
    for _ in range(CLOSED):
        with socket.create_connection(("127.0.0.1", service.port)) as viewer:
            viewer.sendall(struct.pack(">i", len(count)) + count)
            wait_until(partial(_has_used_more, searcher, _seconds_used(searcher)))
        closed = _seconds_used(searcher)
        time.sleep(REQUEST_SECONDS)
        used += _seconds_used(searcher) - closed
    return used


def test_a_search_ends_on_a_machine_that_is_busy(service: Deployment):
    with busy_cores(), service.client() as client:
        found = sum(len(page.jobs) for page in _pages(client, LESS_SLOW_AND_FOUND))

    assert found == JOBS // MARKED_EVERY


def test_the_job_path_beside_a_search(service: Deployment):
    with service.client() as client, ThreadPoolExecutor(1) as viewer:
        usual = _median(client)
        searching = viewer.submit(_ask_in_vain, service)
        beside = _median(client)
        searching.result()

    # The tail is `tools/bench interference`'s to measure: here it is the machine's, too.
    assert beside < 2 * usual + 0.1


def _median(client: Client) -> float:
    times = []
    for _ in range(ROUND_TRIPS):
        began = time.monotonic()
        try:
            client.enqueue(OTHER, [b"job"])
            client.ack(OTHER, succeeded=client.dequeue(OTHER, limit=1))
        except PinLaterError:  # held up for as long as a call may take, or refused
            times.append(math.inf)
        else:
            times.append(time.monotonic() - began)
    return sorted(times)[len(times) // 2]


def test_a_match_that_could_take_minutes_is_refused_at_once(service: Deployment):
    with service.client() as client:
        search = (LONG, JobState.PENDING)
        with pytest.raises(InvalidRequest, match=r"^invalid request: .* 500,000,000 at most"):
            client.count(*search, body_regex=TOO_LONG_MATCH)
        with pytest.raises(InvalidRequest, match=r"^invalid request: .* 500,000,000 at most"):
            list(client.scan(*search, body_regex=TOO_LONG_MATCH))


def test_long_matches_of_one_source_do_not_stop_the_searches_of_others(service: Deployment):
    assert any(_is_searched_beside_long_matches(service) for _ in range(TRIES))


def _is_searched_beside_long_matches(service: Deployment) -> bool:
    service.wait_until_serving()  # so that there is a searcher

    def search_long() -> None:
        with service.client("hostile") as client, suppress(PinLaterError):
            client.count(LONG, JobState.PENDING, body_regex=LONG_MATCH)

    searcher = _searcher(service)
    before = _seconds_used(searcher)
    with ThreadPoolExecutor(IMPATIENT) as threads, service.client() as client:
        searches = [threads.submit(search_long) for _ in range(IMPATIENT)]
        while not _has_used_more(searcher, before + 0.1):
            if all(search.done() for search in searches):
                return False
            time.sleep(0.01)
        try:
            counts = [client.count(QUEUE, JobState.PENDING, body_regex="marked") for _ in range(3)]
        except PinLaterError:
            return False
    assert counts == [JOBS // MARKED_EVERY] * 3
    return True
