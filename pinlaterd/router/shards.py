"""The shards that a router knows: who they are, who is healthy, what queues there are; and the
choice among them, by pure functions.

Relies on `wire` (a link to each shard) and follows the coordinator's snapshots.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from random import Random
from typing import NamedTuple, TypeVar

from pinlaterd.errors import ShardConnectionFailed
from pinlaterd.wire.control import Snapshot
from pinlaterd.wire.envelope import (
    GiveUp,
    Op,
    ReadyCounts,
    ReplyEntry,
    ShardCall,
    ShardFacts,
    Status,
)
from pinlaterd.wire.key_placement import KeyHomes, KeyPlacement
from pinlaterd.wire.link import LinkListener, ShardLink

log = logging.getLogger(__name__)

_ENSURE_QUEUES_SECONDS = 30.0
_CREATE_AGAIN_SECONDS = 1.0
_KEYS_AGAIN_SECONDS = 0.02
_REMOVAL_SECONDS = 2.0  # for the calls that a removed shard has in flight


S = TypeVar("S")
Connect = Callable[[str, str, LinkListener], ShardLink]  # with its name and endpoint


class ShardSet:
    """The shards of the deployment, as links come and go. A LinkListener to each."""

    def __init__(
        self,
        connect: Connect,
        monotonic: Callable[[], float],
        on_deleted: Callable[[str], None],
    ) -> None:
        """`on_deleted(queue)` is called when no shard has the queue any more."""
        self._connect = connect
        self._monotonic = monotonic
        # Called with a queue of `awaited` when a shard publishes that jobs of it can be had.
        self.on_ready: Callable[[str], None] = lambda _queue: None
        self.awaited: Container[str] = ()
        self._on_deleted = on_deleted
        self.by_name: dict[str, ShardLink] = {}
        self._enqueueable: list[ShardLink] = []
        # Of all, and of the enqueueable ones: those that are preferred by now.
        self._all_preferred: list[ShardLink] = []
        self._enqueueable_preferred: list[ShardLink] = []
        self._queues: dict[str, set[str]] = {}  # by shard name, of those that are welcomed
        self._membership = ("", "")
        self.homes = KeyHomes(KeyPlacement())  # of keys, under the placement that is followed

    # --- what there is -------------------------------------------------------------------

    def healthy(self) -> list[ShardLink]:
        return [shard for shard in self.by_name.values() if shard.healthy]

    def present(self) -> list[ShardLink]:
        """Return the healthy shards, or, if there are none, those that are expected back."""
        return self.healthy() or [shard for shard in self.by_name.values() if shard.returning]

    def preferred(self) -> list[ShardLink]:
        """Return the shards to ask for jobs: those that answer and whose stores do well; if there
        are none, any that answer, are healthy, or at last are expected back."""
        return self._all_preferred or _best(self.by_name.values())

    def unhealthy(self) -> list[str]:
        return [name for name, shard in self.by_name.items() if not shard.healthy]

    def down(self) -> list[str]:
        """Name the shards that are neither healthy nor expected back."""
        return [
            name for name, shard in self.by_name.items() if not (shard.healthy or shard.returning)
        ]

    def enqueueable(self) -> list[ShardLink]:
        """Return the shards to enqueue into."""
        return self._enqueueable_preferred or _best(self._enqueueable)

    def ready_jobs(self, queue: str) -> int:
        """Count the ready jobs of shards to ask for jobs: those of others wake no dequeue. A shard
        that has not counted the queue yet counts as one: a call makes it count."""
        ready = 0
        for shard in self.preferred():
            counts = shard.ready_counts(queue)
            uncounted = not counts and shard.healthy and queue in self._queues.get(shard.name, ())
            ready += sum(counts) or uncounted
        return ready

    def longest_queue_name(self) -> int:
        """Return how many characters a queue's name may have, by the store that allows least."""
        known = [shard.facts for shard in self.by_name.values() if shard.facts is not None]
        return min((facts.queue_name_chars for facts in known), default=64)

    def knows_queue(self, queue: str) -> bool:
        return any(queue in queues for queues in self._queues.values())

    def most_queues(self) -> int:
        """Return the most queues that a shard has; each is given those of the others."""
        return max((len(queues) for queues in self._queues.values()), default=0)

    async def try_keys_again(self, deadline: float, shards: Iterable[str]) -> None:
        """Wait until keys that met another placement on `shards` may be sent again. Raises
        ShardConnectionFailed once it is too late."""
        if self._monotonic() + _KEYS_AGAIN_SECONDS >= deadline:
            reason = "follows another placement of keys than this router; nothing was done there"
            raise ShardConnectionFailed(list(shards), reason)
        await asyncio.sleep(_KEYS_AGAIN_SECONDS)

    def follow(self, snapshot: Snapshot) -> None:
        """Connect to shards that are new, let go of those that are no more, and follow those that
        have another owner."""
        self._membership = (snapshot.server, snapshot.member)
        wanted = {entry.name: entry for entry in snapshot.shards if not entry.joining}
        for name in [name for name in self.by_name if name not in wanted]:
            self._queues.pop(name, None)
            # Calls that it has in flight may still be answered.
            removed = self.by_name.pop(name)
            asyncio.get_running_loop().call_later(_REMOVAL_SECONDS, removed.close)
        for name, entry in wanted.items():
            endpoint = snapshot.endpoint_of(entry)
            if name not in self.by_name:
                self.by_name[name] = self._connect(name, endpoint, self)
            elif endpoint:
                self.by_name[name].move_to(endpoint)
        self._enqueueable = [
            shard for name, shard in self.by_name.items() if not wanted[name].dequeue_only
        ]
        if snapshot.keys.number > self.homes.placement.number:
            self.homes = KeyHomes(snapshot.keys)
        self.assessed()

    def close(self) -> None:
        for shard in self.by_name.values():
            shard.close()
        self.by_name.clear()
        self._enqueueable.clear()
        self.assessed()

    # --- what links hear (LinkListener) ---------------------------------------------------

    def queues_known(self) -> frozenset[str]:
        """Return the queues that a healthy shard has, or had a moment ago: while shards are
        restarted one after the other, the last that has one may be away when the next joins.

        deleteQueue needs all shards healthy, so no shard that is away has missed it."""
        names = [
            queues
            for name, queues in self._queues.items()
            if (shard := self.by_name.get(name)) and (shard.healthy or shard.returning)
        ]
        return frozenset().union(*names)

    def membership(self) -> tuple[str, str]:
        return self._membership

    def welcomed(self, link: ShardLink, facts: ShardFacts) -> None:
        """Welcome a shard that joined: it gets what we know by now, the others what only it has."""
        if self.by_name.get(link.name) is not link:
            return
        before = self._queues.get(link.name, set())
        self._queues[link.name] = set(facts.queues)
        for queue in before.difference(facts.queues):
            self._deleted_there(queue)
        for shard in self.healthy():
            self._create_missing(shard)
        empty = {queue for queue, numbers in facts.counts if not any(numbers)}
        for queue in facts.queues:
            if queue not in empty and queue in self.awaited:
                self.on_ready(queue)

    def _create_missing(self, shard: ShardLink) -> None:
        """Have the shard create the queues that only others have."""
        if self.by_name.get(shard.name) is not shard or not shard.healthy:
            return  # its successor will be welcomed
        missing = self.queues_known() - self._queues.get(shard.name, set())
        if not missing:
            return

        def replied(_call: ShardCall, _shard: ShardLink, reply: ReplyEntry) -> None:
            if reply.status is not Status.DONE:
                log.warning("shard-%s did not create %d queues", shard.name, len(missing))
                loop = asyncio.get_running_loop()
                loop.call_later(_CREATE_AGAIN_SECONDS, self._create_missing, shard)

        log.info("shard-%s lacks %d queues; creating them there", shard.name, len(missing))
        call = ShardCall(
            json.dumps(sorted(missing)).encode(),
            self._monotonic() + _ENSURE_QUEUES_SECONDS,
            Op.ENSURE_QUEUES,
            patient=False,
            give_up=GiveUp.NEVER,
        )
        # Ahead of any call that follows on the same link, so no call misses a queue.
        shard.call(call, replied)

    def assessed(self) -> None:
        self._all_preferred = [shard for shard in self.by_name.values() if shard.preferred]
        self._enqueueable_preferred = [shard for shard in self._enqueueable if shard.preferred]

    def others_can_serve(self, link: ShardLink) -> bool:
        return any(shard.answering for shard in self.by_name.values() if shard is not link)

    def counted(self, link: ShardLink, counts: Iterable[ReadyCounts]) -> None:
        if self.by_name.get(link.name) is not link:
            return
        queues = self._queues.setdefault(link.name, set())
        for queue, numbers in counts:
            if not numbers:
                queues.discard(queue)
                self._deleted_there(queue)
                continue
            queues.add(queue)
            if queue in self.awaited and any(numbers):
                self.on_ready(queue)

    def _deleted_there(self, queue: str) -> None:
        """Note that a shard has a queue no more."""
        if not self.knows_queue(queue):
            self._on_deleted(queue)


def _best(shards: Collection[ShardLink]) -> list[ShardLink]:
    """Choose those that answer; else the healthy ones; else those that are expected back."""
    return (
        [shard for shard in shards if shard.answering]
        or [shard for shard in shards if shard.healthy]
        or [shard for shard in shards if shard.returning]
    )


# --- choosing -------------------------------------------------------------------------------


def less_loaded(shards: Sequence[ShardLink], rng: Random) -> ShardLink:
    """Choose the better of two random shards, by calls in flight.

    Power of two choices (Mitzenmacher, 2001): nearly as even as asking all, without the herd that
    runs to the emptiest.
    """
    count = len(shards)
    if count == 1:
        return shards[0]
    first = int(rng.random() * count)
    second = int(rng.random() * (count - 1))
    if second >= first:
        second += 1
    one, other = shards[first], shards[second]
    return one if one.calls_in_flight <= other.calls_in_flight else other


def cover(shards: Sequence[S], coverage: float, rng: Random) -> list[S]:
    """Choose max(1, round(coverage x shards)) of them, of which a random one is the first."""
    count = len(shards)
    if coverage < 1:
        return rng.sample(shards, max(1, round(coverage * count)))
    at = int(rng.random() * count)
    return [*shards[at:], *shards[:at]]


ALL_LEVELS = 1 << 16  # more priorities than there can be


def best_level(counts: Sequence[int]) -> int:
    """Count the priorities, from the highest, that hold nothing ready."""
    for level, count in enumerate(counts):
        if count:
            return level
    return ALL_LEVELS


def ready_through(counts: Sequence[int], level: int) -> int:
    """Count the jobs ready at priorities 1 to `level`."""
    return sum(counts[:level])


class Portion(NamedTuple):
    """The number of jobs to ask of the shard at `place`; 0 asks only what it holds."""

    place: int
    jobs: int


def plan_round(ready: Sequence[int], wanted: int) -> list[Portion]:
    """Plan how to ask for `wanted` jobs of a level, given how many each shard may hold.

    One shard is asked for all if its hint says that it has as many; else the portions follow the
    hints. Where no hint says anything, all are asked what they hold: those answers are the hints
    of the next round, and if they all are zero, its end. Together never more than `wanted` are
    asked for, so that nothing is claimed in vain.
    """
    enough = [index for index, count in enumerate(ready) if count >= wanted]
    if enough:
        return [Portion(enough[0], wanted)]
    portions = []
    remaining = wanted
    for index, count in enumerate(ready):
        jobs = min(count, remaining)
        remaining -= jobs
        portions.append(Portion(index, jobs))
    return portions
