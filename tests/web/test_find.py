"""Finding jobs: by descriptor, claim and key at once, by text with progress, limits and cancel."""

from __future__ import annotations

import asyncio
import json
import math
import re
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock
from urllib.parse import quote, urlencode

import pytest
from aiohttp.test_utils import make_mocked_request

from pinlaterd.client import AsyncClient, Job
from pinlaterd.clock import Clock
from pinlaterd.errors import ConnectionFailed
from pinlaterd.model import JobOptions, Method, ScanResult
from pinlaterd.web.find import JobSearch, Searches, SearchQuery
from pinlaterd.web.site import Site
from tests.clocks import FakeClock
from tests.deployment import Deployment, claim
from tests.web.conftest import LoadUntil, Visitor

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def client(dashboard: Deployment):
    with dashboard.client("finder:web1") as client:
        client.create_queue("books")
        client.create_queue("films")
        yield client


@pytest.fixture
def find(visitor: Visitor, load_until: LoadUntil):
    """Searches until it is over, and returns the descriptors that are found, and the page."""

    def run(text: str, **more: str) -> tuple[set[str], str]:
        path = "/find?" + urlencode({"q": text, **more})
        page = load_until(visitor, path, lambda page: "data-over" in page.body)
        return set(re.findall(r'href="/j/([^"]+)"', page.body)), page.text

    return run


def test_a_descriptor_or_a_key_leads_to_its_job(client, visitor):
    job = Job(b"x", options=JobOptions(key="order 17/é"))
    [stored] = client.enqueue_keyed("books", [job])

    for text in (stored.descriptor, f"  {stored.descriptor} ", "order 17/é"):
        answer = visitor.get(f"/find?q={quote(text)}")
        assert answer.status == 303
        assert answer.headers["Location"] == f"/j/{stored.descriptor}"


def test_a_claim_leads_to_the_jobs_that_its_worker_runs(client, find, dashboard):
    client.enqueue("films", [b"1", b"2", b"3"])
    mine = claim(client, "films", 2)
    with dashboard.client("finder:web2") as other:
        claim(other, "films")

    found, text = find(mine[0].claim_descriptor)

    assert found == {job.descriptor for job in mine}
    assert "Jobs that finder:web1 runs: 2 found" in text


def test_text_is_found_in_bodies_of_all_states_and_queues_letter_by_letter(client, find):
    [ready] = client.enqueue("books", [b'{"to": "a.b@example.com"}'])
    [later] = client.enqueue("films", [Job(b"a.b@example.com", run_after_ms=4_000_000_000_000)])
    client.enqueue("books", [b"aXb@example.com"])

    assert find("a.b@example.com")[0] == {ready, later}
    assert find("a.b@example.com", queue="films")[0] == {later}
    assert find("a.b@example.com", state="ready")[0] == {ready}
    assert len(find("a.b@example[.]com", **{"as": "re2"})[0]) == 3


def test_nothing_found_says_what_to_do(client, find, visitor, wait_until):
    # How many jobs there are, is known of queues that the last figures have.
    wait_until(lambda: {"books", "films"} <= set(visitor.get("/?all=1").text.split()))
    found, text = find("no such text anywhere")

    assert found == set()
    assert "No job matches." in text
    assert re.search(r"Looked at [\d,]+ (of about [\d,]+ )?jobs, (\d+) of \2 queues", text)


def test_a_search_ends_where_too_much_matches(client, find):
    client.enqueue("books", [b"many %d" % number for number in range(200)])
    assert "200 found" in find("many")[1]
    assert "More than 200" not in find("many", queue="books")[1]
    client.enqueue("films", [b"many more"])

    found, text = find("many", state="ready")

    assert len(found) == 200
    assert "More than 200 match" in text


def test_failed_jobs_of_all_queues_are_found_first(client, find):
    client.create_queue("zoo")
    client.enqueue("zoo", [Job(b"first of all", attempts_allowed=1)])
    [job] = claim(client, "zoo")
    client.ack("zoo", failed=[job])
    client.enqueue("books", [b"first of all"] * 201)

    found, text = find("first of all")

    assert (job.descriptor in found, "More than 200 match" in text) == (True, True)


def test_several_states_are_searched(client, visitor, load_until):
    [ready] = client.enqueue("books", [b"in some state"])
    client.enqueue("books", [Job(b"in some state", run_after_ms=4_000_000_000_000)])
    path = "/find?q=in+some+state&state=ready&state=failed"

    page = load_until(visitor, path, lambda page: "data-over" in page.body)

    assert set(re.findall(r'href="/j/([^"]+)"', page.body)) == {ready}
    assert page.body.count(" checked> ") == 2


def test_a_bad_pattern_says_so(client, find):
    text = find("(", **{"as": "re2"})[1]

    assert "It ended early: invalid request: bodyRegexToMatch is no RE2 pattern" in text


@pytest.mark.parametrize("query", ["q=x&queue=nowhere", "q=x&state=fialed", "q=" + "x" * 1001])
def test_what_can_not_be_searched_is_refused(visitor, query):
    assert visitor.get(f"/find?{query}").status in (400, 404)


def test_what_it_finds_comes_behind_what_the_viewer_has(client, visitor, find):
    client.enqueue("books", [b"three of them %d" % number for number in range(3)])
    found, _ = find("three of them")

    answer = visitor.get("/find.json?" + urlencode({"q": "three of them", "seen": "1"}))

    progress = json.loads(answer.body)
    assert len(progress["jobs"]) == 2
    assert {job["descriptor"] for job in progress["jobs"]} < found
    assert progress["is_over"]


def test_a_cancelled_search_keeps_what_it_found_and_needs_a_form_of_this_session(visitor, find):
    find("no such text to cancel")

    refused = Visitor(visitor.port).post("/find/cancel", {"q": "no such text to cancel"})
    done = visitor.follow(visitor.post("/find/cancel", {"q": "no such text to cancel"}))

    assert refused.status == 403
    assert done.status == 200


def test_requests_at_the_same_time_begin_one_search():
    async def names(_call: object) -> frozenset[str]:
        await asyncio.sleep(0)
        return frozenset({"mail"})

    async def both() -> None:
        frames = SimpleNamespace(now=AsyncMock(side_effect=ConnectionFailed("away")))
        client = SimpleNamespace(run=names)
        site = SimpleNamespace(clock=Clock(), client=client, frames=frames)
        searches, query = Searches(cast("Site", site)), SearchQuery("x", False, ())
        request = make_mocked_request("GET", "/find?q=x")
        one, two = await asyncio.gather(*[searches.get(request, query) for _ in range(2)])
        assert one is two

    asyncio.run(both())


def test_a_search_that_lacks_a_shard_runs_again_sooner():
    clock = FakeClock()

    async def run(call: Any) -> Any:
        if call.method is Method.QUEUE_NAMES:
            return {"mail"}
        return ScanResult([], missing_shards=["2"])

    async def search() -> None:
        frames = SimpleNamespace(now=AsyncMock(side_effect=ConnectionFailed("away")))
        site = SimpleNamespace(clock=clock, client=SimpleNamespace(run=run), frames=frames)
        searches, query = Searches(cast("Site", site)), SearchQuery("x", False, ("failed",))
        request = make_mocked_request("GET", "/find?q=x")
        first = await searches.get(request, query)
        assert first.task is not None
        await first.task
        clock.advance(9)
        assert await searches.get(request, query) is first
        clock.advance(2)
        assert await searches.get(request, query) is not first

    asyncio.run(search())


def test_without_a_question_the_page_explains_itself(visitor):
    assert "A descriptor or a key leads to its job" in visitor.get("/find").text


def test_the_command_of_a_text_that_begins_with_a_dash_is_valid():
    query = SearchQuery("-x", is_regex=True, states=("failed",), queue="mail")

    words = "pinlater-admin job find --re2 --queue mail --state failed -- -x"
    assert query.command == words


def test_a_search_that_needs_no_viewer_does_not_end_after_a_pause():
    async def run(_call: object) -> ScanResult:
        return ScanResult([], looked_at=1, in_state=1)

    search = JobSearch(SearchQuery("x", is_regex=False, states=("failed",)), ["q"], 1, math.inf)
    search.progress(1.0)
    client, clock = SimpleNamespace(run=run), SimpleNamespace(monotonic=lambda: 1e6)
    asyncio.run(search.run(cast("AsyncClient", client), cast("Clock", clock)))

    assert not search.problem
