"""Steps of carrying out a batch that engines share: the order of acks, keys, how many claims fit.

Acks that commute are carried out together, one statement for all jobs of a queue and priority. What
has to fit is said in `base.ClaimOp`. Pure, but for what an engine passes in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import dropwhile, islice, repeat
from typing import NamedTuple, Protocol

from pinlaterd.engines.base import (
    AckOp,
    AckResult,
    Acks,
    ClaimOp,
    ClaimRoom,
    Claims,
    EnqueueWithOptionsOp,
    KeyHolder,
    Requeued,
)
from pinlaterd.model import (
    EXPIRED,
    Job,
    JobKey,
    Payload,
    backoff_ms,
    body_of,
    joined,
    new_record,
    runs_of,
)

_NOBODY: frozenset[int] = frozenset()
_Place = tuple[str, int]  # queue and priority


# --- claims that time out -------------------------------------------------------------------


def retry_at(now_ms: int, backoff_attempts: int, attempts_remaining: int) -> int:
    """Return the run-after of a job whose claim has timed out, as `release_expired` wants it."""
    if not backoff_attempts:
        return now_ms
    return now_ms + backoff_ms(backoff_attempts, attempts_remaining - 1)


# --- acks -----------------------------------------------------------------------------------


class Failed(NamedTuple):
    """The result of failed acks: local ids of those that did not apply, and the jobs that have
    attempts left."""

    missed: AbstractSet[int]
    requeued: Sequence[Requeued]


class AckActions(NamedTuple):
    """The ways in which an engine ends attempts of one queue and priority, each job named once."""

    succeed: Callable[[str, int, Sequence[Acks]], AbstractSet[int]]
    """Returns the local ids of acks that do not apply."""
    fail: Callable[[str, int, Sequence[Acks]], Failed]


def local_ids_of(acks: Iterable[Acks]) -> list[int]:
    return [local_id for alike in acks for local_id in alike.local_ids]


class _Ends(NamedTuple):
    """The acks of one place, or of one op in a round."""

    succeeded: list[Acks]
    failed: list[Acks]


def apply_acks(ops: Sequence[AckOp], actions: AckActions) -> list[AckResult]:
    """Carry out acks: those that name no job twice commute, and go together: successes, then
    failures."""
    places = _by_place(ops)
    for ends in places.values():
        local_ids = local_ids_of(ends.succeeded + ends.failed)
        if len(set(local_ids)) != len(local_ids):
            break
    else:
        return _together(ops, places, actions)
    rounds = _rounds(ops)
    results = [_together(of_round, _by_place(of_round), actions) for of_round in rounds]
    parts, found = zip(*rounds, strict=True), zip(*results, strict=True)
    return list(map(_sum, ops, parts, found))


def _by_place(ops: Sequence[AckOp]) -> dict[_Place, _Ends]:
    found: defaultdict[_Place, _Ends] = defaultdict(lambda: _Ends([], []))
    for op in ops:
        for acks in op.succeeded:
            found[op.queue, acks.priority].succeeded.append(acks)
        for acks in op.failed:
            found[op.queue, acks.priority].failed.append(acks)
    return found


def _rounds(ops: Sequence[AckOp]) -> list[list[AckOp]]:
    """Divide the acks into rounds: the first has, of every op, those that name a job for the first
    time, the next those for the second time. Of the acks of one job under one claim only the first
    can apply (it ends the claim, or the claim is not held), so the others are in no round."""
    seen: defaultdict[tuple[str, int, int], list[str | None]] = defaultdict(list)
    rounds: list[list[_Ends]] = []
    for number, op in enumerate(ops):
        for acks in (op.succeeded, op.failed):
            for alike in acks:
                for local_id in alike.local_ids:
                    claims = seen[op.queue, alike.priority, local_id]
                    if alike.claim_descriptor in claims:
                        continue
                    if len(claims) == len(rounds):
                        rounds.append([_Ends([], []) for _ in ops])
                    ends = rounds[len(claims)][number]
                    part = ends.succeeded if acks is op.succeeded else ends.failed
                    part.append(alike._replace(local_ids=(local_id,)))
                    claims.append(alike.claim_descriptor)
    return [
        [AckOp(op.queue, ends.succeeded, ends.failed) for op, ends in zip(ops, part, strict=True)]
        for part in rounds
    ]


def keys_of(op: AckOp) -> Iterator[JobKey]:
    """Yield the jobs that the acks of `op` name."""
    for alike in (*op.succeeded, *op.failed):
        for local_id in alike.local_ids:
            yield JobKey(alike.priority, local_id)


def _sum(op: AckOp, parts: Sequence[AckOp], results: Sequence[AckResult]) -> AckResult:
    """Return what the parts of `op` came to, one of each round. Acks in no round are no-ops."""
    applied = {
        key
        for part, result in zip(parts, results, strict=True)
        for key in keys_of(part)
        if key not in result.missed
    }
    missed = set(keys_of(op)) - applied
    succeeded = sum(result.succeeded for result in results)
    failed = sum(result.failed for result in results)
    requeued = [job for result in results for job in result.requeued]
    return AckResult(succeeded, failed, op.jobs - succeeded - failed, requeued, missed)


def _together(
    ops: Sequence[AckOp], places: Mapping[_Place, _Ends], actions: AckActions
) -> list[AckResult]:
    missed: dict[_Place, AbstractSet[int]] = {}
    for place, ends in places.items():
        if ends.succeeded and (lost := actions.succeed(*place, ends.succeeded)):
            missed[place] = lost
    requeued: dict[_Place, Mapping[int, Requeued]] = {}
    for place, ends in places.items():
        if ends.failed:
            done = actions.fail(*place, ends.failed)
            if done.missed:
                missed[place] = missed.get(place, _NOBODY) | done.missed
            requeued[place] = {job.key.local_id: job for job in done.requeued}
    return [
        _result(op, missed, requeued) if missed or op.failed else AckResult(op.jobs, 0, 0, ())
        for op in ops
    ]


def _result(
    op: AckOp,
    missed: Mapping[_Place, AbstractSet[int]],
    requeued: Mapping[_Place, Mapping[int, Requeued]],
) -> AckResult:
    def applied(acks: Sequence[Acks]) -> int:
        jobs = sum([len(alike.local_ids) for alike in acks])
        for alike in acks if missed else ():
            lost = missed.get((op.queue, alike.priority), _NOBODY)
            jobs -= sum([local_id in lost for local_id in alike.local_ids])
        return jobs

    succeeded, failed = applied(op.succeeded), applied(op.failed)
    again = [
        job
        for alike in op.failed
        for local_id in alike.local_ids
        if (job := requeued[op.queue, alike.priority].get(local_id)) is not None
    ]
    lost = {
        key
        for key in (keys_of(op) if missed else ())
        if key.local_id in missed.get((op.queue, key.priority), _NOBODY)
    }
    return AckResult(succeeded, failed, op.jobs - succeeded - failed, again, lost)


# --- enqueues with options ------------------------------------------------------------------


class FindKeys(NamedTuple):
    """StorageEngine.find_keys and find_keys_of_all, within the transaction that enqueues."""

    of_queue: Callable[[str, Sequence[str]], Mapping[str, JobKey]]
    of_all: Callable[[Sequence[str]], Mapping[str, KeyHolder]]


class _Free(NamedTuple):
    """A job of EnqueuePlan.free that an op of another queue named before."""

    queue: str
    place: int


class EnqueuePlan:
    """The jobs of a batch that have options, as far as they are to be stored."""

    def __init__(self, ops: Sequence[EnqueueWithOptionsOp], find: FindKeys | None = None) -> None:
        """`find`: None takes all keys for free."""
        self._ops = ops
        keys: defaultdict[str, list[str]] = defaultdict(list)
        of_all: list[str] = []
        for op in ops:
            keys[op.queue] += op.keys(of_all_queues=False)
            of_all += op.keys(of_all_queues=True)
        held: dict[str, Mapping[str, JobKey]] = {
            queue: find.of_queue(queue, some) if find and some else {}
            for queue, some in keys.items()
        }
        held_of_all = find.of_all(of_all) if find and of_all else {}
        # Of the jobs of each op: who holds the key of each, if it was held, or a place in `free`.
        self._places: list[list[KeyHolder | _Free | int]] = []
        # By queue: jobs without a key, and of each key that nobody holds the first one.
        self.free: Mapping[str, Sequence[Job]] = {
            queue: joined([op.jobs for op in ops if op.queue == queue]) for queue in keys
        }
        # Mostly all are new: nobody holds a key of theirs, and none is named twice.
        self._all_are_new = not (held_of_all or any(held.values())) and all(
            len(set(some)) == len(some) for some in (*keys.values(), of_all)
        )
        if not self._all_are_new:
            self._find_free(held, held_of_all)

    def _find_free(
        self, held: Mapping[str, Mapping[str, JobKey]], held_of_all: Mapping[str, KeyHolder]
    ) -> None:
        """Find the jobs that are to be stored, given which keys are held."""
        free_jobs: dict[str, list[Job]] = {queue: [] for queue in held}
        self.free = free_jobs
        first: defaultdict[str, dict[str, int]] = defaultdict(dict)
        first_of_all: dict[str, _Free] = {}
        for op in self._ops:
            held_keys, free, known = held[op.queue], free_jobs[op.queue], first[op.queue]
            places: list[KeyHolder | _Free | int] = []
            for job in op.jobs:
                options = job.options
                key = options and options.key
                if key and options and options.key_of_all_queues:
                    named = held_of_all.get(key) or first_of_all.get(key)
                    if isinstance(named, _Free) and named.queue == op.queue:
                        places.append(named.place)
                        continue
                    if named:
                        places.append(named)
                        continue
                    first_of_all[key] = _Free(op.queue, len(free))
                elif key and key in held_keys:
                    places.append(KeyHolder(*held_keys[key], existed=True))
                    continue
                elif key in known:
                    places.append(known[key])
                    continue
                elif key:
                    known[key] = len(free)
                places.append(len(free))
                free.append(job)
            self._places.append(places)

    def holders(self, local_ids: Mapping[str, Sequence[int]]) -> list[list[KeyHolder]]:
        """Return the holders for the jobs of each op, given the ids of the `free` ones. For all
        that name a key after the first, its job exists."""
        if self._all_are_new:
            return self._new_holders(local_ids)
        named = dict.fromkeys(self.free, 0)  # how many of `free`: first named in their order
        holders: list[list[KeyHolder]] = []
        for op, places in zip(self._ops, self._places, strict=True):
            free, ids, behind = self.free[op.queue], local_ids[op.queue], named[op.queue]
            of_op: list[KeyHolder] = []
            for place in places:
                if isinstance(place, KeyHolder):
                    of_op.append(place)
                    continue
                if isinstance(place, _Free):
                    priority = self.free[place.queue][place.place].priority
                    other_id = local_ids[place.queue][place.place]
                    of_op.append(KeyHolder(priority, other_id, True, place.queue))
                    continue
                existed = place < behind
                priority = free[place].priority
                of_op.append(new_record(KeyHolder, (priority, ids[place], existed, "")))
                behind += not existed
            named[op.queue] = behind
            holders.append(of_op)
        return holders

    def _new_holders(self, local_ids: Mapping[str, Sequence[int]]) -> list[list[KeyHolder]]:
        """Do so where all jobs are stored."""
        ids_left = {queue: iter(local_ids[queue]) for queue in self.free}
        holders = []
        for op in self._ops:
            of_op: list[KeyHolder] = []
            for job, bodies in runs_of(op.jobs):
                ids = islice(ids_left[op.queue], len(bodies))
                fields = zip(repeat(job.priority), ids, repeat(False), repeat(""))
                of_op += map(new_record, repeat(KeyHolder), fields)
            holders.append(of_op)
        return holders


def enqueue_with_options(
    ops: Sequence[EnqueueWithOptionsOp],
    find: FindKeys | None,
    store: Callable[[str, Sequence[Job]], Sequence[int]],
) -> list[list[KeyHolder]]:
    """Store the jobs, but of each key the first at most, and none that is held; return the holders
    for each op's jobs. `store`: stores jobs of a queue with their options, and returns their local
    ids."""
    plan = EnqueuePlan(ops, find)
    return plan.holders(
        {queue: store(queue, jobs) if jobs else () for queue, jobs in plan.free.items()}
    )


def expired_status(status: str, most_chars: int) -> str:
    """Return the custom status of a job that fails since it has expired."""
    return f"{status[: most_chars - len(EXPIRED) - 1]} {EXPIRED}".lstrip()


# --- claims ---------------------------------------------------------------------------------

# More than so much is not read before it is known to fit.
_MOST_AHEAD_BYTES = 1 << 20


class ReadPayloads(Protocol):
    """StorageEngine.payloads, within the transaction that claims."""

    def __call__(
        self, queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]: ...


def fitting_payloads(
    ops: Sequence[ClaimOp], room: ClaimRoom, read: ReadPayloads
) -> list[Sequence[Payload | None]]:
    """Return the payloads of each op's first claims, as many as fit; None: there is no such job.

    A job that exists counts, be it PENDING or not."""
    stored: _Stored | None = None
    left, first_of_batch = room.most_bytes, True
    found: list[Sequence[Payload | None]] = []
    cut: set[str] = set()  # queues of ops that ended early
    for op in ops:
        if (left <= 0 and not first_of_batch) or op.queue in cut:
            found.append(())
            continue
        payloads: Sequence[Payload | None] = op.payloads
        used = room.job_bytes * len(payloads) + sum(map(len, map(body_of, filter(None, payloads))))
        if not all(payloads) or used > min(left, op.most_bytes):
            stored = stored or _Stored(ops, read)
            payloads, used = _first_fitting(op, room.job_bytes, left, stored, alone=first_of_batch)
            if len(payloads) < len(op.payloads):
                cut.add(op.queue)
        left -= used
        first_of_batch = first_of_batch and not any(payloads)
        found.append(payloads)
    return found


def _first_fitting(
    op: ClaimOp, job_bytes: int, left: int, stored: _Stored, *, alone: bool
) -> tuple[list[Payload | None], int]:
    """Return the first payloads of `op` that fit, and what they take. `left`: of the batch's room,
    which has place for the first job if it is `alone` there."""
    payloads: list[Payload | None] = []
    used, first, room = 0, True, min(left, op.most_bytes)
    for claims in op.claims:
        known = stored.known[op.queue, claims.priority]
        for local_id, held in zip(claims.local_ids, claims.payloads, strict=True):
            if held is None and local_id not in known:
                stored.read(op.queue, claims.priority, local_id, most_bytes=room - used)
            payload = held or known[local_id]
            if payload is not None:
                size = len(payload.body) + job_bytes
                if used + size > room:
                    fits_op = used + size <= op.most_bytes or (first and op.at_least_one)
                    if not fits_op or (used + size > left and not (first and alone)):
                        return payloads, used
                used += size
                first = False
            payloads.append(payload)
    return payloads, used


class _Stored:
    """Payloads that ops lack, `known` once they are read: each along with those of the next."""

    def __init__(self, ops: Sequence[ClaimOp], read: ReadPayloads) -> None:
        self.known: defaultdict[_Place, dict[int, Payload | None]] = defaultdict(dict)
        self._read = read
        self._missing: defaultdict[_Place, dict[int, None]] = defaultdict(dict)  # in order
        for op in ops:
            for claims in op.claims:
                if None in claims.payloads:
                    pairs = zip(claims.local_ids, claims.payloads, strict=True)
                    missing = {local_id: None for local_id, payload in pairs if payload is None}
                    self._missing[op.queue, claims.priority] |= missing

    def read(self, queue: str, priority: int, local_id: int, *, most_bytes: int) -> None:
        """Read the payloads from this one on."""
        place = (queue, priority)
        local_ids = list(dropwhile(local_id.__ne__, self._missing[place]))
        most_bytes = max(0, min(most_bytes, _MOST_AHEAD_BYTES))
        rows = self._read(queue, priority, local_ids, most_bytes=most_bytes)
        self.known[place].update(zip(local_ids, rows, strict=False))


def first_claims(op: ClaimOp, count: int) -> Sequence[Claims]:
    """Return the claims on the first `count` jobs of `op`."""
    first: list[Claims] = []
    for claims in op.claims:
        jobs = len(claims.local_ids)
        if jobs > count:
            if count:
                local_ids, payloads = claims.local_ids[:count], claims.payloads[:count]
                first.append(claims._replace(local_ids=local_ids, payloads=payloads))
            return first
        first.append(claims)
        count -= jobs
    return first
