"""Tokens for dequeues: taken before a claim, returned after it, waited for in a line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import cast
from unittest.mock import Mock

import pytest

from pinlaterd.clock import Clock
from pinlaterd.router.rate_limits import LimitedQueue, RateLimits, RateReporter
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ControlClient, RateGrant, RouterId
from tests.clocks import FakeClock

QUEUE = "mail"
LONG_SECONDS = 30.0
ANSWER_SECONDS = 60.0


@pytest.fixture
def limits(clock: FakeClock) -> RateLimits:
    """Of 10 jobs/s; its bucket is full."""
    made = RateLimits(clock)
    made.follow({QUEUE: 10.0}, {})
    clock.advance(1)
    return made


@pytest.fixture
def queue(limits: RateLimits) -> LimitedQueue:
    return limits.queues[QUEUE]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(ANSWER_SECONDS):
            await scenario()

    asyncio.run(whole())


async def turns() -> None:
    """Let everybody do what he can without waiting for the time."""
    for _ in range(5):
        await asyncio.sleep(0)


def in_line(queue: LimitedQueue, wanted: int) -> asyncio.Future[int]:
    return asyncio.ensure_future(queue.wait(wanted, LONG_SECONDS))


def test_thousands_may_leave_the_line_from_its_end(limits, queue):
    async def scenario() -> None:
        queue.take(10)
        waiting = [in_line(queue, 1) for _ in range(10_000)]
        await turns()
        before = time.process_time()
        for waiter in reversed(waiting):
            waiter.cancel()
        await turns()
        assert all(waiter.cancelled() for waiter in waiting)
        assert time.process_time() - before < 2  # searching the line for each takes several
        assert limits.demands() == {}

    run(scenario)


def test_calls_at_the_same_time_never_get_more_together_and_pay_for_what_they_got(queue):
    taken = [queue.take(4) for _ in range(5)]
    assert taken == [4, 4, 2, 0, 0]

    for tokens in taken[:3]:
        queue.settle(wanted=4, taken=tokens, used=1)

    assert queue.take(100) == 7


def test_another_share_keeps_the_tokens_that_fit(limits, queue):
    assert limits.follow({QUEUE: 4.0}, {}) == {QUEUE: 6.0}
    assert limits.follow({QUEUE: 20.0}, {QUEUE: 5.0}) == {}
    assert queue.take(100) == 9

    limits.follow({}, {})
    assert limits.shares() == {}


def test_demand_is_what_was_taken_and_what_was_refused(limits, queue, clock):
    async def scenario() -> None:
        queue.settle(wanted=10, taken=queue.take(10), used=10)
        assert await queue.wait(30, 0) == 0
        assert limits.demands()[QUEUE] == pytest.approx(40, rel=0.3)

        waiting = in_line(queue, 500)
        await turns()
        clock.advance(60)
        assert limits.demands()[QUEUE] == pytest.approx(500)
        waiting.cancel()

    run(scenario)


def test_while_the_bucket_is_full_demand_is_what_is_taken(limits, queue, clock):
    clock.advance(0.1)
    queue.settle(wanted=100, taken=queue.take(2), used=2)
    assert limits.demands()[QUEUE] == pytest.approx(100, rel=0.3)

    clock.advance(0.2)
    assert limits.demands()[QUEUE] == pytest.approx(2, rel=0.3)


def test_tokens_that_a_wanted_queue_can_not_hold_are_for_others(limits, queue, clock):
    clock.advance(3600)
    assert limits.take_spilled({}) == {}  # nobody wanted it
    clock.advance(3600)
    queue.settle(wanted=10, taken=queue.take(10), used=10)
    assert limits.take_spilled(limits.demands()) == {}

    clock.advance(1.2)
    assert limits.take_spilled({}) == {QUEUE: pytest.approx(2.0)}
    clock.advance(1.2)
    assert limits.take_spilled({}) == {}


def test_jobs_that_there_are_not_are_no_demand(limits, queue):
    queue.settle(wanted=1000, taken=queue.take(1000), used=0)

    assert limits.demands() == {}


def test_waiting_is_first_come_first_served_and_nobody_overtakes(limits, queue, clock):
    async def scenario() -> None:
        queue.settle(wanted=10, taken=queue.take(10), used=10)
        waiting = [in_line(queue, wanted) for wanted in (2, 3, 100)]
        await turns()
        clock.advance(0.5)
        assert queue.take(1) == 0  # five are there, but others came first
        limits.follow({QUEUE: 10.0}, {})
        await turns()

        assert [waiter.done() for waiter in waiting] == [True, True, False]
        assert [await waiter for waiter in waiting[:2]] == [2, 3]
        clock.advance(0.3)
        limits.follow({QUEUE: 10.0}, {})
        assert await waiting[2] == 3

    run(scenario)


def test_what_is_returned_goes_to_those_in_line(queue):
    async def scenario() -> None:
        taken = queue.take(100)
        waiting = in_line(queue, 4)
        await turns()
        assert not waiting.done()

        queue.settle(wanted=100, taken=taken, used=1)

        assert await waiting == 4
        assert queue.take(100) == 5

    run(scenario)


def test_one_who_does_not_wait_is_refused_only_when_nobody_may_return_tokens(queue):
    async def scenario() -> None:
        taken = queue.take(100)
        asking, refused = [asyncio.ensure_future(queue.wait(5, 0)) for _ in range(2)]
        await turns()
        queue.settle(wanted=100, taken=taken, used=9)
        assert await asking == 1
        assert not refused.done()  # the one before may still return its token

        queue.settle(wanted=5, taken=1, used=1)
        assert await refused == 0

    run(scenario)


def test_one_cancelled_as_it_gets_its_tokens_returns_them(limits, queue, clock):
    async def scenario() -> None:
        queue.settle(wanted=10, taken=queue.take(10), used=10)
        waiting, next_one = in_line(queue, 5), in_line(queue, 2)
        await turns()
        clock.advance(0.5)
        limits.follow({QUEUE: 10.0}, {})
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

        assert await next_one == 2
        assert queue.take(100) == 3

    run(scenario)


def test_a_pause_holds_up_and_a_limit_that_goes_lets_all_through(limits, queue, clock):
    async def scenario() -> None:
        limits.follow({QUEUE: 0.0}, {})
        waiting = in_line(queue, 5)
        await turns()
        clock.advance(1000)
        limits.follow({QUEUE: 0.0}, {})
        await turns()
        assert not waiting.done()

        limits.follow({}, {})

        assert await waiting == 5

    run(scenario)


def test_when_the_server_stops_nobody_waits(limits, queue):
    async def scenario() -> None:
        queue.take(10)
        waiting = in_line(queue, 5)
        await turns()

        limits.stop_waiting()

        assert await waiting == 0

    run(scenario)


def test_those_in_line_are_woken_when_their_token_is_there_or_their_time_is_over():
    limits = RateLimits(Clock())
    answered: list[float] = []

    async def wait(queue: LimitedQueue) -> None:
        assert await queue.wait(1, LONG_SECONDS) == 1
        answered.append(time.monotonic())
        queue.settle(wanted=1, taken=1, used=1)

    async def scenario() -> None:
        started = time.monotonic()
        limits.follow({QUEUE: 20.0, "slow": 0.001}, {})
        await asyncio.gather(*(wait(limits.queues[QUEUE]) for _ in range(10)))

        # one after the other, each no sooner than its token
        for number, at in enumerate(answered, 1):
            assert at - started >= number / 20 - 0.001
        assert await limits.queues["slow"].wait(1, 0.05) == 0

    run(scenario)


def test_a_grant_that_comes_late_raises_nothing(limits):
    """As of a coordinator that was killed, after its successor's cut."""
    cut, late = RateGrant(8, {QUEUE: 4.0}, {}), RateGrant(7, {QUEUE: 10.0}, {})
    control = cast("ControlClient", Mock(take_grants=Mock(side_effect=[[cut], [late]])))
    reporter = RateReporter(RouterId("router", 1, 0), limits, control, Stats(), lambda: None)

    async def scenario() -> None:
        assert reporter.hear()
        assert not reporter.hear()
        reporter.stop()

    run(scenario)

    assert limits.shares() == {QUEUE: 4.0}
