"""The clients, their models and the Worker as a user's program calls them, for type checkers alone.

Nothing here runs: `mypy` reads it as it reads any program that imports `pinlaterd.client`. A
parameter that loses its type, or a result that becomes Any, is an error of the `types` step.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator, Sequence
from typing import assert_type

from pinlaterd.client import (
    AckInfo,
    AsyncClient,
    CheckpointInfo,
    ClaimedJob,
    Client,
    Ending,
    Handlers,
    Job,
    JobRecord,
    JobState,
    Later,
    Outcome,
    QueueFigures,
    RunningJob,
    Worker,
    constant,
    exponential,
    never,
)
from pinlaterd.client.metrics import WorkerMetrics


def make_clients() -> None:
    assert_type(Client(), Client)
    Client(("queue1.example.com",), 9010, max_connections=4, ssl=ssl.create_default_context())
    with Client() as client:
        assert_type(client, Client)
        assert_type(client.address, str)
    Client(9010)  # type: ignore[arg-type]
    Client("queue.example.com", ssl=True)  # type: ignore[arg-type]


def keep_queues(client: Client) -> None:
    client.create_queue("mail")
    client.delete_queue("mail", password="open sesame")
    assert_type(client.queue_names(), frozenset[str])
    client.delete_queue("mail")  # type: ignore[call-arg]


def enqueue(client: Client) -> None:
    later = Job(b"later", priority=2, attempts_allowed=5, run_after_ms=1_900_000_000_000)
    assert_type(client.enqueue("mail", [b"now", later]), list[str])
    assert_type(client.enqueue("mail", (b"%d" % n for n in range(3))), list[str])
    client.enqueue("mail", ["no bytes"])  # type: ignore[list-item]


def work(client: Client) -> None:
    claimed = client.dequeue("mail", limit=10, max_wait_ms=5000)
    assert_type(claimed, list[ClaimedJob])
    for job in claimed:
        assert_type(job.body, bytes)
        assert_type(job.descriptor, str)
        assert_type(job.claim_descriptor, str)
        assert_type(job.attempts_remaining, int)
        client.checkpoint("mail", [CheckpointInfo(job.descriptor, new_body=job.body + b"!")])
        again = AckInfo(
            job.descriptor,
            append_custom_status="no such address",
            retry_delay_ms=60_000,
            claim_descriptor=job.claim_descriptor,
        )
        client.ack("mail", succeeded=[], failed=[again])
    client.dequeue("mail", limit=1, succeeded=claimed, coverage=0.5, dry_run=False)
    client.ack("mail", claimed)  # type: ignore[call-arg]


def look(client: Client, descriptor: str) -> None:
    records = client.lookup([descriptor], include_body=True)
    assert_type(records, dict[str, JobRecord])
    assert_type(records[descriptor].state, JobState)
    assert_type(records[descriptor].body, bytes | None)
    assert_type(records[descriptor].custom_status, str)
    assert_type(client.count("mail", JobState.PENDING, future=True), int)
    assert_type(client.scan("mail", JobState.FAILED), Iterator[JobRecord])
    client.count("mail", "PENDING")  # type: ignore[arg-type]


def mend(client: Client) -> None:
    assert_type(client.retry_failed("mail", attempts_to_allow=2, limit=10), int)
    assert_type(client.delete_jobs("mail", JobState.FAILED, body_regex="ada"), int)


async def call_without_blocking() -> None:
    assert_type(AsyncClient(), AsyncClient)
    AsyncClient("queue.example.com", ssl=True)  # type: ignore[arg-type]
    async with AsyncClient("queue.example.com", 9010, source="mailer:host7") as client:
        assert_type(client, AsyncClient)
        assert_type(await client.enqueue("mail", [b"now", Job(b"later")]), list[str])
        claimed = await client.dequeue("mail", limit=10, max_wait_ms=5000)
        assert_type(claimed, list[ClaimedJob])
        await client.ack("mail", succeeded=claimed)
        await client.ack("mail", claimed)  # type: ignore[call-arg]
        async for record in client.scan("mail", JobState.FAILED, page_size=10):
            assert_type(record, JobRecord)
        client.scan("mail", "FAILED")  # type: ignore[arg-type]


def handle() -> Handlers:
    handlers = Handlers()

    @handlers.queue(
        "images", concurrency=4, retry={OSError: exponential(1, most=60), KeyError: never}
    )
    def resize(job: RunningJob) -> str | None:
        assert_type(job.body, bytes)
        assert_type(job.attempt, int)
        assert_type(job.lost, bool)
        assert_type(job.client, Client)
        assert_type(job.aclient, AsyncClient)
        job.save(body=b"half", status="half; ")
        job.save("no bytes")  # type: ignore[arg-type]
        raise Later(60, body=b"rest")

    @handlers.queue("mail", retry=constant(5), time_limit_seconds=10)
    async def send(job: RunningJob) -> None:
        await job.asave(body=b"half", status="half; ")

    @handlers.queue("thumbnails", run_in="processes", time_limit_seconds=60)
    def shrink(job: RunningJob) -> None: ...

    @handlers.after
    def note(job: RunningJob, outcome: Outcome) -> None:
        assert_type(outcome.error, BaseException | None)

    handlers.queue("mail")(b"no function")  # type: ignore[type-var]
    handlers.queue("mail", retry=5)  # type: ignore[arg-type]
    handlers.queue("mail", run_in="process")  # type: ignore[arg-type]
    handlers.before(note)  # type: ignore[type-var]
    return handlers


def run(client: Client, handlers: Handlers) -> None:
    worker = Worker(client, handlers, queues=["mail"], grace_seconds=5)
    assert_type(worker.queue_figures(), Sequence[QueueFigures])
    assert_type(worker.queue_figures()[0].runs.endings[Ending.SUCCEEDED], int)
    Worker(client, handlers, set_up_process=logging.basicConfig)
    assert_type(WorkerMetrics(worker).text(), bytes)
    with WorkerMetrics(worker).served(9108, host="::") as url:
        assert_type(url, str)
    worker.run(handle_signals=False)
    Worker(client, "mail", handlers)  # type: ignore[arg-type, call-arg]
