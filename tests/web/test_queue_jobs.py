"""The jobs on the page of a queue, as a browser without scripts shows them."""

from __future__ import annotations

import html
import re
from urllib.parse import quote

import pytest

from pinlaterd.client import Job
from pinlaterd.web.queue import JobsQuery
from tests.deployment import Deployment
from tests.web.conftest import LoadUntil, PageAnswer, Visitor
from tests.web.failing import fail

pytestmark = pytest.mark.service

QUEUE, FAILED = "listed", 120
LATE_MS = 4_102_444_800_000  # in the year 2100


@pytest.fixture(scope="module")
def stored(dashboard: Deployment) -> list[str]:
    """Descriptors of jobs that failed, the last one first."""
    with dashboard.client("mailer:web3") as client:
        statuses = [f"KeyError: {n} (mail.py:{n % 2} in send)" for n in range(FAILED)]
        failed = fail(client, QUEUE, statuses)[::-1]
        client.enqueue(QUEUE, [Job(b"ready", 2), Job(b"later", run_after_ms=LATE_MS)])
    return failed


@pytest.fixture
def failed(stored: list[str], visitor: Visitor, load_until: LoadUntil) -> list[str]:
    """The same, once the dashboard's figures know the queue."""
    load_until(visitor, f"/q/{QUEUE}", _shows_all_that_failed)
    return stored


def _shows_all_that_failed(page: PageAnswer) -> bool:
    return page.cells.get("figure failed") == str(FAILED)


def _listed(page: PageAnswer) -> list[str]:
    return re.findall(r'href="/j/([^"]+)"', page.body)


def _older(page: PageAnswer) -> str:
    found = re.search(r'href="([^"#]*cursor=[^"#]*)', page.body)
    return html.unescape(found[1]) if found else ""


def test_failed_jobs_are_listed_page_by_page_the_latest_first(visitor: Visitor, failed: list[str]):
    pages = [visitor.get(f"/q/{QUEUE}?state=failed")]
    while older := _older(pages[-1]):
        pages.append(visitor.get(older))

    assert [len(_listed(page)) for page in pages] == [50, 50, 20]
    assert [descriptor for page in pages for descriptor in _listed(page)] == failed
    assert "KeyError: 119 (mail.py:1 in send)" in pages[0].text
    assert "These are all." in pages[-1].text


def test_jobs_are_found_by_body_message_place_and_time(
    dashboard: Deployment, visitor: Visitor, failed: list[str]
):
    with dashboard.client() as client:
        since = client.lookup([failed[1]])[failed[1]].updated_at_ms

    def load(query: str) -> PageAnswer:
        """On a busy machine a search ends before it has looked at all jobs."""
        path = f"/q/{QUEUE}?state=failed&{query}"
        while "jobs so far" in (page := visitor.get(path)).text:
            pass
        return page

    def found(query: str) -> list[str]:
        return _listed(load(query))

    assert found("body=ada+7&by=text") == [*failed[40:50], failed[112]]
    page = load("body=ada+7&by=text")
    assert "11 failed jobs match: body “ada 7”" in page.text
    assert found("body=ada+7$&by=RE2") == [failed[112]]
    assert found("body=ada+7$&by=text") == []
    assert found("message=KeyError%3A+%23&place=mail.py%3A1+in+send")[0] == failed[0]
    assert found(f"since={since}") == failed[:2]
    assert found("worker=nobody") == []


def test_other_states_and_priorities_have_their_jobs(visitor: Visitor, failed: list[str]):
    assert failed
    [ready] = _listed(visitor.get(f"/q/{QUEUE}"))
    assert ":p2:" in ready
    assert _listed(visitor.get(f"/q/{QUEUE}?priority=1")) == []
    page = visitor.get(f"/q/{QUEUE}?state=scheduled")
    assert len(_listed(page)) == 1
    assert re.search(r"in \d+ d ", page.text)
    assert "is running" in visitor.get(f"/q/{QUEUE}?state=running").text


def test_mistakes_are_said_and_the_rest_of_the_page_is_there(
    visitor: Visitor, failed: list[str], load_until: LoadUntil
):
    assert failed
    path = f"/q/{QUEUE}?state=failed&body=(&by=RE2"
    page = load_until(visitor, path, _shows_all_that_failed)

    assert page.status == 200
    assert "bodyRegexToMatch is no RE2 pattern" in page.text
    assert visitor.get(f"/q/{QUEUE}?state=broken").status == 400
    assert visitor.get(f"/q/{QUEUE}?state=failed&since=noon").status == 400


MANY_DIGITS = "9" * 5_000


@pytest.mark.parametrize("digits", [MANY_DIGITS, "\N{SUPERSCRIPT TWO}", "-1", "1.5"])
@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"/q/{QUEUE}?priority={{}}", "priority"),
        ("/j/{job}?at={}", "at"),
        ("/find.json?q=x&seen={}", "seen"),
        (f"/q/{QUEUE}?state=failed&since={{}}", "since"),
        (f"/mend?queue={QUEUE}&before={{}}", "before"),
    ],
)
def test_what_is_no_number_is_said_with_its_name(visitor, failed, digits, path, name):
    page = visitor.get(path.format(quote(digits), job=failed[0]))

    assert page.status == 400
    assert f"{name}: '{digits[:20]}" in page.text


@pytest.mark.parametrize(
    "fields",
    [{"attempts": MANY_DIGITS}, {"attempts": "0"}, {"expected": "x"}, {"mode": "spread"}]
    + [{"mode": "spread", "per_second": each} for each in ("nan", "1e-300", MANY_DIGITS)],
)
def test_a_form_with_what_is_no_number_changes_nothing(visitor, failed, fields):
    visitor.get("/")
    form = {"action": "retry", "queue": QUEUE, "before": "4102444800000", "nonce": "numbers"}

    page = visitor.post("/mend", form | fields)

    assert page.status == 400
    assert "Go back" in page.text
    assert visitor.post("/audit", {"restore": MANY_DIGITS}).status == 400


@pytest.mark.parametrize(
    ("query", "reads"),
    [
        ({"state": "failed", "body": "card"}, True),
        ({"status": "card"}, True),
        ({"state": "failed", "message": "KeyError: #", "priority": "1"}, False),
    ],
)
def test_searches_that_tell_what_is_hidden_are_known(query: dict[str, str], reads: bool):
    assert JobsQuery.of(query).reads_what_is_hidden is reads
