"""Lists of more elements than a call may have are refused at their head, at nobody's cost."""

from __future__ import annotations

import pytest

from pinlaterd.client import Job, PinLaterError
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
from tests.hostile.calls import LIST, STRING, STRUCT, field, head, text
from tests.hostile.conftest import MIB, QUEUE, Bystander, peak_bytes
from tests.hostile.wire import RawConnection

MOST_JOBS = 10_000  # max_jobs_per_call
TOO_MANY = 400_000
SLOWEST_BYSTANDER_SECONDS = 0.5  # decoding one of these lists takes longer than that
TRIES = 3  # a busy machine holds up one of them, decoding would hold up all
PEAK_GROWTH_BYTES = 100 * MIB  # one message of 20 MB, received, passed on, not decoded

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

    slowest = SLOWEST_BYSTANDER_SECONDS
    for _ in range(TRIES):
        _exchange(deployment, unharmed, method, message)
        _end_round(unharmed, wait_until)
        slowest = min(slowest, max(unharmed.seconds))

    for pid, size in sizes.items():
        assert peak_bytes(pid) < size + PEAK_GROWTH_BYTES
    assert slowest < SLOWEST_BYSTANDER_SECONDS


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
