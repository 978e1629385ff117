"""Holds scheduled jobs for a move: they are IN_PROGRESS until who moves them says what became.

The claim of such a job is made as if it were the last moment that the store knows. So it never
times out, in no engine: a move that was cut short may have stored the job elsewhere already, and
to hand it out here would run it twice. `pinlater-admin shard drain --move`, repeated, finds it by
its claim. Touches the store, in one commit of its own.
"""

from __future__ import annotations

from pinlaterd.engines.base import Batch, ClaimOp, Claims, StorageEngine
from pinlaterd.model import MOVE_SOURCE, Payload, PendingKey, move_claim
from pinlaterd.shard.dequeues import ClaimDescriptors
from pinlaterd.shard.works import Memory
from pinlaterd.wire.envelope import HeldJob, HoldRequest

# Who is due so soon runs where it is: a move that is cut short delays it until it is repeated.
SOON_MS = 10_000
_MOST_JOBS = 1_000
# Given so that the engine reads no bodies: who moves them looks up as many as it can take.
_NOT_READ = Payload(b"", 0, 0)
_LAST_LOCAL_ID = (1 << 63) - 1


class Holds:
    """Of one shard. `descriptors`: those of the present ownership."""

    def __init__(self, engine: StorageEngine, memory: Memory) -> None:
        self._engine = engine
        self._memory = memory
        self.descriptors: ClaimDescriptors | None = None

    def hold(self, request: HoldRequest, now_ms: int) -> list[HeldJob]:
        """Claim what is asked for; what is due now, or within SOON_MS, is left.

        The ready index knows nothing of these jobs, since they are not due. Raises StorageError."""
        assert self.descriptors is not None
        queue, priority = request.queue, request.priority
        if queue not in self._memory.ready:
            return []
        place = PendingKey(request.run_after_ms, request.local_id)
        latest_ms = self._engine.limits.run_after_ms
        keys = self._engine.read_pending(
            queue,
            priority,
            after=max(place, PendingKey(now_ms + SOON_MS, _LAST_LOCAL_ID)),
            until_ms=latest_ms,
            limit=min(request.limit, _MOST_JOBS),
        )
        if not keys:
            return []
        prefix, counter = self.descriptors.prefix(MOVE_SOURCE), self.descriptors.counter
        descriptors = [move_claim(f"{prefix}{number}") for _, number in zip(keys, counter)]  # noqa: B905
        claims = Claims(priority, keys, descriptors, [_NOT_READ] * len(keys))
        result = self._engine.apply(Batch(claims=[ClaimOp(queue, [claims])]), latest_ms)
        return [
            HeldJob(key.local_id, key.run_after_ms, descriptor)
            for key, descriptor, payload in zip(keys, descriptors, result.claims[0], strict=True)
            if payload is not None
        ]
