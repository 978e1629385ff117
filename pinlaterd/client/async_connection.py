"""One connection for asyncio, TCP or TLS over it: what `connection` is for code that blocks.

What asyncio was given to send leaves later, and goes on leaving when nobody waits for it any more.
So a call that failed or was cancelled must have its connection closed at once, which drops what has
not left. Deadlines are monotonic seconds.
"""

from __future__ import annotations

import asyncio
import select
import ssl
import time

from pinlaterd.client.addresses import Address
from pinlaterd.client.connection import answer_length, new_socket, seconds_left
from pinlaterd.client.failures import cannot_connect, name_not_found, no_answer, not_sent
from pinlaterd.client.names import Endpoint, Names, in_turn

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_BUFFERED_BYTES = 256 * 1024


class AsyncConnection:
    """A connection to the server at `address`; `connect` makes it."""

    def __init__(self, address: Address, streams: Streams) -> None:
        self.address = address
        self._reader, self._writer = streams
        self._is_tls = self._writer.get_extra_info("ssl_object") is not None
        # With nothing below the mark, `drain` ends when all has left.
        self._writer.transport.set_write_buffer_limits(high=0)

    def close(self) -> None:
        """End it at once; what has not left yet never does."""
        self._writer.transport.abort()

    def is_stale(self) -> bool:
        """Whether the server closed it while it lay idle, seen by the loop or not yet."""
        if self._reader.at_eof() or self._writer.is_closing():
            return True
        if self._is_tls:  # what is there to be read may be TLS's own
            return False
        poll = select.poll()
        poll.register(self._writer.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def call(self, message: bytes, *, deadline: float) -> bytes:
        """Send a message and return the answer to it.

        Raises NotSent if the message did not go out whole, so that the server can't
        have carried it out, and OutcomeUnknown if it did, or may have, and no answer came.
        """
        may_have_left = False
        try:
            async with asyncio.timeout(seconds_left(deadline)):
                may_have_left = self._is_tls  # which has buffers of its own
                self._writer.write(len(message).to_bytes(4, "big") + message)
                await self._writer.drain()
                may_have_left = True
                length = answer_length(await self._reader.readexactly(4))
                return await self._reader.readexactly(length)
        except (OSError, EOFError) as error:
            if may_have_left:
                raise no_answer(self.address, error) from error
            raise not_sent(self.address, error) from error


async def connect(
    server: Address, names: Names, *, deadline: float, tls: ssl.SSLContext | None
) -> AsyncConnection:
    """To the first of the endpoints that the server's name stands for which can be connected; with
    `tls` the server's certificate is checked. Raises CannotConnect."""
    found = names.look_up(server)
    try:
        if not found.done():
            async with asyncio.timeout(deadline - time.monotonic()):
                await asyncio.wrap_future(found)
        endpoints = found.result()
    except OSError as error:
        raise name_not_found(server, error) from error
    failures: list[OSError] = []
    for endpoint, until in in_turn(endpoints, deadline):
        try:
            async with asyncio.timeout(seconds_left(until)):
                return AsyncConnection(server, await _open(endpoint, server.host, tls))
        except OSError as error:
            failures.append(error)
    raise cannot_connect(server, failures) from failures[-1]


async def _open(endpoint: Endpoint, host: str, tls: ssl.SSLContext | None) -> Streams:
    plain = new_socket(endpoint)
    try:
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, endpoint.where)
        return await asyncio.open_connection(
            sock=plain, limit=_BUFFERED_BYTES, ssl=tls, server_hostname=host if tls else None
        )
    except BaseException:
        plain.close()
        raise
