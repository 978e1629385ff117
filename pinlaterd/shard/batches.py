"""What has arrived becomes batches: as many calls as fit go into one commit.

Those that have waited since the last batch go first, in turn, and leave room for others; acks go
before claims. Dry runs are done beside the batches, one after the other: an answer may be large.
"""

from __future__ import annotations

from collections import deque

from pinlaterd.clock import Clock
from pinlaterd.engines.base import StorageEngine
from pinlaterd.errors import (
    Overloaded,
    ShardConnectionFailed,
    StorageFull,
    StorageLocked,
    StorageNotCommitted,
)
from pinlaterd.shard.commits import Commits, Replies
from pinlaterd.shard.dequeue import Dequeue
from pinlaterd.shard.dispatch import Dispatch
from pinlaterd.shard.health import StoreHealth
from pinlaterd.shard.locks import WHOLE_STORE
from pinlaterd.shard.operations import BATCH_JOBS, PART_JOBS, Operation
from pinlaterd.shard.state import Arrival, ShardState
from pinlaterd.shard.tasks import Steps, Tasks

# Dry runs that wait for their turn.
MOST_DRY_RUNS = 1_000
_TOO_LATE = "got the call after its deadline"


class _Batch:
    """A batch in the making: `budget` is how many jobs its dequeues may still ask for. Dequeues are
    last: what became ready in a commit is in the index when they reply."""

    def __init__(self, now_ms: int, now: float, budget: int) -> None:
        self.now_ms = now_ms
        self.now = now
        self.writes: list[Operation] = []
        self.dequeues: list[Dequeue] = []
        self.jobs = 0
        self.budget = budget


class Batches:
    """The backlog, and the batches made of it. `most_bytes`: of the replies that wait."""

    def __init__(
        self,
        engine: StorageEngine,
        state: ShardState,
        clock: Clock,
        health: StoreHealth,
        replies: Replies,
        dispatch: Dispatch,
        tasks: Tasks,
        *,
        most_bytes: int,
    ) -> None:
        self.backlog: deque[Arrival] = deque()
        self.commits = Commits(engine, state, clock, health, replies, most_bytes=most_bytes)
        self._engine = engine
        self._state = state
        self._clock = clock
        self._health = health
        self._replies = replies
        self._dispatch = dispatch
        self._tasks = tasks
        self._most_bytes = most_bytes
        self._dry_runs: deque[Dequeue] = deque()  # in turn

    @property
    def waiting(self) -> bool:
        return bool(self.backlog or self.commits.unfinished)

    def refuse_all(self, reason: str) -> None:
        """All that has arrived and is in no batch yet."""
        while self.backlog:
            arrival = self.backlog.popleft()
            self._state.figures.count("calls_refused")
            self._replies.reply(arrival, arrival.refused(reason))

    def abandon(self, told: ShardConnectionFailed) -> None:
        """End all that is in flight; those that wait for a lock are in the backlog then."""
        self._replies.abandon(told)
        self.commits.take_unfinished()
        self.backlog.extendleft(reversed(self.commits.locks.clear()))
        self._dry_runs.clear()

    def leave_dry_runs(self) -> None:
        """Those that change nothing stay unanswered."""
        for dry_run in self._dry_runs:
            if dry_run.changes_nothing:
                self._replies.forget(dry_run)

    def try_locked_again(self) -> None:
        queues, arrivals = self.commits.locks.due(self._clock.monotonic())
        if not queues:
            return
        self.backlog.extendleft(reversed(arrivals))
        ready, now_ms = self._state.ready, self._clock.now_ms()
        for queue in ready.queues() if WHOLE_STORE in queues else [q for q in queues if q in ready]:
            ready.look_again(queue)
            if ready.is_counted(queue, now_ms):
                self._state.touched.add(queue)

    # --- one batch ---------------------------------------------------------------------------

    def run(self) -> None:
        """One commit of what has arrived, as much as fits."""
        commits = self.commits
        batch = _Batch(self._clock.now_ms(), self._clock.monotonic(), commits.budget.jobs)
        for operation in commits.take_unfinished():
            if batch.jobs < PART_JOBS or operation.arrival.entry.deadline <= batch.now:
                self._add(batch, operation)
            else:
                commits.unfinished.append(operation)
        self._fill(batch)
        operations = [*batch.writes, *batch.dequeues]
        if not operations:
            return
        refusal = commits.commit(operations, batch.now_ms)
        if refusal and not isinstance(refusal, StorageFull) and not self._engine.trouble:
            self._health.failed(self._clock.monotonic())  # once, however many calls it refused

    def _fill(self, batch: _Batch) -> None:
        backlog, replies, dispatch = self.backlog, self._replies, self._dispatch
        # Look-ups are answered without a commit, and their answers may be large.
        while (
            backlog
            and batch.jobs < BATCH_JOBS
            and batch.budget > 0
            and replies.bytes < self._most_bytes
        ):
            arrival = backlog.popleft()
            if arrival.entry.deadline <= batch.now:
                self._state.figures.count("calls_expired")
                # Nothing was done; the router can forget it.
                replies.reply(arrival, arrival.refused(_TOO_LATE))
                continue
            relying = batch.writes or batch.dequeues or self.commits.unfinished
            if relying and dispatch.changes_queues(arrival):
                # These rely on the queues as they are.
                backlog.appendleft(arrival)
                break
            batch.jobs += 1  # so that calls without jobs are bounded, too
            operation = dispatch.take(arrival, batch.now_ms)
            if operation is not None:
                replies.expect(operation)
                self._add(batch, operation)

    def _add(self, batch: _Batch, operation: Operation) -> None:
        late = operation.arrival.entry.deadline <= batch.now
        locks = self.commits.locks
        if late and (operation.acks if isinstance(operation, Dequeue) else operation.begun):
            told = ShardConnectionFailed(
                [self._state.name], "has carried out a part of the call in time"
            )
            self._replies.settle(operation, operation.fail(told))
        elif locks and (locked := locks.holding(operation.queues)) is not None:
            self.commits.put_off([operation], locked, batch.now_ms)
        elif isinstance(operation, Dequeue):
            self._add_dequeue(batch, operation, late=late)
        else:
            batch.writes.append(operation)
            batch.jobs += operation.rows

    def _add_dequeue(self, batch: _Batch, dequeue: Dequeue, *, late: bool) -> None:
        """Let it choose its jobs; one that needs no commit is answered, or goes on later."""
        commits, now_ms = self.commits, batch.now_ms
        most_jobs = min(BATCH_JOBS - batch.jobs, batch.budget)
        if late:
            dequeue.remaining = 0  # what it has by now is its answer
        elif dequeue.dry_run:
            if not dequeue.acks and dequeue.remaining:
                self._look_later(dequeue)
                return
        elif dequeue.remaining and most_jobs > 0 and len(dequeue.acks) < 2:  # acks go first
            try:
                dequeue.choose(most_jobs, now_ms)
            except StorageLocked as error:
                commits.locks.met(error, started=batch.now, now=self._clock.monotonic())
                commits.put_off([dequeue], error, now_ms)
                return
            except StorageNotCommitted as error:
                commits.give_up([dequeue], error, now_ms)
                return
        batch.budget -= dequeue.claimed
        jobs = dequeue.rows
        if jobs:
            batch.dequeues.append(dequeue)
            batch.jobs += jobs
        else:
            commits.conclude(dequeue, now_ms)

    # --- dry runs ----------------------------------------------------------------------------

    def _look_later(self, dequeue: Dequeue) -> None:
        if len(self._dry_runs) >= MOST_DRY_RUNS:
            error = Overloaded(f"{MOST_DRY_RUNS} dry runs are in flight already")
            self._replies.settle(dequeue, dequeue.fail(error))
            return
        self._dry_runs.append(dequeue)
        if len(self._dry_runs) == 1:
            self._tasks.start(self._look_in_turn(), paced=False)

    def _look_in_turn(self) -> Steps:
        """All dry runs in flight; the one at work is the first until it is answered."""
        while self._dry_runs:
            dequeue, now_ms = self._dry_runs[0], self._clock.now_ms()
            try:
                for _ in dequeue.look(self._engine, now_ms):
                    yield None
                    if dequeue.arrival.entry.deadline <= self._clock.monotonic():
                        break
            except StorageNotCommitted as error:
                self._dry_runs.popleft()
                self.commits.give_up([dequeue], error, now_ms)
            else:
                self._dry_runs.popleft()
                self._replies.settle(dequeue, dequeue.answer())
