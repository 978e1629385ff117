"""What applications import: a blocking client of the service, and a worker on top of it.

    from pinlaterd.client import Client, Worker

    with Client("queue.example.com") as client:
        client.create_queue("mail")
        client.enqueue("mail", [b"to: ada", b"to: grace"])
        Worker(client, "mail", send_mail).run()

`client` has the twelve operations, `worker` the loop that claims, runs and acknowledges jobs,
`claims` what it has in hand, `addresses` which server a call goes to, `pool` and `connection` the
sockets. May rely on `rpc` and below.
docs/python.md is the guide.
"""

from pinlaterd.client.client import Client
from pinlaterd.client.worker import Retry, Worker
from pinlaterd.errors import ConnectionFailed, OutcomeUnknown, PinLaterError, RequestError
from pinlaterd.model import AckInfo, CheckpointInfo, ClaimedJob, Job, JobRecord, JobState

__all__ = [
    "AckInfo",
    "CheckpointInfo",
    "ClaimedJob",
    "Client",
    "ConnectionFailed",
    "Job",
    "JobRecord",
    "JobState",
    "OutcomeUnknown",
    "PinLaterError",
    "RequestError",
    "Retry",
    "Worker",
]
