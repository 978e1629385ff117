"""The part for applications: a client of the service, blocking or for asyncio, and a worker.

    from pinlaterd.client import Client, Handlers, Worker

    handlers = Handlers()

    @handlers.queue("mail")
    def send(job): ...

    client = Client("queue.example.com")
    client.enqueue("mail", [b"to: ada", b"to: grace"])
    Worker(client, handlers).run()

The modules; docs/python.md and docs/worker.md are the guides:

    client        the operations as methods that block, and as coroutines
    calls         the operations: what each asks for, and what its answer becomes
    pool          connections, and which calls are sent again
    addresses     the servers, and which of them serve
    worker        runs a consumer of the queues that have handlers
    consumer      claims as many jobs ahead as handlers begin soon, and reports how they ended
    handlers      which function works on which queue, and how
    in_flight     what a worker holds of one queue
    running_job   a job as its handler sees it
    processes     handlers in processes of their own
    metrics       a worker's figures for Prometheus; nothing here imports it
    failures      the newest failures of a queue, in groups
    coordinator   the coordinator's pages, for programs
    zookeeper     lists of servers in ZooKeeper
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
