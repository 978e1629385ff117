"""A downstream that is down costs a probe a second, not the attempts of all jobs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pinlaterd.client import AckInfo, Job, JobState
from pinlaterd.push.downstream import DownstreamAnswer
from pinlaterd.push.pusher import RequestLimit
from tests.conftest import WaitUntil
from tests.deployment import MOST_PATIENT, serving, unused_port
from tests.push.downstream import Received, downstream

DOWN, UP, REFUSED = (
    DownstreamAnswer("refused", is_down=True),
    DownstreamAnswer(),
    DownstreamAnswer("answered 500"),
)


def test_requests_at_a_time_are_halved_and_grow_again() -> None:
    limit = RequestLimit(20)

    fall = [limit.open for _ in range(6) if limit.note(DOWN)]
    why = limit.why_down
    limit.open = 1  # the probe
    rise = [limit.open for _ in range(30) if limit.note(UP)]

    assert fall == [10, 5, 2, 1, 0]
    assert why == "refused"
    assert rise == list(range(2, 21))
    assert limit.why_down == ""


def test_a_downstream_that_refuses_a_job_is_not_down() -> None:
    limit = RequestLimit(20)
    limit.note(REFUSED)

    assert (limit.open, limit.why_down) == (20, "")


@pytest.mark.service
def test_jobs_outlive_a_downstream_that_is_down(tmp_path: Path, wait_until: WaitUntil) -> None:
    port, jobs = unused_port(), 400
    push = {"url": f"http://127.0.0.1:{port}/", "max_in_progress": 8}
    settings = {**MOST_PATIENT, "push_hosts": "127.0.0.1"}
    with (
        serving(tmp_path / "d", settings=settings, queues={"mail": {"push": push}}) as deployment,
        deployment.client() as client,
    ):
        client.create_queue("mail")
        began = time.monotonic()
        client.enqueue("mail", [Job(b"%d" % n, attempts_allowed=9) for n in range(jobs)])

        def warnings() -> str:
            return " ".join(deployment.status()["warnings"])

        def failed() -> int:
            return int(deployment.stats()["counters"].get("mail_push_failed", 0))

        wait_until(lambda: "connection refused" in warnings())
        first = failed()
        wait_until(lambda: failed() >= first + 3)
        waiting = list(client.scan("mail", JobState.PENDING))

        # What was in flight, and then one probe a second.
        attempts = failed()
        most = 16 + 2 + (time.monotonic() - began)
        assert attempts <= most
        assert deployment.stats()["gauges"]["mail_push_concurrency"] <= 1
        assert len([job for job in waiting if job.attempts_remaining == 9]) >= jobs - most

        def call_back(received: Received) -> None:
            job = received.body
            client.ack("mail", succeeded=[AckInfo(job["descriptor"], "", 0, job["claim"])])

        with downstream(call_back, port=port):
            wait_until(lambda: client.count("mail", JobState.SUCCEEDED) == jobs, seconds=60)
            wait_until(lambda: warnings() == "")
            wait_until(lambda: deployment.stats()["gauges"]["mail_push_concurrency"] == 8)
