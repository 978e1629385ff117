"""The calls of /v2, as a client that has only HTTP makes them."""

from __future__ import annotations

import base64
import http.client
import os
import signal
import threading

import psutil
import pytest

from pinlaterd.client import Job
from tests.deployment import Deployment, frozen
from tests.http.conftest import HttpClient, claim, http_of, serving_http
from tests.http.test_stream import LINES


def test_a_job_goes_from_enqueue_to_its_end(api, mail):
    enqueued = api.post(f"{mail}/jobs", {"data": {"to": "ada"}})
    [claimed] = api.post(f"{mail}/claims", {"limit": 10, "wait_ms": 30_000}).body["jobs"]
    acked = api.post(
        "/v2/jobs/acks",
        {
            "succeeded": [
                {
                    "descriptor": claimed["descriptor"],
                    "claim": claimed["claim"],
                    "status": "sent",
                }
            ]
        },
    )
    job = api.get(f"/v2/jobs/{claimed['descriptor']}")

    assert enqueued.status == 201
    assert enqueued.body == {"descriptor": claimed["descriptor"], "existed": False}
    assert claimed["data"] == {"to": "ada"}
    assert (claimed["attempts_allowed"], claimed["attempts_remaining"]) == (2, 2)
    assert acked.status == 200
    assert acked.body == {
        "succeeded": [{"descriptor": claimed["descriptor"], "outcome": "done"}],
        "failed": [],
    }
    assert job.status == 200
    assert job.body["state"] == "succeeded"
    assert job.body["status"] == "sent"
    assert job.body["queue"] == mail.rpartition("/")[2]
    assert job.body["data"] == {"to": "ada"}
    assert job.body["created_at"].endswith("Z")


def test_a_queue_is_created_once_and_counts_its_jobs(api, mail):
    again = api.put(mail)
    api.post(f"{mail}/jobs", {"jobs": [{"data": 1}, {"data": 2}, {"data": 3}]})
    api.post(f"{mail}/jobs", {"data": 4, "run_after": "2100-01-01T00:00:00Z"})
    claim(api, mail)

    queue = api.get(mail)
    names = [one["name"] for one in api.get("/v2/queues").body["queues"]]

    assert again.status == 200
    assert queue.body["counts"] == {
        "pending": 2,
        "scheduled": 1,
        "in_progress": 1,
        "succeeded": 0,
        "failed": 0,
    }
    assert queue.body["name"] in names


def test_data_stays_as_it_was_written(api, mail, http_service):
    """Numbers keep their digits, objects their order and their keys given twice."""
    data = b'{"b": 1.50, "a": 12345678901234567890, "b": [ 1e400 ]}'

    api.post(f"{mail}/jobs", b'{"data": ' + data + b"}")

    with http_service.client() as client:
        [job] = client.dequeue(mail.rpartition("/")[2], limit=1, max_wait_ms=30_000)
    assert job.body == data


def test_bytes_that_are_no_json_are_given_in_base64(api, mail, http_service):
    with http_service.client() as client:
        client.enqueue(mail.rpartition("/")[2], [Job(body) for body in (b"\xff", b"{", b"[1]")])

    jobs = claim(api, mail, 3)

    given = [job.get("data", job.get("body")) for job in jobs]
    assert sorted(map(str, given)) == sorted(["/w==", "ew==", "[1]"])
    assert base64.b64decode("/w==") == b"\xff"


def test_options_of_a_job_are_kept(api, mail):
    sent = {
        "body": base64.b64encode(b"\0\1").decode(),
        "priority": 2,
        "attempts": 7,
        "status": "new",
        "run_after": 4_102_444_800_000,
        "expires_at": "2101-01-01T01:00:00+01:00",
    }

    descriptor = api.post(f"{mail}/jobs", sent).body["descriptor"]

    job = api.get(f"/v2/jobs/{descriptor}").body
    assert ":p2:" in descriptor
    assert (job["state"], job["attempts_allowed"], job["status"]) == ("pending", 7, "new")
    assert job["run_after"] == "2100-01-01T00:00:00Z"
    assert (job["expires_at"], job["end_reason"]) == ("2101-01-01T00:00:00Z", None)
    assert job["body"] == "AAE="


def test_a_claim_lasts_as_long_as_its_lease(api, mail, wait_until):
    jobs = [api.post(f"{mail}/jobs", {"data": n}).body["descriptor"] for n in range(2)]
    claimed = claim(api, mail, 2, lease_ms=10_000)
    kept = next(job for job in claimed if job["descriptor"] == jobs[0])
    renewal = {"descriptor": jobs[0], "claim": kept["claim"]}

    def renew() -> bool:
        answer = api.post("/v2/jobs/checkpoints", {"checkpoints": [renewal], "lease_ms": 60_000})
        assert answer.body["checkpoints"][0]["outcome"] == "done"
        return bool(api.get(f"/v2/jobs/{jobs[1]}").body["state"] == "pending")

    wait_until(renew)
    assert api.get(f"/v2/jobs/{jobs[0]}").body["state"] == "in_progress"
    assert api.post(f"{mail}/claims", {"lease_ms": 999}).status == 400


def test_an_expired_job_is_not_claimed(api, mail, wait_until):
    descriptor = api.post(f"{mail}/jobs", {"data": 1, "expires_at": 1_000}).body["descriptor"]

    def is_failed() -> bool:
        assert api.post(f"{mail}/claims", {}).body == {"jobs": []}
        return bool(api.get(f"/v2/jobs/{descriptor}").body["state"] == "failed")

    wait_until(is_failed)
    job = api.get(f"/v2/jobs/{descriptor}").body
    assert (job["status"], job["end_reason"]) == ("expired", "expired")
    assert job["expires_at"] == "1970-01-01T00:00:01Z"


def test_a_failed_job_is_retried_unless_it_is_not_retryable(api, mail):
    api.post(f"{mail}/jobs", {"jobs": [{"data": 1}, {"data": 2}]})
    jobs = claim(api, mail, 2)
    failed = [
        {"descriptor": job["descriptor"], "claim": job["claim"], "retryable": job["data"] == 1}
        for job in jobs
    ]

    answer = api.post("/v2/jobs/acks", {"failed": failed})

    assert {one["outcome"] for one in answer.body["failed"]} == {"done"}
    states = {job["data"]: api.get(f"/v2/jobs/{job['descriptor']}").body["state"] for job in jobs}
    assert states == {1: "pending", 2: "failed"}


def test_an_ack_whose_claim_no_longer_holds_is_stale(api, mail):
    api.post(f"{mail}/jobs", {"jobs": [{"data": 1}, {"data": 2}]})
    one, other = claim(api, mail, 2)
    acks = [{"descriptor": job["descriptor"], "claim": job["claim"]} for job in (one, other)]
    api.post("/v2/jobs/acks", {"succeeded": acks[:1]})

    again = api.post("/v2/jobs/acks", {"succeeded": acks})

    assert [ack["outcome"] for ack in again.body["succeeded"]] == ["stale", "done"]


def test_checkpoints_change_jobs_that_run_and_tell_which_applied(api, mail):
    api.post(f"{mail}/jobs", {"jobs": [{"data": n} for n in range(3)]})
    jobs = claim(api, mail, 3)
    named = [{"descriptor": job["descriptor"], "claim": job["claim"]} for job in jobs]
    api.post("/v2/jobs/acks", {"succeeded": named[1:2]})

    changed = {**named[0], "data": {"half": 1}, "status": "at page 7;", "attempts": 5}
    answer = api.post(
        "/v2/jobs/checkpoints",
        {"checkpoints": [changed, named[1], {**named[2], "release": True}]},
    )

    outcomes = [(one["descriptor"], one["outcome"]) for one in answer.body["checkpoints"]]
    expected = zip(named, ["done", "stale", "done"], strict=True)
    assert outcomes == [(one["descriptor"], outcome) for one, outcome in expected]
    first, _, last = [api.get(f"/v2/jobs/{one['descriptor']}").body for one in named]
    assert (first["state"], first["data"], first["status"]) == (
        *("in_progress", {"half": 1}, "at page 7;"),
    )
    assert (first["attempts_allowed"], last["state"], last["attempts_remaining"]) == (
        *(5, "pending", 2),
    )


def test_a_job_whose_run_after_a_checkpoint_put_off_is_counted_where_it_is(api, mail):
    api.post(f"{mail}/jobs", {"data": 1})
    [job] = claim(api, mail)
    named = {"descriptor": job["descriptor"], "claim": job["claim"]}
    changed = {**named, "run_after": "2100-01-01T00:00:00Z"}
    api.post("/v2/jobs/checkpoints", {"checkpoints": [changed]})
    running = api.get(mail).body["counts"]
    api.post("/v2/jobs/acks", {"succeeded": [named]})
    ended = api.get(mail).body["counts"]

    assert (running["in_progress"], running["scheduled"]) == (1, 0)
    assert (ended["in_progress"], ended["succeeded"]) == (0, 1)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"descriptor": "no such", "claim": "x"}, "checkpoints[0].descriptor"),
        ({"descriptor": "mail:s1:p1:1", "claim": ""}, "checkpoints[0].claim"),
        ({"descriptor": "mail:s1:p1:1"}, "checkpoints[0].claim"),
        ({"descriptor": "mail:s1:p1:1", "claim": "x", "run_after": -1}, "checkpoints[0].run_after"),
        (
            {"descriptor": "mail:s1:p1:1", "claim": "x", "run_after": "1969-12-31T00:00:00Z"},
            "checkpoints[0].run_after",
        ),
        ({"descriptor": "mail:s1:p1:1", "claim": "x", "data": 1, "body": ""}, "checkpoints[0]"),
    ],
)
def test_a_mistake_in_a_checkpoint_is_named_with_its_place(api, given, field):
    answer = api.post("/v2/jobs/checkpoints", {"checkpoints": [given]})

    assert answer.status == 400
    assert answer.body["errors"][0]["field"] == field


def test_a_claim_waits_for_a_job(api, mail):
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(api.post(f"{mail}/claims", {"wait_ms": 30_000}))
    )
    waiting.start()
    api.post(f"{mail}/jobs", {"data": "soon"})
    waiting.join()

    assert [job["data"] for job in answers[0].body["jobs"]] == ["soon"]


def test_jobs_claimed_for_a_client_that_has_gone_are_pending_again(api, mail, wait_until):
    import socket

    with socket.create_connection(("127.0.0.1", api.port)) as gone:
        body = b'{"wait_ms": 20000}'
        head = f"POST {mail}/claims HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        gone.sendall(head.encode() + body)
        api.get(mail)  # the other request was read by now
    api.post(f"{mail}/jobs", {"data": 1})

    wait_until(lambda: api.post(f"{mail}/claims").body["jobs"])


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        (b'{"data": 1, "priority": "high"}', "priority", "Expected `int`"),
        (b'{"jobs": [{"data": 1}, {"data": 1, "attempts": 0}]}', "jobs[1].attempts", ">= 1"),
        (b'{"jobs": [{"data": 1}, {}]}', "jobs[1]", "give `data`"),
        (b'{"data": 1, "body": "AA=="}', "", "not both"),
        (b'{"body": "?"}', "body", "base64"),
        (b'{"data": 1, "run_after": "2026-01-01T00:00:00"}', "run_after", "timezone"),
        (b'{"data": 1, "run_after": -1}', "run_after", ">= 0"),
        (b'{"jobs": [{"data": 1, "expires_at": -1}]}', "jobs[0].expires_at", ">= 0"),
        (b'{"data": 1, "run_after": "1969-12-31T00:00:00Z"}', "run_after", "from 1970"),
        (b'{"data": 1, "colour": "red"}', "colour", "/v2/docs"),
        (b'{"jobs": [{"data": 1, "colour": "red"}]}', "jobs[0].colour", "/v2/docs"),
        (b'{"data": 1', "", "truncated"),
        (b'{"data": "\xff"}', "", "UTF-8"),
        (b'{"data": ' + b"[" * 100_000, "", "nested"),
        (b"[]", "", "object"),
    ],
)
def test_a_mistake_in_a_body_is_named_with_its_place(api, mail, body, field, says):
    answer = api.post(f"{mail}/jobs", body)

    assert answer.status == 400
    assert answer.headers["Content-Type"] == "application/problem+json"
    [error] = answer.body["errors"]
    assert error["field"] == field
    assert says in error["message"]
    assert answer.body["code"] == "INVALID_REQUEST"


def test_nothing_of_a_list_with_a_mistake_is_stored(api, mail):
    api.post(f"{mail}/jobs", {"jobs": [{"data": 1}, {"data": 2, "priority": 100}]})

    assert api.get(mail).body["counts"]["pending"] == 0


def test_refusals_of_the_service_have_its_codes(api, mail):
    unknown = api.post("/v2/queues/nowhere/jobs", {"data": 1})
    invalid = api.put("/v2/queues/no-hyphens")
    priority = api.post(f"{mail}/jobs", {"jobs": [{"data": 1}, {"data": 1, "priority": 9}]})
    default = api.put("/v2/queues/nowhere", {"limits": {"default_priority": 9}})
    descriptor = f"{mail.rpartition('/')[2]}:s1:p1:1"
    late = {"descriptor": descriptor, "claim": "x", "retry_delay_ms": 2**63 - 1}
    delayed = api.post("/v2/jobs/acks", {"failed": [late]})
    no_job = api.get("/v2/jobs/mail:s1:p1:1")
    password = api.delete(mail, headers={"X-Admin-Password": "guess"})

    assert (unknown.status, unknown.body["code"]) == (404, "QUEUE_NOT_FOUND")
    assert (invalid.status, invalid.body["code"]) == (400, "QUEUE_NAME_INVALID")
    assert (priority.status, priority.body["code"]) == (400, "PRIORITY_NOT_SUPPORTED")
    assert (delayed.status, delayed.body["code"]) == (400, "INVALID_REQUEST")
    assert (default.status, default.body["code"]) == (400, "INVALID_REQUEST")
    assert api.get("/v2/queues/nowhere").status == 404
    named = [answer.body["errors"][0]["field"] for answer in (invalid, priority, delayed, default)]
    assert named == ["queue", "jobs[1].priority", "retry_delay_ms", "limits.default_priority"]
    assert (no_job.status, no_job.body["code"]) == (404, "JOB_NOT_FOUND")
    assert (password.status, password.body["code"]) == (403, "PASSWORD_INVALID")


def test_what_is_not_there_says_what_is(api, mail):
    paths = ("/v3", "/v1foo", "/v10/x", "/v1.x", "//v1", "/v2foo", "/v2/job-typesx", "/rickoverx")
    method = api.post(mail)

    for path in paths:
        answer = api.get(path)
        assert (answer.status, answer.body["code"]) == (404, "NOT_FOUND"), path
    assert (method.status, method.body["code"]) == (405, "METHOD_NOT_ALLOWED")
    assert method.headers["Allow"] == "DELETE, GET, HEAD, PUT"


def test_a_limit_is_set_and_shown(api, mail, wait_until):
    limited = api.put(mail, {"limits": {"max_jobs_per_second": 0}})
    wait_until(lambda: api.get(mail).body["limits"]["max_jobs_per_second"] == 0)
    # Routers may learn of a limit later, and so hand out some jobs.
    api.post(f"{mail}/jobs", {"jobs": [{"data": n} for n in range(100)]})
    wait_until(lambda: api.post(f"{mail}/claims").status == 429)
    refused = api.post(f"{mail}/claims")
    api.put(mail, {"limits": {"max_jobs_per_second": None}})

    assert limited.status == 200
    assert refused.body["code"] == "DEQUEUE_RATE_LIMITED"
    assert int(refused.headers["Retry-After"]) >= 1
    wait_until(lambda: api.post(f"{mail}/claims").body.get("jobs"))


def test_a_queue_that_is_full_says_when_to_try_again(api, mail, wait_until):
    api.put(mail, {"limits": {"max_pending": 0}})
    wait_until(lambda: api.post(f"{mail}/jobs", {"data": 1}).status == 503)
    keyed = {"data": 1, "key": "full"}
    refused = [api.post(f"{mail}/jobs", job) for job in ({"data": 1}, keyed)]
    api.put(mail, {"limits": {"max_pending": None}})

    for each in refused:
        assert (each.status, each.headers["Retry-After"]) == (503, "1")
        assert "max_pending" in each.body["detail"]
    wait_until(lambda: api.post(f"{mail}/jobs", {"data": 1}).status == 201)


def test_what_an_enqueue_does_not_say_is_the_queues_default(api, mail, wait_until):
    api.put(mail, {"limits": {"default_attempts": 5, "default_priority": 2}})
    limits = {
        "max_jobs_per_second": None,
        "max_in_progress": None,
        "max_pending": None,
        "default_attempts": 5,
        "default_priority": 2,
    }
    wait_until(lambda: api.get(mail).body["limits"] == limits)

    def attempts_and_priority(job: dict[str, object]) -> tuple[int, str]:
        descriptor = api.post(f"{mail}/jobs", job).body["descriptor"]
        found = api.get(f"/v2/jobs/{descriptor}").body
        return found["attempts_allowed"], descriptor.split(":")[2]

    wait_until(lambda: attempts_and_priority({"data": 1}) == (5, "p2"))
    assert attempts_and_priority({"data": 1, "attempts": 2, "priority": 1}) == (2, "p1")
    api.put(mail, {"limits": {"default_attempts": None, "default_priority": None}})
    wait_until(lambda: attempts_and_priority({"data": 1}) == (2, "p1"))


def test_the_process_is_one_of_the_service(tmp_path, wait_until):
    """It is in `status`, counted in /health, and back after a kill -9."""
    with serving_http(tmp_path / "d") as deployment:
        api = http_of(deployment)
        shown = deployment.processes_called("http")
        with frozen(deployment.supervisord_pid()):  # which would start another one at once
            os.kill(killed := next(iter(shown)), signal.SIGKILL)
            wait_until(lambda: not deployment.status()["healthy"])
        deployment.wait_until_serving()
        wait_until(lambda: _answers(api))
        back = deployment.pid_of("http")

    assert [process["state"] for process in shown.values()] == ["serving"]
    assert back != killed


def test_a_restart_refuses_no_request(tmp_path):
    with serving_http(tmp_path / "d") as deployment:
        api = http_of(deployment)
        api.put("/v2/queues/mail")
        failures: list[object] = []
        done = threading.Event()

        def enqueue() -> None:
            while not done.is_set():
                try:
                    answer = api.post("/v2/queues/mail/jobs", {"data": 1})
                    if answer.status != 201:
                        failures.append(answer)
                except OSError as error:
                    failures.append(error)

        load = threading.Thread(target=enqueue)
        load.start()
        deployment.admin("restart", "http")
        deployment.admin("restart", "router")
        done.set()
        load.join()

    assert failures == []


def test_a_claim_that_waits_is_answered_when_the_process_is_restarted(tmp_path):
    with serving_http(tmp_path / "d") as deployment:
        api = http_of(deployment)
        api.put("/v2/queues/mail")
        waiting = http.client.HTTPConnection("127.0.0.1", api.port, timeout=60)
        waiting.request("POST", "/v2/queues/mail/claims", b'{"wait_ms": 60000}')
        api.get("/v3")  # the claim was read by now
        deployment.admin("restart", "http")
        answer = waiting.getresponse().read()
        waiting.close()
        api.post("/v2/queues/mail/jobs", {"data": 1})
        later = claim(api, "/v2/queues/mail")

    assert answer == b'{"jobs":[]}'
    assert [job["data"] for job in later] == [1]


def test_a_router_that_was_killed_costs_no_request(tmp_path, wait_until):
    with serving_http(tmp_path / "d") as deployment:
        api = http_of(deployment)
        api.put("/v2/queues/mail")
        killed = deployment.kill("router")
        wait_until(lambda: not psutil.pid_exists(killed))

        answer = api.post("/v2/queues/mail/jobs", {"data": 1})

    assert answer.status == 201


def test_a_shard_that_hangs_is_named_and_may_be_asked_again(tmp_path):
    with serving_http(tmp_path / "d", request_timeout_ms=8_000) as deployment:
        api = http_of(deployment)
        api.put("/v2/queues/mail")
        descriptor = api.post("/v2/queues/mail/jobs", {"data": 1}).body["descriptor"]
        with frozen(deployment.pid_of("shard-1")):
            answer = api.get(f"/v2/jobs/{descriptor}")

    assert (answer.status, answer.body["code"]) == (503, "SHARD_CONNECTION_FAILED")
    assert int(answer.headers["Retry-After"]) >= 1
    assert "shard 1" in answer.body["detail"]


def _answers(api: HttpClient) -> bool:
    try:
        return api.get("/v2/queues").status == 200
    except OSError:
        return False


def test_a_deployment_without_it_starts_no_such_process(service: Deployment):
    assert "http" not in service.pids()


def test_a_job_with_a_key_is_enqueued_once(api, mail):
    jobs = f"{mail}/jobs"
    first = api.post(jobs, {"data": 1}, headers={"Idempotency-Key": "order-17"})
    again = api.post(jobs, {"data": 2}, headers={"Idempotency-Key": "order-17"})
    in_body = api.post(jobs, {"data": 3, "key": "order-17"})
    many = api.post(
        jobs, {"jobs": [{"data": 4, "key": "order-18"}, {"data": 5, "key": "order-17"}]}
    )
    job = api.get(f"/v2/jobs/{first.body['descriptor']}")

    assert (first.status, first.body["existed"]) == (201, False)
    for answer in (again, in_body):
        assert (answer.status, answer.body) == (200, {**first.body, "existed": True})
    assert many.status == 201
    assert [one["existed"] for one in many.body["jobs"]] == [False, True]
    assert (job.body["key"], job.body["data"]) == ("order-17", 1)
    assert api.get(mail).body["counts"]["pending"] == 2


def test_a_key_that_is_wrong_is_named(api, mail):
    jobs, headers = f"{mail}/jobs", {"Idempotency-Key": "k"}
    wrong = [
        (api.post(jobs, {"data": 1, "key": ""}), "key"),
        (api.post(jobs, {"jobs": [{"data": 1}, {"data": 1, "key": "é" * 101}]}), "jobs[1].key"),
        (api.post(jobs, {"data": 1, "key": "other"}, headers=headers), "Idempotency-Key"),
        (api.post(jobs, {"jobs": [{"data": 1}]}, headers=headers), "Idempotency-Key"),
        (api.post(jobs, b'{"data": 1}', headers={**headers, **LINES}), "Idempotency-Key"),
        (api.post(jobs, {"data": 1}, headers={"Idempotency-Key": "\xff"}), "Idempotency-Key"),
    ]

    for answer, field in wrong:
        assert answer.status == 400
        assert [error["field"] for error in answer.body["errors"]] == [field]
    assert api.get(mail).body["counts"]["pending"] == 0
