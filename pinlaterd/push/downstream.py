"""A downstream: the HTTP server that jobs are posted to, as an HTTP/1.1 client speaks with it.

Answers are read within bounds: nothing that a downstream sends takes more memory than they say.
Relies on asyncio (any event loop), and on httptools, which parses.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from http import HTTPStatus
from typing import NamedTuple, cast
from urllib.parse import quote, urlsplit

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from pinlaterd import __version__
from pinlaterd.config.push_hosts import PushHosts

log = logging.getLogger(__name__)

USER_AGENT = f"pinlaterd/{__version__}"
# Rickover's. A downstream that has not answered by then has taken the job.
_ANSWER_SECONDS = 6.5
# Shorter: nothing was sent to one that could not be connected to.
_CONNECT_SECONDS = 5.0
# Below what servers close idle connections after, mostly: a request must not meet that.
_IDLE_SECONDS = 4.0
MOST_ANSWER_BYTES = 64 * 1024  # of its body
_MOST_RECEIVED_BYTES = 4 * MOST_ANSWER_BYTES  # with its head, and all that frames it
_PLAIN_PATH = re.compile(r"[A-Za-z0-9%/:@!$&'()*+,;=~._-]*")
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


# --- what is read of HTTP ---------------------------------------------------------------------


class BadAnswer(Exception):
    """An answer that is no HTTP, or ends before it is whole."""


class HttpAnswer(NamedTuple):
    """An answer. `body` None: it is longer than answers are."""

    status: int
    body: bytes | None
    may_go_on: bool  # whether the connection takes another request


class AnswerReader:
    """Reads one answer, as its bytes come. httptools parses it, and calls the methods `on_...`."""

    def __init__(self) -> None:
        self._parser = HttpResponseParser(self)
        self._received_bytes = 0
        self._status = 0
        self._body = bytearray()
        self._is_framed = False  # whether its head says where it ends
        self._is_refused = False  # whether it is coded in a way that was not asked for
        self._is_too_long = False
        self._is_whole = False
        self._may_go_on = False

    def feed(self, data: bytes) -> HttpAnswer | None:
        """Return the answer once it is whole. Raises BadAnswer."""
        self._received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            if not self._is_whole:
                raise BadAnswer from None
            self._may_go_on = False
        if self._is_refused or self._received_bytes > _MOST_RECEIVED_BYTES:
            raise BadAnswer
        if self._is_too_long:
            return HttpAnswer(self._parser.get_status_code(), None, may_go_on=False)
        if not self._is_whole:
            return None
        return HttpAnswer(self._status, bytes(self._body), self._may_go_on)

    def end(self) -> HttpAnswer:
        """Return the answer if the end of its connection ends it. Raises BadAnswer."""
        if self._is_framed or not self._status:
            raise BadAnswer
        return HttpAnswer(self._status, bytes(self._body), may_go_on=False)

    def on_message_begin(self) -> None:
        self._may_go_on = False  # nobody has asked for a second answer

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length":
            self._is_framed = True
            self._is_too_long |= int(value or 0) > MOST_ANSWER_BYTES
        elif name == b"transfer-encoding":
            self._is_framed = True
            self._is_refused |= value.strip().lower() != b"chunked"

    def on_headers_complete(self) -> None:
        if not self._is_whole and self._parser.get_status_code() >= HTTPStatus.OK:
            self._status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        if not self._is_whole:
            self._body += part
            self._is_too_long |= len(self._body) > MOST_ANSWER_BYTES

    def on_message_complete(self) -> None:
        if self._status:  # not one of those before the last one
            self._is_whole = True
            self._may_go_on = self._parser.should_keep_alive()


class DownstreamConnection(asyncio.Protocol):
    """A connection, which `ask` uses. `idle_since`: when its last answer had come."""

    _reader: AnswerReader
    _answer: asyncio.Future[HttpAnswer] | None = None
    idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def close(self) -> None:
        """Close it at once."""
        self._transport.abort()

    async def ask(self, request: bytes, seconds: float) -> HttpAnswer:
        """Send a request and return its answer. Raises TimeoutError after so many seconds, OSError
        if the connection breaks, and BadAnswer."""
        loop = asyncio.get_running_loop()
        self._reader, self._answer = AnswerReader(), loop.create_future()
        timer = loop.call_later(seconds, self._fail, TimeoutError())
        self._transport.write(request)
        try:
            answer = await self._answer
        except BaseException:
            self.close()  # the answer may still come
            raise
        finally:
            timer.cancel()
            self._answer = None
        if not answer.may_go_on:
            self.close()
        self.idle_since = loop.time()
        return answer

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _take(self, answer: HttpAnswer | None) -> None:
        if answer is not None and self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nobody has asked for it
            return
        try:
            self._take(self._reader.feed(data))
        except BadAnswer as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is None or self._answer.done():
            return
        with suppress(BadAnswer):
            self._take(None if error else self._reader.end())
        self._fail(ConnectionResetError())


# --- requests ---------------------------------------------------------------------------------


class _Origin(NamedTuple):
    """Where the requests to a URL go."""

    authority: str  # as the URL has it
    host: str
    port: int
    is_tls: bool


class Downstreams:
    """Posts to downstreams, in one event loop. `hosts` None: any host, as an operator named it."""

    def __init__(self, hosts: PushHosts | None) -> None:
        self._is_traced = os.environ.get("DEBUG_HTTP_TRAFFIC") == "true"
        self._hosts = hosts
        self._idle: dict[_Origin, list[DownstreamConnection]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> DownstreamAnswer:
        """Send a job, once, and say what became of it. It follows no redirects."""
        if self._is_traced:
            log.info("POST %s %r", url, body)
        loop = asyncio.get_running_loop()
        until = loop.time() + _ANSWER_SECONDS
        origin, target = _parts_of(url)
        request = b"POST %b HTTP/1.1\r\n%b%d\r\n\r\n%b" % (
            target,
            _head(origin.authority, tuple(headers.items())),
            len(body),
            body,
        )
        try:
            connection = self._take_idle(origin) or await self._connect(origin)
        except OSError as error:
            return DownstreamAnswer(f"can't be connected to: {_reason_of(error)}", is_down=True)
        try:
            answer = await connection.ask(request, until - loop.time())
        except TimeoutError:
            return DownstreamAnswer(is_down=True)
        except OSError:
            return DownstreamAnswer("the connection was dropped", is_down=True)
        except BadAnswer:
            return DownstreamAnswer("answered what is no HTTP", is_down=True)
        if connection.is_open:
            self._idle.setdefault(origin, []).append(connection)
            if self._sweep is None:
                self._sweep = loop.call_later(_IDLE_SECONDS, self._close_idle)
        if self._is_traced:
            log.info("%s answered %d %r", url, answer.status, answer.body)
        return _judge(answer.status, answer.body)

    def _take_idle(self, origin: _Origin) -> DownstreamConnection | None:
        """Return the connection that was used last, if it may be used again."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            now = asyncio.get_running_loop().time()
            if connection.is_open and now < connection.idle_since + _IDLE_SECONDS:
                return connection
            connection.close()
        return None

    def _close_idle(self) -> None:
        """Close the connections that were not used lately; look again while there are others."""
        loop = asyncio.get_running_loop()
        before = self._idle
        self._idle = {}
        for origin, connections in before.items():
            for connection in connections:
                if connection.is_open and loop.time() < connection.idle_since + _IDLE_SECONDS:
                    self._idle.setdefault(origin, []).append(connection)
                else:
                    connection.close()
        self._sweep = loop.call_later(_IDLE_SECONDS, self._close_idle) if self._idle else None

    async def _connect(self, origin: _Origin) -> DownstreamConnection:
        """Connect to the first of a host's addresses that answers; each has its part of the time.
        Raises OSError."""
        loop = asyncio.get_running_loop()
        _, host, port, is_tls = origin
        until = loop.time() + _CONNECT_SECONDS
        async with asyncio.timeout_at(until):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(where[0]) for *_, where in found)
        admitted = [
            one for one in addresses if self._hosts is None or self._hosts.admits(host, one)
        ]
        failure = OSError(errno.EACCES, "push_hosts does not list its address")
        for place, address in enumerate(admitted):
            seconds = (until - loop.time()) / (len(admitted) - place)
            try:
                async with asyncio.timeout(seconds):
                    _, connection = await loop.create_connection(
                        DownstreamConnection,
                        address,
                        port,
                        ssl=self._tls if is_tls else None,
                        server_hostname=host if is_tls else None,
                    )
                    return connection
            except OSError as error:
                failure = error
        raise failure

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def follow(self, hosts: PushHosts) -> None:
        """Connect to these hosts only from now on."""
        self._hosts = hosts

    async def close(self) -> None:
        """Close the connections that are not used."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        if self._sweep is not None:
            self._sweep.cancel()


def _parts_of(url: str) -> tuple[_Origin, bytes]:
    """Return where the requests to a URL go, and what they name there."""
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    if _PLAIN_PATH.fullmatch(path) is None:  # an id may hold anything: also what ends a line
        path = quote(path, safe="%/:@!$&'()*+,;=~")
    return _origin_of(scheme, authority), b"/" + path.encode()


@lru_cache(1024)
def _origin_of(scheme: str, authority: str) -> _Origin:
    parts, is_tls = urlsplit(f"//{authority}"), scheme == "https"
    return _Origin(authority, parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls)


@lru_cache(1024)
def _head(authority: str, headers: tuple[tuple[str, str], ...]) -> bytes:
    """Return the head of a request behind its first line, up to the length of its body. Raises
    ValueError for a header that would begin another one."""
    given = {name.lower() for name, _ in headers}
    usual = [
        ("Host", authority),
        ("Accept", "application/json"),
        ("Content-Type", "application/json"),
    ]
    lines = [
        f"{name}: {value}\r\n"
        for name, value in (*(one for one in usual if one[0].lower() not in given), *headers)
    ]
    if any(len(line.splitlines()) > 1 for line in lines):
        raise ValueError("a header has more than one line")
    return "".join(lines).encode() + b"Content-Length: "


# --- what answers mean ------------------------------------------------------------------------


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


def _reason_of(error: OSError) -> str:
    """Say why no connection could be had, without the URL and what is in that."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was refused: {error.verify_message}"
    return error.strerror or str(error)
