"""Tuned readers of enqueues, dequeues and acks, in the layout in which all common clients write.

Each gives exactly what `structs` gives for the same bytes, or raises one of UNUSUAL, and then
`structs` decides what the bytes mean or what is wrong with them: nothing here explains an error,
and anything that looks odd may be declined.

Jobs of one call mostly differ in the body alone. What follows the body, up to the first field of
the next job, is remembered as bytes together with what they meant: parsing never looks behind
where it stops, so that the same bytes at the same place mean the same, and comparing them replaces
parsing them. The defaults of fields that are not given come from the interface, as for `structs`;
a job's priority and attempts from its queue.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

from pinlaterd.model import (
    NO_DEFAULTS,
    AckInfo,
    AckRequest,
    AlikeAcks,
    AlikeJobs,
    CallContext,
    DequeueRequest,
    EnqueueRequest,
    Job,
    JobDefaults,
    JobOptions,
    all_but_first,
    defaults_behind,
    new_record,
)
from pinlaterd.rpc.interface import I32, STRUCTS, U32, headers, pack_u32
from pinlaterd.rpc.peek import (
    ACKS,
    CLAIM_TIMEOUT,
    CONTEXT_SOURCE,
    COVERAGE,
    DRY_RUN,
    FAILED,
    FIRST_TEXT,
    JOBS,
    KEY,
    LIMIT,
    MAX_WAIT,
    REQUEST_ID,
    REQUEST_TEXT,
    SUCCEEDED,
    TAG3_I32,
    TAG4_U32,
    TAG6_U32,
    Unusual,
    read_call_head,
)

_I8: Final = struct.Struct(">b").unpack_from
_I64: Final = struct.Struct(">q").unpack_from
_F64: Final = struct.Struct(">d").unpack_from

_END: Final = b"\0"
_END_ALL: Final = b"\0\0"  # of the request and of the arguments

_PRIORITY, _RUN_AFTER, _ATTEMPTS, _CUSTOM_STATUS = headers(
    "PinLaterJob", "priority", "run_after_ms", "attempts_allowed", "custom_status"
)
_KEY_OF_ALL, _EXPIRES_AT, _RUN_AFTER_US, _EXPIRES_AT_US = headers(
    "PinLaterJob", "key_of_all_queues", "expires_at_ms", "run_after_us", "expires_at_us"
)
_OPTIONS: Final = JobOptions()
_END_OF_JOB: Final = 0
_APPEND_STATUS, _RETRY_DELAY, _CLAIM, _RETRYABLE = headers(
    "PinLaterJobAckInfo", "append_custom_status", "retry_delay_ms", "claim_descriptor", "retryable"
)
# Longer ends of enqueues, behind the last body, are not remembered.
_USUAL_TAIL_BYTES: Final = 64
_NEXT_ACK: Final = b"\0" + FIRST_TEXT


# --- calls ----------------------------------------------------------------------------------

_CONTEXT_DEFAULTS: Final = CallContext(*STRUCTS["RequestContext"].defaults)
_ACK_REQUEST: Final = AckRequest(*STRUCTS["PinLaterJobAckRequest"].defaults)
_DEQUEUE: Final = DequeueRequest(*STRUCTS["PinLaterDequeueRequest"].defaults)

_USUAL_DEFAULTS: Final = JobDefaults()
_JOB: Final[Job] = STRUCTS["PinLaterJob"].made(list(STRUCTS["PinLaterJob"].defaults))
_ACK: Final = AckInfo(*STRUCTS["PinLaterJobAckInfo"].defaults)
_OTHERS_OF_CONTEXT: Final = defaults_behind(CallContext, "request_id")
_OTHERS_OF_JOB: Final = defaults_behind(Job, "options")
_OTHERS_OF_ACK: Final = defaults_behind(AckInfo, "retryable")


def read_enqueue(
    message: bytes, at: int, most: int, defaults: Mapping[str, JobDefaults] = NO_DEFAULTS
) -> tuple[CallContext, EnqueueRequest]:
    """Read the arguments of enqueueJobs that begin at `at`; decline more than `most` jobs.
    `defaults`: of jobs, by the queues that have others than usual."""
    context, queue, at = _context_and_queue(message, at)
    tag, count = TAG4_U32(message, at)
    if tag != JOBS or count > most:
        raise Unusual
    jobs, at = read_jobs(message, at + 8, count, defaults.get(queue, _USUAL_DEFAULTS))
    if message[at:] != _END_ALL:
        raise Unusual
    return context, new_record(EnqueueRequest, (queue, jobs))


def read_ack(message: bytes, at: int, most: int) -> tuple[CallContext, AckRequest]:
    """Read the arguments of ackDequeuedJobs and ackJobs; decline a list of more than `most`."""
    context, queue, at = _context_and_queue(message, at)
    acks, at = _ack_request(message, queue, at, most)
    if message[at:] != _END:
        raise Unusual
    return context, acks


def read_dequeue(message: bytes, at: int, most: int) -> tuple[CallContext, DequeueRequest]:
    """Read the arguments of dequeueJobs; decline a list of acks of more than `most` elements."""
    context, queue, at = _context_and_queue(message, at)
    tag, limit = TAG3_I32(message, at)
    if tag != LIMIT:
        raise Unusual
    at += 7
    acks, dry_run = _DEQUEUE.acks, _DEQUEUE.dry_run
    coverage, max_wait_ms = _DEQUEUE.coverage, _DEQUEUE.max_wait_ms
    if message.startswith(ACKS, at):
        begin = at + 10
        end = begin + U32(message, at + 6)[0]
        acks, at = _ack_request(message, message[begin:end].decode(), end, most)
    if message.startswith(DRY_RUN, at):
        dry_run = message[at + 3] != 0
        at += 4
    if message.startswith(COVERAGE, at):
        (coverage,) = _F64(message, at + 3)
        at += 11
    if message.startswith(MAX_WAIT, at):
        (max_wait_ms,) = I32(message, at + 3)
        at += 7
    claim_timeout_ms = _DEQUEUE.claim_timeout_ms
    if message.startswith(CLAIM_TIMEOUT, at):
        (claim_timeout_ms,) = I32(message, at + 3)
        at += 7
    if message[at:] != _END_ALL:
        raise Unusual
    fields = (queue, limit, acks, dry_run, coverage, max_wait_ms, claim_timeout_ms)
    return context, new_record(DequeueRequest, fields)


def _context_and_queue(message: bytes, at: int) -> tuple[CallContext, str, int]:
    """Read the context, and the request up to its first field, the queue's name."""
    tag, length = TAG6_U32(message, at)
    if tag != CONTEXT_SOURCE:
        raise Unusual
    begin = at + 10
    at = begin + length
    source = message[begin:at].decode()
    request_id = _CONTEXT_DEFAULTS.request_id
    if message.startswith(REQUEST_ID, at):
        begin = at + 7
        at = begin + U32(message, at + 3)[0]
        request_id = message[begin:at].decode()
    if message[at] or not message.startswith(REQUEST_TEXT, at + 1):
        raise Unusual
    begin = at + 11
    at = begin + U32(message, at + 7)[0]
    context = new_record(CallContext, (source, request_id, *_OTHERS_OF_CONTEXT))
    return context, message[begin:at].decode(), at


def read_jobs(
    message: bytes, at: int, count: int, defaults: JobDefaults
) -> tuple[Sequence[Job], int]:
    """Read so many elements of a list of jobs; return them and where they end."""
    if count == 0:
        return [], at
    startswith = message.startswith
    if not startswith(FIRST_TEXT, at):
        raise Unusual
    if count == 1:
        begin = at + 7
        end = begin + U32(message, at + 3)[0]
        job, behind = _last_job(message, end, defaults)
        if job.options is None:
            return [new_record(Job, (message[begin:end], *all_but_first(job)))], behind
    others: list[Job] = []  # those before the ones that are alike
    bodies: list[bytes] = []
    append = bodies.append
    first = at
    at += 3
    # From behind a body up to the length of the next one.
    between = b""
    alike = _JOB
    size = 0
    for _ in range(count - 1):
        (length,) = U32(message, at)
        begin = at + 4
        end = begin + length
        if not size or not startswith(between, end):
            job, at = _job_behind(message, end, defaults)
            if job.options is not None:
                read, ends = _jobs_with_options(message, first, count, defaults)
                return read, ends[-1]
            if not startswith(FIRST_TEXT, at):
                raise Unusual
            between = message[end : at + 3]
            size = len(between)
            if bodies:
                others += AlikeJobs(alike, bodies)
                bodies.clear()
            alike = job
        append(message[begin:end])
        at = end + size
    begin = at + 4
    end = begin + U32(message, at)[0]
    job, at = _last_job(message, end, defaults)
    if job.options is not None:
        read, ends = _jobs_with_options(message, first, count, defaults)
        return read, ends[-1]
    if bodies and job != alike:
        others += AlikeJobs(alike, bodies)
        bodies.clear()
    append(message[begin:end])
    last = AlikeJobs(job, bodies)
    return [*others, *last] if others else last, at


def _jobs_with_options(
    message: bytes, at: int, count: int, defaults: JobDefaults
) -> tuple[Sequence[Job], list[int]]:
    """Read as read_jobs does, where jobs differ in their keys, too; return where each ends."""
    found = _alike_jobs_with_keys(message, at, count, defaults) if count else None
    if found is not None:
        return found
    jobs: list[Job] = []
    ends: list[int] = []
    for _ in range(count):
        if not message.startswith(FIRST_TEXT, at):
            raise Unusual
        begin = at + 7
        end = begin + U32(message, at + 3)[0]
        job, at = _job_behind(message, end, defaults)
        jobs.append(job._replace(body=message[begin:end]))
        ends.append(at)
    return jobs, ends


def _alike_jobs_with_keys(
    message: bytes, at: int, count: int, defaults: JobDefaults
) -> tuple[AlikeJobs, list[int]] | None:
    """Do so if all differ only in their bodies and keys, and each has one."""
    startswith, size_of = message.startswith, U32
    bodies: list[bytes] = []
    keys: list[str] = []
    ends: list[int] = []
    begin = at + 7
    end = begin + size_of(message, at + 3)[0]
    _, key_at = _job_fields(message, end, defaults)
    job, after = _job_behind(message, end, defaults)
    if job.options is None or job.options.key is None:
        return None
    # From behind a body up to the length of the key, and from behind that to the end of the job.
    between = message[end : key_at + len(KEY)]
    size = len(between)
    key_begin = end + size + 4
    behind = message[key_begin + size_of(message, key_begin - 4)[0] : after]
    for _ in range(count):
        begin = at + 7
        end = begin + size_of(message, at + 3)[0]
        if not (startswith(FIRST_TEXT, at) and startswith(between, end)):
            return None
        key_begin = end + size + 4
        key_end = key_begin + size_of(message, key_begin - 4)[0]
        if not startswith(behind, key_end):
            return None
        bodies.append(message[begin:end])
        keys.append(message[key_begin:key_end].decode())
        at = key_end + len(behind)
        ends.append(at)
    alike = job._replace(options=job.options._replace(key=None))
    return AlikeJobs(alike, bodies, keys), ends


def _job_behind(message: bytes, at: int, defaults: JobDefaults) -> tuple[Job, int]:
    """Return a job whose body ends at `at`, without that, and where it ends."""
    fields, at = _job_fields(message, at, defaults)
    options = _JOB.options
    if message[at] != _END_OF_JOB:
        options, at = _job_options(message, at)
    return new_record(Job, (b"", *fields, options, *_OTHERS_OF_JOB)), at + 1


def _job_fields(message: bytes, at: int, defaults: JobDefaults) -> tuple[tuple[Any, ...], int]:
    """Return the fields of a job behind its body and before its options, and where they end."""
    priority, attempts = defaults
    run_after_ms, status = _JOB.run_after_ms, _JOB.custom_status
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
        (attempts,) = I32(message, at + 3)
        at += 7
        tag = message[at : at + 3]
    if tag == _CUSTOM_STATUS:
        begin = at + 7
        at = begin + U32(message, at + 3)[0]
        status = message[begin:at].decode()
    return (priority, run_after_ms, attempts, status), at


def _job_options(message: bytes, at: int) -> tuple[JobOptions | None, int]:
    """Return the options of a job, which begin at `at`, and where they end."""
    key, expires_at_ms, of_all_queues, run_after_us, expires_at_us = _OPTIONS
    if message.startswith(KEY, at):
        begin = at + 7
        at = begin + U32(message, at + 3)[0]
        key = message[begin:at].decode()
    if message.startswith(_KEY_OF_ALL, at):
        of_all_queues = message[at + 3] != 0
        at += 4
    if message.startswith(_EXPIRES_AT, at):
        (expires_at_ms,) = _I64(message, at + 3)
        at += 11
    if message.startswith(_RUN_AFTER_US, at):
        (run_after_us,) = _I64(message, at + 3)
        at += 11
    if message.startswith(_EXPIRES_AT_US, at):
        (expires_at_us,) = _I64(message, at + 3)
        at += 11
    if message[at] != _END_OF_JOB:
        raise Unusual
    options = JobOptions(key, expires_at_ms, of_all_queues, run_after_us, expires_at_us)
    return (None if options == _OPTIONS else options), at


def _last_job(message: bytes, at: int, defaults: JobDefaults) -> tuple[Job, int]:
    """Return the last job, without its body, and where it ends; a tail met before is remembered."""
    if defaults is _USUAL_DEFAULTS and 0 < len(message) - at <= _USUAL_TAIL_BYTES:
        job, size = _job_of_tail(message[at:])
        return job, at + size
    return _job_behind(message, at, defaults)


@lru_cache(maxsize=256)
def _job_of_tail(tail: bytes) -> tuple[Job, int]:
    return _job_behind(tail, 0, _USUAL_DEFAULTS)


def _ack_request(message: bytes, queue: str, at: int, most: int) -> tuple[AckRequest, int]:
    """Read a PinLaterJobAckRequest, from behind its queue's name on, and where it ends."""
    succeeded, failed = _ACK_REQUEST.succeeded, _ACK_REQUEST.failed
    if message.startswith(SUCCEEDED, at):
        (count,) = U32(message, at + 4)
        succeeded, at = read_acks(message, at + 8, count, most) if count else ([], at + 8)
    if message.startswith(FAILED, at):
        (count,) = U32(message, at + 4)
        failed, at = read_acks(message, at + 8, count, most) if count else ([], at + 8)
    if message[at]:
        raise Unusual
    return new_record(AckRequest, (queue, succeeded, failed)), at + 1


def read_acks(message: bytes, at: int, count: int, most: int) -> tuple[Sequence[AckInfo], int]:
    """Read so many elements, one at least, of a list of acks, and where they end. Like `read_jobs`,
    but for the claim, which differs from ack to ack."""
    acks: list[AckInfo] = []
    append, startswith, new = acks.append, message.startswith, new_record
    if count > most or not startswith(FIRST_TEXT, at):
        raise Unusual
    if count > 1:
        alike = _alike_acks(message, at, count)
        if alike is not None:
            return alike
    at += 3
    # From behind a descriptor up to the length of the claim; without one, of the next descriptor.
    between = b""
    size = 0
    status, delay_ms, claim, others = "", 0, None, _OTHERS_OF_ACK
    retryable = unsaid = _ACK.retryable
    for _ in range(count - 1):
        begin = at + 4
        end = begin + U32(message, at)[0]
        is_known = size and startswith(between, end)
        if is_known and claim is None:
            at = end + size
        elif is_known:
            claim_at = end + size
            at = claim_at + 4 + U32(message, claim_at)[0]
            claim = message[claim_at + 4 : at].decode()
            retryable = unsaid
            is_known = startswith(_NEXT_ACK, at)
            at += 4
        if not is_known:
            status, delay_ms, claim, retryable, claim_at, at = _ack_rest(message, end)
            if not startswith(FIRST_TEXT, at):
                raise Unusual
            at += 3
            between = message[end : at if claim is None else claim_at]
            size = len(between)
        fields = (message[begin:end].decode(), status, delay_ms, claim, retryable)
        append(new(AckInfo, fields + others))
    begin = at + 4
    end = begin + U32(message, at)[0]
    status, delay_ms, claim, retryable, _, at = _ack_rest(message, end)
    fields = (message[begin:end].decode(), status, delay_ms, claim, retryable)
    append(new(AckInfo, fields + others))
    return acks, at


def _alike_acks(message: bytes, at: int, count: int) -> tuple[AlikeAcks, int] | None:
    """Read the elements of a list of acks and where it ends, if they differ only in their jobs'
    numbers and those have equally many digits: then each takes as many bytes as the first."""
    begin = at + 7
    (length,) = U32(message, at + 3)
    end = begin + length
    status, delay_ms, claim, retryable, _, after = _ack_rest(message, end)
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
    head = message[begin:cut].decode()
    alike = new_record(AckInfo, (head, status, delay_ms, claim, retryable, *_OTHERS_OF_ACK))
    return AlikeAcks(alike, digits), list_end


def _ack_rest(message: bytes, at: int) -> tuple[str, int, str | None, bool | None, int, int]:
    """Return the text to append, the delay, the claim and whether the job is retryable, which
    follow a descriptor; where the claim's length is (`at`: no claim), and where the ack ends."""
    status, delay_ms = _ACK.append_custom_status, _ACK.retry_delay_ms
    claim, retryable = _ACK.claim_descriptor, _ACK.retryable
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
        tag = message[at : at + 3]
    if tag == _RETRYABLE:
        retryable = message[at + 3] != 0
        at += 4
    if message[at]:
        raise Unusual
    return status, delay_ms, claim, retryable, claim_at, at + 1


# --- long lists, some elements at a time ----------------------------------------------------

# Elements that are decoded at once, in one to five milliseconds: then other calls can go on.
_LIMIT_BYTES: Final = 7
_TIMEOUT_BYTES: Final = 7 + len(_END_ALL)
SLICE: Final = 1_000


class EnqueuePart(NamedTuple):
    """Some of an enqueue's jobs, as a call of their own."""

    message: bytes
    jobs: int


def enqueue_parts(
    message: bytes, most_elements: int, sizes_of: Callable[[int], Sequence[int]]
) -> Iterator[EnqueuePart]:
    """Yield all jobs in order, as the bytes that came; `sizes_of` divides their number. Raises one
    of UNUSUAL, perhaps only at the end: until then nothing may be carried out."""
    _, _, at = read_call_head(message)
    _, _, at = _context_and_queue(message, at)
    tag, count = TAG4_U32(message, at)
    if tag != JOBS or count > most_elements:
        raise Unusual
    head, begin = message[: at + 4], at + 8
    for size in sizes_of(count):
        _, end = read_jobs(message, begin, size, _USUAL_DEFAULTS)
        part = b"".join((head, pack_u32(size), message[begin:end], _END_ALL))
        yield EnqueuePart(part, size)
        begin = end
    if message[begin:] != _END_ALL:
        raise Unusual


class CutEnqueue(NamedTuple):
    """An enqueue with each job as the bytes that came, too."""

    request: EnqueueRequest
    pieces: Sequence[bytes]
    head: bytes

    def part(self, places: Sequence[int]) -> bytes:
        """Return some of the jobs as a call of their own."""
        pieces = [self.pieces[place] for place in places]
        return b"".join((self.head, pack_u32(len(pieces)), *pieces, _END_ALL))


def cut_enqueue(message: bytes, most: int, defaults: Mapping[str, JobDefaults]) -> CutEnqueue:
    """Read an enqueue of at most `most` jobs. Raises one of UNUSUAL."""
    _, _, at = read_call_head(message)
    _, queue, at = _context_and_queue(message, at)
    tag, count = TAG4_U32(message, at)
    if tag != JOBS or count > most:
        raise Unusual
    begin = at + 8
    of_queue = defaults.get(queue, _USUAL_DEFAULTS)
    jobs, ends = _jobs_with_options(message, begin, count, of_queue)
    if message[ends[-1] if ends else begin :] != _END_ALL:
        raise Unusual
    pieces = [message[start:end] for start, end in pairwise((begin, *ends))]
    return CutEnqueue(EnqueueRequest(queue, jobs), pieces, message[: at + 4])


def dequeue_without_acks(message: bytes) -> bytes:
    """Return a call in the usual layout as far as its limit, and with its claims' time-out. Raises
    one of UNUSUAL."""
    _, _, at = read_call_head(message)
    _, _, at = _context_and_queue(message, at)
    end = message[-_TIMEOUT_BYTES:]
    return message[: at + _LIMIT_BYTES] + (end if end.startswith(CLAIM_TIMEOUT) else _END_ALL)


def ack_parts(whole: AckRequest) -> Iterator[AckRequest]:
    """Yield the acks of `whole` in order, at most SLICE in a part; a short one is its only part."""
    queue, succeeded, failed = whole.queue, whole.succeeded, whole.failed
    if len(succeeded) + len(failed) <= SLICE:
        yield whole
        return
    for at in range(0, len(succeeded), SLICE):
        yield AckRequest(queue, succeeded[at : at + SLICE])
    for at in range(0, len(failed), SLICE):
        yield AckRequest(queue, (), failed[at : at + SLICE])
