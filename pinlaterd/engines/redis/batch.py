"""A Batch as the arguments of apply.lua, and its answer as a BatchResult.

Jobs that have much in common go as one run, which few commands carry out: acks and claims of all
ops of a queue and priority, and jobs that are enqueued one after the other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress, groupby, repeat
from typing import Any, NamedTuple

from pinlaterd.engines.base import (
    AckResult,
    Batch,
    BatchResult,
    Checkpoint,
    CheckpointResult,
    Finish,
    Finished,
    KeyHolder,
    Requeued,
)
from pinlaterd.engines.batches import EnqueuePlan, first_claims, keys_of
from pinlaterd.engines.redis.connection import Argument
from pinlaterd.engines.redis.scripts import LIMITS, RUN_JOBS, is_lean, lean_head
from pinlaterd.model import (
    ALL_QUEUES,
    AlikeJobs,
    FinishOutcome,
    Job,
    JobKey,
    JobOptions,
    JobState,
    Payload,
    PendingKey,
    joined,
    runs_of,
)

# Keys that a script writes to, or that have to be sound for it to write, by apply.lua's letters.
_ENQUEUE, _WITH_OPTIONS, _CLAIM, _SUCCESS, _ALL = "0b", "kvyzc", "01bx", "12x", "0123bux"
_HOLDERS = "k"
_OF_LEAN_QUEUES = frozenset("bux")
_TEXT_CHARS = LIMITS.custom_status_chars
_MOST_EXACT = 2**53  # whole numbers up to here are such in Lua
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,15})\Z")
_WAS_PENDING = -1  # apply.lua's word for a finish that was done, of a job that was PENDING
_NONE = (0,)  # the arguments of operations of which a batch has none
_NEVER = -1  # when a job is due again that no further attempt follows
_NUMBERS_OF_CLAIMS = 9 * 10**15  # they are less, as in runs.lua


class _Head(NamedTuple):
    """The arguments of all acks or claims of a command. Behind the priority: of acks only."""

    queue: str
    priority: int
    # When those that failed are due again, or _NEVER; "": they succeeded.
    retry_ms: int | str | None = None
    custom_status: str | None = None
    named: str | None = None
    may_expire: str | None = None  # of claims only


class _Run:
    """Jobs whose acks or claims have `head` in common. `ops`, `places`: of each, the op that it is
    of, and where it is there; `claims`: theirs, if any, by what stands before their number, and
    that."""

    __slots__ = ("claims", "head", "ids", "ops", "places")

    def __init__(self, head: _Head) -> None:
        self.head = head
        self.ids: list[int] = []
        self.claims: list[tuple[str, int]] = []
        self.ops: list[int] = []
        self.places: list[int] = []

    def add(
        self,
        op: int,
        local_ids: Sequence[int],
        claims: Iterable[tuple[str, int]],
        places: Iterable[int] = (),
    ) -> None:
        self.ids += local_ids
        self.claims += claims
        self.ops += [op] * len(local_ids)
        self.places += places

    def sort(self) -> None:
        """Sort the jobs by id; none is there twice."""
        ids = self.ids
        if ids != sorted(ids):
            order = sorted(range(len(ids)), key=ids.__getitem__)
            self.ids = [ids[at] for at in order]
            self.ops = [self.ops[at] for at in order]
            self.claims = [self.claims[at] for at in order] if self.claims else []

    def ranges(self, begin: int) -> list[Argument]:
        """Return the jobs of one command, from `begin` on, as `take_ranges` reads them."""
        ids, claims = self.ids[begin : begin + RUN_JOBS], self.claims[begin : begin + RUN_JOBS]
        jobs = len(ids)
        if ids == list(range(ids[0], ids[0] + jobs)) and ids[-1] < _MOST_EXACT:
            if not claims:
                return [1, ids[0], jobs]
            claimer, number = claims[0]
            if claims == list(zip(repeat(claimer), range(number, number + jobs), strict=False)):
                return [1, ids[0], jobs, "" if number < 0 else number, claimer]
        begins = [0, *_breaks(ids, claims)]
        arguments: list[Argument] = [len(begins)]
        for first, end in zip(begins, [*begins[1:], jobs], strict=True):
            arguments += (ids[first], end - first)
            if claims:
                claimer, number = claims[first]
                arguments += ("" if number < 0 else number, claimer)
        return arguments


def _breaks(ids: Sequence[int], claims: Sequence[tuple[str, int]]) -> Iterable[int]:
    """Yield where ids or claims don't count up by one."""
    later = range(1, len(ids))
    if max(ids) >= _MOST_EXACT:
        return later
    if not claims:
        return [at for at in later if ids[at] != ids[at - 1] + 1]
    following = [(claimer, number + 1) for claimer, number in claims]
    return [at for at in later if ids[at] != ids[at - 1] + 1 or claims[at] != following[at - 1]]


def _numbered(claim: str) -> tuple[str, int]:
    """Return what stands before a claim's number, and that; all of it and -2 if it has none."""
    head, colon, digits = claim.rpartition(":")
    if colon and _NUMBER.match(digits) and int(digits) < _NUMBERS_OF_CLAIMS:
        return head + colon, int(digits)
    return claim, -2


class Application:
    """One batch on its way into the store and back."""

    def __init__(
        self,
        batch: Batch,
        stored: Mapping[str, str],
        now_ms: int,
        payloads: Sequence[Sequence[Payload | None]],
        plan: EnqueuePlan | None = None,
        expiring: Collection[str] = (),
        *,
        are_free: bool = False,
    ) -> None:
        """`stored`: the names of queues as they are in keys. `payloads`: of each op that claims,
        those of its first jobs, as many as fit; None: there is no such job. `plan`: of the jobs
        that have options, if there are any: they are stored behind the others of their queue.
        `expiring`: as StorageEngine's. `are_free`: whether keys were looked for, so that those of
        the plan are known to be free."""
        self._batch = batch
        self._stored = stored
        self._now_ms = now_ms
        self._payloads = payloads
        self._keys: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self._expiring = expiring
        self._acks = self._ack_runs() if batch.acks else ()
        self._claims = self._claim_runs() if batch.claims else ()
        self._plan = plan
        self._are_free = are_free
        self._jobs = self._jobs_by_queue() if batch.enqueues or plan else {}
        self._checkpointed: Sequence[int] = ()
        self._released: Sequence[int] = ()

    # --- arguments ---------------------------------------------------------------------------

    def arguments(self) -> list[Argument]:
        batch = self._batch
        operations = [
            *(_arguments(self._acks) if self._acks else _NONE),
            *(self._checkpoints() if batch.checkpoints else _NONE),
            *(self._releases() if batch.releases else _NONE),
            *(self._enqueues() if self._jobs else _NONE),
            *(_arguments(self._claims) if self._claims else _NONE),
            *(self._finishes() if batch.finishes else _NONE),
        ]
        options = self._new_options()
        keys: list[Argument] = [len(self._keys)]
        for (queue, priority), all_kinds in self._keys.items():
            kinds = set("".join(all_kinds))
            keys += (queue, priority, "".join(kinds if is_lean(queue) else kinds - _OF_LEAN_QUEUES))
        grows = "1" if self._jobs else "0"
        times = (self._now_ms, _TEXT_CHARS)
        totals = [part for queue, jobs in self._jobs.items() for part in (queue, len(jobs))]
        return [grows, *keys, *times, *options, len(self._jobs), *totals, *operations]

    def _ack_runs(self) -> Collection[_Run]:
        """Gather acks, which commute, unless a job is named twice: then each goes in its turn."""
        together = self._acks_in_runs(alone=False)
        for run in together:
            run.sort()
        named: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for run in together:
            named[run.head.queue, run.head.priority] += run.ids
        if all(len(set(local_ids)) == len(local_ids) for local_ids in named.values()):
            return together
        return self._acks_in_runs(alone=True)

    def _acks_in_runs(self, *, alone: bool) -> Collection[_Run]:
        runs: dict[object, _Run] = {}
        for at, op in enumerate(self._batch.acks):
            for of_op in (op.succeeded, op.failed):
                for acks in of_op:
                    local_ids, claim = acks.local_ids, acks.claim_descriptor
                    status, named = acks.append_custom_status, "0" if claim is None else "1"
                    retry_ms = acks.retry_delay_ms if of_op is op.failed else None
                    retry_ms = _NEVER if of_op is op.failed and not acks.retryable else retry_ms
                    claims = () if claim is None else (_numbered(claim),) * len(local_ids)
                    for ids in ([each] for each in local_ids) if alone else (local_ids,):
                        alike = (op.queue, acks.priority, retry_ms, status, named)
                        key = len(runs) if alone else alike
                        run = runs.get(key)
                        if run is None:
                            run = runs[key] = _Run(self._ack_head(*alike))
                        run.add(at, ids, claims[: len(ids)])
        return runs.values()

    def _ack_head(
        self, queue: str, priority: int, delay_ms: int | None, status: str, named: str
    ) -> _Head:
        place, failed = (self._stored[queue], priority), delay_ms is not None
        self._keys[place].add(_ALL if failed or status else _SUCCESS)
        retry_ms: int | str = ""
        if delay_ms is not None:
            retry_ms = self._due_again(delay_ms)
        if delay_ms == _NEVER:
            retry_ms = _NEVER
        return _Head(*place, retry_ms, status[:_TEXT_CHARS], named)

    def _checkpoints(self) -> list[Argument]:
        ops = self._batch.checkpoints
        each_of_all = [(op, each) for op in ops for each in op.checkpoints]
        jobs = [(self._stored[op.queue], *each.key) for op, each in each_of_all]
        self._checkpointed = _in_order(jobs)
        arguments: list[Argument] = [len(jobs)]
        for at in self._checkpointed:
            (op, each), (queue, priority, local_id) = each_of_all[at], jobs[at]
            self._keys[queue, priority].add(_ALL)
            arguments += (
                *(queue, priority, local_id, op.source, self._due(each.run_after_ms)),
                _optional(each.new_body),
                "1" if each.move_to_pending else "0",
                _optional(each.attempts),
                each.prepend_custom_status or "",
                _optional(each.claim_descriptor),
            )
        return arguments

    def _due(self, run_after_ms: int | None) -> int:
        return self._now_ms if run_after_ms is None else run_after_ms

    def _releases(self) -> list[Argument]:
        ops = self._batch.releases
        claims = [each.claim_descriptor for op in ops for each in op.releases]
        jobs = [(self._stored[op.queue], *each.key) for op in ops for each in op.releases]
        self._released = _in_order(jobs)
        arguments: list[Argument] = [len(jobs)]
        for at in self._released:
            queue, priority, local_id = jobs[at]
            self._keys[queue, priority].add(_ALL)
            arguments += (queue, priority, local_id, claims[at])
        return arguments

    def _due_again(self, delay_ms: int) -> int:
        return min(self._now_ms + delay_ms, LIMITS.run_after_ms)

    def _finishes(self) -> list[Argument]:
        finishes = [
            (self._stored[op.queue], each) for op in self._batch.finishes for each in op.finishes
        ]
        arguments: list[Argument] = [len(finishes)]
        for queue, finish in finishes:
            self._keys[queue, finish.key.priority].add(_ALL)
            expected = finish.expected_attempts
            arguments += (
                *(queue, *finish.key, int(finish.state), finish.attempts_remaining),
                "" if expected is None else expected,
                "1" if finish.compares_pending else "0",
                self._due_again(finish.retry_delay_ms),
                finish.append_custom_status[:_TEXT_CHARS],
            )
        return arguments

    def _jobs_by_queue(self) -> Mapping[str, Sequence[Job]]:
        """Return the jobs of all ops, in the order in which they get their ids."""
        parts: defaultdict[str, list[Sequence[Job]]] = defaultdict(list)
        for op in self._batch.enqueues:
            if op.jobs:
                parts[self._stored[op.queue]].append(op.jobs)
        for queue, free in self._plan.free.items() if self._plan else ():
            if free:
                parts[self._stored[queue]].append(free)
        return {queue: joined(jobs) for queue, jobs in parts.items()}

    def _new_options(self) -> list[Argument]:
        """Return the jobs that were enqueued last to each queue."""
        free = (
            {queue: jobs for queue, jobs in self._plan.free.items() if jobs} if self._plan else {}
        )
        arguments: list[Argument] = ["1" if self._are_free else "0", len(free)]
        for queue, jobs in free.items():
            stored = self._stored[queue]
            runs = list(_runs_with_options(jobs))
            arguments += (stored, len(self._jobs[stored]) - len(jobs), len(runs))
            for job, size, keys in runs:
                self._keys[stored, job.priority].add(_WITH_OPTIONS)
                options = job.options or JobOptions()
                mark = "*" if options.key_of_all_queues else "="
                if keys and options.key_of_all_queues:
                    self._keys[ALL_QUEUES, job.priority].add(_HOLDERS)
                expiry = "" if options.expires_at_ms is None else options.expires_at_ms
                exact = (options.run_after_us, options.expires_at_us)
                texts = ["" if each is None else str(each) for each in exact]
                times = " ".join(texts) if any(texts) else ""
                arguments += (size, job.priority, mark if keys else "", expiry, times, *keys)
        return arguments

    def _enqueues(self) -> list[Argument]:
        arguments: list[Argument] = [len(self._jobs)]
        for queue, jobs in self._jobs.items():
            runs = [
                (job, bodies[begin : begin + RUN_JOBS])
                for job, bodies in runs_of(jobs)
                for begin in range(0, len(bodies), RUN_JOBS)
            ]
            arguments += (queue, len(runs))
            for first, bodies in runs:
                attempts, text = first.attempts_allowed, first.custom_status[:_TEXT_CHARS]
                self._keys[queue, first.priority].add(_ENQUEUE)
                due_ms, head = self._due(first.run_after_ms), b""
                if is_lean(queue):
                    head = lean_head(attempts, self._now_ms, due_ms, text)
                arguments += (len(bodies), first.priority, due_ms, attempts, text)
                arguments += [head + body for body in bodies]
        return arguments

    def _claim_runs(self) -> Collection[_Run]:
        runs: dict[tuple[str, int], _Run] = {}
        for at, (op, payloads) in enumerate(zip(self._batch.claims, self._payloads, strict=True)):
            queue, begin = self._stored[op.queue], 0
            for claims in first_claims(op, len(payloads)):
                ids, claimer, number = claims.local_ids, claims.claimer, claims.first_claim
                place = (queue, claims.priority)
                run = runs.get(place)
                if run is None:
                    may_expire = self._batch.fails_expired and op.queue in self._expiring
                    run = runs[place] = _Run(_Head(*place, may_expire="1" if may_expire else "0"))
                    self._keys[place].add(_ALL if may_expire else _CLAIM)
                named: Iterable[tuple[str, int]]
                named = zip(repeat(claimer), range(number, number + len(ids)), strict=False)
                if number + len(ids) > _NUMBERS_OF_CLAIMS:
                    named = map(_numbered, claims.descriptors)
                places = range(begin, begin + len(ids))
                begin = places.stop
                held = payloads[places.start : places.stop]
                if not all(held):
                    run.add(
                        at, list(compress(ids, held)), compress(named, held), compress(places, held)
                    )
                else:
                    run.add(at, ids, named, places)
        return runs.values()

    # --- results -----------------------------------------------------------------------------

    def result(self, answer: Sequence[Sequence[Any]]) -> BatchResult:
        acks, checkpoints, releases, first_ids, claims, expired, finishes = answer
        finished = iter(finishes)
        applied = _as_given(self._checkpointed, checkpoints) if checkpoints else ()
        run_after_ms = iter(_as_given(self._released, releases))
        return BatchResult(
            acks=self._ack_results(acks) if self._batch.acks else (),
            checkpoints=self._checkpoint_results(iter(applied)) if self._batch.checkpoints else (),
            releases=[
                [
                    _requeued(each.key, due_ms)
                    for each in op.releases
                    if (due_ms := next(run_after_ms)) is not None
                ]
                for op in self._batch.releases
            ],
            enqueues=self._given_ids(first_ids) if self._batch.enqueues else (),
            with_options=self._holders(first_ids),
            claims=self._claimed(claims) if any(claims) else self._payloads,
            finishes=[self._finished(op.finishes, finished) for op in self._batch.finishes],
            expired=self._expired(expired) if any(expired) else (),
        )

    def _checkpoint_results(self, applied: Iterator[Any]) -> list[CheckpointResult]:
        """Return the result of each op; `applied` says of one checkpoint after the other whether
        it applied."""
        results = []
        for op in self._batch.checkpoints:
            missed: set[JobKey] = set()
            done: list[Checkpoint] = []
            for each in op.checkpoints:
                if next(applied):
                    done.append(each)
                else:
                    missed.add(each.key)
            requeued = [
                _requeued(each.key, self._due(each.run_after_ms))
                for each in done
                if each.move_to_pending
            ]
            noop = len(op.checkpoints) - len(done)
            results.append(CheckpointResult(len(done), noop, requeued, missed))
        return results

    def _ack_results(self, answer: Sequence[Sequence[int]]) -> list[AckResult]:
        ops = self._batch.acks
        if not any(answer) and all(run.head.retry_ms == "" for run in self._acks):
            return [AckResult(op.jobs, 0, 0, ()) for op in ops]
        failures, again = [0] * len(ops), [list[Requeued]() for _ in ops]
        applied, lost = [set[JobKey]() for _ in ops], [0] * len(ops)
        for run, said in _answers(self._acks, answer):
            retry_ms = run.head.retry_ms
            missed, ended = {at for at in said if at > 0}, {-at for at in said if at < 0}
            for at, (op, local_id) in enumerate(zip(run.ops, run.ids, strict=True), 1):
                key = JobKey(run.head.priority, local_id)
                if at in missed:
                    lost[op] += 1
                    continue
                applied[op].add(key)
                if isinstance(retry_ms, int):
                    failures[op] += 1
                    if at not in ended:
                        again[op].append(_requeued(key, retry_ms))
        return [
            AckResult(
                op.jobs - noop - failed,
                failed,
                noop,
                requeued,
                set(keys_of(op)) - done if noop else frozenset(),
            )
            for op, failed, noop, requeued, done in zip(
                ops, failures, lost, again, applied, strict=True
            )
        ]

    def _given_ids(self, first_ids: Sequence[int]) -> list[range]:
        following = dict(zip(self._jobs, first_ids, strict=True))
        given = []
        for op in self._batch.enqueues:
            stored, jobs = self._stored[op.queue], len(op.jobs)
            first = following.get(stored, 0)
            following[stored] = first + jobs
            given.append(range(first, first + jobs))
        return given

    def _holders(self, first_ids: Sequence[int]) -> Sequence[Sequence[KeyHolder]]:
        if self._plan is None:
            return ()
        first = dict(zip(self._jobs, first_ids, strict=True))
        local_ids = {}
        for queue, jobs in self._plan.free.items():
            stored = self._stored[queue]
            end = first.get(stored, 0) + len(self._jobs.get(stored, ()))
            local_ids[queue] = range(end - len(jobs), end)
        return self._plan.holders(local_ids)

    def _finished(self, finishes: Sequence[Finish], answers: Iterator[int]) -> Finished:
        result = Finished([], [], [])
        for finish in finishes:
            answer = next(answers)
            outcome = FinishOutcome(max(answer, FinishOutcome.DONE))
            result.outcomes.append(outcome)
            if answer == _WAS_PENDING:
                result.left_pending.append(finish.key)
            if outcome is FinishOutcome.DONE and finish.state is JobState.PENDING:
                due_ms = self._due_again(finish.retry_delay_ms)
                result.requeued.append(_requeued(finish.key, due_ms))
        return result

    def _claimed(self, answer: Sequence[Sequence[int]]) -> list[list[Payload | None]]:
        payloads = [list(of_op) for of_op in self._payloads]
        for run, missed in _answers(self._claims, answer):
            for at in missed:
                payloads[run.ops[at - 1]][run.places[at - 1]] = None
        return payloads

    def _expired(self, answer: Sequence[Sequence[int]]) -> list[int]:
        counts = [0] * len(self._batch.claims)
        for run, expired in _answers(self._claims, answer):
            for at in expired:
                counts[run.ops[at - 1]] += 1
        return counts


def _runs_with_options(jobs: Sequence[Job]) -> Iterator[tuple[Job, int, Sequence[str]]]:
    """Divide jobs into runs, of a length that scripts take, that have their priority and options in
    common, but for their keys: one of each, how many, and the keys if they have any."""
    if isinstance(jobs, AlikeJobs) and jobs.keys is not None:
        runs = [(jobs.alike, len(jobs), jobs.keys)]
    else:
        groups = [list(group) for _, group in groupby(jobs, _with_key)]
        runs = [(group[0], len(group), _keys_of(group)) for group in groups]
    for job, size, keys in runs:
        for begin in range(0, size, RUN_JOBS):
            yield job, min(RUN_JOBS, size - begin), keys[begin : begin + RUN_JOBS]


def _with_key(job: Job) -> tuple[int, JobOptions | None]:
    """Return the priority and options of a job, but of its key only whether it has one."""
    options = job.options
    return job.priority, options and options._replace(key="" if options.key else None)


def _keys_of(jobs: Sequence[Job]) -> Sequence[str]:
    return [job.options.key for job in jobs if job.options and job.options.key]


def _arguments(runs: Collection[_Run]) -> list[Argument]:
    """Return the arguments in pieces, so that one command is enough for each."""
    arguments: list[Argument] = [sum([-(-len(run.ids) // RUN_JOBS) for run in runs])]
    for run in runs:
        for begin in range(0, len(run.ids), RUN_JOBS):
            common = [part for part in run.head if part is not None]
            arguments += (*common, *run.ranges(begin))
    return arguments


def _answers(
    runs: Collection[_Run], answer: Iterable[Sequence[int]]
) -> Iterator[tuple[_Run, list[int]]]:
    """Turn positions in pieces into positions in runs."""
    answers = iter(answer)
    for run in runs:
        said: list[int] = []
        for begin in range(0, len(run.ids), RUN_JOBS):
            said += [at + begin if at > 0 else at - begin for at in next(answers)]
        yield run, said


def _in_order(jobs: Sequence[tuple[str, int, int]]) -> Sequence[int]:
    """Return positions in the order of queue, priority and id, in which scripts meet each run once;
    those of a job that is named twice stay as they are. What is done to different jobs commutes."""
    return sorted(range(len(jobs)), key=jobs.__getitem__)


def _as_given(order: Sequence[int], answers: Sequence[Any]) -> Sequence[Any]:
    found = list(answers)
    for at, answer in zip(order, answers, strict=True):
        found[at] = answer
    return found


def _optional(value: bytes | str | int | None) -> bytes:
    if value is None:
        return b"-"
    return b"=" + (value if isinstance(value, bytes) else str(value).encode())


def _requeued(key: JobKey, run_after_ms: int) -> Requeued:
    return Requeued(key.priority, PendingKey(run_after_ms, key.local_id))
