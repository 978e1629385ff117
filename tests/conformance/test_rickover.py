"""Rickover's interface on every engine: what it takes of the stores, from a key to the archive."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.conftest import WaitUntil
from tests.deployment import Deployment as Service
from tests.http.conftest import http_of
from tests.http.test_v1_job_types import error
from tests.http.test_v1_jobs import OneType

pytestmark = pytest.mark.service


@pytest.fixture(scope="package")
def with_http(backend, new_store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    deployment = Service(tmp_path_factory.mktemp("rickover"))
    settings = {"engine": backend.engine, **new_store(deployment.folder)}
    deployment.init(shards={"1": settings}, http=True)
    with deployment.running():
        yield deployment


def test_jobs_from_their_enqueue_to_the_archive(with_http: Service, wait_until: WaitUntil):
    api = http_of(with_http)
    jobs, others = OneType(api), OneType(api)
    rows = json.loads(with_http.admin("job-type", "list", "--json"))
    [queue] = [row["queue"] for row in rows if row["name"] == others.name]

    times = {"run_after": "2040-01-01T00:00:00.123456Z", "expires_at": "2041-01-01T00:00:00.9999Z"}
    later = jobs.new(**times)
    shown = jobs.get(later)
    assert {name: shown[name] for name in times} == times
    assert jobs.put(later).body == others.put(later).body == shown
    assert jobs.report(later, "failed", 7).status == 200
    assert error(jobs.report(later, "failed", 7)) == (400, "decrement_failed")
    assert jobs.get(later)["attempts"] == 6
    assert jobs.report(later, "succeeded", 6).status == 200

    expired = others.new(expires_at="2020-01-01T00:00:00Z")
    with with_http.client() as client:
        assert client.dequeue(queue, limit=1) == []
    wait_until(lambda: others.get(expired)["status"] == "expired")
    failed = others.new()
    assert others.report(failed, "failed", 7, retryable=False).status == 200

    ends = [(failed, "failed"), (expired, "expired"), (later, "succeeded")]
    first = api.get("/v1/archived-jobs?limit=2")
    second = api.get(first.headers["Link"].partition("<")[2].partition(">")[0])
    found = [(job["id"], job["status"]) for job in (*first.body, *second.body)]
    assert found == ends
    assert [job["id"] for job in api.get("/v1/archived-jobs?status=expired").body] == [expired]
    assert api.post(f"/v1/jobs/{later}/replay").status == 201
