"""An HTTP port that no client can take from the others: it bounds connections, bodies and times.

A client has `STEP_SECONDS` for each step: to send a request's head, its body, to take a part of the
answer. A port that is full closes the connection that has waited longest for a head: those that
send nothing, or half a request, keep nobody out. `Host` has to be an address or a name of ours: a
web page may give our address a name of its own, and read what we answer (DNS rebinding). Nor may a
page of another origin post to us. Bodies that are held at a time share `_MOST_BUFFERED_BYTES`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import re
import socket
import sys
import termios
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from pinlaterd.hosts import is_ours, name_in, names_of_machine

STEP_SECONDS = 10.0
_MOST_CONNECTIONS = 200
_STOP_SECONDS = 2.0  # for requests in flight
_NAMES_SECONDS = 60.0  # for which this machine's names in DNS are believed
_MOST_BUFFERED_BYTES = 256 * 1024 * 1024
_MOST_DELIVERY_PAUSE_SECONDS = 0.05

# What a page of another origin may send and read, once the configuration allows it to call.
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, PATCH, DELETE",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Idempotency-Key, If-None-Match, "
    "X-Admin-Password",
    "Access-Control-Max-Age": "600",
}
_EXPOSED = "ETag, Retry-After"
_PLAIN, _COMPRESSED = {"", "identity"}, {"gzip", "deflate"}  # encodings of bodies
_INFLATED_BYTES = 64 * 1024  # at a time: a small part may become a thousand times as much
_COMPRESSED_BYTES = 16 * 1024  # at a time: the rest of it is copied for each stream that ends in it

_TAKES_GZIP = re.compile(r"gzip(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|\Z))")

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_PORT = web.AppKey["HttpPort"]("port")
# Of an answer: called if the client can't have received all of it.
UNDELIVERED = web.ResponseKey[Callable[[bool], None]]("undelivered")
# Of a request, if somebody asks for it by an empty one: its body, once it was read as a whole.
BODY = web.RequestKey("body", bytearray)


def takes_gzip(request: web.Request) -> bool:
    """Tell whether the client takes compressed answers."""
    return _TAKES_GZIP.search(request.headers.get("Accept-Encoding", "")) is not None


async def body_of(request: web.Request) -> bytearray:
    """Read a request's body, within the bounds of its port. Raises web.HTTPException."""
    body = await request.config_dict[_PORT].read_body(request)
    if BODY in request:
        request[BODY] = body
    return body


async def part_of(request: web.Request, held_bytes: int) -> bytes:
    """Read the next part of a body that is taken as it comes; b"" at its end. `held_bytes`: what
    the caller holds of the parts before. Raises web.HTTPException."""
    return await request.config_dict[_PORT].read_part(request, held_bytes)


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a record of aiohttp is not about a client that speaks no HTTP."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


logging.getLogger("aiohttp.server").addFilter(_is_ours)


class HttpPort:
    """Serves an application at one address, within limits."""

    def __init__(
        self,
        application: web.Application,
        hosts: Callable[[], Collection[str]] | None = None,
        origins: Callable[[], Collection[str]] = tuple,
        *,
        most_connections: int = _MOST_CONNECTIONS,
        step_seconds: float = STEP_SECONDS,
        most_buffered_bytes: int = _MOST_BUFFERED_BYTES,
        ends_with_client: bool = False,
        refuse: Callable[[str], web.Response] | None = None,
    ) -> None:
        """`hosts`: names that it answers to, in addition to the machine's; None: to all.
        `origins`: of web pages that may call it, in addition to its own.
        `ends_with_client`: a handler is cancelled once its client has gone.
        `refuse`: answers what is no HTTP, by what is wrong; None: in plain text."""
        application[_PORT] = self
        application.middlewares.insert(0, self._limit)
        # Inside the application's own, which word its refusals.
        application.middlewares.append(self._check_sender)
        self._options: dict[str, Any] = {  # of each connection
            "access_log": None,
            "auto_decompress": False,  # it takes a stream that was cut for a whole one
            "keepalive_timeout": step_seconds,
            "lingering_time": step_seconds,
        }
        self._refuse = refuse
        self._runner = web.AppRunner(
            application, shutdown_timeout=_STOP_SECONDS, handler_cancellation=ends_with_client
        )
        self._hosts = hosts
        self._origins = origins
        application.on_response_prepare.append(self._allow_page)
        self.most_connections = most_connections
        self._most_buffered_bytes = most_buffered_bytes
        self._buffered_bytes = 0  # of the bodies of all requests and answers
        self.step_seconds = step_seconds
        self.connections: dict[asyncio.BaseProtocol, _HttpConnection] = {}  # by aiohttp's own
        self.waiting: dict[_HttpConnection, None] = {}  # for a head, the longest first
        self._servers: list[asyncio.Server] = []
        self._machine_names: asyncio.Future[Collection[str]] | None = None
        self._names_until = 0.0

    @property
    def listeners(self) -> Sequence[socket.socket]:
        """The sockets that it listens on; only to look at, or to hand on."""
        return [listener for server in self._servers for listener in server.sockets]

    async def listen(self, host: str, port: int | None = None, *, is_shared: bool = False) -> None:
        """Listen at an address, which other processes may share, or without `port` at the path of a
        Unix socket. Raises OSError if it can't be had."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        if port is None:
            server = await loop.create_unix_server(self._connection, host)
        else:
            server = await loop.create_server(self._connection, host, port, reuse_port=is_shared)
        self._servers.append(server)

    async def listen_on(self, listeners: Sequence[socket.socket]) -> None:
        """Serve at sockets that listen already."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        for listener in listeners:
            self._servers.append(await loop.create_server(self._connection, sock=listener))

    def stop_listening(self) -> None:
        """Accept no further connection; those that are open go on."""
        while self._servers:
            self._servers.pop().close()

    async def stop(self) -> None:
        self.stop_listening()
        await self._runner.cleanup()

    def _connection(self) -> _HttpConnection:
        loop, server = asyncio.get_running_loop(), cast("web.Server", self._runner.server)
        inner = _AiohttpConnection(server, loop=loop, **self._options)
        inner.refuse = self._refuse
        return _HttpConnection(self, inner)

    @web.middleware
    async def _limit(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        connection = self.connections.get(request.protocol)
        if connection is None:  # it has ended meanwhile
            raise _error(web.HTTPBadRequest, "the connection has ended")
        connection.work()
        undelivered, may_have_left = None, False
        try:
            answer = await handler(request)
            undelivered = answer.get(UNDELIVERED)
            if isinstance(answer, web.Response) and isinstance(answer.body, bytes):
                connection.body_bytes += len(answer.body)
                self._buffered_bytes += len(answer.body)
            # Here rather than after this: its time is bounded by what the client takes.
            may_have_left = not connection.transport.is_closing()
            try:
                await answer.prepare(request)
                await answer.write_eof()
            except ConnectionError:  # the client has gone
                if undelivered is not None:
                    raise
            if undelivered is not None and await connection.is_delivered():
                undelivered = None
            return answer
        finally:
            self._buffered_bytes -= connection.body_bytes
            connection.body_bytes = 0
            connection.wait()
            if undelivered is not None:
                connection.transport.abort()  # so that the client does not receive it after all
                undelivered(may_have_left)

    async def read_body(self, request: web.Request) -> bytearray:
        """Read a body in the time of a step. Raises web.HTTPException."""
        content, most = _content_of(request), request.client_max_size
        self._check_room()
        body = bytearray()
        if (request.content_length or 0) > most:
            raise web.HTTPRequestEntityTooLarge(most, request.content_length or 0)
        if isinstance(content, StreamReader) and content.is_eof():
            self._add(request, body, content.read_nowait())  # mostly it came with its head
            return body
        async with self._reading():
            while data := await content.readany():
                self._add(request, body, data)
        return body

    def _add(self, request: web.Request, body: bytearray, data: bytes) -> None:
        """Add what was read to a body. Raises web.HTTPException if there is no room for it."""
        connection, most = self.connections.get(request.protocol), request.client_max_size
        if connection is not None:  # else it has ended, and brings no more
            self._hold(connection, connection.body_bytes + len(data))
        if len(body) + len(data) > most:
            raise web.HTTPRequestEntityTooLarge(most, len(body) + len(data))
        self._check_room()
        body += data

    async def read_part(self, request: web.Request, held_bytes: int) -> bytes:
        """Read the next part of a body in the time of a step. Raises web.HTTPException."""
        content = _content_of(request)
        connection = self.connections.get(request.protocol)
        if connection is not None:
            self._hold(connection, held_bytes)
        self._check_room(done="")  # the caller says what was done with the parts before
        async with self._reading():
            return await content.readany()

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        """Bound the time for reading, and word its errors. Raises web.HTTPException."""
        try:
            async with asyncio.timeout(self.step_seconds):
                yield
        except TimeoutError:
            what = f"the body did not come within {self.step_seconds:g} s"
            raise _error(web.HTTPRequestTimeout, what) from None
        except (HttpProcessingError, web.RequestPayloadError) as error:
            # Of aiohttp's `400, message:` and an indented line only that.
            why = str(getattr(error, "message", error)).rpartition("message:")[2].strip()
            raise _error(web.HTTPBadRequest, f"the body can't be read: {why}") from None

    def _hold(self, connection: _HttpConnection, body_bytes: int) -> None:
        """Count what is held of a connection's body now."""
        self._buffered_bytes += body_bytes - connection.body_bytes
        connection.body_bytes = body_bytes

    def _check_room(self, done: str = "; nothing was done") -> None:
        if self._buffered_bytes > self._most_buffered_bytes:
            what = f"the bodies of other requests and answers take all room{done}"
            raise _error(web.HTTPServiceUnavailable, what, {"Retry-After": "1"})

    @web.middleware
    async def _check_sender(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if self._hosts is not None:
            await self._check_host(request, self._hosts)
            origin = request.headers.get("Origin")
            if origin is not None:
                is_own = origin.partition("://")[2] == request.headers.get("Host")
                is_known = origin in self._origins()
                if is_known and request.method == "OPTIONS":
                    return web.Response(status=204, headers=_PREFLIGHT)
                if not (is_own or is_known) and request.method not in {"GET", "HEAD"}:
                    text = f"a page of {origin!r} may not call this server"
                    raise _error(web.HTTPForbidden, text)
        return await handler(request)

    async def _allow_page(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let a page of an origin that may call read the answer, errors included."""
        origin = request.headers.get("Origin")
        if origin is not None and origin in self._origins():
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED
            response.headers.add("Vary", "Origin")

    async def _check_host(self, request: web.Request, hosts: Callable[[], Collection[str]]) -> None:
        """Refuse a host of no name of ours; only browsers, which always send one, are misled."""
        for host in request.headers.getall("Host", ()):
            name = name_in(host)
            if not (is_ours(host, hosts()) or name in await self._names()):
                raise _error(
                    web.HTTPMisdirectedRequest,
                    f"this server has no name {name[:255]!r}: add it to http_hosts in "
                    "etc/pinlaterd.yaml, or use the server's address",
                )

    async def _names(self) -> Collection[str]:
        """Return this machine's names, also as DNS has them."""
        now = time.monotonic()
        if self._machine_names is None or now >= self._names_until:
            self._names_until = now + _NAMES_SECONDS
            self._machine_names = asyncio.ensure_future(asyncio.to_thread(names_of_machine))
        return await asyncio.shield(self._machine_names)


class _AiohttpConnection(web.RequestHandler):
    """aiohttp's protocol, which refuses what is no HTTP before any handler is asked."""

    __slots__ = ("refuse",)
    refuse: Callable[[str], web.Response] | None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer, and end the connection."""
        answer = super().handle_error(request, status, exc, message)
        if self.refuse is not None and isinstance(exc, HttpProcessingError):
            # What follows shows the bytes at fault, which may be a secret.
            said = (message or "").partition("\n")[0].partition(" when reading")[0]
            said = said.partition(" Please install")[0]  # which a client can't do
            answer = self.refuse(said.rstrip(":"))
            answer.force_close()
        return answer


class _HttpConnection(asyncio.Protocol):
    """Passes all on to aiohttp's protocol, and ends a connection that takes too long."""

    def __init__(self, port: HttpPort, inner: asyncio.Protocol) -> None:
        self._port = port
        self._inner = inner
        self.data_received = inner.data_received  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.body_bytes = 0  # of the request that is being answered, and of its answer
        self._works = False  # whether a request is being answered
        self._lost_bytes: int | None = None  # of answers, when the connection was lost
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        port = self._port
        if len(port.connections) >= port.most_connections and port.waiting:
            longest = next(iter(port.waiting))
            longest.transport.abort()
            longest.connection_lost(None)
        if len(port.connections) >= port.most_connections:
            self.transport.abort()
            return
        port.connections[self._inner] = self
        self.wait()
        self._inner.connection_made(transport)

    def pause_writing(self) -> None:
        self._give(self._port.step_seconds)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._give(None if self._works else self._port.step_seconds)
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost_bytes = self._unacknowledged()
        self._give(None)
        self._port.waiting.pop(self, None)
        if self._port.connections.pop(self._inner, None) is not None:
            self._inner.connection_lost(error)

    async def is_delivered(self) -> bool:
        """Return whether the client's kernel acknowledges all of the answer within a step."""
        until, pause = time.monotonic() + self._port.step_seconds, 0.0
        while self._unacknowledged() and time.monotonic() < until:
            if self._lost_bytes is not None:
                break
            try:
                await asyncio.sleep(pause)
            except asyncio.CancelledError:  # the client has gone, which it may with its answer
                if self._lost_bytes != 0:
                    raise
            pause = min(2 * pause + 0.001, _MOST_DELIVERY_PAUSE_SECONDS)
        return not self._unacknowledged()

    def _unacknowledged(self) -> int:
        """Return how many bytes of answers the client's kernel has not acknowledged."""
        if self._lost_bytes is not None:
            return self._lost_bytes
        unsent = self.transport.get_write_buffer_size()
        connected = self.transport.get_extra_info("socket")
        try:
            found = fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:  # a kind of socket that can't say
            return unsent
        return unsent + int.from_bytes(found, sys.byteorder)

    def wait(self) -> None:
        """Give the client time for the next head, and to take the rest of the answer before."""
        self._works = False
        if self._inner in self._port.connections:
            self._port.waiting[self] = None
            self._give(self._port.step_seconds)

    def work(self) -> None:
        """Take what time it needs: a head has come."""
        self._works = True
        self._port.waiting.pop(self, None)
        self._give(None)

    def _give(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self.transport.abort)


class _Inflated:
    """A body that is compressed, as it is inflated."""

    def __init__(self, content: StreamReader, encoding: str) -> None:
        self._content = content
        self._encoding = encoding
        self._left = b""  # of what was received
        # It may consist of several streams, one after the other.
        self._stream, self._is_between = zlib.decompressobj(), True

    async def readany(self) -> bytes:
        """Return the next part; b"" at its end. Raises web.HTTPException if it is cut or wrong."""
        while True:
            data = self._left or await self._content.read(_COMPRESSED_BYTES)
            if self._is_between and not data:
                return b""
            if self._is_between:
                bits = zlib.MAX_WBITS
                if self._encoding == "gzip":
                    bits += 16
                elif data[0] & 0xF != zlib.DEFLATED:  # some send deflate without its head
                    bits = -bits
                self._stream = zlib.decompressobj(bits)
            try:
                part = self._stream.decompress(data, _INFLATED_BYTES)
            except zlib.error:
                raise self._error("is wrong") from None
            self._left = self._stream.unconsumed_tail or self._stream.unused_data
            self._is_between = self._stream.eof
            if part:
                return part
            if not (data or self._is_between):
                raise self._error("ends too early")
            await asyncio.sleep(0)  # others have their turn, however many streams are empty

    def _error(self, what: str) -> web.HTTPException:
        told = f"the body can't be read: its Content-Encoding {self._encoding} {what}"
        return _error(web.HTTPBadRequest, told)


_INFLATED = web.RequestKey("inflated", _Inflated)


def _content_of(request: web.Request) -> StreamReader | _Inflated:
    """Return what a request's body is read from. Raises web.HTTPException."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in _PLAIN:
        return request.content
    if encoding not in _COMPRESSED:
        what = f"Content-Encoding {encoding[:40]!r} is not known; send gzip, deflate or neither"
        raise _error(web.HTTPBadRequest, what)
    if _INFLATED not in request:
        request[_INFLATED] = _Inflated(request.content, encoding)
    return request[_INFLATED]


def _error(
    kind: type[web.HTTPException], what: str, headers: Mapping[str, str] | None = None
) -> web.HTTPException:
    text = json.dumps({"error": what})
    return kind(text=text, content_type="application/json", headers=headers)
