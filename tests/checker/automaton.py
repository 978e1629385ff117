"""One job as an automaton, and whether some order of the calls on it explains what they answered.

Each call takes effect at one moment between its start and its end, or, of unknown outcome, at one
moment until it is settled, or never. `explain` keeps all states in which the job can be, each with
the calls that have taken effect, and advances them over the starts and ends of calls (just-in-time
linearization). Few answered calls on one job overlap, so the time is linear in their number. Calls
of unknown outcome may be many: which of them took effect is not remembered, for a second effect of
an ack or a claim is none, and that of a retry or delete can as well be another one's.

    ABSENT -enqueue-> PENDING -claim-> IN_PROGRESS -ack-> SUCCEEDED or PENDING or FAILED
    IN_PROGRESS -time-out-> PENDING or FAILED; FAILED -retry-> PENDING; any -delete-> GONE

A claim that no client got (its answer was lost) is LOST: IN_PROGRESS or PENDING again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import le
from typing import Generic, NamedTuple, Protocol, TypeVar

from tests.checker.history import Record, Windows


class Phase(IntEnum):
    """The first four are the interface's."""

    PENDING = 0
    IN_PROGRESS = 1
    SUCCEEDED = 2
    FAILED = 3
    ABSENT = 4
    GONE = 5


# Of a claim that no client got and no read has shown.
LOST = "?"
# Any claim by which a move ends a job that is on another shard by then.
MOVE = "move"
CLOCK_SLACK_SECONDS = 0.1


class State(NamedTuple):
    """`since`: the job has not been in this state for longer; `due`: not ready before."""

    phase: Phase
    body: str = ""
    allowed: int = 0
    remaining: int = 0
    claim: str | None = None
    lost: bool = False
    since: float = 0.0
    due: float = 0.0

    def __str__(self) -> str:
        claim = f" by {self.claim}" if self.claim else ""
        return f"{self.phase.name} {self.remaining}/{self.allowed}{claim} {self.body[:40]!r}"


ABSENT = State(Phase.ABSENT)
Effect = Callable[[State], State | None]
# A state, or several that a job has in different places: `moves`, `copies`.
S = TypeVar("S")


class Step(NamedTuple, Generic[S]):
    """A call as it concerns one job. `apply` returns the state after it, or None where it cannot
    have answered as it did. An optional one may also never take effect. `descriptor`: of the job,
    where the call names it."""

    t0: float
    t1: float
    must: bool
    apply: Callable[[S], S | None]
    record: Record
    descriptor: str | None = None


class Spontaneous(Protocol[S]):
    """What happens to a job without a call on it."""

    def spontaneous(self, state: S, now: float) -> Iterator[S]: ...

    def ageless(self, state: S, now: float) -> tuple[S, Sequence[float]]:
        """It without the times that have passed, and `since` of each place."""
        ...


@dataclass(frozen=True)
class Rules:
    """The same for a job in one place."""

    claim_seconds: float
    ttl_seconds: float
    # When dequeues ran whose answer may have been lost, with the claims in it.
    losses: Windows

    def spontaneous(self, state: State, now: float) -> Iterator[State]:
        match state.phase:
            case Phase.PENDING:
                at = self.losses.first_within(state.since, now)
                if at is not None and _is_due(state, now):
                    yield state._replace(
                        phase=Phase.IN_PROGRESS, claim=LOST, lost=True, since=at, due=0.0
                    )
            case Phase.IN_PROGRESS:
                if state.lost:
                    yield state._replace(phase=Phase.PENDING, claim=None, lost=False)
                end = state.since + self.claim_seconds
                if now >= end - CLOCK_SLACK_SECONDS:
                    yield failed(state, end, end)
            case Phase.SUCCEEDED | Phase.FAILED:
                if now >= state.since + self.ttl_seconds:
                    yield State(Phase.GONE)
            case _:
                return

    def ageless(self, state: State, now: float) -> tuple[State, Sequence[float]]:
        return ageless(state, now), (state.since,)


def ageless(state: State, now: float) -> State:
    """Without `since`, nor `due` if that has come: no call can tell by then when it was."""
    return state._replace(since=0.0, due=state.due if state.due > now else 0.0)


def _is_due(state: State, now: float) -> bool:
    return now >= state.due - CLOCK_SLACK_SECONDS


def failed(state: State, now: float, due: float) -> State:
    """A claim that ended without success: by a failed ack or a time-out."""
    if state.remaining > 1:
        return State(
            Phase.PENDING, state.body, state.allowed, state.remaining - 1, since=now, due=due
        )
    return State(Phase.FAILED, state.body, state.allowed, 0, since=now)


# --- the effects of calls -------------------------------------------------------------------


def enqueue(body: str, attempts: int, t0: float, due: float) -> Effect:
    def apply(state: State) -> State | None:
        if state.phase is not Phase.ABSENT:
            return None
        return State(Phase.PENDING, body, attempts, attempts, since=t0, due=due)

    return apply


def claim(body: str, allowed: int, remaining: int, claim_descriptor: str, record: Record) -> Effect:
    def apply(state: State) -> State | None:
        if state[:4] != (Phase.PENDING, body, allowed, remaining):
            return None
        if not _is_due(state, record.t1):
            return None
        return state._replace(
            phase=Phase.IN_PROGRESS, claim=claim_descriptor, since=record.t0, due=0.0
        )

    return apply


def _holds(state: State, claim_descriptor: str | None) -> bool:
    return state.phase is Phase.IN_PROGRESS and claim_descriptor in (None, state.claim)


def ack(claim_descriptor: str | None, t0: float) -> Effect:
    def apply(state: State) -> State:
        if not _holds(state, claim_descriptor):
            return state
        return state._replace(phase=Phase.SUCCEEDED, lost=False, since=t0)

    return apply


def fail(claim_descriptor: str | None, t0: float, delay_seconds: float) -> Effect:
    def apply(state: State) -> State:
        if not _holds(state, claim_descriptor):
            return state
        return failed(state, t0, t0 + delay_seconds)

    return apply


def checkpoint(
    holder: str | None,
    t0: float,
    new_body: str | None,
    move_to_pending: bool,
    due: float,
    attempts: int | None,
) -> Effect:
    """`holder`: the claim for which it applies."""

    def apply(state: State) -> State:
        if not _holds(state, holder):
            return state
        changed = state._replace(since=t0)
        if new_body is not None:
            changed = changed._replace(body=new_body)
        if attempts is not None:
            changed = changed._replace(allowed=attempts, remaining=attempts)
        if move_to_pending:
            changed = changed._replace(phase=Phase.PENDING, claim=None, lost=False, due=due)
        return changed

    return apply


def retry(attempts: int, t0: float, due: float) -> Effect:
    def apply(state: State) -> State:
        if state.phase is not Phase.FAILED:
            return state
        allowed = max(state.allowed, attempts)
        return State(Phase.PENDING, state.body, allowed, attempts, since=t0, due=due)

    return apply


def delete(phase: Phase | None) -> Effect:
    """None: the whole queue goes."""

    def apply(state: State) -> State:
        if state.phase is Phase.ABSENT or phase not in (None, state.phase):
            return state
        return State(Phase.GONE)

    return apply


def read(
    phase: Phase, body: str | None, allowed: int, remaining: int, claim_descriptor: str | None
) -> Effect:
    def apply(state: State) -> State | None:
        if (state.phase, state.allowed, state.remaining) != (phase, allowed, remaining):
            return None
        if body is not None and body != state.body:
            return None
        if phase is Phase.IN_PROGRESS and claim_descriptor != state.claim:
            if state.claim == LOST and claim_descriptor is not None:
                return state._replace(claim=claim_descriptor)
            return None
        return state

    return apply


def read_nothing(state: State) -> State | None:
    return state if state.phase in (Phase.ABSENT, Phase.GONE) else None


# --- the search -----------------------------------------------------------------------------


class Contradiction(NamedTuple):
    """A call that no order explains, and the states in which the job can have been before it."""

    step: Step
    states: Sequence[object]


def explain(steps: Sequence[Step[S]], rules: Spontaneous[S], start: S) -> Contradiction | None:
    """None if some order of effects agrees with every answer."""
    found = possible_ends(steps, rules, start)
    return found if isinstance(found, Contradiction) else None


def possible_ends(
    steps: Sequence[Step[S]], rules: Spontaneous[S], start: S
) -> set[S] | Contradiction:
    """What the job can be after all calls, by all orders of effects that agree with the answers."""
    events = sorted(
        [(step.t0, 0, number) for number, step in enumerate(steps)]
        + [(step.t1, 1, number) for number, step in enumerate(steps)]
    )
    configs: set[tuple[S, int]] = {(start, 0)}
    under_way: dict[int, Step[S]] = {}  # by its bit
    bits: dict[int, int] = {}
    for now, is_end, number in events:
        if not is_end:
            bit = 1
            while bit in under_way:
                bit <<= 1
            bits[number] = bit
            under_way[bit] = steps[number]
            continue
        step, bit = steps[number], bits[number]
        before = configs
        configs = _reachable(configs, under_way, rules, now)
        if step.must:
            configs = {config for config in configs if config[1] & bit}
            if not configs:
                return Contradiction(step, sorted({state for state, _ in before}, key=str))
        configs = _oldest({(state, done & ~bit) for state, done in configs}, rules, now)
        del under_way[bit]
    return {state for state, _ in configs}


def _oldest(configs: set[tuple[S, int]], rules: Spontaneous[S], now: float) -> set[tuple[S, int]]:
    """Of those that differ in times that have passed alone the one that has been in its state for
    longest: what may happen to another may happen to it."""
    found: dict[tuple[S, int], tuple[Sequence[float], S]] = {}
    others = set()
    for state, done in configs:
        alike, since = rules.ageless(state, now)
        before, _ = found.setdefault((alike, done), (since, state))
        if all(map(le, since, before)):
            found[alike, done] = since, state
        elif not all(map(le, before, since)):
            others.add((state, done))
    return others | {(state, done) for (_, done), (_, state) in found.items()}


# Runs have led to a few hundred.
_MOST_CONFIGS = 20_000


class TooManyStates(Exception):
    """The search would take for ever, or all memory: the job is not judged."""


def _reachable(
    configs: set[tuple[S, int]],
    under_way: dict[int, Step[S]],
    rules: Spontaneous[S],
    now: float,
) -> set[tuple[S, int]]:
    found = set(configs)
    todo = list(configs)
    while todo:
        state, done = todo.pop()
        following = [(after, done) for after in rules.spontaneous(state, now)]
        for bit, step in under_way.items():
            if done & bit:
                continue
            after = step.apply(state)
            if after is not None:
                following.append((after, done | bit if step.must else done))
        for config in following:
            if config not in found:
                found.add(config)
                todo.append(config)
        if len(found) > _MOST_CONFIGS:
            raise TooManyStates
    return found
