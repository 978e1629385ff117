"""Jobs of queues with `push` are handed to an HTTP server, which reports how they ended."""

from __future__ import annotations

import pytest

from pinlaterd.client import AckInfo, Job, JobState
from tests.conftest import WaitUntil
from tests.push.downstream import Reply

pytestmark = pytest.mark.service


def test_a_pushed_job_ends_by_its_callback(pushed, wait_until: WaitUntil) -> None:
    client, _, queue = pushed
    good, other = client.enqueue(queue, [b'{"to": "ada"}', b"\xff\x00"])
    wait_until(lambda: len(pushed.received()) == 2)
    sent = {received.body["descriptor"]: received for received in pushed.received()}
    client.ack(queue, succeeded=[AckInfo(good, "sent", 0, sent[good].body["claim"])])
    records = client.lookup([good, other])

    assert sent[good].headers["User-Agent"].startswith("pinlaterd/")
    assert sent[good].body["data"] == {"to": "ada"}
    assert sent[good].body["attempts_remaining"] == 2
    assert sent[other].body["body"] == "/wA="
    assert records[good].state is JobState.SUCCEEDED
    assert records[other].state is JobState.IN_PROGRESS, "it waits for its callback"


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (Reply(500, {"id": "server_error", "title": "broken"}), "answered 500: server_error"),
        (Reply(302, b"", {"Location": "/elsewhere"}), "answered 302"),
        (Reply(200, b"ok"), "answered 200 with a body that is no JSON object"),
        (Reply(0), "the connection was dropped"),
    ],
)
def test_what_a_downstream_does_not_take_is_tried_again(
    pushed, wait_until: WaitUntil, reply: Reply, status: str
) -> None:
    client, there, queue = pushed
    there.act = lambda _: reply
    [descriptor] = client.enqueue(queue, [Job(b"1", attempts_allowed=3)])

    wait_until(lambda: client.lookup([descriptor])[descriptor].attempts_remaining == 2)
    record = client.lookup([descriptor])[descriptor]

    assert record.state is JobState.PENDING
    assert record.run_after_ms - record.updated_at_ms == pytest.approx(2000, abs=50)
    assert status in record.custom_status
    assert len(pushed.received()) == 1, "redirects are not followed"
