"""A service with the HTTP interface, which the tests of a process share, and how they call it."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.deployment import CALL_SECONDS, MOST_PATIENT, Deployment, serving


class HttpAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: Any  # as JSON says, else bytes


class HttpClient:
    """Calls the interface on one port, with one connection a call."""

    def __init__(self, port: int, headers: Mapping[str, str] | None = None) -> None:
        self.port = port
        self._headers = headers or {}

    def as_user(self, name: str, password: str) -> HttpClient:
        pair = base64.b64encode(f"{name}:{password}".encode()).decode()
        return HttpClient(self.port, {"Authorization": f"Basic {pair}"})

    def with_token(self, token: str) -> HttpClient:
        return HttpClient(self.port, {"Authorization": f"Bearer {token}"})

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        raw: bool = False,
    ) -> HttpAnswer:
        """`body`: bytes as they are, or what becomes JSON; None sends none. `raw`: the answer's
        body is left as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_SECONDS)
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, sent, {**self._headers, **(headers or {})})
            answer = connection.getresponse()
            received = answer.read()
        finally:
            connection.close()
        is_json = not raw and "json" in answer.headers.get("Content-Type", "")
        found = json.loads(received) if is_json and received else received
        return HttpAnswer(answer.status, dict(answer.headers), found)

    def get(self, path: str) -> HttpAnswer:
        return self.call("GET", path)

    def post(self, path: str, body: object = None, **more: Any) -> HttpAnswer:
        return self.call("POST", path, body, **more)

    def put(self, path: str, body: object = None) -> HttpAnswer:
        return self.call("PUT", path, body)

    def delete(self, path: str, **more: Any) -> HttpAnswer:
        return self.call("DELETE", path, **more)


def serving_http(
    folder: Path, *, shards: int = 1, **settings: object
) -> AbstractContextManager[Deployment]:
    """A deployment with the interface; `settings`: those that differ from the defaults."""
    settings = {"monitor_interval_seconds": 0.1, **MOST_PATIENT, **settings}
    return serving(folder, shards=shards, settings=settings, http=True)


def http_of(deployment: Deployment) -> HttpClient:
    return HttpClient(deployment.http_port)


@pytest.fixture(scope="session")
def http_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("http")
    with serving_http(folder, shards=2) as deployment:
        yield deployment


@pytest.fixture
def api(http_service: Deployment) -> HttpClient:
    return http_of(http_service)


def claim(api: HttpClient, path: str, jobs: int = 1, **more: object) -> list[Any]:
    """Claim so many jobs of a queue: an answer leaves out what a shard held up for a moment has."""
    claimed: list[Any] = []
    while len(claimed) < jobs:
        wanted = {"limit": jobs - len(claimed), "wait_ms": 30_000, **more}
        claimed += api.post(f"{path}/claims", wanted).body["jobs"]
    return claimed


_queues = iter(range(1, 1_000_000))


@pytest.fixture
def mail(api: HttpClient) -> str:
    """The path of a queue that no other test uses."""
    path = f"/v2/queues/mail_{next(_queues)}"
    assert api.put(path).status == 201
    return path
