"""How many jobs a dequeue may take: the router's share of each queue's rate, spent job by job.

The coordinator divides rates over the routers (`coordinator/ledger.py`); here each share fills a
bucket, from which dequeues take before they claim, and into which they put back what they did not
get. Those that may wait for a token stand in a line, first come, first served: a token is given to
the first of them at the moment that it is there, and nobody overtakes. Relies on asyncio for that
alone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from pinlaterd.clock import Clock
from pinlaterd.router.bucket import DemandMeter, TokenBucket

# How long a dequeue that does not wait stands in line all the same, while other calls hold
# tokens that they may give back.
_LOAN_SECONDS = 0.1
_SHORTEST_TIMER_SECONDS = 0.001


class Limits(Protocol):
    """Tokens for dequeues, by queue. A dequeue pays only for the jobs that it gets."""

    def take(self, queue: str, wanted: int) -> int:
        """Up to `wanted` tokens, to be settled; 0: none is to be had at once."""
        ...

    async def wait(
        self, queue: str, wanted: int, seconds: float, has_gone: Callable[[], bool]
    ) -> int:
        """The same, but wait up to `seconds` for a first token; 0 means rate limited."""
        ...

    def settle(self, queue: str, *, wanted: int, taken: int, used: int) -> None:
        """Of the tokens `taken` for a call that wanted `wanted`, `used` were spent."""
        ...

    def stop_waiting(self) -> None:
        """Those who wait get nothing, and nobody waits any more."""
        ...


_Granted = asyncio.Future[int]


class _Waiter(NamedTuple):
    granted: _Granted
    wanted: int
    has_gone: Callable[[], bool]
    patient: bool  # False: goes once nobody holds tokens that might come back


class _LimitedQueue:
    """One queue's bucket, and the line before it."""

    def __init__(self, share: float, clock: Clock) -> None:
        now = clock.monotonic()
        self.bucket = TokenBucket(share, now)
        # The first to come first. Thousands may end at once: a deque would be searched for each.
        self.line: OrderedDict[_Granted, _Waiter] = OrderedDict()
        self.lent = 0  # tokens taken by calls that have not settled
        self._clock = clock
        self._meter = DemandMeter()
        self._timer: asyncio.TimerHandle | None = None

    def take(self, wanted: int) -> int:
        # who stands in line comes first
        return 0 if self.line else self._lend(wanted)

    def settle(self, wanted: int, taken: int, used: int) -> None:
        now = self._clock.monotonic()
        # tokens taken before the queue had a limit are nobody's
        unused = min(taken - used, self.lent)
        self.lent = max(0, self.lent - taken)
        if unused:
            self.bucket.give_back(unused, now)
        self._meter.add(wanted if used == taken else used, now)
        self.serve()
        if not self.lent:
            for waiter in [waiter for waiter in self.line.values() if not waiter.patient]:
                del self.line[waiter.granted]
                _give(waiter, 0)

    def refused(self, wanted: int) -> None:
        self._meter.add(wanted, self._clock.monotonic())

    def demand(self) -> float:
        """Jobs/s that clients took, or would have if they had been let."""
        unmet = sum(waiter.wanted for waiter in self.line.values())
        return self._meter.per_second(self._clock.monotonic()) + unmet

    def serve(self) -> None:
        """Give what there is to those in line, and come back when there is more."""
        line = self.line
        while line:
            first = next(iter(line.values()))
            useless = first.granted.done() or first.has_gone()
            taken = 0 if useless else self._lend(first.wanted)
            if not (useless or taken):
                break
            self._give_first(taken)
        self._set_timer()

    def open(self) -> None:
        """The queue has no limit any more."""
        self._cancel_timer()
        while self.line:
            self._give_first(next(iter(self.line.values())).wanted)

    def close(self) -> None:
        """Nobody gets anything any more."""
        self._cancel_timer()
        while self.line:
            self._give_first(0)

    def _give_first(self, tokens: int) -> None:
        _, waiter = self.line.popitem(last=False)
        _give(waiter, tokens)

    def _lend(self, wanted: int) -> int:
        taken = self.bucket.take(wanted, self._clock.monotonic())
        self.lent += taken
        return taken

    def _set_timer(self) -> None:
        self._cancel_timer()
        if not self.line:
            return
        seconds = self.bucket.seconds_to_token(self._clock.monotonic())
        if seconds < float("inf"):
            delay = max(seconds, _SHORTEST_TIMER_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(delay, self.serve)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class RateLimits:
    """The Limits that follow the coordinator's grants. All methods are called on the event loop."""

    def __init__(self, clock: Clock, on_demand: Callable[[], None]) -> None:
        """`on_demand` is called at each sign that something is wanted of a limited queue."""
        self._clock = clock
        self._on_demand = on_demand
        self._queues: dict[str, _LimitedQueue] = {}
        self._stopping = False

    def follow(
        self, shares: Mapping[str, float], credits_: Mapping[str, float]
    ) -> dict[str, float]:
        """Spend by these shares (jobs/s) from now on; queues that have none are not limited.

        `credits_`: tokens to have at once. Returns those that smaller buckets can't hold."""
        now = self._clock.monotonic()
        returned: dict[str, float] = {}
        for queue in [queue for queue in self._queues if queue not in shares]:
            self._queues.pop(queue).open()
        for queue, share in shares.items():
            limited = self._queues.get(queue)
            if limited is None:
                limited = self._queues[queue] = _LimitedQueue(share, self._clock)
            else:
                surplus = limited.bucket.set_rate(share, now)
                if surplus > 0:
                    returned[queue] = surplus
            if queue in credits_:
                limited.bucket.credit(credits_[queue], now)
            limited.serve()
        return returned

    def shares(self) -> dict[str, float]:
        """Jobs/s by limited queue."""
        return {queue: limited.bucket.rate for queue, limited in self._queues.items()}

    def demands(self) -> dict[str, float]:
        """Jobs/s that clients take or would take, by limited queue; those of none left out."""
        demands = {queue: limited.demand() for queue, limited in self._queues.items()}
        return {queue: demand for queue, demand in demands.items() if demand > 0}

    # --- Limits --------------------------------------------------------------------------------

    def take(self, queue: str, wanted: int) -> int:
        limited = self._queues.get(queue)
        return wanted if limited is None else limited.take(wanted)

    def settle(self, queue: str, *, wanted: int, taken: int, used: int) -> None:
        limited = self._queues.get(queue)
        if limited is not None and taken:
            limited.settle(wanted, taken, used)
            if used:
                self._on_demand()

    async def wait(
        self, queue: str, wanted: int, seconds: float, has_gone: Callable[[], bool]
    ) -> int:
        limited = self._queues.get(queue)
        if limited is None:
            return wanted
        taken = limited.take(wanted)
        patient = seconds > 0
        if not taken and not self._stopping and (patient or limited.lent):
            waiter = _Waiter(_future(), wanted, has_gone, patient)
            taken = await self._stand_in_line(limited, waiter, seconds)
        if not taken:
            limited.refused(wanted)
            self._on_demand()
        return taken

    def stop_waiting(self) -> None:
        self._stopping = True
        for limited in self._queues.values():
            limited.close()

    async def _stand_in_line(self, limited: _LimitedQueue, waiter: _Waiter, seconds: float) -> int:
        limited.line[waiter.granted] = waiter
        limited.serve()
        self._on_demand()
        patience = seconds if waiter.patient else _LOAN_SECONDS
        expiry = asyncio.get_running_loop().call_later(patience, _give, waiter, 0)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if not waiter.granted.cancelled():
                # the caller ends just as it gets what it will not use
                limited.settle(0, waiter.granted.result(), 0)
            raise
        finally:
            expiry.cancel()
            limited.line.pop(waiter.granted, None)


def _future() -> _Granted:
    return asyncio.get_running_loop().create_future()


def _give(waiter: _Waiter, tokens: int) -> None:
    if not waiter.granted.done():
        waiter.granted.set_result(tokens)
