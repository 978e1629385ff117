"""`pinlaterd router`: wires the router's parts together and runs them until told to stop.

Relies on everything below it; nothing imports it but the command line.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import uvloop

from pinlaterd.clock import Clock
from pinlaterd.config import layout
from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.kinds import ROUTER, counterpart
from pinlaterd.errors import address_of
from pinlaterd.lifecycle import (
    ExitCode,
    StopSignal,
    allowed_files,
    prefer_throughput,
    process_exists,
)
from pinlaterd.router.call import Shared
from pinlaterd.router.rate_limits import RateLimits, RateReporter, shares_at_start
from pinlaterd.router.service import RouterService
from pinlaterd.router.shards import ShardSet
from pinlaterd.rpc.server import RETIRE_SECONDS, ThriftServer
from pinlaterd.stats import Stats
from pinlaterd.wire.control import (
    HOLDINGS,
    UNHEALTHY_SHARDS,
    Details,
    Mend,
    ProcessState,
    RouterId,
    Snapshot,
)
from pinlaterd.wire.curve import ClusterKey
from pinlaterd.wire.envelope import new_context
from pinlaterd.wire.link import LinkListener, ShardLink
from pinlaterd.wire.listeners import Offer, is_offered, take_listeners
from pinlaterd.wire.process import ProcessStart, ReportingProcess, start_process

log = logging.getLogger(__name__)

_WAIT_FOR_SHARDS_SECONDS = 2.0
_LOOK_FOR_SHARDS_SECONDS = 0.02
# In a cluster a shard is expected back for as long as another server may take to own it: a session
# with ZooKeeper (4 s), and what follows.
_TAKE_OVER_SECONDS = 4.0 + 5.0
# A router that ends while another one serves its port is in no hurry: of a client that calls once
# within so long, no call meets the end of its connection.
_HANDOVER_RETIRE_SECONDS = 5.0
_SPARE_FILES = 200  # beside clients: logs, sockets to shards and the coordinator
_ALLOCATIONS_BETWEEN_COLLECTIONS = 50_000


def run(etc: Path) -> int:
    """Serve until SIGTERM, finish the calls in flight, return the exit code. Raises ConfigError."""
    prefer_throughput()
    start = start_process(ROUTER, etc)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(start))


async def _serve(start: ProcessStart) -> int:
    clock, stats, stop = Clock(), Stats(), StopSignal()
    loop = asyncio.get_running_loop()
    stop.catch_in(loop)
    settings = start.active.config.server
    router = Router(start.name, start.active, clock, stats, start.key)
    try:
        await router.start()
    except OSError as error:
        address = address_of(settings.host, settings.port)
        log.error("can't listen on %s: %s", address, error.strerror)
        return ExitCode.FAILURE
    # All that lives as long as the process is out of the collector's sight from now on.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS_BETWEEN_COLLECTIONS)
    await stop.wait()
    await router.stop()
    return ExitCode.OK


class Router(ReportingProcess):
    """The router process: server, service, shards and what the coordinator says (a Service)."""

    def __init__(
        self,
        name: str,
        active: ActiveConfig,
        clock: Clock,
        stats: Stats,
        key: ClusterKey | None = None,
    ) -> None:
        """`key`: of the cluster that the server belongs to, if any."""
        self._context = new_context()
        super().__init__(ROUTER, name, active, clock, stats, self._context)
        self._name = name
        self._key = key
        self._shards_planned = 1
        self._shards = ShardSet(self._connect, clock.monotonic, stats.drop_queue)
        limits, settings = RateLimits(clock), active.config.server
        job_defaults = active.config.job_defaults()
        self._shared = Shared(self._shards, limits, clock, stats, Random(), settings, job_defaults)
        self._service = RouterService(self._shared)
        # Clients must not take the files that the router itself needs.
        files = allowed_files(settings.max_connections + _SPARE_FILES, log.warning)
        served = replace(settings, max_connections=max(1, files - _SPARE_FILES))
        self._server = ThriftServer(self._service.handle, served, stats)
        own_id = RouterId(name, os.getpid(), self._started_at_ms)
        self._rates = RateReporter(own_id, limits, self._control, stats, self._hear)
        limited = [
            queue
            for queue, of_queue in active.config.queues.items()
            if of_queue.max_jobs_per_second is not None
        ]
        limits.follow(shares_at_start(name, limited, HOLDINGS.read(), _is_another), {})
        self._rates.watch()
        self._peer = layout.listener_socket(counterpart(name))
        self._offer: Offer | None = None

    async def start(self) -> None:
        """Raises OSError if the port can't be had."""
        self._start_reporting()
        await self._wait_for_shards()
        settings = self._shared.settings
        address = address_of(settings.host, settings.port)
        taken = take_listeners(self._peer, address)
        await self._server.start(taken)
        self._offer = Offer(layout.listener_socket(self._name), address, self._server.listeners)
        self._offer.start()
        log.info("serving Thrift on %s%s", address, ", taken over" if taken else "")
        self._enter(ProcessState.SERVING)

    async def _wait_for_shards(self) -> None:
        """Listen once all shards serve, or soon: so that a restart costs no caller an error."""
        until = self._clock.monotonic() + _WAIT_FOR_SHARDS_SECONDS
        while self._shards.unhealthy() or not self._shards.by_name:
            if self._clock.monotonic() > until:
                log.warning("not all shards serve yet; serving with those that do")
                return
            self._report()
            await asyncio.sleep(_LOOK_FOR_SHARDS_SECONDS)

    async def stop(self) -> None:
        """Finish the calls in flight, take no new ones, let go of the shards."""
        has_peer = is_offered(self._peer)
        if self._offer is not None:
            self._offer.stop()
        log.info("stopping: finishing the calls in flight")
        self._enter(ProcessState.STOPPING)
        until = self._clock.monotonic() + self._shared.settings.request_timeout_ms / 1000
        self._service.dequeuer.stop_waiting()
        await self._server.stop(
            retire_seconds=_HANDOVER_RETIRE_SECONDS if has_peer else RETIRE_SECONDS
        )
        # Those whose clients have gone: what they claimed is released.
        await self._service.finish_calls(max(0.0, until - self._clock.monotonic()))
        self._shards.close()
        self._rates.stop()
        self._stop_reporting()
        self._context.destroy(linger=0)

    def _connect(self, name: str, endpoint: str, listener: LinkListener) -> ShardLink:
        settings = self._shared.settings
        share = settings.max_buffered_bytes // self._shards_planned
        take_over_seconds = 0.0 if self._key is None else _TAKE_OVER_SECONDS
        return ShardLink(
            name,
            endpoint,
            self._context,
            listener,
            self._clock,
            max_bytes=max(settings.max_frame_bytes, share),
            return_seconds=max(settings.shard_restart_grace_ms / 1000, take_over_seconds),
            key=self._key,
        )

    # --- the coordinator -----------------------------------------------------------------------

    def facts(self) -> Mapping[str, str]:
        healthy = ", ".join(sorted(shard.name for shard in self._shards.healthy()))
        unhealthy = ", ".join(sorted(self._shards.unhealthy()))
        return {"healthy shards": healthy or "none", UNHEALTHY_SHARDS: unhealthy}

    def details(self, *, whole: bool) -> Details:
        return self._service.callers.details(self._clock.monotonic(), whole=whole)

    def follow(self, snapshot: Snapshot, active: ActiveConfig | None) -> None:
        if active is not None:
            self._shared.settings = active.config.server
            self._shared.job_defaults = active.config.job_defaults()
        self._shards_planned = max(1, len(snapshot.shards))
        self._shards.follow(snapshot)

    def tick(self) -> None:
        self._stats.gauge("router_calls_in_hand", self._service.admission.in_flight)
        self._stats.gauge("router_calls_waiting", self._service.admission.waiting)
        self._rates.show()
        for (queue, method), jobs in self._shared.mends.items():
            self._control.tell(Mend(queue, method, jobs))
        self._shared.mends.clear()

    def hear(self, *, is_newcomer: bool) -> bool:
        if is_newcomer:
            self._rates.report()
        return self._rates.hear()


def _is_another(pid: int) -> bool:
    """Tell whether a process other than this one has that pid."""
    return pid != os.getpid() and process_exists(pid)
