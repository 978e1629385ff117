"""Lists, searches and groups of jobs while a shard is unavailable, without a script."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.deployment import Deployment
from tests.web.conftest import LoadUntil, Visitor
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
    page = load_until(visitor, path, lambda page: "Older" not in page.text)

    assert _listed(page.body) == present
    assert MISSING in page.text
    assert "These are all of the other shards." in page.text
    assert f"At least {len(present)} failed job" in page.text
    assert "is ready on the other shards." in visitor.get(f"/q/{QUEUE}").text
