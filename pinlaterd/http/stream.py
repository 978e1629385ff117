"""Enqueues of any number of jobs in bounded memory: a job a line, and a line for each in answer.

Jobs are stored as their lines arrive, and answered in their order. A client may send all before it
reads: answers that it does not take wait in a file. The first mistake or error ends the stream with
a line that is its problem document, with how many jobs were stored before it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from tempfile import SpooledTemporaryFile

import msgspec
from aiohttp import web

from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import ConnectionFailed, PinLaterError
from pinlaterd.http.bodies import EnqueuedAnswer, JobBody, Mistake
from pinlaterd.http.problems import Code, FailedLater, Problem, explained, invalid_body
from pinlaterd.http_port import part_of
from pinlaterd.model import Job

JSON_LINES = "application/x-ndjson"
_JOBS_A_CALL = 1_000
# What is written at once, and what the connection may still have to send before that: together
# less than what pauses it, for a client that reads nothing would be given up then.
_WRITTEN_BYTES, _UNSENT_BYTES = 16 * 1024, 32 * 1024
_END_SECONDS = 2.0  # in which streams have to end when the process stops
_IN_MEMORY_BYTES = 1024 * 1024  # of answers that the client has not taken

Store = Callable[[str, Sequence[Job]], Awaitable[Sequence[EnqueuedAnswer]]]
_decode = msgspec.json.Decoder(JobBody).decode
_encode_lines = msgspec.json.Encoder().encode_lines


class JobStreams:
    """Enqueues the lines of requests, of one event loop."""

    def __init__(self, store: Store, server: Callable[[], ServerSettings]) -> None:
        """`server` returns the active settings."""
        self._store = store
        self._server = server
        self._ending = asyncio.get_running_loop().create_future()
        self._running: set[asyncio.Future[None]] = set()

    async def end(self) -> None:
        """End all streams now, each with what it has stored, before the process stops to read."""
        self._ending.set_result(None)
        if self._running:
            await asyncio.wait(self._running, timeout=_END_SECONDS)

    async def enqueue(self, request: web.Request) -> web.StreamResponse:
        """Store the jobs of a body, line by line. Raises Problem if none was stored."""
        running = asyncio.get_running_loop().create_future()
        self._running.add(running)
        try:
            return await self._enqueue(request)
        finally:
            self._running.discard(running)
            running.set_result(None)

    async def _enqueue(self, request: web.Request) -> web.StreamResponse:
        answers, stored = _Answers(request), 0
        try:
            async for jobs, problem in self._parts(request):
                for at in range(0, len(jobs), _JOBS_A_CALL):
                    queue, part = request.match_info["queue"], jobs[at : at + _JOBS_A_CALL]
                    found = await self._store(queue, part)
                    stored += len(part)
                    await answers.send(_encode_lines(found))
                if problem is not None:
                    raise problem
        except ConnectionError:  # the client has gone: nobody is left to be answered
            return answers.response
        except Exception as error:  # noqa: BLE001 - the answer may have begun: it says what is wrong
            if stored and isinstance(error, ConnectionFailed | PinLaterError):
                told = f"this is about the jobs after the first {stored:,}, which were stored"
                error = FailedLater(error, told)
            problem = explained(request, error)
            problem.members["stored"] = stored
            if not stored:
                raise problem from None
            await answers.send(msgspec.json.encode(problem.document()) + b"\n")
        return await answers.finish()

    async def _parts(self, request: web.Request) -> AsyncIterator[tuple[list[Job], Problem | None]]:
        """Yield the jobs of the lines that have come; last, the problem of the line after them."""
        number, rest = 1, bytearray()
        while True:
            data = await self._read(request, len(rest))
            rest += data
            lines: list[bytes] = []
            if b"\n" in data or not data:
                lines = bytes(rest if data else rest + b"\n").split(b"\n")
                rest = bytearray(lines.pop())
            jobs, problem = _jobs_of(lines, number, self._server())
            yield jobs, problem
            if problem is not None or not data:
                return
            number += len(lines)
            if len(rest) > request.client_max_size:
                raise web.HTTPRequestEntityTooLarge(request.client_max_size, len(rest))

    async def _read(self, request: web.Request, held_bytes: int) -> bytes:
        """Read the next part of a body. Raises Problem once streams are to end."""
        reading = asyncio.ensure_future(part_of(request, held_bytes))
        try:
            await asyncio.wait((reading, self._ending), return_when=asyncio.FIRST_COMPLETED)
            if self._ending.done():
                text = "this process is restarted; send the lines behind the last answer again"
                unavailable = HTTPStatus.SERVICE_UNAVAILABLE
                raise Problem(unavailable, Code.UNAVAILABLE, text, headers={"Retry-After": "0"})
            return await reading
        finally:
            reading.cancel()


def _jobs_of(
    lines: Sequence[bytes], number: int, server: ServerSettings
) -> tuple[list[Job], Problem | None]:
    """Return the jobs of lines up to the first mistake, and its problem; the first line is the one
    with this number."""
    jobs: list[Job] = []
    for line in lines:
        try:
            line.decode()  # msgspec does not look into what it keeps raw
            if line.strip():
                jobs.append(_decode(line).job(server))
        except (Mistake, UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
            problem = invalid_body(error)
            problem.detail = f"line {number}: {problem.detail}"
            problem.members["line"] = number
            return jobs, problem
        number += 1
    return jobs, None


class _Answers:
    """The answer to one request, as far as its client takes it; the rest waits in a file."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(
            status=HTTPStatus.CREATED, headers={"Content-Type": JSON_LINES}
        )
        self._file = SpooledTemporaryFile(_IN_MEMORY_BYTES, dir=os.curdir)  # noqa: SIM115
        self._sent = self._size = 0  # bytes of the file

    async def send(self, lines: bytes) -> None:
        """Write lines to the client as far as it takes them now."""
        self._file.seek(self._size)
        self._size += self._file.write(lines)
        await self.response.prepare(self._request)
        transport = self._request.transport
        while transport is not None and transport.get_write_buffer_size() < _UNSENT_BYTES:
            if not await self._write_part():
                break

    async def finish(self) -> web.StreamResponse:
        """Write what is left, as fast as the client takes it."""
        await self.response.prepare(self._request)
        while await self._write_part():
            pass
        self._file.close()
        return self.response

    async def _write_part(self) -> bool:
        """Write the next part of what waits; return whether there was any."""
        self._file.seek(self._sent)
        part = self._file.read(_WRITTEN_BYTES)
        self._sent += len(part)
        if self._sent == self._size:
            self._file.seek(0)
            self._file.truncate()
            self._sent = self._size = 0
        if part:
            await self.response.write(part)
        return bool(part)
