"""A router's link to a shard of another server, over CURVE, and to one that moves."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from pinlaterd.clock import Clock
from pinlaterd.wire.curve import ClusterKey
from pinlaterd.wire.envelope import (
    WIRE_VERSION,
    GiveUp,
    Hello,
    Pulse,
    ReadyCounts,
    Refused,
    ReplyEntry,
    ShardCall,
    ShardEnd,
    Status,
    Welcome,
)
from pinlaterd.wire.link import ShardLink
from tests.clocks import FakeClock
from tests.conftest import FreePort
from tests.wire.played import (
    FACTS,
    KEY,
    SECONDS,
    Listener,
    PlayedShard,
    other_time,
    reply_of,
)

ROOT = Path(__file__).parents[2]
HERE = "ipc://s.ipc"
RETURN_SECONDS = 9.0
# Longer than heartbeats wait.
BUSY_SECONDS = 3.5


class Scene:
    """A link that starts at `endpoint`, and the shards that there are."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], free_port: FreePort) -> None:
        self.context = context
        self.clock: Clock = FakeClock()
        self.key = KEY
        self.there, self.third = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.listener = Listener()
        self.link: ShardLink
        self._stack = ExitStack()
        self._lives = 0

    def connect(self, endpoint: str) -> None:
        self.link = ShardLink(
            "1",
            endpoint,
            self.context,
            self.listener,
            self.clock,
            max_bytes=10_000,
            return_seconds=RETURN_SECONDS,
            key=self.key,
        )
        self._stack.callback(self.link.close)

    def shard(self, endpoint: str) -> PlayedShard:
        self._lives += 1
        shard = PlayedShard(self._lives, self.context, endpoint)
        self._stack.callback(shard.kill)
        return shard

    async def welcomed(self, shard: PlayedShard, *, ahead: float = 0.0) -> list[bytes]:
        """`shard`, whose clock is so far ahead, welcomes the link, and answers the calls that were
        kept for it, which are returned."""
        await shard.welcome(self.clock.monotonic() + ahead)
        ensure_queues, *kept = await shard.calls()
        shard.answer(ensure_queues, *kept)
        return [call.message for call in kept]

    async def serving(self, endpoint: str) -> PlayedShard:
        """A shard to which the link is connected now."""
        shard = self.shard(endpoint)
        self.connect(endpoint)
        assert await self.welcomed(shard) == []
        return shard

    def ask(self, message: bytes, **options: Any) -> asyncio.Future[ReplyEntry]:
        deadline = self.clock.monotonic() + 60.0
        return self.link.ask(ShardCall(message, deadline, **options))

    def process(self, endpoint: str, *before: str) -> subprocess.Popen[str]:
        """A process that plays the shard there."""
        command = [*before, sys.executable, "-m", "tests.wire.played", endpoint]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)}
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)

    def is_writable(self) -> bool:
        events = self.link._connection._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & zmq.POLLOUT)

    def close(self) -> None:
        self._stack.close()


Test = Callable[[Scene], Coroutine[Any, Any, None]]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: FreePort
) -> Callable[[Test], None]:
    monkeypatch.chdir(tmp_path)

    async def play(test: Test) -> None:
        context = zmq.Context()
        scene = Scene(context, free_port)
        try:
            await test(scene)
        finally:
            scene.close()
            context.destroy(linger=0)

    return lambda test: asyncio.run(play(test))


# --- another server ---------------------------------------------------------------------------


def test_a_shard_of_another_server_hears_who_calls(run):
    async def test(scene: Scene) -> None:
        shard = scene.shard(scene.there)
        scene.connect(scene.there)

        hello = await shard.welcome(scene.clock.monotonic())

        assert (hello.server, hello.member, hello.version) == ("b", "m-2", WIRE_VERSION)

    run(test)


def test_a_shard_of_the_same_server_is_told_nothing_of_that(run):
    async def test(scene: Scene) -> None:
        shard = scene.shard(HERE)
        scene.connect(HERE)

        hello = await shard.welcome()

        assert (hello.server, hello.member) == ("", "")

    run(test)


@pytest.mark.parametrize("key", [ClusterKey(b"1" * 32, "prod"), None])
def test_another_key_is_named_and_tried_again(run, caplog, key):
    async def test(scene: Scene) -> None:
        stranger = ShardEnd(scene.context)
        if key is None:
            stranger.bind(scene.there)
        else:
            stranger.listen(scene.there, key)
        scene.connect(scene.there)
        await scene.until(lambda: "is its key another?" in caplog.text)
        stranger.close()

        assert await scene.welcomed(scene.shard(scene.there)) == []

    run(test)
    assert caplog.text.count("is its key another?") == 1


def test_another_wire_version_is_named_and_tried_again(run, caplog):
    async def test(scene: Scene) -> None:
        shard = scene.shard(scene.there)
        scene.connect(scene.there)
        for _ in range(3):
            await shard.hear(Hello)
            shard.send(Welcome(1, FACTS, WIRE_VERSION + 2, WIRE_VERSION + 1))

        assert await scene.welcomed(shard) == []

    run(test)
    assert caplog.text.count(f"it speaks wire version {WIRE_VERSION + 2}") == 1


def test_a_link_that_is_refused_says_so_and_greets_again(run, caplog):
    async def test(scene: Scene) -> None:
        shard = await scene.serving(scene.there)
        asked = scene.ask(b"in flight")
        await shard.calls()
        shard.send(Refused("its server has left"))
        await shard.hear(Hello)
        shard.send(Refused("its server has left"))
        assert (await reply_of(asked)).status is Status.LOST
        kept = scene.ask(b"kept")

        assert await scene.welcomed(shard) == [b"kept"]

        assert (await reply_of(kept)).status is Status.DONE

    run(test)
    assert caplog.text.count("refuses this router: its server has left") == 1


def test_a_port_that_is_taken_is_named(run):
    async def test(scene: Scene) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", int(scene.there.rpartition(":")[2])))
            other.listen()
            end = ShardEnd(scene.context)
            with pytest.raises(OSError, match=f"can't listen on {scene.there}: ") as caught:
                end.listen(scene.there, KEY)
            end.close()
        assert caught.value.errno == errno.EADDRINUSE

    run(test)


def test_a_port_that_this_process_had_can_be_had_again(run):
    async def test(scene: Scene) -> None:
        for _ in range(20):
            end = ShardEnd(scene.context)
            end.listen(scene.there, KEY)
            end.close()

    run(test)


@pytest.mark.parametrize("is_taken", [False, True])
def test_ipc_stays_plain_beside_tcp(run, is_taken):
    """Also where it is bound again, since another process has owned the shard meanwhile."""

    async def test(scene: Scene) -> None:
        end = ShardEnd(scene.context)
        end.bind(HERE)
        if is_taken:
            with pytest.raises(OSError, match="can't listen"):
                end.listen("tcp://192.0.2.1:9100", KEY)  # no address of this machine
        else:
            end.listen(scene.there, KEY)
        Path("s.ipc").unlink()  # noqa: ASYNC240 - a test may block
        end.bind_again()
        with scene.context.socket(zmq.DEALER) as router:
            router.connect(HERE)
            router.send(b"plain")
            await scene.until(lambda: end.receive(1, 1))
        end.close()

    run(test)


def test_a_shard_that_is_busy_is_not_cut_off_for_what_waits_there(run):
    """Messages that nobody takes for a while don't look like a cut."""

    async def test(scene: Scene) -> None:
        shard = await scene.serving(scene.there)
        asked = []
        for number in range(2500):
            asked.append(scene.ask(b"%d" % number, give_up=GiveUp.NEVER))
            await asyncio.sleep(0)  # each in a message of its own
            await scene.until(scene.is_writable)
        await asyncio.sleep(BUSY_SECONDS)

        # Answered in one message: more than the sockets hold may be on the way to a busy link.
        shard.answer(*[call for _ in asked for call in await shard.calls()])

        assert {(await reply_of(one)).status for one in asked} == {Status.DONE}

    run(test)


# --- deadlines --------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [-900.0, 0.0, 1e6])
def test_a_deadline_is_one_of_the_shards_clock(run, ahead):
    async def test(scene: Scene) -> None:
        shard = scene.shard(scene.there)
        scene.connect(scene.there)
        await scene.welcomed(shard, ahead=ahead)
        scene.ask(b"a")
        [call] = await shard.calls()
        assert call.deadline == pytest.approx(scene.clock.monotonic() + ahead + 60)

        # By its latest word: a frame that took longer, or clocks that go at other speeds.
        shard.send(Pulse(1, [ReadyCounts("mail", (1,))], now=scene.clock.monotonic() + ahead - 2))
        await scene.until(lambda: scene.link.ready)
        scene.ask(b"b")
        [call] = await shard.calls()
        assert call.deadline == pytest.approx(scene.clock.monotonic() + ahead + 58)

    run(test)


def test_on_the_same_machine_a_deadline_is_what_it_is(run):
    async def test(scene: Scene) -> None:
        shard = scene.shard(HERE)
        scene.connect(HERE)
        await scene.welcomed(shard, ahead=5.0)
        shard.send(Pulse(1, [ReadyCounts("mail", (1,))], now=5.0))
        await scene.until(lambda: scene.link.ready)
        scene.ask(b"a")
        [call] = await shard.calls()

        assert call.deadline == scene.clock.monotonic() + 60

    run(test)


def test_a_machine_whose_clock_is_days_ahead_keeps_deadlines(run):
    async def test(scene: Scene) -> None:
        scene.clock = Clock()
        scene.process(scene.there, *other_time())
        scene.connect(scene.there)
        await scene.until(lambda: scene.link.incarnation)

        for _ in range(20):
            left = float((await reply_of(scene.ask(b"a"))).payload)
            assert 30 < left <= 60
            await asyncio.sleep(0.02)

    run(test)


# --- moves ------------------------------------------------------------------------------------


def test_a_planned_move_costs_no_call(run):
    """The owner before answers what it has; what it has not taken up goes to the next one, once."""

    async def test(scene: Scene) -> None:
        before = await scene.serving(HERE)
        in_flight = scene.ask(b"in flight")
        [taken] = await before.calls()
        unanswered = scene.ask(b"unanswered")
        await before.calls()

        scene.link.move_to(scene.there)
        later = scene.ask(b"later")
        await before.calls()
        before.answer(taken)
        assert (await reply_of(in_flight)).payload == b"done in flight"
        await before.end_in_order()
        last = scene.ask(b"last")

        assert await scene.welcomed(scene.shard(scene.there)) == [b"unanswered", b"later", b"last"]
        for asked in (unanswered, later, last):
            assert (await reply_of(asked)).status is Status.DONE

    run(test)


@pytest.mark.parametrize("moves_first", [True, False])
def test_what_was_in_flight_at_the_end_of_the_owner_before_is_lost(run, moves_first):
    async def test(scene: Scene) -> None:
        before = await scene.serving(scene.third)
        in_flight = scene.ask(b"in flight", give_up=GiveUp.NEVER)
        await before.calls()
        if moves_first:
            scene.link.move_to(scene.there)
        before.kill()
        assert (await reply_of(in_flight)).status is Status.LOST
        kept = scene.ask(b"kept")
        scene.link.move_to(scene.there)

        assert await scene.welcomed(scene.shard(scene.there)) == [b"kept"]

        assert (await reply_of(kept)).status is Status.DONE

    run(test)


@pytest.mark.parametrize("remote", [True, False])
def test_an_owner_that_is_frozen_is_left(run, remote):
    """At once if the link knows already that it is silent; its late answers are nobody's."""

    async def test(scene: Scene) -> None:
        scene.clock = Clock()
        endpoint = scene.third if remote else HERE
        frozen = scene.process(endpoint)
        scene.connect(endpoint)
        await scene.until(lambda: scene.link.incarnation)
        frozen.send_signal(signal.SIGSTOP)
        in_flight = scene.ask(b"in flight", give_up=GiveUp.NEVER)
        await asyncio.sleep(0)

        scene.link.move_to(scene.there)
        after = scene.shard(scene.there)
        assert (await reply_of(in_flight)).status is Status.LOST
        kept = scene.ask(b"kept")
        frozen.send_signal(signal.SIGCONT)

        assert await scene.welcomed(after) == [b"kept"]
        assert (await reply_of(kept)).payload == b"done kept"
        assert scene.link.calls_in_flight == 0

    run(test)


def test_a_shard_that_is_frozen_for_a_moment_goes_on(run):
    """Although a cut of the network for as long ends the connection."""

    async def test(scene: Scene) -> None:
        scene.clock = Clock()
        frozen = scene.process(scene.there)
        scene.connect(scene.there)
        await scene.until(lambda: scene.link.incarnation)
        before = scene.link.incarnation
        frozen.send_signal(signal.SIGSTOP)
        in_flight = scene.ask(b"in flight", give_up=GiveUp.NEVER)
        await scene.until(lambda: scene.link.incarnation and not scene.link.healthy)

        frozen.send_signal(signal.SIGCONT)
        assert (await reply_of(in_flight)).status is Status.DONE
        assert scene.link.incarnation == before

    run(test)


def test_a_second_move_overtakes_the_first(run):
    async def test(scene: Scene) -> None:
        before = await scene.serving(HERE)
        before.kill()
        await scene.until(lambda: scene.link.returning)
        kept = scene.ask(b"kept")
        scene.link.move_to(scene.there)
        scene.link.move_to(scene.third)
        assert await scene.welcomed(scene.shard(scene.third)) == [b"kept"]
        assert (await reply_of(kept)).status is Status.DONE

        too_late = scene.shard(scene.there)
        scene.ask(b"more")
        await asyncio.sleep(0.2)
        assert too_late.nothing_came()

    run(test)


def test_a_move_that_is_taken_back_costs_nothing(run):
    async def test(scene: Scene) -> None:
        shard = await scene.serving(HERE)
        scene.link.move_to(scene.there)
        scene.link.move_to(HERE)
        asked = scene.ask(b"asked")
        await shard.calls()
        await shard.end_in_order()

        assert await scene.welcomed(scene.shard(HERE)) == [b"asked"]

        assert (await reply_of(asked)).status is Status.DONE

    run(test)


def test_a_move_goes_on_to_a_third_server_while_the_first_still_answers(run):
    async def test(scene: Scene) -> None:
        before = await scene.serving(HERE)
        asked = scene.ask(b"asked")
        await before.calls()
        scene.link.move_to(scene.there)
        scene.link.move_to(scene.third)
        await before.end_in_order()

        assert await scene.welcomed(scene.shard(scene.third)) == [b"asked"]

        assert (await reply_of(asked)).status is Status.DONE

    run(test)


def test_a_shard_without_an_owner_is_waited_for(run):
    async def test(scene: Scene) -> None:
        scene.connect("")
        scene.link.move_to(scene.there)
        kept = scene.ask(b"kept")

        assert await scene.welcomed(scene.shard(scene.there)) == [b"kept"]

        assert (await reply_of(kept)).status is Status.DONE

    run(test)
