"""Tokens for dequeues: taken before a claim, given back after it, waited for in a line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from pinlaterd.clock import FakeClock, SystemClock
from pinlaterd.router.rate_limits import RateLimits

QUEUE = "mail"
LONG_SECONDS = 30.0
ANSWER_SECONDS = 10.0


class Recorder:
    def __init__(self) -> None:
        self.signs = 0

    def __call__(self) -> None:
        self.signs += 1


@pytest.fixture
def demanded() -> Recorder:
    return Recorder()


@pytest.fixture
def limits(clock: FakeClock, demanded) -> RateLimits:
    made = RateLimits(clock, demanded)
    made.follow({QUEUE: 10.0}, {})
    return made


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_awaited(scenario), ANSWER_SECONDS))


async def _awaited(scenario: Callable[[], Awaitable[None]]) -> None:
    await scenario()


def stays() -> bool:
    return False


async def turns() -> None:
    """Let everybody do what he can without waiting for the time."""
    for _ in range(5):
        await asyncio.sleep(0)


def in_line(limits: RateLimits, wanted: int, has_gone: Callable[[], bool] = stays):
    return asyncio.ensure_future(limits.wait(QUEUE, wanted, LONG_SECONDS, has_gone))


def test_thousands_may_leave_the_line_from_its_end(limits):
    async def scenario() -> None:
        waiting = [in_line(limits, 1) for _ in range(10_000)]
        await turns()
        before = time.process_time()
        for waiter in reversed(waiting):
            waiter.cancel()
        await turns()
        assert all(waiter.cancelled() for waiter in waiting)
        assert time.process_time() - before < 2  # searching the line for each takes several

        assert limits.demands() == {}

    run(scenario)


def test_a_queue_without_limit_is_not_held_up(limits, demanded):
    assert limits.take("other", 1000) == 1000
    limits.settle("other", wanted=1000, taken=1000, used=1000)

    assert limits.demands() == {}
    assert demanded.signs == 0


def test_a_call_pays_for_what_it_got(limits, clock):
    clock.advance(1)

    assert limits.take(QUEUE, 8) == 8
    limits.settle(QUEUE, wanted=8, taken=8, used=3)

    assert limits.take(QUEUE, 100) == 7


def test_calls_at_the_same_time_never_get_more_together(limits, clock):
    clock.advance(1)
    taken = [limits.take(QUEUE, 4) for _ in range(5)]
    assert taken == [4, 4, 2, 0, 0]

    for tokens in taken:
        limits.settle(QUEUE, wanted=4, taken=tokens, used=0)

    assert limits.take(QUEUE, 100) == 10


def test_tokens_taken_before_there_was_a_limit_are_not_given_back(clock):
    limits = RateLimits(clock, lambda: None)
    taken = limits.take(QUEUE, 1000)
    limits.follow({QUEUE: 10.0}, {})

    limits.settle(QUEUE, wanted=1000, taken=taken, used=0)

    assert limits.take(QUEUE, 1) == 0


def test_another_share_keeps_the_tokens_that_fit(limits, clock):
    clock.advance(1)

    assert limits.follow({QUEUE: 4.0}, {}) == {QUEUE: 6.0}
    assert limits.follow({QUEUE: 20.0}, {QUEUE: 5.0}) == {}
    assert limits.take(QUEUE, 100) == 9

    limits.follow({}, {})
    assert limits.take(QUEUE, 100) == 100
    assert limits.shares() == {}


def test_demand_is_what_was_taken_and_what_was_refused(limits, clock):
    async def scenario() -> None:
        clock.advance(1)
        taken = limits.take(QUEUE, 10)
        limits.settle(QUEUE, wanted=10, taken=taken, used=10)
        assert await limits.wait(QUEUE, 30, 0, stays) == 0
        assert limits.demands()[QUEUE] == pytest.approx(40, rel=0.3)

        waiting = in_line(limits, 500)
        await turns()
        clock.advance(60)
        assert limits.demands()[QUEUE] == pytest.approx(500)
        waiting.cancel()

    run(scenario)


def test_jobs_that_there_are_not_are_no_demand(limits, clock, demanded):
    clock.advance(1)
    limits.settle(QUEUE, wanted=1000, taken=limits.take(QUEUE, 1000), used=0)

    assert limits.demands() == {}
    assert demanded.signs == 0


def test_waiting_is_first_come_first_served_and_nobody_overtakes(limits, clock):
    async def scenario() -> None:
        waiting = [in_line(limits, wanted) for wanted in (2, 3, 100)]
        await turns()
        clock.advance(0.5)
        assert limits.take(QUEUE, 1) == 0  # five are there, but others came first
        limits.follow({QUEUE: 10.0}, {})
        await turns()

        assert [waiter.done() for waiter in waiting] == [True, True, False]
        assert [await waiter for waiter in waiting[:2]] == [2, 3]
        clock.advance(0.3)
        limits.follow({QUEUE: 10.0}, {})
        assert await waiting[2] == 3

    run(scenario)


def test_what_is_given_back_goes_to_those_in_line(limits, clock):
    async def scenario() -> None:
        clock.advance(1)
        taken = limits.take(QUEUE, 100)
        waiting = in_line(limits, 4)
        await turns()
        assert not waiting.done()

        limits.settle(QUEUE, wanted=100, taken=taken, used=1)

        assert await waiting == 4
        assert limits.take(QUEUE, 100) == 5

    run(scenario)


def test_one_who_does_not_wait_is_refused_only_when_nobody_may_give_back(limits, clock):
    async def scenario() -> None:
        clock.advance(1)
        taken = limits.take(QUEUE, 100)
        asking = asyncio.ensure_future(limits.wait(QUEUE, 5, 0, stays))
        refused = asyncio.ensure_future(limits.wait(QUEUE, 5, 0, stays))
        await turns()
        limits.settle(QUEUE, wanted=100, taken=taken, used=9)
        assert await asking == 1
        assert not refused.done()  # the one before may still give back

        limits.settle(QUEUE, wanted=5, taken=1, used=1)
        assert await refused == 0

    run(scenario)


def test_who_has_gone_takes_nothing(limits, clock):
    async def scenario() -> None:
        gone = in_line(limits, 5, lambda: True)
        cancelled = in_line(limits, 5)
        waiting = in_line(limits, 5)
        await turns()
        cancelled.cancel()
        await turns()
        clock.advance(0.5)
        limits.follow({QUEUE: 10.0}, {})

        assert await gone == 0
        assert await waiting == 5

    run(scenario)


def test_one_cancelled_as_it_gets_its_tokens_gives_them_back(limits, clock):
    async def scenario() -> None:
        waiting = in_line(limits, 5)
        await turns()
        clock.advance(0.5)
        limits.follow({QUEUE: 10.0}, {})
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

        assert limits.take(QUEUE, 100) == 5

    run(scenario)


def test_a_pause_holds_up_and_a_limit_that_goes_lets_all_through(limits, clock):
    async def scenario() -> None:
        limits.follow({QUEUE: 0.0}, {})
        waiting = in_line(limits, 5)
        await turns()
        clock.advance(1000)
        limits.follow({QUEUE: 0.0}, {})
        await turns()
        assert not waiting.done()

        limits.follow({}, {})

        assert await waiting == 5

    run(scenario)


def test_when_the_server_stops_nobody_waits(limits):
    async def scenario() -> None:
        waiting = in_line(limits, 5)
        await turns()

        limits.stop_waiting()

        assert await waiting == 0
        assert await in_line(limits, 5) == 0

    run(scenario)


def test_those_in_line_are_woken_when_their_token_is_there():
    clock = SystemClock()
    limits = RateLimits(clock, lambda: None)
    answered: list[float] = []

    async def wait() -> None:
        assert await limits.wait(QUEUE, 1, LONG_SECONDS, stays) == 1
        answered.append(time.monotonic())
        limits.settle(QUEUE, wanted=1, taken=1, used=1)

    async def scenario() -> None:
        limits.follow({QUEUE: 20.0}, {})
        started = time.monotonic()
        await asyncio.gather(*(wait() for _ in range(10)))

        # one after the other, each no sooner than its token
        for number, at in enumerate(answered, 1):
            assert at - started >= number / 20 - 0.001

    run(scenario)


def test_the_wait_for_a_token_ends_in_time():
    limits = RateLimits(SystemClock(), lambda: None)

    async def scenario() -> None:
        limits.follow({QUEUE: 0.001}, {})
        assert await limits.wait(QUEUE, 1, 0.05, stays) == 0

    run(scenario)
