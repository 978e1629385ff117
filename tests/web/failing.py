"""Jobs that fail, with what their attempts say."""

from __future__ import annotations

from collections.abc import Iterable

from pinlaterd.client import AckInfo, Client, Job
from tests.deployment import claim


def fail(client: Client, queue: str, statuses: Iterable[str]) -> list[str]:
    """Have a job of the queue fail for good with each status, one after the other."""
    client.create_queue(queue)
    failed = []
    for number, status in enumerate(statuses):
        client.enqueue(queue, [Job(b"to: ada %d" % number, attempts_allowed=1)])
        [job] = claim(client, queue)
        client.ack(
            queue,
            failed=[AckInfo(job.descriptor, status, claim_descriptor=job.claim_descriptor)],
        )
        failed.append(job.descriptor)
    return failed
