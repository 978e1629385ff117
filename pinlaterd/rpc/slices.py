"""Calls with long lists, decoded some elements at a time, so that other calls can go on in between:
the longest lists take tens of milliseconds.

Both iterators raise what `codec.decode_call` raises for the whole call, at the latest when they
end: until then nothing may be carried out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple, cast

from pinlaterd.model import AckRequest, CallContext, EnqueueRequest, Method
from pinlaterd.rpc import fast_read
from pinlaterd.rpc.codec import decode_call, encode_call
from pinlaterd.rpc.message import read_call_head
from pinlaterd.rpc.peek import UNUSUAL, Uncanonical

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
    """All jobs in order; `sizes_of` divides their number."""
    cut = 0
    try:
        for part in _cut_enqueue(message, most_elements, sizes_of):
            cut += 1
            yield part
    except UNUSUAL:
        _, context, request = decode_call(message, most_elements)
        queue, jobs = cast("EnqueueRequest", request)
        at = 0
        for number, size in enumerate(sizes_of(len(jobs))):
            if number >= cut:
                of_part = EnqueueRequest(queue, jobs[at : at + size])
                yield EnqueuePart(encode_call(Method.ENQUEUE, 0, context, of_part), size)
            at += size


def _cut_enqueue(
    message: bytes, most_elements: int, sizes_of: Callable[[int], Sequence[int]]
) -> Iterator[EnqueuePart]:
    """The same, of a call in the usual layout: its own bytes."""
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


def ack_slices(message: bytes, most_elements: int) -> Iterator[tuple[CallContext, AckRequest]]:
    """All acks in order, at most SLICE at a time; the first request has none."""
    decoded = 0
    try:
        for context, request in _decode_acks(message, most_elements):
            decoded += 1
            yield context, request
    except UNUSUAL:
        _, context, whole = decode_call(message, most_elements)
        acks = cast("AckRequest", whole)
        for number, request in enumerate(chain([AckRequest(acks.queue)], _pieces(acks))):
            if number >= decoded:
                yield context, request


def ack_parts(whole: AckRequest) -> Iterator[AckRequest]:
    """The acks of `whole` in order, at most SLICE in a part; a short one is its only part."""
    if len(whole.succeeded) + len(whole.failed) <= SLICE:
        yield whole
    else:
        yield from _pieces(whole)


def _pieces(whole: AckRequest) -> Iterator[AckRequest]:
    queue, succeeded, failed = whole
    for at in range(0, len(succeeded), SLICE):
        yield AckRequest(queue, succeeded[at : at + SLICE])
    for at in range(0, len(failed), SLICE):
        yield AckRequest(queue, (), failed[at : at + SLICE])


def _decode_acks(message: bytes, most_elements: int) -> Iterator[tuple[CallContext, AckRequest]]:
    """The same slices, of a call in the usual layout."""
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
