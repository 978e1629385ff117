"""Running a Worker in a thread of the test, and looking at what became of jobs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil

from pinlaterd.client import (
    CheckpointInfo,
    Client,
    Handlers,
    JobRecord,
    JobState,
    RunningJob,
    Worker,
)

WORKER_END_SECONDS = 120.0


@contextmanager
def running(worker: Worker) -> Iterator[threading.Thread]:
    """The worker at work; stopped at the end, when it has to end by itself."""
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        worker.stop()
        thread.join(WORKER_END_SECONDS)
    assert not thread.is_alive(), "the worker does not end"


def handlers_of(queue: str, function: Callable[[RunningJob], object], **options) -> Handlers:
    handlers = Handlers()
    handlers.queue(queue, **options)(function)
    return handlers


def of_kind(kind: str, function: Callable[[RunningJob], object]) -> Callable[[RunningJob], object]:
    """The function as a handler that runs in "threads" or, as a coroutine function, in "tasks"."""

    async def handle(job: RunningJob) -> object:
        return function(job)

    return function if kind == "threads" else handle


def records_of(client: Client, descriptors: Sequence[str]) -> list[JobRecord]:
    """All that is known of these jobs, in their order."""
    found = client.lookup(descriptors, include_body=True)
    return [found[descriptor] for descriptor in descriptors]


def books(client: Client, descriptors: Sequence[str]) -> Counter[tuple[str, int]]:
    """How many of these jobs there are by state and attempts remaining."""
    records = records_of(client, descriptors)
    return Counter((record.state.name, record.attempts_remaining) for record in records)


def have_ended(client: Client, descriptors: Sequence[str]) -> bool:
    states = {record.state for record in records_of(client, descriptors)}
    return states <= {JobState.SUCCEEDED, JobState.FAILED}


def take_away(client: Client, job: RunningJob) -> None:
    """As another hand does while it runs: it is PENDING again."""
    back = CheckpointInfo(
        job.descriptor, move_to_pending=True, claim_descriptor=job.claim_descriptor
    )
    client.checkpoint(job.queue, [back])


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has reaped yet has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
