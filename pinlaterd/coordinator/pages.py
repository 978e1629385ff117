"""The HTTP pages: /stats.txt, /stats.json, /metrics, /health, /status.json, /snapshot.json.

Read-only, on the statistics port and on run/stats.sock. `?process=shard-1` narrows figures down to
one process. /snapshot.json has them by process and with their histograms' buckets: the
difference of two is what happened in between.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web

from pinlaterd.coordinator.processes import Status
from pinlaterd.stats import StatsSnapshot, merge
from pinlaterd.stats.texts import CONTENT_TYPE, PrometheusText, figures, ostrich

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages:
    def __init__(
        self, status: Callable[[], Status], stats: Callable[[], Mapping[str, StatsSnapshot]]
    ) -> None:
        """`stats`: figures by process."""
        self._status = status
        self._stats = stats
        self._prometheus = PrometheusText()
        self._handlers: Mapping[str, _Handler] = {
            "/stats.txt": self._stats_text,
            "/stats.json": self._stats_json,
            "/metrics": self._metrics,
            "/health": self._health,
            "/status.json": self._status_json,
            "/snapshot.json": self._snapshot_json,
        }

    def application(self) -> web.Application:
        application = web.Application(middlewares=[_plain_errors])
        for path, handler in {"/": self._index, **self._handlers}.items():
            application.router.add_get(path, handler)
        return application

    async def _index(self, _request: web.Request) -> web.Response:
        return web.Response(text="".join(f"{page}\n" for page in self._handlers))

    async def _stats_text(self, request: web.Request) -> web.Response:
        return web.Response(text=ostrich(merge(self._chosen(request).values())))

    async def _stats_json(self, request: web.Request) -> web.Response:
        chosen = self._chosen(request)
        body = figures(merge(chosen.values())) | {
            "processes": {name: figures(snapshot) for name, snapshot in chosen.items()}
        }
        return web.json_response(body)

    async def _metrics(self, request: web.Request) -> web.Response:
        parts = self._parts(self._chosen(request))
        return web.Response(body=parts, headers={"Content-Type": CONTENT_TYPE})

    async def _parts(self, stats: Mapping[str, StatsSnapshot]) -> AsyncIterator[bytes]:
        """In turns of the loop with others: with many queues the page is long."""
        for part in self._prometheus.of(stats):
            if part:
                yield part
            await asyncio.sleep(0)

    async def _health(self, _request: web.Request) -> web.Response:
        found = self._status()
        return web.json_response(
            {"healthy": found["healthy"], "problems": found["problems"]},
            status=HTTPStatus.OK if found["healthy"] else HTTPStatus.SERVICE_UNAVAILABLE,
        )

    async def _status_json(self, _request: web.Request) -> web.Response:
        return web.json_response(self._status())

    async def _snapshot_json(self, request: web.Request) -> web.Response:
        body = msgspec.json.encode(self._chosen(request))
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    def _chosen(self, request: web.Request) -> Mapping[str, StatsSnapshot]:
        stats = self._stats()
        process = request.query.get("process")
        if process is None:
            return stats
        if process not in stats:
            names = ", ".join(stats)
            raise web.HTTPNotFound(text=f"no process {process!r}; choose from {names}\n")
        return {process: stats[process]}


@web.middleware
async def _plain_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Say in JSON what is wrong, and what there is instead."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        return _error(error, "only GET and HEAD are answered here")
    except web.HTTPNotFound as error:
        text = (error.text or "").strip()
        return _error(error, text if "process" in text else "no such page; see /")


def _error(error: web.HTTPException, what: str) -> web.Response:
    headers = {key: value for key, value in error.headers.items() if key == "Allow"}
    body = json.dumps({"error": what})
    return web.Response(
        status=error.status, text=body, content_type="application/json", headers=headers
    )
