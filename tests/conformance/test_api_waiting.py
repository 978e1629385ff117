"""SPEC sections 2 and 3: dequeues that wait, and claims that nobody can be given.

Answers that come too late: test_api_shard_down.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.conformance.api import (
    KIB,
    MAX_DEQUEUE_WAIT_MS,
    PENDING,
    Claimed,
    Client,
    Deployment,
    Interface,
    Wire,
    claimed,
    one_engine,
)
from tests.conftest import WaitUntil
from tests.deployment import frozen

pytestmark = pytest.mark.service

LONG_MS = 600_000
RELEASED_SECONDS = 5.0
TRIES = 3  # on a busy machine


class Waiter:
    """A dequeue on a connection of its own that has been sent, and not been answered yet."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def result(self) -> dict[str, Claimed]:
        return claimed(self.wire.receive().value)


@pytest.fixture
def waiter(service: Deployment, api: Interface, client: Client) -> Iterator[Callable[..., Waiter]]:
    """Starts a dequeue that finds nothing, and waits."""
    with ExitStack() as connections:

        def wait(queue: str, *, finds_nothing: bool = True) -> Waiter:
            wire = connections.enter_context(service.wire())
            request = client.dequeue_request(queue, 1, maxWaitMillis=LONG_MS)
            wire.send(api.message("dequeueJobs", request))
            assert not finds_nothing or wire.silent()
            return Waiter(wire)

        yield wait


def test_woken_by_an_enqueue(client: Client, queue, waiter):
    for _ in range(3):
        waiting = waiter(queue)

        descriptors = client.enqueue(queue, b"job")

        assert waiting.result().keys() == set(descriptors)


@one_engine
def test_one_job_wakes_one_waiter(client: Client, queue, waiter):
    waiting = [waiter(queue) for _ in range(4)]

    descriptors = [client.enqueue(queue, b"job")[0] for _ in range(4)]

    results = [list(one.result()) for one in waiting]
    assert sorted(results) == sorted([descriptor] for descriptor in descriptors)


def test_woken_by_a_job_becoming_due(client: Client, queue, waiter):
    waiting = waiter(queue)
    due_ms = int(time.time() * 1000) + 500

    descriptors = client.enqueue(queue, client.job(b"job", runAfterTimestampMillis=due_ms))

    assert waiting.result().keys() == set(descriptors)
    assert time.time() * 1000 >= due_ms


def test_woken_by_a_timed_out_claim(client: Client, waiter):
    queue = "claims_awaited"
    client.create(queue)
    (descriptor,) = client.enqueue(queue, b"job")
    client.dequeue(queue)

    waiting = waiter(queue, finds_nothing=False)  # on a busy machine the claim may have ended

    assert waiting.result()[descriptor].remaining == 1


def fail(client: Client, queue: str, descriptor: str) -> None:
    client.ack(queue, failed=[descriptor])


def send_back(client: Client, queue: str, descriptor: str) -> None:
    client.checkpoint(queue, client.checkpoint_of(descriptor, moveToPending=True))


def fail_for_good_and_retry(client: Client, queue: str, descriptor: str) -> None:
    client.checkpoint(queue, client.checkpoint_of(descriptor, numOfAttemptsAllowed=1))
    client.ack(queue, failed=[descriptor])
    assert client.retry_failed(queue) == 1


@pytest.mark.parametrize(
    ("wake", "remaining"), [(fail, 1), (send_back, 2), (fail_for_good_and_retry, 1)]
)
def test_woken_by_a_job_that_is_pending_again(client: Client, queue, waiter, wake, remaining):
    (descriptor,) = client.enqueue(queue, b"job")
    client.dequeue(queue)
    waiting = waiter(queue)

    wake(client, queue, descriptor)

    assert waiting.result()[descriptor].remaining == remaining


@one_engine
@pytest.mark.parametrize("max_wait_ms", [300, LONG_MS])
def test_answers_empty_when_the_wait_is_over(client: Client, queue, max_wait_ms):
    started = time.monotonic()

    taken = client.dequeue(queue, maxWaitMillis=max_wait_ms)

    waited_ms = (time.monotonic() - started) * 1000
    assert taken == {}
    assert waited_ms >= 0.98 * min(max_wait_ms, MAX_DEQUEUE_WAIT_MS)
    assert waited_ms < LONG_MS / 20


@one_engine
def test_ready_job_does_not_wait(client: Client, queue):
    def is_quick() -> bool:
        client.enqueue(queue, b"job")
        started = time.monotonic()
        assert len(client.dequeue(queue, 10, maxWaitMillis=LONG_MS)) == 1
        return (time.monotonic() - started) * 1000 < MAX_DEQUEUE_WAIT_MS

    assert any(is_quick() for _ in range(TRIES))


def test_acks_of_a_waiting_dequeue_are_not_held_up(
    service: Deployment, api: Interface, client: Client, queue, wait_until: WaitUntil
):
    (descriptor,) = client.enqueue(queue, b"job")
    client.dequeue(queue)
    acks = client.ack_request(queue, succeeded=[descriptor])
    with service.wire() as wire:
        request = client.dequeue_request(queue, 1, jobAckRequest=acks, maxWaitMillis=LONG_MS)
        wire.send(api.message("dequeueJobs", request))

        wait_until(lambda: client.info(descriptor).jobState == 2)
        assert wire.silent(0)


@one_engine
def test_client_gone_while_it_waits(client: Client, queue, waiter):
    for _ in range(5):
        waiter(queue).wire.close()

    (descriptor,) = client.enqueue(queue, b"job")

    taken = client.dequeue(queue, maxWaitMillis=LONG_MS)
    assert taken[descriptor].remaining == 2


def test_client_gone_with_its_dequeue_in_hand(
    service: Deployment, api: Interface, client: Client, queue, wait_until: WaitUntil
):
    by_shard = client.enqueue_on_every_shard(queue, each=5)
    descriptors = [d for on_shard in by_shard.values() for d in on_shard]
    message = api.message("dequeueJobs", client.dequeue_request(queue, 3))
    pids = service.pids()
    with ExitStack() as shards:
        # No answer reaches the client's machine before the client has gone.
        for shard in by_shard:
            shards.enter_context(frozen(pids[f"shard-{shard}"]))
        for _ in range(20):
            with service.wire() as wire:
                wire.send(message)

    def untouched() -> bool:
        return all(
            (info.attemptsAllowed, info.attemptsRemaining, info.claimDescriptor) == (2, 2, None)
            for info in client.lookup(*descriptors).values()
        )

    # The other router may ask before the dequeues have got from this one to the shards.
    wait_until(lambda: client.count(queue, PENDING) == len(descriptors) and untouched())


def test_client_gone_with_its_answer_half_read(
    service: Deployment, api: Interface, client: Client, queue, wait_until: WaitUntil
):
    descriptors = client.enqueue(queue, *[bytes(25 * KIB)] * 40)
    seconds: list[float] = []
    while len(seconds) < TRIES and min(seconds, default=math.inf) > RELEASED_SECONDS:
        with service.wire() as wire:
            wire.send(api.message("dequeueJobs", client.dequeue_request(queue, 40)))
            wire.read_bytes(KIB)
        gone_at = time.monotonic()
        wait_until(lambda: client.count(queue, PENDING) == len(descriptors))
        seconds.append(time.monotonic() - gone_at)

    assert min(seconds) < RELEASED_SECONDS
    for info in client.lookup(*descriptors).values():
        assert (info.attemptsRemaining, info.claimDescriptor) == (2, None)
