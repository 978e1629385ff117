"""The page of failures, as a browser without scripts shows it."""

from __future__ import annotations

import asyncio
import contextlib
import html
import re
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import pytest

from pinlaterd.client import AckInfo, Job
from pinlaterd.client.failures import FailureWindow
from pinlaterd.errors import ConnectionFailed
from pinlaterd.model import CONTINUATION_START, JobRecord, JobState, ScanResult
from pinlaterd.web import failures
from pinlaterd.web.bodies import redacted_text
from tests.clocks import FakeClock
from tests.deployment import Deployment, claim
from tests.web.conftest import LoadUntil, PageAnswer, Visitor
from tests.web.failing import fail

pytestmark = pytest.mark.service

TIMEOUTS = [f"ConnectTimeout: smtp{n} did not answer (mail.py:12 in send)" for n in range(3)]
KEYS = ["KeyError: 'to' (mail.py:48 in parse)"]


@pytest.fixture(scope="module")
def failing(dashboard: Deployment) -> str:
    with dashboard.client("mailer:web3") as client:
        fail(client, "failing", TIMEOUTS + KEYS)
    return "failing"


def _whole(visitor: Visitor, path: str) -> PageAnswer:
    """Load a page until it has all failures: on a busy machine a search takes long."""
    while "load the page again" in (page := visitor.get(path)).text:
        pass
    return page


def _rows(page: PageAnswer) -> list[str]:
    """The text of each group."""
    body = page.body.partition("<tbody>")[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr\b.*?</tr>", body, flags=re.DOTALL)
    return [" ".join(html.unescape(re.sub(r"<[^>]*>", " ", row)).split()) for row in rows]


def _links(page: PageAnswer, path: str) -> list[dict[str, list[str]]]:
    found = re.findall(rf'href="({re.escape(path)}\?[^"#]*)', page.body)
    return [parse_qs(urlsplit(html.unescape(link)).query) for link in found]


def test_failed_jobs_are_grouped_by_what_they_say(visitor: Visitor, failing: str):
    page = _whole(visitor, f"/failures?queue={failing}")

    assert "failing: 4 jobs have failed" in page.text
    assert re.search(r"All 4, [0-9:]{8} to [0-9:]{8} UTC, grouped by what they say\.", page.text)
    timeouts, keys = _rows(page)
    assert timeouts.startswith("75 % 3 3 ConnectTimeout: smtp# did not answer mail.py:12 in send")
    assert keys.startswith("25 % 1 1 KeyError: # mail.py:48 in parse")
    assert "mailer:web3" in timeouts


def test_groups_have_all_attempts_that_failed_so(dashboard: Deployment, visitor: Visitor):
    with dashboard.client() as client:
        client.create_queue("tried")
        client.enqueue("tried", [Job(b"x", attempts_allowed=3)])
        for _ in range(3):
            [job] = claim(client, "tried")
            said = AckInfo(job.descriptor, append_custom_status="KeyError: 1 (a.py:1 in b)")
            client.ack("tried", failed=[said])

    page = _whole(visitor, "/failures?queue=tried")

    [row] = _rows(page)
    assert row.startswith("100 % 1 3 KeyError: # a.py:1 in b")
    assert re.search(r"At least so many attempts failed so, .* the earliest .* ago", page.text)
    assert re.search(r'<th scope="col" class="figure">last [0-9]+ (ms|s|min)', page.body)


def test_groups_may_be_by_place_or_worker_and_of_a_range(visitor: Visitor, failing: str):
    by_place = _rows(_whole(visitor, f"/failures?queue={failing}&by=place"))
    by_worker = _whole(visitor, f"/failures?queue={failing}&by=worker&within=1h")

    assert [row.split(" mail.py:")[1][:10] for row in by_place] == ["12 in send", "48 in pars"]
    [row] = _rows(by_worker)
    assert row.startswith("100 % 4 mailer:web3 ConnectTimeout: smtp# did not answer and 1 other")
    assert "The 4 of the last 1 h" in by_worker.text
    assert visitor.get(f"/failures?queue={failing}&by=colour").status == 400


def test_a_group_leads_to_its_jobs_and_to_their_mending(visitor: Visitor, failing: str):
    page = _whole(visitor, f"/failures?queue={failing}")

    jobs, mends = _links(page, f"/q/{failing}"), _links(page, "/mend")
    assert jobs[1]["message"] == mends[0]["message"] == ["ConnectTimeout: smtp# did not answer"]
    assert mends[0]["queue"] == [failing]
    assert mends[0]["action"] == ["retry"]
    assert int(mends[0]["before"][0]) > 0
    assert "pinlater-admin job failures failing" in page.text


def test_the_page_of_all_failures_lists_the_queues_where_jobs_failed(
    visitor: Visitor, failing: str, load_until: LoadUntil
):
    def is_listed(page: PageAnswer) -> bool:
        return any(row.startswith(f"{failing} 4 ") for row in _rows(page))

    page = load_until(visitor, "/failures", is_listed)
    assert {"queue": [failing]} in _links(page, "/failures")


def test_statuses_that_are_hostile_stay_texts(dashboard: Deployment, visitor: Visitor):
    with dashboard.client() as client:
        fail(client, "hostile", ["<script>alert(1)</script>\u202e\0 (x\u202e.py:1 in <b>)", ""])

    page = _whole(visitor, "/failures?queue=hostile")

    assert "<script>alert" not in page.body
    assert "\u202e" not in page.body
    assert any("claim timed out, or no status given" in row for row in _rows(page))


def test_jobs_that_failed_before_the_range_are_not_newer(dashboard: Deployment, visitor: Visitor):
    with dashboard.client() as client:
        client.create_queue("well")

    page = _whole(visitor, "/failures?queue=well&within=1h")

    [than] = re.findall(r'data-than="([0-9]+)"', page.body)
    assert int(than) > 0


def test_a_queue_that_does_not_exist_is_said(visitor: Visitor):
    page = visitor.get("/failures?queue=nowhere")

    assert page.status == 404
    assert "nowhere" in page.text


def _failed(status: str, at_ms: int) -> JobRecord:
    descriptor = f"mail:s1:p1:{at_ms}"
    return JobRecord(descriptor, JobState.FAILED, 1, 0, status, 0, 0, at_ms, None, None)


def test_a_group_of_which_a_part_is_hidden_leads_to_no_jobs():
    hide = partial(redacted_text, pattern=r"password=\S+")
    window = FailureWindow("mail", None, hide)
    # The quote that opens before what is hidden reaches to the end without it.
    says = ["bad dsn 'host=a password=x' given", "bad dsn 'host=b'", "no dsn"]
    window.take(ScanResult([_failed(each, 1) for each in says], looked_at=3, in_state=3))

    rows = failures.groups_of(window, "message", 2, {}).rows

    paths = {row.title: {bool(row.jobs_path), bool(row.mend_path)} for row in rows}
    assert paths == {"bad dsn #": {False}, "no dsn": {True}}


def test_groups_beyond_those_of_a_page_are_counted_and_attempts_are_those_of_the_shards():
    window = FailureWindow("mail")
    says = [f"{chr(97 + n // 26)}{chr(97 + n % 26)} is missing" for n in range(103)] * 2
    window.take(ScanResult([_failed(each, 1) for each in says], looked_at=206, in_state=206))

    rows, more, more_jobs = failures.groups_of(window, "message", 2, {"ab is missing": 7})

    assert (len(rows), more, more_jobs) == (100, 3, 6)
    assert [row.attempts for row in rows[:3]] == [None, 7, None]


async def _groups_while_older_jobs_are_read() -> None:
    asked, are_read, clock = list[str](), asyncio.Event(), FakeClock()

    async def run(call: Any) -> ScanResult:
        asked.append(call.request.continuation)
        at_ms = 1_000 - len(asked)
        job = _failed(TIMEOUTS[0], at_ms)
        if asked[-1] == CONTINUATION_START:
            return ScanResult([job], f"v1:{at_ms}:1:1:{at_ms}", 1, 2)
        await are_read.wait()
        if len(asked) == 2:
            raise ConnectionFailed("the router is being restarted")
        return ScanResult([job], looked_at=1, in_state=2)

    site = SimpleNamespace(clock=clock, client=SimpleNamespace(run=run))
    windows = failures.FailureWindows(cast("Any", site))

    first = await windows.of("mail", "", "")
    assert "The newest 1, " in failures.explained(first, "message", "", clock.now_ms())
    assert "load the page again" in failures.explained(first, "message", "", clock.now_ms())
    clock.advance(60)
    await windows.of("mail", "", "")
    assert len(asked) == 2  # the search goes on, however long it takes
    are_read.set()
    whole = first
    while whole.call is not None:
        with contextlib.suppress(ConnectionFailed):  # then the next viewer's search begins again
            whole = await windows.of("mail", "", "")
    assert "All 2, " in failures.explained(whole, "message", "", clock.now_ms())
    assert [row.jobs for row in failures.groups_of(whole, "message", 1_000, {}).rows] == [2]
    assert len(first.failures) == 1
    calls = len(asked)
    clock.advance(9)
    await windows.of("mail", "", "")
    assert len(asked) == calls
    clock.advance(2)
    await windows.of("mail", "", "")
    assert len(asked) > calls


def test_groups_of_the_newest_jobs_are_shown_while_older_ones_are_read(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(failures, "_PATIENCE_SECONDS", 0.01)

    asyncio.run(_groups_while_older_jobs_are_read())
