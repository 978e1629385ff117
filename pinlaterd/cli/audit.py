"""Bodies that can be checked: who made them, in which order, and whether they are whole.

    pinlater-load RUN SEQUENCE CRC32 xxxx…

RUN names one run of `pinlater enqueue`, SEQUENCE counts its jobs from 0, CRC32 (8 hex digits)
covers all the rest, the filling included. All jobs of `pinlater bench` have one body, by which it
tells them from those of others: `pinlater-bench xxxx…`.
"""

from __future__ import annotations

import secrets
import threading
import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

from pinlaterd.model import ClaimedJob
from pinlaterd.wording import how_many

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


_MAX_EXAMPLES = 10


# --- the audit of check-dequeue -------------------------------------------------------------
# A job may rightly come out again after it failed or its claim timed out: with one attempt less.
# Everything else that comes twice is a fault: the same body in another job (stored twice), or the
# same attempt of a job (claimed twice). What is missing shows in the gaps: each run of `enqueue`
# counts its jobs from 0.


@dataclass
class Verdict:
    """What was found; `examples` are a few of the faults, in words."""

    distinct: int = 0
    redelivered: int = 0
    unstamped: int = 0
    damaged: int = 0
    duplicates: int = 0
    missing: int = 0
    runs: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        return self.damaged + self.duplicates + self.missing


class DeliveryAudit:
    """What came out, whether twice, and what did not. Filled by many threads; takes about 200 bytes
    of memory for each job it has seen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._verdict = Verdict()
        # run -> sequence -> (descriptor, attempts that it had left when it came out last)
        self._seen: dict[str, dict[int, tuple[str, int]]] = {}

    def enter(self, job: ClaimedJob) -> None:
        with self._lock:
            try:
                stamp = read_stamp(job.body)
            except BodyDamaged:
                self._verdict.damaged += 1
                self._example(f"{job.descriptor}: the body is damaged")
                return
            if stamp is None:
                self._verdict.unstamped += 1
                return
            seen = self._seen.setdefault(stamp.run, {})
            before = seen.get(stamp.sequence)
            seen[stamp.sequence] = (job.descriptor, job.attempts_remaining)
            if before is None:
                self._verdict.distinct += 1
                return
            descriptor, attempts_remaining = before
            if descriptor == job.descriptor and job.attempts_remaining < attempts_remaining:
                self._verdict.redelivered += 1
                return
            self._verdict.duplicates += 1
            self._example(f"{job.descriptor}: came out before, as {descriptor}")

    def verdict(self) -> Verdict:
        """The faults so far; what is missing is known once the queue has run empty."""
        with self._lock:
            self._verdict.runs = len(self._seen)
            self._verdict.missing = 0
            for run, seen in self._seen.items():
                gaps = max(seen) + 1 - len(seen)
                self._verdict.missing += gaps
                if gaps:
                    first = next(n for n in range(max(seen)) if n not in seen)
                    missing = how_many(gaps, "job")
                    self._example(f"run {run}: {missing} missing, the first is number {first}")
            return self._verdict

    def _example(self, fault: str) -> None:
        if len(self._verdict.examples) < _MAX_EXAMPLES:
            self._verdict.examples.append(fault)
