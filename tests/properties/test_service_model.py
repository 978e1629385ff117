"""A walk of calls through the whole service against a plain model of a queue.

Any order of enqueue, dequeue, ack, checkpoint, finish, retry, delete and kill -9 of a shard leaves
the same jobs in the same states as the model, which is a dictionary. What the service may choose
(which shard, which of equal jobs, what the limit of a retry or delete cuts off) the model learns
from its answers, after checking that the choice was allowed. One engine is enough: engine_model
compares what each of them stores.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from pinlaterd.client import AckInfo, CheckpointInfo, ClaimedJob, Client, Job, JobRecord, JobState
from pinlaterd.model import FinishInfo, FinishOutcome, JobDescriptor
from tests.checker.history import Settings
from tests.conftest import WaitUntil
from tests.deployment import MOST_PATIENT, Deployment, claim, serving

pytestmark = pytest.mark.service

PRIORITIES = (1, 2, 3)
HOUR_MS = 3_600_000
STEPS = 250
STEPS_BETWEEN_COMPARISONS = 10
SHARDS = ("walk-1", "walk-2", "walk-3")
SILENCE_SECONDS = Settings.silence_seconds
STATUS_CHARS = 5000


@dataclass
class ModelJob:
    """What the service should say of a job. `due`: whether its run-after has come."""

    body: bytes
    priority: int
    attempts_allowed: int
    attempts_remaining: int
    status: str
    due: bool
    state: JobState = JobState.PENDING
    claim: str | None = None

    def fail(self, *, due: bool) -> None:
        if self.attempts_remaining > 1:
            self.attempts_remaining -= 1
            self.to_pending(due=due)
        else:
            self.attempts_remaining = 0
            self.state = JobState.FAILED

    def to_pending(self, *, due: bool) -> None:
        self.state, self.claim, self.due = JobState.PENDING, None, due

    def append_status(self, text: str) -> None:
        self.status = _cut(self.status + text)


@dataclass
class Walk:
    """One queue of the service, and its model. Each step is a call, made on both."""

    client: Client
    queue: str
    restart_shard: Callable[[], None]
    chance: random.Random
    jobs: dict[str, ModelJob] = field(default_factory=dict)
    claimed: list[ClaimedJob] = field(default_factory=list)  # also those that have ended since
    serial: int = 0
    met: set[JobState] = field(default_factory=set)  # what was compared, over the whole walk

    # --- steps ----------------------------------------------------------------------------

    def enqueue(self) -> None:
        jobs = [self._new_job() for _ in range(self.chance.choice((1, 1, 3, 20)))]
        for descriptor, job in zip(self.client.enqueue(self.queue, jobs), jobs, strict=True):
            parsed = JobDescriptor.parse(descriptor)
            assert parsed is not None
            assert (parsed.queue, parsed.priority) == (self.queue, job.priority)
            assert descriptor not in self.jobs
            self.jobs[descriptor] = ModelJob(
                body=job.body,
                priority=job.priority,
                attempts_allowed=job.attempts_allowed,
                attempts_remaining=job.attempts_allowed,
                status=job.custom_status,
                due=job.run_after_ms is None or job.run_after_ms <= _now_ms(),
            )

    def dequeue(self) -> None:
        limit = self.chance.choice((1, 2, 10, 100))
        ready = self._ready()
        taken, is_whole = self._take(limit)
        while not is_whole and len(taken) < min(limit, len(ready)):
            taken += claim(self.client, self.queue)
        self._check_hand_out(taken, ready, limit, in_order=is_whole)
        for job in taken:
            model = self.jobs[job.descriptor]
            model.state, model.claim = JobState.IN_PROGRESS, job.claim_descriptor
        self.claimed += taken

    def look(self) -> None:
        limit = self.chance.choice((1, 5, 100))
        taken, is_whole = self._take(limit, dry_run=True)
        if is_whole:
            self._check_hand_out(taken, self._ready(), limit)

    def _take(self, limit: int, *, dry_run: bool = False) -> tuple[list[ClaimedJob], bool]:
        """Dequeue once all shards answer; return the jobs, and whether no shard can have been left
        out."""
        self.client.count(self.queue, JobState.FAILED)
        began = time.monotonic()
        taken = self.client.dequeue(self.queue, limit=limit, dry_run=dry_run)
        return taken, time.monotonic() - began < SILENCE_SECONDS

    def ack(self) -> None:
        succeeded, failed = self._some_claims(), self._some_claims()
        named = {job.descriptor for job in succeeded}
        failed = [job for job in failed if job.descriptor not in named]
        delay_ms = self.chance.choice((0, HOUR_MS))
        infos = [
            [
                AckInfo(job.descriptor, f"<{self.serial}>", delay_ms, job.claim_descriptor)
                for job in jobs
            ]
            for jobs in (succeeded, failed)
        ]
        self.client.ack(self.queue, succeeded=infos[0], failed=infos[1])
        for job in succeeded:
            if (model := self._held(job)) is not None:
                model.append_status(f"<{self.serial}>")
                model.state = JobState.SUCCEEDED
        for job in failed:
            if (model := self._held(job)) is not None:
                model.append_status(f"<{self.serial}>")
                model.fail(due=delay_ms == 0)

    def checkpoint(self) -> None:
        for job in self._some_claims():
            info = CheckpointInfo(
                job.descriptor,
                new_body=self.chance.choice((None, b"new/%d" % self.serial)),
                move_to_pending=self.chance.random() < 0.5,
                run_after_ms=self.chance.choice((None, 1, _now_ms() + HOUR_MS)),
                attempts=self.chance.choice((None, 1, 4)),
                prepend_custom_status=self.chance.choice((None, f"[{self.serial}]")),
                claim_descriptor=self.chance.choice((None, job.claim_descriptor)),
            )
            self.client.checkpoint(self.queue, [info])
            model = self._held(job) if info.claim_descriptor else self.jobs.get(job.descriptor)
            if model is not None and model.state is JobState.IN_PROGRESS:
                _apply_checkpoint(model, info)

    def finish(self) -> None:
        """Jobs in any state; claimed or not."""
        for descriptor in self.chance.sample(list(self.jobs), min(3, len(self.jobs))):
            model = self.jobs[descriptor]
            expected = self.chance.choice((None, model.attempts_remaining, 9))
            state = self.chance.choice((JobState.PENDING, JobState.SUCCEEDED, JobState.FAILED))
            left, delay_ms = self.chance.choice((1, 2)), self.chance.choice((0, HOUR_MS))
            text = f"({self.serial})"
            info = FinishInfo(
                descriptor,
                state,
                left,
                expected,
                retry_delay_ms=delay_ms,
                append_custom_status=text,
            )

            [outcome] = self.client.finish_jobs(self.queue, [info])

            if model.state in (JobState.SUCCEEDED, JobState.FAILED):
                assert outcome is FinishOutcome.ENDED_BEFORE
            elif expected == 9:
                assert outcome is FinishOutcome.OTHER_ATTEMPTS
            else:
                assert outcome is FinishOutcome.DONE
                model.append_status(text)
                model.state, model.attempts_remaining = state, left
                if state is JobState.PENDING:
                    model.to_pending(due=delay_ms == 0)

    def retry_failed(self) -> None:
        priority, limit = self.chance.choice(PRIORITIES), self.chance.choice((1, 3, 1000))
        attempts, later = self.chance.choice((1, 5)), self.chance.random() < 0.3
        failed = self._matching(JobState.FAILED, priority)

        count = self.client.retry_failed(
            self.queue,
            priority=priority,
            attempts_to_allow=attempts,
            run_after_ms=_now_ms() + HOUR_MS if later else None,
            limit=limit,
        )

        records = self.client.lookup(failed)
        retried = [d for d in failed if records[d].state is JobState.PENDING]
        assert count == len(retried) == min(limit, len(failed))
        for descriptor in retried:
            model = self.jobs[descriptor]
            model.attempts_remaining = attempts
            model.attempts_allowed = max(model.attempts_allowed, attempts)
            model.to_pending(due=not later)

    def delete(self) -> None:
        state, priority = self.chance.choice(list(JobState)), self.chance.choice(PRIORITIES)
        limit, digit = self.chance.choice((1, 2, 5)), self.chance.choice((None, "3"))
        matching = [
            descriptor
            for descriptor in self._matching(state, priority)
            if digit is None or digit.encode() in self.jobs[descriptor].body
        ]

        count = self.client.delete_jobs(
            self.queue, state, priority=priority, body_regex=digit, limit=limit
        )

        left = self.client.lookup(matching)
        gone = [descriptor for descriptor in matching if descriptor not in left]
        assert count == len(gone) == min(limit, len(matching))
        for descriptor in gone:
            del self.jobs[descriptor]

    # --- the service against the model ----------------------------------------------------

    def compare(self) -> None:
        records = self.client.lookup(self.jobs, include_body=True)
        assert records.keys() == self.jobs.keys()
        for descriptor, model in self.jobs.items():
            assert _seen(records[descriptor]) == model, descriptor
            self.met.add(model.state)
        for state in JobState:
            for due in (True, False):
                expected = {
                    d for d, job in self.jobs.items() if (job.state, job.due) == (state, due)
                }
                assert self.client.count(self.queue, state, future=not due) == len(expected)
                scanned = list(self.client.scan(self.queue, state, future=not due, page_size=7))
                assert [job.descriptor for job in scanned] == sorted(
                    expected, key=lambda d: _scan_order(records[d])
                )

    def _check_hand_out(
        self, taken: Sequence[ClaimedJob], ready: list[str], limit: int, *, in_order: bool = True
    ) -> None:
        """As many as there are, each ready, and none while a more urgent one is left behind."""
        names = {job.descriptor for job in taken}
        assert len(names) == len(taken) == min(limit, len(ready))
        assert names <= set(ready)
        for job in taken:
            model = self.jobs[job.descriptor]
            assert (job.body, job.attempts_allowed, job.attempts_remaining) == (
                model.body,
                model.attempts_allowed,
                model.attempts_remaining,
            )
        left = [self.jobs[d].priority for d in ready if in_order and d not in names]
        assert max((self.jobs[d].priority for d in names), default=0) <= min(left, default=99)

    def _new_job(self) -> Job:
        self.serial += 1
        return Job(
            b"body/%d" % self.serial,
            self.chance.choice(PRIORITIES),
            self.chance.choice((None, None, 0, _now_ms() - HOUR_MS, _now_ms() + HOUR_MS)),
            self.chance.choice((1, 2, 3)),
            self.chance.choice(("", "status")),
        )

    def _ready(self) -> list[str]:
        return [d for d, job in self.jobs.items() if job.state is JobState.PENDING and job.due]

    def _matching(self, state: JobState, priority: int) -> list[str]:
        wanted = (state, priority)
        return [d for d, job in self.jobs.items() if (job.state, job.priority) == wanted]

    def _some_claims(self) -> list[ClaimedJob]:
        """Claims that hold, mostly, and some that have ended; each job once."""
        recent = self.claimed[-40:]
        chosen = self.chance.sample(recent, min(len(recent), self.chance.choice((1, 3, 10))))
        return list({job.descriptor: job for job in chosen}.values())

    def _held(self, job: ClaimedJob) -> ModelJob | None:
        """The job, if that very claim still holds."""
        model = self.jobs.get(job.descriptor)
        holds = model is not None and model.state is JobState.IN_PROGRESS
        return model if holds and model and model.claim == job.claim_descriptor else None


def _cut(status: str) -> str:
    return status[:STATUS_CHARS]


def _apply_checkpoint(model: ModelJob, info: CheckpointInfo) -> None:
    due = info.run_after_ms is None or info.run_after_ms <= _now_ms()
    model.due = due
    if info.new_body is not None:
        model.body = info.new_body
    if info.attempts is not None:
        model.attempts_allowed = model.attempts_remaining = info.attempts
    if info.prepend_custom_status is not None:
        model.status = _cut(info.prepend_custom_status + model.status)
    if info.move_to_pending:
        model.to_pending(due=due)


def _seen(record: JobRecord) -> ModelJob:
    parsed = JobDescriptor.parse(record.descriptor)
    assert parsed is not None
    assert record.body is not None
    return ModelJob(
        body=record.body,
        priority=parsed.priority,
        attempts_allowed=record.attempts_allowed,
        attempts_remaining=record.attempts_remaining,
        status=record.custom_status,
        due=record.run_after_ms <= _now_ms(),
        state=record.state,
        claim=record.claim_descriptor,
    )


def _scan_order(record: JobRecord) -> tuple[int, str, int, int]:
    parsed = JobDescriptor.parse(record.descriptor)
    assert parsed is not None
    return (-record.run_after_ms, parsed.shard, parsed.priority, parsed.local_id)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    shards: dict[str, dict[str, object]] = {name: {"engine": "sqlite"} for name in SHARDS}
    with serving(tmp_path_factory.mktemp("d"), shards=shards, settings=MOST_PATIENT) as deployment:
        yield deployment


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_calls_leaves_what_the_model_has(
    deployment: Deployment, seed: int, wait_until: WaitUntil
):
    """Walk STEPS calls on a new queue, with a shard killed now and then."""
    chance = random.Random(seed)
    queue = f"walk_{seed}"

    def restart_shard() -> None:
        program = f"shard-{chance.choice(SHARDS)}"
        pid = deployment.pid_of(program)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: deployment.pids().get(program, pid) != pid)
        deployment.wait_until_serving()

    with deployment.client("walker") as client:
        client.create_queue(queue)
        walk = Walk(client, queue, restart_shard, chance)
        steps = {
            walk.enqueue: 25,
            walk.dequeue: 25,
            walk.look: 5,
            walk.ack: 20,
            walk.checkpoint: 10,
            walk.finish: 8,
            walk.retry_failed: 8,
            walk.delete: 7,
        }
        for number in range(STEPS):
            chance.choices(list(steps), list(steps.values()))[0]()
            if number in (STEPS // 3, 2 * STEPS // 3):
                walk.restart_shard()
            if number % STEPS_BETWEEN_COMPARISONS == 0:
                walk.compare()
        walk.compare()
    assert walk.met == set(JobState)
