"""Valid calls of every method, and others that know no rules."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CallContext,
    CheckpointInfo,
    CheckpointRequest,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    DequeueRequest,
    EnqueueRequest,
    Job,
    JobState,
    LookupRequest,
    Method,
    QueueNamesRequest,
    Request,
    RetryFailedRequest,
    ScanRequest,
)
from pinlaterd.rpc import codec
from tests.rpc.thrift_bytes import (
    BOOL,
    BYTE,
    DOUBLE,
    FORMATS,
    I16,
    I32,
    I64,
    LIST,
    MAP,
    SET,
    STRING,
    STRUCT,
    Field,
    write_message,
)

_SCALARS = (*FORMATS, STRING)
_TYPES = (*_SCALARS, STRUCT, MAP, SET, LIST)
_VALUES: dict[int, Sequence[object]] = {
    BOOL: (0, 1, 2, -1),
    BYTE: (0, 1, -1, 127, -128),
    I16: (0, 1, -1, 2**15 - 1, -(2**15)),
    I32: (0, 1, -1, 1000, 2**31 - 1, -(2**31)),
    I64: (0, 1, -1, 2**53, 2**63 - 1, -(2**63)),
    DOUBLE: (0.0, 1.0, -1.0, 1e308, float("nan"), float("inf")),
    STRING: (
        b"",
        b"q",
        b"target",
        b"target:s1:p1:1",
        b"\xff\xfe",
        b"\x00",
        "é☃\U0001f600".encode(),
    ),
}


def valid_calls(queue: str) -> list[bytes]:
    """One call of each method, with every field given."""
    descriptor = f"{queue}:s1:p1:1"
    ack = AckInfo(descriptor, "status", 1000, "h:1:2:s:3")
    requests: dict[Method, Request] = {
        Method.CREATE_QUEUE: CreateQueueRequest(queue),
        Method.DELETE_QUEUE: DeleteQueueRequest(queue, "password"),
        Method.ENQUEUE: EnqueueRequest(queue, [Job(b"body", 1, 0, 2, "status")] * 3),
        Method.DEQUEUE: DequeueRequest(queue, 3, AckRequest(queue, [ack], [ack]), False, 1.0, 50),
        Method.ACK: AckRequest(queue, [ack], [ack]),
        Method.CHECKPOINT: CheckpointRequest(
            queue, [CheckpointInfo(descriptor, b"body", True, 0, 2, "status", "h:1:2:s:3")]
        ),
        Method.LOOKUP: LookupRequest([descriptor, f"{queue}:s2:p1:1"], True),
        Method.COUNT: CountRequest(queue, JobState.PENDING, 1, False, "b+"),
        Method.QUEUE_NAMES: QueueNamesRequest(),
        Method.SCAN: ScanRequest(queue, JobState.PENDING, 1, False, "0", 10, "b+"),
        Method.RETRY_FAILED: RetryFailedRequest(queue, 1, 1, 0, 10),
        Method.DELETE_JOBS: DeleteJobsRequest(queue, JobState.SUCCEEDED, 1, "b+", 10),
    }
    context = CallContext("hostile:host", "id")
    return [codec.encode_call(method, 7, context, request) for method, request in requests.items()]


def head(method: str, kind: int = 1, seqid: int = 7) -> bytes:
    """The head of a strict message; kind 1 is a call, 4 a oneway one."""
    return write_message(method, [], kind=kind, seqid=seqid)[:-1]


def field(kind: int, number: int, value: bytes) -> bytes:
    return struct.pack(">Bh", kind, number) + value


def text(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value


def random_fields(chance: random.Random, depth: int = 0) -> list[Field]:
    """Fields of numbers that the interface uses, of types that it does not."""
    kinds = [chance.choice(_types(depth)) for _ in range(chance.randrange(6))]
    numbers = (1, 2, 3, 4, 5, 6, 10, 100, 101, -1, 32767)
    return [
        Field(chance.choice(numbers), kind, _random_value(kind, chance, depth + 1))
        for kind in kinds
    ]


def _random_value(kind: int, chance: random.Random, depth: int) -> Any:
    """A well-formed value of that type, of no particular meaning."""
    if kind in _VALUES:
        return chance.choice(_VALUES[kind])
    if kind == STRUCT:
        return random_fields(chance, depth + 1)
    inner, key = chance.choice(_types(depth)), chance.choice(_SCALARS)
    values = [_random_value(inner, chance, depth + 1) for _ in range(chance.choice((0, 1, 3)))]
    if kind == MAP:
        return key, inner, [(_random_value(key, chance, depth + 1), each) for each in values]
    return inner, values


def _types(depth: int) -> Sequence[int]:
    return _TYPES if depth < 3 else _SCALARS


def mutated(message: bytes, chance: random.Random) -> bytes:
    """The message with a few of its bytes changed, missing, doubled or cut off."""
    data = bytearray(message)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(data) + 1)
        what = chance.randrange(5)
        if what == 0 and at < len(data):
            data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        elif what == 1:
            del data[at : at + chance.choice((1, 4))]
        elif what == 2:
            data[at:at] = chance.randbytes(chance.choice((1, 4)))
        elif what == 3:
            data[at:at] = data[at : at + chance.randrange(1, 20)]
        else:
            del data[at:]
    return bytes(data)
