"""Lists, searches and groups of jobs while a shard is unavailable, without a script."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployment import Deployment
from tests.web.conftest import LoadUntil, Visitor, serving_web
from tests.web.failing import fail

pytestmark = pytest.mark.service

QUEUE = "in_part"
MISSING = "Without shard 2, which is unavailable: its jobs are missing here."


@pytest.fixture(scope="module")
def present(dashboard: Deployment) -> Iterator[set[str]]:
    """Descriptors of failed jobs of shard 1, while shard 2, which holds others, is down."""
    failed: list[str] = []
    with dashboard.client() as client:
        while len({descriptor.split(":")[1] for descriptor in failed}) < 2:
            failed += fail(client, QUEUE, ["KeyError: 1 (mail.py:1 in send)"])
    try:
        dashboard.kill("shard-2")
        dashboard.supervisorctl("stop", "shard-2")
        yield {descriptor for descriptor in failed if ":s1:" in descriptor}
    finally:
        dashboard.supervisorctl("start", "shard-2")
        dashboard.wait_until_serving()


def _listed(body: str) -> set[str]:
    return set(re.findall(r'href="/j/([^"]+)"', body))


def test_a_list_has_the_jobs_of_the_others_and_says_so(
    present: set[str], visitor: Visitor, load_until: LoadUntil
):
    path = f"/q/{QUEUE}?state=failed&body=ada"
    page = load_until(
        visitor, path, lambda page: "These are all" in page.text and "At least" in page.text
    )
    load_until(visitor, f"/q/{QUEUE}", lambda page: "is ready on the other shards." in page.text)

    assert _listed(page.body) == present
    assert MISSING in page.text
    assert "These are all of the other shards." in page.text
    assert f"At least {len(present)} failed job" in page.text


def test_a_search_finds_those_of_the_others_and_says_so(
    present: set[str], visitor: Visitor, load_until: LoadUntil
):
    found, nothing = (
        load_until(visitor, f"/find?q={q}&queue={QUEUE}", lambda page: "data-over" in page.body)
        for q in ("to:+ada", "to:+bob")
    )

    assert _listed(found.body) == present
    assert MISSING in found.text
    assert MISSING in nothing.text
    assert "No job matches." not in nothing.text


def test_groups_have_those_of_the_others_and_say_so(
    present: set[str], visitor: Visitor, load_until: LoadUntil
):
    path = f"/failures?queue={QUEUE}"
    page = load_until(visitor, path, lambda page: "being read" not in page.text)

    many = "jobs have" if len(present) > 1 else "job has"
    assert f"{QUEUE}: at least {len(present)} {many} failed" in page.text
    assert f"{len(present)} of the other shards, " in page.text
    assert MISSING in page.text
    assert f"pinlater-admin job failures {QUEUE} --partial" in page.text


def test_totals_are_lower_bounds_and_the_shard_is_named(
    present: set[str], visitor: Visitor, load_until: LoadUntil
):
    page = load_until(visitor, "/failures", lambda page: "At least" in page.text)

    assert present
    assert re.search(r"At least [0-9,]+ jobs? failed, in [0-9]+ queues?", page.text)
    assert MISSING in page.text
    assert page.cells[f"{QUEUE} failed"] == f"≥ {len(present)}"
    assert visitor.get(f"/q/{QUEUE}").cells["figure failed"] == f"≥ {len(present)}"


def test_what_no_shard_counts_is_unknown_and_never_zero(tmp_path: Path, load_until: LoadUntil):
    with serving_web(tmp_path / "d", shards=1) as alone:
        visitor = Visitor(alone.web_port)
        with alone.client() as client:
            fail(client, QUEUE, ["KeyError: 1 (mail.py:1 in send)"])
        load_until(visitor, "/failures", lambda page: "1 job failed, in 1 queue" in page.text)
        alone.supervisorctl("stop", "shard-1")

        page = load_until(visitor, "/failures", lambda page: "is not known" in page.text)
        assert "Whether jobs have failed is not known" in page.text
        assert "Without shard 1, which is unavailable" in page.text
        assert page.cells[f"{QUEUE} failed"] == "–"
        figures = visitor.get(f"/q/{QUEUE}").cells
        assert {figures[f"figure {key}"] for key in ("ready", "running", "failed")} == {"–"}
        [queue] = json.loads(alone.admin("top", "--json"))["queues"]
        assert {queue[key] for key in ("pending", "failed", "oldest_ready_age_ms")} == {None}
        assert queue["missing_shards"] == ["1"]
        assert "\t-" * 5 in alone.admin("top", "--once")


def test_a_preview_names_the_shard_that_it_needs(present: set[str], visitor: Visitor):
    page = visitor.get(f"/mend?action=retry&queue={QUEUE}")

    assert present
    assert page.status == 503
    assert "Shard 2: down; this call needs every shard" in page.text
    assert "Jobs of the others that you choose in their list can be changed" in page.text
    chosen = visitor.get(f"/mend?action=retry&queue={QUEUE}&descriptor={min(present)}")
    assert f"Retry 1 failed job of {QUEUE}?" in chosen.text


def test_commands_leave_it_out_with_a_warning(present: set[str], dashboard: Deployment):
    warning = f"warning: {MISSING[0].lower()}{MISSING[1:-1]}"

    scanned = dashboard.admin("job", "scan", QUEUE, "failed", "--partial")
    grouped = dashboard.admin("job", "failures", QUEUE, "--partial")

    assert set(re.findall(rf"{QUEUE}:\S+", scanned)) == present
    assert f"newest {len(present)} of" in grouped
    assert scanned.count(warning) == grouped.count(warning) == 1
    with pytest.raises(AssertionError, match=r"ended with 1: .*shard 2"):
        dashboard.admin("job", "scan", QUEUE, "failed")
