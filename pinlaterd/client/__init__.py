"""What applications import: a blocking client of the service, and a worker on top of it.

    from pinlaterd.client import Client, Handlers, RunningJob, Worker

    handlers = Handlers()

    @handlers.queue("mail")
    def send(job: RunningJob) -> None:
        deliver(job.body)

    with Client("queue.example.com") as client:
        client.create_queue("mail")
        client.enqueue("mail", [b"to: ada", b"to: grace"])
        Worker(client, handlers).run()

`client` has the twelve operations, `addresses` which server a call goes to, `pool` and `connection`
the sockets. `handlers` declare what an application does; a `worker` has a `lane` for each queue, with
its `claims` in hand and an executor (`executors`); `running_job`, `outcomes` and `retries` are what a
handler sees and how it ends. May rely on `rpc` and below. docs/python.md and docs/worker.md are the
guides.
"""

from pinlaterd.client.client import Client
from pinlaterd.client.handlers import Handlers
from pinlaterd.client.outcomes import Ending, Outcome
from pinlaterd.client.retries import RetryPolicy, constant, exponential, linear, never
from pinlaterd.client.running_job import ClaimLost, Discard, Later, Retry, RunningJob
from pinlaterd.client.worker import Worker
from pinlaterd.errors import ConnectionFailed, OutcomeUnknown, PinLaterError, RequestError
from pinlaterd.model import AckInfo, CheckpointInfo, ClaimedJob, Job, JobRecord, JobState

__all__ = [
    "AckInfo",
    "CheckpointInfo",
    "ClaimLost",
    "ClaimedJob",
    "Client",
    "ConnectionFailed",
    "Discard",
    "Ending",
    "Handlers",
    "Job",
    "JobRecord",
    "JobState",
    "Later",
    "Outcome",
    "OutcomeUnknown",
    "PinLaterError",
    "RequestError",
    "Retry",
    "RetryPolicy",
    "RunningJob",
    "Worker",
    "constant",
    "exponential",
    "linear",
    "never",
]
