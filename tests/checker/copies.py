"""Jobs of a shard whose store an operator copied, and later puts back: they are as they were then.

What was acknowledged in between is undone with that, and nothing else may be: a job is as it was at
the copy, or as calls have left it since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.checker.automaton import ABSENT, Contradiction, Effect, State, Step, ageless, explain
from tests.checker.automaton import Rules as OneRules
from tests.checker.run import JobHistory, Run


class Copied(NamedTuple):
    """A job, and the same job in the copy."""

    now: State
    copy: State

    def __str__(self) -> str:
        return f"{self.now} (copied: {self.copy})"


@dataclass(frozen=True)
class Rules:
    one: OneRules

    def spontaneous(self, job: Copied, now: float) -> Iterator[Copied]:
        for after in self.one.spontaneous(job.now, now):
            yield job._replace(now=after)

    def ageless(self, job: Copied, now: float) -> tuple[Copied, Sequence[float]]:
        alike = Copied(ageless(job.now, now), ageless(job.copy, now))
        return alike, (job.now.since, job.copy.since)


def is_copied(run: Run, job: JobHistory) -> bool:
    return any(job.shard in record.arguments["shards"] for record in run.by_operation["copied"])


def explain_copied(run: Run, job: JobHistory) -> Contradiction | None:
    """As `explain`."""
    steps = [_lifted(step) for step in job.steps]
    return explain(steps, Rules(run.rules(job.queue)), Copied(ABSENT, ABSENT))


def _lifted(step: Step[State]) -> Step[Copied]:
    t0, t1, must, effect, record, descriptor = step
    apply = _OF_STORES.get(record.operation) or _of_call(effect)
    return Step(t0, t1, must, apply, record, descriptor)


def _of_call(effect: Effect) -> Callable[[Copied], Copied | None]:
    def apply(job: Copied) -> Copied | None:
        after = effect(job.now)
        return None if after is None else job._replace(now=after)

    return apply


def _copied(job: Copied) -> Copied:
    return Copied(job.now, job.now)


def _restored(job: Copied) -> Copied:
    return Copied(job.copy, job.copy)


_OF_STORES = {"copied": _copied, "restored": _restored}
