"""What applications import: a client of the service, blocking or for asyncio, and a worker.

    from pinlaterd.client import Client, Handlers, Worker

    handlers = Handlers()

    @handlers.queue("mail")
    def send(job): ...

    client = Client("queue.example.com")
    client.enqueue("mail", [b"to: ada", b"to: grace"])
    Worker(client, handlers).run()

`calls` has the operations; a `pool` of connections makes them, to `addresses` that serve, and
`client` has its two ways to wait: docs/python.md. A `worker` runs `handlers`: docs/worker.md. For
each queue it claims as many jobs ahead as its handler begins soon, and holds them `in_flight`; a
handler gets a `running_job`, and may run in `processes`. `metrics`, which nothing here imports, is
for Prometheus. May rely on `rpc` and below.
"""

from pinlaterd.client.addresses import AddressInvalid
from pinlaterd.client.client import AsyncClient, Client
from pinlaterd.client.handlers import Handlers
from pinlaterd.client.in_flight import QueueFigures, RunFigures
from pinlaterd.client.processes import ProcessDied, ProcessNotStarted
from pinlaterd.client.running_job import (
    ClaimLost,
    Discard,
    Ending,
    Later,
    Outcome,
    Retry,
    RetryPolicy,
    RunningJob,
    constant,
    exponential,
    linear,
    never,
)
from pinlaterd.client.worker import Worker
from pinlaterd.errors import (
    ConnectionFailed,
    EnqueuedInPart,
    OutcomeUnknown,
    PinLaterError,
    RequestError,
)
from pinlaterd.model import (
    QUEUE_DEFAULT,
    AckInfo,
    CheckpointInfo,
    ClaimedJob,
    Job,
    JobChoice,
    JobOptions,
    JobRecord,
    JobState,
)

__all__ = [
    "QUEUE_DEFAULT",
    "AckInfo",
    "AddressInvalid",
    "AsyncClient",
    "CheckpointInfo",
    "ClaimLost",
    "ClaimedJob",
    "Client",
    "ConnectionFailed",
    "Discard",
    "Ending",
    "EnqueuedInPart",
    "Handlers",
    "Job",
    "JobChoice",
    "JobOptions",
    "JobRecord",
    "JobState",
    "Later",
    "Outcome",
    "OutcomeUnknown",
    "PinLaterError",
    "ProcessDied",
    "ProcessNotStarted",
    "QueueFigures",
    "RequestError",
    "Retry",
    "RetryPolicy",
    "RunFigures",
    "RunningJob",
    "Worker",
    "constant",
    "exponential",
    "linear",
    "never",
]
