"""Jobs of queues with `push` are handed to an HTTP server, which reports how they ended."""

from __future__ import annotations

import threading

import pytest

from pinlaterd.client import AckInfo, Client, Job, JobRecord, JobState
from tests.conftest import WaitUntil
from tests.push.downstream import Reply

pytestmark = pytest.mark.service


def after_a_failure(client: Client, job: str, wait_until: WaitUntil) -> tuple[JobRecord, int]:
    """Return the record of a job that waits for its next attempt, and how many have failed. It
    waits for 2 s, 4 s and so on: on a busy machine the first time may be missed."""
    seen: list[JobRecord] = []

    def failures() -> int:
        seen.append(client.lookup([job])[job])
        return seen[-1].attempts_allowed - seen[-1].attempts_remaining

    wait_until(lambda: failures() and seen[-1].state is JobState.PENDING)
    return seen[-1], seen[-1].attempts_allowed - seen[-1].attempts_remaining


def test_a_pushed_job_ends_by_its_callback(pushed, wait_until: WaitUntil) -> None:
    client, _, queue, _ = pushed
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


def test_no_answer_in_time_means_that_the_job_is_taken(pushed, wait_until: WaitUntil) -> None:
    client, there, queue, _ = pushed
    ended = threading.Event()
    there.act = lambda _: ended.wait() and None
    [descriptor] = client.enqueue(queue, [b"1"])
    try:
        wait_until(lambda: client.lookup([descriptor])[descriptor].state is JobState.IN_PROGRESS)
        wait_until(lambda: pushed.received() != [])
        [received] = pushed.received()
        # longer than it is waited for, by the process's own figures
        wait_until(lambda: pushed.figure("pushed") == 1)
        record = client.lookup([descriptor])[descriptor]
    finally:
        ended.set()

    assert record.state is JobState.IN_PROGRESS
    assert record.claim_descriptor == received.body["claim"]


def test_an_unavailable_downstream_is_asked_twice_more_within_the_attempt(
    pushed, wait_until: WaitUntil
) -> None:
    client, there, queue, _ = pushed
    there.act = lambda _: Reply(503, {"id": "service_unavailable", "title": "busy"})
    [descriptor] = client.enqueue(queue, [Job(b"1", attempts_allowed=1)])

    wait_until(lambda: client.lookup([descriptor])[descriptor].state is JobState.FAILED)

    assert len(pushed.received()) == 3
    assert "service_unavailable" in client.lookup([descriptor])[descriptor].custom_status


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
    client, there, queue, _ = pushed
    there.act = lambda _: reply
    [descriptor] = client.enqueue(queue, [Job(b"1", attempts_allowed=7)])

    record, failures = after_a_failure(client, descriptor, wait_until)
    sent = len(pushed.received())
    attempts = 7 - client.lookup([descriptor])[descriptor].attempts_remaining

    waits_ms = record.run_after_ms - record.updated_at_ms
    assert waits_ms == pytest.approx(1000 * 2**failures, abs=50)
    assert status in record.custom_status
    assert sent <= attempts + 1, "one request an attempt"
    assert "/elsewhere" not in [one.path for one in there.received]


def test_an_attempt_without_a_callback_fails_in_time(hastily_pushed, wait_until: WaitUntil) -> None:
    client, _, queue, _ = hastily_pushed
    [descriptor] = client.enqueue(queue, [Job(b"1", attempts_allowed=3)])
    record, failures = after_a_failure(client, descriptor, wait_until)
    # The time for a callback begins with the claim, so a request may come after it.
    wait_until(lambda: hastily_pushed.received() != [])
    first = hastily_pushed.received()[0]
    client.ack(queue, succeeded=[AckInfo(descriptor, "late", 0, first.body["claim"])])
    wait_until(lambda: client.lookup([descriptor])[descriptor].state is JobState.FAILED)

    waits_ms = record.run_after_ms - record.updated_at_ms
    assert waits_ms == pytest.approx(1000 * 2**failures, abs=50)
    assert record.custom_status == "no callback within 1 s; " * failures
    wait_until(lambda: len(hastily_pushed.received()) == 3)
    assert "late" not in client.lookup([descriptor])[descriptor].custom_status


def test_a_successor_knows_what_a_killed_process_had_handed_over(
    hastily_pushed, wait_until: WaitUntil
) -> None:
    client, _, queue, deployment = hastily_pushed
    [descriptor] = client.enqueue(queue, [Job(b"1", attempts_allowed=1)])
    wait_until(lambda: hastily_pushed.received() != [])

    deployment.kill("push-1")

    wait_until(lambda: client.lookup([descriptor])[descriptor].state is JobState.FAILED)
    assert len(hastily_pushed.received()) == 1
