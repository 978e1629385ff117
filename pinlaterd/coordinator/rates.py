"""Rate limits in the coordinator's process: from what is configured and reported to what is sent.

    limits of queues.yaml, over the servers of the membership  ->  this server's part
    this server's part, over its routers by the ledger         ->  grants

It has no timer: routers report or heartbeat at least once a second, and each time is a time to
look at the server set and to reckon.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pinlaterd.clock import Clock
from pinlaterd.config.schema import Config, QueueSettings, ServerSettings
from pinlaterd.coordinator.ledger import Ledger
from pinlaterd.coordinator.membership import Alone, Membership, ServerSetFile
from pinlaterd.coordinator.shares import server_share
from pinlaterd.coordinator.status import router_programs
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ControlServer
from pinlaterd.wire.rates import read_holdings, unpack_rate_report, write_holdings

log = logging.getLogger(__name__)


class RateControl:
    """What the coordinator does about rates."""

    def __init__(
        self, config: Config, clock: Clock, stats: Stats, is_running: Callable[[int], bool]
    ) -> None:
        self._stats = stats
        self._membership = membership_of(config.server, clock)
        self._queues = config.queues
        self._ledger = Ledger(
            clock, is_running, read_holdings(), router_programs(config.server.routers)
        )
        self._limited: frozenset[str] = frozenset()  # those that have gauges
        self._set_limits()

    def configure(self, queues: Mapping[str, QueueSettings]) -> None:
        """The queues' settings were replaced."""
        self._queues = queues
        self._set_limits()

    def heard(self, peer: bytes, message: bytes) -> None:
        """Take a rate report. Raises MalformedEnvelope if it can't be read."""
        self._ledger.heard(peer, unpack_rate_report(message))

    def heartbeat(self, peer: bytes) -> None:
        """Something else was heard from `peer`."""
        self._ledger.heartbeat(peer)

    def act(self, control: ControlServer) -> bool:
        """Send what follows from all that was heard; whether there was anything."""
        if self._membership.look():
            self._set_limits()
        self._stats.gauge("server_set_problems", len(self._membership.problems()))
        grants = self._ledger.reckon()
        if self._ledger.note_due:
            # before anybody may spend it: a coordinator that comes after us has to know
            try:
                write_holdings(self._ledger.holdings())
            except OSError as error:
                # it will have to rely on what routers report
                log.error("what routers hold can't be noted: %s", error)
        for peer, grant in grants:
            control.grant(peer, grant)
        return bool(grants)

    def problems(self) -> Sequence[str]:
        return self._membership.problems()

    def _set_limits(self) -> None:
        servers = len(self._membership.servers())
        limits = {
            queue: server_share(settings.max_jobs_per_second, servers)
            for queue, settings in self._queues.items()
            if settings.max_jobs_per_second is not None
        }
        self._ledger.set_limits(limits)
        for queue in self._limited - limits.keys():
            self._stats.drop_gauge(f"{queue}_rate_limit")
        for queue, limit in limits.items():
            self._stats.gauge(f"{queue}_rate_limit", limit)
        self._limited = frozenset(limits)


def membership_of(server: ServerSettings, clock: Clock) -> Membership:
    own = server.server_set_name or f"{server.advertised_host}:{server.port}"
    if not server.server_set_file:
        return Alone(own)
    return ServerSetFile(Path(server.server_set_file), own, clock.monotonic)
