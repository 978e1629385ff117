"""Maintenance of one shard: claims that time out, jobs whose time to live has ended, old space.

A round looks at the queues that hold such jobs, and at some of the others in turn, in slices of a
bounded number of jobs (see `tasks`): each slice is one short commit by the one owner, so nothing is
ever counted or done twice.

A foreign writer may change the store: a PinLater server that still runs, a hand in a table. Where
there are traces of one, what is known of a queue is read and counted again, and once a minute
without any: a job that it has added leaves none.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from random import Random

from pinlaterd.engines.base import AckOp, Acks, Batch, Requeued
from pinlaterd.errors import StorageError, StorageFull, StorageLocked
from pinlaterd.model import JobKey, JobState, backoff_ms
from pinlaterd.shard.health import WHOLE_STORE
from pinlaterd.shard.operations import PART_JOBS
from pinlaterd.shard.state import ShardState
from pinlaterd.shard.tasks import Pace, Steps
from pinlaterd.shard.timekeeping import Timekeeper
from pinlaterd.stats import STATES

log = logging.getLogger(__name__)

_MS_AN_HOUR = 3_600_000
_AGAIN_MS = 1_000  # until leases are ended that could not be
# A foreign writer that goes on costs a look so often at most.
_LOOK_SECONDS = 5.0
# How often a queue is read and counted again at most, and how many queues a round looks at in turn:
# with more, a pass over all of them takes several rounds.
_REREAD_SECONDS, _QUEUES_IN_TURN = 60.0, 100
# How late ended jobs may be deleted, as a part of their time to live: so that a round need not look
# at all of them.
_LATE_PART = 0.01
# What maintenance ends: claims by time-out, jobs when their time to live has.
_ENDING = (JobState.IN_PROGRESS, JobState.SUCCEEDED, JobState.FAILED)
# Calls wait for a refresh: it ends after so many queues, or so much time.
_MOST_QUEUES, _MOST_SECONDS = 1_000, 0.02


class QueueGauges:
    """The gauges of queues: their depths, the ages of their oldest ready jobs, and which queues
    maintenance has to look at. A refresh costs what has changed.

    Each time, the queues with changes are looked at, up to a bound, and some of the others in turn:
    ages grow without a change, and another program's writes to the store show in nothing that a
    shard does. A queue that is locked waits until it can be read again."""

    def __init__(self, state: ShardState) -> None:
        self.holding: dict[str, AbstractSet[JobState]] = {}  # states of jobs that are not PENDING
        self._state = state
        self._stats = state.stats
        self._in_turn: deque[str] = deque()
        self._waiting: dict[str, None] = {}  # queues to look at, the first to change first
        self._counting: set[str] = set()
        self._limited: set[str] = set()  # queues with a gauge of the jobs that wait for permits

    def refresh(self) -> None:
        state, now_ms = self._state, self._state.clock.now_ms()
        state.failures.begin_span(now_ms)
        if not self._in_turn:
            self._in_turn.extend(state.ready.queues())
        self._waiting |= dict.fromkeys(state.changed)
        self._waiting |= dict.fromkeys(_next(self._in_turn))
        state.changed.clear()
        queues = list(islice(self._waiting, _MOST_QUEUES))
        depths = state.engine.depths(queues)
        until = state.clock.monotonic() + _MOST_SECONDS
        for queue in queues:
            if state.clock.monotonic() > until:
                break
            self._counting.discard(queue)
            if queue in depths and queue in state.ready:
                try:
                    self._show(queue, depths[queue], now_ms)
                except StorageLocked:
                    continue
            else:
                self.holding.pop(queue, None)
                self._stats.drop_queue(queue)
            del self._waiting[queue]
        self._waiting |= dict.fromkeys(self._counting)  # they are looked at until they are known
        self._stats.gauge("shard_queues_counting", len(self._counting))
        self._stats.gauge("shard_buffer_bytes", state.ready.held_bytes)

    def _show(
        self, queue: str, depths: Mapping[tuple[int, JobState], int] | None, now_ms: int
    ) -> None:
        """Set the gauges of a queue; scheduled jobs count as pending. `depths` None: not known."""
        ready, stats = self._state.ready, self._stats
        oldest_ms = ready.oldest_ms(queue)
        stats.peak(f"{queue}_oldest_ready_age_ms", 0 if oldest_ms is None else now_ms - oldest_ms)
        if depths is None:
            self._counting.add(queue)
            self.holding[queue] = frozenset(JobState)
            for name in (*STATES, "scheduled"):
                stats.drop_gauge(f"{queue}_{name}")
            return
        totals = dict.fromkeys(JobState, 0)
        for (_, job_state), jobs in depths.items():
            totals[job_state] += jobs
        for job_state, jobs in totals.items():
            stats.gauge(f"{queue}_{job_state.name.lower()}", jobs)
        self.holding[queue] = {held for held in _ENDING if totals[held]}
        if not self.holding[queue]:
            del self.holding[queue]
        pending = {
            priority: jobs
            for (priority, job_state), jobs in depths.items()
            if job_state is JobState.PENDING and jobs
        }
        stats.gauge(f"{queue}_scheduled", ready.scheduled(queue, pending, now_ms))
        self._show_limit(queue)

    def _show_limit(self, queue: str) -> None:
        permits, name = self._state.permits, f"{queue}_held_by_limit"
        if queue in permits.queues:
            self._stats.gauge(name, permits.waiting(queue))
            self._limited.add(queue)
        elif queue in self._limited:
            self._limited.remove(queue)
            self._stats.drop_gauge(name)


def _next(in_turn: deque[str]) -> list[str]:
    return [in_turn.popleft() for _ in range(min(_QUEUES_IN_TURN, len(in_turn)))]


class Maintenance:
    """Says when a round is due, and does it step by step."""

    def __init__(self, state: ShardState, timekeeper: Timekeeper, pace: Pace, rng: Random) -> None:
        self._state = state
        self._engine = state.engine
        self._clock = clock = state.clock
        self.gauges = QueueGauges(state)
        self._time = timekeeper
        self._with_later_claims: set[str] = set()  # queues that may have some
        self._pace = pace
        self._round: Steps | None = None
        # Shards that start together do not all begin at the same moment.
        self.due = clock.monotonic() + rng.random() * self._interval_seconds()
        self._in_turn: deque[str] = deque()
        self._reread_due = clock.monotonic() + _REREAD_SECONDS  # of those that were not yet
        self._rereads_due: dict[str, float] = {}
        self._collect_due: dict[tuple[str, JobState], float] = {}
        self._look_due = 0.0

    def follow_state(self) -> None:
        """Follow the state's new configuration."""
        self._collect_due.clear()  # times to live may be shorter now
        self.due = min(self.due, self._clock.monotonic() + self._interval_seconds())

    def _interval_seconds(self) -> float:
        return self._state.config.server.monitor_interval_seconds

    def due_round(self) -> Steps | None:
        """Return a round, if one is due and the one before has ended."""
        now = self._clock.monotonic()
        if now < self.due or (
            self._round is not None and inspect.getgeneratorstate(self._round) != inspect.GEN_CLOSED
        ):
            return None
        self.due = now + self._interval_seconds()
        self._round = self._all_queues()
        return self._round

    def begin(self) -> None:
        """Begin again: the store was opened or the clock set back; claims may bear later times."""
        self._with_later_claims = set(self._engine.queues())

    def set_back(self) -> None:
        """Reread all queues: what was due in the time that the clock has gone back no longer is."""
        self.begin()
        for queue in list(self._state.ready.queues()):
            self._state.ready.reread(queue)

    # --- once a second -----------------------------------------------------------------------

    def steps_of_tick(self) -> Sequence[Callable[[], None]]:
        return (
            self._look_at_clock,
            self._state.heartbeat,
            self._probe,
            self._look_at_suspects,
            self._end_leases,
            self.gauges.refresh,
        )

    def _look_at_clock(self) -> None:
        if self._time.tick():
            self.set_back()
        # Either way, as far as this is not followed.
        self._state.stats.peak("shard_clock_step_ms", round(abs(self._clock.step_ms)))

    def _probe(self) -> None:
        """Use a degraded or full store: so a shard without work finds out when it is well again."""
        state = self._state
        if not (state.health.degraded or state.health.no_room):
            return
        queues = state.ready.queues()
        queue = next((name for name in queues if state.locks.holding([name]) is None), None)
        if queue is None and queues:
            return  # all are locked, which says nothing of the store
        began = self._clock.monotonic()
        if queue is not None:
            # A server may have waited for a lock: the next probe uses another queue.
            with contextlib.suppress(StorageLocked):
                state.read_pending(queue, 1, after=None, until_ms=0, limit=1)
        try:
            with contextlib.suppress(StorageLocked), state.locks.trying(queue or WHOLE_STORE):
                state.engine.try_enqueue(queue or "")
                state.health.stored()
        except StorageFull as error:
            state.note_refusal(error)
            return
        if queue is None or state.locks.holding([queue]) is None:
            now = self._clock.monotonic()
            state.health.succeeded(now - began, now)

    def _look_at_suspects(self) -> None:
        """Read and count those queues again that a foreign writer seems to have changed."""
        suspects = self._state.suspects
        suspects.update(self._engine.suspects())
        suspects.intersection_update([queue for queue in suspects if queue in self._state.ready])
        now = self._clock.monotonic()
        if not suspects or now < self._look_due:
            return
        self._look_due = now + _LOOK_SECONDS
        queues = sorted(suspects)
        log.warning(
            "somebody else writes to its store, or has removed jobs from it: %s read and counted "
            "again; a shard must have one writer only",
            ", ".join(queues),
        )
        for queue in queues:
            self._reread(queue)
        suspects.clear()

    def _end_leases(self) -> None:
        """End claims that were made, or renewed, for less time than their queue's. They are failed
        as by a worker: an end that came before, or another claim, is left as it is."""
        due = self._state.leases.due(PART_JOBS)
        if due is None or due[0] not in self._state.ready:
            return
        queue, acks = due
        now_ms = self._clock.now_ms()
        try:
            batch = Batch(acks=[AckOp(queue, (), self._with_backoff(queue, acks))])
            [result] = self._engine.apply(batch, now_ms).acks
        except StorageError as error:
            for each in acks:
                claims = [(each.local_ids[0], each.claim_descriptor or "")]
                self._state.leases.add(queue, each.priority, claims, _AGAIN_MS)
            if not isinstance(error, StorageLocked):
                raise
        else:
            failed = result.failed - len(result.requeued)
            self._note_ended(queue, result.requeued, failed, now_ms)

    def _with_backoff(self, queue: str, acks: Sequence[Acks]) -> Sequence[Acks]:
        """Have the jobs of a job type wait for their next attempt, as after every failed one."""
        job_type = self._state.config.job_types.get(queue)
        if job_type is None:
            return acks
        keys = [JobKey(each.priority, each.local_ids[0]) for each in acks]
        found = self._engine.lookup(queue, keys, include_body=False)
        left = {job.key: job.attempts_remaining - 1 for job in found}
        return [
            each._replace(retry_delay_ms=backoff_ms(job_type.attempts, left.get(key, 0)))
            for each, key in zip(acks, keys, strict=True)
        ]

    # --- rounds --------------------------------------------------------------------------------

    def _reread(self, queue: str) -> None:
        """Read a queue again, between batches, when no keys of the ready index are taken."""
        if queue in self._state.ready:
            self._engine.recount(queue)
            self._state.ready.reread(queue)

    def _all_queues(self) -> Steps:
        for queue in sorted(self._engine.expiring):
            yield from self._expire_jobs(queue)
        holding = self.gauges.holding
        for number, (queue, states) in enumerate(sorted(holding.items())):
            looked = yield from self._queue(queue, states)
            if looked or number % _QUEUES_IN_TURN == 0:
                yield None
        for queue in self._next_in_turn():
            # Another program may have left jobs there in any state.
            yield from self._queue(queue, frozenset(_ENDING) - holding.get(queue, frozenset()))
            now = self._clock.monotonic()
            if now >= self._rereads_due.get(queue, self._reread_due):
                self._rereads_due[queue] = now + _REREAD_SECONDS
                self._reread(queue)
            yield None
        while self._vacuum():
            yield None

    def _expire_jobs(self, queue: str) -> Steps:
        """Fail the jobs of a queue that have expired, as long as slices come back full."""
        state = self._state
        while queue in state.ready and not state.locks.holding((queue,)):
            limit, now_ms = self._pace.jobs, self._clock.now_ms()
            try:
                with self._pace:
                    found = self._engine.expire_jobs(queue, limit=limit, now_ms=now_ms)
            except StorageLocked as error:
                log.warning("expired jobs of queue %s wait: %s", queue, error.message)
                return
            if found.failed:
                state.expired(queue, len(found.failed))
                state.discard(queue, found.failed)
            if found.looked_at < limit:
                return
            yield None

    def _vacuum(self) -> bool:
        with self._pace:
            return self._engine.vacuum(limit=self._pace.jobs)

    def _next_in_turn(self) -> list[str]:
        if not self._in_turn:
            queues = self._engine.queues()
            self._in_turn.extend(sorted(queues))
            # Forget those that were deleted.
            self._rereads_due = {q: due for q, due in self._rereads_due.items() if q in queues}
            self._collect_due = {
                place: due for place, due in self._collect_due.items() if place[0] in queues
            }
        return _next(self._in_turn)

    def _queue(self, queue: str, states: AbstractSet[JobState]) -> Generator[None, None, bool]:
        """Maintain a queue; each part goes on while slices come back full. The queue may be dropped
        or locked between two. Returns whether the store was asked."""
        asked = False
        for state in _ENDING:
            due = self._collect_due.get((queue, state), 0.0)
            if state not in states or self._clock.monotonic() < due:
                continue
            while queue in self._state.ready and not self._state.locks.holding((queue,)):
                limit, asked = self._pace.jobs, True
                try:
                    with self._pace:
                        changed = self._end(queue, state, limit)
                except StorageLocked as error:
                    message = "maintenance leaves queue %s to the next round: %s"
                    log.warning(message, queue, error.message)
                    return asked
                if changed < limit:
                    break
                yield None
        return asked

    def _end(self, queue: str, state: JobState, limit: int) -> int:
        """End what is due in one state; return how many jobs were changed."""
        settings = self._state.config.queue(queue)
        if state is JobState.IN_PROGRESS:
            return self._release_expired(queue, settings.job_claimed_timeout_seconds, limit)
        if state is JobState.SUCCEEDED:
            return self._collect(queue, state, settings.job_succeeded_ttl_hours, limit)
        return self._collect(queue, state, settings.job_failed_ttl_hours, limit)

    def _release_expired(self, queue: str, timeout_seconds: float, limit: int) -> int:
        timeout_ms = round(timeout_seconds * 1000)
        before_ms = self._time.claimed_before_ms(timeout_ms)
        ended = self._end_claims(queue, limit, claimed_before_ms=before_ms)
        if ended < limit and queue in self._with_later_claims and self._time.known_for(timeout_ms):
            ended += self._end_later_claims(queue, limit - ended, timeout_ms)
        return ended

    def _end_later_claims(self, queue: str, limit: int, timeout_ms: int) -> int:
        """End claims of a time when the clock was ahead, by more than a time-out."""
        ended = self._end_claims(
            queue,
            limit,
            claimed_before_ms=self._engine.limits.run_after_ms,
            claimed_after_ms=self._clock.now_ms() + timeout_ms,
        )
        if ended < limit:
            self._with_later_claims.discard(queue)
        return ended

    def _end_claims(self, queue: str, limit: int, **claimed_ms: int) -> int:
        now_ms = self._clock.now_ms()
        job_type = self._state.config.job_types.get(queue)
        attempts = 0 if job_type is None else job_type.attempts
        result = self._engine.release_expired(
            queue, limit=limit, now_ms=now_ms, backoff_attempts=attempts, **claimed_ms
        )
        self._note_ended(queue, result.retried, result.failed, now_ms)
        return len(result.retried) + result.failed

    def _note_ended(
        self, queue: str, retried: Sequence[Requeued], failed: int, now_ms: int
    ) -> None:
        if retried:
            self._state.stats.count(f"{queue}_timeout_retry", len(retried))
        if failed:
            self._state.stats.count(f"{queue}_timeout_done", failed)
        self._state.ended(queue)
        self._state.requeue(queue, retried, now_ms)

    def _collect(self, queue: str, state: JobState, ttl_hours: float, limit: int) -> int:
        before_ms = self._clock.now_ms() - round(ttl_hours * _MS_AN_HOUR)
        jobs = self._engine.collect_garbage(queue, state, updated_before_ms=before_ms, limit=limit)
        if jobs:
            self._state.stats.count(f"{queue}_{state.name.lower()}_gc", jobs)
            self._state.changed.add(queue)
        if jobs < limit:
            late_seconds = ttl_hours * _MS_AN_HOUR / 1000 * _LATE_PART
            self._collect_due[queue, state] = self._clock.monotonic() + late_seconds
        return jobs
