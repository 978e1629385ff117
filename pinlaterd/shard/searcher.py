"""The searcher: a process beside its shard for reads of unbounded cost (count, scan, find).

A thread of the shard would share the interpreter lock with its loop, which gives it up at every
row. Here each search has a thread and a Searcher of its own, but one works at a time: between
slices it passes the turn on. Turns go round over the sources that search, and within a source over
its searches, so that a short search ends soon, however many others run, and for whom.

A scan that is not finished at its deadline is answered with what was found so far and then paused.
The call that asks for what follows resumes it. A paused scan is ended after `_KEEP_SECONDS`, or
when too many are paused. The process ends when the shard's end of its socket closes.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate

from pinlaterd.engines.base import ScanAfter, Search, Searcher, SearcherFactory, StoredJob
from pinlaterd.errors import InvalidRequest, PinLaterError, StorageError
from pinlaterd.lifecycle import begin_process, run_in_background
from pinlaterd.model import SCAN_START
from pinlaterd.shard.tasks import (
    MOST_SEARCHES,
    EndSearch,
    ScanPart,
    SearchCall,
    framed,
    take_message,
)
from pinlaterd.wire.envelope import SCAN_BYTES

_MOST_PAUSED = 16
_LONG_MATCHES = 64
_KEEP_SECONDS = 60.0
# After so long a search passes its turn on; slices are shorter than that, most of the time.
_TURN_SECONDS = 0.01
# It works and rests in turn. Where searches keep every core busy, calls take several times as long
# at whatever priority, since what wakes up finds no idle core. And routers and shards are
# SCHED_BATCH: when one wakes up, the kernel lets a search go on until its next tick (4 ms) or rest.
# Several of them wake up for a call, each after the other, so it works for less than it rests.
_WORK_SECONDS, _REST_SECONDS = 0.0001, 0.0003
# Where others took the processor for long it works for a longer while, too: each rest may count
# against it (Linux 6.18), and it has to end on a busy machine.
_BUSY_SHARE = 1 / 16


# --- turns --------------------------------------------------------------------------------------


class _Turns:
    """The turns of searches: the first of the first source works; others wait for their events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: OrderedDict[str, deque[threading.Event]] = OrderedDict()
        self._since = 0.0  # when the turn began

    def enter(self, source: str, turn: threading.Event) -> None:
        """Wait for the turn."""
        turn.clear()
        with self._lock:
            is_first = not self._sources
            self._sources.setdefault(source, deque()).append(turn)
            if is_first:
                self._give_turn()
        turn.wait()

    def pass_on(self, turn: threading.Event) -> None:
        """Pass the turn on once its holder, who calls, has had it long enough; return when it comes
        back."""
        if time.monotonic() - self._since < _TURN_SECONDS:
            return
        turn.clear()
        with self._lock:
            self._remove_first().append(turn)
            self._give_turn()
        turn.wait()

    def leave(self) -> None:
        """Leave the turn. To be called by its holder."""
        with self._lock:
            self._remove_first()
            self._give_turn()

    def _remove_first(self) -> deque[threading.Event]:
        """Remove and return the turns of the first source, which goes to the end."""
        source, turns = self._sources.popitem(last=False)
        turns.popleft()
        self._sources[source] = turns
        return turns

    def _give_turn(self) -> None:
        for source in [source for source, turns in self._sources.items() if not turns]:
            del self._sources[source]
        if self._sources:
            self._since = time.monotonic()
            next(iter(self._sources.values()))[0].set()


# --- searches -----------------------------------------------------------------------------------


class _SearchEnded(Exception):
    """Nobody waits for it any more."""


class _Search:
    """One search, in a thread of its own; a scan may answer several calls, one after the other."""

    def __init__(self, number: int, call: SearchCall, process: _Process) -> None:
        self.number = number
        self.call = call
        self.ended = False
        self.resumed = threading.Event()
        self._process = process
        self.turn = threading.Event()
        self._searcher: Searcher | None = None
        self._after = call.search.after  # of the call in progress
        self._told_looked_at = 0  # in the answers to the calls before it

    def run(self) -> None:
        """Search until there is a result, it is given up, or fails."""
        turns = self._process.turns
        turns.enter(self.call.source, self.turn)
        try:
            result: object = self._carry_out()
        except _SearchEnded:
            return
        except TimeoutError as error:
            result = error
        except InvalidRequest as error:
            result = PinLaterError(error.message)  # which survives pickling as it is
        except PinLaterError as error:
            kind = PinLaterError if isinstance(error, InvalidRequest) else StorageError
            result = kind(error.message)  # which survives pickling as it is
        finally:
            turns.leave()
            self._process.forget(self)
        self._process.send(self.number, result)

    def _carry_out(self) -> object:
        searcher = self._searcher = self._process.searcher(self)
        call = self.call
        if call.method == "scan":
            # At its own deadline it is paused instead.
            deadline = call.search.deadline + _KEEP_SECONDS * _MOST_PAUSED
            searcher.scan(call.search._replace(deadline=deadline))
            return self._part(paused=False)
        return getattr(searcher, call.method)(call.search)

    def between_slices(self) -> None:
        if self.ended:
            raise _SearchEnded
        if self.call.method == "scan" and time.monotonic() > self.call.search.deadline:
            self._pause()
        self._process.turns.pass_on(self.turn)

    def _pause(self) -> None:
        """Answer with what is known, and wait for the call that asks for more."""
        process, number, part = self._process, self.number, self._part(paused=True)
        process.pause(self)  # from here on a call may resume it, under another number
        process.turns.leave()
        process.send(number, part)
        self.resumed.wait(_KEEP_SECONDS)
        kept = process.unpause(self)
        process.turns.enter(self.call.source, self.turn)
        if not kept or self.ended:
            raise _SearchEnded

    def _part(self, *, paused: bool) -> ScanPart:
        assert self._searcher is not None
        found = self._searcher.found
        jobs = [job for job in found if self.call.search.order_of(job) > _place_of(self._after)]
        whole = len(jobs)
        jobs = _within_answer(jobs)
        # What has reached the limit it began with may have left out some that this call asks for.
        more = paused or len(jobs) < whole or len(found) >= self.call.search.limit
        looked_at = self._searcher.looked_at - self._told_looked_at
        self._told_looked_at = self._searcher.looked_at
        place = self._searcher.place if len(jobs) == whole else None
        return ScanPart(jobs, more, place, looked_at)

    def resumes(self, call: SearchCall) -> bool:
        """Tell whether `call` asks for what this one found, or will find."""
        asked, mine = call.search, self.call.search
        assert self._searcher is not None
        found, place = self._searcher.found, self._searcher.place
        last = mine.order_of(found[-1]) if found else _place_of(mine.after)
        if place is not None:
            last = max(last, _place_of(place))
        return (
            asked.after is not None
            and call.source == self.call.source
            and _what_it_looks_for(asked) == _what_it_looks_for(mine)
            and _place_of(mine.after) <= _place_of(asked.after) <= last
        )

    def resume(self, number: int, call: SearchCall) -> None:
        self.number, self._after = number, call.search.after
        search = self.call.search._replace(deadline=call.search.deadline)
        self.call = self.call._replace(search=search)
        self.resumed.set()


def _what_it_looks_for(search: Search) -> Search:
    return search._replace(after=None, now_ms=0, limit=0, deadline=0.0)


def _within_answer(jobs: list[StoredJob]) -> list[StoredJob]:
    """Return the first jobs, one at least: statuses may be long, and a router holds what all shards
    found several times while it merges it."""
    sizes = accumulate(len(job.custom_status.encode()) for job in jobs)
    return jobs[: max(1, bisect_right(list(sizes), SCAN_BYTES))]


def _place_of(after: ScanAfter | None) -> tuple[int, int, int]:
    """Return the place after which a scan continues; None is the start, as SCAN_START."""
    return (-SCAN_START.time_ms, 0, 0) if after is None else (-after.time_ms, *after[1:])


# --- the process --------------------------------------------------------------------------------


class _Process:
    """The searches of this process, by number."""

    def __init__(self, sock: socket.socket, factory: SearcherFactory) -> None:
        self.turns = _Turns()
        self._socket = sock
        self._factory = factory
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # its own: what reads the socket never waits for it
        self._running: dict[int, _Search] = {}
        self._paused: list[_Search] = []  # the longest paused first
        self._of_thread = threading.local()
        self._rest_at = 0.0
        self._long_matches = [threading.Lock() for _ in range(_LONG_MATCHES)]  # by source
        self._threads = ThreadPoolExecutor(MOST_SEARCHES + _MOST_PAUSED + 1)

    def begin(self, number: int, call: SearchCall) -> None:
        with self._lock:
            for search in self._paused:
                if call.method == "scan" and not search.resumed.is_set() and search.resumes(call):
                    search.resume(number, call)
                    self._running[number] = search
                    return
            search = self._running[number] = _Search(number, call, self)
        self._threads.submit(search.run)

    def end(self, number: int) -> None:
        with self._lock:
            search = self._running.get(number)
            if search is not None:
                search.ended = True

    def searcher(self, search: _Search) -> Searcher:
        """Return the Searcher of this thread, which lasts longer than a search."""
        own = self._of_thread
        own.search = search
        if not hasattr(own, "searcher"):
            own.searcher = self._factory(self._between_slices)
            own.searcher.aside = self._aside
        searcher: Searcher = own.searcher
        return searcher

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Let others have turns during a long match; a source has one such match at a time."""
        search: _Search = self._of_thread.search
        self.turns.leave()
        try:
            with self._long_matches[hash(search.call.source) % _LONG_MATCHES]:
                yield
        finally:
            self.turns.enter(search.call.source, search.turn)

    def _between_slices(self) -> None:
        if (began := time.monotonic()) >= self._rest_at:
            select.select((), (), (), _REST_SECONDS)  # faketime makes time.sleep fail
            now = time.monotonic()
            self._rest_at = now + max(_WORK_SECONDS, (now - began) * _BUSY_SHARE)
        self._of_thread.search.between_slices()

    def forget(self, search: _Search) -> None:
        with self._lock:
            self._running.pop(search.number, None)

    def pause(self, search: _Search) -> None:
        """Raises _SearchEnded if it was ended meanwhile."""
        with self._lock:
            if search.ended:
                raise _SearchEnded
            self._running.pop(search.number, None)
            search.resumed.clear()
            self._paused.append(search)
            waiting = [paused for paused in self._paused if not paused.resumed.is_set()]
            if len(waiting) > _MOST_PAUSED:
                waiting[0].ended = True
                waiting[0].resumed.set()

    def unpause(self, search: _Search) -> bool:
        """Resume a search if it is paused; return whether it was."""
        with self._lock:
            self._paused.remove(search)
            return search.resumed.is_set()

    def send(self, number: int, result: object) -> None:
        data = framed((number, result))
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError:
            os._exit(0)  # the shard has gone


def main() -> None:
    """Run `python -m pinlaterd.shard.searcher TITLE`; standard input is a socket to the shard."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the shard ends us
    run_in_background()
    begin_process(f"{sys.argv[1]} searcher")
    sock = socket.socket(fileno=os.dup(0))
    received = bytearray()
    process: _Process | None = None
    while True:
        try:
            data = sock.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            os._exit(0)  # the shard has gone; searches end in their midst
        received += data
        while (message := take_message(received)) is not None:
            if process is None:
                process = _Process(sock, message)
            elif isinstance(message, EndSearch):
                process.end(message.number)
            else:
                process.begin(*message)


if __name__ == "__main__":
    main()
