"""Calls with long lists, decoded some elements at a time, so that other calls can go on in between:
the longest lists take tens of milliseconds.

That is for calls laid out as usual. Of any other, `enqueue_parts` and `ack_slices` raise one of
UNUSUAL, at the latest at their end: until then nothing may be carried out. Such a call is decoded
whole (`codec.decode_call` says what is wrong with it, if anything is).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from pinlaterd.model import AckRequest, CallContext, EnqueueRequest, Method
from pinlaterd.rpc import fast_read
from pinlaterd.rpc.codec import encode_call
from pinlaterd.rpc.message import read_call_head
from pinlaterd.rpc.peek import Uncanonical

# Elements that are decoded at once, in one to five milliseconds.
SLICE: Final = 1_000

_pack_u32: Final = struct.Struct(">I").pack


class EnqueuePart(NamedTuple):
    """Some of an enqueue's jobs, as a call of their own."""

    message: bytes
    jobs: int


def enqueue_parts(
    message: bytes, most_elements: int, sizes_of: Callable[[int], Sequence[int]]
) -> Iterator[EnqueuePart]:
    """All jobs in order, as the bytes that came; `sizes_of` divides their number."""
    _, at = read_call_head(message)
    _, _, at = fast_read.context_and_queue(message, at)
    count, begin = fast_read.list_of_jobs(message, at, most_elements)
    head = message[: begin - 4]
    for size in sizes_of(count):
        _, end = fast_read.read_jobs(message, begin, size)
        yield EnqueuePart(
            b"".join((head, _pack_u32(size), message[begin:end], fast_read.END_ALL)), size
        )
        begin = end
    fast_read.expect_end(message, begin)


def encoded_parts(
    context: CallContext, whole: EnqueueRequest, sizes: Iterable[int]
) -> Iterator[EnqueuePart]:
    """The same of a call that was decoded whole."""
    queue, jobs = whole
    at = 0
    for size in sizes:
        part = EnqueueRequest(queue, jobs[at : at + size])
        yield EnqueuePart(encode_call(Method.ENQUEUE, 0, context, part), size)
        at += size


def ack_slices(message: bytes, most_elements: int) -> Iterator[tuple[CallContext, AckRequest]]:
    """All acks in order, at most SLICE at a time; the first request has none."""
    _, at = read_call_head(message)
    context, queue, at = fast_read.context_and_queue(message, at)
    yield context, AckRequest(queue)
    for is_succeeded in (True, False):
        left, at = fast_read.list_of_acks(message, at, succeeded=is_succeeded)
        if left > most_elements:
            raise Uncanonical
        while left:
            size = min(left, SLICE)
            acks, at = fast_read.read_acks(message, at, size, SLICE)
            yield context, AckRequest(queue, acks) if is_succeeded else AckRequest(queue, (), acks)
            left -= size
    fast_read.expect_end(message, at)


def ack_parts(whole: AckRequest) -> Iterator[AckRequest]:
    """The acks of `whole` in order, at most SLICE in a part; a short one is its only part."""
    queue, succeeded, failed = whole
    if len(succeeded) + len(failed) <= SLICE:
        yield whole
        return
    for at in range(0, len(succeeded), SLICE):
        yield AckRequest(queue, succeeded[at : at + SLICE])
    for at in range(0, len(failed), SLICE):
        yield AckRequest(queue, (), failed[at : at + SLICE])
