"""Jobs over Rickover's interface: what its clients and downstreams send, and compare in answers."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pinlaterd.config import edit
from pinlaterd.config.schema import DELIVERY_STRATEGIES, JobType, queue_of_type
from pinlaterd.model import JobState
from tests.deployment import Deployment, claim
from tests.http.conftest import HttpAnswer, HttpClient, http_of, serving_http
from tests.http.test_v1_job_types import a_type, error

DATA = {"to": "ada"}


def new_id() -> str:
    return f"job_{uuid.uuid4()}"


class OneType:
    """A job type, and the calls on its jobs."""

    def __init__(self, api: HttpClient, **given: object) -> None:
        self.api = api
        self.name = api.post("/v1/jobs", a_type(**given)).body["name"]

    def path(self, job_id: str) -> str:
        return f"/v1/jobs/{self.name}/{job_id}"

    def put(self, job_id: str = "", **fields: object) -> HttpAnswer:
        """`fields`: in addition to data."""
        return self.api.put(self.path(job_id or new_id()), {"data": DATA, **fields})

    def new(self, **fields: object) -> str:
        """Enqueue a job; return its id."""
        answer = self.put("", **fields)
        assert answer.status == 202, answer
        found: str = answer.body["id"]
        return found

    def get(self, job_id: str) -> Any:
        return self.api.get(self.path(job_id)).body

    def report(self, job_id: str, status: str, attempt: int, **fields: object) -> HttpAnswer:
        return self.api.post(self.path(job_id), {"status": status, "attempt": attempt, **fields})


@pytest.fixture(scope="module")
def jobs(http_service: Deployment) -> OneType:
    return OneType(http_of(http_service))


@pytest.fixture(scope="module")
def others(http_service: Deployment) -> OneType:
    return OneType(http_of(http_service))


def instant(text: str) -> datetime:
    assert text.endswith("Z")
    return datetime.fromisoformat(text)


# --- enqueue --------------------------------------------------------------------------------


def test_a_job_that_is_enqueued_is_shown_as_rickover_does(api, jobs):
    job_id = new_id()
    answer = jobs.put(job_id.upper().replace("JOB_", "job_"))

    job = answer.body
    assert answer.status == 202
    assert {**job, "id": job_id} == job
    assert (job["name"], job["attempts"], job["status"]) == (jobs.name, 7, "queued")
    assert (job["expires_at"], job["data"]) == (None, DATA)
    assert isinstance(job["auto_id"], int)
    assert abs(instant(job["created_at"]) - datetime.now(UTC)) < timedelta(seconds=60)
    assert instant(job["run_after"]) == instant(job["created_at"]) == instant(job["updated_at"])
    for path in (jobs.path(job_id), jobs.path(job_id[4:]), f"/v1/jobs/{job_id}"):
        assert api.get(path).body == job


def test_a_new_job_is_answered_as_queued_though_it_runs_by_then(http_service):
    jobs = OneType(http_of(http_service), concurrency=20)
    [row] = [row for row in listed(http_service) if row["name"] == jobs.name]
    with http_service.client() as client, ThreadPoolExecutor(1) as pool:
        for _ in range(10):
            handed_out = pool.submit(client.dequeue, row["queue"], limit=1, max_wait_ms=20_000)
            job = jobs.put().body
            assert (job["status"], job["attempts"]) == ("queued", 7)
            assert job["updated_at"] == job["created_at"]
            assert len(handed_out.result()) == 1


def test_data_is_kept_as_it_was_written(jobs):
    text = (
        '{"b": 1.50, "a": 123456789012345678901234567890, "b": "\\u00e9 \\ud83d\\ude00 \\\\ud83d"}'
    )
    job_id = new_id()

    jobs.api.call("PUT", jobs.path(job_id), f'{{"data": {text} }} trailing'.encode())

    answer = jobs.api.call("GET", jobs.path(job_id))
    assert answer.body["data"] == json.loads(text)


def test_times_are_kept_to_the_microsecond(jobs):
    times = {
        "run_after": "2040-01-01T00:00:00.123456Z",
        "expires_at": "2041-01-01T00:00:00.999999Z",
    }
    made = jobs.put(**times).body
    job_id = made["id"]

    for job in (made, jobs.get(job_id), jobs.put(job_id).body):
        assert {name: job[name] for name in times} == times
    assert jobs.report(job_id, "failed", 7).status == 200
    retried = jobs.get(job_id)
    assert instant(retried["run_after"]) - datetime.now(UTC) < timedelta(seconds=60)
    assert jobs.report(job_id, "succeeded", 6).status == 200
    replayed = jobs.api.post(f"/v1/jobs/{job_id}/replay").body
    for job in (retried, jobs.get(job_id), replayed):
        assert job["expires_at"] == times["expires_at"]
    assert instant(replayed["run_after"]) == instant(replayed["created_at"])


def test_the_same_id_again_finds_the_stored_job(jobs, others):
    first = jobs.put()
    again = jobs.put(first.body["id"], data={"other": 1}, run_after="2040-01-01T00:00:00Z")
    elsewhere = others.put(first.body["id"])

    assert (again.status, again.body) == (202, first.body)
    assert (elsewhere.status, elsewhere.body) == (202, first.body)


def test_parallel_enqueues_of_one_id_store_it_once(jobs, others):
    job_id = new_id()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: (jobs, others)[n % 2].put(job_id), range(8)))

    assert {answer.status for answer in answers} == {202}
    assert len({answer.body["auto_id"] for answer in answers}) == 1


def test_an_id_can_be_left_to_the_server(jobs):
    found = {jobs.put("random_id").body["id"] for _ in range(3)}

    assert len(found) == 3
    assert all(jobs.get(job_id)["id"] == job_id for job_id in found)


def test_times_may_have_any_offset(jobs):
    job = jobs.put(
        run_after="2040-01-02T03:04:05.678+02:00", expires_at="2041-01-01T00:00:00-01:30"
    ).body

    assert job["run_after"] == "2040-01-02T01:04:05.678Z"
    assert job["expires_at"] == "2041-01-01T01:30:00Z"


@pytest.mark.parametrize(
    ("job_id", "body", "expected", "has_instance"),
    [
        ("", b"", (400, "invalid_request"), False),
        ("", {"data": 1, "run_after": "soon"}, (400, "invalid_request"), False),
        ("", {"data": 1, "run_after": 3}, (400, "invalid_request"), False),
        ("", {"data": 1, "expires_at": "2026-01-01"}, (400, "invalid_request"), False),
        ("x" * 36, {}, (400, "missing_parameter"), True),
        ("x" * 36, {"data": 1}, (400, "invalid_uuid"), False),
        ("usr_" + str(uuid.UUID(int=1)), {"data": 1}, (400, "invalid_prefix"), False),
        ("job_123", {"data": 1}, (404, "not_found"), True),
        ("", {"data": "x" * 102_399}, (413, "entity_too_large"), False),
        ("", {"data": "zero \0"}, (400, "invalid_parameter"), True),
        ("", {"data": "half a pair \ud83d"}, (400, "invalid_parameter"), True),
        ("", {"data": "\ude00\ud83d"}, (400, "invalid_parameter"), True),
        ("x" * 36, {"data": "\ud83d"}, (400, "invalid_uuid"), False),
    ],
)
def test_a_mistake_in_an_enqueue_has_rickovers_id(jobs, job_id, body, expected, has_instance):
    path = jobs.path(job_id or new_id())

    answer = jobs.api.call("PUT", path, body)

    assert error(answer) == expected
    assert ("instance" in answer.body) == has_instance
    assert ("status" in answer.body) == (expected[0] != 413)


def test_data_of_just_so_many_bytes_and_null_are_taken(jobs):
    assert jobs.put(data="x" * (102_400 - 2)).status == 202
    answer = jobs.put(data=None)
    assert (answer.status, answer.body["data"]) == (202, None)


def test_a_job_of_an_unknown_type_is_refused(api):
    answer = api.put(f"/v1/jobs/no-such-type/{new_id()}", {"data": "\ud83d"})

    assert error(answer) == (404, "job_type_not_found")
    assert answer.body["instance"] == "/v1/jobs/no-such-type"
    assert "status" not in answer.body


def test_an_id_that_is_archived_is_refused_under_any_type(jobs, others):
    job_id = jobs.new()
    jobs.report(job_id, "succeeded", 7)

    for one in (jobs, others):
        answer = one.put(job_id)
        assert error(answer) == (400, "job_already_archived")


# --- look-up --------------------------------------------------------------------------------


def test_a_queued_job_is_found_under_its_own_name_only(api, jobs, others):
    job_id = jobs.new()

    answer = api.get(others.path(job_id))

    assert error(answer) == (404, "job_not_found")
    assert ("instance" in answer.body, "status" in answer.body) == (True, False)


def test_an_archived_job_is_found_under_any_name(jobs, others):
    job_id = jobs.new(expires_at="2040-01-01T00:00:00Z")
    jobs.report(job_id, "failed", 7, retryable=False)

    job = others.get(job_id)

    assert job.keys() == {
        "id", "name", "attempts", "status", "created_at", "data", "expires_at", "auto_id",
    }  # fmt: skip
    assert (job["id"], job["name"], job["attempts"]) == (job_id, jobs.name, 6)
    assert (job["status"], job["data"]) == ("failed", DATA)
    assert job["expires_at"] == "2040-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/jobs/job_123", (400, "invalid_uuid")),
        ("/v1/jobs/job_job_" + str(uuid.UUID(int=1)), (400, "invalid_prefix")),
        ("/v1/jobs/x/random_id", (400, "invalid_uuid")),
        ("/v1/jobs/job_" + str(uuid.UUID(int=7)), (404, "not_found")),
        ("/v1/jobs/x/job_" + str(uuid.UUID(int=7)), (404, "not_found")),
    ],
)
def test_what_no_look_up_finds(api, path, expected):
    assert error(api.get(path)) == expected


def test_a_job_whose_time_is_over_is_archived_as_expired(api, http_service, wait_until):
    jobs = OneType(http_of(http_service))
    answer = jobs.put(expires_at="2020-01-01T00:00:00Z")
    job_id = answer.body["id"]
    [row] = [row for row in listed(http_service) if row["name"] == jobs.name]
    with http_service.client() as client:
        handed_out = client.dequeue(row["queue"], limit=1)
    wait_until(lambda: jobs.get(job_id)["status"] == "expired")

    assert (answer.status, answer.body["status"], handed_out) == (202, "queued", [])
    assert jobs.get(job_id)["attempts"] == 7
    for status, expected in (("expired", [job_id]), ("failed", []), ("", [job_id])):
        query = f"name={jobs.name}&status={status}" if status else f"name={jobs.name}"
        assert ids_of(api.get(f"/v1/archived-jobs?{query}")) == expected
    replayed = api.post(f"/v1/jobs/{job_id}/replay")
    assert replayed.status == 201
    # Not among what later tests find in the archive.
    wait_until(lambda: jobs.get(replayed.body["id"])["status"] == "expired")


# --- callbacks ------------------------------------------------------------------------------


def test_success_archives_a_job_that_nobody_has_begun(jobs):
    job_id = jobs.new(run_after="2040-01-01T00:00:00Z")

    answer = jobs.report(job_id, "succeeded", 7)

    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    job = jobs.get(job_id)
    assert (job["status"], job["attempts"]) == ("succeeded", 7)
    assert error(jobs.report(job_id, "succeeded", 7)) == (400, "duplicate_status_request")


def test_a_failure_is_tried_again_after_2_4_8_seconds(jobs):
    job_id = jobs.new()
    for attempt, seconds in ((7, 2), (6, 4), (5, 8)):
        assert jobs.report(job_id, "failed", attempt).status == 200
        job = jobs.get(job_id)
        waits = instant(job["run_after"]) - instant(job["updated_at"])
        assert (job["status"], job["attempts"]) == ("queued", attempt - 1)
        assert waits == timedelta(seconds=seconds)

    assert error(jobs.report(job_id, "failed", 7)) == (400, "decrement_failed")
    assert jobs.get(job_id)["attempts"] == 4


def test_the_last_failure_archives(http_service):
    jobs = OneType(http_of(http_service), attempts=2)
    job_id = jobs.new()

    assert [jobs.report(job_id, "failed", attempt).status for attempt in (2, 1)] == [200, 200]

    job = jobs.get(job_id)
    assert (job["status"], job["attempts"]) == ("failed", 0)
    assert error(jobs.report(job_id, "failed", 1)) == (400, "duplicate_status_request")


def test_a_failure_that_is_not_retryable_and_one_of_at_most_once_archive(http_service, jobs):
    once = OneType(http_of(http_service), delivery_strategy="at_most_once", attempts=1)
    for one, attempt, fields in ((jobs, 7, {"retryable": False}), (once, 1, {"RETRYABLE": True})):
        job_id = one.new()
        assert one.report(job_id, "failed", attempt, **fields).status == 200
        assert one.get(job_id)["status"] == "failed"


def test_of_parallel_callbacks_one_counts(jobs):
    for status in ("succeeded", "failed"):
        job_id = jobs.new()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: jobs.report(job_id, status, 7), range(8)))  # noqa: B023
        assert sorted(answer.status for answer in answers) == [200] + [400] * 7


def test_a_job_in_progress_ends_with_the_attempts_it_has(http_service):
    jobs = OneType(http_of(http_service), attempts=3)
    job_id = jobs.new()
    [row] = [row for row in listed(http_service) if row["name"] == jobs.name]
    with http_service.client() as client:
        [claimed] = client.dequeue(row["queue"], limit=1, max_wait_ms=30_000)
    shown = jobs.get(job_id)
    stale = jobs.report(job_id, "succeeded", 2)

    assert (claimed.body, claimed.attempts_remaining) == (json.dumps(DATA).encode(), 3)
    assert shown["status"] == "in-progress"
    assert error(stale) == (400, "duplicate_status_request")
    assert jobs.report(job_id, "failed", 3).status == 200
    assert jobs.get(job_id)["status"] == "queued"
    with http_service.client() as client:
        assert client.count(row["queue"], JobState.IN_PROGRESS) == 0


def test_as_many_jobs_run_as_the_type_says_and_a_report_makes_room(http_service, wait_until):
    jobs = OneType(http_of(http_service), concurrency=2)
    ids = {jobs.new() for _ in range(4)}
    [queue] = [row["queue"] for row in listed(http_service) if row["name"] == jobs.name]
    with http_service.client() as client:
        first = claim(client, queue, 2)
        none = client.dequeue(queue, limit=4)
        running = {job_id for job_id in ids if jobs.get(job_id)["status"] == "in-progress"}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.dequeue, queue, limit=4, max_wait_ms=30_000)
            jobs.report(running.pop(), "failed", 7)
            after = waiting.result()

    assert (len(first), none, len(after)) == (2, [], 1)
    assert len({job.descriptor for job in (*first, *after)}) == 3


def listed(deployment: Deployment) -> Any:
    return json.loads(deployment.admin("job-type", "list", "--json"))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", (400, "invalid_request")),
        ({"status": "succeeded", "attempt": "1"}, (400, "invalid_request")),
        ({"status": "succeeded", "attempt": 40_000}, (400, "invalid_request")),
        ({}, (400, "missing_parameter")),
        ({"attempt": 1}, (400, "missing_parameter")),
        ({"status": "done"}, (400, "missing_parameter")),
        ({"status": "succeeded", "attempt": None}, (400, "missing_parameter")),
        ({"status": "done", "attempt": 1}, (400, "invalid_status")),
        ({"status": "succeeded", "attempt": 1}, (400, "invalid_uuid")),
    ],
)
def test_a_mistake_in_a_callback_has_rickovers_id(jobs, body, expected):
    assert error(jobs.api.post(jobs.path("x" * 36), body)) == expected


def test_callbacks_of_jobs_that_are_not_there(api, jobs, others):
    job_id, unknown = jobs.new(), new_id()

    assert error(jobs.report(unknown, "succeeded", 7)) == (400, "duplicate_status_request")
    assert error(jobs.report(unknown, "failed", 7)) == (400, "decrement_failed")
    assert error(others.report(job_id, "succeeded", 7)) == (400, "duplicate_status_request")
    assert error(jobs.report(job_id, "failed", 0)) == (400, "decrement_failed")
    no_type = api.post(f"/v1/jobs/no-such-type/{job_id}", {"status": "failed", "attempt": 7})
    assert error(no_type) == (500, "server_error")
    assert others.report(job_id, "failed", 7).status == 200  # the name gives the backoff only
    assert jobs.get(job_id)["attempts"] == 6


# --- replay ---------------------------------------------------------------------------------


def test_an_archived_job_is_replayed_under_another_id(api, jobs, others):
    job_id = jobs.new(expires_at="2040-01-01T00:00:00Z")
    jobs.report(job_id, "failed", 7, retryable=False)

    answers = [api.post(f"{prefix}/{job_id}/replay") for prefix in ("/v1/jobs", jobs.path("")[:-1])]

    ids = {answer.body["id"] for answer in answers}
    assert [answer.status for answer in answers] == [201, 201]
    assert len(ids - {job_id}) == 2
    job = answers[0].body
    assert (job["status"], job["attempts"], job["data"]) == ("queued", 7, DATA)
    assert job["expires_at"] == "2040-01-01T00:00:00Z"
    assert jobs.get(job_id)["status"] == "failed"
    assert error(api.post(f"{others.path(job_id)}/replay")) == (404, "job_not_found")


def test_what_is_queued_or_unknown_is_not_replayed(api, jobs):
    queued = api.post(f"/v1/jobs/{jobs.new()}/replay")

    assert error(queued) == (400, "invalid_replay_attempt")
    assert error(api.post(f"/v1/jobs/{new_id()}/replay")) == (404, "not_found")
    assert error(api.get(f"/v1/jobs/{new_id()}/replay")) == (405, "method_not_allowed")


# --- archive --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def archived(http_service: Deployment) -> list[str]:
    """The ids of archived jobs of two types, the most recent end first."""
    types = [OneType(http_of(http_service)) for _ in range(2)]
    ended = []
    for n in range(12):
        job_id = types[n % 2].new(run_after="2040-01-01T00:00:00Z" if n % 3 else None)
        fields = {"retryable": False} if n % 4 == 3 else {}
        status = "failed" if n % 4 == 3 else "succeeded"
        assert types[n % 2].report(job_id, status, 7, **fields).status == 200
        ended.append(job_id)
    return ended[::-1]


def ids_of(answer: HttpAnswer) -> list[str]:
    assert answer.status == 200, answer
    return [job["id"] for job in answer.body]


def test_the_archive_shows_the_most_recent_end_first(api, archived):
    found = ids_of(api.get("/v1/archived-jobs?limit=12"))

    assert set(found) == set(archived)
    shown = [api.get(f"/v1/jobs/{job_id}").body for job_id in found]
    assert api.get("/v1/archived-jobs?limit=12").body == shown
    ends = [instant(job["created_at"]) for job in shown]
    assert ends == sorted(ends, reverse=True)


def test_the_archive_is_read_page_by_page(api, archived):
    found: list[str] = []
    path = "/v1/archived-jobs?limit=5"
    while len(found) < len(archived):
        answer = api.get(path)
        found += ids_of(answer)
        path = answer.headers["Link"].partition("<")[2].partition(">")[0]

    assert found[: len(archived)] == ids_of(api.get(f"/v1/archived-jobs?limit={len(archived)}"))


def test_the_archive_by_name_and_status(api, archived):
    name = api.get(f"/v1/jobs/{archived[0]}").body["name"]
    of_type = ids_of(api.get(f"/v1/archived-jobs?name={name}"))
    failed = ids_of(api.get(f"/v1/archived-jobs?name={name}&status=failed"))

    assert set(of_type) == set(archived[::2])
    assert set(failed) == set(archived[::4])
    assert ids_of(api.get(f"/v1/archived-jobs?name={name}&status=expired")) == []
    assert ids_of(api.get("/v1/archived-jobs?name=no-such-type")) == []


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=101",
        "limit=x",
        "limit=1.5",
        "cursor=x",
        "cursor=%C2%B2.2.q:s1:p1:1",
        f"cursor={'9' * 5_000}.2.q:s1:p1:1",
    ],
)
def test_a_query_that_is_wrong(api, query):
    answer = api.get(f"/v1/archived-jobs?{query}")

    assert error(answer) == (400, "invalid_parameter")
    assert "instance" not in answer.body


def test_the_archive_of_many_types_is_shown(api, http_service, wait_until):
    names = {f"many-{number}" for number in range(32)}  # more than may be searched at a time
    with http_service.client() as client:
        for name in names:
            made = JobType(name, queue_of_type(name), datetime.now(UTC), DELIVERY_STRATEGIES[0])
            assert edit.add_job_type(http_service.folder / "etc", made)
            client.create_queue(made.queue)
    wait_until(lambda: names <= {one["name"] for one in api.get("/v2/job-types").body})
    ended = OneType(api)
    job_id = ended.new()
    assert ended.report(job_id, "succeeded", 7).status == 200

    def is_shown() -> bool:
        answer = api.get("/v1/archived-jobs?limit=100")  # 503 where it is not found in time
        return answer.status == 200 and job_id in ids_of(answer)

    wait_until(is_shown)


def test_a_status_that_there_is_not_is_an_error(api):
    assert error(api.get("/v1/archived-jobs?status=gone")) == (500, "server_error")


# --- faults ---------------------------------------------------------------------------------


def test_a_home_shard_that_is_away_is_waited_for_or_told(tmp_path, wait_until):
    with serving_http(tmp_path / "d", shards=1, request_timeout_ms=8_000) as deployment:
        jobs = OneType(http_of(deployment))
        job_id = jobs.new()
        deployment.supervisorctl("stop", "shard-1")
        away = jobs.put()
        deployment.supervisorctl("start", "shard-1")

        assert error(away) == (503, "service_unavailable")
        assert away.headers["Retry-After"]
        wait_until(lambda: jobs.get(job_id).get("id") == job_id)
