"""The hot messages from bytes, in the layout in which all common clients write.

Each reader here gives exactly what `reader` gives for the same bytes, or raises one of UNUSUAL,
and then `reader` decides what the bytes mean or what is wrong with them. So nothing here has to
explain an error, and anything that looks odd may be declined.

Why it is fast: jobs of one call mostly differ in the body alone. What follows the body, up to the
first field of the next job, is remembered as bytes together with what they meant. Parsing is
deterministic and never looks behind where it stops, so that the same bytes at the same place mean
the same: the comparison of a few bytes replaces the parsing of up to four fields. The defaults of
fields that are not given come from the binding, as for `reader`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from pinlaterd.model import (
    AckInfo,
    AckRequest,
    AlikeAcks,
    CallContext,
    ClaimedJob,
    DequeueRequest,
    DequeueResult,
    EnqueueRequest,
    Job,
)
from pinlaterd.rpc.binding import defaults
from pinlaterd.rpc.message import U32
from pinlaterd.rpc.peek import CONTEXT_SOURCE, REQUEST_ID, REQUEST_TEXT, Uncanonical

_TAG3_U32: Final = struct.Struct(">3sI").unpack_from
_TAG3_I32: Final = struct.Struct(">3si").unpack_from
_TAG4_U32: Final = struct.Struct(">4sI").unpack_from
_TAG5_U32: Final = struct.Struct(">5sI").unpack_from
_TAG6_U32: Final = struct.Struct(">6sI").unpack_from
_I8: Final = struct.Struct(">b").unpack_from
_I32: Final = struct.Struct(">i").unpack_from
_I64: Final = struct.Struct(">q").unpack_from
_F64: Final = struct.Struct(">d").unpack_from

_END: Final = b"\0"
END_ALL: Final = b"\0\0"  # of the request and of the arguments

# Field headers: type, then id. Those that begin an element of a list are its first field's.
_BODY: Final = b"\x0b\x00\x01"
_PRIORITY: Final = b"\x03\x00\x02"
_RUN_AFTER: Final = b"\x0a\x00\x03"
_ATTEMPTS: Final = b"\x08\x00\x04"
_CUSTOM_STATUS: Final = b"\x0b\x00\x05"
_JOBS: Final = b"\x0f\x00\x02\x0c"

_DESCRIPTOR: Final = b"\x0b\x00\x01"
_NEXT_DESCRIPTOR: Final = b"\0" + _DESCRIPTOR
_APPEND_STATUS: Final = b"\x0b\x00\x02"
_RETRY_DELAY: Final = b"\x0a\x00\x03"
_CLAIM: Final = b"\x0b\x00\x64"
_SUCCEEDED: Final = b"\x0f\x00\x02\x0c"
_FAILED: Final = b"\x0f\x00\x03\x0c"

_LIMIT: Final = b"\x08\x00\x02"
_ACKS: Final = b"\x0c\x00\x03\x0b\x00\x01"
_DRY_RUN: Final = b"\x02\x00\x04"
_COVERAGE: Final = b"\x04\x00\x05"
_MAX_WAIT: Final = b"\x08\x00\x64"

_DESCRIPTORS: Final = b"\x0c\x00\x00\x0f\x00\x01\x0b"
_CLAIMED_JOBS: Final = b"\x0c\x00\x00\x0d\x00\x01\x0b\x0b"
_METADATA: Final = b"\x0d\x00\x02\x0b\x0c"
_METADATA_HEAD: Final = struct.Struct(">3si3si3sI").unpack_from
_METADATA_TAIL: Final = struct.Struct(">3siB").unpack_from
_METADATA_TAGS: Final = (b"\x08\x00\x01", b"\x08\x00\x02", b"\x0b\x00\x64", b"\x08\x00\x65")

_new: Final = tuple.__new__


_JOB: Final = defaults("PinLaterJob")
_ACK: Final = defaults("PinLaterJobAckInfo")
_ACK_REQUEST: Final = defaults("PinLaterJobAckRequest")
_DEQUEUE: Final = defaults("PinLaterDequeueRequest")
_CONTEXT: Final = defaults("RequestContext")

# What follows a job's body, or an ack's descriptor, as the fields of the model.
_JobRest = tuple[int, int | None, int, str]
_AckRest = tuple[str, int, str | None]


def read_enqueue(message: bytes, at: int, most: int) -> tuple[CallContext, EnqueueRequest]:
    """The arguments of enqueueJobs that begin at `at`; declined with more than `most` jobs."""
    context, queue, at = context_and_queue(message, at)
    count, at = list_of_jobs(message, at, most)
    jobs, at = read_jobs(message, at, count)
    expect_end(message, at)
    return context, _new(EnqueueRequest, (queue, jobs))


def read_ack(message: bytes, at: int, most: int) -> tuple[CallContext, AckRequest]:
    """The arguments of ackDequeuedJobs; declined if a list has more than `most` elements."""
    context, queue, at = context_and_queue(message, at)
    acks, at = _ack_request(message, queue, at, most)
    if message[at:] != _END:
        raise Uncanonical
    return context, acks


def read_dequeue(message: bytes, at: int, most: int) -> tuple[CallContext, DequeueRequest]:
    """The arguments of dequeueJobs; declined if a list of acks has more than `most` elements."""
    context, queue, at = context_and_queue(message, at)
    tag, limit = _TAG3_I32(message, at)
    if tag != _LIMIT:
        raise Uncanonical
    at += 7
    acks: AckRequest | None = None
    if message.startswith(_ACKS, at):
        begin = at + 10
        end = begin + U32(message, at + 6)[0]
        acks, at = _ack_request(message, message[begin:end].decode(), end, most)
    dry_run = _DEQUEUE["dry_run"]
    coverage = _DEQUEUE["coverage"]
    max_wait_ms = _DEQUEUE["max_wait_ms"]
    if message.startswith(_DRY_RUN, at):
        dry_run = message[at + 3] != 0
        at += 4
    if message.startswith(_COVERAGE, at):
        (coverage,) = _F64(message, at + 3)
        at += 11
    if message.startswith(_MAX_WAIT, at):
        (max_wait_ms,) = _I32(message, at + 3)
        at += 7
    expect_end(message, at)
    return context, DequeueRequest(queue, limit, acks, dry_run, coverage, max_wait_ms)


def context_and_queue(message: bytes, at: int) -> tuple[CallContext, str, int]:
    """The context, and the request up to its first field, the queue's name."""
    tag, length = _TAG6_U32(message, at)
    if tag != CONTEXT_SOURCE:
        raise Uncanonical
    begin = at + 10
    at = begin + length
    source = message[begin:at].decode()
    request_id: str = _CONTEXT["request_id"]
    if message.startswith(REQUEST_ID, at):
        begin = at + 7
        at = begin + U32(message, at + 3)[0]
        request_id = message[begin:at].decode()
    if message[at] or not message.startswith(REQUEST_TEXT, at + 1):
        raise Uncanonical
    begin = at + 11
    at = begin + U32(message, at + 7)[0]
    return _new(CallContext, (source, request_id)), message[begin:at].decode(), at


def expect_end(message: bytes, at: int) -> None:
    if message[at:] != END_ALL:
        raise Uncanonical


# --- jobs -----------------------------------------------------------------------------------


def list_of_jobs(message: bytes, at: int, most: int) -> tuple[int, int]:
    """How many jobs an enqueue has, and where the first begins; declined with more than `most`."""
    tag, count = _TAG4_U32(message, at)
    if tag != _JOBS or count > most:
        raise Uncanonical
    return count, at + 8


def read_jobs(message: bytes, at: int, count: int) -> tuple[list[Job], int]:
    """So many elements of a list of jobs, and where they end."""
    jobs: list[Job] = []
    if count == 0:
        return jobs, at
    append, startswith, new = jobs.append, message.startswith, _new
    if not startswith(_BODY, at):
        raise Uncanonical
    at += 3
    # From behind a body up to the length of the next one.
    between = b""
    priority, run_after_ms, attempts, status = _NO_JOB_REST
    size = 0
    for _ in range(count - 1):
        (length,) = U32(message, at)
        begin = at + 4
        end = begin + length
        if not size or not startswith(between, end):
            (priority, run_after_ms, attempts, status), at = _job_rest(message, end)
            if not startswith(_BODY, at):
                raise Uncanonical
            between = message[end : at + 3]
            size = len(between)
        append(new(Job, (message[begin:end], priority, run_after_ms, attempts, status)))
        at = end + size
    begin = at + 4
    end = begin + U32(message, at)[0]
    rest, at = _job_rest(message, end)
    append(new(Job, (message[begin:end], *rest)))
    return jobs, at


def _job_rest(message: bytes, at: int) -> tuple[_JobRest, int]:
    """The fields behind the body, and where the job ends."""
    priority, run_after_ms, attempts, status = _NO_JOB_REST
    tag = message[at : at + 3]
    if tag == _PRIORITY:
        (priority,) = _I8(message, at + 3)
        at += 4
        tag = message[at : at + 3]
    if tag == _RUN_AFTER:
        (run_after_ms,) = _I64(message, at + 3)
        at += 11
        tag = message[at : at + 3]
    if tag == _ATTEMPTS:
        (attempts,) = _I32(message, at + 3)
        at += 7
        tag = message[at : at + 3]
    if tag == _CUSTOM_STATUS:
        begin = at + 7
        at = begin + U32(message, at + 3)[0]
        status = message[begin:at].decode()
    if message[at]:
        raise Uncanonical
    return (priority, run_after_ms, attempts, status), at + 1


_NO_JOB_REST: Final[_JobRest] = (
    _JOB["priority"],
    _JOB["run_after_ms"],
    _JOB["attempts_allowed"],
    _JOB["custom_status"],
)


# --- acks -----------------------------------------------------------------------------------


def _ack_request(message: bytes, queue: str, at: int, most: int) -> tuple[AckRequest, int]:
    """A PinLaterJobAckRequest, from behind its queue's name on, and where it ends."""
    succeeded, failed = _ACK_REQUEST["succeeded"], _ACK_REQUEST["failed"]
    if message.startswith(_SUCCEEDED, at):
        succeeded, at = read_acks(message, at + 8, U32(message, at + 4)[0], most)
    if message.startswith(_FAILED, at):
        failed, at = read_acks(message, at + 8, U32(message, at + 4)[0], most)
    if message[at]:
        raise Uncanonical
    return AckRequest(queue, succeeded, failed), at + 1


def list_of_acks(message: bytes, at: int, *, succeeded: bool) -> tuple[int, int]:
    """How many succeeded, or failed, acks there are, and where the first begins."""
    if not message.startswith(_SUCCEEDED if succeeded else _FAILED, at):
        return 0, at
    return U32(message, at + 4)[0], at + 8


def _alike_acks(message: bytes, at: int, count: int) -> tuple[AlikeAcks, int] | None:
    """The elements of a list of acks and where it ends, if they differ only in their jobs' numbers
    and those have equally many digits: then each takes as many bytes as the first."""
    begin = at + 7
    (length,) = U32(message, at + 3)
    end = begin + length
    rest, _, after = _ack_rest(message, end)
    cut = message.rfind(b":", begin, end) + 1
    tail = message[end:after]
    list_end = at + (after - at) * count
    last_end = list_end - len(tail)
    if not cut or not message.startswith(tail, last_end):
        return None
    # What stands between two numbers is the same everywhere, with the length of the descriptor.
    digits = message[cut:last_end].split(tail + message[at:cut])
    if len(digits) != count or set(map(len, digits)) != {end - cut}:
        return None
    if not b"".join(digits).isdigit():
        return None
    return AlikeAcks(message[begin:cut].decode(), digits, rest), list_end


def read_acks(message: bytes, at: int, count: int, most: int) -> tuple[Sequence[AckInfo], int]:
    """So many elements of a list of acks, and where they end. Like `read_jobs`; beside what
    follows a descriptor, that part of it is remembered which comes before the claim."""
    acks: list[AckInfo] = []
    if count == 0:
        return acks, at
    append, startswith, new = acks.append, message.startswith, _new
    if count > most or not startswith(_DESCRIPTOR, at):
        raise Uncanonical
    if count > 1:
        alike = _alike_acks(message, at, count)
        if alike is not None:
            return alike
    at += 3
    between = before_claim = b""
    status, delay_ms, first_claim = _NO_ACK_REST
    for _ in range(count - 1):
        begin = at + 4
        end = begin + U32(message, at)[0]
        claim = first_claim
        if between and startswith(between, end):
            at = end + len(between)
        elif before_claim and startswith(before_claim, end):
            claim, at = _claim(message, end + len(before_claim))
        else:
            (status, delay_ms, claim), claim_at, at = _ack_rest(message, end)
            if not startswith(_DESCRIPTOR, at):
                raise Uncanonical
            at += 3
            first_claim = claim
            before_claim = message[end:claim_at]
            between = message[end:at]
        append(new(AckInfo, (message[begin:end].decode(), status, delay_ms, claim)))
    begin = at + 4
    end = begin + U32(message, at)[0]
    rest, _, at = _ack_rest(message, end)
    append(new(AckInfo, (message[begin:end].decode(), *rest)))
    return acks, at


def _claim(message: bytes, at: int) -> tuple[str, int]:
    """A claim that ends its ack, and where the next ack's descriptor begins."""
    begin = at + 4
    end = begin + U32(message, at)[0]
    if not message.startswith(_NEXT_DESCRIPTOR, end):
        raise Uncanonical
    return message[begin:end].decode(), end + 4


def _ack_rest(message: bytes, at: int) -> tuple[_AckRest, int, int]:
    """The fields behind the descriptor, where the claim's length is (`at`: no claim), and
    where the ack ends."""
    status, delay_ms, claim = _NO_ACK_REST
    claim_at = at
    tag = message[at : at + 3]
    if tag == _APPEND_STATUS:
        begin = at + 7
        at = begin + U32(message, at + 3)[0]
        status = message[begin:at].decode()
        tag = message[at : at + 3]
    if tag == _RETRY_DELAY:
        (delay_ms,) = _I64(message, at + 3)
        at += 11
        tag = message[at : at + 3]
    if tag == _CLAIM:
        claim_at = at + 3
        begin = at + 7
        at = begin + U32(message, at + 3)[0]
        claim = message[begin:at].decode()
    if message[at]:
        raise Uncanonical
    return (status, delay_ms, claim), claim_at, at + 1


_NO_ACK_REST: Final[_AckRest] = (
    _ACK["append_custom_status"],
    _ACK["retry_delay_ms"],
    _ACK["claim_descriptor"],
)


# --- answers --------------------------------------------------------------------------------


def read_enqueue_result(message: bytes, at: int) -> list[str]:
    """The result struct of enqueueJobs."""
    if not message.startswith(_DESCRIPTORS, at):
        raise Uncanonical
    (count,) = U32(message, at + 7)
    at += 11
    descriptors = []
    for _ in range(count):
        begin = at + 4
        at = begin + U32(message, at)[0]
        descriptors.append(message[begin:at].decode())
    expect_end(message, at)
    return descriptors


def count_dequeued(message: bytes, at: int) -> int:
    """How many jobs the result struct of dequeueJobs has, as this version writes it."""
    return int(U32(message, at + 8)[0]) if message.startswith(_CLAIMED_JOBS, at) else 0


def read_dequeue_result(message: bytes, at: int) -> DequeueResult:
    """The result struct of dequeueJobs, as this version writes it: the same jobs in both maps,
    in the same order, with all metadata."""
    if not message.startswith(_CLAIMED_JOBS, at):
        raise Uncanonical
    (count,) = U32(message, at + 8)
    at += 12
    bodies: dict[str, bytes] = {}
    for _ in range(count):
        begin = at + 4
        end = begin + U32(message, at)[0]
        descriptor = message[begin:end].decode()
        begin = end + 4
        at = begin + U32(message, end)[0]
        bodies[descriptor] = message[begin:at]
    tag, claimed = _TAG5_U32(message, at)
    if tag != _METADATA or claimed != len(bodies) or count != claimed:
        raise Uncanonical
    at += 9
    jobs = []
    for descriptor, body in bodies.items():
        begin = at + 4
        at = begin + U32(message, at)[0]
        if message[begin:at] != descriptor.encode():
            raise Uncanonical
        tag1, allowed, tag2, remaining, tag3, length = _METADATA_HEAD(message, at)
        begin = at + 21
        at = begin + length
        tag4, timeout, stop = _METADATA_TAIL(message, at)
        if stop or (tag1, tag2, tag3, tag4) != _METADATA_TAGS:
            raise Uncanonical
        claim = message[begin:at].decode()
        jobs.append(_new(ClaimedJob, (descriptor, body, allowed, remaining, claim, timeout)))
        at += 8
    expect_end(message, at)
    return DequeueResult(jobs)
