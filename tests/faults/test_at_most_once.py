"""Jobs with one attempt: whatever is killed, whoever hangs up, none is handed out twice."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from pinlaterd.client import Client, ConnectionFailed, PinLaterError
from pinlaterd.model import CallContext, DequeueRequest, Job, JobState, Method
from pinlaterd.rpc import codec
from tests.deployment import Deployment, serving
from tests.faults.conftest import SETTINGS

pytestmark = pytest.mark.service

JOBS = 4_000
BODY = b"x" * 5_000
LIMIT = 20
# Of an answer of LIMIT jobs: all descriptors that a client reads before it hangs up.
READ_BYTES = (1, 30_000, 90_000, 1 << 20)


class _Takers:
    """Clients that dequeue, of which most hang up before they have read all of the answer."""

    def __init__(self, deployment: Deployment, queue: str) -> None:
        self.seen: Counter[bytes] = Counter()
        self.answers = 0
        self._deployment = deployment
        self._descriptor = re.compile(rf"{queue}:s[0-9]+:p1:[0-9]+".encode())
        call = codec.encode_call(Method.DEQUEUE, 1, CallContext("t"), DequeueRequest(queue, LIMIT))
        body = json.dumps({"limit": LIMIT}).encode()
        request = f"POST /v2/queues/{queue}/claims HTTP/1.1\r\nHost: localhost\r\n"
        request += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        calls = {
            deployment.port: len(call).to_bytes(4, "big") + call,
            deployment.http_port: request.encode() + body,
        }
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._take, args=(port, message, read_bytes))
            for port, message in calls.items()
            for read_bytes in READ_BYTES
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _take(self, port: int, message: bytes, read_bytes: int) -> None:
        is_framed = port == self._deployment.port
        while not self._stop.is_set():
            read = b""
            with suppress(OSError), socket.socket() as taker:
                taker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                taker.settimeout(5)
                taker.connect(("127.0.0.1", port))
                taker.sendall(message)
                while len(read) < read_bytes and (data := taker.recv(4096)):
                    read += data
                    if is_framed and len(read) - 4 >= int.from_bytes(read[:4], "big"):
                        break
            with self._lock:
                self.answers += 1
                self.seen.update(set(self._descriptor.findall(read)))


@pytest.fixture
def own_deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("d")
    with serving(folder, shards=3, settings=SETTINGS, http=True) as deployment:
        yield deployment


def test_a_job_with_one_attempt_is_handed_out_once(
    own_deployment: Deployment, wait_until: Callable[..., None]
):
    deployment, queue = own_deployment, "once"
    takers = _Takers(deployment, queue)
    with deployment.client() as client:
        client.create_queue(queue)
        for _ in range(JOBS // 100):
            client.enqueue(queue, [Job(BODY, attempts_allowed=1)] * 100)
        takers.start()
        try:
            for program in ("router", "shard-1", "http", "coordinator", "shard-2", "http"):
                answers = takers.answers
                wait_until(lambda before=answers: takers.answers > before + 4)
                killed = deployment.kill(program)
                wait_until(lambda p=program, k=killed: deployment.pids().get(p, k) != k)
            deployment.wait_until_serving()
            wait_until(lambda: _pending(client, queue) == 0, seconds=150)
        finally:
            takers.stop()

        assert len(takers.seen) > JOBS / 4
        assert set(takers.seen.values()) == {1}
        counts = [client.count(queue, state) for state in JobState]
        assert sum(counts) == JOBS
        assert counts[JobState.IN_PROGRESS] == JOBS


def _pending(client: Client, queue: str) -> int:
    with suppress(ConnectionFailed, PinLaterError):
        return int(client.count(queue, JobState.PENDING))
    return -1
