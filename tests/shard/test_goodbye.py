"""A shard's loop that ends in order, or whose store fails, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from pinlaterd.engines.base import Batch, BatchResult
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.errors import StorageError
from pinlaterd.lifecycle import StopSignal
from pinlaterd.model import EnqueueRequest, Job
from pinlaterd.shard.loop import ShardLoop
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
    Status,
    Welcome,
    pack,
    unpack,
)
from pinlaterd.wire.socket import ShardEnd
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


def test_it_stays_until_its_routers_have_heard_of_it(shard: Shard, context: Context[Any]):
    """The loop's clock stands still, so that it would wait for them for ever."""
    stop, end, ended = StopSignal(), ShardEnd(context), threading.Event()
    end.bind(ENDPOINT)
    control = ControlClient("shard-1", "shard", Stats(), 0, context=context)
    stayed: list[bool] = []

    def hear_of_it() -> None:
        routers = [context.socket(zmq.DEALER) for _ in range(2)]
        for router in routers:
            router.linger = MILLISECONDS
            router.connect(ENDPOINT)
            router.send(pack(Hello(frozenset())))
        welcomes = [_hear(router, Welcome) for router in routers]
        stop.set()
        parted = pack(GoodbyeAck(welcomes[0].incarnation))
        for router in routers:
            _hear(router, Goodbye)
            # As long as one of them has said nothing, it is there.
            stayed.append(not ended.wait(0.1))
            router.send(parted)
            router.close()

    hearing = threading.Thread(target=hear_of_it)
    hearing.start()

    ShardLoop(shard.service, end, control, stop, shard.clock, Stats(), dict).run()

    ended.set()
    hearing.join()
    assert stayed == [True, True]
    end.close()
    control.close()
    stop.close()


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
    stop, end = StopSignal(), ShardEnd(context)
    end.bind(ENDPOINT)
    control = ControlClient("shard-1", "shard", Stats(), 0, context=context)
    heard: list[Frame] = []

    def call_it() -> None:
        with context.socket(zmq.DEALER) as router:
            router.linger = MILLISECONDS
            router.connect(ENDPOINT)
            router.send(pack(Hello(frozenset())))
            incarnation = _hear(router, Welcome).incarnation
            call = shard.entry(EnqueueRequest("mail", [Job(b"a")]))
            router.send(pack(Calls(incarnation, [call])))
            while not heard or not isinstance(heard[-1], Welcome):
                assert router.poll(MILLISECONDS)
                heard.append(unpack(router.recv()))
            stop.set()
            last = _hear(router, Goodbye)
            router.send(pack(GoodbyeAck(last.incarnation)))

    calling = threading.Thread(target=call_it)
    calling.start()

    ShardLoop(shard.service, end, control, stop, shard.clock, Stats(), dict).run()

    calling.join()
    reply, goodbye, welcome = [frame for frame in heard if not isinstance(frame, Pulse)]
    assert isinstance(reply, Replies)
    [entry] = reply.entries
    assert entry.status is Status.FAILED
    assert goodbye == Goodbye(reply.incarnation)
    assert isinstance(welcome, Welcome)
    assert welcome.incarnation > reply.incarnation
    end.close()
    control.close()
    stop.close()


def _hear(router: zmq.Socket[bytes], kind: type[_Frame]) -> _Frame:
    while router.poll(MILLISECONDS):
        frame = unpack(router.recv())
        if isinstance(frame, kind):
            return frame
    pytest.fail(f"no {kind.__name__}")
