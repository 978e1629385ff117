"""Jobs of Rickover's job types are pushed to the downstream that the environment names."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

import pytest

from pinlaterd.client import Client, Job, JobOptions, JobState
from pinlaterd.config.schema import queue_of_type
from tests.conftest import WaitUntil
from tests.deployment import MOST_PATIENT, Deployment
from tests.http.conftest import HttpClient
from tests.push.downstream import Downstream, Received, Reply, downstream

pytestmark = pytest.mark.service

_SETTINGS = {**MOST_PATIENT, "monitor_interval_seconds": 0.1, "push_timeout_seconds": 4}


class Rickover(NamedTuple):
    """A service that pushes job types to `there`."""

    api: HttpClient
    client: Client
    there: Downstream
    deployment: Deployment

    def create(self, name: str, *, attempts: int = 3, strategy: str = "at_least_once") -> str:
        """Create a job type; return its queue."""
        answer = self.api.post(
            "/v1/jobs",
            {
                "name": name,
                "delivery_strategy": strategy,
                "attempts": attempts,
                "concurrency": 4,
            },
        )
        assert answer.status == 201
        return queue_of_type(name)

    def enqueue(self, queue: str, data: bytes, attempts: int, job_id: str = "") -> str:
        """Return the job's id."""
        job_id = job_id or f"job_{uuid.uuid4()}"
        options = JobOptions(key=job_id, key_of_all_queues=True)
        self.client.enqueue_keyed(queue, [Job(data, attempts_allowed=attempts, options=options)])
        return job_id

    def received(self, job_id: str) -> list[Received]:
        return [one for one in self.there.received if one.path.endswith(job_id)]


@pytest.fixture(scope="module")
def rickover(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rickover]:
    with downstream() as there:
        environment = {"DOWNSTREAM_URL": there.url, "DOWNSTREAM_WORKER_AUTH": "hush"}
        deployment = Deployment(tmp_path_factory.mktemp("r") / "d", environment=environment)
        deployment.init(settings=_SETTINGS, http=True)
        with deployment.running(), deployment.client() as client:
            yield Rickover(HttpClient(deployment.http_port), client, there, deployment)


def test_a_job_is_posted_as_rickover_does(rickover: Rickover, wait_until: WaitUntil) -> None:
    queue = rickover.create("a b/c", attempts=5)
    data = b'{"b": 1.50, "a": 12345678901234567890, "c": 1e400}'
    job_id = rickover.enqueue(queue, data, 5)

    wait_until(lambda: rickover.received(job_id) != [])
    received, *later = rickover.received(job_id)

    pair = base64.b64encode(b"jobs:hush").decode()
    assert received.path == f"/v1/jobs/a%20b%2Fc/{job_id}"
    assert received.headers["Authorization"] == f"Basic {pair}"
    assert received.raw == b'{"data":' + data + b',"attempts":5}', "numbers keep all digits"
    assert received.raw not in [one.raw for one in later], "an attempt is sent once"


def test_an_id_names_nothing_else_at_the_downstream(
    rickover: Rickover, wait_until: WaitUntil
) -> None:
    queue = rickover.create("names", attempts=1)
    rickover.enqueue(queue, b"1", 1, "a/b?c#d\r\nX-Evil: 1\r\n\r\n%2F\u00fc")
    for dots in (".", ".."):
        rickover.enqueue(queue, b"1", 1, dots)

    wait_until(lambda: rickover.client.count(queue, JobState.FAILED) == 3)

    [received] = [one for one in rickover.there.received if "/names" in one.path]
    escaped = "a%2Fb%3Fc%23d%0D%0AX-Evil:%201%0D%0A%0D%0A%252F%C3%BC"
    assert received.path == f"/v1/jobs/names/{escaped}"
    assert "X-Evil" not in received.headers


def test_a_new_type_is_served_at_once(rickover: Rickover, wait_until: WaitUntil) -> None:
    pid = rickover.deployment.pid_of("push-1")
    queue = rickover.create("news")
    job_id = rickover.enqueue(queue, b"null", 3)

    wait_until(lambda: rickover.received(job_id) != [])

    assert rickover.deployment.pid_of("push-1") == pid


def test_a_refused_attempt_is_repeated_with_rickovers_backoff(
    rickover: Rickover, wait_until: WaitUntil
) -> None:
    rickover.there.act = lambda _: Reply(500)
    queue = rickover.create("refused")
    job_id = rickover.enqueue(queue, b"1", 3)
    wait_until(lambda: len(rickover.received(job_id)) >= 2)
    rickover.there.act = lambda _: None

    assert [one.body["attempts"] for one in rickover.received(job_id)][:2] == [3, 2]
    wait_until(lambda: len(rickover.received(job_id)) == 3)
    times = [one.at for one in rickover.received(job_id)]
    assert times[1] - times[0] > 1.9
    assert times[2] - times[1] > 3.9


@pytest.mark.parametrize("way", ["refused", "reported", "overdue"])
def test_the_pause_is_that_of_the_types_attempts(
    rickover: Rickover, wait_until: WaitUntil, way: str
) -> None:
    """A job may have had fewer attempts from the beginning, as one that was imported."""

    def act(received: Received) -> Reply | None:
        if way == "reported":
            rickover.api.post(received.path, {"status": "failed", "attempt": 2})
        return Reply(500) if way == "refused" else None

    rickover.there.act = act
    name = f"once-more-{way}"
    queue = rickover.create(name, attempts=4)
    path = f"/v1/jobs/{name}/{rickover.enqueue(queue, b'1', 2)}"

    seen = []

    def has_failed() -> bool:
        seen.append(rickover.api.get(path).body)
        return bool(seen[-1]["attempts"] == 1)

    wait_until(has_failed)
    rickover.there.act = lambda _: None
    job = seen[-1]
    assert job["status"] == "queued"
    run_after, updated_at = map(datetime.fromisoformat, (job["run_after"], job["updated_at"]))
    assert (run_after - updated_at).total_seconds() == pytest.approx(8, abs=0.05)


def test_rickovers_example(rickover: Rickover, wait_until: WaitUntil) -> None:
    """Its README from top to bottom, with a downstream that calls back."""
    name = "invoice-shipped"

    def call_back(received: Received) -> Reply:
        is_first = received.body["attempts"] == 3
        report = {"status": "failed" if is_first else "succeeded", "retryable": True}
        attempt = received.body["attempts"]
        answer = rickover.api.post(received.path, {**report, "attempt": attempt})
        assert answer.status == 200
        return Reply(202, {})

    rickover.there.act = call_back
    rickover.create(name)
    data = {"invoice_id": 4}
    enqueued = rickover.api.put(f"/v1/jobs/{name}/random_id", {"data": data})
    job = f"/v1/jobs/{name}/job_{enqueued.body['id'].removeprefix('job_')}"
    wait_until(lambda: rickover.api.get(job).body["status"] == "succeeded")
    rickover.there.act = lambda _: None
    received = [one for one in rickover.there.received if one.path == job]
    again = rickover.api.post(job, {"status": "succeeded", "attempt": 2})

    assert enqueued.status == 202
    assert [one.body for one in received] == [
        {"data": data, "attempts": 3},
        {"data": data, "attempts": 2},
    ]
    assert received[1].at - received[0].at > 1.9
    assert rickover.api.get(job).body["attempts"] == 2
    assert (again.status, again.body["id"]) == (400, "duplicate_status_request")


def test_a_job_that_has_expired_is_not_sent(rickover: Rickover, wait_until: WaitUntil) -> None:
    rickover.create("late")
    times = {"run_after": None, "expires_at": "2020-01-01T00:00:00Z"}
    late = rickover.api.put("/v1/jobs/late/random_id", {"data": 1, **times}).body["id"]
    good = rickover.api.put("/v1/jobs/late/random_id", {"data": 2}).body["id"]
    late, good = (f"/v1/jobs/late/job_{one.removeprefix('job_')}" for one in (late, good))

    wait_until(lambda: good in [one.path for one in rickover.there.received])
    wait_until(lambda: rickover.api.get(late).body["status"] == "expired")

    assert late not in [one.path for one in rickover.there.received]
