"""`pinlaterd web`: wires the dashboard together and runs it until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from aiohttp import web

from pinlaterd.clock import Clock
from pinlaterd.config import layout
from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.kinds import WEB
from pinlaterd.http_port import HttpPort
from pinlaterd.lifecycle import StopSignal
from pinlaterd.stats import Stats
from pinlaterd.web import (
    failures,
    find,
    guide,
    history,
    job,
    login,
    mend,
    overview,
    queue,
    system,
    workers,
)
from pinlaterd.web.commands import explain
from pinlaterd.web.site import Site
from pinlaterd.wire.control import ProcessState, Snapshot
from pinlaterd.wire.process import ProcessStart, ReportingProcess, serve

log = logging.getLogger(__name__)

_MOST_FORM_BYTES = 256 * 1024  # read before anybody is logged in

PAGES = (
    overview,
    queue,
    failures,
    history,
    job,
    workers,
    system,
    guide,
    find,
    login,
    mend,
)


def run(etc: Path) -> int:
    """Serve until SIGTERM. Returns the exit code."""
    # Not uvloop: it is quick for those who do much, and takes 8 MB.
    return serve(WEB, etc, WebProcess, asyncio.new_event_loop)


class WebProcess(ReportingProcess):
    """The dashboard's process (a Service). It serves whatever else is down, to say so."""

    def __init__(self, start: ProcessStart) -> None:
        clock, config = Clock(), start.active.config
        super().__init__(WEB, start.name, start.active, clock, Stats())
        self._settings = config.server
        self._site = Site(start.etc, config, clock)
        application = web.Application(
            middlewares=[self._site.explain], client_max_size=_MOST_FORM_BYTES
        )
        application.add_routes(self._site.routes())
        for page in PAGES:
            application.add_routes(page.routes(self._site))
        application.on_response_prepare.append(self._site.add_headers)
        self._port = HttpPort(application, self._hosts)
        commands = web.Application(middlewares=[explain])
        commands.add_routes(self._site.commands)
        self._socket = HttpPort(commands)

    async def start(self, stop: StopSignal) -> None:
        """Listen. Raises OSError if the port can't be had."""
        self._start_reporting()
        layout.WEB_SOCKET.unlink(missing_ok=True)
        await self._socket.listen(os.fspath(layout.WEB_SOCKET))
        layout.WEB_SOCKET.chmod(0o600)
        await self._port.listen(self._settings.web_host, self._settings.web_port)
        log.info("serving the dashboard on http://%s/", self._settings.web_address)
        self._enter(ProcessState.SERVING)

    async def stop(self) -> None:
        """End the streams, and finish the other requests in flight."""
        log.info("stopping: finishing the requests in flight")
        self._enter(ProcessState.STOPPING)
        for port in (self._port, self._socket):
            port.stop_listening()
        await self._site.close()
        for port in (self._port, self._socket):
            await port.stop()
        self._stop_reporting()

    def _hosts(self) -> Collection[str]:
        """Return the names that this server may be called by."""
        settings = self._site.config.server
        return {settings.web_host, settings.advertised_host, *settings.http_hosts.split(",")}

    # --- the coordinator ---------------------------------------------------------------------

    def facts(self) -> Mapping[str, str]:
        return {"address": self._settings.web_address}

    def follow(self, snapshot: Snapshot, active: ActiveConfig | None) -> None:
        if active is not None:
            self._site.follow(active.config)
