"""The answers to enqueues and dequeues, written by whole lists; those to dequeues are read so, too.

What reads them gives what `structs` gives for the same bytes, or raises one of UNUSUAL.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from pinlaterd.model import ClaimedJob, DequeueResult, Payload, defaults_behind, new_record
from pinlaterd.rpc.interface import U32, headers, pack_u32
from pinlaterd.rpc.peek import Unusual
from pinlaterd.rpc.structs import SHORT_TEXT, sized

DESCRIPTORS: Final = b"\x0c\x00\x00\x0f\x00\x01\x0b"
(_existed,) = headers("PinLaterEnqueueResponse", "existed")
_EXISTED: Final = _existed + b"\x02"  # a list of booleans
_JOBS: Final = b"\x0c\x00\x00\x0d\x00\x01\x0b\x0b"
_METADATA: Final = b"\x0d\x00\x02\x0b\x0c"
_IN_ORDER: Final = headers(
    "PinLaterDequeueMetadata",
    *("attempts_allowed", "attempts_remaining", "claim_descriptor", "claim_timeout_seconds"),
)
_ALLOWED, _REMAINING, _CLAIM, _TIMEOUT = _IN_ORDER
_OTHERS_OF_CLAIMED: Final = defaults_behind(ClaimedJob, "claim_timeout_seconds")
_BEFORE_CLAIM: Final = struct.Struct(">3si3si3s")
_BEHIND_CLAIM: Final = struct.Struct(">3siB")
_TAG5_U32: Final = struct.Struct(">5sI").unpack_from
_END_ALL: Final = b"\0\0"  # of the response and of the result


class CutEnqueued(NamedTuple):
    """The answer to an enqueue in pieces: of each job its descriptor, with its length in front, and
    1 if it existed, else 0."""

    descriptors: Sequence[bytes]
    existed: bytes


def cut_enqueued(message: bytes, at: int) -> CutEnqueued:
    """Cut the result struct of enqueueJobs."""
    if not message.startswith(DESCRIPTORS, at):
        raise Unusual
    (count,) = U32(message, at + len(DESCRIPTORS))
    at += len(DESCRIPTORS) + 4
    descriptors = []
    for _ in range(count):
        end = at + 4 + U32(message, at)[0]
        descriptors.append(message[at:end])
        at = end
    existed = bytes(count)  # no job has a key
    if message.startswith(_EXISTED + pack_u32(count), at):
        at += len(_EXISTED) + 4
        existed, at = message[at : at + count], at + count
    if message[at:] != _END_ALL or len(existed) != count:
        raise Unusual
    return CutEnqueued(descriptors, existed)


def join_enqueued(cut: CutEnqueued) -> bytes:
    """Write the result struct of enqueueJobs of jobs of which some have keys."""
    count = pack_u32(len(cut.descriptors))
    return b"".join((DESCRIPTORS, count, *cut.descriptors, _EXISTED, count, cut.existed, _END_ALL))


class PayloadColumns(NamedTuple):
    """Payloads as columns, one for each field. Reading one field of many payloads is cheaper this
    way."""

    bodies: Sequence[bytes]
    attempts_allowed: Sequence[int]
    attempts_remaining: Sequence[int]


def columns_of(payloads: Sequence[Payload]) -> PayloadColumns:
    """Return the columns of payloads, of one at least."""
    return new_record(PayloadColumns, zip(*payloads, strict=True))


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
        payloads: PayloadColumns,
        claims: Sequence[str],
        timeout_seconds: int,
    ) -> int:
        """Add jobs that were claimed together; the columns are of the same length. Returns how many
        bytes their bodies take."""
        keys = _keys(descriptors)
        attempts, body_bytes = self._add_bodies(keys, payloads)
        before = {each: _before_claim(each) for each in set(attempts)}
        self._metadata += _interleave(
            keys,
            [before[each] for each in attempts],
            _keys(claims),
            [_BEHIND_CLAIM.pack(_TIMEOUT, timeout_seconds, 0)] * len(keys),
        )
        return body_bytes

    def add_counted(
        self,
        prefix: str,
        local_ids: Sequence[int],
        payloads: PayloadColumns,
        claimer: str,
        first_claim: int,
        timeout_seconds: int,
    ) -> int:
        """Do the same with jobs of one queue and priority: `prefix` begins their descriptors,
        `claimer` those of their claims, whose numbers count up."""
        claims = range(first_claim, first_claim + len(local_ids))
        key = counted_text(prefix, min(local_ids), max(local_ids))
        claim = counted_text(claimer, first_claim, claims[-1])
        if key is None or claim is None:
            descriptors = [f"{prefix}{local_id}" for local_id in local_ids]
            named = [f"{claimer}{number}" for number in claims]
            return self.add(descriptors, payloads, named, timeout_seconds)
        keys = [key % local_id for local_id in local_ids]
        attempts, body_bytes = self._add_bodies(keys, payloads)
        texts = {each: _metadata_text(key, each, claim, timeout_seconds) for each in set(attempts)}
        alike = len(texts) == 1  # as most of the time
        text = (
            texts[attempts[0]] * len(claims)
            if alike
            else b"".join(map(texts.__getitem__, attempts))
        )
        numbers = [0] * (2 * len(claims))
        numbers[::2], numbers[1::2] = local_ids, claims
        self._metadata.append(text % tuple(numbers))
        return body_bytes

    def _add_bodies(
        self, keys: list[bytes], payloads: PayloadColumns
    ) -> tuple[Sequence[tuple[int, int]], int]:
        """Return the attempts allowed and remaining of each, and how many bytes the bodies take."""
        sizes = list(map(len, payloads.bodies))
        self._jobs += len(keys)
        self._bodies += _interleave(keys, list(map(pack_u32, sizes)), payloads.bodies)
        attempts = zip(payloads.attempts_allowed, payloads.attempts_remaining, strict=True)
        return list(attempts), sum(sizes)

    def encode(self) -> bytes:
        count = pack_u32(self._jobs)
        return b"".join((_JOBS, count, *self._bodies, _METADATA, count, *self._metadata, _END_ALL))


def _before_claim(attempts: tuple[int, int]) -> bytes:
    allowed, remaining = attempts
    return _BEFORE_CLAIM.pack(_ALLOWED, allowed, _REMAINING, remaining, _CLAIM)


@lru_cache(maxsize=256)
def _metadata_text(
    key: bytes, attempts: tuple[int, int], claim: bytes, timeout_seconds: int
) -> bytes:
    """Write the format of metadata of jobs that differ only in their numbers and their claims'."""
    before = _before_claim(attempts).replace(b"%", b"%%")
    behind = _BEHIND_CLAIM.pack(_TIMEOUT, timeout_seconds, 0).replace(b"%", b"%%")
    return b"".join((key, before, claim, behind))


def counted_text(prefix: str, least: int, greatest: int) -> bytes | None:
    """Write the format of texts of `prefix` and a number from `least` to `greatest`, with their
    length in front; None if these have not equally many digits."""
    digits = len(str(least))
    alike = least == greatest or len(str(greatest)) == digits
    return _counted_text(prefix, digits) if alike else None


@lru_cache(maxsize=1024)
def _counted_text(prefix: str, digits: int) -> bytes:
    text = prefix.encode()
    return (pack_u32(len(text) + digits) + text).replace(b"%", b"%%") + b"%d"


def _keys(texts: Sequence[str]) -> list[bytes]:
    """Write each with its length in front."""
    try:
        return [(SHORT_TEXT[len(text)] + text).encode("ascii") for text in texts]
    except (IndexError, UnicodeEncodeError):
        return [sized(text) for text in texts]


def _interleave(*columns: Sequence[bytes]) -> list[bytes]:
    """Return the first of each, then the second of each, …"""
    count = len(columns)
    mixed = [b""] * (count * len(columns[0]))
    for at, column in enumerate(columns):
        mixed[at::count] = column
    return mixed


def count_dequeued(message: bytes, at: int) -> int:
    """Count the jobs in the result struct of dequeueJobs, as this version writes it."""
    return int(U32(message, at + 8)[0]) if message.startswith(_JOBS, at) else 0


def read_dequeue_result(message: bytes, at: int) -> DequeueResult:
    """Read the result struct of dequeueJobs, as this version writes it: the same jobs in both maps,
    in the same order, with all metadata."""
    if not message.startswith(_JOBS, at):
        raise Unusual
    (count,) = U32(message, at + 8)
    at += 12
    bodies: dict[bytes, bytes] = {}
    for _ in range(count):
        begin = at + 4
        end = begin + U32(message, at)[0]
        at = end + 4 + U32(message, end)[0]
        bodies[message[begin:end]] = message[end + 4 : at]
    tag, claimed = _TAG5_U32(message, at)
    if tag != _METADATA or claimed != len(bodies) or count != claimed:
        raise Unusual
    at += 9
    jobs = []
    for descriptor, body in bodies.items():
        begin = at + 4
        at = begin + U32(message, at)[0]
        if message[begin:at] != descriptor:
            raise Unusual
        tag1, allowed, tag2, remaining, tag3 = _BEFORE_CLAIM.unpack_from(message, at)
        begin = at + 21
        at = begin + U32(message, at + 17)[0]
        tag4, timeout, stop = _BEHIND_CLAIM.unpack_from(message, at)
        if stop or (tag1, tag2, tag3, tag4) != _IN_ORDER:
            raise Unusual
        claim = message[begin:at].decode()
        fields = (descriptor.decode(), body, allowed, remaining, claim, timeout)
        jobs.append(new_record(ClaimedJob, fields + _OTHERS_OF_CLAIMED))
        at += 8
    if message[at:] != _END_ALL:
        raise Unusual
    return DequeueResult(jobs)
