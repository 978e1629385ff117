"""`pinlaterd push`: wires what pushes jobs together and runs it until told to stop."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import uvloop

from pinlaterd.client import AsyncClient, Client
from pinlaterd.client.consumer import Consumer
from pinlaterd.client.in_flight import InFlight
from pinlaterd.clock import Clock
from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.kinds import PUSH
from pinlaterd.config.push_hosts import PushHosts
from pinlaterd.config.schema import ServerSettings
from pinlaterd.lifecycle import ExitCode, StopSignal
from pinlaterd.push.downstream import Downstreams
from pinlaterd.push.overdue import SOURCE, Overdue
from pinlaterd.push.pusher import Pusher
from pinlaterd.push.targets import JobIds, Target, targets_of, watched_secrets
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ProcessState, Snapshot
from pinlaterd.wire.process import ProcessStart, ReportingProcess, serve, wait_until_served

log = logging.getLogger(__name__)

_MAX_WAIT_MS = 30_000  # as routers let a dequeue wait: each queue makes one after the other
_LOOKS = 16  # for overdue jobs, at a time: each takes a connection
_AHEAD_SECONDS = 0.02
_ACK_SECONDS = 0.05
# Longer than a downstream is waited for: so no request is given up.
_GRACE_SECONDS = 8.0
_MOST_CONNECTIONS = 10_000
_MOST_NAMED = 3  # of the queues whose downstream is down, in `status`


def run(etc: Path) -> int:
    """Push until SIGTERM; then wait for the answers to what was sent. Returns the exit code."""
    return serve(PUSH, etc, PushProcess, uvloop.new_event_loop)


class _Work(NamedTuple):
    """The work on one queue."""

    pusher: Pusher
    watch: asyncio.Task[None]  # for overdue jobs


class PushProcess(ReportingProcess):
    """The process that pushes (a Service)."""

    def __init__(self, start: ProcessStart) -> None:
        super().__init__(PUSH, start.name, start.active, Clock(), Stats())
        self._config = start.active.config
        self._client = _client(self._config.server)
        self._consumer = Consumer(
            self._client, max_wait_ms=_MAX_WAIT_MS, fail=self._fail, expects_queues=False
        )
        # Of the jobs that are in flight, which ask it for nothing.
        self._jobs_client = Client()
        self._ids = JobIds(self._client)
        hosts = PushHosts(self._config.server.push_hosts)
        tls = ssl.create_default_context()
        self._downstreams = {False: Downstreams(hosts, tls), True: Downstreams(None, tls)}
        self._secrets = watched_secrets(self._config)
        self._unfit_secrets = ""  # why some of them can't be used
        self._works: dict[str, _Work] = {}
        self._looks = asyncio.Semaphore(_LOOKS)
        self._changed = asyncio.Event()

    async def start(self, stop: StopSignal) -> None:
        """Begin to push once a router answers, or it is to stop."""
        self._stop = stop
        self._start_reporting()
        await wait_until_served(lambda: self._client.lookup([]), stop)
        self._following = asyncio.create_task(self._follow_changes())
        self._following.add_done_callback(self._following_ended)
        self._changed.set()
        self._enter(ProcessState.SERVING)

    async def stop(self) -> None:
        """Claim nothing more; wait for the answers to what was sent."""
        log.info("stopping: waiting for the answers of downstreams")
        self._enter(ProcessState.STOPPING)
        self._following.cancel()
        await self._remove(*self._consumer.queues)
        for downstreams in self._downstreams.values():
            await downstreams.close()
        await self._client.close()
        self._stop_reporting()

    def _following_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End: supervisord starts a successor, which may fare better."""
        log.error("can't go on: %s", error, exc_info=error)
        self.exit_code = ExitCode.FAILURE
        self._stop.set()

    # --- the configuration --------------------------------------------------------------------

    async def _follow_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._downstreams[False].follow(PushHosts(self._config.server.push_hosts))
            targets, unfit, reasons = targets_of(self._config, self._ids)
            for reason in reasons:
                log.error("a secret can't be used: %s; its queues go on as before, or wait", reason)
            self._unfit_secrets = "; ".join(reasons)
            gone = [
                queue
                for queue, work in self._works.items()
                if queue not in unfit
                and (
                    queue not in targets
                    or targets[queue].is_trusted != work.pusher.target.is_trusted
                )
            ]
            await self._remove(*gone)
            for queue, target in targets.items():
                if queue in self._works:
                    self._works[queue].pusher.follow(target)
                else:
                    self._add(target)

    def _add(self, target: Target) -> None:
        queue = target.queue
        overdue = Overdue(self._client, queue, lambda: pusher.target, self._looks, self._stats)
        downstreams = self._downstreams[target.is_trusted]
        pusher = Pusher(target, downstreams, self._stats, overdue.note_handed_over)
        in_flight = InFlight(
            queue,
            self._jobs_client,
            target.concurrency,
            ahead_seconds=_AHEAD_SECONDS,
            ack_seconds=_ACK_SECONDS,
        )
        self._consumer.add(in_flight, pusher, claim_timeout_ms=target.claim_timeout_ms)
        self._works[queue] = _Work(pusher, asyncio.create_task(overdue.run()))
        log.info("pushing the jobs of %s", queue)

    async def _remove(self, *queues: str) -> None:
        for queue in queues:
            if work := self._works.pop(queue, None):  # else its removal was interrupted
                work.pusher.stop()
                work.watch.cancel()
                self._stats.drop_gauge(f"{queue}_push_concurrency")
        if queues:
            await self._consumer.remove(*queues, grace_seconds=_GRACE_SECONDS)
            log.info("no longer pushing the jobs of %s", ", ".join(queues))

    # --- the coordinator ----------------------------------------------------------------------

    def facts(self) -> Mapping[str, str]:
        facts = {"queues": str(len(self._works))}
        down = {queue: work.pusher.limit.why_down for queue, work in self._works.items()}
        down = {queue: why for queue, why in down.items() if why}
        if down:
            named = [f"{queue}: downstream {why}" for queue, why in down.items()][:_MOST_NAMED]
            named += [f"{len(down) - len(named)} more"] if len(down) > len(named) else []
            facts["downstream warning"] = "; ".join(named)
        if self._unfit_secrets:
            facts["secret warning"] = (
                f"{self._unfit_secrets}; their queues go on as before, or wait"
            )
        return facts

    def tick(self) -> None:
        for queue, work in self._works.items():
            self._stats.gauge(f"{queue}_push_concurrency", work.pusher.limit.open)
        if self._secrets.look():
            self._changed.set()

    def follow(self, snapshot: Snapshot, active: ActiveConfig | None) -> None:
        if active is not None:
            self._config = active.config
            self._secrets = watched_secrets(active.config)
            self._changed.set()


def _client(settings: ServerSettings) -> AsyncClient:
    return AsyncClient(
        *settings.own_address,
        source=f"{SOURCE}{settings.advertised_host}",
        timeout_seconds=settings.request_timeout_ms / 1000 + 1,
        max_connections=_MOST_CONNECTIONS,
    )
