"""The load generator: one process, non-blocking sockets, epoll, one call at a time a connection.

It starts and measures at agreed monotonic times, which are one scale for all processes of a
machine, so that whoever asked for the load can sample the servers' CPU over the same window.
"""

from __future__ import annotations

import gc
import heapq
import math
import select
import socket
import time
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Self, TypeVar

from benchmarks.frames import Script

T = TypeVar("T")

RECEIVE_BYTES = 1 << 18
DRAIN_SECONDS = 5.0  # for the answers still due when the window has ended
START_SECONDS = 0.5  # for a load generator to connect


@dataclass(frozen=True)
class Window:
    """Calls begin at `begin`; those answered between `measure_from` and `until` are counted."""

    begin: float
    measure_from: float
    until: float

    @classmethod
    def soon(cls, seconds: float, warm_up_seconds: float) -> Window:
        begin = time.monotonic() + START_SECONDS
        return cls(begin, begin + warm_up_seconds, begin + warm_up_seconds + seconds)


@dataclass(frozen=True)
class Load:
    """What one load generator does. `script` makes what one connection says; it is pickled."""

    port: int
    connections: int
    script: Callable[[], Script]
    window: Window
    calls_per_second: float = math.inf  # over all connections
    max_calls: int = 0  # stop after so many; 0: at the end of the window
    until_dry: bool = False  # stop at the first answer that carries no jobs


@dataclass
class Outcome:
    """What a load generator saw within its window."""

    seconds: float = 0.0
    calls: int = 0
    jobs: int = 0
    errors: int = 0
    ran_dry: bool = False
    cpu_seconds: float = 0.0  # the load generator's own
    latencies: array[float] = field(default_factory=lambda: array("d"))  # seconds

    @property
    def calls_per_second(self) -> float:
        return self.calls / self.seconds if self.seconds else 0.0

    @property
    def jobs_per_second(self) -> float:
        return self.jobs / self.seconds if self.seconds else 0.0

    @property
    def cpu_share(self) -> float:
        """Of one core."""
        return self.cpu_seconds / self.seconds if self.seconds else 0.0

    def percentile_ms(self, percent: float) -> float:
        return percentile(self.latencies, percent) * 1000.0


def percentile(values: Iterable[float], percent: float) -> float:
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(len(ordered) * percent / 100.0) - 1)]


class _Connection:
    """One socket with at most one call in flight."""

    __slots__ = ("due", "frame", "in_flight", "missing", "parts", "script", "sent_at", "socket")

    def __init__(self, port: int, script: Script) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10.0)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.script = script
        self.frame = script.first()  # the next call
        self.due = 0.0  # when the next call should go out, if the load is paced
        self.in_flight = False
        self.sent_at = 0.0  # when the call in flight was sent, or should have been
        self.parts: list[bytes] = []
        self.missing = 0

    def send(self) -> None:
        frame = self.frame
        self.in_flight = True
        sent = self.socket.send(frame)
        while sent < len(frame):
            select.select((), (self.socket,), ())
            sent += self.socket.send(frame[sent:])

    def receive(self) -> bytes | None:
        """A whole reply, with its length in front; None while some of it is missing."""
        data = self.socket.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the server closed a connection of the load generator")
        if not self.parts:
            self.missing = int.from_bytes(data[:4]) + 4
        self.missing -= len(data)
        if self.missing == 0 and not self.parts:
            self.in_flight = False
            return data
        self.parts.append(data)
        if self.missing > 0:
            return None
        reply = b"".join(self.parts)
        self.parts.clear()
        self.in_flight = False
        return reply


class _Generator:
    """Runs one Load."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._outcome = Outcome()
        self._poll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._waiting: list[tuple[float, int]] = []  # (when its next call is due, fd)
        self._interval = load.connections / load.calls_per_second
        self._answered = 0
        self._stopped = False

    def run(self) -> Outcome:
        load, window = self._load, self._load.window
        for number in range(load.connections):
            connection = _Connection(load.port, load.script())
            # Spread over the first interval, so that paced calls do not come in bursts.
            connection.due = window.begin + self._interval * number / load.connections
            fd = connection.socket.fileno()
            self._connections[fd] = connection
            self._poll.register(fd, select.EPOLLIN)
            heapq.heappush(self._waiting, (connection.due, fd))
        gc.collect()
        gc.disable()
        try:
            time.sleep(max(0.0, window.begin - time.monotonic()))
            self._talk(window.measure_from)
            self._outcome = outcome = Outcome()
            began, cpu_began = time.monotonic(), time.process_time()
            self._talk(window.until)
            outcome.cpu_seconds = time.process_time() - cpu_began
            outcome.seconds = time.monotonic() - began
            self._drain()
        finally:
            gc.enable()
        return outcome

    def _talk(self, until: float) -> None:
        """Send and receive up to the given time, or until there is nothing more to do."""
        while not self._stopped:
            now = time.monotonic()
            if now >= until:
                return
            while self._waiting and self._waiting[0][0] <= now:
                connection = self._connections[heapq.heappop(self._waiting)[1]]
                connection.sent_at = now
                connection.send()
            wake = min(until, self._waiting[0][0]) if self._waiting else until
            for fd, _ in self._poll.poll(max(0.0, wake - now)):
                connection = self._connections[fd]
                reply = connection.receive()
                if reply is not None:
                    self._answer(connection, reply)

    def _answer(self, connection: _Connection, reply: bytes) -> None:
        now = time.monotonic()
        script = connection.script
        self._count(now - connection.sent_at, script.jobs(reply))
        connection.frame = script.following(reply)
        if self._stopped:
            return
        if self._interval:
            # Counted from when it was due: what a slow answer holds up is part of its cost.
            connection.due += self._interval
            if connection.due > now:
                heapq.heappush(self._waiting, (connection.due, connection.socket.fileno()))
                return
            connection.sent_at = connection.due
        else:
            connection.sent_at = time.monotonic()
        connection.send()

    def _count(self, latency: float, jobs: int) -> None:
        outcome, load = self._outcome, self._load
        outcome.latencies.append(latency)
        outcome.calls += 1
        self._answered += 1
        if jobs > 0:
            outcome.jobs += jobs
        elif jobs < 0:
            outcome.errors += 1
        elif load.until_dry:
            outcome.ran_dry = self._stopped = True
        if self._answered == load.max_calls:
            self._stopped = True

    def _drain(self) -> None:
        """Take the answers still due: a dequeue that nobody reads would have to be undone."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while any(c.in_flight for c in self._connections.values()):
            for fd, _ in self._poll.poll(max(0.0, deadline - time.monotonic())):
                self._connections[fd].receive()
            if time.monotonic() > deadline:
                break
        for connection in self._connections.values():
            connection.socket.close()
        self._poll.close()


def run(load: Load) -> Outcome:
    return _Generator(load).run()


class Generators:
    """Load generators, each a process of its own, that end with this object."""

    def __init__(self, processes: int) -> None:
        self._pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
        # Starting takes longer than a load is told of in advance: start them now.
        list(self._pool.map(time.sleep, [START_SECONDS] * processes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run something else in such a process."""
        return self._pool.submit(work)

    def start(self, load: Load) -> Future[Outcome]:
        return self._pool.submit(run, load)
