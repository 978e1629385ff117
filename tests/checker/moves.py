"""Jobs that an operator moves to another shard, and shards that take no jobs meanwhile.

`pinlater-admin shard drain --move` gives a job that is scheduled for later a second descriptor:

    at the second one                 stored first
    at the first one                  after that: PENDING -> IN_PROGRESS for a moment -> SUCCEEDED

So the job has a state at each of its descriptors; its calls concern the one that they name. A move
that is cut short, or repeated, may leave it at several, and it goes on at each of them.

Once it is copied, nothing that happens at one descriptor depends on another. So each is explained
alone, and then compared: a copy is as its source was at some moment of a move, and whatever a move
has ended has a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pinlaterd.model import JobDescriptor
from tests.checker.automaton import (
    ABSENT,
    MOVE,
    Contradiction,
    Phase,
    State,
    Step,
    ageless,
    possible_ends,
    read_nothing,
)
from tests.checker.automaton import Rules as OneRules
from tests.checker.history import OK, Record, Windows
from tests.checker.run import JobHistory, Run

# What is due sooner runs where it is (docs/operations.md); a little less, for clocks.
_SOON_SECONDS = 9.5
# Where a copy was stored that is deleted before anybody meets it, or a job of unknown outcome.
_NOWHERE = ""


class Copy(NamedTuple):
    """What a copy has of its source."""

    body: str
    attempts: int
    due: float


class Part(NamedTuple):
    """The job at one of its descriptors; `made`: a copy of it that exists."""

    state: State
    copy_of: Copy | None = None
    made: Copy | None = None

    def __str__(self) -> str:
        return str(self.state)


@dataclass(frozen=True)
class Rules:
    """What happens without a call: what happens to any job, and moves."""

    one: OneRules
    moves: Windows
    # All copies that can have been made so far, since when.
    copies: dict[Copy, float] = field(default_factory=dict)

    def spontaneous(self, part: Part, now: float) -> Iterator[Part]:
        state = part.state
        for after in self.one.spontaneous(state, now):
            yield part._replace(state=after)
        if state.phase is Phase.IN_PROGRESS and state.claim == MOVE:
            yield part._replace(state=state._replace(phase=Phase.SUCCEEDED))
        if state.phase is not Phase.PENDING:
            return
        at = self.moves.first_within(state.since, now)
        if at is None or state.due < at + _SOON_SECONDS:
            return
        if part.made is not None:
            ending = state._replace(phase=Phase.IN_PROGRESS, claim=MOVE, since=at, due=0.0)
            yield part._replace(state=ending)
        else:
            made = Copy(state.body, max(1, state.remaining), state.due)
            self.copies[made] = min(at, self.copies.get(made, at))
            yield part._replace(made=made)

    def ageless(self, part: Part, now: float) -> tuple[Part, Sequence[float]]:
        return part._replace(state=ageless(part.state, now)), (part.state.since,)


_START = Part(ABSENT)


class CopyRules(Rules):
    """The same at a descriptor where the job may come to be by a move."""

    def spontaneous(self, part: Part, now: float) -> Iterator[Part]:
        yield from super().spontaneous(part, now)
        if part.state.phase is Phase.ABSENT:
            for copy, at in self.copies.items():
                if at <= now:
                    body, attempts, due = copy
                    state = State(Phase.PENDING, body, attempts, attempts, since=at, due=due)
                    yield Part(state, copy_of=copy)


def explain_moved(run: Run, job: JobHistory, stored: Record | None) -> Contradiction | None:
    """As `explain`. `stored`: when the stores were read."""
    steps = _steps_by_place(run, job, stored)
    moves = Windows((record.t0, record.t1) for record in run.by_operation["moved"])
    enqueued = [s for s in job.steps if s.record.operation == "enqueue"]
    # An enqueue of unknown outcome does not tell where it stored the job.
    firsts = {s.descriptor for s in enqueued if s.descriptor} or {*job.descriptors, _NOWHERE}
    found = None
    for first in sorted(firsts):
        begun = {**steps, first: [*map(_lifted, enqueued), *steps[first]]}
        found = _explain_places(begun, first, Rules(run.rules(job.queue), moves))
        if found is None:
            return None
    return found


# --- the job at each of its descriptors -----------------------------------------------------

_Steps = Sequence[Step[Part]]


def _steps_by_place(run: Run, job: JobHistory, stored: Record | None) -> dict[str, _Steps]:
    """All but its enqueue."""
    steps: dict[str, _Steps] = {}
    later = [step for step in job.steps if step.record.operation != "enqueue"]
    found = {record.arguments["descriptor"] for record in job.rows}
    after_all = run.end + 1  # so that no move is thought to have come after it
    for place in (*job.descriptors, _NOWHERE):
        # Calls without a descriptor are of a whole queue: each shard carries them out by itself.
        there = [_lifted(step) for step in later if step.descriptor in (None, place)]
        last = _as_it_is if stored is None or place in found else _not_stored
        there.append(_lifted(Step(after_all, after_all, True, last, stored or _END)))
        steps[place] = there
    return steps


_END = Record(0.0, 0.0, "checker", "end")


def _as_it_is(state: State) -> State:
    return state


def _not_stored(state: State) -> State | None:
    """No copy can be stored afterwards."""
    return None if read_nothing(state) is None else State(Phase.GONE)


def _lifted(step: Step[State]) -> Step[Part]:
    def apply(part: Part) -> Part | None:
        after = step.apply(part.state)
        return None if after is None else part._replace(state=after)

    return Step(step.t0, step.t1, step.must, apply, step.record, step.descriptor)


def _explain_places(steps: dict[str, _Steps], first: str, rules: Rules) -> Contradiction | None:
    """`first`: where it was enqueued."""
    ends = {first: possible_ends(steps[first], rules, _START)}
    elsewhere = CopyRules(rules.one, rules.moves, rules.copies)
    known = -1
    while len(rules.copies) > known:  # a copy may be copied again
        known = len(rules.copies)
        for place in steps.keys() - {first}:
            ends[place] = possible_ends(steps[place], elsewhere, _START)
    explained: dict[str, set[Part]] = {}
    for place, found in ends.items():
        if isinstance(found, Contradiction):
            return found
        explained[place] = found
    wrong = _without_counterpart(explained)
    return None if wrong is None else Contradiction(steps[wrong][-1], list(explained[wrong]))


def _without_counterpart(ends: dict[str, set[Part]]) -> str | None:
    """Where there is certainly a copy of what was nowhere else, or a source without its copy."""
    copies = {place: {part.copy_of for part in parts} for place, parts in ends.items()}
    made = {place: {part.made for part in parts} for place, parts in ends.items()}
    for these, those in ((copies, made), (made, copies)):
        for place, found in these.items():
            others = [those[other] for other in those if other != place]
            if None not in found and not any(found & other for other in others):
                return place
    sources = [place for place in ends if None not in made[place]]
    most = sum(1 for found in copies.values() if found != {None})
    return sources[-1] if len(sources) > most else None


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
