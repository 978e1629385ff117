"""The storage engine alone, called in process with the same batches as the service's shards.

One process for each shard. Only the time within a step (one `apply`; a full cycle has two) counts,
so that making the next batch, which is the shard's work, does not make the engine look slower than
it is. The same steps can be done with PinLater's statements instead.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Literal

from benchmarks import frames
from benchmarks.load import Outcome, Window
from benchmarks.pinlater_statements import PinLaterShard
from pinlaterd.config.schema import ServerSettings, ShardSettings
from pinlaterd.engines import make_engine
from pinlaterd.engines.base import (
    AckOp,
    Acks,
    Batch,
    ClaimOp,
    Claims,
    EnqueueOp,
    EnqueueWithOptionsOp,
    StorageEngine,
)
from pinlaterd.model import AlikeJobs, Job, JobOptions, Payload, PendingKey

QUEUE = "bench"
FILL_JOBS = 500

Work = Literal["enqueue", "enqueue with keys", "dequeue", "dequeue from memory", "full cycle"]
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


def measure(
    loads: list[EngineLoad], seconds: float, warm_up_seconds: float
) -> list[tuple[Outcome, str]]:
    """All at the same time, each in a process of its own: what it did, and with which durability.
    The seconds are those within steps."""
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
        pipe.send((_time(steps, pipe.recv()), durability))


def _time(steps: Iterator[Step], window: Window) -> Outcome:
    time.sleep(max(0.0, window.begin - time.monotonic()))
    outcome = Outcome()
    for do, size in steps:
        began, cpu_began = time.monotonic(), time.process_time()
        if began >= window.until:
            break
        do()
        if began >= window.measure_from:
            seconds = time.monotonic() - began
            outcome.latencies.append(seconds)
            outcome.seconds += seconds
            outcome.cpu_seconds += time.process_time() - cpu_began
            outcome.calls += 1
            outcome.jobs += size
    return outcome


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
    """What they need is stored when this returns."""
    size = load.jobs_per_batch
    if load.work == "full cycle":
        return _cycles(engine, size)
    batches: Iterator[Batch] = repeat(_enqueue(size))
    if load.work == "enqueue with keys":
        for _ in range(0, load.stored_jobs, FILL_JOBS):
            _apply(engine, _enqueue_keyed(FILL_JOBS))
        batches = (_enqueue_keyed(size) for _ in repeat(None))
    elif load.work != "enqueue":
        keys: list[PendingKey] = []
        while len(keys) < load.stored_jobs:
            keys += _stored(engine, _enqueue(FILL_JOBS))
        payload = None if load.work == "dequeue" else Payload(frames.body(), 2, 2)
        batches = _claims(keys, size, payload)
    return ((partial(_apply, engine, batch), size) for batch in batches)


def _apply(engine: StorageEngine, batch: Batch) -> None:
    engine.apply(batch, _now_ms())


def _claims(keys: list[PendingKey], size: int, payload: Payload | None) -> Iterator[Batch]:
    """Of the next jobs, with acks of those before, until none are left."""
    acks: list[Acks] = []
    for at in range(0, len(keys), size):
        part = keys[at : at + size]
        yield _claim(part, acks, payload)
        acks = [Acks(1, [key.local_id for key in part])]


def _cycles(engine: StorageEngine, size: int) -> Iterator[Step]:
    """Enqueue, then claim with the acks of those before; what is fresh is in memory."""
    enqueue, payload = _enqueue(size), Payload(frames.body(), 2, 2)
    acks: list[Acks] = []

    def cycle() -> None:
        keys = _stored(engine, enqueue)
        engine.apply(_claim(keys, acks, payload), _now_ms())
        acks[:] = [Acks(1, [key.local_id for key in keys])]

    while True:
        yield cycle, size


def _enqueue(jobs: int) -> Batch:
    return Batch(enqueues=[EnqueueOp(QUEUE, AlikeJobs(Job(b""), [frames.body()] * jobs))])


def _enqueue_keyed(jobs: int) -> Batch:
    keys = [str(uuid.uuid4()) for _ in range(jobs)]
    keyed = AlikeJobs(Job(b"", options=JobOptions()), [frames.body()] * jobs, keys)
    return Batch(with_options=[EnqueueWithOptionsOp(QUEUE, keyed)])


def _stored(engine: StorageEngine, enqueue: Batch) -> list[PendingKey]:
    now_ms = _now_ms()
    return [PendingKey(now_ms, local_id) for local_id in engine.apply(enqueue, now_ms).enqueues[0]]


def _claim(keys: list[PendingKey], acks: list[Acks], payload: Payload | None) -> Batch:
    """Of these jobs, with acks of those before. Without `payload` bodies come from the store."""
    local_ids, claimer = [key.local_id for key in keys], "localhost:9010:1700000000000:bench:load:"
    claims = Claims(1, local_ids, [payload] * len(keys), claimer, local_ids[0])
    return Batch(acks=[AckOp(QUEUE, acks, ())], claims=[ClaimOp(QUEUE, [claims])])


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
