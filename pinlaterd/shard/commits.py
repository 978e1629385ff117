"""The commits of a shard: operations go in together, and what became of each is its reply.

Every accepted call is answered exactly once: after its commit, when it is refused, or when the
store fails. What can be found wrong with a call is found before its commit; if a commit fails
beyond doubt, each of its calls is tried alone, so that no other suffers.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

from pinlaterd.clock import Clock
from pinlaterd.engines.base import ClaimRoom, StorageEngine
from pinlaterd.errors import (
    PinLaterError,
    QueueGone,
    QueueNotFound,
    StorageError,
    StorageFull,
    StorageLocked,
    StorageNotCommitted,
)
from pinlaterd.shard.dequeue import JOB_OVERHEAD_BYTES, ClaimBudget
from pinlaterd.shard.health import StoreHealth
from pinlaterd.shard.locks import QueueLocks
from pinlaterd.shard.operations import BATCH_JOBS, Commit, Enqueue, Operation
from pinlaterd.shard.state import STORE_FAILED, Arrival, ShardState
from pinlaterd.wire.envelope import ReplyEntry

log = logging.getLogger(__name__)

# After so many calls in a row for which a store had no room, the enqueues behind are not tried.
_REFUSALS_OF_A_FULL_STORE = 10


class Replies:
    """The operations in flight, and the replies that wait to be taken."""

    def __init__(self) -> None:
        self.bytes = 0  # in those that wait
        self._in_flight: dict[Operation, None] = {}
        self._waiting: defaultdict[bytes, list[ReplyEntry]] = defaultdict(list)

    def expect(self, operation: Operation) -> None:
        """It is in flight from now on."""
        self._in_flight[operation] = None

    def settle(self, operation: Operation, entry: ReplyEntry) -> None:
        del self._in_flight[operation]
        self._waiting[operation.arrival[0]].append(entry)
        self.bytes += len(entry[2])

    def reply(self, arrival: Arrival, entry: ReplyEntry) -> None:
        """To a call that was never in flight."""
        self._waiting[arrival.router].append(entry)
        self.bytes += len(entry.payload)

    def forget(self, operation: Operation) -> None:
        """It stays without a reply."""
        del self._in_flight[operation]

    def abandon(self, told: PinLaterError) -> None:
        """End all that is in flight; callers are told why."""
        for operation in list(self._in_flight):
            self.settle(operation, operation.fail(told))

    def take(self) -> Mapping[bytes, list[ReplyEntry]]:
        """The replies since the last time, by router."""
        replies, self._waiting = self._waiting, defaultdict(list)
        self.bytes = 0
        return replies


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
