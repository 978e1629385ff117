"""The hot messages to bytes: what `writer` writes, byte for byte, only faster.

Descriptors are mostly short and ASCII, jobs mostly differ in the body alone; both are made use of.
Whatever is unlike that takes the general way.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from pinlaterd.model import (
    AckInfo,
    AckRequest,
    DequeueRequest,
    DequeueResult,
    EnqueueRequest,
    Job,
    Payload,
)

_pack_u32: Final = struct.Struct(">I").pack
_I8: Final = struct.Struct(">b")
_I32: Final = struct.Struct(">i")
_I64: Final = struct.Struct(">q")
_F64: Final = struct.Struct(">d")

# The length of a short text as the four bytes in front of it: as text, so that ASCII texts can be
# put together as text and encoded at once (which is why it stops at 127).
_SHORT: Final = 128
_SHORT_TEXT: Final = tuple("\0\0\0" + chr(length) for length in range(_SHORT))

_ENQUEUE_RESULT: Final = b"\x0c\x00\x00\x0f\x00\x01\x0b"
_DEQUEUE_RESULT: Final = b"\x0c\x00\x00\x0d\x00\x01\x0b\x0b"
_METADATA: Final = b"\x0d\x00\x02\x0b\x0c"
_METADATA_HEAD: Final = struct.Struct(">3si3si3sI").pack
_METADATA_TAIL: Final = struct.Struct(">3siB").pack

_FIRST_TEXT: Final = b"\x0b\x00\x01"
_JOBS: Final = b"\x0f\x00\x02\x0c"
_SUCCEEDED: Final = b"\x0f\x00\x02\x0c"
_FAILED: Final = b"\x0f\x00\x03\x0c"


def _text(value: str) -> bytes:
    raw = value.encode()
    return _pack_u32(len(raw)) + raw


# --- answers --------------------------------------------------------------------------------


def enqueue_result(descriptors: Sequence[str]) -> bytes:
    """The result struct of enqueueJobs."""
    return b"".join((_ENQUEUE_RESULT, _pack_u32(len(descriptors)), _texts(descriptors), b"\0\0"))


def _texts(values: Sequence[str]) -> bytes:
    try:
        short = _SHORT_TEXT
        joined = "".join([short[len(value)] + value for value in values])
    except IndexError:
        return b"".join(map(_text, values))
    # Lengths in characters are lengths in bytes only where all is ASCII.
    return joined.encode("ascii") if joined.isascii() else b"".join(map(_text, values))


class DequeueAnswer:
    """The result struct of dequeueJobs in the making, both maps with the same jobs in the same
    order. Jobs come as columns, so that most of the work for each is done by whole lists."""

    def __init__(self) -> None:
        self._jobs = 0
        self._bodies: list[bytes] = []
        self._metadata: list[bytes] = []

    def __len__(self) -> int:
        return self._jobs

    def add(
        self,
        descriptors: Sequence[str],
        payloads: Sequence[Payload],
        claims: Sequence[str],
        timeout_seconds: int,
    ) -> None:
        """Jobs that were claimed together; the columns are of the same length."""
        keys = _keys(descriptors)
        pack_u32 = _pack_u32
        bodies = [payload[0] for payload in payloads]
        self._jobs += len(keys)
        self._bodies += _interleave(keys, [pack_u32(len(body)) for body in bodies], bodies)
        raws = [claim.encode() for claim in claims]
        kinds = [
            (payload[1], payload[2], len(raw)) for payload, raw in zip(payloads, raws, strict=True)
        ]
        around = {kind: _around_claim(*kind, timeout_seconds) for kind in set(kinds)}
        if len(around) == 1:
            [(head, tail)] = around.values()
            claimed = [head + raw + tail for raw in raws]
        else:
            both = [around[kind] for kind in kinds]
            claimed = [head + raw + tail for (head, tail), raw in zip(both, raws, strict=True)]
        self._metadata += _interleave(keys, claimed)

    def encode(self) -> bytes:
        count = _pack_u32(self._jobs)
        return b"".join(
            (_DEQUEUE_RESULT, count, *self._bodies, _METADATA, count, *self._metadata, b"\0\0")
        )


def dequeue_result(result: DequeueResult) -> bytes:
    """The result struct of dequeueJobs."""
    answer = DequeueAnswer()
    for timeout_seconds, group in groupby(result.jobs, itemgetter(5)):
        jobs = list(group)
        answer.add(
            [job.descriptor for job in jobs],
            [Payload(*job[1:4]) for job in jobs],
            [job.claim_descriptor for job in jobs],
            timeout_seconds,
        )
    return answer.encode()


def _keys(texts: Sequence[str]) -> list[bytes]:
    """Each with its length in front."""
    try:
        short = _SHORT_TEXT
        keys = [short[len(text)] + text for text in texts]
        return [key.encode("ascii") for key in keys]
    except (IndexError, UnicodeEncodeError):
        return [_text(text) for text in texts]


def _interleave(*columns: Sequence[bytes]) -> list[bytes]:
    """The first of each, then the second of each, …"""
    count = len(columns)
    mixed = [b""] * (count * len(columns[0]))
    for at, column in enumerate(columns):
        mixed[at::count] = column
    return mixed


def _around_claim(
    allowed: int, remaining: int, claim_bytes: int, timeout: int
) -> tuple[bytes, bytes]:
    """A job's metadata, before and behind its claim descriptor."""
    head = _METADATA_HEAD(
        b"\x08\x00\x01", allowed, b"\x08\x00\x02", remaining, b"\x0b\x00\x64", claim_bytes
    )
    return head, _METADATA_TAIL(b"\x08\x00\x65", timeout, 0)


# --- requests -------------------------------------------------------------------------------


def enqueue_request(request: EnqueueRequest) -> bytes:
    """A PinLaterEnqueueRequest."""
    parts = [_FIRST_TEXT, _text(request.queue)]
    parts += (_JOBS, _pack_u32(len(request.jobs)))
    last: tuple[object, ...] | None = None
    rest = b""
    for job in request.jobs:
        body = job.body
        if job[1:] != last:
            last = job[1:]
            rest = _job_rest(job)
        parts += (_FIRST_TEXT, _pack_u32(len(body)), body, rest)
    parts.append(b"\0")
    return b"".join(parts)


def _job_rest(job: Job) -> bytes:
    parts = [b"\x03\x00\x02", _I8.pack(job.priority)]
    if job.run_after_ms is not None:
        parts += (b"\x0a\x00\x03", _I64.pack(job.run_after_ms))
    parts += (b"\x08\x00\x04", _I32.pack(job.attempts_allowed))
    parts += (b"\x0b\x00\x05", _text(job.custom_status), b"\0")
    return b"".join(parts)


def ack_request(request: AckRequest) -> bytes:
    """A PinLaterJobAckRequest."""
    parts = [_FIRST_TEXT, _text(request.queue)]
    _acks(parts, _SUCCEEDED, request.succeeded)
    _acks(parts, _FAILED, request.failed)
    parts.append(b"\0")
    return b"".join(parts)


def _acks(parts: list[bytes], head: bytes, acks: Sequence[AckInfo]) -> None:
    parts += (head, _pack_u32(len(acks)))
    last: tuple[str, int, str | None] | None = None
    rest = b""
    for descriptor, status, delay_ms, claim in acks:
        these = (status, delay_ms, claim)
        if these != last:
            last = these
            rest = _ack_rest(status, delay_ms, claim)
        parts += (_FIRST_TEXT, _text(descriptor), rest)


def _ack_rest(status: str, delay_ms: int, claim: str | None) -> bytes:
    parts = [b"\x0b\x00\x02", _text(status), b"\x0a\x00\x03", _I64.pack(delay_ms)]
    if claim is not None:
        parts += (b"\x0b\x00\x64", _text(claim))
    parts.append(b"\0")
    return b"".join(parts)


def dequeue_request(request: DequeueRequest) -> bytes:
    """A PinLaterDequeueRequest."""
    parts = [_FIRST_TEXT, _text(request.queue), b"\x08\x00\x02", _I32.pack(request.limit)]
    if request.acks is not None:
        parts += (b"\x0c\x00\x03", ack_request(request.acks))
    parts += (b"\x02\x00\x04", b"\1" if request.dry_run else b"\0")
    parts += (b"\x04\x00\x05", _F64.pack(request.coverage))
    parts += (b"\x08\x00\x64", _I32.pack(request.max_wait_ms), b"\0")
    return b"".join(parts)


REQUESTS: Final[Mapping[type[Any], Callable[[Any], bytes]]] = {
    EnqueueRequest: enqueue_request,
    AckRequest: ack_request,
    DequeueRequest: dequeue_request,
}
