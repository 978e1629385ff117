"""The books of check-dequeue: what came out, whether twice, and what did not.

A job may rightly come out again after it failed or its claim timed out: with one attempt less.
Everything else that comes twice is a fault: the same body in another job (stored twice), or the
same attempt of a job (claimed twice). What is missing shows in the gaps: each run of `enqueue`
counts its jobs from 0.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from pinlaterd.model import ClaimedJob
from pinlaterd.tool.stamps import BodyDamaged, read_stamp
from pinlaterd.wording import how_many

_MAX_EXAMPLES = 10


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


class Ledger:
    """Filled by many threads. Takes about 200 bytes of memory for each job it has seen."""

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
