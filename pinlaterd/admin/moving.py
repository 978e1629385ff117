"""Moves scheduled jobs of one shard to others: each once, but for one case (below).

    hold       on the source: IN_PROGRESS, under a claim that only a move has and that never ends
    enqueue    on another shard, all of a batch or none, with a mark that names the old descriptor
    succeed    on the source, with a status that names the new one

A job that is held may be stored elsewhere, or not: whoever finds one looks for its mark on all
other shards, once no enqueue of a predecessor can be carried out any more, and goes on from there.
So does an enqueue of unknown outcome. One move of a shard runs at a time (`sole_move`).

A mark is lost only with what a worker may do to a job that has run meanwhile: on Redis an
acknowledgement's text replaces it, and ended jobs are deleted at the end of their time to live. A
job that was not found for this reason is stored again: it may run twice, and is never lost.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pinlaterd.admin.shard_calls import ENQUEUE_SECONDS, ShardCalls
from pinlaterd.config.files import lock
from pinlaterd.config.layout import move_lock
from pinlaterd.errors import InvalidRequest, QueueNotFound
from pinlaterd.model import (
    AckInfo,
    Job,
    JobDescriptor,
    JobRecord,
    JobState,
    PendingKey,
    is_move_claim,
)

_BATCH_JOBS = 100
# How often all shards are asked to take a batch before it stays where it is.
_ROUNDS = 3
_ROUND_SECONDS = 1.0
_FIRST = PendingKey(0, 0)
_MARK = re.compile(r"moved from ([A-Za-z0-9_]+:s[A-Za-z0-9-]{1,16}:p[0-9]{1,3}:[0-9]{1,19})")
# The order of a job's life: one that goes on while we look is met in a later state.
_STATES = (
    (JobState.PENDING, True),
    (JobState.PENDING, False),
    (JobState.IN_PROGRESS, True),
    (JobState.IN_PROGRESS, False),
    (JobState.SUCCEEDED, False),
    (JobState.SUCCEEDED, True),
    (JobState.FAILED, False),
    (JobState.FAILED, True),
)
_LOOKS = 2  # since a failed attempt makes a job PENDING again behind our back


class Kept(NamedTuple):
    """A job that no other shard takes, and why."""

    descriptor: str
    reason: str


class Shards(NamedTuple):
    """The shards that a move has to do with."""

    source: ShardCalls
    others: Callable[[], Sequence[ShardCalls]]  # all but the source
    takers: Callable[[], Sequence[ShardCalls]]  # those of them that take jobs now


class AlreadyMoving(Exception):
    """Another command moves this shard's jobs."""


@contextlib.contextmanager
def sole_move(shard: str) -> Iterator[None]:
    """Keep other moves of this shard out. The file stays if the move is cut short, to be seen in
    `status` by what is written into it. Raises AlreadyMoving."""
    path = move_lock(shard)
    with _lock(path) as file:
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        yield
        path.unlink()


def _lock(path: Path) -> BinaryIO:
    while True:
        try:
            file = lock(path, patient=False)
        except BlockingIOError:
            raise AlreadyMoving from None
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        file.close()  # whoever had it has ended and removed it


class Move:
    """Of one shard's jobs. `on_moved(count)` is called as they are."""

    def __init__(self, shards: Shards, on_moved: Callable[[int], None]) -> None:
        self._source = shards.source
        self._shards = shards
        self._on_moved = on_moved
        self._kept: dict[str, Kept] = {}

    @property
    def kept(self) -> Sequence[Kept]:
        return list(self._kept.values())

    def run(self) -> None:
        """Move all jobs that are scheduled by now, those of a move that was cut short first.

        A queue that is deleted meanwhile has no jobs to move. Raises ConnectionFailed,
        PinLaterError: then some are moved, and a repeat goes on."""
        priorities = self._source.priorities()
        for queue in self._source.queues():
            self._move_queue(queue, priorities)

    def _move_queue(self, queue: str, priorities: int) -> None:
        for rounds_left in reversed(range(_ROUNDS)):
            try:
                self._resume(queue)
                for priority in range(1, priorities + 1):
                    self._move(queue, priority)
                self._resume(queue)  # of holds whose answers were lost
            except QueueNotFound:
                # Not deleted: it was made again, or a shard has just joined.
                if not rounds_left and queue in self._source.queues():
                    raise
            else:
                return

    def _move(self, queue: str, priority: int) -> None:
        place = _FIRST
        while held := self._source.hold(queue, priority, place, _BATCH_JOBS):
            place = PendingKey(held[-1].run_after_ms, held[-1].local_id)
            prefix = f"{queue}:s{self._source.name}:p{priority}:"
            self._transfer(queue, [f"{prefix}{job.local_id}" for job in held])

    def _resume(self, queue: str) -> None:
        """Go on with what is held: by a predecessor, or by a hold of which we heard nothing."""
        held = [record.descriptor for record in self._source.held(queue)]
        if not held:
            return
        left = self._settle_stored(queue, held, self._shards.others())
        for at in range(0, len(left), _BATCH_JOBS):
            self._transfer(queue, left[at : at + _BATCH_JOBS])

    # --- one batch ----------------------------------------------------------------------------

    def _transfer(self, queue: str, held: Sequence[str]) -> None:
        """Move jobs that are held and not stored elsewhere."""
        try:
            found = self._source.look_up(held)
        except InvalidRequest as error:
            if len(held) == 1:
                for record in self._source.held(queue):
                    if record.descriptor == held[0]:
                        self._keep(record, str(error))
            else:
                self._in_halves(queue, held)
            return
        records = [record for record in found.values() if is_move_claim(record.claim_descriptor)]
        if records:
            self._store(queue, records)

    def _store(self, queue: str, records: Sequence[JobRecord]) -> None:
        jobs = [_copy(record) for record in records]
        reason = ""
        for _ in range(_ROUNDS):
            takers = list(self._shards.takers())
            for taker in random.sample(takers, len(takers)):
                result = taker.enqueue(queue, jobs)
                if result.stored is True:
                    self._succeed(queue, records, result.descriptors)
                    return
                if result.stored is None:
                    held = [record.descriptor for record in records]
                    left = self._settle_stored(queue, held, [taker])
                    if left:
                        self._transfer(queue, left)
                    return
                reason = result.reason or reason
            time.sleep(_ROUND_SECONDS)
        self._not_accepted(queue, records, reason or "no other shard takes jobs now")

    def _not_accepted(self, queue: str, records: Sequence[JobRecord], reason: str) -> None:
        """No shard takes all of them: those that can go, go."""
        if len(records) > 1 and self._shards.takers():
            self._in_halves(queue, [record.descriptor for record in records])
            return
        for record in records:
            self._keep(record, reason)

    def _keep(self, record: JobRecord, reason: str) -> None:
        self._source.release(record)
        self._kept[record.descriptor] = Kept(record.descriptor, reason)

    def _in_halves(self, queue: str, held: Sequence[str]) -> None:
        middle = len(held) // 2
        self._transfer(queue, held[:middle])
        self._transfer(queue, held[middle:])

    def _succeed(self, queue: str, held: Sequence[JobRecord], stored: Sequence[str]) -> None:
        acks = [
            AckInfo(record.descriptor, f"moved to {new}", claim_descriptor=record.claim_descriptor)
            for record, new in zip(held, stored, strict=True)
        ]
        self._source.succeed(queue, acks)
        self._on_moved(len(acks))

    # --- what is stored elsewhere already -----------------------------------------------------

    def _settle_stored(
        self, queue: str, held: Sequence[str], where: Sequence[ShardCalls]
    ) -> list[str]:
        """End those of `held` that are stored on one of the shards; returns the others.

        By the end of the wait, whatever enqueue of theirs was under way is carried out, or never
        will be: the shard that answers the search has left it behind."""
        time.sleep(ENQUEUE_SECONDS)
        stored = self._find_marks(queue, set(held), where)
        claims = {record.descriptor: record.claim_descriptor for record in self._source.held(queue)}
        acks = [
            AckInfo(old, f"moved to {new}", claim_descriptor=claims[old])
            for old, new in stored.items()
            if old in claims
        ]
        for at in range(0, len(acks), _BATCH_JOBS):
            self._source.succeed(queue, acks[at : at + _BATCH_JOBS])
        self._on_moved(len(acks))
        return [descriptor for descriptor in held if descriptor not in stored]

    def _find_marks(
        self, queue: str, wanted: set[str], where: Sequence[ShardCalls]
    ) -> dict[str, str]:
        """Of each descriptor that was stored elsewhere: its new one."""
        found: dict[str, str] = {}
        for _ in range(_LOOKS):
            for shard in where:
                for state, future in _STATES:
                    if len(found) == len(wanted):
                        return found
                    for record in shard.scan(queue, state, future=future):
                        for old in _MARK.findall(record.custom_status):
                            if old in wanted:
                                found[old] = record.descriptor
        return found


def _copy(record: JobRecord) -> Job:
    """The job as it goes on elsewhere: as many attempts as it has left, and where it comes from."""
    assert record.body is not None
    place = JobDescriptor.parse(record.descriptor)
    assert place is not None
    left, allowed = max(1, record.attempts_remaining), record.attempts_allowed
    attempts = f" ({left} of {allowed} attempts left)" if left != allowed else ""
    before = f"; {record.custom_status}" if record.custom_status else ""
    mark = f"moved from {record.descriptor}{attempts}"
    return Job(record.body, place.priority, record.run_after_ms, left, mark + before)
