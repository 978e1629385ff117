"""`pinlaterd http`: wires the HTTP interface together and runs it until told to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

import uvloop
from aiohttp import web

from pinlaterd import __version__
from pinlaterd.access import Access, load_authorizer
from pinlaterd.clock import Clock
from pinlaterd.config import layout
from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.kinds import HTTP, counterpart
from pinlaterd.http.job_types import JobTypes
from pinlaterd.http.problems import explain, no_request
from pinlaterd.http.v1 import V1
from pinlaterd.http.v2 import V2
from pinlaterd.http_port import HttpPort
from pinlaterd.lifecycle import StopSignal, allowed_files
from pinlaterd.router_client import RouterClient
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ProcessState, Snapshot
from pinlaterd.wire.listeners import Offer, is_offered, take_listeners
from pinlaterd.wire.process import ProcessStart, ReportingProcess, serve

log = logging.getLogger(__name__)

_SERVER_NAME = f"pinlaterd/{__version__}"
# A process that ends while another one serves its port is in no hurry: of a client that sends a
# request once within so long, none meets the end of its connection.
_RETIRE_SECONDS = 0.25
_HANDOVER_RETIRE_SECONDS = 5.0
_SPARE_FILES = 200  # in addition to clients: logs, connections to routers and the coordinator
_MOST_CLIENTS = 10_000


def run(etc: Path) -> int:
    """Serve until SIGTERM; then finish the requests in flight. Returns the exit code."""
    return serve(HTTP, etc, HttpProcess, uvloop.new_event_loop)


class HttpProcess(ReportingProcess):
    """The HTTP interface's process (a Service)."""

    def __init__(self, start: ProcessStart) -> None:
        clock, config = Clock(), start.active.config
        super().__init__(HTTP, start.name, start.active, clock, Stats())
        self._name = start.name
        self._settings = config.server
        authorizer = load_authorizer(config.server.http_authorizer, start.etc)
        self._access = Access(config.users, clock, authorizer)
        self._client = RouterClient(config.server, clock, "http")
        self._job_types = JobTypes(start.etc, config)
        v1 = V1(
            self._client,
            self._access,
            self._job_types,
            follow_seconds=config.server.request_timeout_ms / 1000,
        )
        described = v1.described_calls()
        self._v2 = V2(self._client, self._access, start.etc, config, described)
        application = web.Application(
            middlewares=[explain, v1.explain], client_max_size=config.server.max_http_body_bytes
        )
        application.add_routes([*v1.routes(), *self._v2.routes()])
        application.on_response_prepare.append(self._prepare)
        # Clients must not take the files that the process itself needs.
        files = allowed_files(_MOST_CLIENTS + _SPARE_FILES, log.warning)
        self._port = HttpPort(
            application,
            self._hosts,
            self._origins,
            most_connections=max(1, files - _SPARE_FILES),
            ends_with_client=True,  # so that no job is claimed for nobody
            refuse=no_request,
        )
        self._peer = layout.listener_socket(counterpart(start.name))
        self._offer: Offer | None = None
        self._is_stopping = False

    async def start(self, stop: StopSignal) -> None:
        """Listen once a router answers, or `stop` is set. Raises OSError if the port can't be
        had."""
        self._start_reporting()
        await self._client.wait_until_served(stop)
        settings, address = self._settings, self._settings.http_address
        taken = take_listeners(self._peer, address)
        if taken:
            await self._port.listen_on(taken)
        else:
            is_shared = settings.http_processes > 1
            await self._port.listen(settings.http_host, settings.http_port, is_shared=is_shared)
        own_socket = layout.listener_socket(self._name)
        self._offer = Offer(own_socket, address, self._port.listeners)
        self._offer.start()
        log.info("serving HTTP on %s%s", address, ", taken over" if taken else "")
        self._enter(ProcessState.SERVING)

    async def stop(self) -> None:
        """Finish the requests in flight; end each connection with the answer to its next one."""
        has_peer = is_offered(self._peer)
        if self._offer is not None:
            self._offer.stop()
        log.info("stopping: finishing the requests in flight")
        self._enter(ProcessState.STOPPING)
        self._is_stopping = True
        self._port.stop_listening()
        await asyncio.sleep(_HANDOVER_RETIRE_SECONDS if has_peer else _RETIRE_SECONDS)
        self._client.end_waits()
        await self._v2.streams.end()
        await self._port.stop()
        await self._client.close()
        self._stop_reporting()

    async def _prepare(self, _request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = _SERVER_NAME
        if self._is_stopping:
            response.force_close()

    def _hosts(self) -> Collection[str]:
        """Return the names that this server may be called by."""
        settings = self._v2.config.server
        return {settings.http_host, settings.advertised_host, *settings.http_hosts.split(",")}

    def _origins(self) -> Collection[str]:
        """Return the origins of web pages that may call this server."""
        return list(filter(None, self._v2.config.server.http_cors_origins.split(",")))

    # --- the coordinator ---------------------------------------------------------------------

    def facts(self) -> Mapping[str, str]:
        return {"address": self._settings.http_address}

    def follow(self, snapshot: Snapshot, active: ActiveConfig | None) -> None:
        if active is not None:
            self._v2.config = active.config
            self._access.follow(active.config.users)
            self._job_types.follow(active.config)
