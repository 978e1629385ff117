"""What a shard's loop makes of routers of other servers, as these join and leave the cluster; over
real sockets, told by a played coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from pinlaterd.config.schema import ServerSettings
from pinlaterd.lifecycle import StopSignal
from pinlaterd.model import EnqueueRequest, Job
from pinlaterd.shard.loop import ShardLoop, Updates
from pinlaterd.stats import Stats
from pinlaterd.wire.control import (
    ControlClient,
    ControlServer,
    Report,
    ShardEntry,
    Snapshot,
    write_snapshot,
)
from pinlaterd.wire.control import unpack as unpack_report
from pinlaterd.wire.curve import ClusterKey
from pinlaterd.wire.envelope import (
    LEAST_WIRE_VERSION,
    WIRE_VERSION,
    Calls,
    Frame,
    Goodbye,
    GoodbyeAck,
    Hello,
    Pulse,
    Refused,
    Replies,
    ShardEnd,
    Status,
    Welcome,
    pack,
    unpack,
)
from tests.conftest import FreePort, WaitUntil
from tests.shard.conftest import SHARD, Shard

HERE = "ipc://s.ipc"
KEY = ClusterKey(bytes(32), "prod")
MILLISECONDS = 20_000
_Frame = TypeVar("_Frame", bound=Frame)
Context = zmq.Context  # of sockets that send and receive bytes


def snapshot(version: int, *members: str) -> Snapshot:
    entry = ShardEntry(SHARD, False, server="a", epoch=3)
    return Snapshot(version, (entry,), 0, server="a", member="m-1", members=("m-1", *members))


class Router:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.incarnation = 0

    def greets(self, server: str = "", member: str = "", *, version: int = WIRE_VERSION) -> None:
        least = min(version, LEAST_WIRE_VERSION) if version <= WIRE_VERSION else version
        self._socket.send(pack(Hello(frozenset(), version, least, server, member)))

    def hears(self, kind: type[_Frame]) -> _Frame:
        while self._socket.poll(MILLISECONDS):
            frame = unpack(self._socket.recv())
            if isinstance(frame, kind):
                if isinstance(frame, Welcome):
                    self.incarnation = frame.incarnation
                return frame
        pytest.fail(f"no {kind.__name__}")

    def enqueues(self, shard: Shard, body: bytes) -> None:
        call = shard.entry(EnqueueRequest("mail", [Job(body)]))
        self._socket.send(pack(Calls(self.incarnation, [call])))

    def is_answered(self) -> bool:
        [reply] = self.hears(Replies).entries
        return reply.status is Status.DONE

    def acknowledges(self) -> None:
        self._socket.send(pack(GoodbyeAck(self.incarnation)))


class Cluster:
    """A shard of server a, its coordinator, and routers here and there."""

    def __init__(self, shard: Shard, port: int, wait_until: WaitUntil) -> None:
        self.shard = shard
        self.there = f"tcp://127.0.0.1:{port}"
        self.context: Context[Any] = zmq.Context()
        self.wait_until = wait_until
        self._coordinator = ControlServer(context=self.context)
        self.stop = StopSignal()
        self._peer = b""
        self._reported = 0

    def play(self, talk: Callable[[Cluster], None]) -> None:
        """The shard's loop, until `talk`, which a thread of its own does, has ended."""
        shard = self.shard
        failed: list[BaseException] = []
        ended = threading.Event()

        def talk_and_stop() -> None:
            try:
                self.wait_until(self._meet)
                talk(self)
            except BaseException as error:  # noqa: BLE001 - raised by the test
                failed.append(error)
            finally:
                self.stop.set()
                while not ended.wait(0.02):
                    shard.clock.advance(1.0)  # for routers that do not answer its Goodbye

        write_snapshot(snapshot(1, "m-2"))
        control = ControlClient("shard-1", "shard", Stats(), 0, context=self.context)
        updates = Updates(control, shard.service, ServerSettings(server="a"))
        assert updates.term is not None
        shard.service.term = updates.term
        end = ShardEnd(self.context)
        end.bind(HERE)
        end.listen(self.there, KEY)
        talking = threading.Thread(target=talk_and_stop)
        talking.start()
        ShardLoop(shard.service, end, updates, self.stop, shard.clock, shard.stats, dict).run()
        ended.set()
        talking.join()
        end.close()
        control.close()
        if failed:
            raise failed[0]

    def close(self) -> None:
        self._coordinator.close()
        self.stop.close()
        self.context.destroy(linger=0)

    @contextmanager
    def router(self, endpoint: str = "") -> Iterator[Router]:
        with self.context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            if not endpoint:
                KEY.call(socket)
            socket.connect(endpoint or self.there)
            yield Router(socket)

    def tells(self, snapshot: Snapshot) -> None:
        """Until the shard reports that it follows it."""

        def follows() -> bool:
            self._hear()
            return self._reported == snapshot.version

        self._coordinator.send(self._peer, snapshot)
        self.wait_until(follows)

    def _meet(self) -> bool:
        self.shard.clock.advance(1.0)  # until it reports again
        self._hear()
        return bool(self._peer)

    def _hear(self) -> None:
        while found := self._coordinator.receive():
            self._peer, message = found
            report = unpack_report(message)
            if isinstance(report, Report):
                self._reported = report.snapshot_version


Play = Callable[[Callable[[Cluster], None]], None]


@pytest.fixture
def play(
    shard: Shard,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_port: FreePort,
    wait_until: WaitUntil,
) -> Iterator[Play]:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    cluster = Cluster(shard, free_port(), wait_until)
    yield cluster.play
    cluster.close()


def test_routers_of_members_are_served(play):
    def talk(cluster: Cluster) -> None:
        with cluster.router() as remote, cluster.router(HERE) as local:
            remote.greets("b", "m-2")
            local.greets()
            now = cluster.shard.clock.monotonic()
            for router in (remote, local):
                welcome = router.hears(Welcome)
                assert (welcome.version, welcome.now) == (WIRE_VERSION, now)
            remote.enqueues(cluster.shard, b"a")
            assert remote.is_answered()
            assert local.hears(Pulse).now == now
            local.enqueues(cluster.shard, b"b")
            assert local.is_answered()

    play(talk)


def test_routers_of_no_members_are_refused(play, caplog):
    def talk(cluster: Cluster) -> None:
        with cluster.router() as router:
            for _ in range(3):
                router.greets("c", "m-3")
                assert "(m-3)" in router.hears(Refused).reason
            router.enqueues(cluster.shard, b"a")
            router.greets("c", "m-2")
            router.hears(Welcome)

    play(talk)
    assert caplog.text.count("m-3") == 1


def test_a_server_that_joins_is_known_with_the_next_snapshot(play):
    def talk(cluster: Cluster) -> None:
        with cluster.router() as router:
            router.greets("c", "m-3")
            router.hears(Refused)
            cluster.tells(snapshot(2, "m-2", "m-3"))
            router.greets("c", "m-3")
            router.hears(Welcome)

    play(talk)


def test_routers_of_a_server_that_has_left_are_expelled(play, shard):
    def talk(cluster: Cluster) -> None:
        with cluster.router() as gone, cluster.router() as other, cluster.router(HERE) as local:
            gone.greets("b", "m-2")
            gone.hears(Welcome)
            cluster.tells(snapshot(2, "m-2", "m-3"))
            other.greets("c", "m-3")
            local.greets()
            other.hears(Welcome)
            local.hears(Welcome)

            cluster.tells(snapshot(3, "m-3"))
            gone.enqueues(shard, b"too late")

            gone.hears(Refused)
            gone.greets("b", "m-2")
            gone.hears(Refused)
            for router in (other, local):
                router.enqueues(shard, b"a")
                assert router.is_answered()
            cluster.tells(snapshot(4, "m-3", "m-4"))
            gone.enqueues(shard, b"too early")
            gone.greets("b", "m-4")  # its server's new node
            gone.hears(Welcome)
            gone.enqueues(shard, b"a")
            assert gone.is_answered()

    play(talk)
    assert shard.counters()["mail_enqueue"] == 3


def test_calls_that_wait_when_their_server_leaves_are_not_carried_out(play, shard):
    """Those of others are."""
    service, run_batch = shard.service, shard.service.run_batch

    def talk(cluster: Cluster) -> None:
        with cluster.router() as gone, cluster.router(HERE) as local:
            gone.greets("b", "m-2")
            local.greets()
            gone.hears(Welcome)
            local.hears(Welcome)
            service.run_batch = lambda: None
            gone.enqueues(shard, b"b")
            local.enqueues(shard, b"a")
            cluster.wait_until(lambda: len(service.backlog) == 2)
            cluster.tells(snapshot(2))
            service.run_batch = run_batch

            gone.hears(Refused)
            assert local.is_answered()

    play(talk)
    assert shard.counters()["mail_enqueue"] == 1


@pytest.mark.parametrize("version", [LEAST_WIRE_VERSION - 1, WIRE_VERSION + 1])
def test_a_router_of_another_wire_version_is_refused(play, version):
    def talk(cluster: Cluster) -> None:
        with cluster.router(HERE) as router:
            router.greets(version=version)
            assert f"wire version {version}" in router.hears(Refused).reason
            router.greets(version=LEAST_WIRE_VERSION)
            router.hears(Welcome)

    play(talk)


def test_the_shard_says_goodbye_to_all_of_them(play):
    def talk(cluster: Cluster) -> None:
        with cluster.router() as remote, cluster.router(HERE) as local:
            remote.greets("b", "m-2")
            local.greets()
            incarnations = [router.hears(Welcome).incarnation for router in (remote, local)]
            cluster.stop.set()
            for router, incarnation in zip((remote, local), incarnations, strict=True):
                assert router.hears(Goodbye).incarnation == incarnation
                router.acknowledges()

    play(talk)
