"""Moves scheduled jobs of one shard to others, at least once.

    enqueue    on another shard, with a status that names the old descriptor
    ack        on the source, with a status that names the new one, unless it is due there by then

In this order no job is lost wherever a move is cut short; one may be left in both places. An
enqueue of unknown outcome is made again.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from pinlaterd.admin.shard_calls import ShardCalls
from pinlaterd.errors import InvalidRequest, QueueNotFound
from pinlaterd.model import AckInfo, Job, JobDescriptor, JobRecord, JobState

# What is due so soon runs where it is: the ack on the source has to come before that.
_SOON_SECONDS = 10.0
_BATCH_JOBS = 100
# How often all shards are asked to take a batch before it stays where it is.
_ROUNDS = 3
_ROUND_SECONDS = 1.0


class Kept(NamedTuple):
    """A job that no other shard takes, and why."""

    descriptor: str
    reason: str


class Move:
    """Of the jobs of `source`. `takers` tells the shards that take jobs at present;
    `on_moved(count)` is called as jobs are moved."""

    def __init__(
        self,
        source: ShardCalls,
        takers: Callable[[], Sequence[ShardCalls]],
        on_moved: Callable[[int], None],
    ) -> None:
        self._source = source
        self._takers = takers
        self._on_moved = on_moved
        self.kept: list[Kept] = []

    def run(self) -> None:
        """Move all jobs that are scheduled by now.

        Raises ConnectionFailed, PinLaterError: then some are moved, and a repeat goes on."""
        for queue in self._source.queues():
            found = self._source.scan(queue, JobState.PENDING, future=True)
            with contextlib.suppress(QueueNotFound):  # deleted meanwhile, with its jobs
                while batch := list(islice(found, _BATCH_JOBS)):
                    self._move(queue, [record.descriptor for record in batch])

    def _move(self, queue: str, descriptors: Sequence[str]) -> None:
        try:
            found = self._source.look_up(descriptors)
        except InvalidRequest as error:  # their bodies are too much for one answer
            self._keep_or_halve(queue, descriptors, str(error))
            return
        records = [record for record in found.values() if _is_scheduled(record)]
        if not records:
            return
        stored, reason = self._store(queue, [_copy(record) for record in records])
        if not stored:
            left = [record.descriptor for record in records]
            self._keep_or_halve(queue, left, reason or "no other shard takes jobs now")
            return
        self._source.ack_scheduled(
            queue,
            [
                AckInfo(record.descriptor, f"moved to {new}")
                for record, new in zip(records, stored, strict=True)
            ],
        )
        self._on_moved(len(records))

    def _store(self, queue: str, jobs: Sequence[Job]) -> tuple[Sequence[str], str]:
        """On one shard, all of them or none: their descriptors, or why none takes them."""
        reason = ""
        for _ in range(_ROUNDS):
            takers = list(self._takers())
            for taker in random.sample(takers, len(takers)):
                result = taker.enqueue(queue, jobs)
                if result.descriptors:
                    return result.descriptors, ""
                reason = result.reason or reason
            time.sleep(_ROUND_SECONDS)
        return (), reason

    def _keep_or_halve(self, queue: str, descriptors: Sequence[str], reason: str) -> None:
        """Not all of them can go together: those that can go alone, go."""
        if len(descriptors) > 1 and self._takers():
            middle = len(descriptors) // 2
            self._move(queue, descriptors[:middle])
            self._move(queue, descriptors[middle:])
        else:
            self.kept += [Kept(descriptor, reason) for descriptor in descriptors]


def _is_scheduled(record: JobRecord) -> bool:
    soon_ms = (time.time() + _SOON_SECONDS) * 1000
    return record.state is JobState.PENDING and record.run_after_ms > soon_ms


def _copy(record: JobRecord) -> Job:
    """The job as it goes on elsewhere: as many attempts as it has left, and where it comes from."""
    assert record.body is not None
    place = JobDescriptor.parse(record.descriptor)
    assert place is not None
    left, allowed = max(1, record.attempts_remaining), record.attempts_allowed
    attempts = f" ({left} of {allowed} attempts left)" if left != allowed else ""
    before = f"; {record.custom_status}" if record.custom_status else ""
    origin = f"moved from {record.descriptor}{attempts}"
    return Job(record.body, place.priority, record.run_after_ms, left, origin + before)
