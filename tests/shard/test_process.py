"""The real process behind its real socket, spoken to as a router speaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from pinlaterd.config import layout
from pinlaterd.model import (
    CallContext,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DequeueRequest,
    EnqueueRequest,
    Job,
    JobState,
    Method,
    Request,
)
from pinlaterd.rpc import codec
from pinlaterd.wire.envelope import (
    CallEntry,
    Calls,
    Hello,
    Pulse,
    Replies,
    ReplyEntry,
    Status,
    Welcome,
    pack,
    unpack,
)

pytestmark = pytest.mark.service

SECONDS = 60.0
PENDING = JobState.PENDING


class Router:
    """One router's connection to a shard."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.connect(endpoint)
        self._next_id = 0
        self.incarnation = 0
        self.counts: dict[str, tuple[int, ...]] = {}
        self.replies: dict[int, ReplyEntry] = {}

    def hello(self, *queues: str) -> None:
        """Until it is welcomed."""
        welcomed, self.incarnation = self.incarnation, 0
        give_up = time.monotonic() + SECONDS
        while self.incarnation in (0, welcomed):
            assert time.monotonic() < give_up, "no welcome"
            self._socket.send(pack(Hello(frozenset(queues))))
            self.hear(0.2)

    def send(self, request: Request, method: Method, *, incarnation: int | None = None) -> int:
        self._next_id += 1
        message = codec.encode_call(method, 0, CallContext("web:h1"), request)
        entry = CallEntry(self._next_id, time.monotonic() + SECONDS, message)
        self._socket.send(pack(Calls(incarnation or self.incarnation, [entry])))
        return self._next_id

    def call(self, request: Request, method: Method) -> Any:
        call_id = self.send(request, method)
        reply = self.reply(call_id)
        assert reply.status is Status.DONE, reply
        return codec.decode_reply(method, reply.payload)

    def reply(self, call_id: int) -> ReplyEntry:
        give_up = time.monotonic() + SECONDS
        while call_id not in self.replies:
            assert time.monotonic() < give_up, "no reply"
            self.hear(0.5)
        return self.replies.pop(call_id)

    def hear(self, seconds: float) -> bool:
        """Take what comes within so long; whether anything did."""
        if not self._socket.poll(round(seconds * 1000)):
            return False
        frame = unpack(self._socket.recv())
        if isinstance(frame, Welcome):
            self.incarnation = frame.incarnation
            self.counts.update(frame.facts.counts)
        elif isinstance(frame, Replies):
            self.replies.update({entry.call_id: entry for entry in frame.entries})
            self.counts.update(frame.counts)
        elif isinstance(frame, Pulse):
            self.counts.update(frame.counts)
        return True

    def close(self) -> None:
        self._socket.close()

    def create(self, queue: str = "mail") -> None:
        self.call(CreateQueueRequest(queue), Method.CREATE_QUEUE)

    def enqueue(self, *bodies: bytes) -> list[str]:
        jobs = [Job(body) for body in bodies]
        return list(self.call(EnqueueRequest("mail", jobs), Method.ENQUEUE))

    def dequeue(self, limit: int = 100) -> list[bytes]:
        result = self.call(DequeueRequest("mail", limit), Method.DEQUEUE)
        return [job.body for job in result.jobs]


class Deployment:
    """A folder with one shard, and its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / layout.ETC).mkdir()
        (folder / layout.DATA).mkdir()
        (folder / layout.ETC / layout.SHARDS_FILE).write_text("shards: {s1: {engine: sqlite}}\n")
        self.context: zmq.Context[Any] = zmq.Context()
        # A Unix socket's path is short; pytest's folders are not.
        link = Path(f"/tmp/pinlaterd-test-{os.getpid()}-{id(self)}")
        link.symlink_to(folder)
        self._link = link
        self.endpoint = f"ipc://{link}/run/shard-s1.ipc"

    def start(self) -> subprocess.Popen[bytes]:
        log = (self.folder / f"log-{len(self.processes)}").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "pinlaterd", "shard", "s1", "--config", "etc"],
            cwd=self.folder,
            stderr=log,
        )
        log.close()
        self.processes.append(process)
        return process

    def log(self, number: int = 0) -> str:
        return (self.folder / f"log-{number}").read_text()

    def router(self) -> Router:
        return Router(self.context, self.endpoint)

    def close(self) -> None:
        self.context.destroy(linger=0)
        for process in self.processes:
            process.kill()
            process.wait()
        self._link.unlink()


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path)
    yield made
    made.close()


@pytest.fixture
def router(deployment: Deployment) -> Router:
    """Of a shard that serves the queue `mail`."""
    deployment.start()
    made = deployment.router()
    made.hello("mail")
    return made


def test_a_router_that_greets_gets_its_queues_created_and_the_counts(deployment, router):
    router.enqueue(b"a")
    other = deployment.router()

    other.hello("mail", "post")

    assert other.counts == {"mail": (1, 0, 0), "post": (0, 0, 0)}


def test_other_routers_learn_at_once_that_there_are_jobs(deployment, router):
    other = deployment.router()
    other.hello()
    while other.hear(0.0):
        pass

    router.enqueue(b"a")

    while other.counts["mail"] != (1, 0, 0):
        assert other.hear(SECONDS)


def test_pulses_are_rare_while_no_router_sends_anything_and_then_frequent_again(router):
    def seconds_to_next_pulse() -> float:
        assert router.hear(SECONDS)
        heard = time.monotonic()
        assert router.hear(SECONDS)
        return time.monotonic() - heard

    end = time.monotonic() + SECONDS
    while seconds_to_next_pulse() < 0.9:
        assert time.monotonic() < end

    router.enqueue(b"a")

    while seconds_to_next_pulse() > 0.5:
        assert time.monotonic() < end


def test_calls_meant_for_a_predecessor_are_discarded(deployment, router):
    stale = router.send(
        EnqueueRequest("mail", [Job(b"stale")]), Method.ENQUEUE, incarnation=router.incarnation - 1
    )
    router.enqueue(b"fresh")

    assert stale not in router.replies
    assert router.dequeue() == [b"fresh"]


def test_bytes_that_mean_nothing_harm_nobody(deployment, router):
    for frame in (b"", b"\x00", b"\x02", b"\x02" + b"\xff" * 40, b"\x01{", b"\x01[]", b"\x09abc"):
        router._socket.send(frame)

    assert len(router.enqueue(b"a")) == 1


def test_sigterm_ends_it_in_order_with_what_is_in_flight_answered(deployment, router):
    calls = [router.send(EnqueueRequest("mail", [Job(b"a")]), Method.ENQUEUE) for _ in range(50)]
    router.reply(calls[0])
    deployment.processes[0].send_signal(signal.SIGTERM)

    assert deployment.processes[0].wait(SECONDS) == 0
    answered = 1
    while router.hear(3.0):
        pass
    answered += sum(call in router.replies for call in calls[1:])
    deployment.start()
    router.hello()

    assert len(router.dequeue()) == answered


def test_a_standby_can_be_stopped(deployment, router, wait_until):
    standby = deployment.start()
    wait_until(lambda: "waits for its store" in deployment.log(1))

    standby.terminate()

    assert standby.wait(SECONDS) == 0


def searchers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


def test_a_searcher_that_dies_is_replaced(deployment, router):
    router.enqueue(b"a", b"b")
    count = CountRequest("mail", PENDING, body_regex="a")
    assert router.call(count, Method.COUNT) == 1
    (searcher,) = searchers_of(deployment.processes[0])
    searcher.kill()

    assert router.call(count, Method.COUNT) == 1
    delete = DeleteJobsRequest("mail", PENDING, body_regex="b")
    assert router.call(delete, Method.DELETE_JOBS) == 1
    assert searchers_of(deployment.processes[0]) != [searcher]


def test_a_router_that_has_gone_costs_the_others_nothing(deployment, router):
    assert any(_is_had_after_a_router_left(deployment, router) for _ in range(40))


def _is_had_after_a_router_left(deployment, router) -> bool:
    """Whether a job is to be had whose claim could not be delivered, or that was not claimed.

    False if the shard answered before its own end of the connection was told that the router has
    gone: such a claim ends by its time-out."""
    router.enqueue(b"a")
    leaving = deployment.router()
    leaving.hello()
    # Frozen meanwhile, the shard hears of the call and of the router's end at the same time.
    os.kill(deployment.processes[0].pid, signal.SIGSTOP)
    leaving.send(DequeueRequest("mail", 1), Method.DEQUEUE)
    leaving.close()
    os.kill(deployment.processes[0].pid, signal.SIGCONT)

    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        if router.dequeue() == [b"a"]:
            return True
    return False


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ("shards: {s2: {engine: sqlite}}\n", "no shard 's1'; there are: s2"),
        ("shards: {s1: {engine: mysqll}}\n", "unknown engine 'mysqll'"),
    ],
)
def test_a_configuration_that_is_wrong(deployment, shards, says):
    (deployment.folder / layout.ETC / layout.SHARDS_FILE).write_text(shards)

    assert deployment.start().wait(SECONDS) == 3
    assert says in deployment.log()


def test_a_store_that_is_damaged_is_not_served(deployment):
    (deployment.folder / layout.DATA / "shard-s1.sqlite").write_bytes(b"not a database" * 100)

    assert deployment.start().wait(SECONDS) == 1
    assert "can't serve" in deployment.log()


def test_its_memory_is_small_and_it_sleeps_when_idle(deployment, router):
    process = psutil.Process(deployment.processes[0].pid)
    assert process.memory_info().rss < 60e6

    switches = process.num_ctx_switches().voluntary
    for _ in range(3):
        router.hear(2.0)
    assert process.num_ctx_switches().voluntary - switches < 100
