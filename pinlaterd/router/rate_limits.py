"""The jobs that a dequeue may take: the router's share of each queue's rate, spent job by job.

The coordinator divides rates over the routers (`coordinator/allocator.py`); here each share fills a
bucket, from which dequeues take before they claim, and into which they return what they did not
use. Those that may wait for a token stand in a line, first come, first served: a token is given to
the first of them at the moment that it is there, and nobody overtakes.

While something is wanted of a limited queue, the coordinator is told how much, several times a
second; else the router only confirms what it is granted. Without a coordinator it goes on with the
shares that it has. A router that starts takes over the shares of its dead predecessor of the same
name, which the coordinator keeps for it, and spends nothing of any other limited queue until it
is told.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pinlaterd.clock import Clock
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ControlClient, Holding, RateReport, RouterId

# How long a dequeue that does not wait stands in line all the same, while other calls hold
# tokens that they may return.
_LOAN_SECONDS = 0.1
_SHORTEST_TIMER_SECONDS = 0.001
_REPORT_SECONDS = 0.2
# Far below a token; makes up for what floating point loses around a whole one.
_EPSILON = 1e-9
_MARGIN_SECONDS = 0.5
_SLOT_SECONDS = 0.2
_SLOTS = 5


class TokenBucket:
    """Fills by `rate` tokens a second, holds one second's worth, but at least one token. Pure: the
    time (monotonic seconds) is passed in.

    It starts empty. At rate 0 it holds nothing. On top of one token it always keeps what half a
    second brings, which is less than another one: a slow bucket that held one and no more would
    lose whatever comes between the moment that it is full and the next call."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self.spilled = 0.0  # tokens that did not fit in
        self._tokens = 0.0
        self._at = now

    @property
    def capacity(self) -> float:
        return max(1.0 + _MARGIN_SECONDS * self.rate, self.rate) if self.rate > 0 else 0.0

    def tokens(self, now: float) -> float:
        self._tokens += self.rate * (now - self._at)
        self._at = now
        if self._tokens > self.capacity:
            self.spilled += self._tokens - self.capacity
            self._tokens = self.capacity
        return self._tokens

    def is_full(self, now: float) -> bool:
        return self.tokens(now) >= self.capacity > 0

    def take(self, wanted: int, now: float) -> int:
        """Take up to `wanted` whole tokens."""
        taken = max(0, min(wanted, math.floor(self.tokens(now) + _EPSILON)))
        self._tokens -= taken
        return taken

    def put(self, tokens: float, now: float) -> None:
        """Put tokens into the bucket, spilling those that overflow it."""
        self._tokens += tokens
        self.tokens(now)

    def set_rate(self, rate: float, now: float) -> float:
        """Fill by `rate` from now on. Returns the tokens that the bucket can't hold any more."""
        before = self.tokens(now)
        self.rate = rate
        self._tokens = min(before, self.capacity)
        return before - self._tokens

    def seconds_to_token(self, now: float) -> float:
        """Return the seconds until a whole token is there; infinity if none will come."""
        missing = 1.0 - self.tokens(now) - _EPSILON
        if missing <= 0:
            return 0.0
        return missing / self.rate if self.rate > 0 else math.inf


class DemandMeter:
    """Jobs wanted within the last second or so."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, int]] = deque()  # (number of the slot, jobs in it)

    def add(self, jobs: int, now: float) -> None:
        number = int(now / _SLOT_SECONDS)
        slots = self._slots
        if slots and slots[-1][0] == number:
            slots[-1] = (number, slots[-1][1] + jobs)
        else:
            slots.append((number, jobs))

    def per_second(self, now: float) -> float:
        if not self._slots:  # as in most of thousands of queues, which are looked at all the time
            return 0.0
        first = int(now / _SLOT_SECONDS) - _SLOTS + 1
        while self._slots and self._slots[0][0] < first:
            self._slots.popleft()
        return sum(jobs for _, jobs in self._slots) / (now - first * _SLOT_SECONDS)


_Granted = asyncio.Future[int]


class _Waiter(NamedTuple):
    wanted: int
    patient: bool  # False: goes once nobody holds tokens that might come back


class LimitedQueue:
    """One queue's bucket, and the line of dequeues before it. A dequeue pays only for the jobs that
    it gets. All methods are called on the event loop."""

    def __init__(self, share: float, clock: Clock) -> None:
        self._clock = clock
        self._bucket = TokenBucket(share, clock.monotonic())
        self._meter = DemandMeter()
        self._used = DemandMeter()
        # The first to come first. Thousands may end at once: a deque would be searched for each.
        self._line: OrderedDict[_Granted, _Waiter] = OrderedDict()
        self._lent = 0  # tokens taken by calls that have not settled
        self._timer: asyncio.TimerHandle | None = None

    @property
    def share(self) -> float:
        return self._bucket.rate

    def demand(self) -> float:
        """Return the jobs/s that clients took, or would have if they had been let."""
        now = self._clock.monotonic()
        demand = self._meter.per_second(now)
        if self._line:
            return demand + sum(waiter.wanted for waiter in self._line.values())
        if demand and self._bucket.is_full(now):  # so they have got all that they want by now
            return min(demand, self._used.per_second(now))
        return demand

    def take_spilled(self) -> float:
        """Take the tokens that did not fit into the bucket."""
        self._bucket.tokens(self._clock.monotonic())
        spilled, self._bucket.spilled = self._bucket.spilled, 0.0
        return spilled

    # --- for dequeues --------------------------------------------------------------------------

    def take(self, wanted: int) -> int:
        """Take up to `wanted` tokens, to be settled; 0: none is to be had at once."""
        return 0 if self._line else self._lend(wanted)  # those in line come first

    def settle(self, *, wanted: int, taken: int, used: int) -> None:
        """Settle a call that wanted `wanted` jobs: of the `taken` tokens, `used` were spent."""
        now = self._clock.monotonic()
        self._lent -= taken
        if taken > used:
            self._bucket.put(taken - used, now)
        self._meter.add(wanted if used == taken else used, now)
        self._used.add(used, now)
        self._serve()
        if not self._lent:
            for granted in [g for g, waiter in self._line.items() if not waiter.patient]:
                del self._line[granted]
                _give(granted, 0)

    async def wait(self, wanted: int, seconds: float) -> int:
        """Take tokens, but wait up to `seconds` for a first one; 0 means rate limited."""
        taken = self.take(wanted)
        if not taken and (seconds > 0 or self._lent):
            taken = await self._stand_in_line(wanted, seconds)
        if not taken:
            self._meter.add(wanted, self._clock.monotonic())
        return taken

    async def _stand_in_line(self, wanted: int, seconds: float) -> int:
        loop = asyncio.get_running_loop()
        granted: _Granted = loop.create_future()
        self._line[granted] = _Waiter(wanted, patient=seconds > 0)
        self._serve()
        expiry = loop.call_later(seconds if seconds > 0 else _LOAN_SECONDS, _give, granted, 0)
        try:
            return await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                # the caller ends just as it gets what it will not use
                self.settle(wanted=0, taken=granted.result(), used=0)
            raise
        finally:
            expiry.cancel()
            self._line.pop(granted, None)

    # --- for the coordinator's grants ----------------------------------------------------------

    def follow(self, share: float, credit: float) -> float:
        """Fill by `share` from now on, with `credit` more tokens at once. Returns the tokens that a
        smaller bucket can't hold any more."""
        now = self._clock.monotonic()
        surplus = self._bucket.set_rate(share, now)
        self._bucket.put(credit, now)
        self._serve()
        return surplus

    def open(self) -> None:
        """Let all go on: the queue has no limit any more."""
        for granted, waiter in self._line.items():
            _give(granted, waiter.wanted)

    def close(self) -> None:
        """Refuse all: nobody gets anything any more."""
        for granted in self._line:
            _give(granted, 0)

    def _lend(self, wanted: int) -> int:
        taken = self._bucket.take(wanted, self._clock.monotonic())
        self._lent += taken
        return taken

    def _serve(self) -> None:
        """Give what there is to those in line, and come back when there is more."""
        line = self._line
        while line:
            granted, waiter = next(iter(line.items()))
            if not granted.done():
                taken = self._lend(waiter.wanted)
                if not taken:
                    break
                granted.set_result(taken)
            del line[granted]
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._line:
            return
        seconds = self._bucket.seconds_to_token(self._clock.monotonic())
        if seconds < math.inf:
            delay = max(seconds, _SHORTEST_TIMER_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(delay, self._serve)


def _give(granted: _Granted, tokens: int) -> None:
    if not granted.done():
        granted.set_result(tokens)


class RateLimits:
    """The limited queues, and what the coordinator grants them."""

    def __init__(self, clock: Clock) -> None:
        self.queues: dict[str, LimitedQueue] = {}
        self._clock = clock
        self._wanted: frozenset[str] = frozenset()  # as of the last report

    def follow(
        self, shares: Mapping[str, float], credits_: Mapping[str, float]
    ) -> dict[str, float]:
        """Spend by these shares (jobs/s) from now on; queues that have none are not limited.

        `credits_`: tokens to have at once. Returns those that smaller buckets can't hold."""
        for queue in self.queues.keys() - shares.keys():
            self.queues.pop(queue).open()
        returned: dict[str, float] = {}
        for queue, share in shares.items():
            if queue not in self.queues:
                self.queues[queue] = LimitedQueue(share, self._clock)
            surplus = self.queues[queue].follow(share, credits_.get(queue, 0.0))
            if surplus > 0:
                returned[queue] = surplus
        return returned

    def shares(self) -> dict[str, float]:
        """Return the jobs/s that may be spent, by limited queue."""
        return {queue: limited.share for queue, limited in self.queues.items()}

    def demands(self) -> dict[str, float]:
        """Return the jobs/s, above 0, that clients take or would take, by limited queue."""
        demands = {queue: limited.demand() for queue, limited in self.queues.items()}
        return {queue: demand for queue, demand in demands.items() if demand > 0}

    def take_spilled(self, demands: Mapping[str, float]) -> dict[str, float]:
        """Take the tokens that buckets could not hold, of queues that were wanted then. They go to
        other routers, where the demand may have moved. `demands`: those of now."""
        spilled: dict[str, float] = {}
        for queue in (demands.keys() | self._wanted) & self.queues.keys():
            tokens = self.queues[queue].take_spilled()
            if tokens and queue in self._wanted:
                spilled[queue] = tokens
        self._wanted = frozenset(demands)
        return spilled

    def stop_waiting(self) -> None:
        """End all waiting: calls in line get no tokens."""
        for limited in self.queues.values():
            limited.close()


class RateReporter:
    """Reports what is wanted, and has `limits` follow what is granted."""

    def __init__(
        self,
        router: RouterId,
        limits: RateLimits,
        control: ControlClient,
        stats: Stats,
        on_reported: Callable[[], None],
    ) -> None:
        """`on_reported` is called after reports of our own accord: see ControlClient."""
        self._on_reported = on_reported
        self._router = router
        self._limits = limits
        self._control = control
        self._stats = stats
        self._followed = 0  # number of the last grant
        self._wanted = False  # whether the last report named a demand
        self._shown: frozenset[str] = frozenset()  # queues that have gauges
        self._timer: asyncio.TimerHandle | None = None

    def hear(self) -> bool:
        """Follow the grants that have come, and confirm them; whether there were any."""
        returned: dict[str, float] = {}
        heard = False
        for grant in self._control.take_grants():
            if grant.number <= self._followed:
                continue  # of a coordinator that has been succeeded
            self._followed = grant.number
            heard = True
            for queue, tokens in self._limits.follow(grant.shares, grant.credits).items():
                returned[queue] = returned.get(queue, 0.0) + tokens
        if heard:
            self.report(returned)
            self.watch()
        return heard

    def report(self, returned: Mapping[str, float] | None = None) -> None:
        """Say what is held and wanted."""
        demands = self._limits.demands()
        self._wanted = bool(demands)
        spilled = self._limits.take_spilled(demands)
        for queue, tokens in (returned or {}).items():
            spilled[queue] = spilled.get(queue, 0.0) + tokens
        self._control.tell(
            RateReport(self._router, self._followed, self._limits.shares(), demands, spilled)
        )

    def watch(self) -> None:
        """Report several times a second what is wanted of limited queues, while there are any; and
        once that nothing is any more."""
        if self._timer is None and self._limits.queues:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_REPORT_SECONDS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._wanted or self._limits.demands():
            self.report()
            self._on_reported()
        self.watch()

    def show(self) -> None:
        """Put the shares into the statistics."""
        shares = self._limits.shares()
        demands = self._limits.demands()
        for queue in self._shown - shares.keys():
            self._stats.drop_gauge(f"{queue}_rate_share")
            self._stats.drop_gauge(f"{queue}_rate_demand")
        for queue, share in shares.items():
            self._stats.gauge(f"{queue}_rate_share", share)
            self._stats.gauge(f"{queue}_rate_demand", round(demands.get(queue, 0.0), 3))
        self._shown = frozenset(shares)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def shares_at_start(
    process: str,
    limited: Iterable[str],
    holdings: Sequence[Holding],
    is_running: Callable[[int], bool],
) -> Mapping[str, float]:
    """Return the jobs/s by queue that a new `process` may spend until it gets a grant.

    `holdings`: what the coordinator has noted. `is_running`: whether there is a process of that
    pid: as long as there is, its shares are its own."""
    shares = dict.fromkeys(limited, 0.0)
    of_that_name = [holding for holding in holdings if holding.router.process == process]
    if of_that_name and not any(is_running(holding.router.pid) for holding in of_that_name):
        # Grants are numbered in their order, whatever the clock said when each process began.
        last = max(of_that_name, key=lambda holding: holding.number)
        shares |= last.shares
    return shares
