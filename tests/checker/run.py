"""A history taken apart by jobs: the calls on each, with the effect each can have had."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from pinlaterd.model import JobDescriptor, claim_source
from tests.checker import automaton
from tests.checker.automaton import Effect, Phase, Rules, Step
from tests.checker.history import FAIL, OK, Faults, Record, Settings, Windows

# A stored time is rounded down to milliseconds.
STORED_SLACK_SECONDS = 0.05


class Violation(NamedTuple):
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


class Row(NamedTuple):
    """A job as a look-up, a scan or the store itself shows it."""

    state: int
    body: str | None
    allowed: int
    remaining: int
    claim: str | None
    created_ms: int
    run_after_ms: int
    updated_ms: int


class JobHistory:
    """All that concerns one job. It is known by its body, up to the first slash."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue = ""
        self.priority = 0
        self.descriptors: set[str] = set()
        self.left: set[str] = set()  # those of them where a move ended it: it has gone on elsewhere
        self.steps: list[Step] = []
        self.enqueued: Record | None = None
        self.began = float("inf")  # its enqueue, whatever became of that
        self.attempts = 0
        self.due = 0.0
        self.rows: list[Record] = []

    @property
    def shard(self) -> str:
        """Where it is now, or "" if that is not known."""
        places = self.descriptors - self.left
        parsed = JobDescriptor.parse(next(iter(places))) if len(places) == 1 else None
        return parsed.shard if parsed else ""

    def first_claim_at(self) -> float:
        """No call can have changed it before, since it was enqueued."""
        later = (s.t0 for s in self.steps if s.record is not self.enqueued and changes(s.record))
        return min(later, default=float("inf"))


def changes(record: Record) -> bool:
    return record.operation not in ("lookup", "scan", "row", "copied")


def is_move_claim(claim: str | None) -> bool:
    """Whether a move made it, to end a job that is on another shard by then."""
    return claim_source(claim or "") == "pinlater-admin drain"


def name_of(body: str) -> str:
    return body.partition("/")[0]


class Run:
    """A history, taken apart by jobs."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = sorted(records, key=lambda record: (record.t0, record.t1))
        found = [r.arguments for r in self.records if r.operation == "settings"]
        self.settings = Settings(**(found[0] if found else {}))
        self.faults = Faults(self.records, self.settings)
        self.by_operation: dict[str, list[Record]] = defaultdict(list)
        for record in self.records:
            self.by_operation[record.operation].append(record)
        self.jobs: dict[str, JobHistory] = {}
        self.named: dict[str, str] = {}  # descriptor -> name of the job
        self.violations: list[Violation] = []
        self.end = max((record.t1 for record in self.records), default=0.0)
        self._slow = Windows(
            (r.t0, r.t1)
            for operation in ("enqueue", "dequeue", "ack")
            for r in self.by_operation[operation]
            if r.outcome == OK and self._is_slow(r)
        )
        self._settled: dict[int, float] = {}
        self._rules: dict[str, Rules] = {}
        self._claimed_by = {
            record.arguments["source"]: record
            for record in self.by_operation["dequeue"]
            if record.arguments.get("source")
        }
        self._learn_names()
        for record in self.records:
            take = getattr(self, f"_take_{record.operation}", None)
            if take is not None and record.outcome != FAIL:
                take(record)
        self._take_bulk()

    def settled(self, record: Record) -> float:
        """The end of the time in which it can take effect."""
        if record.outcome == OK:
            return record.t1
        if id(record) not in self._settled:
            self._settled[id(record)] = self.faults.settled_at(record)
        return self._settled[id(record)]

    def rules(self, queue: str) -> Rules:
        if queue not in self._rules:
            settings = self.settings
            self._rules[queue] = Rules(
                settings.queue_claim_seconds.get(queue, settings.claim_seconds),
                settings.ttl_seconds,
                Windows(self._losses(queue)),
            )
        return self._rules[queue]

    def _losses(self, queue: str) -> Iterator[tuple[float, float]]:
        """When claims can have been lost: answers that did not come, or left some shard's out."""
        for record in self.by_operation["dequeue"]:
            if record.arguments["queue"] != queue or record.arguments.get("dry_run"):
                continue
            whole = record.outcome == OK and not self.may_lack_a_shard(record)
            if not whole or not self.faults.calm(record.t0, record.t1):
                late = self.settings.request_seconds + self.settings.grace_seconds
                yield record.t0, max(self.faults.settled_at(record), record.t1 + late)

    def may_lack_a_shard(self, dequeue: Record) -> bool:
        """If one may have been silent, since before it or not, which may claim jobs yet: on a busy
        machine a shard may get no processor for a second."""
        return self.was_slow(dequeue.t0 - self.settings.silence_seconds, dequeue.t1)

    def was_slow(self, t0: float, t1: float) -> bool:
        """Whether calls took so long then that a shard may have been silent."""
        return self._slow.touch(t0, t1)

    def _is_slow(self, record: Record) -> bool:
        seconds: float = record.t1 - record.t0 - record.arguments.get("wait_ms", 0) / 1000
        return seconds >= self.settings.silence_seconds

    def dequeue_of(self, claim_descriptor: str | None) -> Record | None:
        source = claim_source(claim_descriptor or "")
        return self._claimed_by.get(source or "")

    def ready_span(self, job: JobHistory) -> tuple[float, float]:
        """From when to when it was ready for certain; the end comes first if it never was."""
        if job.enqueued is None:
            return 0.0, 0.0
        end = job.first_claim_at()
        lost_at = self.rules(job.queue).losses.first_within(job.enqueued.t0, end)
        start = max(job.enqueued.t1, job.due + STORED_SLACK_SECONDS)
        if job.left:
            start = max([start, *(r.t1 for r in self.by_operation["moved"] if r.t0 < start)])
        return start, end if lost_at is None else min(end, lost_at)

    def violate(self, rule: str, text: str) -> None:
        self.violations.append(Violation(rule, text))

    # --- names ----------------------------------------------------------------------------

    def _learn_names(self) -> None:
        """Which descriptor names which job; a descriptor names one for ever, a job has one."""
        for record in self.by_operation["enqueue"]:
            for body, priority, attempts, _ in record.arguments["jobs"]:
                job = self.jobs.setdefault(name_of(body), JobHistory(name_of(body)))
                job.queue, job.priority = record.arguments["queue"], priority
                job.began, job.attempts = record.t0, attempts
            for job, descriptor in zip(record.arguments["jobs"], record.result or (), strict=False):
                if descriptor:
                    self._learn(descriptor, job[0], record)
        for record in self.by_operation["dequeue"]:
            for descriptor, body, *_ in record.result or ():
                self._learn(descriptor, body, record)
        for operation in ("lookup", "scan", "row"):
            for record in self.by_operation[operation]:
                for descriptor, row in rows(record):
                    if row.body is not None:
                        self._learn(descriptor, row.body, record)
                    if is_move_claim(row.claim) and descriptor in self.named:
                        self.jobs[self.named[descriptor]].left.add(descriptor)

    def _learn(self, descriptor: str, body: str, record: Record) -> None:
        name = name_of(body)
        if name not in self.jobs:
            self.violate("body exact", f"nobody enqueued {body[:80]!r}, but: {record}")
            return
        before = self.named.setdefault(descriptor, name)
        if before != name:
            self.violate(
                "a descriptor names one job for ever",
                f"{descriptor} named {before}, and names {name}: {record}",
            )
        job = self.jobs[name]
        job.descriptors.add(descriptor)
        if len(job.descriptors) == 2 and not self.by_operation["moved"]:
            self.violate("one row a body", f"{name} is {sorted(job.descriptors)}: {record}")
        parsed = JobDescriptor.parse(descriptor)
        if parsed is None or (parsed.queue, parsed.priority) != (job.queue, job.priority):
            self.violate("body exact", f"{name} of {job.queue} p{job.priority}: {record}")

    def job(self, descriptor: str) -> JobHistory | None:
        name = self.named.get(descriptor)
        return self.jobs[name] if name is not None else None

    def _step(self, descriptor: str, record: Record, apply: Effect) -> None:
        job = self.job(descriptor)
        if job is not None:
            sure = record.outcome == OK
            step = Step(record.t0, self.settled(record), sure, apply, record, descriptor)
            job.steps.append(step)

    # --- one method an operation ----------------------------------------------------------

    def _take_enqueue(self, record: Record) -> None:
        descriptors = record.result or [None] * len(record.arguments["jobs"])
        for (body, _, attempts, delay_ms), descriptor in zip(
            record.arguments["jobs"], descriptors, strict=True
        ):
            if descriptor == "":
                continue  # certainly not stored
            job = self.jobs[name_of(body)]
            job.due = record.t0 + (delay_ms or 0) / 1000
            stored = descriptor is not None
            end = record.t1 if stored else self.settled(record)
            effect = automaton.enqueue(body, attempts, record.t0, job.due)
            job.steps.append(Step(record.t0, end, stored, effect, record, descriptor))
            if stored:
                job.enqueued = record

    def _take_dequeue(self, record: Record) -> None:
        self._take_ack(record)
        if record.arguments.get("dry_run"):
            return
        for descriptor, body, allowed, remaining, held in record.result or ():
            job = self.job(descriptor)
            if job is not None:
                effect = automaton.claim(body, allowed, remaining, held, record)
                self._step(descriptor, record, effect)

    def _take_ack(self, record: Record) -> None:
        for descriptor, held in record.arguments.get("succeeded", ()):
            self._step(descriptor, record, automaton.ack(held, record.t0))
        for descriptor, held, delay_ms in record.arguments.get("failed", ()):
            effect = automaton.fail(held, record.t0, delay_ms / 1000)
            self._step(descriptor, record, effect)

    def _take_checkpoint(self, record: Record) -> None:
        for descriptor, held, body, to_pending, delay_ms, attempts in record.arguments["requests"]:
            due = record.t0 + delay_ms / 1000
            holder = held or self._claim_by(descriptor, record.arguments["source"])
            if holder is not None:
                effect = automaton.checkpoint(holder, record.t0, body, to_pending, due, attempts)
                self._step(descriptor, record, effect)

    def _claim_by(self, descriptor: str, source: str) -> str | None:
        """The claim that a dequeue of that source was given on the job."""
        dequeue = self._claimed_by.get(source)
        claims = dequeue.result or () if dequeue else ()
        return next((held for given, *_, held in claims if given == descriptor), None)

    def _take_lookup(self, record: Record) -> None:
        if record.outcome != OK:
            return
        for descriptor, row in rows(record):
            self._take_row_of(descriptor, row, record)
        for descriptor in record.arguments["descriptors"]:
            if descriptor not in record.result:
                self._step(descriptor, record, automaton.read_nothing)

    def _take_scan(self, record: Record) -> None:
        if record.outcome == OK:
            # A search that goes on over several calls may have met it in an earlier one.
            begun = replace(record, t0=record.arguments.get("begun", record.t0))
            for descriptor, row in rows(record):
                self._take_row_of(descriptor, row, begun)

    def _take_row(self, record: Record) -> None:
        for descriptor, row in rows(record):
            self._take_row_of(descriptor, row, record)
            job = self.job(descriptor)
            if job is not None:
                job.rows.append(record)

    def _take_row_of(self, descriptor: str, row: Row, record: Record) -> None:
        claim = automaton.MOVE if is_move_claim(row.claim) else row.claim
        effect = automaton.read(Phase(row.state), row.body, row.allowed, row.remaining, claim)
        self._step(descriptor, record, effect)

    def _take_copied(self, record: Record) -> None:
        """A copy of a store was made; it has no effect yet on what the job is."""
        for job in self.jobs.values():
            if job.shard in record.arguments["shards"]:
                job.steps.append(Step(record.t0, record.t1, True, lambda state: state, record))

    _take_restored = _take_copied

    def _take_bulk(self) -> None:
        """Retries and deletes: one that reached less than its limit concerned every job."""
        calls: dict[str, list[tuple[Record, int | None, Effect]]] = defaultdict(list)
        for record in self.by_operation["retry"]:
            given = record.arguments
            due = record.t0 + given["delay_ms"] / 1000
            effect = automaton.retry(given["attempts"], record.t0, due)
            calls[given["queue"]].append((record, given["priority"], effect))
        for record in self.by_operation["delete"]:
            effect = automaton.delete(Phase(record.arguments["state"]))
            calls[record.arguments["queue"]].append((record, record.arguments["priority"], effect))
        for record in self.by_operation["delete_queue"]:
            calls[record.arguments["queue"]].append((record, None, automaton.delete(None)))
        for job in self.jobs.values():
            known = [job.enqueued.t0] if job.enqueued else [step.t0 for step in job.steps]
            for record, priority, effect in calls.get(job.queue, ()):
                if record.outcome == FAIL or priority not in (None, job.priority):
                    continue
                if self.settled(record) >= min(known, default=0.0):
                    whole = record.result is None or (
                        record.result < record.arguments["limit"] and self._had_time(record)
                    )
                    sure = whole and record.outcome == OK
                    end = self.settled(record)
                    job.steps.append(Step(record.t0, end, sure, effect, record))

    def _had_time(self, record: Record) -> bool:
        """One that has used most of its time stops, as the interface says."""
        return record.t1 - record.t0 < self.settings.request_seconds / 2


def rows(record: Record) -> Iterator[tuple[str, Row]]:
    if record.operation == "row":
        yield record.arguments["descriptor"], Row(*record.result)
    elif record.outcome == OK:
        for descriptor, row in record.result.items():
            yield descriptor, Row(*row)
