"""What a router's link makes of a shard that goes and comes back, over real sockets.

The shard is played by the test, and may be killed in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from pinlaterd.wire import link
from pinlaterd.wire.envelope import (
    GiveUp,
    Op,
    Replies,
    ReplyEntry,
    ShardCall,
    Status,
)
from pinlaterd.wire.link import ShardLink
from tests.clocks import FakeClock
from tests.wire.played import Listener, PlayedShard, make_call, reply_of

ENDPOINT = "ipc://s.ipc"
RETURN_SECONDS = 3.0
MOST_BYTES = 1000


class Scene:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.clock = FakeClock()
        self.listener = Listener()
        self.link = ShardLink(
            "1",
            ENDPOINT,
            context,
            self.listener,
            self.clock,
            max_bytes=MOST_BYTES,
            return_seconds=RETURN_SECONDS,
        )
        self._context = context
        self._lives = 0
        self._shards: list[PlayedShard] = []

    async def serving(self) -> PlayedShard:
        """A (new) shard that has welcomed the link and heard which queues it lacks."""
        self._lives += 1
        shard = PlayedShard(self._lives, self._context, ENDPOINT)
        self._shards.append(shard)
        await shard.welcome()
        [first, *others] = await shard.calls()
        assert first.op is Op.ENSURE_QUEUES
        self.kept = others
        return shard

    async def killed(self) -> None:
        """A shard served, and the link has noticed that it does no more."""
        shard = await self.serving()
        in_hand = self.link.ask(make_call(b"in hand"))
        await shard.calls()
        shard.kill()
        assert (await reply_of(in_hand)).status is Status.LOST

    def close(self) -> None:
        if not self.link._connection._socket.closed:
            self.link.close()
        for shard in self._shards:
            shard.kill()


@asynccontextmanager
async def _scene() -> AsyncIterator[Scene]:
    with zmq.Context() as context:
        scene = Scene(context)
        try:
            yield scene
        finally:
            scene.close()


Test = Callable[[Scene], Coroutine[Any, Any, None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Test], None]:
    monkeypatch.chdir(tmp_path)

    async def play(test: Test) -> None:
        async with _scene() as scene:
            await test(scene)

    return lambda test: asyncio.run(play(test))


def test_what_was_not_carried_out_goes_to_the_successor(run):
    async def test(scene: Scene) -> None:
        shard = await scene.serving()
        unanswered = scene.link.ask(make_call(b"unanswered"))
        impatient = scene.link.ask(make_call(b"impatient", patient=False))
        await shard.calls()
        await shard.end_in_order()
        assert (await reply_of(impatient)).status is Status.REFUSED
        assert scene.link.returning
        later = scene.link.ask(make_call(b"later"))

        successor = await scene.serving()
        assert [call.message for call in scene.kept] == [b"unanswered", b"later"]
        for call in scene.kept:
            successor.answer(call)

        assert (await reply_of(unanswered)).payload == b"done unanswered"
        assert (await reply_of(later)).payload == b"done later"
        assert not scene.link.returning

    run(test)


def test_a_part_of_a_dequeue_waits_for_the_successor_until_others_can_serve(run):
    async def test(scene: Scene) -> None:
        await scene.killed()
        scene.listener.others_serve = False
        part = scene.link.ask(make_call(b"part", give_up=GiveUp.SILENT))
        ack = scene.link.ask(make_call(b"ack"))
        enqueue = scene.link.ask(make_call(b"enqueue", give_up=GiveUp.NEVER))

        scene.link._sweep()
        assert not part.done()
        scene.listener.others_serve = True
        scene.link._sweep()

        assert (await reply_of(part)).status is Status.REFUSED
        successor = await scene.serving()
        successor.answer(*scene.kept)
        assert (await reply_of(ack)).payload == b"done ack"
        assert (await reply_of(enqueue)).payload == b"done enqueue"

    run(test)


def test_a_caller_that_fails_keeps_no_reply_from_others(run):
    def fail(_call: ShardCall, _link: ShardLink, _reply: ReplyEntry) -> None:
        raise RuntimeError("meant to")

    async def test(scene: Scene) -> None:
        shard = await scene.serving()
        scene.link.call(make_call(b"failing"), fail)
        other = scene.link.ask(make_call(b"other"))

        shard.answer(*await shard.calls())

        assert (await reply_of(other)).payload == b"done other"

    run(test)


def test_what_a_predecessor_says_is_noreply_of(run):
    async def test(scene: Scene) -> None:
        shard = await scene.serving()
        asked = scene.link.ask(make_call(b"mine"))
        [call] = await shard.calls()
        shard.send(Replies(99, [ReplyEntry(call.call_id, Status.DONE, b"not mine")], ()))
        shard.answer(call)

        assert (await reply_of(asked)).payload == b"done mine"

    run(test)


def test_what_a_killed_shard_may_have_carried_out_is_lost_and_the_rest_waits(run):
    async def test(scene: Scene) -> None:
        await scene.killed()
        waits = scene.link.ask(make_call(b"waits"))

        successor = await scene.serving()
        [call] = scene.kept
        successor.answer(call)

        assert (await reply_of(waits)).payload == b"done waits"

    run(test)


def test_a_shard_that_froze_unused_holds_up_a_call_no_longer_than_another(run, monkeypatch):
    """While it is not used the link seldom looks whether the shard is silent."""
    monkeypatch.setattr(link, "_SWEEPS_UNTIL_QUIET", 2)
    monkeypatch.setattr(link, "QUIET_PULSE_SECONDS", 3600.0)

    async def test(scene: Scene) -> None:
        await scene.serving()
        while scene.link._sweep_seconds < 3600:  # noqa: ASYNC110 - the link tells nobody
            await asyncio.sleep(0.01)

        asked = scene.link.ask(make_call(b"never read", give_up=GiveUp.SILENT))

        assert (await reply_of(asked)).status is Status.SILENT

    run(test)


def test_a_shard_that_does_not_come_back_is_given_up(run):
    async def test(scene: Scene) -> None:
        await scene.killed()
        waits = scene.link.ask(make_call(b"waits"))

        scene.clock.advance(RETURN_SECONDS)

        assert (await reply_of(waits)).status is Status.REFUSED
        assert not scene.link.returning
        assert (await reply_of(scene.link.ask(make_call(b"later")))).status is Status.REFUSED
        assert scene.link.calls_in_flight == 0

    run(test)


def test_no_call_waits_beyond_its_deadline_nor_do_too_many(run):
    async def test(scene: Scene) -> None:
        await scene.killed()
        short = scene.link.ask(make_call(b"short", seconds=1.0))
        large = scene.link.ask(make_call(bytes(MOST_BYTES - len(b"short"))))
        too_much = scene.link.ask(make_call(b"too much"))
        assert (await reply_of(too_much)).status is Status.REFUSED

        scene.clock.advance(1.5)

        assert (await reply_of(short)).status is Status.REFUSED
        assert not large.done()

    run(test)


def test_what_was_never_sent_is_refused_when_its_shard_is_removed(run):
    """It is certain that nothing was done: another shard can be asked."""

    async def test(scene: Scene) -> None:
        await scene.killed()
        waits = scene.link.ask(make_call(b"waits"))

        scene.link.close()

        assert (await reply_of(waits)).status is Status.REFUSED

    run(test)


def test_the_claims_of_a_late_answer_are_released(run):
    async def test(scene: Scene) -> None:
        shard = await scene.serving()
        asked = scene.link.ask(make_call(b"dequeue", seconds=1.0))
        [late] = await shard.calls()
        scene.clock.advance(1.5)
        assert (await reply_of(asked)).status is Status.LATE

        shard.answer(late, jobs=1)

        [release] = await shard.calls()
        assert (release.op, release.message) == (Op.RELEASE, b"done dequeue")

    run(test)


def test_a_late_answer_frees_what_its_call_took_of_the_bytes_in_flight(run):
    async def test(scene: Scene) -> None:
        shard = await scene.serving()
        large = bytes(MOST_BYTES // 2 + 1)  # two are too many
        late = make_call(large, seconds=1.0)
        asked = scene.link.ask(late)
        [sent] = await shard.calls()
        scene.clock.advance(1.5)
        assert (await reply_of(asked)).status is Status.LATE
        late.message = b""  # as its caller may, once it has the reply
        shard.answer(sent)
        other = scene.link.ask(make_call(b""))
        shard.answer(*await shard.calls())
        await reply_of(other)

        again = scene.link.ask(make_call(large))
        shard.answer(*await shard.calls())

        assert (await reply_of(again)).status is Status.DONE

    run(test)


def test_what_is_given_up_before_it_was_sent_is_sent_as_it_was(run):
    async def test(scene: Scene) -> None:
        shard = await scene.serving()
        call = make_call(b"ack")
        told: list[Status] = []

        def replied(call: ShardCall, _link: ShardLink, reply: ReplyEntry) -> None:
            told.append(reply.status)
            call.message = b""

        scene.link.call(call, replied)
        for _ in range(GiveUp.STALLED + 1):
            scene.link._sweep()

        assert told == [Status.SILENT]
        assert [sent.message for sent in await shard.calls()] == [b"ack"]

    run(test)
