"""A shard's loop that ends in order, or whose store fails, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from pinlaterd.config.schema import ServerSettings
from pinlaterd.engines.base import Batch, BatchResult
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.errors import StorageError
from pinlaterd.lifecycle import StopSignal
from pinlaterd.model import EnqueueRequest, Job
from pinlaterd.shard.loop import ShardLoop, Updates
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ControlClient
from pinlaterd.wire.envelope import (
    Calls,
    Frame,
    Goodbye,
    GoodbyeAck,
    Hello,
    Pulse,
    Replies,
    ShardEnd,
    Status,
    Welcome,
    pack,
    unpack,
)
from tests.conftest import WaitUntil
from tests.shard.conftest import Shard

ENDPOINT = "ipc://s.ipc"
_Frame = TypeVar("_Frame", bound=Frame)
MILLISECONDS = 20_000


Context = zmq.Context  # of sockets that send and receive bytes


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context[Any]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    with zmq.Context() as made:
        yield made


def run_loop(
    shard: Shard, context: Context[Any], talk: Callable[[StopSignal], None], end: ShardEnd
) -> None:
    """Until `talk`, which a thread of its own does, has set the signal to stop."""
    stop, control = StopSignal(), ControlClient("shard-1", "shard", Stats(), 0, context=context)
    end.bind(ENDPOINT)
    talking = threading.Thread(target=talk, args=(stop,))
    talking.start()
    updates = Updates(control, shard.service, ServerSettings())
    ShardLoop(shard.service, end, updates, stop, shard.clock, shard.stats, dict).run()
    talking.join()
    end.close()
    control.close()
    stop.close()


@contextmanager
def router_of(context: Context[Any]) -> Iterator[zmq.Socket[bytes]]:
    with context.socket(zmq.DEALER) as router:
        router.linger = MILLISECONDS
        router.connect(ENDPOINT)
        router.send(pack(Hello(frozenset())))
        yield router


def end_in_order(router: zmq.Socket[bytes], stop: StopSignal) -> None:
    stop.set()
    router.send(pack(GoodbyeAck(_hear(router, Goodbye).incarnation)))


def test_it_stays_until_its_routers_have_heard_of_it(shard: Shard, context: Context[Any]):
    """The loop's clock stands still, so that it would wait for them for ever."""
    ended = threading.Event()
    stayed: list[bool] = []

    def hear_of_it(stop: StopSignal) -> None:
        with router_of(context) as one, router_of(context) as other:
            welcomes = [_hear(router, Welcome) for router in (one, other)]
            stop.set()
            for router in (one, other):
                _hear(router, Goodbye)
                # As long as one of them has said nothing, it is there.
                stayed.append(not ended.wait(0.1))
                router.send(pack(GoodbyeAck(welcomes[0].incarnation)))

    run_loop(shard, context, hear_of_it, ShardEnd(context))

    ended.set()
    assert stayed == [True, True]


class MissesOnce(ShardEnd):
    """The first answers reach no router."""

    missed = False

    def send(self, router: bytes, frame: bytes) -> bool:
        if self.missed or not isinstance(unpack(frame), Replies):
            return super().send(router, frame)
        self.missed = True
        return False


def test_a_router_that_missed_a_message_is_welcomed_again(
    shard: Shard, context: Context[Any], wait_until: WaitUntil
):
    welcomes: list[Welcome] = []

    def call_again(stop: StopSignal) -> None:
        with router_of(context) as router:
            welcomes.append(_hear(router, Welcome))
            call = shard.entry(EnqueueRequest("mail", [Job(b"a")]))
            calls = pack(Calls(welcomes[0].incarnation, [call]))
            router.send(calls)
            wait_until(lambda: shard.counters().get("shard_routers_lost"))
            router.send(calls)
            welcomes.append(_hear(router, Welcome))
            router.send(calls)
            _hear(router, Replies)
            end_in_order(router, stop)

    run_loop(shard, context, call_again, MissesOnce(context))

    assert welcomes[0].incarnation == welcomes[1].incarnation
    assert shard.counters()["mail_enqueue"] == 2  # not the one by which it was noticed


class BreaksOnce(SqliteEngine):
    """The real engine, whose first commit ends nobody knows how."""

    broken = False

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        result = super().apply(batch, now_ms)
        if not self.broken:
            self.broken = True
            raise StorageError("its server went away")
        return result


def test_to_its_routers_it_is_down_until_its_store_is_open_again(
    make_shard: Callable[..., Shard], tmp_path: Path, context: Context[Any]
):
    shard = make_shard(engine=BreaksOnce(tmp_path / "shard.sqlite"))
    shard.create()
    heard: list[Frame] = []

    def call_it(stop: StopSignal) -> None:
        with router_of(context) as router:
            incarnation = _hear(router, Welcome).incarnation
            call = shard.entry(EnqueueRequest("mail", [Job(b"a")]))
            router.send(pack(Calls(incarnation, [call])))
            while not heard or not isinstance(heard[-1], Welcome):
                assert router.poll(MILLISECONDS)
                heard.append(unpack(router.recv()))
            end_in_order(router, stop)

    run_loop(shard, context, call_it, ShardEnd(context))

    reply, goodbye, welcome = [frame for frame in heard if not isinstance(frame, Pulse)]
    assert isinstance(reply, Replies)
    [entry] = reply.entries
    assert entry.status is Status.FAILED
    assert goodbye == Goodbye(reply.incarnation)
    assert isinstance(welcome, Welcome)
    assert welcome.incarnation > reply.incarnation


def _hear(router: zmq.Socket[bytes], kind: type[_Frame]) -> _Frame:
    while router.poll(MILLISECONDS):
        frame = unpack(router.recv())
        if isinstance(frame, kind):
            return frame
    pytest.fail(f"no {kind.__name__}")
