"""The history of a queue as JSON and as a table: what the coordinator knows, gaps included."""

from __future__ import annotations

from typing import Any

import pytest

from pinlaterd.web.history import table_rows
from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.web.conftest import Visitor

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def known(dashboard: Deployment, wait_until: WaitUntil) -> str:
    """A queue of which some seconds are known."""
    visitor = Visitor(dashboard.web_port)
    with dashboard.client() as client:
        client.create_queue("letters")
        client.enqueue("letters", [b"x"] * 1500)

    def ready() -> list[float]:
        return list(visitor.history("letters")["series"].get("ready", ()))

    wait_until(lambda: 1500 in ready())
    wait_until(lambda: "data-history" in visitor.get("/q/letters").body)
    return "letters"


def test_the_figures_are_those_of_the_coordinator(known, visitor):
    found = visitor.history(known)

    assert found["step_ms"] == 5000
    assert found["series"]["ready"][0] is None  # an hour ago: unknown, not 0
    assert 1500 in found["series"]["ready"]
    assert {"in", "out", "failed_attempts", "wait_p99_ms", "oldest_ms"} <= found["series"].keys()


def test_the_table_has_the_same_figures_without_what_is_not_known(known, visitor):
    page = visitor.get(f"/q/{known}/history?range=1h")

    assert page.status == 200
    assert "1,500" in page.text
    assert page.body.count("<tr>") < 10


def test_a_row_of_the_table_has_what_happened_at_any_of_its_points():
    series: dict[str, Any] = dict.fromkeys(
        ("in", "out", "failed_attempts", "ready", "scheduled", "running"), [0.0] * 24
    )
    series |= dict.fromkeys(
        ("wait_p50_ms", "wait_p95_ms", "wait_p99_ms", "oldest_ms"), [None] * 20 + [5_000.0, 0, 0, 0]
    )
    series["in"] = [0.0] * 3 + [240.0] + [0.0] * 20  # 1,200 jobs came within one point
    found = {"from_ms": 600_000, "step_ms": 5_000, "series": series}

    newer, older = table_rows(found, 60_000)

    assert older == (600_000, ["20", *["0"] * 5, *["–"] * 4])
    assert newer == (660_000, ["0"] * 6 + ["5.0 s"] * 4)


def test_marks_are_those_of_the_queue_and_of_no_queue(known, dashboard, visitor, wait_until):
    dashboard.admin("queue", "limit", "parcels", "7")
    dashboard.admin("queue", "limit", known, "900")

    def marks() -> list[str]:
        return [mark["text"] for mark in visitor.history(known)["events"]]

    wait_until(lambda: f"{known}: max_jobs_per_second 900" in marks())
    assert not [mark for mark in marks() if "parcels" in mark]


def test_the_page_of_the_queue_keeps_the_range_in_its_address(known, visitor):
    page = visitor.get(f"/q/{known}?range=24h")

    assert f'data-history="/q/{known}/history.json?range=24h"' in page.body
    assert '<a href="?range=24h" aria-current="true">24 h</a>' in page.body
    page = visitor.get(
        f"/q/{known}?state=failed&body=%26x&range=24h&since=0001-01-01T00:00%2B14:00"
    )
    assert (
        'href="?state=failed&amp;body=%26x&amp;since=0001-01-01T00%3A00%2B14%3A00&amp;range=7d"'
        in page.body
    )
    assert f'href="/q/{known}?state=ready&amp;range=24h#jobs"' in page.body
    assert 'range=1h"' in visitor.get(f"/q/{known}?range=%3Cscript%3E").body


@pytest.mark.parametrize("range_", ["8d", "1h%26queue=other", ""])
def test_another_range_is_refused(known, visitor, range_):
    answer = visitor.get(f"/q/{known}/history.json?range={range_}")

    assert answer.status == 400
    assert "Choose from 1h, 6h, 24h, 7d." in answer.text


def test_a_queue_without_history_says_when_one_begins(visitor):
    assert "begins with its first job" in visitor.get("/q/nothing_here/history").text
