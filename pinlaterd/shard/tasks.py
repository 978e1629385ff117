"""Work that is done in slices between commits, so that no call waits long behind it.

A task is a generator: it yields None after each slice (one short commit, or one short read), and
a SearchCall where it needs the searcher, whose result it is then sent. Tasks take turns, and while
calls wait, slices leave them most of the time.

The searcher (see `searcher`) is a process in which all searches run at the same time, in turns. It
is started at the first one, ended when it was idle for a minute, and replaced when it dies: its
searches are begun once more. What the two send each other are length-prefixed pickles, of classes
that the searcher's own module must not define: it is its process's `__main__`.

    shard -> searcher    the engine's SearcherFactory; then (number, SearchCall), and EndSearch
    searcher -> shard    (number, the result, or the exception that it raised)
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pinlaterd.clock import Clock
from pinlaterd.engines.base import ScanAfter, Search, SearcherFactory, StoredJob
from pinlaterd.errors import Overloaded, StorageError

log = logging.getLogger(__name__)

MOST_SEARCHES = 64
# So that no source takes all places.
MOST_OF_A_SOURCE = MOST_SEARCHES // 2
_IDLE_SECONDS = 60.0
# How long past its deadline a search may go on before its process is taken for stuck.
_GRACE_SECONDS = 5.0
_SEND_SECONDS = 5.0
_READ_BYTES = 1 << 18
# The shard has made its deployment the current folder; ours may not be installed.
_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[2])

_LENGTH = struct.Struct(">I")


class SearchCall(NamedTuple):
    """A call of one method of Searcher."""

    method: Literal["count", "scan", "find"]
    search: Search
    source: str  # who asks for it


# A task: what it yields, is sent, and returns.
Steps = Generator[SearchCall | None, Any, Any]


class ScanPart(NamedTuple):
    """The result of a scan; `more`: whether there may be more than fit, or were found in time.
    `place`: up to where all are known, if that is further than the last of them."""

    jobs: Sequence[StoredJob]
    more: bool
    place: ScanAfter | None = None
    looked_at: int = 0


class EndSearch(NamedTuple):
    """Nobody waits any more for the search of that number."""

    number: int


def framed(message: object) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def take_message(received: bytearray) -> Any:
    """Take the first whole message out of `received`; None if there is none."""
    if len(received) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
    if len(received) < end:
        return None
    message = pickle.loads(bytes(received[_LENGTH.size : end]))  # noqa: S301
    del received[:end]
    return message


class _Running(NamedTuple):
    call: SearchCall
    task: Steps
    tried: bool = False


class SearchClient:
    """The shard's end. `receive` has to be called when `fileno` is readable, `tick` once a
    second; neither blocks. `deliver` gets each task and its result, or the exception instead."""

    def __init__(
        self,
        factory: Callable[[], SearcherFactory],
        clock: Clock,
        title: str,
        deliver: Callable[[Steps, object], None],
    ) -> None:
        self._factory = factory
        self._clock = clock
        self._title = title
        self._deliver = deliver
        self._numbers = count(1)
        self._running: dict[int, _Running] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.fileno: int | None = None  # what to poll; None while no searcher runs
        self._received = bytearray()
        self._last_used = 0.0

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, call: SearchCall, task: Steps) -> None:
        of_source = sum(running.call.source == call.source for running in self._running.values())
        if len(self._running) >= MOST_SEARCHES:
            self._deliver(task, Overloaded(f"{MOST_SEARCHES} searches run already"))
        elif of_source >= MOST_OF_A_SOURCE:
            reason = f"{MOST_OF_A_SOURCE} searches of {call.source!r} run already"
            self._deliver(task, Overloaded(reason))
        else:
            self._begin(next(self._numbers), _Running(call, task))

    def end(self, task: Steps) -> bool:
        """End a search for which nobody waits; return False if the task waits for none."""
        for number, running in self._running.items():
            if running.task is task:
                del self._running[number]
                if self._socket is not None:
                    self._send(EndSearch(number))
                return True
        return False

    def receive(self) -> None:
        """Take what the searcher has sent."""
        while self._socket is not None:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            self._received += data
            while (message := take_message(self._received)) is not None:
                number, result = message
                running = self._running.pop(number, None)
                self._last_used = self._clock.monotonic()
                if running is not None:
                    self._deliver(running.task, result)

    def tick(self) -> None:
        """End a searcher that has nothing to do, or that is stuck."""
        now = self._clock.monotonic()
        stuck = [
            number
            for number, running in self._running.items()
            if now > running.call.search.deadline + _GRACE_SECONDS
        ]
        if stuck:
            log.warning("the searcher is stuck; ending it")
            late = [self._running.pop(number) for number in stuck]
            self._lost()
            for running in late:
                self._deliver(running.task, TimeoutError())
        elif not self._running and now - self._last_used > _IDLE_SECONDS:
            self._end()

    def close(self) -> list[Steps]:
        """End the searcher; returns the tasks that wait for it."""
        waiting = [running.task for running in self._running.values()]
        self._running.clear()
        self._end()
        return waiting

    def _begin(self, number: int, running: _Running) -> None:
        self._running[number] = running
        self._send((number, running.call))

    def _send(self, message: object) -> None:
        try:
            sock = self._socket or self._start()
            sock.settimeout(_SEND_SECONDS)
            sock.sendall(framed(message))
            sock.setblocking(False)  # for `receive`: a socket with a time-out waits
            self._last_used = self._clock.monotonic()
        except OSError as error:
            log.warning("the searcher can't be used: %s", error)
            self._lost()

    def _lost(self) -> None:
        """Try the searches of a searcher that died once more, by another."""
        self._end()
        lost, self._running = self._running, {}
        for number, running in lost.items():
            if running.tried:
                error = StorageError("the searcher ended in the middle of this search")
                self._deliver(running.task, error)
            else:
                self._begin(number, running._replace(tried=True))

    # --- the process -------------------------------------------------------------------------

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pinlaterd.shard.searcher", self._title],
                env=os.environ | {"PYTHONPATH": _PACKAGE_FOLDER},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket, self.fileno = ours, ours.fileno()
        self._received.clear()
        ours.settimeout(_SEND_SECONDS)
        ours.sendall(framed(self._factory()))
        return ours

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = self.fileno = None
        if self._process is not None:
            # It only reads: nothing is lost, and nothing has to be waited for.
            self._process.kill()
            self._process.wait()
            self._process = None


# --- tasks ----------------------------------------------------------------------------------

# More is more than would be done within the deadlines of calls.
MOST_TASKS = 1_000
# A slice about as long as a commit of a full batch is not felt by those who wait for that.
_SLICE_SECONDS = 0.002
_FIRST_SLICE_JOBS = 50
# While calls keep coming, slices take one part in so many of the time.
_SHARE_WHEN_BUSY = 4


class ShardStops(Exception):
    """Thrown into a task where it has yielded: the shard ends in order; the task's last word."""


class Pace:
    """The number of jobs that a slice may change, so that it takes about `_SLICE_SECONDS`. Wrap
    each such change in `with`: its time tells how large the next one should be."""

    def __init__(self, clock: Clock, most_jobs: int) -> None:
        self._clock = clock
        self._most_jobs = most_jobs
        self._started = 0.0
        self.jobs = min(_FIRST_SLICE_JOBS, most_jobs)

    def __enter__(self) -> None:
        self._started = self._clock.monotonic()

    def __exit__(self, *_error: object) -> None:
        seconds = self._clock.monotonic() - self._started
        if seconds > _SLICE_SECONDS:
            # Not to the bottom: what a slice costs beside its jobs stays, however few they are.
            self.jobs = max(min(_FIRST_SLICE_JOBS, self._most_jobs), self.jobs // 2)
        elif seconds < _SLICE_SECONDS / 3:
            self.jobs = min(self._most_jobs, self.jobs * 2)


class Tasks:
    """The tasks in flight, in turn."""

    def __init__(self, clock: Clock, factory: Callable[[], SearcherFactory], title: str) -> None:
        self.searches = SearchClient(factory, clock, title, self._resume)
        self._clock = clock
        self.ready: deque[tuple[Steps, Any]] = deque()  # to go on, each with what it is sent
        self._not_before = 0.0  # monotonic seconds; holds while calls wait

    def __len__(self) -> int:
        return len(self.ready) + len(self.searches)

    def check_room(self, shard: str) -> None:
        """Raises Overloaded if no more calls may be answered in slices."""
        if len(self) >= MOST_TASKS:
            raise Overloaded(f"shard {shard} has {MOST_TASKS} such calls in flight")

    def start(self, steps: Steps, *, at_once: bool = False) -> None:
        """Take up `steps`; `at_once`: its first slice is small and done now."""
        if at_once:
            self._step(steps, None)
        else:
            self.ready.append((steps, None))

    def _resume(self, steps: Steps, result: object) -> None:
        """Resume a task with the result of its search."""
        self.ready.append((steps, result))

    def run_slice(self, *, calls_wait: bool) -> None:
        """Run a slice of the task whose turn it is, unless those who wait come first.

        Raises what a task raised; that task is over."""
        started = self._clock.monotonic()
        if not self.ready or (calls_wait and started < self._not_before):
            return
        self._step(*self.ready.popleft())
        took = self._clock.monotonic() - started
        self._not_before = started + took * _SHARE_WHEN_BUSY

    def end_search(self, steps: Steps) -> None:
        """End a task that waits for its search: nobody waits for its result."""
        if self.searches.end(steps):
            steps.close()

    def abandon(self) -> None:
        """End all tasks, since their store has to be opened again; each answers as it can."""
        for steps in self._take_all():
            steps.close()

    def stop(self) -> None:
        """End all tasks with ShardStops: the shard ends in order."""
        for steps in self._take_all():
            with contextlib.suppress(ShardStops, StopIteration):
                steps.throw(ShardStops())

    def _take_all(self) -> list[Steps]:
        taken = [steps for steps, _ in self.ready] + self.searches.close()
        self.ready.clear()
        return taken

    def _step(self, steps: Steps, value: Any) -> None:
        try:
            wanted = steps.throw(value) if isinstance(value, Exception) else steps.send(value)
        except StopIteration:
            return
        if wanted is None:
            self.ready.append((steps, None))
        else:
            self.searches.begin(wanted, steps)
