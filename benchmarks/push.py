"""What pushing costs: jobs/s through one process `push`, to a downstream that answers at once.

The downstream reads as little of HTTP as it needs, so that what is measured is the service. It
reports how jobs ended over Thrift, all that came within some milliseconds in one call.
"""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial
from typing import cast

import msgspec
import uvloop

from benchmarks.deployment import Deployment
from benchmarks.load import Outcome, Window
from benchmarks.report import Case, Measurement
from benchmarks.sections import Bench, sleep_until
from pinlaterd.client import AckInfo, AsyncClient
from tests.deployment import unused_port

SECTION = "push"
CONCURRENCY = 64
JOBS_PER_SECOND_AT_MOST = 12_000
PUSHED = Case(SECTION, "small jobs", CONCURRENCY, "one process, callbacks over Thrift")
QUEUE = "pushed"

_ACCEPTED = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"
_CALLBACK_SECONDS = 0.001
_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)


def push(bench: Bench, run: int) -> None:
    there = unused_port()
    url = f"http://127.0.0.1:{there}/jobs"
    queues = {QUEUE: {"push": {"url": url, "max_in_progress": CONCURRENCY}, "paused": True}}
    settings = {"push_hosts": "127.0.0.1"}
    with Deployment(bench.folder, shards=1, settings=settings, queues=queues) as service:
        bench.fill(service, QUEUE, round(JOBS_PER_SECOND_AT_MOST * bench.busy_seconds))
        window = bench.window()
        future = bench.generators.call(partial(serve, there, service.port, QUEUE, window))
        sleep_until(window.begin)
        service.write("queues", {QUEUE: {**queues[QUEUE], "paused": False}})
        sleep_until(window.measure_from)
        before = service.usage()
        taken = future.result()
        bench.report.add(Measurement.of(PUSHED, run, taken, before, service.usage()))


class _Job(msgspec.Struct):
    descriptor: str
    claim: str


class _Connection(asyncio.Protocol):
    def __init__(self, downstream: _Downstream) -> None:
        self._downstream = downstream
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (at := self._received.find(_HEAD_END)) >= 0:
            length = _LENGTH.search(self._received, 0, at)
            assert length is not None, "aiohttp says how long a body is"
            begin = at + len(_HEAD_END)
            end = begin + int(length[1])
            if len(self._received) < end:
                return
            body, self._received = self._received[begin:end], self._received[end:]
            self._transport.write(_ACCEPTED)
            self._downstream.take(msgspec.json.decode(body, type=_Job))


class _Downstream:
    def __init__(self) -> None:
        self.reported = 0
        self._taken: list[AckInfo] = []

    def take(self, job: _Job) -> None:
        self._taken.append(AckInfo(job.descriptor, claim_descriptor=job.claim))

    async def report(self, port: int, queue: str) -> None:
        """Call back for what was taken, until cancelled."""
        async with AsyncClient(port=port, source="bench:downstream") as client:
            while True:
                await asyncio.sleep(_CALLBACK_SECONDS)
                taken, self._taken = self._taken, []
                if taken:
                    await client.ack(queue, succeeded=taken)
                    self.reported += len(taken)


def serve(port: int, service_port: int, queue: str, window: Window) -> Outcome:
    """Be the downstream in this process, and count the jobs that ended within the window."""

    async def served() -> Outcome:
        downstream = _Downstream()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(downstream), "127.0.0.1", port)
        reporting = asyncio.create_task(downstream.report(service_port, queue))
        await asyncio.sleep(window.measure_from - time.monotonic())
        began, before, cpu = time.monotonic(), downstream.reported, time.process_time()
        await asyncio.sleep(window.until - time.monotonic())
        jobs = downstream.reported - before
        seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu
        reporting.cancel()
        server.close()
        return Outcome(seconds, jobs, jobs, cpu_seconds=cpu_seconds)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(served())
