"""The page of a job: its life, its body byte for byte, and what some may not see of it."""

from __future__ import annotations

import urllib.request

import pytest

from pinlaterd.client import AckInfo, Client, Job
from pinlaterd.clock import Clock
from pinlaterd.model import EXPIRED, JobOptions, JobRecord, JobState
from pinlaterd.signature import attempts_of
from pinlaterd.web.job import steps_of
from tests.deployment import CALL_SECONDS, Deployment, claim

HOSTILE = b'{"a": "<script>alert(1)</script>\xe2\x80\xae", "n": 12345678901234567890}'


@pytest.fixture
def client(dashboard: Deployment):
    with dashboard.client("shop:web2") as client:
        client.create_queue("parcels")
        yield client


def fail(client: Client, descriptor: str, *statuses: str) -> None:
    for status in statuses:
        [job] = claim(client, "parcels")
        assert job.descriptor == descriptor
        ack = AckInfo(descriptor, status, claim_descriptor=job.claim_descriptor)
        client.ack("parcels", failed=[ack])


@pytest.mark.service
def test_a_failed_job_shows_its_life_body_and_what_each_attempt_said(client, visitor, wait_until):
    job = Job(HOSTILE, options=JobOptions(key="order-17"))
    [stored] = client.enqueue_keyed("parcels", [job])
    fail(client, stored.descriptor, "no <answer> (a.py:1 in b); ", "lost\u202e (a.py:2 in c)")

    page = visitor.get(f"/j/{stored.descriptor}")

    assert page.status == 200
    assert "Failed , 2 of 2 attempts; kept until" in page.text
    assert "enqueued" in page.text
    assert "attempt 1 failed time not stored" in page.text
    assert "attempt 2 failed" in page.text
    assert "1 no <answer> (a.py:1 in b) 2 lost \\u202e (a.py:2 in c)" in page.text
    assert "key order-17" in page.text
    assert "last claim shop:web2" in page.text
    assert '"n": 12345678901234567890' in page.text
    assert '"a": "<script>alert(1)</script> \\u202e "' in page.text
    assert "<script>alert" not in page.body
    assert "/q/parcels?state=failed&amp;message=lost" in page.body
    [other] = client.enqueue("parcels", [Job(b"", attempts_allowed=1)])
    fail(client, other, "lost\u202e (a.py:2 in c)")
    # A search that has no time says what it has found.
    wait_until(lambda: "alike 1 failed alike" in visitor.get(f"/j/{stored.descriptor}").text)


@pytest.mark.service
@pytest.mark.parametrize(
    ("body", "suffix"), [(HOSTILE, "json"), (b"a\r\n", "txt"), (bytes(range(256)) * 4096, "bin")]
)
def test_a_body_is_saved_as_it_is_and_never_opened_as_a_page(client, dashboard, body, suffix):
    [descriptor] = client.enqueue("parcels", [body])

    url = f"http://127.0.0.1:{dashboard.web_port}/j/{descriptor}/body"
    with urllib.request.urlopen(url, timeout=CALL_SECONDS) as answer:
        assert answer.read() == body
    assert answer.headers["Content-Type"] == "application/octet-stream"
    name = descriptor.replace(":", "-")
    assert answer.headers["Content-Disposition"] == f'attachment; filename="{name}.{suffix}"'


@pytest.mark.service
def test_a_long_body_of_bytes_is_read_page_by_page(client, visitor):
    [descriptor] = client.enqueue("parcels", [b"\xff" * 10_000 + b"the end"])

    first = visitor.get(f"/j/{descriptor}")
    last = visitor.get(f"/j/{descriptor}?as=hex&at=8192")

    assert "Bytes 0 to 4,095 of 10,007. Later" in first.text
    assert "Bytes 8,192 to 10,006 of 10,007. Earlier" in last.text
    assert "the end" in last.text


@pytest.mark.service
@pytest.mark.parametrize("name", ["parcels:s1:p1:1", "parcels", "%3Cscript%3E", "nowhere:s9:p1:1"])
def test_a_job_that_is_not_there_is_not_found(client, visitor, name):
    page = visitor.get(f"/j/{name}")

    assert page.status == 404
    assert "There is no job" in page.text
    assert "<script>" not in page.body


# --- its life, purely -----------------------------------------------------------------------------

NOW = Clock().now_ms()


def record(state: JobState, left: int, **more) -> JobRecord:
    times = {"created_at_ms": NOW, "run_after_ms": NOW, "updated_at_ms": NOW + 5000}
    fields = {**times, "claim_descriptor": "host:1:2:mailer:web3:4", "body": b"", **more}
    return JobRecord("q:s1:p1:1", state, 3, left, "", **fields)


@pytest.mark.parametrize(
    ("job", "titles"),
    [
        (record(JobState.SUCCEEDED, 3), ["enqueued", "attempt 1 succeeded"]),
        (
            record(JobState.SUCCEEDED, 1),
            ["enqueued", "attempts 1 to 2 failed", "due again", "attempt 3 succeeded"],
        ),
        (
            record(JobState.FAILED, 0),
            ["enqueued", "attempts 1 to 2 failed", "due again", "attempt 3 failed"],
        ),
        (record(JobState.FAILED, 2), ["enqueued", "attempt 1 failed"]),
        (record(JobState.FAILED, 3, end_reason=EXPIRED), ["enqueued", "expired"]),
        (record(JobState.PENDING, 3, run_after_ms=NOW + 60_000), ["enqueued", "due"]),
        (record(JobState.PENDING, 2), ["enqueued", "attempt 1 failed", "due again"]),
        (
            record(JobState.IN_PROGRESS, 2),
            [
                "enqueued",
                "attempt 1 failed",
                "due again",
                "attempt 2 runs; claimed or last renewed",
            ],
        ),
        (
            record(JobState.IN_PROGRESS, 3, run_after_ms=NOW + 60_000),
            ["enqueued", "due", "attempt 1 runs; claimed or last renewed"],
        ),
    ],
)
def test_the_life_of_a_job_is_told_in_order(job, titles):
    assert [step.title for step in steps_of(job)] == titles


def test_a_time_that_no_store_keeps_is_not_made_up():
    steps = {step.title: step.at_ms for step in steps_of(record(JobState.FAILED, 0))}

    assert steps["attempts 1 to 2 failed"] is None
    assert steps["attempt 3 failed"] == NOW + 5000


def test_what_attempts_said_is_told_apart_where_the_place_ends():
    said = attempts_of("a; b (x.py:1 in f); c (y.py:2 in g < x.py:3 in h); d")

    assert said == ["a; b (x.py:1 in f)", "c (y.py:2 in g < x.py:3 in h)", "d"]
    assert attempts_of("a (x.py:1 in f)b (c)d") == ["a (x.py:1 in f)", "b (c)d"]
    assert attempts_of("") == []
