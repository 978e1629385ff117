"""A store on virtual time: the model engine, which a crash leaves as committed.

`Disk` is what outlives processes: jobs, ids, the owner. `ModelStore` is one process's engine on
it. A commit takes time, in which its process may be killed before or after the jobs are on the
disk; and the disk's faults may have it fail, beyond doubt or so that nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pinlaterd.engines.base import (
    SINGLE,
    Batch,
    BatchResult,
    Durability,
    Finding,
    Limits,
    Requeued,
    SearcherFactory,
    TableLimits,
    Term,
    first_local_id,
)
from pinlaterd.errors import ShardOwned, StorageError, StorageNotCommitted
from pinlaterd.model import JobKey
from tests.engines.model import ModelEngine, Row
from tests.simulation.world import Process

LIMITS = Limits(
    queue_name_chars=64, body_bytes=1 << 20, run_after_ms=1 << 62, custom_status_chars=80
)
_OPEN_SECONDS = 0.01


class Fault(Enum):
    """What may become of a commit."""

    NONE = "none"
    REFUSED = "not committed"
    LOST_BEFORE = "fails before the commit; the outcome is unknown"
    LOST_AFTER = "fails after the commit; the outcome is unknown"


@dataclass
class Disk:
    """What a shard's store holds, whichever process owns it. `jobs`: by queue, then key."""

    draw_fault: Callable[[], Fault]
    commit_seconds: Callable[[], float]
    jobs: dict[str, dict[JobKey, Row]] = field(default_factory=dict)
    next_ids: dict[tuple[str, int], int] = field(default_factory=dict)
    owner: ModelStore | None = None
    start_ms: int = 0
    first_id: int = 1
    fence: int = 0


class ModelStore(ModelEngine):
    """Fulfils `StorageEngine`, for one process."""

    failure = ""
    damage = ""

    def __init__(self, disk: Disk, process: Callable[[], Process]) -> None:
        super().__init__(LIMITS, disk.jobs)
        self._disk = disk
        self._process = process

    # --- ownership -----------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._process().alive

    def open(self, now_ms: int, _term: Term = SINGLE) -> int:
        disk = self._disk
        if disk.owner is not None and disk.owner is not self and disk.owner.alive:
            raise ShardOwned("another process owns the store")
        self._process().block(_OPEN_SECONDS)
        disk.owner = self
        disk.start_ms = max(now_ms, disk.start_ms + 1)
        disk.first_id = max(disk.first_id, first_local_id(now_ms))
        return disk.start_ms

    def close(self) -> None:
        if self._disk.owner is self:
            self._disk.owner = None

    def heartbeat(self) -> None: ...

    def try_enqueue(self, queue: str) -> None: ...

    def address(self) -> str:
        return ""

    def durability(self) -> Durability:
        return Durability("as the simulation says")

    @property
    def fence(self) -> int:  # type: ignore[override]
        return self._disk.fence

    def raise_fence(self, number: int) -> None:
        self._disk.fence = max(self._disk.fence, number)

    # --- commits -------------------------------------------------------------------------------

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        process, fault = self._process(), self._disk.draw_fault()
        seconds = self._disk.commit_seconds()
        part = seconds * process.world.rng.random()
        process.block(part)
        if fault is Fault.REFUSED:
            raise StorageNotCommitted("the simulation refuses this commit")
        if fault is Fault.LOST_BEFORE:
            raise StorageError("the simulation cuts the connection")
        result = super().apply(batch, now_ms)
        process.block(seconds - part)
        if fault is Fault.LOST_AFTER:
            raise StorageError("the simulation cuts the connection")
        return result

    def new_id(self, queue: str, priority: int) -> int:
        disk, place = self._disk, (queue, priority)
        local_id = max(disk.next_ids.get(place, 1), disk.first_id)
        disk.next_ids[place] = local_id + 1
        return local_id

    def retry_failed(self, queue: str, priority: int, **options: Any) -> Sequence[Requeued]:
        self._process().block(self._disk.commit_seconds())
        return super().retry_failed(queue, priority, **options)

    def retry_found(self, *arguments: Any, **options: Any) -> Sequence[Requeued]:
        self._process().block(self._disk.commit_seconds())
        return super().retry_found(*arguments, **options)

    def delete_jobs(self, *arguments: Any, **options: Any) -> Sequence[JobKey]:
        self._process().block(self._disk.commit_seconds())
        return super().delete_jobs(*arguments, **options)

    # --- nothing to be done --------------------------------------------------------------------

    def narrower(self, queue: str) -> Mapping[int, TableLimits]:
        return {}

    def suspects(self) -> Collection[str]:
        return ()

    def recount(self, queue: str) -> None: ...

    def check(self, *, repair: bool) -> Sequence[Finding]:
        return ()

    def vacuum(self, *, limit: int) -> bool:
        return False

    def searcher(self) -> SearcherFactory:
        raise NotImplementedError("the simulation makes no searches: they run in a process")
