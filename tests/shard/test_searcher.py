"""Pauses, ends and answers within the searcher's process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from pinlaterd.engines.base import ScanAfter, Search, SearcherFactory, StoredJob
from pinlaterd.model import JobState
from pinlaterd.shard.searcher import _MOST_PAUSED, _Process, _Search
from pinlaterd.shard.tasks import ScanPart, SearchCall, take_message
from tests.conftest import WaitUntil

NO_TIME, ALL_TIME = 0.0, float("inf")
START = ScanAfter((1 << 63) - 1, 0, 0)  # where a first answer without jobs says to go on
ANSWER_SECONDS = 60.0


class Scans:
    """Of all threads: each finds nothing, and goes on until it is told to end."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = threading.Event()
        self.on_found: Callable[[], None] = lambda: None  # called once

    def searcher(self, between_slices: Callable[[], None]) -> _Scanner:
        return _Scanner(self, between_slices)


class _Scanner:
    looked_at, place = 0, None

    def __init__(self, scans: Scans, between_slices: Callable[[], None]) -> None:
        self._scans = scans
        self._between_slices = between_slices

    @property
    def found(self) -> list[StoredJob]:
        on_found, self._scans.on_found = self._scans.on_found, lambda: None
        on_found()
        return []

    def scan(self, _search: Search) -> None:
        self._scans.begun += 1
        while not self._scans.may_end.wait(0.001):
            self._between_slices()


@pytest.fixture
def scans() -> Scans:
    return Scans()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def shard(ends: tuple[socket.socket, socket.socket]) -> socket.socket:
    ends[0].settimeout(ANSWER_SECONDS)
    return ends[0]


@pytest.fixture
def process(ends: tuple[socket.socket, socket.socket], scans: Scans) -> Iterator[_Process]:
    process = _Process(ends[1], cast("SearcherFactory", scans.searcher))
    yield process
    scans.may_end.set()
    for search in list(process._paused):
        search.resumed.set()
    process._threads.shutdown()


def scan(after: ScanAfter | None, deadline: float, queue: str = "mail") -> SearchCall:
    search = Search(queue, JobState.PENDING, limit=10, after=after, deadline=deadline)
    return SearchCall("scan", search, "web:h1")


def answer(shard: socket.socket) -> Any:
    received = bytearray()
    while (message := take_message(received)) is None:
        received += shard.recv(1 << 18)
    return message


def test_a_scan_whose_first_answer_is_empty_goes_on_where_it_was(
    process: _Process, shard: socket.socket, scans: Scans
):
    process.begin(1, scan(None, NO_TIME))
    assert answer(shard) == (1, ScanPart([], more=True))

    process.begin(2, scan(START, ALL_TIME))
    scans.may_end.set()

    assert answer(shard) == (2, ScanPart([], more=False))
    assert scans.begun == 1


def test_a_scan_that_is_ended_as_it_pauses_is_not_resumed(
    process: _Process, shard: socket.socket, scans: Scans, wait_until: WaitUntil
):
    scans.on_found = lambda: process.end(1)
    process.begin(1, scan(START, NO_TIME))
    wait_until(lambda: not process._running)

    process.begin(2, scan(START, NO_TIME))

    assert answer(shard)[0] == 2


def test_a_scan_that_is_resumed_is_not_ended_to_make_room(process: _Process, scans: Scans):
    paused = []
    for number in range(_MOST_PAUSED + 2):
        search = _Search(number, scan(START, NO_TIME, queue=f"q{number}"), process)
        search._searcher = process.searcher(search)
        paused.append(search)
    for search in paused[:-2]:
        process.pause(search)
    process.begin(100, scan(START, ALL_TIME, queue="q0"))  # its thread has not noticed yet

    for search in paused[-2:]:
        process.pause(search)

    assert paused[0].number == 100
    assert [search.ended for search in paused] == [False, True] + [False] * _MOST_PAUSED


def test_a_large_answer_that_is_not_read_holds_up_no_call(process: _Process, shard: socket.socket):
    large = b"x" * (4 << 20)  # more than a socket takes
    with ThreadPoolExecutor(2) as threads:
        sending = threads.submit(process.send, 1, large)
        shard.recv(1, socket.MSG_PEEK)
        ending = threads.submit(process.end, 2)
        try:
            ending.result(ANSWER_SECONDS)
        finally:
            assert answer(shard) == (1, large)
        sending.result()
