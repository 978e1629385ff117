"""Bodies that can be checked: who made them, in which order, and whether they are whole.

    pinlater-load RUN SEQUENCE CRC32 xxxx…

RUN names one run of `pinlater enqueue`, SEQUENCE counts its jobs from 0, CRC32 (8 hex digits)
covers all the rest, the filling included. All jobs of `pinlater bench` have one body, by which it
tells them from those of others: `pinlater-bench xxxx…`.
"""

from __future__ import annotations

import secrets
import zlib
from typing import NamedTuple

_MAGIC = b"pinlater-load"
_BENCH_MAGIC = b"pinlater-bench "
MIN_BODY_BYTES = 64


class Stamp(NamedTuple):
    """What a stamped body says."""

    run: str
    sequence: int


class BodyDamaged(Exception):
    """The body bears our stamp, but is not what was enqueued."""


def new_run() -> str:
    return secrets.token_hex(4)


def stamped_body(stamp: Stamp, size_bytes: int) -> bytes:
    """A body of `size_bytes` (at least MIN_BODY_BYTES)."""
    head = f"{stamp.run} {stamp.sequence}".encode()
    filling = b"x" * (size_bytes - len(_MAGIC) - len(head) - len("  00000000 "))
    return b" ".join((_MAGIC, head, _checksum(head, filling), filling))


def bench_body(size_bytes: int) -> bytes:
    """A body of `size_bytes` (at least MIN_BODY_BYTES)."""
    return _BENCH_MAGIC.ljust(size_bytes, b"x")


def is_bench_body(body: bytes) -> bool:
    """Whether `pinlater bench` made it."""
    return body.startswith(_BENCH_MAGIC)


def read_stamp(body: bytes) -> Stamp | None:
    """The stamp of a body, None if it never had one; raises BodyDamaged if it is not whole."""
    if not body.startswith(_MAGIC + b" "):
        return None
    fields = body.split(b" ", 4)
    if len(fields) == 5:
        _, run, sequence, checksum, filling = fields
        if _checksum(run + b" " + sequence, filling) == checksum:
            return Stamp(run.decode(), int(sequence))
    raise BodyDamaged


def _checksum(head: bytes, filling: bytes) -> bytes:
    return b"%08x" % zlib.crc32(filling, zlib.crc32(head))
