"""Jobs that an operator moves to another shard, and shards that take no jobs meanwhile.

`pinlater-admin shard drain --move` gives a job that is scheduled for later a second descriptor:

    at the second one                 stored first
    at the first one                  after that: PENDING -> IN_PROGRESS for a moment -> SUCCEEDED

So the job has a state at each of its descriptors; its calls concern the one that they name. A move
that is cut short, or repeated, may leave it at several, and it goes on at each of them. Where a
copy was stored is not known before a call shows it: that descriptor is "" until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from pinlaterd.model import JobDescriptor
from tests.checker.automaton import (
    ABSENT,
    MOVE,
    Contradiction,
    Effect,
    Phase,
    State,
    Step,
    ageless,
    explain,
)
from tests.checker.automaton import Rules as OneRules
from tests.checker.history import OK, Record, Windows
from tests.checker.run import JobHistory, Run

# What is due sooner runs where it is (docs/operations.md); a little less, for clocks.
_SOON_SECONDS = 9.5
_NOWHERE = ""


class Part(NamedTuple):
    descriptor: str
    state: State
    copied: bool = False  # to another shard


class Moved(NamedTuple):
    """The job at each of its descriptors."""

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return ", ".join(f"{part.descriptor or '?'}: {part.state}" for part in self.parts)

    def with_part(self, number: int, descriptor: str, state: State) -> Moved:
        changed = self.parts[number]._replace(descriptor=descriptor, state=state)
        return Moved((*self.parts[:number], changed, *self.parts[number + 1 :]))


_START = Moved((Part(_NOWHERE, ABSENT),))


@dataclass(frozen=True)
class Rules:
    """What happens without a call: at each descriptor what happens to any job, and moves."""

    one: OneRules
    moves: Windows
    most_parts: int

    def spontaneous(self, job: Moved, now: float) -> Iterator[Moved]:
        for number, (descriptor, state, copied) in enumerate(job.parts):
            for after in self.one.spontaneous(state, now):
                yield job.with_part(number, descriptor, after)
            if state.phase is Phase.IN_PROGRESS and state.claim == MOVE:
                yield job.with_part(number, descriptor, state._replace(phase=Phase.SUCCEEDED))
            if state.phase is not Phase.PENDING:
                continue
            at = self.moves.first_within(state.since, now)
            if at is None or state.due < at + _SOON_SECONDS:
                continue
            if copied:
                ending = state._replace(phase=Phase.IN_PROGRESS, claim=MOVE, since=at, due=0.0)
                yield job.with_part(number, descriptor, ending)
            if len(job.parts) < self.most_parts:
                left = max(1, state.remaining)
                copy = Part(_NOWHERE, state._replace(allowed=left, remaining=left, since=at))
                before = Part(descriptor, state, copied=True)
                yield Moved((*job.parts[:number], before, *job.parts[number + 1 :], copy))

    def ageless(self, job: Moved, now: float) -> tuple[Moved, Sequence[float]]:
        parts = [part._replace(state=ageless(part.state, now)) for part in job.parts]
        return Moved(tuple(parts)), [part.state.since for part in job.parts]


def explain_moved(run: Run, job: JobHistory, stored: Record | None) -> Contradiction | None:
    """As `explain`. `stored`: when the stores were read."""
    # A copy that is deleted before anybody meets it has a descriptor that we never learn.
    most_parts = len(job.descriptors) + 1
    steps = [lifted for step in job.steps for lifted in _lifted(step, most_parts)]
    if stored is not None:
        found = {record.arguments["descriptor"] for record in job.rows}
        after_all = run.end + 1  # so that no move is thought to have come after it
        steps.append(Step(after_all, after_all, True, _nowhere_else(found), stored))
    moves = Windows((record.t0, record.t1) for record in run.by_operation["moved"])
    return explain(steps, Rules(run.rules(job.queue), moves, most_parts), _START)


# --- the effects of calls -------------------------------------------------------------------


def _lifted(step: Step[State], most_parts: int) -> Iterator[Step[Moved]]:
    t0, t1, must, effect, record, descriptor = step
    if record.operation == "enqueue":
        yield Step(t0, t1, must, _stored(effect, descriptor or _NOWHERE), record)
    elif descriptor is not None:
        yield Step(t0, t1, must, _at(descriptor, effect), record)
    else:  # of a whole queue: each shard carries it out by itself
        for back in range(most_parts):
            yield Step(t0, t1, must, _at_part(back, effect), record)


_Apply = Callable[[Moved], Moved | None]


def _stored(effect: Effect, descriptor: str) -> _Apply:
    def apply(job: Moved) -> Moved | None:
        after = effect(job.parts[0].state)
        return None if after is None else job.with_part(0, descriptor, after)

    return apply


def _at_part(back: int, effect: Effect) -> _Apply:
    def apply(job: Moved) -> Moved | None:
        number = len(job.parts) - 1 - back
        if number < 0:
            return job
        descriptor, state, _ = job.parts[number]
        after = effect(state)
        return None if after is None else job.with_part(number, descriptor, after)

    return apply


def _at(descriptor: str, effect: Effect) -> _Apply:
    shows_it = effect(ABSENT) is None  # a call that has met the job there

    def apply(job: Moved) -> Moved | None:
        for number, part in enumerate(job.parts):
            if part.descriptor == descriptor:
                after = effect(part.state)
                return None if after is None else job.with_part(number, descriptor, after)
        if not shows_it:
            return job
        for number in reversed(range(len(job.parts))):
            if job.parts[number].descriptor == _NOWHERE:
                after = effect(job.parts[number].state)
                if after is not None:
                    return job.with_part(number, descriptor, after)
        return None

    return apply


def _nowhere_else(found: AbstractSet[str]) -> _Apply:
    """The stores hold the job at these descriptors, which their rows show, and at no other."""

    def apply(job: Moved) -> Moved | None:
        gone = (Phase.ABSENT, Phase.GONE)
        others = [part.state for part in job.parts if part.descriptor not in found]
        return job if all(state.phase in gone for state in others) else None

    return apply


# --- rules ----------------------------------------------------------------------------------


def closed_shards_take_no_jobs(run: Run) -> None:
    """From the answer of the command that closed it until one opens it again; and when it was
    waited for until it was empty, nothing was ready there."""
    for closed in run.by_operation["closed"]:
        for record in run.by_operation["enqueue"]:
            if closed.t0 <= record.t0 and record.t1 <= closed.t1:
                for descriptor in _stored_on(closed.arguments["shard"], record):
                    run.violate("closed shards take no jobs", f"{descriptor}: {closed}; {record}")
    for emptied in run.by_operation["emptied"]:
        for job in run.jobs.values():
            start, end = run.ready_span(job)
            if job.shard == emptied.arguments["shard"] and start < emptied.t0 and emptied.t1 < end:
                run.violate("closed shards take no jobs", f"{job.name} was ready: {emptied}")


def _stored_on(shard: str, record: Record) -> Sequence[str]:
    if record.outcome != OK:
        return ()
    parsed = [(text, JobDescriptor.parse(text)) for text in record.result]
    return [text for text, found in parsed if found is not None and found.shard == shard]
