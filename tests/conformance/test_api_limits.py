"""Limits of a queue, as clients of Thrift meet them, on every engine."""

from __future__ import annotations

import pytest

from tests.conformance.api import IN_PROGRESS, Client, one_engine
from tests.conftest import WaitUntil

pytestmark = pytest.mark.service


def test_no_more_jobs_are_in_progress_than_may_be(client: Client, wait_until: WaitUntil):
    queue = "two_in_progress"
    client.create(queue)
    for number in range(6):
        client.enqueue(queue, b"%d" % number)
    taken: list[str] = []

    def take() -> int:
        taken.extend(client.dequeue(queue, 6, maxWaitMillis=100))
        return len(taken)

    wait_until(lambda: take() == 2)
    assert client.dequeue(queue, 6) == {}


def test_claims_that_end_let_others_be_made(client: Client):
    """By a time-out, a job that is sent back, a failure, a deletion."""
    queue = "ended_in_progress"
    client.create(queue)
    client.enqueue(queue, *[client.job(b"job", numAttemptsAllowed=9)] * 6)

    def taken() -> str:
        while not (found := client.dequeue(queue, 1, maxWaitMillis=5000)):
            pass
        return next(iter(found))

    taken()  # times out
    client.checkpoint(queue, client.checkpoint_of(taken(), moveToPending=True))
    client.ack(queue, failed=[taken()])
    taken()
    client.delete_jobs(queue, IN_PROGRESS)
    assert taken()


@one_engine
def test_a_field_that_is_not_sent_is_the_queues_default(client: Client):
    queue = "other_defaults"
    client.create(queue)
    unsaid = client.job(b"a", priority=None, numAttemptsAllowed=None)

    open_, said = client.enqueue(queue, unsaid, client.job(b"b", priority=1, numAttemptsAllowed=2))

    assert [each.split(":")[2] for each in (open_, said)] == ["p2", "p1"]
    claims = client.dequeue(queue, 2)
    assert [claims[each].allowed for each in (open_, said)] == [5, 2]
