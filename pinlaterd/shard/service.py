"""A whole shard but for its sockets: calls in, answers out, one durable commit for many calls.

The loop hands over what arrived (`submit`), lets a batch be made and committed (`run_batch`), gives
other work a slice (`run_slice`), and sends what has become of it (`take_replies`, `take_counts`).

An error of one call is that call's alone: what can be found before the commit is found before, and
if a commit fails beyond doubt, each of its calls is tried alone, and the store stays open. A store
that is lost, or whose last commit is in doubt, is closed and opened anew, with nothing left in
memory, as a new incarnation; whoever was in hand is told what is known. While it can't be opened,
calls are REFUSED: other shards may serve.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

from pinlaterd.clock import Clock
from pinlaterd.config.schema import Config
from pinlaterd.engines.base import Durability, StorageEngine
from pinlaterd.errors import (
    Overloaded,
    PinLaterError,
    ShardConnectionFailed,
    ShardOwned,
    StorageError,
    StorageFull,
    StorageLocked,
    StorageNotCommitted,
)
from pinlaterd.model import JobState
from pinlaterd.shard.commits import NOTHING, Answers, Commits
from pinlaterd.shard.dequeues import ClaimDescriptors, Claimer, DequeueWork
from pinlaterd.shard.figures import Figures
from pinlaterd.shard.fresh import FreshPayloads
from pinlaterd.shard.gauges import QueueGauges
from pinlaterd.shard.health import HealthLimits, StoreHealth
from pinlaterd.shard.inquiries import Inquiries
from pinlaterd.shard.locks import WHOLE_STORE
from pinlaterd.shard.planning import Planner
from pinlaterd.shard.ready import ReadyIndex
from pinlaterd.shard.reception import Reception
from pinlaterd.shard.search import SearchClient, SearchDone
from pinlaterd.shard.search_messages import SearchCall
from pinlaterd.shard.tasks import Steps, Tasks
from pinlaterd.shard.timekeeping import Timekeeper
from pinlaterd.shard.upkeep import Upkeep
from pinlaterd.shard.validation import Rules
from pinlaterd.shard.works import BATCH_JOBS, PART_JOBS, Arrival, Memory, Work, refused
from pinlaterd.stats import Stats
from pinlaterd.wire.envelope import ReadyCounts, ReplyEntry, ShardFacts

log = logging.getLogger(__name__)

# Of shard_buffer_bytes: half for fresh payloads, an eighth for keys, and a sixteenth for the bodies
# of a batch, which are there three times while they are decoded or encoded, and packed.
_FRESH_PART, _KEYS_PART, _BATCH_PART = 2, 8, 16
# A PendingKey with its two numbers and its place in a list (CPython 3.11).
_KEY_BYTES = 136
# Dry runs that wait for their turn.
MOST_LOOKS = 1_000
_REOPEN_SECONDS, _MOST_REOPEN_SECONDS = 0.05, 5.0


class _Batch:
    """A batch in the making: `appetite` is how many jobs its dequeues may still ask for."""

    def __init__(self, appetite: int) -> None:
        self.writes: list[Work] = []
        self.dequeues: list[Work] = []
        self.jobs = 0
        self.appetite = appetite


_TOO_LATE = "got the call after its deadline"
_STORE_CLOSED = "can't reach its store now"
_CLOSED_MEANWHILE = "closed its store meanwhile"


class ShardService:
    """One shard. Used by one thread; no method waits for anything but the store."""

    def __init__(
        self,
        name: str,
        engine: StorageEngine,
        config: Config,
        clock: Clock,
        stats: Stats,
        chance: Random | None = None,
        timekeeper: Timekeeper | None = None,
    ) -> None:
        server = config.server
        self.name = name
        self.incarnation = 0  # of the latest ownership
        self.serving = False  # whether the store is open
        self.trouble = ""  # why it is not
        self.durability = Durability("not opened yet")  # of the store as it was opened last
        self._engine = engine
        self._config = config
        self._clock = clock
        self.time = timekeeper or Timekeeper(clock)
        self._batch_bytes = server.shard_buffer_bytes // _BATCH_PART
        ready = ReadyIndex(
            engine,
            server.num_priority_levels,
            max_keys=server.shard_buffer_bytes // _KEYS_PART // _KEY_BYTES,
            max_run_after_ms=engine.limits.run_after_ms,
        )
        fresh = FreshPayloads(server.shard_buffer_bytes // _FRESH_PART)
        self._memory = Memory(name, ready, fresh, Figures(stats))
        self._health = StoreHealth(
            HealthLimits(
                server.health_failures_in_row,
                server.health_failure_share,
                server.health_window_seconds,
                server.health_slow_factor,
                server.health_slow_ms / 1000,
            )
        )
        self._answers = Answers()
        self._commits = Commits(
            engine,
            self._memory,
            clock,
            self._health,
            self._answers,
            most_bytes=self._batch_bytes,
            most_jobs=BATCH_JOBS,
        )
        self._tasks = Tasks(clock, self._search, server.monitor_batch_size)
        self.searches: SearchClient | None = None
        rules = Rules(engine.limits, engine.narrower, server)
        self._planner = Planner(rules, self._memory, config)
        self._inquiries = Inquiries(engine, self._memory, rules, server, clock, self._tasks.pace)
        self._reception = Reception(
            self._planner,
            self._inquiries,
            self._tasks,
            self._memory,
            self._answers.reply,
        )
        self._gauges = QueueGauges(engine, self._memory, self._commits.locks, clock, stats)
        self._upkeep = Upkeep(
            engine,
            self._memory,
            self._gauges.holding,
            self._commits.locks,
            config,
            clock,
            self.time,
            self._tasks.pace,
            chance or Random(),
        )
        self._claimer: Claimer | None = None
        self._backlog: deque[Arrival] = deque()
        self._looks: deque[DequeueWork] = deque()  # dry runs, in turn
        self._reopen_at = 0.0
        self._reopen_seconds = 0.0  # how long the next attempt waits
        self._opened_at = 0.0

    def follow(self, config: Config) -> None:
        """Go by `config` from the next call on, as far as it can change live."""
        self._config = config
        self._planner.config = config
        self._inquiries.server = config.server
        self._upkeep.follow(config)
        shard = config.shards.get(self.name)
        self._reception.dequeue_only = shard is not None and shard.dequeue_only

    # --- ownership ---------------------------------------------------------------------------

    def open(self) -> None:
        """Take ownership of the store. Raises ShardOwned, StorageCorrupt, StorageError."""
        self.time.resume()
        ownership = self._engine.open(self.time.latest_ms())
        self.incarnation = max(ownership.start_ms, self.incarnation + 1)
        try:
            self._load()
            self.durability = self._engine.durability()
        except StorageError:
            self._engine.close()
            raise
        self.time.begin()
        self._upkeep.begin()
        self.serving, self.trouble = True, ""
        self._opened_at = self._clock.monotonic()
        log.info(
            "owns its store (incarnation %d); the predecessor ended %s",
            self.incarnation,
            "in order" if ownership.clean else "without closing it",
        )
        if self.durability.warning:
            log.warning("its store: %s", self.durability.warning)

    def _load(self) -> None:
        """Begin with an empty memory."""
        memory = self._memory
        memory.clear()
        depths = self._engine.depths()
        for queue in self._engine.queues():
            known = depths.get(queue)
            if known is None:
                memory.ready.reread(queue)
                continue
            nonempty = {priority for priority, state in known if state is JobState.PENDING}
            memory.ready.open_queue(queue, nonempty)
        shards = sorted({*self._config.shards, self.name})
        descriptors = ClaimDescriptors(
            self._config.server,
            self.incarnation,
            position=shards.index(self.name),
            shards=len(shards),
        )
        self._claimer = Claimer(self._engine, memory, descriptors, self._config.server)
        self._reception.claimer = self._claimer
        now_ms = self._clock.now_ms()
        memory.touched.update(memory.ready.look(now_ms))
        memory.changed.update(queue for queue in depths if memory.ready.is_counted(queue, now_ms))

    def close(self) -> None:
        """Note that the end was clean.

        What is in hand still and has changed nothing (look-ups, searches, dry runs) stays
        unanswered: routers have a successor carry it out. Else the answer is how far it got."""
        self.serving = False
        self._tasks.stop()
        for look in self._looks:
            if look.changes_nothing:
                self._answers.forget(look)
        self._abandon(ShardConnectionFailed([self.name], _CLOSED_MEANWHILE))
        self._refuse_all(_CLOSED_MEANWHILE)  # those that wait for a lock
        self._close_searches()
        self._engine.close()

    def recover(self) -> None:
        """Try to open a store that failed, now and then. Raises ShardOwned if another process
        has taken it over: this one's sockets are of no use then."""
        now = self._clock.monotonic()
        if self.serving or now < self._reopen_at:
            return
        try:
            self.open()
        except ShardOwned:
            raise
        except StorageError as error:
            self.trouble = error.message
            self._health.failed(now)
            self._reopen_later(now)
            log.error("can't open its store: %s", error.message)

    def _reopen_later(self, now: float) -> None:
        """At once the first time; then less and less often, until it has served for a while: a
        store may open each time, and fail in the first call."""
        self._reopen_at = now + self._reopen_seconds
        self._reopen_seconds = min(
            max(2 * self._reopen_seconds, _REOPEN_SECONDS), _MOST_REOPEN_SECONDS
        )

    def _break(self, error: StorageError) -> None:
        """What the store holds is not known: end all that relies on it, and open it anew."""
        log.error("closes its store to open it anew: %s", error.message)
        self.serving, self.trouble = False, error.message
        self._health.failed(self._clock.monotonic())
        self._memory.figures.count("store_failures")
        told = ShardConnectionFailed(
            [self.name], f"{error.message}; whether the call was carried out is not known"
        )
        self._abandon(told)
        self._close_searches()
        queues = list(self._memory.ready.queues())
        self._memory.clear()
        for queue in queues:  # they exist still, with nothing to be had
            self._memory.ready.open_queue(queue)
        self._memory.touched.update(queues)
        try:
            self._engine.close()
        except StorageError as again:
            log.error("closing failed too: %s", again.message)
        now = self._clock.monotonic()
        if now - self._opened_at >= _MOST_REOPEN_SECONDS:
            self._reopen_seconds = 0.0
        self._reopen_later(now)

    def _abandon(self, told: PinLaterError) -> None:
        """End all that is in hand; whoever waits for it is told why."""
        self._answers.abandon(told)
        self._commits.take_unfinished()
        self._backlog.extendleft(reversed(self._commits.locks.clear()))
        self._looks.clear()
        self._tasks.abandon()

    # --- what the loop asks --------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether there is work that waits for nothing."""
        return bool(self._backlog or self._commits.unfinished or self._tasks.runnable)

    @property
    def ailing(self) -> str:
        """Why routers should send new work elsewhere, if they can; "" if they need not."""
        return self._health.reason or self.trouble

    @property
    def backlog(self) -> int:
        """Calls that have arrived and are in no batch yet."""
        return len(self._backlog)

    @property
    def calls_wait(self) -> bool:
        return bool(self._backlog or self._commits.unfinished)

    def idle_seconds(self) -> float:
        """How long nothing will have to be done, if nothing arrives."""
        now = self._clock.monotonic()
        if self.busy:
            return 0.0
        if not self.serving:
            return max(0.0, self._reopen_at - now)
        until_due_ms = self._memory.ready.wake_ms() - self._clock.now_ms()
        due = self._upkeep.due
        if self._commits.locks:
            due = min(due, self._commits.locks.next_try() or math.inf)
        return max(0.0, min(until_due_ms / 1000, due - now))

    def facts(self) -> ShardFacts:
        """For a router that says hello. Queues that are not counted yet are told of as they are."""
        ready, now_ms = self._memory.ready, self._clock.now_ms()
        queues = tuple(ready.queues())
        counts = self._counts([queue for queue in queues if ready.is_counted(queue, now_ms)])
        return ShardFacts(
            self.name,
            self._config.server.num_priority_levels,
            self._engine.limits.queue_name_chars,
            queues,
            tuple(counts),
        )

    def take_replies(self) -> Mapping[bytes, list[ReplyEntry]]:
        """The answers since the last time, by router."""
        return self._answers.take()

    def take_counts(self) -> Sequence[ReadyCounts]:
        """Ready jobs of the queues that were touched since the last time."""
        if not self._memory.touched:
            return ()
        touched, self._memory.touched = self._memory.touched, set()
        self._memory.changed |= touched
        return self._counts(touched)

    def _counts(self, queues: Iterable[str]) -> list[ReadyCounts]:
        now_ms = self._clock.now_ms()
        try:
            return [ReadyCounts(queue, self._ready_counts(queue, now_ms)) for queue in queues]
        except StorageError as error:
            self._break(error)
            return self._counts(queues)  # of what is in memory now: nothing

    def _ready_counts(self, queue: str, now_ms: int) -> tuple[int, ...]:
        """Of a queue that is locked: nothing, so that nobody is sent here in vain."""
        ready, locks = self._memory.ready, self._commits.locks
        if queue not in ready:
            return ()
        if not locks.holding((queue,)):
            started = self._clock.monotonic()
            try:
                return ready.counts(queue, now_ms)
            except StorageLocked as error:
                locks.met(error, started=started, now=self._clock.monotonic())
        return (0,) * self._config.server.num_priority_levels

    def create_queues(self, names: Iterable[str]) -> None:
        """Those that are missing: another shard has them."""
        self._guarded(lambda: self._reception.create_queues(names), can_wait=True)

    def undelivered(self, router: bytes, entries: Iterable[ReplyEntry]) -> None:
        """A router could not be reached: the jobs in these answers go back."""
        for entry in entries:
            if entry.jobs:
                self._backlog.append(self._reception.release_of(router, entry))

    def tick(self) -> None:
        """What is due once a second: ownership is kept alive, and figures are looked at."""
        look = self._upkeep.look_at_suspects
        for step in (self._look_at_clock, self._engine.heartbeat, self._probe, look, self._gauge):
            if self.serving:
                self._guarded(step, can_wait=True)
        self._memory.figures.gauge_health(ailing=bool(self.ailing))

    def _look_at_clock(self) -> None:
        if self.time.tick():
            self._upkeep.set_back()
        self._memory.figures.gauge_clock(self._clock.step_ms)

    def _gauge(self) -> None:
        memory = self._memory
        self._gauges.refresh(self._clock.now_ms())
        held = memory.fresh.held_bytes + len(memory.ready) * _KEY_BYTES
        memory.figures.gauge_memory(held)

    def _probe(self) -> None:
        """Use a store that ails, so that a shard without work finds out when it is well again."""
        if not self._health.ailing:
            return
        locks, queues = self._commits.locks, self._memory.ready.queues()
        queue = next((name for name in queues if locks.holding([name]) is None), None)
        if queue is None and queues:
            return  # all are locked, which says nothing of the store
        began = self._clock.monotonic()
        if queue is not None:
            try:
                self._engine.read_pending(queue, 1, after=None, until_ms=0, limit=1)
            except StorageLocked as error:
                # A server may have waited for the lock: the next probe uses another queue.
                locks.met(error, started=began, now=self._clock.monotonic())
                return
        now = self._clock.monotonic()
        self._health.succeeded(now - began, now)

    # --- batches -------------------------------------------------------------------------------

    def submit(self, arrivals: Iterable[Arrival]) -> None:
        self._backlog.extend(arrivals)

    def run_batch(self) -> None:
        """One commit of what has arrived, as much as fits; its answers are taken afterwards."""
        if not self.serving:
            self._refuse_all(_STORE_CLOSED)
            return
        if self._commits.locks:
            self._try_locked_again()
        if self._backlog or self._commits.unfinished:
            self._guarded(self._run_batch)

    def _try_locked_again(self) -> None:
        queues, arrivals = self._commits.locks.due(self._clock.monotonic())
        if not queues:
            return
        self._backlog.extendleft(reversed(arrivals))
        ready, now_ms = self._memory.ready, self._clock.now_ms()
        for queue in ready.queues() if WHOLE_STORE in queues else [q for q in queues if q in ready]:
            ready.look_again(queue)
            if ready.is_counted(queue, now_ms):
                self._memory.touched.add(queue)

    def run_slice(self, *, calls_wait: bool) -> None:
        """Work other than batches. `calls_wait`: whether it may only take a part of the time."""
        if not self.serving:
            return
        if self._memory.ready.wake_ms() <= self._clock.now_ms():
            self._guarded(self._look_for_due)
        due_round = None
        if self._upkeep.due <= self._clock.monotonic():
            due_round = self._upkeep.due_round()
        if due_round is not None:
            self._guarded(self._gauge, can_wait=True)  # so that it knows what the queues hold
            self._tasks.start(due_round)
        if self._tasks.runnable:
            self._guarded(lambda: self._run_task(calls_wait=calls_wait))

    def _run_task(self, *, calls_wait: bool) -> None:
        try:
            self._tasks.run_slice(calls_wait=calls_wait)
        except StorageNotCommitted as error:
            log.warning("a slice of upkeep failed, and is left to the next round: %s", error)

    def _look_for_due(self) -> None:
        memory, locks = self._memory, self._commits.locks
        started = self._clock.monotonic()
        try:
            for queue in memory.ready.look(
                self._clock.now_ms(), lambda queue: bool(locks.holding((queue,)))
            ):
                memory.touched.add(queue)
        except StorageLocked as error:
            locks.met(error, started=started, now=self._clock.monotonic())

    def _guarded(self, step: Callable[[], None], *, can_wait: bool = False) -> None:
        """Do `step`; a store that fails in it is opened anew. So is one that refuses it, unless it
        `can_wait` for the next time: without what the ready index had to read, what is in memory
        is not what the store holds."""
        try:
            step()
        except StorageError as error:
            if not can_wait or not isinstance(error, StorageNotCommitted):
                self._break(error)
                return
            log.warning("its store refused what can wait: %s", error.message)
        if self._engine.trouble:
            self._break(StorageError(self._engine.trouble))

    def _run_batch(self) -> None:
        now_ms, now = self._clock.now_ms(), self._clock.monotonic()
        batch = _Batch(self._commits.appetite.jobs)
        # Those that have waited since the last batch go first, in turn, and leave room for others.
        for waiting in self._commits.take_unfinished():
            if batch.jobs < PART_JOBS or waiting.arrival.entry.deadline <= now:
                self._add(batch, waiting, now_ms, now)
            else:
                self._commits.unfinished.append(waiting)
        while self._backlog and batch.jobs < BATCH_JOBS and batch.appetite > 0:
            if self._answers.bytes >= self._batch_bytes:
                break  # look-ups are answered without a commit, and their answers may be large
            arrival = self._backlog.popleft()
            if arrival.entry.deadline <= now:
                self._memory.figures.count("calls_expired")
                # Nothing was done; the router can forget it.
                self._answers.reply(arrival, refused(arrival, _TOO_LATE))
                continue
            relying = batch.writes or batch.dequeues or self._commits.unfinished
            if relying and self._reception.changes_queues(arrival):
                # These rely on the queues as they are.
                self._backlog.appendleft(arrival)
                break
            batch.jobs += 1  # so that calls without jobs are bounded, too
            work = self._reception.take(arrival, now_ms)
            if work is None:
                continue
            self._answers.expect(work)
            self._add(batch, work, now_ms, now)
        works = [*batch.writes, *batch.dequeues]
        if not works:
            return
        refusal = self._commits.commit(works, now_ms)
        if refusal and not isinstance(refusal, StorageFull) and not self._engine.trouble:
            self._health.failed(self._clock.monotonic())  # once, however many calls it refused

    def _add(self, batch: _Batch, work: Work, now_ms: int, now: float) -> None:
        late = work.arrival.entry.deadline <= now
        if late and (work.acks if isinstance(work, DequeueWork) else work.begun):
            told = ShardConnectionFailed([self.name], "has carried out a part of the call in time")
            self._answers.settle(work, work.fail(told))
        elif (locked := self._commits.locks.holding(work.queues)) is not None:
            self._commits.put_off([work], locked, now_ms)
        elif isinstance(work, DequeueWork):
            self._add_dequeue(batch, work, now_ms, now)
        else:
            batch.writes.append(work)
            batch.jobs += work.rows

    def _add_dequeue(self, batch: _Batch, work: DequeueWork, now_ms: int, now: float) -> None:
        """Let it choose its jobs; one that needs no commit is answered, or goes on later."""
        assert self._claimer is not None
        most_jobs = min(BATCH_JOBS - batch.jobs, batch.appetite)
        if work.arrival.entry.deadline <= now:
            work.remaining = 0  # what it has by now is its answer
        elif work.dry_run:
            if not work.acks and work.remaining:
                self._look_later(work)
                return
        elif work.remaining and most_jobs > 0 and len(work.acks) < 2:  # acks go first
            try:
                self._claimer.choose(work, most_jobs, now_ms)
            except StorageLocked as error:
                self._commits.locks.met(error, started=now, now=self._clock.monotonic())
                self._commits.put_off([work], error, now_ms)
                return
            except StorageNotCommitted as error:
                self._commits.give_up([work], error, now_ms)
                return
        batch.appetite -= work.claimed
        jobs = work.rows
        if jobs:
            batch.dequeues.append(work)
            batch.jobs += jobs
        else:
            self._commits.conclude(work, NOTHING, now_ms)

    def _look_later(self, work: DequeueWork) -> None:
        """A dry run is done beside the batches, one after the other: an answer may be large."""
        if len(self._looks) >= MOST_LOOKS:
            self._answers.settle(
                work, work.fail(Overloaded(f"{MOST_LOOKS} dry runs are in hand already"))
            )
            return
        self._looks.append(work)
        if len(self._looks) == 1:
            self._tasks.start(self._look_in_turn(), paced=False)

    def _look_in_turn(self) -> Steps:
        """All dry runs in hand; the one at work is the first until it is answered."""
        while self._looks:
            work, now_ms = self._looks[0], self._clock.now_ms()
            entry = work.arrival.entry
            assert self._claimer is not None
            try:
                for _ in self._claimer.look(work, now_ms):
                    yield None
                    if entry.deadline <= self._clock.monotonic():
                        break
            except StorageNotCommitted as error:
                self._looks.popleft()
                self._commits.give_up([work], error, now_ms)
            else:
                self._looks.popleft()
                self._answers.settle(work, work.answer())

    def _refuse_all(self, reason: str) -> None:
        while self._backlog:
            arrival = self._backlog.popleft()
            self._memory.figures.count("calls_refused")
            self._answers.reply(arrival, refused(arrival, reason))

    # --- searches ------------------------------------------------------------------------------

    def _search(self, call: SearchCall, on_done: SearchDone) -> Callable[[], None]:
        if self.searches is None:
            title = f"shard-{self.name}"
            self.searches = SearchClient(self._engine.searcher(), self._clock, title)
        return self.searches.submit(call, on_done)

    def _close_searches(self) -> None:
        if self.searches is not None:
            searches, self.searches = self.searches, None
            searches.close()
