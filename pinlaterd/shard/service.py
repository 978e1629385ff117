"""A whole shard but for its sockets: calls in, answers out, one durable commit for many calls.

The loop adds what arrived to the `backlog`, lets a batch be made and committed (`run_batch`), gives
other work a slice (`run_slice`), and sends what has become of it (`replies`, `take_counts`).

A store that is lost, or whose last commit is in doubt, is closed and opened again, with nothing
left in memory, as a new incarnation; calls in flight are told what is known. While it can't be
opened, calls are REFUSED: other shards may serve.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from random import Random

from pinlaterd.clock import Clock
from pinlaterd.config.schema import Config
from pinlaterd.engines.base import SINGLE, Durability, StorageEngine
from pinlaterd.errors import (
    ShardConnectionFailed,
    ShardOwned,
    StorageError,
    StorageLocked,
    StorageNotCommitted,
)
from pinlaterd.model import JobState
from pinlaterd.shard.batches import Batches
from pinlaterd.shard.bulk import BulkCalls
from pinlaterd.shard.maintenance import Maintenance
from pinlaterd.shard.ready import NEVER_MS
from pinlaterd.shard.state import ShardState
from pinlaterd.shard.tasks import Pace, Tasks
from pinlaterd.shard.timekeeping import Timekeeper
from pinlaterd.stats import Stats
from pinlaterd.wire.control import Details, PermitGrant, PermitReport
from pinlaterd.wire.envelope import CallEntry, Op, ReadyCounts, ReplyEntry, ShardFacts
from pinlaterd.wire.key_placement import KeyPlacement

log = logging.getLogger(__name__)

_REOPEN_SECONDS, _MOST_REOPEN_SECONDS = 0.05, 5.0
_STORE_CLOSED = "can't reach its store now"
_CLOSED_MEANWHILE = "closed its store meanwhile"
_NEVER = float("inf")
_MOST_QUEUES_SHOWN = 10


class ShardService:
    """One shard. Used by one thread; no method waits for anything but the store."""

    def __init__(
        self,
        name: str,
        engine: StorageEngine,
        config: Config,
        clock: Clock,
        stats: Stats,
        rng: Random | None = None,
        timekeeper: Timekeeper | None = None,
    ) -> None:
        self.name = name
        self.term = SINGLE  # in which the store is opened
        self.incarnation = 0  # of the latest ownership
        self.serving = False  # whether the store is open
        self.store_error = ""  # why it is not
        self.durability = Durability("not opened yet")  # of the store as it was opened last
        self.time = timekeeper or Timekeeper(clock)
        self._engine = engine
        self._clock = clock
        self._state = state = ShardState(name, engine, config, clock, stats, self.time)
        pace = Pace(clock, config.server.monitor_batch_size)
        self._tasks = tasks = Tasks(clock, engine.searcher, f"shard-{name}")
        self.searches = tasks.searches
        self.replies = state.replies  # which the loop sends
        self._bulk = BulkCalls(state, tasks, pace)
        self._batches = Batches(state, self._bulk, tasks)
        self.backlog = self._batches.backlog  # calls that have arrived, to which the loop adds
        self._maintenance = Maintenance(state, self.time, pace, rng or Random())
        self._placement = KeyPlacement()  # of keys, which is followed
        self._reopen_at = 0.0
        self._reopen_seconds = 0.0  # how long the next attempt waits
        self._opened_at = 0.0

    def follow(self, config: Config) -> None:
        """Go by `config` from the next call on, as far as it can change live."""
        self._state.follow(config)
        self._maintenance.follow_state()

    def follow_keys(self, placement: KeyPlacement) -> None:
        """Take keys under `placement` from the next call on, if this shard takes jobs under it."""
        if placement != self._placement:
            self._placement, self._state.keys_under = placement, 0
            if self.serving:
                self._guarded(self._take_keys, can_wait=True)

    def _take_keys(self) -> None:
        """Begin to take keys, once none is taken any more under a placement before the one with
        which this shard came. Raises StorageError; then it is tried again."""
        placement, came = self._placement, self._placement.shards.get(self.name)
        if came is not None:
            self._engine.raise_fence(came)
        takes_keys = self.name in placement.enqueueable
        self._state.keys_under = placement.number if takes_keys else 0

    # --- permits -----------------------------------------------------------------------------

    @property
    def permits_due(self) -> bool:
        """Return whether the coordinator has to hear of permits now."""
        return self._state.limits_queues and self._permits_at <= self._clock.monotonic()

    @property
    def _permits_at(self) -> float:
        return min(self._state.permits.due, self._state.room.due)

    def grant(self, grant: PermitGrant) -> None:
        """Follow the permits that the coordinator grants."""
        state = self._state
        if grant.incarnation != self.incarnation:
            return
        if grant.state is JobState.PENDING:
            state.room.grant(grant.queues)
            return
        followed = state.permits.grant(grant.queues)
        state.touched.update(queue for queue in followed if queue in state.ready)

    @property
    def held_queues(self) -> str:
        """Name queues of which jobs are ready and wait for permits, as many as can be shown."""
        permits = self._state.permits
        held = (queue for queue in permits.queues if permits.waiting(queue))
        return ", ".join(islice(held, _MOST_QUEUES_SHOWN))

    def details(self, *, whole: bool) -> Details:
        """Return what is known of failures, `whole` or as far as frames show it."""
        failures, now_ms = self._state.failures, self._clock.now_ms()
        shown = Details(failures=failures.lately(now_ms), failed_in_hour=failures.of_hour(now_ms))
        if whole:
            shown.whole, shown.work = True, failures.work()
            shown.recent_work = failures.recent_work()
            shown.failure_counts = failures.counts(now_ms)
        return shown

    def report_permits(self) -> None:
        """Have all permits be reported: the coordinator may know nothing of them."""
        for permits in (self._state.permits, self._state.room):
            permits.report_all()

    def permit_reports(self) -> Sequence[PermitReport]:
        """Take what is to be reported of permits by now."""
        about = (self.name, os.getpid(), self.incarnation)
        return [
            PermitReport(*about, permits.state, permits.report())
            for permits in (self._state.permits, self._state.room)
            if permits.due <= self._clock.monotonic()
        ]

    # --- ownership ---------------------------------------------------------------------------

    def open(self) -> None:
        """Take ownership of the store. Raises ShardOwned, StorageCorrupt, StorageError."""
        self.time.resume()
        start_ms = self._engine.open(self.time.latest_ms(), self.term)
        self.incarnation = max(start_ms, self.incarnation + 1)
        self._state.is_shared, self._state.heard_at = self.term.epoch > 0, self._clock.monotonic()
        try:
            self._load()
            self._take_keys()
            self.durability = self._engine.durability()
        except StorageError:
            self._engine.close()
            raise
        self.time.begin()
        self._maintenance.begin()
        self.serving, self.store_error = True, ""
        self._opened_at = self._clock.monotonic()
        log.info("owns its store (incarnation %d)", self.incarnation)
        if self.durability.warning:
            log.warning("its store: %s", self.durability.warning)

    def _load(self) -> None:
        """Begin with an empty memory."""
        state, ready = self._state, self._state.ready
        state.begin(self.incarnation)
        depths = self._engine.depths()
        for queue in self._engine.queues():
            known = depths.get(queue)
            if known is None:
                ready.reread(queue)
                continue
            nonempty = {priority for priority, job_state in known if job_state is JobState.PENDING}
            ready.open_queue(queue, nonempty)
        now_ms = self._clock.now_ms()
        state.touched.update(ready.look(now_ms))
        state.changed.update(queue for queue in depths if ready.is_counted(queue, now_ms))

    def close(self) -> None:
        """Close the store. Calls in flight that have changed nothing (look-ups, searches, dry runs)
        stay unanswered: routers have a successor carry them out. Others hear how far they got."""
        if self.serving:
            self.time.note()
        self.serving = False
        self._tasks.stop()
        self._batches.leave_dry_runs()
        self._abandon(ShardConnectionFailed([self.name], _CLOSED_MEANWHILE))
        self._batches.refuse_all(_CLOSED_MEANWHILE)  # those that wait for a lock
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
            self.store_error = error.message
            self._state.health.failed(now, error.message)
            self._reopen_later(now)
            log.error("can't open its store: %s", error.message)

    def _reopen_later(self, now: float) -> None:
        """Reopen at once the first time; then less and less often, until it has served for a while:
        a store may open each time, and fail in the first call."""
        self._reopen_at = now + self._reopen_seconds
        self._reopen_seconds = min(
            max(2 * self._reopen_seconds, _REOPEN_SECONDS), _MOST_REOPEN_SECONDS
        )

    def _break(self, error: StorageError) -> None:
        """End all that relies on the store, whose content is not known, and reopen it."""
        log.error("closes its store to open it again: %s", error.message)
        state = self._state
        self.serving, self.store_error = False, error.message
        state.health.failed(self._clock.monotonic(), error.message)
        state.stats.count("shard_store_failures")
        reason = f"{error.message}; whether the call was carried out is not known"
        self._abandon(ShardConnectionFailed([self.name], reason))
        queues = list(state.ready.queues())
        state.clear()
        for queue in queues:  # they exist still, with nothing to be had
            state.ready.open_queue(queue)
        state.touched.update(queues)
        try:
            self._engine.close()
        except StorageError as again:
            log.error("closing failed too: %s", again.message)
        now = self._clock.monotonic()
        if now - self._opened_at >= _MOST_REOPEN_SECONDS:
            self._reopen_seconds = 0.0
        self._reopen_later(now)

    def _abandon(self, error: ShardConnectionFailed) -> None:
        """Fail all calls in flight with `error`."""
        self._batches.abandon(error)
        self._tasks.abandon()

    # --- what the loop asks --------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether there is work that waits for nothing."""
        batches = self._batches
        return bool(self.backlog or batches.unfinished or self._tasks.ready)

    @property
    def degraded(self) -> str:
        """Say why routers should send new work elsewhere, if they can; "" if they need not."""
        return self._state.health.reason or self.store_error

    @property
    def warning(self) -> str:
        """Say why the store takes no jobs, or can't be relied on, in its words; "" if it can."""
        health = self._state.health
        cause = f": {health.cause}" if health.reason and health.cause else ""
        return health.no_room or f"{self.degraded}{cause}"

    @property
    def refuses_jobs(self) -> bool:
        """Return whether enqueues fail until the store is mended or has room."""
        health = self._state.health
        return bool(health.no_room or (health.reason and health.cause))

    @property
    def calls_wait(self) -> bool:
        return bool(self.backlog or self._batches.unfinished)

    def idle_seconds(self) -> float:
        """Return the seconds until something has to be done, if nothing arrives."""
        if self.busy:
            return 0.0
        now = self._clock.monotonic()
        if not self.serving:
            return max(0.0, self._reopen_at - now)
        due, locks = self._maintenance.due, self._state.locks
        if self._state.limits_queues:
            due = min(due, self._permits_at)
        if self._batches.awaits_room:
            due = min(due, self._batches.room_due)
        if locks.known:
            due = min(due, locks.next_try())
        seconds, wake_ms = due - now, self._state.ready.wake_ms()
        if wake_ms < NEVER_MS:
            seconds = min(seconds, (wake_ms - self._clock.now_ms()) / 1000)
        return max(0.0, seconds)

    def facts(self) -> ShardFacts:
        """Return the facts for a router's hello; queues that are not counted yet follow later."""
        ready, now_ms = self._state.ready, self._clock.now_ms()
        queues = tuple(ready.queues())
        counts = self._counts([queue for queue in queues if ready.is_counted(queue, now_ms)])
        return ShardFacts(self._engine.limits.queue_name_chars, queues, tuple(counts))

    def take_counts(self) -> Sequence[ReadyCounts]:
        """Ready jobs of the queues that were touched since the last time."""
        if not self._state.touched:
            return ()
        touched, self._state.touched = self._state.touched, set()
        self._state.changed |= touched
        return self._counts(touched)

    def _counts(self, queues: Iterable[str]) -> list[ReadyCounts]:
        """Count ready jobs. A locked queue counts as empty, so that no call is sent in vain."""
        state, now_ms = self._state, self._clock.now_ms()
        counts = []
        try:
            for queue in queues:
                try:
                    if state.locks.known and state.locks.holding((queue,)):
                        numbers = state.ready.no_counts(queue)
                    else:
                        numbers = state.ready.counts(queue, now_ms)
                    if queue in state.permits.queues:
                        numbers = state.permits.permitted(queue, numbers)
                    if queue in state.room.queues:
                        state.room.look(queue)
                except StorageLocked:
                    numbers = state.ready.no_counts(queue)
                counts.append(ReadyCounts(queue, numbers))
        except StorageError as error:
            self._break(error)
            return self._counts(queues)  # of what is in memory now: nothing
        return counts

    def create_queues(self, names: Iterable[str]) -> None:
        """Create those queues that are missing here: another shard has them."""
        self._guarded(lambda: self._bulk.create_queues(names), can_wait=True)

    def undelivered(self, router: bytes, entries: Iterable[ReplyEntry]) -> None:
        """Return the jobs of answers that could not be sent: their router can't be reached."""
        for entry in entries:
            if entry.jobs:
                release = CallEntry(entry.call_id, _NEVER, entry.payload, Op.RELEASE, router=router)
                self.backlog.append(release)

    def tick(self) -> None:
        """Do what is due once a second: keep the ownership of the store, and refresh figures."""
        for step in (*self._maintenance.steps_of_tick(), self._take_keys):
            if self.serving:
                self._guarded(step, can_wait=True)
        self._state.stats.gauge("shard_degraded", int(bool(self.warning)))

    # --- batches -------------------------------------------------------------------------------

    def run_batch(self) -> None:
        """Make one commit of what has arrived, as much as fits; answers are taken later."""
        batches = self._batches
        if not self.serving:
            batches.refuse_all(_STORE_CLOSED)
            return
        if self._state.locks.known:
            batches.try_locked_again()
        if self.backlog or batches.unfinished or batches.awaits_room:
            self._guarded(batches.run)

    def run_slice(self, *, calls_wait: bool) -> None:
        """Work other than batches. `calls_wait`: whether it may only take a part of the time."""
        if not self.serving:
            return
        wake_ms = self._state.ready.wake_ms()
        if wake_ms < NEVER_MS and wake_ms <= self._clock.now_ms():
            self._guarded(self._look_for_due)
        maintenance = self._maintenance
        if maintenance.due <= self._clock.monotonic() and (due := maintenance.due_round()):
            self._guarded(maintenance.gauges.refresh, can_wait=True)  # it goes by what queues hold
            self._tasks.start(due)
        if self._tasks.ready:
            self._guarded(lambda: self._tasks.run_slice(calls_wait=calls_wait), can_wait=True)

    def _look_for_due(self) -> None:
        self._state.touched.update(self._state.ready.look(self._clock.now_ms()))

    def _guarded(self, step: Callable[[], None], *, can_wait: bool = False) -> None:
        """Do `step`; a store that fails in it is opened again. So is one that refuses it, unless it
        `can_wait` for the next time: without what the ready index had to read, what is in memory
        is not what the store holds."""
        try:
            step()
        except StorageError as error:
            if not can_wait or not isinstance(error, StorageNotCommitted):
                self._break(error)
                return
            self._state.note_refusal(error)
            log.warning("its store refused what can wait: %s", error.message)
        if self._engine.failure:
            self._break(StorageError(self._engine.failure))
