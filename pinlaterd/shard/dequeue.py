"""Dequeues: from the ready index into a commit, and from there into the answer.

A dequeue that is short when its batch is committed, while the index holds more by then (jobs that
its own acks or others' enqueues made ready, or more than one batch may hold), goes on with the
next batch. It is answered when it has all it may take, when nothing is ready any more, when its
answer is as large as it may be, or at its deadline.

Payloads that are not in memory are read by the engine as it claims: so nobody knows how large they
are before, and the engine claims no more than fits the answer, and the batch. What did not fit goes
back into the index, and the dequeue on with the next batch. Its answer is full once it comes first
in a batch and gets nothing, or less than it asked for though the batch has room for all of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress
from typing import cast

from pinlaterd.engines.base import ClaimOp, Claims
from pinlaterd.errors import PinLaterError, RequestError
from pinlaterd.model import DequeueRequest, Payload, PendingKey, new_record
from pinlaterd.rpc import codec
from pinlaterd.rpc.answers import columns_of
from pinlaterd.rpc.codec import Call, DequeueAnswer
from pinlaterd.shard.operations import Acking, Commit, ForeignError
from pinlaterd.shard.ready import Key, Taken
from pinlaterd.shard.state import ShardState
from pinlaterd.wire.envelope import CallEntry, Status

# What a job costs in an answer beside its body: its descriptor twice, its claim, field heads.
JOB_OVERHEAD_BYTES = 300
# What a dry run reads at a time, about as much as a commit costs: those who wait don't feel it.
_MOST_KEYS_A_READ = 200
_MOST_BYTES_A_READ = 256 << 10


class Dequeue(Acking):
    """One dequeue, perhaps through several commits, each of which carries out one part of its
    acks. It claims what `choose` has taken. `remaining`: how many jobs it may still take."""

    __slots__ = (
        "_bytes_left",
        "_facts",
        "_found",
        "_full",
        "_leads",
        "_lease_ms",
        "_lowest_priority",
        "_taken",
        "chosen",
        "dry_run",
        "remaining",
    )

    def __init__(self, entry: CallEntry, call: Call, state: ShardState, now_ms: int) -> None:
        """Raises RequestError, ForeignError. What is wrong with some of its acks, or with the
        dequeue beside acks that can be carried out, is told afterwards, and nothing is claimed."""
        request = cast("DequeueRequest", call.request)
        super().__init__(entry, call.head, request.queue, state)
        self.source = call.context.source
        try:
            if request.acks is not None:  # they may be of another queue
                self.take_acks(request.acks, now_ms)
            self._facts = state.queue(request.queue)
            state.rules.dequeue(call.context, request)
        except RequestError as error:
            self.problem = self.problem or error
        if self.problem is None:
            if entry.whole and request.coverage != 1.0:
                raise ForeignError
        elif not self.parts:
            raise self.problem
        self._lease_ms = None
        if request.claim_timeout_ms is not None and self.problem is None:
            self._lease_ms = state.lease_ms(request.queue, request.claim_timeout_ms)
        limit = request.limit if entry.max_jobs < 0 else min(request.limit, entry.max_jobs)
        self.remaining = 0 if self.problem is not None else limit
        self.dry_run = request.dry_run
        self.chosen = 0  # jobs in `_taken`
        self._taken: list[Taken] = []  # from the index, for the commit in the making
        self._leads = False  # whether they are the first of that commit
        self._found = DequeueAnswer()
        self._full = False  # whether the answer is as large as it may be
        self._bytes_left = min(state.config.server.max_response_bytes, entry.most_bytes)
        self._lowest_priority = entry.lowest_priority

    # --- through a commit --------------------------------------------------------------------

    @property
    def queues(self) -> Collection[str]:
        return {self.queue, self.parts[0].queue} if self.parts else (self.queue,)

    @property
    def rows(self) -> int:
        return self.parts[0].jobs + self.chosen if self.parts else self.chosen

    def choose(self, most_jobs: int, now_ms: int) -> None:
        """Take at most `most_jobs` from the index for the next commit. If the store can't be read,
        StorageError is raised, and nothing has changed."""
        self._taken = self.state.ready.take(
            self.queue, min(self.remaining, most_jobs), self._lowest_priority, now_ms
        )
        self.chosen = sum([len(taken.keys) for taken in self._taken])

    def add_to(self, commit: Commit) -> None:
        if self.parts:
            commit.acks.append(self)
        if self._taken:
            self._leads = not commit.claims
            take = self.state.claim_descriptors.take
            claims = [
                new_record(
                    Claims,
                    (
                        taken.priority,
                        [local_id for _, local_id in taken.keys],
                        taken.payloads,
                        *take(self.source, len(taken.keys)),
                    ),
                )
                for taken in self._taken
            ]
            # A job too large for any answer is handed out alone.
            op = ClaimOp(self.queue, claims, self._bytes_left, not self._found)
            commit.claims.append((op, self._claimed))

    def _claimed(
        self, op: ClaimOp, payloads: Sequence[Payload | None], expired: int, now_ms: int
    ) -> None:
        """Take the claims that were committed, the first ones, as many as fitted. None stands for a
        job that was not PENDING: since it has `expired`, or it is a foreign writer's doing."""
        self.begun = True
        had_jobs, asked, had_room = bool(self._found), self.chosen, self._bytes_left
        all_taken, self._taken, self.chosen = self._taken, [], 0
        at = handed_out = 0
        for taken, claims in zip(all_taken, op.claims, strict=True):
            keys = taken.keys
            found = payloads[at : at + len(keys)]
            fit = len(found)
            at += fit
            if fit < len(keys):
                self._requeue([Taken(taken.priority, keys[fit:], taken.payloads[fit:])], now_ms)
            handed_out += self._hand_out(keys[:fit], claims, found, now_ms)
        if at < asked and self._leads:
            own_bound = had_room <= self.state.batch_bytes
            self._full = own_bound if handed_out else had_jobs
        if handed_out:
            self.state.failures.handed_out(self.queue, self.source, handed_out)
        if expired:
            self.state.expired(self.queue, expired)
        if handed_out + expired < at:
            self.state.stats.count(f"{self.queue}_claim_mismatch", at - handed_out - expired)
            self.state.suspects.add(self.queue)

    def _hand_out(
        self,
        keys: Sequence[Key],
        claims: Claims,
        payloads: Sequence[Payload | None],
        now_ms: int,
    ) -> int:
        """Put those of these jobs into the answer whose claims were made; returns how many."""
        held = list(filter(None, payloads))
        if not held:
            return 0
        columns, prefix = columns_of(held), f"{self._facts.prefix}{claims.priority}:"
        lease_ms, timeout = self._lease_ms, self._facts.claim_timeout_seconds
        if lease_ms is not None:
            timeout = math.ceil(lease_ms / 1000)
            pairs = zip(claims.local_ids, claims.descriptors, payloads)  # noqa: B905 - the first ones
            leased = [(local_id, claim) for local_id, claim, made in pairs if made is not None]
            self.state.leases.add(self.queue, claims.priority, leased, lease_ms)
        if len(held) == len(keys):
            local_ids = claims.local_ids[: len(keys)]
            claimer, first_claim = claims.claimer, claims.first_claim
            size = self._found.add_counted(
                prefix, local_ids, columns, claimer, first_claim, timeout
            )
        else:
            kept = [payload is not None for payload in payloads]
            keys = list(compress(keys, kept))
            named = list(compress(claims.descriptors, kept))
            descriptors = [f"{prefix}{local_id}" for _, local_id in keys]
            size = self._found.add(descriptors, columns, named, timeout)
        self._bytes_left -= size + JOB_OVERHEAD_BYTES * len(held)
        self.remaining -= len(held)
        delays_ms = [now_ms - run_after_ms for run_after_ms, _ in keys]
        self.state.dequeued(self.queue, delays_ms, columns)
        return len(held)

    def give_up(self, now_ms: int) -> None:
        taken, self._taken, self.chosen = self._taken, [], 0
        self._requeue(taken, now_ms)

    def _requeue(self, taken: Iterable[Taken], now_ms: int) -> None:
        """Return jobs that were not claimed, so that others may have them."""
        self.state.ready.requeue(self.queue, taken, now_ms)

    # --- the answer --------------------------------------------------------------------------

    def reply(self, now_ms: int) -> bool:
        if self.parts:
            return False
        if self.problem is not None:
            self.state.replies.fail(self.entry, self.head, self.problem)
            return True
        state = self.state
        state.touched.add(self.queue)
        if (
            self.remaining > 0
            and not self._full
            and state.has_ready(self.queue, self._lowest_priority, now_ms)
        ):
            return False
        self.answer()
        return True

    def answer(self) -> None:
        """Answer with the jobs claimed by now."""
        payload = codec.encode_dequeued(self.head, self._found)
        jobs = 0 if self.dry_run else len(self._found)
        self.state.replies.add(self.entry, Status.DONE, payload, jobs)

    def fail(self, error: PinLaterError) -> None:
        """Fail, unless earlier commits claimed jobs: these are delivered all the same."""
        if self._found:
            self.answer()
        else:
            self.state.replies.fail(self.entry, self.head, error)

    # --- dry runs ----------------------------------------------------------------------------

    def look(self, now_ms: int) -> Iterator[None]:
        """Make a dry run, in slices: what it would get, as the store has it, without claims."""
        state, queue, engine = self.state, self.queue, self.state.engine
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
                self._show(priority, local_ids, payloads[:fitting])
                if fitting:
                    after = keys[fitting - 1]
                yield None

    def _show(
        self, priority: int, local_ids: Sequence[int], payloads: Sequence[Payload | None]
    ) -> None:
        """Put those of these jobs into the answer that exist."""
        pairs = zip(local_ids, payloads, strict=False)
        found = {local_id: payload for local_id, payload in pairs if payload is not None}
        held, prefix = list(found.values()), f"{self._facts.prefix}{priority}:"
        if held:
            descriptors = [f"{prefix}{local_id}" for local_id in found]
            none, timeout = [""] * len(held), self._facts.claim_timeout_seconds
            size = self._found.add(descriptors, columns_of(held), none, timeout)
            self._bytes_left -= size + JOB_OVERHEAD_BYTES * len(held)
            self.remaining -= len(held)

    def _fitting(self, payloads: Sequence[Payload | None]) -> int:
        """Count how many of `payloads` fit into the answer, or note that it is full. A job too
        large for any answer is handed out alone."""
        left, empty = self._bytes_left, not self._found
        for at, payload in enumerate(payloads):
            if payload is None:
                continue
            left -= len(payload.body) + JOB_OVERHEAD_BYTES
            if left < 0 and not empty:
                self._full = True
                return at
            empty = False
        return len(payloads)
