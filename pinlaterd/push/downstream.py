"""A downstream: the HTTP server that jobs are posted to, and what its answers mean."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

import aiohttp
import msgspec
from aiohttp.abc import ResolveResult

from pinlaterd import __version__
from pinlaterd.config.push_hosts import PushHosts

log = logging.getLogger(__name__)

USER_AGENT = f"pinlaterd/{__version__}"
# Rickover's. A downstream that has not answered by then has taken the job.
_ANSWER_SECONDS = 6.5
_LONGEST_SECONDS = 8.0  # of a request, on a busy machine
# Shorter: nothing was sent to one that could not be connected to, so it has not taken the job.
_CONNECT_SECONDS = 5.0
# Below what servers close idle connections after, mostly: a request must not meet that.
_IDLE_SECONDS = 4.0
_MOST_ANSWER_BYTES = 64 * 1024
_MOST_REASON_CHARS = 200
_UNAVAILABLE = "service_unavailable"
# Of a server, not of the job.
_DOWN = frozenset(
    {
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)


class DownstreamAnswer(NamedTuple):
    """A downstream's answer to a request. `failure` "": it has taken the job."""

    failure: str = ""
    is_unavailable: bool = False  # the same request is to be made again in a moment
    is_down: bool = False  # it would hardly take another job now


class _Problem(msgspec.Struct):
    """Rickover's errors."""

    id: str = ""
    title: str = ""


class _Resolver(aiohttp.ThreadedResolver):
    """Resolves names to the addresses at which their hosts may be pushed to."""

    def __init__(self, hosts: PushHosts) -> None:
        super().__init__()
        self.hosts = hosts

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        admitted = [one for one in found if self.hosts.admits(host, one["host"])]
        if not admitted:
            raise OSError(errno.EACCES, "push_hosts does not list its address")
        return admitted


class Downstreams:
    """Posts to downstreams, in one event loop. `hosts` None: any host, as an operator named it."""

    def __init__(self, hosts: PushHosts | None, tls: ssl.SSLContext) -> None:
        """`tls`: verifies certificates; it takes time and memory to load, so others share it."""
        self._is_traced = os.environ.get("DEBUG_HTTP_TRAFFIC") == "true"
        self._hosts = hosts
        self._tls = tls
        self._session = _session(hosts, tls)
        # Sessions that make no further request, by the tasks that close them.
        self._retiring: dict[asyncio.Task[None], aiohttp.ClientSession] = {}

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> DownstreamAnswer:
        """Send a job, once, and say what became of it. It follows no redirects."""
        if self._is_traced:
            log.info("POST %s %r", url, body)
        try:
            async with self._session.post(
                url, data=body, headers=headers, allow_redirects=False
            ) as response:
                received = await _read(response)
                if self._is_traced:
                    log.info("%s answered %d %r", url, response.status, received)
                return _judge(response.status, received)
        except aiohttp.ConnectionTimeoutError:
            return DownstreamAnswer("can't be connected to: no answer", is_down=True)
        except TimeoutError:
            return DownstreamAnswer(is_down=True)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return DownstreamAnswer(_explain(error), is_down=True)

    def follow(self, hosts: PushHosts) -> None:
        """Send requests to these hosts only from now on, by new connections if they are others."""
        assert self._hosts is not None, "not one that may connect to any"
        if hosts.listed != self._hosts.listed:
            task = asyncio.create_task(_retire(self._session))
            self._retiring[task] = self._session
            task.add_done_callback(self._retiring.pop)
            self._hosts, self._session = hosts, _session(hosts, self._tls)

    async def close(self) -> None:
        retiring = dict(self._retiring)
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        # Here, since a task that is cancelled before its first step closes nothing.
        for session in (*retiring.values(), self._session):
            await session.close()


def _session(hosts: PushHosts | None, tls: ssl.SSLContext) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=_IDLE_SECONDS,
        resolver=None if hosts is None else _Resolver(hosts),
        ssl=tls,
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(
            total=_ANSWER_SECONDS,
            connect=_CONNECT_SECONDS,
            ceil_threshold=_LONGEST_SECONDS,  # longer limits end on whole seconds
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        # A small answer could become gigabytes otherwise.
        auto_decompress=False,
        skip_auto_headers=("Accept-Encoding",),
        headers={"Accept": "application/json", "Content-Type": "application/json"},
    )


async def _retire(session: aiohttp.ClientSession) -> None:
    """Close a session once its requests are answered."""
    await asyncio.sleep(_LONGEST_SECONDS)
    await session.close()


async def _read(response: aiohttp.ClientResponse) -> bytes | None:
    """Return the answer's body; None if it is longer than answers are."""
    received = bytearray()
    while chunk := await response.content.read(_MOST_ANSWER_BYTES):
        received += chunk
        if len(received) > _MOST_ANSWER_BYTES:
            response.close()
            return None
    return bytes(received)


def _judge(status: int, body: bytes | None) -> DownstreamAnswer:
    if status >= HTTPStatus.MULTIPLE_CHOICES:
        problem = _problem(body)
        reason = f": {problem.id or problem.title}"[:_MOST_REASON_CHARS].rstrip(": ")
        is_unavailable = problem.id == _UNAVAILABLE
        is_down = is_unavailable or status in _DOWN
        return DownstreamAnswer(f"answered {status}{reason}", is_unavailable, is_down)
    if not body and body is not None:
        return DownstreamAnswer()
    if body is None or not _is_object_or_null(body):
        return DownstreamAnswer(f"answered {status} with a body that is no JSON object")
    return DownstreamAnswer()


def _problem(body: bytes | None) -> _Problem:
    try:
        return msgspec.json.decode(body or b"{}", type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Problem()


def _is_object_or_null(body: bytes) -> bool:
    try:
        return msgspec.json.decode(body) is None or body.lstrip()[:1] == b"{"
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _explain(error: Exception) -> str:
    """Say why a request failed, without its URL and what is in that."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "")
        return f"can't be connected to: its certificate was refused: {why}"
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error.os_error, ConnectionRefusedError):
            return "can't be connected to: connection refused"
        return f"can't be connected to: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | OSError):
        return "the connection was dropped"
    return f"can't be asked: {type(error).__name__}"
