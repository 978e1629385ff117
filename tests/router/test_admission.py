"""How much memory for their answers calls are granted, and what becomes of those that lack it."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any, cast
from unittest.mock import Mock

import pytest

from pinlaterd.config.schema import KIB, MIB, ServerSettings
from pinlaterd.errors import ErrorCode, Overloaded
from pinlaterd.model import (
    CallContext,
    DequeueRequest,
    JobState,
    LookupRequest,
    Method,
    Request,
    ScanRequest,
)
from pinlaterd.router.call import Admission, Call, Shared
from pinlaterd.router.rate_limits import RateLimits
from pinlaterd.router.shards import ShardSet
from pinlaterd.rpc import codec
from pinlaterd.rpc.connection import Answer
from pinlaterd.stats import Stats
from pinlaterd.wire.envelope import SCAN_BYTES
from tests.clocks import FakeClock

SETTINGS = ServerSettings()
CLAIMS_BYTES = SETTINGS.max_buffered_bytes // 2
SHARDS = 2
REQUEST_SECONDS = SETTINGS.request_timeout_ms / 1000


class Client:
    """Stands in for the connection of one call."""

    def __init__(self) -> None:
        self.slots: list[Call] = []
        self.server = self.budget = self
        self.reads = True
        self.room_bytes = SETTINGS.max_buffered_bytes
        self.error: str | None = None

    def room(self) -> int:
        return self.room_bytes

    def is_lost(self) -> bool:
        return False

    def is_next(self, _answer: Answer) -> bool:
        return self.reads

    def answered(self, _answer: Answer, message: bytes) -> bool:
        error = codec.peek_error(message)
        assert error is ErrorCode.UNKNOWN
        self.error = message.decode(errors="replace")
        return True


class Scene:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.begun: list[Call] = []
        shards = cast("ShardSet", Mock(by_name=dict.fromkeys(range(SHARDS))))
        limits = RateLimits(self.clock)
        shared = Shared(shards, limits, self.clock, Stats(), Random(1), SETTINGS)
        self.admission = Admission(shared, self.begun.append)

    def admit(self, *calls: Call) -> None:
        self.begun += [call for call in calls if self.admission.admit(call)]

    def call(self, method: Method, request: Request) -> tuple[Call, Client]:
        message = codec.encode_call(method, 1, CallContext("test"), request)
        client = Client()
        place = cast("Any", client)
        return Call(message, codec.peek(message), place, 0.0, 0.0, self.admission.ended), client

    def dequeue(self, limit: int = 1000) -> tuple[Call, Client]:
        return self.call(Method.DEQUEUE, DequeueRequest("mail", limit))

    def scan(self, limit: int) -> tuple[Call, Client]:
        return self.call(Method.SCAN, ScanRequest("mail", JobState.PENDING, limit=limit))

    def lookup(self) -> tuple[Call, Client]:
        """As large as answers may be."""
        found = LookupRequest([f"mail:s1:p1:{n}" for n in range(100)], include_body=True)
        return self.call(Method.LOOKUP, found)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_dequeue_has_room_for_as_many_of_the_largest_jobs_as_it_asks_for(scene: Scene):
    call, _ = scene.dequeue(limit=2)
    scene.admit(call)
    assert call.granted_bytes > 2 * SETTINGS.max_job_body_bytes


def test_a_call_that_has_ended_holds_nothing_of_what_its_client_sent(scene: Scene):
    tracemalloc.start()
    try:
        call, _ = scene.call(Method.LOOKUP, LookupRequest(["x" * MIB]))
        scene.admit(call)
        call.fail(Overloaded("too much"))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < MIB / 2


def test_together_dequeues_have_no_more_than_their_part(scene: Scene):
    calls = [scene.dequeue()[0] for _ in range(20)]
    scene.admit(*calls)
    assert calls[0].granted_bytes == SETTINGS.max_response_bytes
    assert sum(call.granted_bytes for call in calls) < CLAIMS_BYTES + 20 * 256 * KIB
    for call in calls:
        scene.admission.ended(call, None)
    again, _ = scene.dequeue()
    scene.admit(again)
    assert again.granted_bytes == SETTINGS.max_response_bytes


async def _until(condition: Callable[[], object]) -> None:
    """Looks come with the loop's own time."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)


def test_a_dequeue_without_room_waits_until_it_is_the_next(scene: Scene):
    async def check() -> None:
        call, client = scene.dequeue()
        client.room_bytes, client.reads = 0, False
        scene.admit(call)
        assert scene.begun == []
        client.reads = True
        await _until(lambda: scene.begun == [call])
        assert call.granted_bytes == 256 * KIB

    asyncio.run(check())


def test_a_dequeue_that_goes_on_without_room_is_granted_nothing(scene: Scene):
    call, client = scene.dequeue()
    scene.admit(call)
    scene.admission.suspend(call)
    client.room_bytes, client.reads = 0, False
    scene.admission.resume(call)
    assert call.granted_bytes == 0


def test_a_large_look_up_waits_for_the_one_before_it_but_not_for_ever(scene: Scene):
    async def check() -> None:
        (first, _), (second, _), (third, late) = (scene.lookup() for _ in range(3))
        scene.admit(first, second, third)
        assert scene.begun == [first]
        assert first.granted_bytes == 64 * MIB
        scene.admission.ended(first, None)
        await _until(lambda: scene.begun == [first, second])
        scene.clock.advance(REQUEST_SECONDS + 1)
        await _until(lambda: late.error)
        assert "answers that clients have not read" in str(late.error)

    asyncio.run(check())


@pytest.mark.parametrize("true", [1, 2, 255])
def test_any_true_boolean_asks_for_bodies(scene: Scene, true: int):
    call, _ = scene.lookup()
    at = call.message.index(b"\x02\x00\x02\x01")
    call.message = call.message[: at + 3] + bytes([true]) + call.message[at + 4 :]
    scene.admit(call)
    assert call.granted_bytes == 64 * MIB


def test_a_long_scan_waits_until_it_is_the_next_and_a_short_one_does_not(scene: Scene):
    async def check() -> None:
        (long, client), (short, other) = scene.scan(10_000), scene.scan(100)
        client.reads = other.reads = False
        scene.admit(long, short)
        assert scene.begun == [short]
        client.reads = True
        await _until(lambda: long in scene.begun)
        assert 0 < long.granted_bytes - SHARDS * SCAN_BYTES < 5 * MIB

    asyncio.run(check())
