"""One client, one shard or the router itself hangs: what that costs all others."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from pinlaterd.client import Client, ConnectionFailed, Job, PinLaterError
from pinlaterd.model import CallContext, DequeueRequest, Method, QueueNamesRequest
from pinlaterd.rpc import codec
from tests.conftest import WaitUntil
from tests.deployment import Deployment, frozen
from tests.faults.load import shards_of
from tests.hostile.wire import RawConnection
from tests.rpc.thrift_bytes import framed
from tests.shared_service import queue, running_service

__all__ = ["queue"]

pytestmark = pytest.mark.service

# The calls of this module's service may take 30 s, so that a wait for a deadline shows.
FROZEN_SECONDS = 10.0
USUAL_SECONDS = 2.0
PAUSE_SECONDS = 4.0
# Beyond what a busy machine has without the frozen shard.
LONGEST_GAP_SECONDS = 1.5
TRIES = 3  # a busy machine holds up one of them, the frozen shard would hold up all
JOB_EVERY_MS = 10
ENQUEUES = 40
LEAD_SECONDS = 2.0
POLLERS = 21
SMALL_CALLS = 20
POLLS_A_CONNECTION = 1000
WAITING_A_CONNECTION = 100  # max_waiting_per_connection
WORKERS = 6


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Not the shared one: parts of it hang, and its figures have to be those of these tests."""
    with running_service(tmp_path_factory.mktemp("service")) as deployment:
        yield deployment


@contextmanager
def in_threads(count: int, body: Callable[[threading.Event], None]) -> Iterator[None]:
    """`body` runs in so many threads until the block ends; an error in any of them is raised."""
    stop = threading.Event()
    with ThreadPoolExecutor(count) as threads:
        running = [threads.submit(body, stop) for _ in range(count)]
        try:
            yield
        finally:
            stop.set()
        for thread in running:
            thread.result()


def wait_until_time(moment: float) -> None:
    """Monotonic seconds."""
    threading.Event().wait(max(0.0, moment - time.monotonic()))


def longest_gap(moments: list[float], begin: float, end: float) -> float:
    within = [begin, *sorted(moment for moment in moments if begin < moment < end), end]
    return max(later - earlier for earlier, later in itertools.pairwise(within))


def test_a_frozen_shard_holds_up_no_long_poll(
    service: Deployment, client: Client, queue: str, wait_until
):
    """Jobs become due all the time, on both shards: each dequeue asks both."""
    gaps = (_gap_while_frozen(service, client, queue, wait_until) for _ in range(TRIES))

    assert any(gap < LONGEST_GAP_SECONDS for gap in gaps), service.log_tails(20)


def _gap_while_frozen(
    service: Deployment, client: Client, queue: str, wait_until: WaitUntil
) -> float:
    handed_out: list[float] = []

    def work(stop: threading.Event) -> None:
        with service.client(timeout_seconds=60.0) as worker:
            while not stop.is_set():
                jobs = worker.dequeue(queue, limit=10, max_wait_ms=2_000)
                if "1" in shards_of([job.descriptor for job in jobs]):
                    handed_out.append(time.monotonic())

    first_ms = int((time.time() + LEAD_SECONDS) * 1000)
    seconds = USUAL_SECONDS + FROZEN_SECONDS + 5
    due_ms = range(first_ms, first_ms + int(seconds) * 1000, JOB_EVERY_MS)
    for first in range(ENQUEUES):
        client.enqueue(queue, [Job(b"x", run_after_ms=ms) for ms in due_ms[first::ENQUEUES]])
    with in_threads(WORKERS, work):
        wait_until(lambda: handed_out)
        began = time.monotonic()
        wait_until_time(began + USUAL_SECONDS)
        usual_gap = longest_gap(handed_out, began, time.monotonic())
        with frozen(service.pid_of("shard-2")):
            frozen_at = time.monotonic()
            wait_until_time(frozen_at + FROZEN_SECONDS)
            gap = longest_gap(handed_out, frozen_at, time.monotonic())
    service.wait_until_serving()
    return gap - usual_gap


def test_the_routers_own_pause_fails_no_call(
    service: Deployment, client: Client, queue: str, wait_until
):
    calls = itertools.count()
    errors: list[Exception] = []

    def call(stop: threading.Event) -> None:
        with service.client(timeout_seconds=60.0) as caller:
            while not stop.is_set():
                try:
                    caller.enqueue(queue, [b"x"])
                    jobs = caller.dequeue(queue, limit=1)
                    caller.ack(queue, succeeded=jobs)
                    caller.queue_names()
                except (PinLaterError, ConnectionFailed) as error:
                    errors.append(error)
                next(calls)

    def progressed(since: int) -> bool:
        return next(calls) > since + 100

    with in_threads(WORKERS, call):
        wait_until(lambda: progressed(0))
        with frozen(service.pid_of("router")):
            wait_until_time(time.monotonic() + PAUSE_SECONDS)
        resumed_at = next(calls)
        wait_until(lambda: progressed(resumed_at))

    assert errors == []


def test_long_polls_of_some_refuse_nobody_elses_calls(
    service: Deployment, client: Client, queue: str, wait_until
):
    """More of them than a router may have calls in hand."""
    context = CallContext("poller")
    small = framed(codec.encode_call(Method.QUEUE_NAMES, 1, context, QueueNamesRequest()))
    poll = framed(
        codec.encode_call(Method.DEQUEUE, 1, context, DequeueRequest(queue, 1, max_wait_ms=30_000))
    )

    def waiting() -> float:
        found: float = service.stats()["gauges"].get("router_calls_waiting", 0)
        return found

    client.create_queue(other := f"{queue}_other")
    usual = _pair_p90(client, other)
    with ExitStack() as connections:
        for _ in range(POLLERS):
            poller = connections.enter_context(RawConnection(service.port))
            # Only of calls with small answers may a client have many in hand.
            poller.send(small * SMALL_CALLS)
            for _ in range(SMALL_CALLS):
                assert poller.receive_message()
            poller.send(poll * POLLS_A_CONNECTION)
        wait_until(lambda: waiting() == POLLERS * WAITING_A_CONNECTION)

        tries = (_pair_p90(client, other) for _ in range(TRIES))
        assert any(seconds < 2 * usual + 0.1 for seconds in tries)
    wait_until(lambda: waiting() == 0)


def _pair_p90(client: Client, queue: str) -> float:
    """Return the 90th percentile of enqueue and dequeue together, in seconds."""
    took: list[float] = []
    for _ in range(100):
        began = time.monotonic()
        client.enqueue(queue, [b"x"])
        while not client.dequeue(queue, limit=1):  # its shard was held up for a moment
            assert time.monotonic() < began + 60
        took.append(time.monotonic() - began)
    return sorted(took)[89]  # the rest is the busy machine's, too
