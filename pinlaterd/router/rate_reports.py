"""The router's talk with the coordinator about rates: demand up, shares down.

While something is wanted of a limited queue it says how much, several times a second; else it only
confirms what it is granted. Without a coordinator it goes on with the shares that it has. A router
that starts takes over the shares of its dead predecessor of the same name, which the coordinator
keeps for it (see `coordinator/ledger.py`), and spends nothing of any other limited queue until
it is told. Relies on the control channel, and on asyncio for the time to report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from pinlaterd.router.limits import RateLimits
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ControlClient
from pinlaterd.wire.rates import Holding, RateReport, RouterId

_REPORT_SECONDS = 0.2


def shares_at_start(
    process: str,
    limited: Iterable[str],
    holdings: Sequence[Holding],
    is_running: Callable[[int], bool],
) -> Mapping[str, float]:
    """What a new `process` may spend before the coordinator has spoken, jobs/s by queue.

    `holdings`: what the coordinator has noted. `is_running`: whether there is a process of that
    pid: as long as there is, its shares are its own."""
    shares = dict.fromkeys(limited, 0.0)
    of_that_name = [holding for holding in holdings if holding.router.process == process]
    if of_that_name and not any(is_running(holding.router.pid) for holding in of_that_name):
        # Grants are numbered in their order, whatever the clock said when each process began.
        last = max(of_that_name, key=lambda holding: holding.number)
        shares |= last.shares
    return shares


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
        self._shown: frozenset[str] = frozenset()  # queues that have gauges
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def notice(self) -> None:
        """Something is wanted: report soon, and go on until nothing is."""
        if self._timer is None:
            self._timer = self._loop.call_later(_REPORT_SECONDS, self._tick)

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
        return heard

    def report(self, returned: Mapping[str, float] | None = None) -> bool:
        """Say what is held and wanted; whether anything is wanted."""
        demands = self._limits.demands()
        self._control.report_rates(
            RateReport(self._router, self._followed, self._limits.shares(), demands, returned or {})
        )
        return bool(demands)

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

    def _tick(self) -> None:
        self._timer = None
        if self.report():
            self.notice()
        self._on_reported()
