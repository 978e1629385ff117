"""Dequeues: from the ready index into a commit, and from there into the answer.

A dequeue that is short when its batch is committed, while the index holds more by then (jobs that
its own acks or others' enqueues made ready, or more than one batch may hold), goes on with the
next batch. It is answered when it has all it may take, when nothing is ready any more, when its
answer is as large as it may be, or at its deadline.

Payloads that are not in memory are read by the engine as it claims: so nobody knows how large they
are before, and the engine claims no more than fits the answer, and the batch. What did not fit goes
back into the index, and the dequeue on with the next batch. Its answer is full once it comes first
in a batch and gets nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress
from typing import cast

from pinlaterd.engines.base import AckOp, AckResult, ClaimOp, Claims, StorageEngine
from pinlaterd.errors import PinLaterError, QueueNotFound, RequestError
from pinlaterd.model import DequeueRequest, Payload, PendingKey
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Call, DequeueAnswer
from pinlaterd.shard.operations import Commit, ForeignError, Operation, ack_parts, note_acked
from pinlaterd.shard.ready import Taken
from pinlaterd.shard.state import Arrival, ShardState
from pinlaterd.wire.envelope import ReplyEntry

# What a job costs in an answer beside its body: its descriptor twice, its claim, field heads.
JOB_OVERHEAD_BYTES = 300
# What a dry run reads at a time, about as much as a commit costs: those who wait don't feel it.
_MOST_KEYS_A_READ = 200
_MOST_BYTES_A_READ = 256 << 10


class Dequeue(Operation):
    """One dequeue, perhaps through several commits, each of which carries out one part of its
    acks. It claims what `choose` has put into it. `remaining`: how many jobs it may still take."""

    __slots__ = (
        "_bytes_left",
        "_claim_timeout_seconds",
        "_claims",
        "_found",
        "_full",
        "_leads",
        "_lowest_priority",
        "_problem",
        "_source",
        "acks",
        "changes_nothing",
        "claimed",
        "dry_run",
        "remaining",
    )

    def __init__(self, arrival: Arrival, call: Call, state: ShardState, now_ms: int) -> None:
        """Raises RequestError, ForeignError. What is wrong with some of its acks, or with the
        dequeue beside acks that can be carried out, is told afterwards, and nothing is claimed."""
        request, entry = cast("DequeueRequest", call.request), arrival.entry
        super().__init__(arrival, call.head, request.queue, state)
        self.acks: deque[AckOp] = deque()
        problem: RequestError | None = None
        if request.acks is not None:  # they may be of another queue
            try:
                self.acks, problem = ack_parts(arrival, request.acks, state, now_ms)
            except QueueNotFound as error:
                problem = error
            if self.acks and not (self.acks[0].succeeded or self.acks[0].failed):
                self.acks.clear()
        problem = problem or self._wrong(call, request)
        if problem is None and entry.whole and request.coverage != 1.0:
            raise ForeignError
        if problem is not None and not self.acks:
            raise problem
        limit = request.limit if entry.max_jobs < 0 else min(request.limit, entry.max_jobs)
        self.remaining = 0 if problem is not None else limit
        self.dry_run = request.dry_run
        self.changes_nothing = request.dry_run and not self.acks
        self.claimed = 0  # jobs in `_claims`
        self._claims: list[Claims] = []  # taken from the index, for the commit in the making
        self._leads = False  # whether they are the first of that commit
        self._found = DequeueAnswer()
        self._full = False  # whether the answer is as large as it may be
        self._bytes_left = min(state.config.server.max_response_bytes, entry.most_bytes)
        self._lowest_priority = entry.lowest_priority
        self._problem = problem
        self._source = call.context.source
        timeout_seconds = state.config.queue(request.queue).job_claimed_timeout_seconds
        self._claim_timeout_seconds = math.ceil(timeout_seconds)

    def _wrong(self, call: Call, request: DequeueRequest) -> RequestError | None:
        """Why nothing can be claimed."""
        try:
            self.state.check_queue(request.queue)
            self.state.rules.dequeue(call.context, request)
        except RequestError as error:
            return error
        return None

    # --- through a commit --------------------------------------------------------------------

    @property
    def queues(self) -> Collection[str]:
        return {self.queue, self.acks[0].queue} if self.acks else (self.queue,)

    @property
    def rows(self) -> int:
        return (self.acks[0].jobs if self.acks else 0) + self.claimed

    def choose(self, most_jobs: int, now_ms: int) -> None:
        """Take at most `most_jobs` from the index for the next commit. If the store can't be read,
        StorageError is raised, and nothing has changed."""
        state, queue = self.state, self.queue
        if queue not in state.ready:
            return
        limit = min(self.remaining, most_jobs)
        for priority, keys in state.ready.take(queue, limit, self._lowest_priority, now_ms):
            payloads = state.fresh.take(queue, priority, [key[1] for key in keys])
            descriptors = state.claim_descriptors.take(self._source, len(keys))
            self._claims.append(Claims(priority, keys, descriptors, payloads))
            self.claimed += len(keys)

    def add_to(self, commit: Commit) -> None:
        if self.acks:
            commit.acks.append((self.acks[0], self._acked))
        if self._claims:
            self._leads = not commit.claims
            # A job too large for any answer is handed out alone.
            op = ClaimOp(self.queue, self._claims, self._bytes_left, not self._found)
            commit.claims.append((op, self._take_over))

    def _acked(self, result: AckResult, now_ms: int) -> None:
        self.begun = True
        note_acked(self.acks.popleft().queue, result, self.state, now_ms)

    def _take_over(self, payloads: Sequence[Payload | None], now_ms: int) -> None:
        """The claims were committed, the first of them, as many as fitted. None stands for a job
        that was not PENDING in the store: a foreign writer's doing."""
        self.begun = True
        had_jobs, asked = bool(self._found), self.claimed
        claims, self._claims, self.claimed = self._claims, [], 0
        at = handed_out = 0
        for priority, keys, descriptors, given in claims:
            found = payloads[at : at + len(keys)]
            fit = len(found)
            at += fit
            if fit < len(keys):
                left = Claims(priority, keys[fit:], descriptors[fit:], given[fit:])
                self._requeue([left], now_ms)
            handed_out += self._hand_out(priority, keys[:fit], descriptors[:fit], found, now_ms)
        if len(payloads) < asked:
            self._full = self._leads and not handed_out and had_jobs
        if handed_out < len(payloads):
            self.state.figures.mismatched(self.queue, len(payloads) - handed_out)
            self.state.suspects.add(self.queue)

    def _hand_out(
        self,
        priority: int,
        keys: Sequence[PendingKey],
        descriptors: Sequence[str],
        payloads: Sequence[Payload | None],
        now_ms: int,
    ) -> int:
        """Returns how many of these jobs were claimed."""
        held = [payload for payload in payloads if payload is not None]
        if len(held) < len(keys):
            kept = [payload is not None for payload in payloads]
            keys, descriptors = list(compress(keys, kept)), list(compress(descriptors, kept))
        self._bytes_left -= sum([len(payload[0]) for payload in held])
        self._bytes_left -= JOB_OVERHEAD_BYTES * len(held)
        self._add(priority, keys, held, descriptors)
        self.state.figures.dequeued(self.queue, [now_ms - key[0] for key in keys], held)
        return len(held)

    def _add(
        self,
        priority: int,
        keys: Iterable[PendingKey],
        payloads: Sequence[Payload],
        claims: Sequence[str],
    ) -> None:
        """More jobs for the answer."""
        prefix = f"{self.queue}:s{self.state.name}:p{priority}:"
        descriptors = [f"{prefix}{key[1]}" for key in keys]
        self._found.add(descriptors, payloads, claims, self._claim_timeout_seconds)
        self.remaining -= len(descriptors)

    def give_up(self, now_ms: int) -> None:
        claims, self._claims, self.claimed = self._claims, [], 0
        self._requeue(claims, now_ms)

    def _requeue(self, claims: Sequence[Claims], now_ms: int) -> None:
        """They were not made: others may have these jobs."""
        state, queue = self.state, self.queue
        for priority, keys, _, payloads in claims:
            for key, payload in zip(keys, payloads, strict=True):
                if payload is not None:
                    state.fresh.keep(queue, priority, (key.local_id,), (payload,))
            state.ready.requeue(queue, (Taken(priority, list(keys)),), now_ms)

    # --- the answer --------------------------------------------------------------------------

    def reply(self, now_ms: int) -> ReplyEntry | None:
        if self.acks:
            return None
        if self._problem is not None:
            return self.arrival.failed(self.head, self._problem)
        state = self.state
        state.touched.add(self.queue)
        if (
            self.remaining > 0
            and not self._full
            and self.queue in state.ready
            and state.ready.has_ready(self.queue, self._lowest_priority, now_ms)
        ):
            return None
        return self.answer()

    def answer(self) -> ReplyEntry:
        """What it has by now."""
        payload = codec.encode_dequeued(self.head, self._found)
        return self.arrival.done(payload, 0 if self.dry_run else len(self._found))

    def fail(self, error: PinLaterError) -> ReplyEntry:
        """What earlier commits claimed is delivered all the same."""
        return self.answer() if self._found else self.arrival.failed(self.head, error)

    # --- dry runs ----------------------------------------------------------------------------

    def look(self, engine: StorageEngine, now_ms: int) -> Iterator[None]:
        """A dry run, in slices: what it would get, as the store has it, without claims."""
        state, queue = self.state, self.queue
        levels = state.config.server.num_priority_levels
        for priority in range(1, (self._lowest_priority or levels) + 1):
            after: PendingKey | None = None
            while self.remaining > 0 and not self._full and queue in state.ready:
                limit = min(self.remaining, _MOST_KEYS_A_READ)
                keys = engine.read_pending(
                    queue, priority, after=after, until_ms=now_ms, limit=limit
                )
                if not keys:
                    break
                local_ids = [key.local_id for key in keys]
                payloads = engine.payloads(
                    queue, priority, local_ids, most_bytes=_MOST_BYTES_A_READ
                )
                fitting = self._fitting(payloads)
                found = [
                    (key, payload)
                    for key, payload in zip(keys[:fitting], payloads, strict=False)
                    if payload is not None
                ]
                held = [payload for _, payload in found]
                self._add(priority, [key for key, _ in found], held, [""] * len(held))
                if fitting:
                    after = keys[fitting - 1]
                yield None

    def _fitting(self, payloads: Sequence[Payload | None]) -> int:
        """How many of `payloads` fit into the answer; takes their bytes from what is left of it, or
        notes that it is full. A job too large for any answer is handed out alone."""
        empty = not self._found
        for at, payload in enumerate(payloads):
            if payload is None:
                continue
            size = len(payload[0]) + JOB_OVERHEAD_BYTES
            if size > self._bytes_left and not empty:
                self._full = True
                return at
            self._bytes_left -= size
            empty = False
        return len(payloads)


class ClaimBudget:
    """How many jobs the dequeues of one batch may ask for, together.

    What is asked for and does not fit, because bodies are large, was taken from the index and goes
    back there for nothing. So after a batch in which that happened the next one asks for twice of
    what fitted, and those after it for more and more, until it happens again."""

    def __init__(self, most_jobs: int) -> None:
        self._most_jobs = most_jobs
        self.jobs = most_jobs

    def learn(self, asked: int, fitted: int) -> None:
        if fitted < asked:
            self.jobs = max(1, min(self._most_jobs, 2 * fitted))
        else:
            self.jobs = min(self._most_jobs, 2 * self.jobs)
