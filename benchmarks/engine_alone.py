"""The storage engine alone, called in process with the same batches as the service's shards.

One process for each shard. Only the time within a step (one `apply`; a full cycle has two) counts,
so that making the next batch, which is the shard's work, does not make the engine look slower than
it is. The same steps can be done with PinLater's statements instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Literal

from benchmarks import frames
from benchmarks.load import Window, percentile
from benchmarks.pinlater_statements import PinLaterShard
from pinlaterd.config.schema import ServerSettings, ShardSettings
from pinlaterd.engines.base import AckOp, Acks, Batch, ClaimOp, Claims, EnqueueOp, StorageEngine
from pinlaterd.engines.registry import make_engine
from pinlaterd.model import Job, Payload, PendingKey

QUEUE = "bench"
FILL_JOBS = 500

Work = Literal["enqueue", "dequeue", "dequeue from memory", "full cycle"]
Step = tuple[Callable[[], object], int]
"""What is timed, and how many jobs it does."""


@dataclass(frozen=True)
class EngineLoad:
    """What one process does with one store."""

    shard: ShardSettings
    work: Work
    jobs_per_batch: int
    stored_jobs: int = 0  # before the clock starts
    pinlater: bool = False  # with PinLater's statements, not with the engine


@dataclass(frozen=True)
class EngineOutcome:
    batches: int
    jobs: int
    apply_seconds: float
    cpu_seconds: float
    p50_ms: float
    p99_ms: float
    durability: str

    @property
    def batches_per_second(self) -> float:
        return self.batches / self.apply_seconds if self.apply_seconds else 0.0

    @property
    def jobs_per_second(self) -> float:
        return self.jobs / self.apply_seconds if self.apply_seconds else 0.0


def measure(loads: list[EngineLoad], seconds: float, warm_up_seconds: float) -> list[EngineOutcome]:
    """All at the same time, each in a process of its own."""
    context = get_context("spawn")
    pipes = []
    for load in loads:
        ours, theirs = context.Pipe()
        context.Process(target=_main, args=(load, theirs), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()  # it has stored what it needs
    window = Window.soon(seconds, warm_up_seconds)
    for pipe in pipes:
        pipe.send(window)
    return [pipe.recv() for pipe in pipes]


def _main(load: EngineLoad, pipe: Connection) -> None:
    with _pinlater(load) if load.pinlater else _engine(load) as (steps, durability):
        pipe.send(None)
        pipe.send(_time(steps, durability, pipe.recv()))


def _time(steps: Iterator[Step], durability: str, window: Window) -> EngineOutcome:
    time.sleep(max(0.0, window.begin - time.monotonic()))
    durations: list[float] = []
    jobs = 0
    cpu_seconds = 0.0
    for do, size in steps:
        began, cpu_began = time.monotonic(), time.process_time()
        if began >= window.until:
            break
        do()
        if began >= window.measure_from:
            durations.append(time.monotonic() - began)
            cpu_seconds += time.process_time() - cpu_began
            jobs += size
    return EngineOutcome(
        batches=len(durations),
        jobs=jobs,
        apply_seconds=sum(durations),
        cpu_seconds=cpu_seconds,
        p50_ms=percentile(durations, 50) * 1000.0,
        p99_ms=percentile(durations, 99) * 1000.0,
        durability=durability,
    )


# --- the engine ---------------------------------------------------------------------------


@contextmanager
def _engine(load: EngineLoad) -> Iterator[tuple[Iterator[Step], str]]:
    engine = make_engine(load.shard, ServerSettings())
    engine.open(_now_ms())
    try:
        engine.create_queue(QUEUE, _now_ms())
        yield _engine_steps(engine, load), engine.durability().setting
    finally:
        engine.close()


def _engine_steps(engine: StorageEngine, load: EngineLoad) -> Iterator[Step]:
    if load.work == "full cycle":
        return _cycles(engine, load)
    if load.work == "enqueue":
        batches = _enqueues(load)
    else:
        keys = _fill(engine, load.stored_jobs)
        batches = _claims(keys, load, from_memory=load.work == "dequeue from memory")
    return ((partial(_apply, engine, batch), size) for batch, size in batches)


def _apply(engine: StorageEngine, batch: Batch) -> None:
    engine.apply(batch, _now_ms())


def _cycles(engine: StorageEngine, load: EngineLoad) -> Iterator[Step]:
    """Enqueue, then claim with the acks of those before; what is fresh is in memory."""
    enqueue = Batch(enqueues=[EnqueueOp(QUEUE, [Job(frames.body())] * load.jobs_per_batch)])
    payload = Payload(frames.body(), 2, 2)
    acks: list[Acks] = []

    def cycle() -> None:
        now_ms = _now_ms()
        ids = engine.apply(enqueue, now_ms).enqueues[0]
        keys = [PendingKey(now_ms, local_id) for local_id in ids]
        claim = f"localhost:9010:1700000000000:bench:load:{ids[0]}"
        claims = Claims(1, keys, [claim] * len(keys), [payload] * len(keys))
        engine.apply(
            Batch(acks=[AckOp(QUEUE, acks, ())], claims=[ClaimOp(QUEUE, [claims])]), now_ms
        )
        acks[:] = [Acks(1, ids)]

    while True:
        yield cycle, load.jobs_per_batch


def _enqueues(load: EngineLoad) -> Iterator[tuple[Batch, int]]:
    job = Job(frames.body())
    batch = Batch(enqueues=[EnqueueOp(QUEUE, [job] * load.jobs_per_batch)])
    while True:
        yield batch, load.jobs_per_batch


def _fill(engine: StorageEngine, jobs: int) -> list[PendingKey]:
    """Store so many jobs; returns their keys, in order."""
    keys: list[PendingKey] = []
    batch = Batch(enqueues=[EnqueueOp(QUEUE, [Job(frames.body())] * FILL_JOBS)])
    while len(keys) < jobs:
        now_ms = _now_ms()
        for local_id in engine.apply(batch, now_ms).enqueues[0]:
            keys.append(PendingKey(now_ms, local_id))  # noqa: PERF401  (reads better in order)
    return keys


def _claims(
    keys: list[PendingKey], load: EngineLoad, *, from_memory: bool
) -> Iterator[tuple[Batch, int]]:
    """Claims of the next jobs with acks of those before, until none are left."""
    payload = Payload(frames.body(), 2, 2) if from_memory else None
    acks: list[Acks] = []
    for at in range(0, len(keys), load.jobs_per_batch):
        part = keys[at : at + load.jobs_per_batch]
        claim = f"localhost:9010:1700000000000:bench:load:{at}"
        claims = Claims(1, part, [claim] * len(part), [payload] * len(part))
        yield Batch(acks=[AckOp(QUEUE, acks, ())], claims=[ClaimOp(QUEUE, [claims])]), len(part)
        acks = [Acks(1, [key.local_id for key in part])]


# --- PinLater's statements ----------------------------------------------------------------


@contextmanager
def _pinlater(load: EngineLoad) -> Iterator[tuple[Iterator[Step], str]]:
    shard = PinLaterShard(load.shard)
    try:
        shard.fill(load.stored_jobs)
        yield _pinlater_steps(shard, load), "the same"
    finally:
        shard.close()


def _pinlater_steps(shard: PinLaterShard, load: EngineLoad) -> Iterator[Step]:
    size = load.jobs_per_batch

    def dequeue() -> None:
        local_ids = shard.claim(size)
        shard.ack(local_ids)

    def cycle() -> None:
        shard.enqueue(size)
        dequeue()

    steps: dict[Work, Callable[[], object]] = {
        "enqueue": partial(shard.enqueue, size),
        "dequeue": dequeue,
        "full cycle": cycle,
    }
    while True:
        yield steps[load.work], size


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
