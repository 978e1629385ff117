"""The searcher: a process beside its shard for reads of unbounded cost (count, scan, find).

A thread would share the interpreter lock with the loop, which gives it up at every row. The
searcher is started at the first search, has a read connection of its own and a lower scheduling
priority, and takes one search after the other. It ends when the shard's end of its socket closes,
even in the middle of a search, so that a killed shard leaves none behind; and when it was idle for
a minute. Requests and results are length-prefixed pickles between these two processes of ours.

    shard -> searcher    the engine's SearcherFactory; then one SearchCall at a time
    searcher -> shard    its result, or the exception that it raised
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from pinlaterd.clock import Clock
from pinlaterd.engines.base import Searcher, SearcherFactory
from pinlaterd.errors import Overloaded, PinLaterError, StorageError
from pinlaterd.lifecycle import run_when_idle, set_title

log = logging.getLogger(__name__)

MOST_WAITING = 64
_IDLE_SECONDS = 60.0
# How long past its deadline a search may go on before its process is taken for stuck.
_GRACE_SECONDS = 5.0
_SEND_SECONDS = 5.0
_READ_BYTES = 1 << 18
# The shard has made its deployment the current folder; ours may not be installed.
_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[2])
_LENGTH = struct.Struct(">I")


class SearchCall(NamedTuple):
    """A call of one method of Searcher. Over several priorities, counts add up."""

    method: str  # count, scan or find
    arguments: Mapping[str, Any]
    priorities: Sequence[int]
    deadline: float


# Gets the result, or the exception instead of one.
SearchDone = Callable[[object], None]


class _Waiting(NamedTuple):
    call: SearchCall
    on_done: SearchDone
    tried: bool = False


class SearchClient:
    """The shard's end. `receive` has to be called when `fileno()` is readable, `tick` once a
    second; neither blocks."""

    def __init__(self, factory: SearcherFactory, clock: Clock, title: str) -> None:
        self._factory = factory
        self._clock = clock
        self._title = title
        self._waiting: deque[_Waiting] = deque()
        self._current: _Waiting | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._received = bytearray()
        self._last_used = 0.0

    def fileno(self) -> int | None:
        """What to poll; None while no searcher runs."""
        return None if self._socket is None else self._socket.fileno()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def submit(self, call: SearchCall, on_done: SearchDone) -> None:
        if len(self._waiting) >= MOST_WAITING:
            on_done(Overloaded(f"{MOST_WAITING} searches wait already"))
            return
        self._waiting.append(_Waiting(call, on_done))
        self._next()

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
            self._take_result()

    def tick(self) -> None:
        """End a searcher that has nothing to do, or that is stuck."""
        now = self._clock.monotonic()
        if self._current is not None:
            if now > self._current.call.deadline + _GRACE_SECONDS:
                log.warning("the searcher is stuck; ending it")
                current, self._current = self._current, None
                self._end()
                current.on_done(TimeoutError())
                self._next()
        elif self._process is not None and now - self._last_used > _IDLE_SECONDS:
            self._end()

    def close(self) -> None:
        """End the searcher; searches in hand fail."""
        given_up = [waiting for waiting in (self._current, *self._waiting) if waiting is not None]
        self._current = None
        self._waiting.clear()
        self._end()
        for waiting in given_up:
            waiting.on_done(StorageError("the shard is closing its store"))

    # --- one search after the other ----------------------------------------------------------

    def _next(self) -> None:
        while self._current is None and self._waiting:
            waiting = self._waiting.popleft()
            if waiting.call.deadline <= self._clock.monotonic():
                waiting.on_done(TimeoutError())
                continue
            self._current = waiting
            try:
                self._send(waiting.call)
            except OSError as error:
                log.warning("the searcher can't be used: %s", error)
                self._lost()
                return

    def _send(self, call: SearchCall) -> None:
        sock = self._socket or self._start()
        sock.settimeout(_SEND_SECONDS)
        sock.sendall(_framed(tuple(call)))
        sock.setblocking(False)  # for `receive`: a socket with a time-out waits, whatever the flags
        self._last_used = self._clock.monotonic()

    def _take_result(self) -> None:
        if len(self._received) < _LENGTH.size:
            return
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end or self._current is None:
            return
        result = pickle.loads(memoryview(self._received)[_LENGTH.size : end])  # noqa: S301
        self._received.clear()  # one search at a time: nothing follows its result
        current, self._current = self._current, None
        self._last_used = self._clock.monotonic()
        current.on_done(result)
        self._next()

    def _lost(self) -> None:
        """The searcher died: its search is tried once more, by another."""
        self._end()
        current, self._current = self._current, None
        if current is not None:
            if current.tried:
                current.on_done(StorageError("the searcher ended in the middle of this search"))
            else:
                self._waiting.appendleft(current._replace(tried=True))
        self._next()

    # --- the process -------------------------------------------------------------------------

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pinlaterd.shard.search", self._title],
                env=os.environ | {"PYTHONPATH": _PACKAGE_FOLDER},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours
        self._received.clear()
        ours.settimeout(_SEND_SECONDS)
        ours.sendall(_framed(self._factory))
        return ours

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            # It only reads: nothing is lost, and nothing has to be waited for.
            self._process.kill()
            self._process.wait()
            self._process = None


# --- the process ------------------------------------------------------------------------------


def _framed(message: object) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def _receive(sock: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Ends the process when the shard has gone."""
    data = bytearray()
    while len(data) < size:
        try:
            part = sock.recv(size - len(data))
        except OSError:
            part = b""
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def _read_requests(sock: socket.socket, requests: SimpleQueue[Any]) -> None:
    """In a thread of its own, so that the end of the shard is noticed at once."""
    while True:
        (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
        requests.put(pickle.loads(_receive(sock, length)))  # noqa: S301


def _carry_out(searcher: Searcher, call: SearchCall) -> object:
    arguments = {**call.arguments, "deadline": call.deadline}
    if call.method == "scan":
        return searcher.scan(**arguments, priorities=call.priorities)
    if call.method == "find":
        (priority,) = call.priorities
        return searcher.find(**arguments, priority=priority)
    return sum(searcher.count(**arguments, priority=priority) for priority in call.priorities)


def _serve(sock: socket.socket) -> None:
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read_requests, args=(sock, requests), daemon=True).start()
    factory: SearcherFactory = requests.get()
    searcher: Searcher | None = None
    while True:
        call = SearchCall(*requests.get())
        result: object
        try:
            searcher = searcher or factory()
            result = _carry_out(searcher, call)
        except TimeoutError as error:
            result = error
        except PinLaterError as error:
            result = StorageError(error.message)  # which survives pickling as it is
        sock.sendall(_framed(result))


def main() -> None:
    """`python -m pinlaterd.shard.search TITLE`, with a socket to the shard as standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the shard ends us
    run_when_idle()
    set_title(f"{sys.argv[1]} searcher")
    sock = socket.socket(fileno=os.dup(0))
    try:
        _serve(sock)
    except OSError:
        sys.exit(0)  # the shard has gone


if __name__ == "__main__":
    main()
