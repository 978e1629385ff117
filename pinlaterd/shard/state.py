"""The state that all parts of a shard share: its store, what is in memory beside it, the replies.

The memory is cleared whenever ownership begins. What is in it, the store holds as well: losing it
costs reads, never jobs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, repeat
from operator import eq
from typing import Any

from pinlaterd.clock import Clock
from pinlaterd.config.schema import Config, ServerSettings
from pinlaterd.engines.base import AckResult, CheckpointResult, Finished, Requeued, StorageEngine
from pinlaterd.errors import (
    PinLaterError,
    QueueNotFound,
    ShardConnectionFailed,
    StorageError,
    StorageFull,
)
from pinlaterd.model import (
    AlikeJobs,
    FinishOutcome,
    Job,
    JobDescriptor,
    JobKey,
    JobState,
    Payload,
    PendingKey,
    defaults_behind,
    new_record,
    runs_of,
    usual_fields,
)
from pinlaterd.rpc import codec
from pinlaterd.rpc.answers import PayloadColumns
from pinlaterd.rpc.codec import Head
from pinlaterd.shard.failures import Failures
from pinlaterd.shard.health import QueueLocks, StoreHealth
from pinlaterd.shard.leases import Leases
from pinlaterd.shard.permits import Permits
from pinlaterd.shard.ready import Key, ReadyIndex
from pinlaterd.shard.timekeeping import Timekeeper
from pinlaterd.shard.validation import Rules
from pinlaterd.stats import BODY_SIZE, Stats
from pinlaterd.wire.envelope import CallEntry, ReplyEntry, Status

# Why a shard refuses calls, when the store does not say it better.
STORE_FAILED = "could not have its store carry it out"

# Of shard_buffer_bytes: what the bodies of a batch may take, which are there three times while they
# are decoded or encoded, and packed.
_BATCH_PART = 16

# How old the memory of an owner may be that another server may have superseded.
_CONFIRM_SECONDS = 0.5

LAST_LOCAL_ID = (1 << 63) - 1
LAST_PRIORITY = 127
# What stands for descriptors that are well formed and whose job no store can hold: local ids
# begin with 1.
NO_JOB = JobKey(1, 0)
_OTHERS_OF_PAYLOAD = list(map(repeat, defaults_behind(Payload, "attempts_remaining")))
_ID_DIGITS = len(str(LAST_LOCAL_ID))
_PRIORITIES = {str(priority): priority for priority in range(1, LAST_PRIORITY + 1)}


def _kinds_of(
    jobs: Sequence[Job], local_ids: Sequence[int]
) -> Sequence[tuple[Job, Sequence[bytes], Sequence[int]]]:
    """Divide stored jobs into kinds that differ only in their bodies and options: one of each, and
    the bodies and local ids."""
    if type(jobs) is AlikeJobs or len(jobs) == 1:
        [(job, bodies)] = runs_of(jobs)
        return [(job, bodies, local_ids)]
    kinds: dict[tuple[object, ...], tuple[Job, list[bytes], list[int]]] = {}
    for job, local_id in zip(jobs, local_ids, strict=True):
        _, of_kind, ids = kinds.setdefault(usual_fields(job), (job, [], []))
        of_kind.append(job.body)
        ids.append(local_id)
    return list(kinds.values())


def is_local_id(text: str) -> bool:
    """Tell whether these are digits, and so few that no number is too large."""
    return text.isdigit() and text.isascii() and len(text) < _ID_DIGITS


class QueueFacts:
    """The facts that calls on one queue need: the beginning of its jobs' descriptors on this shard,
    and how long its claims last."""

    __slots__ = ("claim_timeout_seconds", "prefix", "queue", "shard")

    def __init__(self, queue: str, shard: str, config: Config) -> None:
        self.queue = queue
        self.shard = shard
        self.prefix = f"{queue}:s{shard}:p"
        self.claim_timeout_seconds = math.ceil(config.queue(queue).job_claimed_timeout_seconds)

    @property
    def place(self) -> str:
        """Name the queue on this shard, for messages."""
        return f"queue {self.queue!r} on shard {self.shard!r}"

    def priority_of(self, head: str) -> int | None:
        """Return the priority in `head`, a descriptor up to its local id, if it is one of ours."""
        return (
            _PRIORITIES.get(head[len(self.prefix) : -1]) if head.startswith(self.prefix) else None
        )

    def key(self, descriptor: str) -> JobKey | None:
        """Return the job that `descriptor` names; None if it is malformed or names none of ours."""
        if descriptor.startswith(self.prefix):
            priority_text, _, id_text = descriptor[len(self.prefix) :].partition(":")
            priority = _PRIORITIES.get(priority_text)
            if priority is not None and is_local_id(id_text):
                return JobKey(priority, int(id_text))
        parsed = JobDescriptor.parse(descriptor)
        if parsed is None or parsed.queue != self.queue or parsed.shard != self.shard:
            return None
        if not 1 <= parsed.priority <= LAST_PRIORITY or parsed.local_id > LAST_LOCAL_ID:
            return NO_JOB
        return JobKey(parsed.priority, parsed.local_id)


_CLAIMS_OF_A_SHARD = 10**12  # three years of 10,000 a second, within one ownership


class ClaimDescriptors:
    """`HOST:PORT:STARTMILLIS:SOURCE:` and a number, no two of them alike.

    START differs from every other ownership of this shard. Other shards of this server may begin
    in the same millisecond: each has numbers of its own, by its `position` among them. They count
    up without gaps, so that a store may keep those of many jobs as one.
    """

    def __init__(self, server: ServerSettings, start_ms: int, *, position: int) -> None:
        self._head = f"{server.advertised_host}:{server.port}:{start_ms}:"
        self.next_number = position * _CLAIMS_OF_A_SHARD

    def take(self, source: str, jobs: int) -> tuple[str, int]:
        """Take numbers for claims of `source`; return the text before them, and the first."""
        first = self.next_number
        self.next_number += jobs
        return f"{self._head}{source}:", first


class Replies:
    """The replies that wait to be sent, by router; `bytes`: in their payloads."""

    def __init__(self) -> None:
        self.bytes = 0
        self._waiting: defaultdict[bytes, list[ReplyEntry]] = defaultdict(list)

    def add(self, call: CallEntry, status: Status, payload: bytes, jobs: int = 0) -> None:
        reply = new_record(ReplyEntry, (call.call_id, status, payload, jobs))
        self._waiting[call.router].append(reply)
        self.bytes += len(payload)

    def fail(self, call: CallEntry, head: Head, error: PinLaterError) -> None:
        self.add(call, Status.FAILED, codec.encode_error(head, error))

    def refuse(self, call: CallEntry, reason: str) -> None:
        """Refuse a call; `reason` reaches the caller if no other shard serves."""
        self.add(call, Status.REFUSED, reason.encode())

    def take(self) -> Mapping[bytes, list[ReplyEntry]]:
        """Take the replies since the last time."""
        replies, self._waiting = self._waiting, defaultdict(list)
        self.bytes = 0
        return replies


class ShardState:
    """The state of one shard. `config` is what it follows at present."""

    def __init__(
        self,
        name: str,
        engine: StorageEngine,
        config: Config,
        clock: Clock,
        stats: Stats,
        time: Timekeeper,
    ) -> None:
        server = config.server
        self.name = name
        self.engine = engine
        self.clock = clock
        self.stats = stats
        self.dequeue_only = False
        self.keys_under = 0  # the placement under which keys are taken; 0: none
        self.is_shared = False  # whether other servers may come to own the store
        self.heard_at = 0.0  # when the store last answered its owner, monotonic seconds
        # Of the bodies that one commit may bring, and of the replies that wait.
        self.batch_bytes = server.shard_buffer_bytes // _BATCH_PART
        self.rules = Rules(engine.limits, engine.narrower, server)
        self.health = StoreHealth(server)
        self.locks = QueueLocks(clock)
        self.ready = ReadyIndex(
            self.read_pending,
            server.num_priority_levels,
            most_bytes=server.shard_buffer_bytes,
            max_run_after_ms=engine.limits.run_after_ms,
        )
        self.permits = Permits(JobState.IN_PROGRESS, self._jobs_in, clock.monotonic)
        self.room = Permits(JobState.PENDING, self._jobs_in, clock.monotonic)
        self.replies = Replies()
        self.failures = Failures()
        self.leases = Leases(time.served)
        self.claim_descriptors = ClaimDescriptors(server, 0, position=0)
        self.changed: set[str] = set()  # queues whose depths or figures may have changed
        self.touched: set[str] = set()  # queues whose ready counts may have changed, or are gone
        self.suspects: set[str] = set()  # queues that a foreign writer seems to change
        # Of the batch in the making: of all jobs, and of those at their first attempt.
        self._delays_ms: dict[str, tuple[list[int], list[int]]] = {}
        self.follow(config)

    def follow(self, config: Config) -> None:
        """Go by `config` from the next call on, as far as it can change live."""
        self.config = config
        self.job_defaults = config.job_defaults()
        self._facts: dict[str, QueueFacts] = {}
        shard = config.shards.get(self.name)
        self.dequeue_only = shard is not None and shard.dequeue_only
        self.room.follow(config.limits_of(JobState.PENDING))
        changed = self.permits.follow(config.limits_of(JobState.IN_PROGRESS))
        self.limits_queues = bool(self.permits.queues or self.room.queues)
        self.touched.update(queue for queue in changed if queue in self.ready)

    def begin(self, incarnation: int) -> None:
        """Begin with an empty memory, in which no two claims bear the same descriptor."""
        self.clear()
        for permits in (self.permits, self.room):
            permits.begin()
        shards = sorted({*self.config.shards, self.name})
        self.claim_descriptors = ClaimDescriptors(
            self.config.server, incarnation, position=shards.index(self.name)
        )

    def takes_keys(self, placement: int) -> bool:
        """Return whether keys are stored here, or known not to be held, under this placement."""
        return placement == self.keys_under and placement >= self.engine.fence

    def clear(self) -> None:
        self.ready.clear()
        self.leases.clear()
        for permits in (self.permits, self.room):
            permits.end()
        self._facts.clear()
        self.suspects.clear()

    def queue(self, queue: str) -> QueueFacts:
        """Raises QueueNotFound."""
        found = self._facts.get(queue)
        if found is None:
            if queue not in self.ready:
                raise QueueNotFound(queue)
            found = self._facts[queue] = QueueFacts(queue, self.name, self.config)
        return found

    def lease_ms(self, queue: str, asked_ms: int | None) -> int | None:
        """Return for how long claims hold for which so long was asked; None: as the queue says."""
        if asked_ms is None:
            return None
        timeout_ms = self.config.queue(queue).job_claimed_timeout_seconds * 1000
        return asked_ms if asked_ms < timeout_ms else None

    def drop_queue(self, queue: str) -> None:
        self.ready.drop_queue(queue)
        self._facts.pop(queue, None)
        self.failures.drop_queue(queue)
        self.touched.add(queue)

    def read_pending(self, queue: str, priority: int, **options: Any) -> Sequence[PendingKey]:
        """Read keys as the engine does, but do not try a locked queue before its time."""
        with self.locks.trying(queue):
            return self.engine.read_pending(queue, priority, **options)

    def _jobs_in(self, queue: str, wanted: JobState) -> int | None:
        """Return how many jobs of a queue are in a state; None while the engine counts them."""
        depths = self.engine.depths((queue,)).get(queue, {})
        if depths is None:
            return None
        return sum([jobs for (_, state), jobs in depths.items() if state is wanted])

    def has_ready(self, queue: str, lowest_priority: int, now_ms: int) -> bool:
        """Return whether a claim would find a job (or has to look in the store)."""
        if queue in self.permits.queues and not self.permits.free(queue):
            return False
        return self.ready.has_ready(queue, lowest_priority, now_ms)

    def ended(self, queue: str) -> None:
        """Note that jobs have left IN_PROGRESS or PENDING, so that others may be there."""
        self.changed.add(queue)
        if queue in self.permits.queues or queue in self.room.queues:
            self.touched.add(queue)

    def heartbeat(self) -> None:
        began = self.clock.monotonic()
        self.engine.heartbeat()
        self.heard_at = began

    def confirm(self) -> None:
        """Confirm the ownership before a reply from memory alone. Raises StorageError if another
        server owns the store by now."""
        if self.is_shared and self.clock.monotonic() > self.heard_at + _CONFIRM_SECONDS:
            self.heartbeat()

    def note_refusal(self, error: StorageError) -> None:
        """Remember that the store is full, if that is why it refused something."""
        if isinstance(error, StorageFull):
            self.health.is_full(error.message)

    def unable(self, error: StorageError) -> ShardConnectionFailed:
        self.note_refusal(error)
        return ShardConnectionFailed([self.name], error.message)

    # --- jobs come and go -----------------------------------------------------------------

    def stored(
        self, queue: str, jobs: Sequence[Job], local_ids: Sequence[int], now_ms: int
    ) -> None:
        """Index jobs that a commit has stored, with the payloads of those that are due.

        Once for all of a batch: with one job a call, this is a good part of what a call costs."""
        self.touched.add(queue)
        self.stats.count(f"{queue}_enqueue", len(jobs))
        kinds = _kinds_of(jobs, local_ids)
        found: dict[int, tuple[list[Key], list[Payload]]] = {}  # by priority
        sizes: list[int] = []
        for job, bodies, ids in kinds:
            sizes += map(len, bodies)
            due_ms = now_ms if job.run_after_ms is None else job.run_after_ms
            keys, payloads = found.setdefault(job.priority, ([], []))
            keys += zip(repeat(due_ms), ids)
            attempts = repeat(job.attempts_allowed)
            fields = zip(bodies, attempts, attempts, *_OTHERS_OF_PAYLOAD)  # noqa: B905 - some have no end
            payloads += map(new_record, repeat(Payload), fields)
        self.stats.record_each((f"{BODY_SIZE}{queue}",), sizes)
        for priority, (keys, payloads) in found.items():
            if len(kinds) == 1:
                self.ready.add(queue, priority, keys, now_ms, payloads)
                continue
            # Earliest first. Keys differ, so that the payloads beside them are never compared.
            ordered, known = zip(*sorted(zip(keys, payloads, strict=True)), strict=True)
            self.ready.add(queue, priority, ordered, now_ms, known)

    def requeue(self, queue: str, requeued: Sequence[Requeued], now_ms: int) -> None:
        """Index jobs that became PENDING again."""
        if not requeued:
            return
        self.touched.add(queue)
        by_priority: dict[int, list[PendingKey]] = {}
        for job in requeued:
            by_priority.setdefault(job.priority, []).append(job.key)
        for priority, keys in by_priority.items():
            self.ready.add(queue, priority, sorted(keys), now_ms)

    def discard(self, queue: str, keys: Iterable[JobKey]) -> None:
        """Take jobs that are PENDING no more out of the ready index."""
        by_priority: dict[int, list[int]] = {}
        for key in keys:
            by_priority.setdefault(key.priority, []).append(key.local_id)
            self.touched.add(queue)
        for priority, local_ids in by_priority.items():
            self.ready.discard(queue, priority, local_ids)

    # --- what is counted: once a call or a batch, never once a job ------------------------------

    def acked(self, queue: str, result: AckResult, now_ms: int) -> None:
        self.ended(queue)
        if result.succeeded:
            self.stats.count(f"{queue}_ack_succeeded", result.succeeded)
        if result.failed:
            self.stats.count(f"{queue}_ack_failed", result.failed)
        if result.noop:
            self.stats.count(f"{queue}_ack_noop", result.noop)
        if result.requeued:
            self.requeue(queue, result.requeued, now_ms)

    def checkpointed(self, queue: str, result: CheckpointResult, now_ms: int) -> None:
        if result.done:
            self.stats.count(f"{queue}_checkpoint", result.done)
        if result.noop:
            self.stats.count(f"{queue}_checkpoint_noop", result.noop)
        self.requeue(queue, result.requeued, now_ms)

    def finished(self, queue: str, result: Finished, now_ms: int) -> None:
        """Note jobs that have ended, or are to be tried again; some of them were PENDING."""
        done = result.outcomes.count(FinishOutcome.DONE)
        if done:
            self.ended(queue)
            self.stats.count(f"{queue}_finish", done)
        if done < len(result.outcomes):
            self.stats.count(f"{queue}_finish_noop", len(result.outcomes) - done)
        self.discard(queue, result.left_pending)
        self.requeue(queue, result.requeued, now_ms)

    def expired(self, queue: str, jobs: int) -> None:
        self.ended(queue)
        self.stats.count(f"{queue}_expired", jobs)

    def released(self, queue: str, requeued: Sequence[Requeued], now_ms: int) -> None:
        self.stats.count("shard_claims_released", len(requeued))
        self.requeue(queue, requeued, now_ms)

    def dequeued(self, queue: str, delays_ms: Sequence[int], payloads: PayloadColumns) -> None:
        """Record how long after each was due jobs were claimed, once for all of its batch."""
        delays = self._delays_ms.get(queue)
        if delays is None:
            delays = self._delays_ms[queue] = ([], [])
        delays[0].extend(delays_ms)
        allowed, remaining = payloads.attempts_allowed, payloads.attempts_remaining
        all_are_first = allowed == remaining  # as mostly
        first = delays_ms if all_are_first else compress(delays_ms, map(eq, allowed, remaining))
        delays[1].extend(first)

    def record_delays(self) -> None:
        """Record the delays of the jobs that a batch has claimed."""
        for queue, (delays_ms, of_first_attempts) in self._delays_ms.items():
            self.stats.count(f"{queue}_dequeue", len(delays_ms))
            each, first = f"{queue}_dequeue_delay_ms", f"{queue}_first_dequeue_delay_ms"
            if len(of_first_attempts) == len(delays_ms):
                self.stats.record_each((each, first), delays_ms)
            else:
                self.stats.record_each((each,), delays_ms)
                self.stats.record_each((first,), of_first_attempts)
        self._delays_ms.clear()
