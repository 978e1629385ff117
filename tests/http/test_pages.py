"""Jobs of a queue, page by page."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

import pytest

from pinlaterd.client import Job
from tests.http.conftest import HttpClient, claim


def _pages(api: HttpClient, path: str, **query: object) -> Iterator[list]:
    """The jobs of each page until there are no more."""
    cursor = None
    while True:
        given = query if cursor is None else {**query, "cursor": cursor}
        answer = api.get(f"{path}/jobs?{urlencode(given)}")
        assert answer.status == 200, answer
        yield answer.body["jobs"]
        cursor = answer.body["cursor"]
        if cursor is None:
            return


def _listed(api: HttpClient, path: str, **query: object) -> list:
    return [job["data"] for page in _pages(api, path, **query) for job in page]


@pytest.fixture
def mixed(api: HttpClient, mail: str) -> str:
    """A queue with two jobs in each state; their data begins with its name."""
    acks: dict[str, list] = {"succeeded": [], "failed": []}
    for state in ("succeeded", "failed", "in_progress"):
        api.post(f"{mail}/jobs", {"jobs": [{"data": f"{state} {n}"} for n in range(2)]})
        for job in claim(api, mail, 2):
            ack = {"descriptor": job["descriptor"], "claim": job["claim"]}
            acks.get(state, []).append(ack)
    acks["failed"] = [{**ack, "retryable": False} for ack in acks["failed"]]
    assert api.post("/v2/jobs/acks", acks).status == 200
    later = {"run_after": "2100-01-01T00:00:00Z"}
    jobs = [{"data": f"pending {n}"} for n in range(2)]
    jobs += [{"data": f"scheduled {n}", **later} for n in range(2)]
    api.post(f"{mail}/jobs", {"jobs": jobs})
    return mail


@pytest.mark.parametrize("state", ["succeeded", "failed", "in_progress", "scheduled"])
def test_jobs_of_a_state_are_listed_as_jobs_are(api, mixed, state):
    [jobs] = _pages(api, mixed, state=state)

    assert sorted(job["data"] for job in jobs) == [f"{state} 0", f"{state} 1"]
    assert jobs[0] == api.get(f"/v2/jobs/{jobs[0]['descriptor']}").body


def test_pending_jobs_are_listed_with_those_that_are_scheduled(api, mixed):
    listed = _listed(api, mixed, state="pending")

    assert sorted(listed) == ["pending 0", "pending 1", "scheduled 0", "scheduled 1"]


@pytest.mark.parametrize("limit", [1, 3, 4, 100])
def test_pages_have_each_job_of_every_state_once(api, mixed, limit):
    pages = list(_pages(api, mixed, limit=limit))

    assert max(map(len, pages)) == min(limit, 10)
    states = ("succeeded", "failed", "in_progress", "scheduled", "pending")
    listed = sorted(job["data"] for page in pages for job in page)
    assert listed == sorted(f"{state} {n}" for state in states for n in range(2))


def test_pages_go_on_while_jobs_come_and_go(api, mail):
    api.post(f"{mail}/jobs", {"jobs": [{"data": n} for n in range(20)]})
    pages = _pages(api, mail, limit=5)
    first = next(pages)
    api.post(f"{mail}/jobs", {"jobs": [{"data": "new"} for _ in range(20)]})
    rest = [job["data"] for page in pages for job in page]

    assert sorted([*(job["data"] for job in first), *rest]) == list(range(20))


@pytest.mark.parametrize("text", ["a.c", "(x|y)*", "[", "\\E", "grüße", 'to": "ada"', "\n", "%"])
def test_a_text_is_found_letter_by_letter(api, mail, http_service, text):
    bodies = [f"<{text}>".encode(), b"abc", b"xyxy", b""]
    with http_service.client() as client:
        found, *_ = client.enqueue(mail.rpartition("/")[2], [Job(body) for body in bodies])

    listed = [job["descriptor"] for page in _pages(api, mail, text=text) for job in page]

    assert listed == [found]


def test_the_job_that_holds_a_key_is_found_by_it(api, mail):
    key = "order 17/ä&b"
    descriptor = api.post(f"{mail}/jobs", {"data": 1, "key": key}).body["descriptor"]
    [[job]] = _pages(api, mail, key=key)

    assert job == api.get(f"/v2/jobs/{descriptor}").body
    assert job["key"] == key
    assert list(_pages(api, mail, key="order 18")) == [[]]


def test_a_page_of_large_bodies_is_shorter(api, mail):
    for n in range(12):
        api.post(f"{mail}/jobs", {"data": [n, "x" * 900_000]})
    pages = list(_pages(api, mail))

    assert sorted(job["data"][0] for page in pages for job in page) == list(range(12))
    assert len(pages) > 1


def _fail(api: HttpClient, path: str, *statuses: str) -> list[dict]:
    """Fail a job with each status, one after the other; return them as they are shown."""
    failed = []
    for status in statuses:
        api.post(f"{path}/jobs", {"data": status, "attempts": 1})
        [job] = claim(api, path)
        ack = {"descriptor": job["descriptor"], "claim": job["claim"], "status": status}
        assert api.post("/v2/jobs/acks", {"failed": [ack]}).status == 200
        failed.append(api.get(f"/v2/jobs/{job['descriptor']}").body)
    return failed


def test_failed_jobs_come_by_their_ends_and_are_chosen(api, mail):
    failed = _fail(api, mail, "KeyError: 1 (a.py:1 in f)", "KeyError: 2 (a.py:2 in f)", "x [7]")
    said = [job["status"] for job in failed]

    def found(**query: object) -> list:
        return _listed(api, mail, state="failed", **query)

    assert found() == said[::-1]
    assert found(limit=1) == said[::-1]
    assert found(since=failed[1]["updated_at"], limit=2) == [said[2], said[1]]
    assert found(before=failed[1]["updated_at"]) == [said[0]]
    assert found(status_text="[7]") == [said[2]]
    assert found(message="KeyError: #") == [said[1], said[0]]
    assert found(message="KeyError: #", place="a.py:2 in f") == [said[1]]


def test_a_page_may_be_had_without_bodies_and_says_how_far_the_search_got(api, mail):
    _fail(api, mail, "no", "no", "yes")

    page = f"{mail}/jobs?state=failed&status_text=no&bodies=false&limit=1"
    while not (answer := api.get(page).body)["jobs"]:
        pass  # on a busy machine a search ends before it has found one

    [job] = answer["jobs"]
    assert (job["status"], "data" in job, "body" in job) == ("no", False, False)
    assert answer["in_state"] == 3
    assert answer["looked_at"] >= 2
    assert api.get(f"{mail}/jobs?state=failed&text=o").body.keys() == {"jobs", "cursor"}


@pytest.mark.parametrize(
    ("query", "field", "says"),
    [
        ("since=2026-11-26T03:00:00Z", "since", "with `state=succeeded` or `state=failed`"),
        ("state=pending&before=1000", "before", "with `state=succeeded` or `state=failed`"),
        ("state=failed&since=noon", "since", "Invalid RFC3339"),
        ("limit=0", "limit", ">= 1"),
        ("limit=1001", "limit", "<= 1000"),
        ("limit=many", "limit", "Expected `int`"),
        ("state=done", "state", "Invalid enum value 'done'"),
        ("text=", "text", "length >= 1"),
        ("colour=red", "colour", "unknown field"),
        ("key=7&state=failed", "key", "without `state`"),
        ("cursor=7", "cursor", "give the one of the page before"),
        ("cursor=failed-due.x", "cursor", "give the one of the page before"),
        ("state=pending&cursor=failed-due.0", "cursor", "with the same state"),
    ],
)
def test_a_mistake_in_the_query_is_named(api, mail, query, field, says):
    answer = api.get(f"{mail}/jobs?{query}")

    assert (answer.status, answer.body["code"]) == (400, "INVALID_REQUEST")
    [error] = answer.body["errors"]
    assert error["field"] == field
    assert says in error["message"]


def test_a_cursor_of_another_queue_is_refused(api, mail):
    other = f"{mail}_b"
    api.put(other)
    api.post(f"{mail}/jobs", {"jobs": [{"data": n} for n in range(2)]})
    cursor = api.get(f"{mail}/jobs?limit=1").body["cursor"]

    answers = [api.get(f"{path}/jobs?limit=1&cursor={cursor}") for path in (mail, other)]

    assert [answer.status for answer in answers] == [200, 400]
    assert answers[1].body["errors"][0]["field"] == "cursor"


def test_queues_are_listed_page_by_page(api, mail):
    for letter in "bcd":
        api.put(f"{mail}_{letter}")
    whole, found = api.get("/v2/queues").body, list[object]()
    cursor: str | None = ""
    while cursor is not None:
        page = api.get(f"/v2/queues?limit=3&cursor={cursor}").body
        assert len(page["queues"]) == 3 or page["cursor"] is None
        found, cursor = found + page["queues"], page["cursor"]

    assert found == whole["queues"]
    assert whole["cursor"] is None
    for field, value in (("limit", "0"), ("cursor", "a-b")):
        wrong = api.get(f"/v2/queues?{field}={value}")
        assert (wrong.status, wrong.body["errors"][0]["field"]) == (400, field)


@pytest.mark.parametrize("query", ["", "?key=order-17"])
def test_a_queue_that_is_not_there_is_named(api, query):
    answer = api.get(f"/v2/queues/nowhere/jobs{query}")

    assert (answer.status, answer.body["code"]) == (404, "QUEUE_NOT_FOUND")
