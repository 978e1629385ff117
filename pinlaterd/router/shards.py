"""The shards that a router knows: who they are, who is healthy, what queues there are.

Relies on `wire` (a link to each shard) and follows the coordinator's snapshots.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from pinlaterd.wire.envelope import Op, ReadyCounts, ShardFacts
from pinlaterd.wire.link import (
    GiveUp,
    LinkListener,
    OnReply,
    Outcome,
    ShardCall,
    ShardReply,
)

log = logging.getLogger(__name__)

_ENSURE_QUEUES_SECONDS = 30.0
_CREATE_AGAIN_SECONDS = 1.0
_PARTING_SECONDS = 2.0  # for the calls that a removed shard has in hand


class Shard(Protocol):
    """One shard as the router sees it: over ZeroMQ, or in process in tests."""

    name: str
    facts: ShardFacts | None

    @property
    def healthy(self) -> bool:
        """Whether calls can be expected to be answered."""
        ...

    @property
    def answering(self) -> bool:
        """Whether it has been heard within about a second: others come first."""
        ...

    @property
    def returning(self) -> bool:
        """Whether it has gone a moment ago and is expected back: patient calls wait for that."""
        ...

    @property
    def ailing(self) -> bool:
        """Whether it says that its store can't be relied on: others come first."""
        ...

    @property
    def calls_in_flight(self) -> int: ...

    @property
    def calls_unsent(self) -> int:
        """Those of them that wait for the end of this turn of the loop, to go as one message."""
        ...

    def ready_counts(self, queue: str) -> tuple[int, ...]:
        """How many jobs are ready by priority: a hint; () if the shard has said nothing yet."""
        ...

    def call(
        self,
        call: ShardCall,
        on_reply: OnReply,
        *,
        patient: bool = True,
        give_up: GiveUp = GiveUp.STALLED,
    ) -> object:
        """Send `call`; `on_reply` is called exactly once, by the deadline or soon after.

        A `patient` call waits for a shard that is returning; others are REFUSED at once. The
        answer is SILENT once the shard has been silent for as long as `give_up` says, if others
        can serve."""
        ...

    def ask(
        self, call: ShardCall, *, patient: bool = True, give_up: GiveUp = GiveUp.STALLED
    ) -> asyncio.Future[ShardReply]:
        """The same, to be awaited."""
        ...

    def release(self, dequeue_reply: bytes) -> None:
        """End the claims in a dequeue's answer that can't be delivered."""
        ...

    def close(self) -> None: ...


class ShardPlan(NamedTuple):
    """What the snapshot says of a shard."""

    name: str
    dequeue_only: bool


Connect = Callable[[str, LinkListener], Shard]


class ShardSet:
    """All shards of the deployment, as links come and go. A LinkListener to each."""

    def __init__(
        self,
        connect: Connect,
        monotonic: Callable[[], float],
        on_deleted: Callable[[str], None] = lambda _queue: None,
    ) -> None:
        """`on_deleted(queue)` is called when no shard has the queue any more."""
        self._connect = connect
        self._monotonic = monotonic
        # Called with a queue when a shard publishes that jobs of it can be had.
        self.on_ready: Callable[[str], None] = lambda _queue: None
        self._on_deleted = on_deleted
        self._shards: dict[str, Shard] = {}
        self._dequeue_only: frozenset[str] = frozenset()
        self._queues: dict[str, set[str]] = {}  # by shard name, of those that are welcomed
        self._parting: list[Shard] = []  # removed, and not let go of yet

    # --- what there is -------------------------------------------------------------------

    @property
    def by_name(self) -> Mapping[str, Shard]:
        return self._shards

    def healthy(self) -> list[Shard]:
        return [shard for shard in self._shards.values() if shard.healthy]

    def present(self) -> list[Shard]:
        """The healthy ones; if there are none, those that are expected back at any moment."""
        return self.healthy() or [shard for shard in self._shards.values() if shard.returning]

    def dependable(self) -> list[Shard]:
        """Those to ask for jobs: they answer, and their stores do well. Others only if there is
        none of those, and shards that are expected back only if there is no other at all."""
        return _best(self._shards.values())

    def unhealthy(self) -> list[str]:
        return [name for name, shard in self._shards.items() if not shard.healthy]

    def down(self) -> list[str]:
        """Those that are neither healthy nor expected back."""
        return [
            name for name, shard in self._shards.items() if not (shard.healthy or shard.returning)
        ]

    def enqueueable(self) -> list[Shard]:
        """Those to give jobs to."""
        shards: Collection[Shard] = self._shards.values()
        if self._dequeue_only:
            shards = [
                shard for name, shard in self._shards.items() if name not in self._dequeue_only
            ]
        return _best(shards)

    def ready_jobs(self, queue: str) -> int:
        """That can be had: what a shard holds that is not asked wakes nobody. A shard that has not
        counted the queue yet may hold some: whoever asks it has it count."""
        return sum(
            sum(shard.ready_counts(queue)) or self._is_uncounted(shard, queue)
            for shard in self.dependable()
        )

    def _is_uncounted(self, shard: Shard, queue: str) -> bool:
        queues = self._queues.get(shard.name, ())
        return shard.healthy and queue in queues and not shard.ready_counts(queue)

    def longest_queue_name(self) -> int:
        """Characters, by the store that allows least."""
        known = [shard.facts for shard in self._shards.values() if shard.facts is not None]
        return min((facts.queue_name_chars for facts in known), default=64)

    def knows_queue(self, queue: str) -> bool:
        return any(queue in queues for queues in self._queues.values())

    def most_queues(self) -> int:
        """How many queues there are: each shard is given those of the others."""
        return max((len(queues) for queues in self._queues.values()), default=0)

    def follow(self, plans: Iterable[ShardPlan]) -> None:
        """Connect to shards that are new, let go of those that are no more."""
        wanted = {plan.name: plan for plan in plans}
        for name in [name for name in self._shards if name not in wanted]:
            self._queues.pop(name, None)
            self._part_from(self._shards.pop(name))
        for name in wanted:
            if name not in self._shards:
                self._shards[name] = self._connect(name, self)
        self._dequeue_only = frozenset(name for name, plan in wanted.items() if plan.dequeue_only)

    def _part_from(self, shard: Shard) -> None:
        """Calls that it has in hand may still be answered."""

        def close() -> None:
            if shard in self._parting:
                self._parting.remove(shard)
                shard.close()

        self._parting.append(shard)
        asyncio.get_running_loop().call_later(_PARTING_SECONDS, close)

    def close(self) -> None:
        for shard in (*self._shards.values(), *self._parting):
            shard.close()
        self._shards.clear()
        self._parting.clear()

    # --- what links hear (LinkListener) ---------------------------------------------------

    def queues_known(self) -> frozenset[str]:
        """A queue exists if a shard says so that is healthy, or said so a moment ago: while shards
        are restarted one after the other, the last that has it may be away when the next one joins.

        deleteQueue needs all shards healthy, so no shard that is away has missed it."""
        names = [
            queues
            for name, queues in self._queues.items()
            if (shard := self._shards.get(name)) and (shard.healthy or shard.returning)
        ]
        return frozenset().union(*names)

    def welcomed(self, link: Shard, facts: ShardFacts) -> None:
        """A shard joined: it has what we know by now; the others get what only it has."""
        if self._shards.get(link.name) is not link:
            return
        before = self._queues.get(link.name, set())
        self._queues[link.name] = set(facts.queues)
        for queue in before.difference(facts.queues):
            self._deleted_there(queue)
        for shard in self.healthy():
            self._create_missing(shard)
        empty = {queue for queue, numbers in facts.counts if not any(numbers)}
        for queue in facts.queues:
            if queue not in empty:
                self.on_ready(queue)

    def _create_missing(self, shard: Shard) -> None:
        """Have the shard create the queues that only others have."""
        if self._shards.get(shard.name) is not shard or not shard.healthy:
            return  # its successor will be welcomed
        missing = self.queues_known() - self._queues.get(shard.name, set())
        if not missing:
            return

        def replied(reply: ShardReply) -> None:
            if reply.outcome is not Outcome.DONE:
                log.warning("shard-%s did not create %d queues", shard.name, len(missing))
                loop = asyncio.get_running_loop()
                loop.call_later(_CREATE_AGAIN_SECONDS, self._create_missing, shard)

        log.info("shard-%s lacks %d queues; creating them there", shard.name, len(missing))
        call = ShardCall(
            self._monotonic() + _ENSURE_QUEUES_SECONDS,
            json.dumps(sorted(missing)).encode(),
            Op.ENSURE_QUEUES,
        )
        # Ahead of any call that follows on the same link, so no call misses a queue.
        shard.call(call, replied, patient=False, give_up=GiveUp.NEVER)

    def others_can_serve(self, link: Shard) -> bool:
        return any(shard.answering for shard in self._shards.values() if shard is not link)

    def counted(self, link: Shard, counts: Iterable[ReadyCounts]) -> None:
        if self._shards.get(link.name) is not link:
            return
        queues = self._queues.setdefault(link.name, set())
        for queue, numbers in counts:
            if not numbers:
                queues.discard(queue)
                self._deleted_there(queue)
                continue
            queues.add(queue)
            if any(numbers):
                self.on_ready(queue)

    def _deleted_there(self, queue: str) -> None:
        """A shard has it no more."""
        if not self.knows_queue(queue):
            self._on_deleted(queue)


def _best(shards: Collection[Shard]) -> list[Shard]:
    answering = [shard for shard in shards if shard.answering]
    return (
        [shard for shard in answering if not shard.ailing]
        or answering
        or [shard for shard in shards if shard.healthy]
        or [shard for shard in shards if shard.returning]
    )
