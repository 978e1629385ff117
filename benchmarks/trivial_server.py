"""A server that answers every frame with the same bytes: what the load generator itself can do."""

from __future__ import annotations

import asyncio
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Self, cast

import uvloop


class _SameAnswer(asyncio.Protocol):
    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data
        at = frames = 0
        while at + 4 <= len(buffer):
            end = at + 4 + int.from_bytes(buffer[at : at + 4])
            if end > len(buffer):
                break
            at = end
            frames += 1
        self._buffer = buffer[at:]
        if frames and self._transport is not None:
            self._transport.write(self._answer * frames)


async def _serve(answer: bytes, port_to: Connection) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _SameAnswer(answer), "127.0.0.1", 0)
    port_to.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _main(answer: bytes, port_to: Connection) -> None:
    uvloop.run(_serve(answer, port_to))


class TrivialServer:
    """Such a server, in a process of its own, on a free port."""

    def __init__(self, answer: bytes) -> None:
        context = get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_main, args=(answer, sender), daemon=True)
        self._process.start()
        self.port: int = receiver.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()
