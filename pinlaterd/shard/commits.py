"""Group commit: what has arrived becomes batches, each of which goes into one commit.

Every accepted call is answered exactly once: after its commit, when it is refused, or when the
store fails. What can be found wrong with a call is found before its commit; if a commit fails
beyond doubt, each of its calls is tried alone, so that no other suffers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from pinlaterd.clock import Clock
from pinlaterd.engines.base import ClaimRoom, StorageEngine
from pinlaterd.errors import (
    Overloaded,
    QueueGone,
    QueueNotFound,
    ShardConnectionFailed,
    StorageError,
    StorageFull,
    StorageLocked,
    StorageNotCommitted,
)
from pinlaterd.shard.dequeue import JOB_OVERHEAD_BYTES, ClaimBudget, Dequeue
from pinlaterd.shard.dispatch import Dispatch
from pinlaterd.shard.health import StoreHealth
from pinlaterd.shard.locks import WHOLE_STORE, QueueLocks
from pinlaterd.shard.operations import BATCH_JOBS, PART_JOBS, Commit, Enqueue, Operation, Replies
from pinlaterd.shard.state import STORE_FAILED, Arrival, ShardState
from pinlaterd.shard.tasks import Steps, Tasks

log = logging.getLogger(__name__)

# After so many calls in a row for which a store had no room, the enqueues behind are not tried.
_REFUSALS_OF_A_FULL_STORE = 10
# Dry runs that wait for their turn.
MOST_DRY_RUNS = 1_000
_TOO_LATE = "got the call after its deadline"


class Commits:
    """Has the engine carry operations out, one commit at a time.

    `unfinished` are operations that go on with the next one; `budget` says for how many jobs the
    dequeues of one may ask.
    """

    def __init__(
        self,
        engine: StorageEngine,
        state: ShardState,
        clock: Clock,
        health: StoreHealth,
        replies: Replies,
        *,
        most_bytes: int,
    ) -> None:
        """`most_bytes`: of the bodies that one commit may bring."""
        self.unfinished: list[Operation] = []
        self.budget = ClaimBudget(BATCH_JOBS)
        self.locks = QueueLocks()
        self._engine = engine
        self._state = state
        self._clock = clock
        self._health = health
        self._replies = replies
        self._room = ClaimRoom(most_bytes, JOB_OVERHEAD_BYTES)

    def take_unfinished(self) -> list[Operation]:
        unfinished, self.unfinished = self.unfinished, []
        return unfinished

    def commit(self, operations: Sequence[Operation], now_ms: int) -> StorageNotCommitted | None:
        """Returns why none of them was carried out, if that says anything of the store; None if any
        was. Those whose queue is locked are put off, and the others go on without them."""
        while operations:
            started = self._clock.monotonic()
            try:
                return self._commit(operations, now_ms)
            except StorageLocked as error:
                self.locks.met(error, started=started, now=self._clock.monotonic())
                locked = [one for one in operations if error.queue in one.queues]
                others = [one for one in operations if error.queue not in one.queues]
                self.put_off(locked or operations, error, now_ms)  # "" stands for all queues
                operations = others if locked else ()
        return None

    def _commit(self, operations: Sequence[Operation], now_ms: int) -> StorageNotCommitted | None:
        commit = Commit()
        for operation in operations:
            operation.add_to(commit)
        started = self._clock.monotonic()
        try:
            result = self._engine.apply(commit.batch(self._room), now_ms)
        except StorageLocked:
            raise
        except StorageNotCommitted as error:
            if len(operations) > 1 and not self._engine.trouble:
                return self._apart(operations, error, now_ms)
            self.give_up(operations, error, now_ms)
            return error
        now = self._clock.monotonic()
        self._health.succeeded(now - started, now)
        if self.locks:
            self.locks.passed(queue for operation in operations for queue in operation.queues)
        figures = self._state.figures
        figures.committed(sum([operation.rows for operation in operations]), now - started)
        if commit.claims:
            asked = sum([len(claims[1]) for op, _ in commit.claims for claims in op.claims])
            self.budget.learn(asked, sum([len(payloads) for payloads in result.claims]))
        commit.hand_over(result, self._state, now_ms)
        for operation in operations:
            self.conclude(operation, now_ms)
        figures.end_batch()
        return None

    def _apart(
        self, operations: Sequence[Operation], error: StorageNotCommitted, now_ms: int
    ) -> StorageNotCommitted | None:
        """One by one, after `error`, which one of them may have caused; but what takes no room does
        not wait for each refusal of a full store. Returns as `commit` does; where some were
        refused for lack of room only, that is not why."""
        log.warning("a batch failed, so its calls are tried one by one: %s", error.message)
        groups: list[Sequence[Operation]] = [[operation] for operation in operations]
        if isinstance(error, StorageFull):
            enqueues = [one for one in operations if isinstance(one, Enqueue)]
            others = [one for one in operations if not isinstance(one, Enqueue)]
            if enqueues and others:
                groups = [others, *[[enqueue] for enqueue in enqueues]]
        refusals: list[StorageNotCommitted | None] = []
        not_tried: list[Operation] = []
        full_in_a_row = 0
        for at, group in enumerate(groups):
            if self._engine.trouble:  # which it got into meanwhile
                not_tried += [operation for left in groups[at:] for operation in left]
                break
            if full_in_a_row >= _REFUSALS_OF_A_FULL_STORE and isinstance(group[0], Enqueue):
                not_tried += group
                continue
            refusal = self.commit(group, now_ms)
            refusals.append(refusal)
            full_in_a_row = full_in_a_row + 1 if isinstance(refusal, StorageFull) else 0
        if not_tried:
            self.give_up(not_tried, refusals[-1] or error, now_ms)
        if None in refusals:
            return None
        return min(refusals, key=lambda refusal: isinstance(refusal, StorageFull))

    def conclude(self, operation: Operation, now_ms: int) -> None:
        """After a commit, or where it needs none."""
        entry = operation.reply(now_ms)
        if entry is not None:
            self._replies.settle(operation, entry)
        else:
            self.unfinished.append(operation)

    def put_off(self, operations: Sequence[Operation], error: StorageLocked, now_ms: int) -> None:
        """A queue of theirs is locked: they wait for the next try, or are refused."""
        refused = []
        for operation in operations:
            self._state.touched.update(operation.queues)
            waits = not operation.begun and self.locks.keep(
                error, operation.arrival, self._clock.monotonic()
            )
            if waits:
                operation.give_up(now_ms)
                self._replies.forget(operation)
            else:
                refused.append(operation)
        self._refuse(refused, error, now_ms)

    def give_up(self, operations: Sequence[Operation], error: StorageError, now_ms: int) -> None:
        """Their commit failed, and nothing has changed: another shard may serve, unless their queue
        was removed. But of what earlier commits have carried out a part, the answer says so."""
        log.warning("calls that can't be carried out: %d: %s", len(operations), error.message)
        self._refuse(operations, error, now_ms)

    def _refuse(self, operations: Sequence[Operation], error: StorageError, now_ms: int) -> None:
        self._state.figures.count("calls_refused", len(operations))
        told = isinstance(error, StorageFull | StorageLocked)
        reason = error.message if told else STORE_FAILED
        for operation in operations:
            operation.give_up(now_ms)
            if operation.begun:
                entry = operation.fail(error)
            elif isinstance(error, QueueGone) and error.queue in operation.queues:
                entry = operation.fail(QueueNotFound(error.queue))
            else:
                entry = operation.arrival.refused(reason)
            self._replies.settle(operation, entry)


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
