"""Whether a history keeps every promise: records in, violations out.

It is pure and near-linear, and knows neither processes nor engines, so that real runs and
simulated ones have the same judge. Each rule is a function of the run; docs/promises.md lists
them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import accumulate
from operator import itemgetter

from pinlaterd.model import JobDescriptor
from tests.checker import automaton
from tests.checker.automaton import ABSENT, CLOCK_SLACK_SECONDS, Contradiction, Phase, Step
from tests.checker.copies import explain_copied, is_copied
from tests.checker.history import OK, UNKNOWN, Record
from tests.checker.moves import closed_shards_take_no_jobs, explain_moved
from tests.checker.run import (
    STORED_SLACK_SECONDS,
    JobHistory,
    Run,
    Violation,
    changes,
    is_move_claim,
    rows,
)
from tests.checker.searches import searches_are_exact

# What a neighbour's fault may cost beside twice the usual, and the calls that a p99 is told from.
_MORE_SECONDS = 0.1
_LEAST_CALLS = 100


def judge(records: Iterable[Record]) -> list[Violation]:
    """Everything that the history contradicts, by rule."""
    run = Run(records)
    for rule in RULES:
        rule(run)
    return run.violations


# --- the rules ------------------------------------------------------------------------------


def every_job_is_explained(run: Run) -> None:
    """Acknowledged means kept; refused, absent; claims disjoint; attempts and bodies exact; stale
    acts without effect; reads current; unknown calls settled in their time."""
    stored_at = min((r.t0 for r in run.by_operation["row"]), default=None)
    for job in run.jobs.values():
        stored = None
        if stored_at is not None:
            stored = Record(stored_at, run.end, "store", "row", {"job": job.name})
        try:
            found = _explain(run, job, stored)
        except automaton.TooManyStates:
            run.violate("every job is judged", f"{job.name}: its calls allow too many states")
            continue
        if found is not None:
            states = "; ".join(map(str, found.states[:4]))
            told = sorted((s.record for s in job.steps if s.t0 <= found.step.t1), key=_span)
            steps = "\n    ".join(map(str, told))
            run.violate(
                "every job is explained",
                f"{job.name} was [{states}], but: {found.step.record}\n    {steps[-4000:]}",
            )


def _explain(run: Run, job: JobHistory, stored: Record | None) -> Contradiction | None:
    """`stored`: when the stores were read."""
    if run.by_operation["moved"]:
        return explain_moved(run, job, stored)
    if stored is not None and not job.rows:
        absent = Step(stored.t0, stored.t1, True, automaton.read_nothing, stored)
        job.steps.append(absent)
    if is_copied(run, job):
        return explain_copied(run, job)
    return automaton.explain(job.steps, run.rules(job.queue), ABSENT)


def claims_are_unique(run: Run) -> None:
    seen: dict[str, Record] = {}
    for record in run.by_operation["dequeue"]:
        if not record.arguments.get("dry_run"):
            for *_, held in record.result or ():
                if held in seen:
                    run.violate("claims are unique", f"{held}: {seen[held]} and {record}")
                seen[held] = record


def owners_never_overlap(run: Run) -> None:
    """A claim's descriptor has its owner's start: none of an older one after a newer one's."""
    by_shard: dict[str, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in run.by_operation["dequeue"]:
        for descriptor, *_, held in record.result or ():
            parsed = JobDescriptor.parse(descriptor)
            if parsed is not None and held:
                by_shard[parsed.shard][int(held.split(":")[2])].append(record)
    for shard, starts in by_shard.items():
        soonest = float("inf")  # the end of the first answer by any newer owner
        for start in sorted(starts, reverse=True):
            late = [record for record in starts[start] if record.t0 > soonest]
            if late:
                run.violate("owners never overlap", f"shard {shard}, owner {start}: {late[0]}")
            soonest = min(soonest, *(record.t1 for record in starts[start]))


def lost_claims_are_released(run: Run) -> None:
    """A claim whose answer was cut off while it was written is pending again soon."""
    for operation in ("lookup", "scan", "row"):
        for record in run.by_operation[operation]:
            for descriptor, row in rows(record):
                dequeue = run.dequeue_of(row.claim) if row.state == Phase.IN_PROGRESS else None
                if dequeue is None or not dequeue.arguments.get("cut"):
                    continue
                over = dequeue.t1 + run.settings.release_seconds
                if record.t0 > over and run.faults.calm(dequeue.t0, over):
                    run.violate("lost claims are released", f"{descriptor}: {dequeue}; {record}")


def single_attempts_are_handed_out_once(run: Run) -> None:
    """A job of one attempt is handed out once, be it in an answer that was read in part, and is
    never pending again; unless a checkpoint or retry allowed more, or its store was restored."""
    if run.by_operation["restored"]:
        return
    handed_out: dict[str, Record] = {}
    for record in run.by_operation["dequeue"]:
        if record.arguments.get("dry_run"):
            continue
        taken = {descriptor for descriptor, *_ in record.result or ()}
        for descriptor in taken.union(record.arguments.get("seen", ())):
            job = run.job(descriptor)
            if job is None or job.attempts != 1 or _is_given_more(job):
                continue
            before = handed_out.setdefault(descriptor, record)
            if before is not record:
                run.violate("at most once", f"{descriptor}: {before}; {record}")
    for operation in ("lookup", "scan", "row"):
        for record in run.by_operation[operation]:
            for descriptor, row in rows(record):
                taken_by = handed_out.get(descriptor)
                if taken_by and row.state == Phase.PENDING and record.t0 > taken_by.t1:
                    run.violate(
                        "at most once", f"pending again: {descriptor}: {taken_by}; {record}"
                    )


def _is_given_more(job: JobHistory) -> bool:
    return any(step.record.operation in ("checkpoint", "retry") for step in job.steps)


def limits_are_kept(run: Run) -> None:
    """Clients never hold more claims on jobs of a limited queue than may be in progress."""
    if run.by_operation["restored"]:
        return
    for queue, limit in run.settings.in_progress_limits.items():
        changes_in_number: list[tuple[float, int, Record]] = []
        for record in run.by_operation["dequeue"]:
            if record.arguments["queue"] != queue or record.outcome != OK:
                continue
            for descriptor, *_ in record.result:
                end = _certain_end(run, descriptor, record)
                if end > record.t1:
                    changes_in_number += [(record.t1, 1, record), (end, -1, record)]
        held = 0
        for _, change, record in sorted(changes_in_number, key=itemgetter(0, 1)):
            held += change
            if held > limit:
                run.violate("limits are kept", f"{held} of {queue} at a time: {record}")


def _certain_end(run: Run, descriptor: str, dequeue: Record) -> float:
    """Return until when the claim that a dequeue made on a job held for certain."""
    job, queue = run.job(descriptor), dequeue.arguments["queue"]
    steps = () if job is None else job.steps
    ends = [s.t0 for s in steps if changes(s.record) and s.record is not dequeue]
    timeout = dequeue.t0 + run.rules(queue).claim_seconds - CLOCK_SLACK_SECONDS
    return min([timeout, *(t0 for t0 in ends if t0 >= dequeue.t0)])


class _Ready:
    """Jobs that were ready for certain from one moment to another; the latest end, by start."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float, str]] = []
        self._latest: list[tuple[float, str]] = []

    def add(self, start: float, end: float, name: str) -> None:
        self._spans.append((start, end, name))

    def throughout(self, t0: float, t1: float, *, from_before: float | None = None) -> str | None:
        """A job that was ready from before t0 (or that moment) until after t1."""
        if not self._latest:
            self._spans.sort()
            self._latest = list(accumulate(((e, n) for _, e, n in self._spans), max))
        before = t0 if from_before is None else min(t0, from_before)
        at = bisect_left(self._spans, (before,))
        if at and self._latest[at - 1][0] > t1:
            return self._latest[at - 1][1]
        return None


def dequeues_leave_nothing_behind(run: Run) -> None:
    """No short answer while a healthy shard held a ready job throughout; a higher priority goes
    first; within a priority of a shard the earliest goes first. Not of a dequeue that may lack a
    shard."""
    ready = _certainly_ready(run)
    for record in run.by_operation["dequeue"]:
        given = record.arguments
        partial = given.get("limited") or given.get("dry_run") or given.get("coverage", 1.0) < 1
        partial |= given["queue"] in run.settings.in_progress_limits
        if record.outcome != OK or partial or run.may_lack_a_shard(record):
            continue
        taken: dict[tuple[str, int], float] = {}
        for descriptor, *_ in record.result:
            job = run.job(descriptor)
            if job is not None and job.enqueued is not None:
                place = (job.shard, job.priority)
                first = job.enqueued.t0 if job.due == job.enqueued.t0 else 0.0
                taken[place] = max(taken.get(place, 0.0), first)
        lowest = max((priority for _, priority in taken), default=0)
        short = len(record.result) < given["limit"]
        for (queue, shard, priority), jobs in ready.items():
            if queue != given["queue"] or not run.faults.serves(f"shard-{shard}", *_span(record)):
                continue
            if short or priority < lowest:
                left = jobs.throughout(*_span(record))
                rule = "no short dequeue" if short else "priorities in order"
            else:
                first = taken.get((shard, priority), 0.0)
                left = jobs.throughout(*_span(record), from_before=first)
                rule = "earliest first"
            if left is not None:
                run.violate(rule, f"{left} was ready throughout, but: {record}")


def _span(record: Record) -> tuple[float, float]:
    return record.t0, record.t1


def _certainly_ready(run: Run) -> dict[tuple[str, str, int], _Ready]:
    found: dict[tuple[str, str, int], _Ready] = defaultdict(_Ready)
    for job in run.jobs.values():
        start, end = run.ready_span(job)
        if job.shard and start < end:
            found[job.queue, job.shard, job.priority].add(start, end, job.name)
    return found


def answers_come_in_time(run: Run) -> None:
    """Every call is answered within its time, and without an error where nothing is broken. What
    searches, at the lowest priority, may not end where other calls are slow."""
    patience = run.settings.request_seconds + run.settings.grace_seconds
    for record in run.records:
        if record.operation in _NO_CALLS or record.arguments.get("abandoned"):
            continue
        bound = patience + record.arguments.get("wait_ms", 0) / 1000
        if record.t1 - record.t0 > bound and run.faults.spares("router", record.t0, record.t1):
            run.violate("answers come in time", f"within {bound:g} s: {record}")
        is_held_up = record.operation in _SEARCHES and run.was_slow(record.t0, record.t1)
        may_be_unknown = record.outcome == UNKNOWN and is_held_up
        if record.outcome != OK and run.faults.calm(record.t0, record.t1) and not may_be_unknown:
            run.violate("no errors without faults", str(record))


_SEARCHES = ("count", "scan", "retry", "delete")
_NO_CALLS = (
    *("settings", "fault", "start", "row", "depths", "drained"),
    *("moved", "closed", "emptied", "copied", "restored", "searched"),
)


def neighbours_are_not_slowed(run: Run) -> None:
    """While one shard is at fault, be it for some queues, calls that others can serve stay quick,
    compared with those of the same run that no fault touches."""
    calls = [r for o in ("enqueue", "dequeue") for r in run.by_operation[o] if r.outcome == OK]
    usual = _p99(record for record in calls if not run.faults.touch(record.t0, record.t1))
    if usual is None:
        return
    bound = 2 * usual + _MORE_SECONDS + run.settings.margin_seconds
    for fault in run.faults.all:
        places, queues = fault.arguments["places"], fault.arguments.get("queues", ())
        if len(places) != 1 or not places[0].startswith("shard-") or not run.faults.alone(fault):
            continue
        since = fault.t0 + run.settings.notice_seconds
        found = _p99(
            record
            for record in calls
            if since <= record.t0 <= fault.t1 and record.arguments["queue"] not in queues
        )
        if found is not None and found > bound:
            text = f"p99 {found:.2f} s, usually {usual:.2f} s: {fault}"
            run.violate("neighbours are not slowed", text)


def _p99(calls: Iterable[Record]) -> float | None:
    """Of the time that calls took beyond their own wait; None: too few of them."""
    took = sorted(r.t1 - r.t0 - r.arguments.get("wait_ms", 0) / 1000 for r in calls)
    return took[-1 - len(took) // 100] if len(took) >= _LEAST_CALLS else None


def unknown_calls_end_in_their_time(run: Run) -> None:
    """By its own times the store took no job, and no ack, after all calls for it were over."""
    offset = run.settings.wall_offset
    if offset is None:
        return
    for record in run.by_operation["row"]:
        for descriptor, row in rows(record):
            job = run.job(descriptor)
            if job is None:
                continue
            if len(job.descriptors) > 1 or is_move_claim(row.claim):
                continue  # by its move
            ends = [s.t1 for s in job.steps if s.record.operation == "enqueue"]
            created = row.created_ms / 1000 - offset
            if ends and created > max(ends) + STORED_SLACK_SECONDS:
                run.violate("unknown calls end in their time", f"stored at {created:.3f}: {record}")
            acked = [s.t1 for s in job.steps if s.record.operation in ("ack", "dequeue")]
            updated = row.updated_ms / 1000 - offset
            late = updated > max(acked, default=0.0) + STORED_SLACK_SECONDS
            if row.state == Phase.SUCCEEDED and late:
                run.violate("unknown calls end in their time", f"acked at {updated:.3f}: {record}")


def the_end_is_at_rest(run: Run) -> None:
    """After the last drain nothing ready is left, no claim outlives its time, gauges are right."""
    drained = {r.arguments["queue"]: r for r in run.by_operation["drained"]}
    # The service has stopped by then; to read them all may take longer than a claim has left.
    at_end = min((record.t0 for record in run.by_operation["row"]), default=0.0)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for record in run.by_operation["row"]:
        for descriptor, row in rows(record):
            job = run.job(descriptor)
            if job is None:
                continue
            counts[job.queue][Phase(row.state).name] += 1
            end = drained.get(job.queue)
            if end is None:
                continue
            wall = run.settings.wall_offset
            was_due = wall is not None and row.run_after_ms / 1000 - wall < end.t0 - 1
            if row.state == Phase.PENDING and was_due:
                run.violate("ready index equals store", f"never handed out: {record}")
            claim_seconds = run.rules(job.queue).claim_seconds
            changed = [s.t1 for s in job.steps if changes(s.record)]
            if is_move_claim(row.claim):
                changed += [record.t1 for record in run.by_operation["moved"]]
            last = max(changed, default=0.0)
            until = last + claim_seconds + run.settings.recovery_seconds
            if row.state == Phase.IN_PROGRESS and at_end > until:
                run.violate("claims end", f"held since {last:.3f}: {record}")
    for record in run.by_operation["depths"]:
        queue = record.arguments["queue"]
        gauges = {state: count for state, count in record.result.items() if count}
        if gauges != dict(counts[queue]):
            run.violate("depths equal rows", f"{queue}: {gauges}, rows {dict(counts[queue])}")


def keys_are_held_once(run: Run) -> None:
    """A key names one job for the whole run, one answer at most says that it was new, and that job
    is stored; unless a store was restored, or jobs were moved."""
    if run.by_operation["restored"] or run.by_operation["moved"]:
        return
    named: dict[str, set[str]] = defaultdict(set)
    news: Counter[str] = Counter()
    for record in run.by_operation["keyed"]:
        if record.outcome == OK:
            for key, (descriptor, existed) in zip(
                record.arguments["keys"], record.result, strict=True
            ):
                named[key].add(descriptor)
                news[key] += not existed
    stored: dict[str, set[str]] = defaultdict(set)
    for record in run.by_operation["keyed_row"]:
        stored[record.result[1]].add(record.arguments["descriptor"])
    for key, descriptors in named.items():
        if len(descriptors) > 1 or news[key] > 1:
            told = f"{key}: {sorted(descriptors)}, new in {news[key]} answers"
            run.violate("keys are held once", told)
    for key in stored.keys() | named.keys() if stored else ():
        if len(stored[key]) > 1 or not named[key] <= stored[key]:
            told = f"{key}: stored {sorted(stored[key])}, named {sorted(named[key])}"
            run.violate("keys are held once", told)


RULES = (
    every_job_is_explained,
    keys_are_held_once,
    claims_are_unique,
    owners_never_overlap,
    lost_claims_are_released,
    single_attempts_are_handed_out_once,
    limits_are_kept,
    dequeues_leave_nothing_behind,
    answers_come_in_time,
    neighbours_are_not_slowed,
    unknown_calls_end_in_their_time,
    the_end_is_at_rest,
    closed_shards_take_no_jobs,
    searches_are_exact,
)
