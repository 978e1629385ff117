"""Retries and deletes of many jobs; pauses of a queue."""

from __future__ import annotations

import pytest

from tests.http.conftest import HttpClient, claim


def _counts(api: HttpClient, path: str) -> dict[str, int]:
    counts: dict[str, int] = api.get(path).body["counts"]
    return {state: count for state, count in counts.items() if count}


@pytest.fixture
def failed(api: HttpClient, mail: str) -> str:
    """A queue with twelve failed jobs, six of each priority."""
    jobs = [{"data": f"job {n}", "priority": 1 + n % 2} for n in range(12)]
    api.post(f"{mail}/jobs", {"jobs": jobs})
    claimed = claim(api, mail, 12)
    acks = [
        {"descriptor": job["descriptor"], "claim": job["claim"], "retryable": False}
        for job in claimed
    ]
    api.post("/v2/jobs/acks", {"failed": acks})
    assert _counts(api, mail) == {"failed": 12}
    return mail


@pytest.mark.parametrize("call", ["retry", "delete"])
@pytest.mark.parametrize("way", ["query", "body"])
def test_a_preview_shows_what_would_be_and_changes_nothing(api, failed, call, way):
    body = {"state": "failed", "limit": 11} | ({"preview": True} if way == "body" else {})
    answer = api.post(f"{failed}/{call}" + ("?preview=true" if way == "query" else ""), body)

    assert (answer.status, answer.body["preview"], answer.body["count"]) == (200, True, 11)
    assert len({job["descriptor"] for job in answer.body["jobs"]}) == 10
    assert answer.body["jobs"][0]["data"].startswith("job ")
    assert _counts(api, failed) == {"failed": 12}


def test_failed_jobs_are_retried(api, failed):
    some = api.post(f"{failed}/retry", {"limit": 8, "attempts": 3})
    rest = api.post(f"{failed}/retry", {"run_after": "2100-01-01T00:00:00Z"})

    assert (some.body["count"], rest.body["count"]) == (8, 4)
    assert _counts(api, failed) == {"pending": 8, "scheduled": 4}
    [job] = claim(api, failed)
    assert (job["attempts_allowed"], job["attempts_remaining"]) == (3, 3)


def test_jobs_of_a_priority_are_retried_alone(api, failed):
    answer = api.post(f"{failed}/retry", {"priority": 2})

    assert answer.body == {"preview": False, "count": 6, "jobs": []}
    [job] = claim(api, failed)
    assert ":p2:" in job["descriptor"]


def test_jobs_with_a_text_are_deleted(api, failed):
    only = {"state": "failed", "text": "job 1"}
    shown = api.post(f"{failed}/delete", {**only, "preview": True})
    deleted = api.post(f"{failed}/delete", only)

    assert sorted(job["data"] for job in shown.body["jobs"]) == ["job 1", "job 10", "job 11"]
    assert (shown.body["count"], deleted.body["count"]) == (3, 3)
    assert _counts(api, failed) == {"failed": 9}


@pytest.mark.parametrize("call", ["retry", "delete"])
def test_jobs_that_are_named_are_changed_alone(api, failed, call):
    jobs = api.get(f"{failed}/jobs?state=failed").body["jobs"]
    body = {"state": "failed", "descriptors": [job["descriptor"] for job in jobs[:3]]}

    shown = api.post(f"{failed}/{call}?preview=true", body)
    untouched = _counts(api, failed)
    done = api.post(f"{failed}/{call}", body)

    assert {job["descriptor"] for job in shown.body["jobs"]} == set(body["descriptors"])
    assert shown.body["jobs"][0]["data"].startswith("job ")
    assert untouched == {"failed": 12}
    assert (shown.body["count"], done.body["count"]) == (3, 3)
    assert _counts(api, failed) == {"failed": 9} | ({"pending": 3} if call == "retry" else {})


def test_jobs_are_retried_by_text_and_spread(api, failed):
    only = {"text": "job 1", "run_after": "2100-01-01T00:00:00Z", "spread_ms": 3_600_000}
    shown = api.post(f"{failed}/retry", {**only, "preview": True})
    done = api.post(f"{failed}/retry", {**only, "limit": 3})

    assert (shown.body["count"], done.body["count"]) == (3, 3)
    jobs = api.get(f"{failed}/jobs?state=scheduled").body["jobs"]
    assert sorted(job["data"] for job in jobs) == ["job 1", "job 10", "job 11"]
    times = {job["run_after"] for job in jobs}
    assert len(times) > 1
    assert min(times).startswith("2100-01-01T00:00:00")


def test_jobs_are_chosen_by_their_status(api, mail):
    api.post(f"{mail}/jobs", {"jobs": [{"data": n, "attempts": 1} for n in range(4)]})
    claimed = claim(api, mail, 4)
    api.post(
        "/v2/jobs/acks",
        {
            "failed": [
                {key: job[key] for key in ("descriptor", "claim")}
                | {"status": f"no {job['data']} [x]" if job["data"] else "other"}
                for job in claimed
            ]
        },
    )
    by_message = {"message": "no # [x]", "preview": True}
    by_text = {"status_text": "2 [x]", "preview": True}

    assert api.post(f"{mail}/retry", by_message).body["count"] == 3
    shown = api.post(f"{mail}/retry", by_text).body
    assert (shown["count"], [job["data"] for job in shown["jobs"]]) == (1, [2])
    assert api.post(f"{mail}/retry", {**by_message, "preview": False}).body["count"] == 3
    assert _counts(api, mail) == {"failed": 1, "pending": 3}


def test_jobs_that_failed_later_stay(api, failed):
    body = {"state": "failed", "ended_before": "2020-01-01T00:00:00Z"}

    assert api.post(f"{failed}/retry", body).body["count"] == 0
    assert api.post(f"{failed}/delete", body).body["count"] == 0
    body["ended_before"] = "2100-01-01T00:00:00Z"
    assert api.post(f"{failed}/retry", body).body["count"] == 12


def test_a_descriptor_of_another_queue_is_named(api, failed):
    answer = api.post(f"{failed}/retry", {"descriptors": ["other:s1:p1:1"]})

    assert answer.status == 400
    assert "other:s1:p1:1" in answer.body["detail"]


def test_pending_jobs_are_deleted_with_those_that_are_scheduled(api, mail):
    later = {"data": 2, "run_after": "2100-01-01T00:00:00Z"}
    api.post(f"{mail}/jobs", {"jobs": [{"data": 1}, later]})
    shown = api.post(f"{mail}/delete?preview=true", {"state": "pending"})

    deleted = api.post(f"{mail}/delete", {"state": "pending"})

    assert (shown.body["count"], deleted.body["count"]) == (2, 2)
    assert _counts(api, mail) == {}


@pytest.mark.parametrize(
    ("call", "body", "field"),
    [
        ("delete", {}, "state"),  # which state is never guessed
        ("delete", {"state": "scheduled"}, "state"),
        ("delete", {"state": "failed", "text": ""}, "text"),
        ("delete", {"state": "failed", "limit": 0}, "limit"),
        ("retry", {"state": "pending"}, "state"),
        ("retry", {"colour": "x"}, "colour"),
        ("retry", {"run_after": "1969-12-31T00:00:00Z"}, "run_after"),
        ("retry", {"descriptors": ["no such"]}, "descriptors"),
        ("retry", {"descriptors": "mail:s1:p1:1"}, "descriptors"),
        ("retry?preview=maybe", {}, "preview"),
        ("retry?sure=true", {}, "sure"),
        ("pause", {"preview": 1}, "preview"),
    ],
)
def test_a_mistake_changes_nothing(api, failed, call, body, field):
    answer = api.post(f"{failed}/{call}", body)

    assert (answer.status, answer.body["code"]) == (400, "INVALID_REQUEST")
    assert answer.body["errors"][0]["field"] == field
    assert _counts(api, failed) == {"failed": 12}


def test_a_paused_queue_hands_out_nothing_until_it_is_resumed(api, mail, wait_until):
    api.put(mail, {"limits": {"max_jobs_per_second": 5000}})
    api.post(f"{mail}/jobs", {"jobs": [{"data": n} for n in range(100)]})
    shown = api.post(f"{mail}/pause?preview=true")
    running = claim(api, mail)

    paused = api.post(f"{mail}/pause", {"reason": "disk check"})
    wait_until(lambda: api.post(f"{mail}/claims").status == 429)
    wait_until(lambda: api.get(mail).body["paused"])
    described = api.get(mail)
    resumed = api.post(f"{mail}/resume")

    assert (shown.status, shown.body["paused"]) == (200, True)
    assert running
    assert (paused.status, paused.body["paused"]) == (200, True)
    assert described.body["limits"]["max_jobs_per_second"] == 5000
    assert (resumed.status, resumed.body["paused"]) == (200, False)
    wait_until(lambda: api.post(f"{mail}/claims").body.get("jobs"))


@pytest.mark.parametrize(
    ("call", "body"),
    [("retry", {}), ("delete", {"state": "failed"}), ("pause", {}), ("resume", {})],
)
def test_a_queue_that_is_not_there_is_named(api, call, body):
    answer = api.post(f"/v2/queues/nowhere/{call}", body)

    assert (answer.status, answer.body["code"]) == (404, "QUEUE_NOT_FOUND")
