"""A shard as a test plays it: it says what it wants when it wants, over real sockets."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest
import zmq

from pinlaterd.wire.curve import ClusterKey
from pinlaterd.wire.envelope import (
    PULSE_SECONDS,
    CallEntry,
    Calls,
    Frame,
    Goodbye,
    GoodbyeAck,
    Hello,
    Op,
    Pulse,
    ReadyCounts,
    Received,
    Replies,
    ReplyEntry,
    ShardCall,
    ShardEnd,
    ShardFacts,
    Status,
    Welcome,
    pack,
    unpack,
)
from pinlaterd.wire.link import ShardLink
from tests.clocks import FakeClock
from tests.cluster.machines import NoNamespacesError, own_user_options

SECONDS = 60.0
FACTS = ShardFacts(64, (), ())
KEY = ClusterKey(bytes(32), "prod")
_Frame = TypeVar("_Frame", bound=Frame)


def other_time() -> Sequence[str]:
    """The start of a command that runs where CLOCK_MONOTONIC is ten days ahead."""
    try:
        return ("unshare", *own_user_options(), "--time", "--monotonic", "864000")
    except NoNamespacesError as error:
        pytest.skip(str(error))


def make_call(message: bytes, op: Op = Op.CALL, seconds: float = 60.0, **options: Any) -> ShardCall:
    return ShardCall(message, FakeClock().monotonic() + seconds, op, **options)


async def reply_of(asked: asyncio.Future[ReplyEntry]) -> ReplyEntry:
    return await asyncio.wait_for(asked, SECONDS)


class Listener:
    others_serve = True

    def welcomed(self, link: ShardLink, facts: ShardFacts) -> None:
        link.call(make_call(b"[]", Op.ENSURE_QUEUES, patient=False), lambda *_: None)

    def counted(self, link: ShardLink, counts: Iterable[ReadyCounts]) -> None: ...

    def assessed(self) -> None: ...

    def queues_known(self) -> Iterable[str]:
        return ()

    def membership(self) -> tuple[str, str]:
        return "b", "m-2"

    def others_can_serve(self, link: ShardLink) -> bool:
        return self.others_serve


class PlayedShard:
    """One life of a shard."""

    def __init__(
        self, incarnation: int, context: zmq.Context[zmq.Socket[bytes]], endpoint: str
    ) -> None:
        """`endpoint`: of ipc, or of tcp with KEY."""
        self._incarnation = incarnation
        self._end = ShardEnd(context)
        if endpoint.startswith("tcp"):
            self._end.listen(endpoint, KEY)
        else:
            self._end.bind(endpoint)
        self._router = b""
        self._frames: list[Received] = []

    async def hear(self, kind: type[_Frame]) -> _Frame:
        async with asyncio.timeout(SECONDS):
            while True:
                self._frames += self._end.receive(10, 1 << 20)
                while self._frames:
                    self._router, data = self._frames.pop(0)
                    frame = unpack(data)
                    if isinstance(frame, kind):
                        return frame
                await asyncio.sleep(0.002)

    async def welcome(self, now: float = 0.0) -> Hello:
        hello = await self.hear(Hello)
        self.send(Welcome(self._incarnation, FACTS, now=now))
        return hello

    async def calls(self) -> list[CallEntry]:
        frame = await self.hear(Calls)
        assert frame.incarnation == self._incarnation
        return list(frame.calls)

    def answer(self, *calls: CallEntry, jobs: int = 0) -> None:
        """In one message, each with so many claims."""
        replies = [
            ReplyEntry(one.call_id, Status.DONE, b"done " + one.message, jobs) for one in calls
        ]
        self.send(Replies(self._incarnation, replies, ()))

    def nothing_came(self) -> bool:
        return not self._end.receive(1, 1)

    async def end_in_order(self) -> None:
        self.send(Goodbye(self._incarnation))
        await self.hear(GoodbyeAck)
        self.kill()

    def kill(self) -> None:
        self._end.close()

    def send(self, frame: Frame) -> None:
        assert self._end.send(self._router, pack(frame))


def run(endpoint: str) -> None:
    """A shard's process that answers each call with the seconds that are left until its deadline,
    and pulses."""
    end = ShardEnd(zmq.Context())
    end.listen(endpoint, KEY) if endpoint.startswith("tcp") else end.bind(endpoint)
    print("ready", flush=True)  # noqa: T201 - for the test
    routers: set[bytes] = set()
    while True:
        end.wait(lambda: PULSE_SECONDS)
        for router, data in end.receive(100, 1 << 20):
            frame, now = unpack(data), time.monotonic()
            if isinstance(frame, Hello):
                routers.add(router)
                end.send(router, pack(Welcome(1, FACTS, now=now)))
            elif isinstance(frame, Calls):
                left = [(call.call_id, repr(call.deadline - now).encode()) for call in frame.calls]
                replies = [ReplyEntry(call_id, Status.DONE, text) for call_id, text in left]
                end.send(router, pack(Replies(1, replies, ())))
        for router in routers:
            end.send(router, pack(Pulse(1, (), now=time.monotonic())))


if __name__ == "__main__":
    run(sys.argv[1])
