"""Lists of more elements than a call may have are refused at their head, at nobody's cost."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from pinlaterd.client import Client, Job, PinLaterError
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CallContext,
    CheckpointInfo,
    CheckpointRequest,
    DequeueRequest,
    EnqueueRequest,
    LookupRequest,
    Method,
    Request,
)
from pinlaterd.rpc import codec
from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.hostile.calls import field, head, text
from tests.hostile.conftest import MIB, QUEUE, Bystander, attacked, peak_bytes
from tests.hostile.wire import RawConnection
from tests.rpc.thrift_bytes import LIST, STRING, STRUCT
from tests.servers.redis import RedisServer, new_shard, redis_program, redis_server

__all__ = ["redis_program", "redis_server"]

MOST_JOBS = 10_000  # max_jobs_per_call
TOO_MANY = 400_000
SLOWEST_BYSTANDER_SECONDS = 0.5  # decoding one of these lists takes longer than that
TRIES = 12
PEAK_GROWTH_BYTES = 100 * MIB  # one message of 20 MB, received, passed on, not decoded
USUAL_SECONDS = 1.0
LISTS_SECONDS = 2.0
LISTS = 5
USUAL_CALL_SECONDS = 0.002  # on a quiet machine
MOST_DELAY_SECONDS = 0.1  # there; measured: 0.06, and 0.15 where the router does all at once

_ACK = AckInfo(f"{QUEUE}:s1:p1:1")
_OTHER_SHARD = AckInfo(f"{QUEUE}:s2:p1:2")


def _acks(count: int) -> list[AckInfo]:
    return [_ACK, _OTHER_SHARD] * (count // 2)


REQUESTS: dict[str, tuple[Method, Request]] = {
    "duplicates": (Method.ACK, AckRequest(QUEUE, [_ACK] * TOO_MANY, ())),
    "succeeded": (Method.ACK, AckRequest(QUEUE, _acks(TOO_MANY), ())),
    "failed": (Method.ACK, AckRequest(QUEUE, _acks(2), _acks(TOO_MANY))),
    "dequeue": (Method.DEQUEUE, DequeueRequest(QUEUE, 1, AckRequest(QUEUE, (), _acks(TOO_MANY)))),
    "checkpoints": (
        Method.CHECKPOINT,
        CheckpointRequest(QUEUE, [CheckpointInfo(_ACK.descriptor)] * TOO_MANY),
    ),
    "descriptors": (Method.LOOKUP, LookupRequest([_ACK.descriptor] * TOO_MANY)),
    "jobs": (Method.ENQUEUE, EnqueueRequest(QUEUE, [Job(b"")] * TOO_MANY)),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_it_is_refused_at_its_head(deployment: Deployment, unharmed: Bystander, wait_until, name):
    method, request = REQUESTS[name]
    message = codec.encode_call(method, 7, CallContext("hostile"), request)

    _refuse(deployment, unharmed, wait_until, method, message)


def test_the_list_before_the_queues_name(deployment: Deployment, unharmed: Bystander, wait_until):
    """In an order of fields that no usual client writes, so that its head tells nothing."""
    descriptor = field(STRING, 1, text(_ACK.descriptor.encode())) + bytes(1)
    acks = field(LIST, 2, b"\x0c" + TOO_MANY.to_bytes(4, "big") + descriptor * TOO_MANY)
    request = acks + field(STRING, 1, text(QUEUE.encode())) + bytes(1)
    context = field(STRUCT, 1, field(STRING, 1, text(b"hostile")) + bytes(1))
    message = head(Method.ACK) + context + field(STRUCT, 2, request) + bytes(1)

    _refuse(deployment, unharmed, wait_until, Method.ACK, message)


def _refuse(
    deployment: Deployment,
    unharmed: Bystander,
    wait_until: WaitUntil,
    method: Method,
    message: bytes,
) -> None:
    sizes = {pid: peak_bytes(pid) for pid in deployment.pids().values()}

    # On a busy machine decoding takes longer, too.
    bound = SLOWEST_BYSTANDER_SECONDS + 4 * statistics.median(unharmed.seconds)
    slowest = bound
    for _ in range(TRIES):
        _exchange(deployment, unharmed, method, message)
        _end_round(unharmed, wait_until)
        slowest = min(slowest, max(unharmed.seconds))
        if slowest < bound:
            break

    for pid, size in sizes.items():
        assert peak_bytes(pid) < size + PEAK_GROWTH_BYTES
    assert slowest < bound


def _end_round(unharmed: Bystander, wait_until: WaitUntil) -> None:
    ended = len(unharmed.seconds)
    wait_until(lambda: len(unharmed.seconds) > ended)


def _exchange(deployment: Deployment, unharmed: Bystander, method: Method, message: bytes) -> None:
    unharmed.seconds.clear()  # the message was made in this very process
    with RawConnection(deployment.port) as connection:
        [answer] = connection.exchange(message)
        assert connection.open
    with pytest.raises(PinLaterError, match=f"{TOO_MANY} elements; at most {MOST_JOBS}"):
        codec.decode_reply(method, answer)


def test_the_error_says_what_to_do(deployment: Deployment):
    says = "jobsSucceeded has 10001 elements; .* split it, or raise max_jobs_per_call"
    with deployment.client() as client, pytest.raises(PinLaterError, match=says):
        client.ack(QUEUE, succeeded=[_ACK] * (MOST_JOBS + 1))


@pytest.fixture
def redis_deployment(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    settings = {"engine": "redis", "master": {"host": "127.0.0.1", "port": redis_server.port}}
    shards = {new_shard(): settings for _ in range(2)}
    with attacked(tmp_path_factory.mktemp("d"), shards) as deployment:
        yield deployment


def test_the_longest_lists_delay_others_little(deployment: Deployment):
    _assert_others_are_delayed_little(deployment)


def test_the_longest_lists_delay_others_little_on_redis(redis_deployment: Deployment):
    _assert_others_are_delayed_little(redis_deployment)


def _assert_others_are_delayed_little(deployment: Deployment) -> None:
    """Acks of jobs on both shards, one list after the other."""
    names = sorted(shard["name"] for shard in deployment.status()["shards"])
    acks = [AckInfo(f"{QUEUE}:s{names[i % 2]}:p1:{i + 1}") for i in range(MOST_JOBS)]
    message = codec.encode_call(Method.ACK, 7, CallContext("hostile"), AckRequest(QUEUE, acks))
    delays = []
    with deployment.client("other") as client:
        client.create_queue("other")
        for _ in range(TRIES):
            usual = _call_seconds(client, lambda elapsed: elapsed < USUAL_SECONDS)
            with _sent_again_and_again(deployment, message) as sent:
                beside = _call_seconds(client, partial(_goes_on, sent))
            slowness = max(1.0, statistics.median(usual) / USUAL_CALL_SECONDS)
            delays.append((_p99(beside), 2 * _p99(usual) + MOST_DELAY_SECONDS * slowness))
            if delays[-1][0] < delays[-1][1]:
                return
    pytest.fail(f"p99 and its bound, in seconds: {delays}")


def _goes_on(sent: Callable[[], int], elapsed: float) -> bool:
    return elapsed < LISTS_SECONDS or sent() < LISTS


def _call_seconds(client: Client, goes_on: Callable[[float], bool]) -> list[float]:
    """What each call of another client takes."""
    began = moment = time.monotonic()
    seconds = []

    def note() -> None:
        nonlocal moment
        before, moment = moment, time.monotonic()
        seconds.append(moment - before)

    while goes_on(moment - began):
        client.enqueue("other", [b"x"])
        note()
        jobs = client.dequeue("other", limit=10, max_wait_ms=1_000)
        note()
        client.ack("other", succeeded=jobs)
        note()
    return seconds


@contextmanager
def _sent_again_and_again(deployment: Deployment, message: bytes) -> Iterator[Callable[[], int]]:
    """Yields what tells how often it was answered."""
    answers: list[bytes] = []
    stop = threading.Event()

    def send() -> None:
        with RawConnection(deployment.port) as connection:
            while not stop.is_set():
                answers.extend(connection.exchange(message))

    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send)
        try:
            yield lambda: len(answers)
        finally:
            stop.set()
        sending.result()
    assert {codec.peek_error(answer) for answer in answers} == {None}


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)]
