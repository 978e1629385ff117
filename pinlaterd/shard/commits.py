"""The commits of a shard: works go in together, and what became of each is its answer.

What is in hand is answered exactly once: by a commit, by being given up, or, when the store fails,
by `abandon`. Relies on the engine and on what works say of themselves.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from pinlaterd.clock import Clock
from pinlaterd.engines.base import BatchResult, ClaimRoom, StorageEngine
from pinlaterd.errors import (
    PinLaterError,
    QueueGone,
    QueueNotFound,
    StorageError,
    StorageFull,
    StorageLocked,
    StorageNotCommitted,
)
from pinlaterd.shard.dequeues import JOB_OVERHEAD_BYTES, Appetite, DequeueWork
from pinlaterd.shard.health import StoreHealth
from pinlaterd.shard.locks import QueueLocks
from pinlaterd.shard.works import (
    STORE_FAILED,
    Arrival,
    EnqueueWork,
    Memory,
    Parts,
    Results,
    Work,
    refused,
)
from pinlaterd.wire.envelope import ReplyEntry

log = logging.getLogger(__name__)

# After so many calls in a row for which a store had no room, the enqueues behind are not tried.
_REFUSALS_OF_A_FULL_STORE = 10
NOTHING: Final = Results(BatchResult((), (), (), (), ()))


class Answers:
    """What is in hand, and the answers that wait to be taken."""

    def __init__(self) -> None:
        self.bytes = 0  # in those that wait
        self._in_hand: dict[Work, None] = {}
        self._replies: defaultdict[bytes, list[ReplyEntry]] = defaultdict(list)

    def expect(self, work: Work) -> None:
        """It is in hand from now on."""
        self._in_hand[work] = None

    def settle(self, work: Work, entry: ReplyEntry) -> None:
        del self._in_hand[work]
        self.reply(work.arrival, entry)

    def reply(self, arrival: Arrival, entry: ReplyEntry) -> None:
        """The answer to what never came in hand."""
        self._replies[arrival.router].append(entry)
        self.bytes += len(entry.payload)

    def forget(self, work: Work) -> None:
        """It stays without an answer."""
        del self._in_hand[work]

    def abandon(self, told: PinLaterError) -> None:
        """End all that is in hand; whoever waits for it is told why."""
        for work in list(self._in_hand):
            self.settle(work, work.fail(told))

    def take(self) -> Mapping[bytes, list[ReplyEntry]]:
        """The answers since the last time, by router."""
        replies, self._replies = self._replies, defaultdict(list)
        self.bytes = 0
        return replies


class Commits:
    """Has the engine carry works out, one commit at a time.

    `unfinished` are works that go on with the next one; `appetite` says for how many jobs the
    dequeues of one may ask.
    """

    def __init__(
        self,
        engine: StorageEngine,
        memory: Memory,
        clock: Clock,
        health: StoreHealth,
        answers: Answers,
        *,
        most_bytes: int,
        most_jobs: int,
    ) -> None:
        """`most_bytes`: of the bodies that one commit may bring; `most_jobs`: of its dequeues."""
        self.unfinished: list[Work] = []
        self.appetite = Appetite(most_jobs)
        self.locks = QueueLocks()
        self._engine = engine
        self._memory = memory
        self._clock = clock
        self._health = health
        self._answers = answers
        self._most_bytes = most_bytes

    def take_unfinished(self) -> list[Work]:
        unfinished, self.unfinished = self.unfinished, []
        return unfinished

    def commit(self, works: Sequence[Work], now_ms: int) -> StorageNotCommitted | None:
        """Returns why none of `works` was carried out, if that says anything of the store; None if
        any was. Those whose queue is locked are put off, and the others go on without them."""
        while works:
            started = self._clock.monotonic()
            try:
                return self._commit(works, now_ms)
            except StorageLocked as error:
                self.locks.met(error, started=started, now=self._clock.monotonic())
                locked = [work for work in works if error.queue in work.queues]
                others = [work for work in works if error.queue not in work.queues]
                self.put_off(locked or works, error, now_ms)  # "" stands for all queues
                works = others if locked else ()
        return None

    def _commit(self, works: Sequence[Work], now_ms: int) -> StorageNotCommitted | None:
        parts = Parts()
        for work in works:
            work.contribute(parts)
        batch = parts.batch(ClaimRoom(self._most_bytes, JOB_OVERHEAD_BYTES))
        started = self._clock.monotonic()
        try:
            result = self._engine.apply(batch, now_ms)
        except StorageLocked:
            raise
        except StorageNotCommitted as error:
            if len(works) > 1 and not self._engine.trouble:
                return self._apart(works, error, now_ms)
            self.give_up(works, error, now_ms)
            return error
        self.locks.passed(queue for work in works for queue in work.queues)
        memory = self._memory
        now = self._clock.monotonic()
        self._health.succeeded(now - started, now)
        memory.figures.committed(sum([work.rows for work in works]), now - started)
        if batch.claims:
            asked = sum([len(claims[1]) for op in batch.claims for claims in op.claims])
            self.appetite.learn(asked, sum([len(payloads) for payloads in result.claims]))
        results = Results(result)
        # Dequeues are last: what became ready in this commit is in the index when they conclude.
        begun = False
        for work in works:
            if not begun and isinstance(work, DequeueWork):
                memory.take_in(now_ms)
                begun = True
            self.conclude(work, results, now_ms)
        memory.take_in(now_ms)
        memory.figures.end_batch()
        return None

    def _apart(
        self, works: Sequence[Work], error: StorageNotCommitted, now_ms: int
    ) -> StorageNotCommitted | None:
        """One by one, after `error`, which one of them may have caused; but what takes no room does
        not wait for each refusal of a full store. Returns as `commit` does; where some were
        refused for lack of room only, that is not why."""
        log.warning("a batch failed, so its calls are tried one by one: %s", error.message)
        groups: list[Sequence[Work]] = [[work] for work in works]
        if isinstance(error, StorageFull):
            enqueues = [work for work in works if isinstance(work, EnqueueWork)]
            others = [work for work in works if not isinstance(work, EnqueueWork)]
            if enqueues and others:
                groups = [others, *[[work] for work in enqueues]]
        refusals: list[StorageNotCommitted | None] = []
        not_tried: list[Work] = []
        full_in_a_row = 0
        for at, group in enumerate(groups):
            if self._engine.trouble:  # which it got into meanwhile
                not_tried += [work for left in groups[at:] for work in left]
                break
            if full_in_a_row >= _REFUSALS_OF_A_FULL_STORE and isinstance(group[0], EnqueueWork):
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

    def conclude(self, work: Work, results: Results, now_ms: int) -> None:
        entry = work.conclude(results, self._memory, now_ms)
        if entry is not None:
            self._answers.settle(work, entry)
        else:
            self.unfinished.append(work)

    def put_off(self, works: Sequence[Work], error: StorageLocked, now_ms: int) -> None:
        """A queue of theirs is locked: they wait for the next try, or are refused."""
        refused_works = []
        for work in works:
            self._memory.touched.update(work.queues)
            if not work.begun and self.locks.keep(error, work.arrival, self._clock.monotonic()):
                work.give_up(self._memory, now_ms)
                self._answers.forget(work)
            else:
                refused_works.append(work)
        self._refuse(refused_works, error, now_ms)

    def give_up(self, works: Sequence[Work], error: StorageError, now_ms: int) -> None:
        """Their commit failed, and nothing has changed: another shard may serve, unless their queue
        was removed. But of what earlier commits have carried out a part, the answer says so."""
        log.warning("calls that can't be carried out: %d: %s", len(works), error.message)
        self._refuse(works, error, now_ms)

    def _refuse(self, works: Sequence[Work], error: StorageError, now_ms: int) -> None:
        self._memory.figures.count("calls_refused", len(works))
        told = isinstance(error, StorageFull | StorageLocked)
        reason = error.message if told else STORE_FAILED
        for work in works:
            work.give_up(self._memory, now_ms)
            if work.begun:
                entry = work.fail(error)
            elif isinstance(error, QueueGone) and error.queue in work.queues:
                entry = work.fail(QueueNotFound(error.queue))
            else:
                entry = refused(work.arrival, reason)
            self._answers.settle(work, entry)
