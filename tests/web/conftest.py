"""A deployment with the dashboard, which the tests of a process share, and a browser without
scripts that visits it."""

from __future__ import annotations

import gzip
import html
import http.client
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlencode

import pytest

from tests.conftest import WaitUntil
from tests.deployment import CALL_SECONDS, MOST_PATIENT, Deployment, serving

_TOKEN = re.compile(r'name="token" value="([^"]+)"')


class PageAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: str

    @property
    def text(self) -> str:
        """What a person reads of it, in one line."""
        without = re.sub(r"<(script|style|head)\b.*?</\1>|<[^>]*>", " ", self.body, flags=re.DOTALL)
        return " ".join(html.unescape(without).split())

    @property
    def cells(self) -> Mapping[str, str]:
        """The texts of its cells, by key."""
        found = re.findall(r'data-cell="([^"]+)"[^>]*>([^<]*)<', self.body)
        return {html.unescape(key): html.unescape(text) for key, text in found}


class Visitor:
    """Loads pages and sends their forms, with cookies, as a browser without scripts does."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.cookies: SimpleCookie = SimpleCookie()
        self._token = ""

    @property
    def sent_cookies(self) -> str:
        return "; ".join(f"{name}={one.value}" for name, one in self.cookies.items())

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> PageAnswer:
        return self.call("GET", path, headers=headers)

    def history(self, queue: str) -> Any:
        """Return a queue's last hour, or empty series while the coordinator does not answer."""
        answer = self.get(f"/q/{queue}/history.json?range=1h")
        return json.loads(answer.body) if answer.status == 200 else {"series": {}, "events": []}

    def post(
        self, path: str, fields: Mapping[str, object], headers: Mapping[str, str] | None = None
    ) -> PageAnswer:
        """Send a form with the token of the last page; `headers` replace those of a browser."""
        form = urlencode({"token": self._token, **fields}, doseq=True).encode()
        sent = {"Sec-Fetch-Site": "same-origin"} if headers is None else headers
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        return self.call("POST", path, form, {**kind, **sent})

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> PageAnswer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_SECONDS)
        try:
            connection.request(method, path, body, {"Cookie": self.sent_cookies, **(headers or {})})
            answer = connection.getresponse()
            received = answer.read()
        finally:
            connection.close()
        for cookie in answer.headers.get_all("Set-Cookie", ()):
            self.cookies.load(cookie)
        if answer.headers.get("Content-Encoding") == "gzip":
            received = gzip.decompress(received)
        page = PageAnswer(answer.status, dict(answer.headers), received.decode())
        token = _TOKEN.search(page.body)
        self._token = token[1] if token else self._token
        return page

    def follow(self, answer: PageAnswer) -> PageAnswer:
        """Load the page that an answer sends to."""
        assert answer.status == 303, answer.text
        return self.get(answer.headers["Location"])


def serving_web(
    folder: Path, *, shards: int = 1, **settings: Any
) -> AbstractContextManager[Deployment]:
    """A deployment with the dashboard; `settings`: those that differ from the defaults."""
    settings = {"monitor_interval_seconds": 0.1, **MOST_PATIENT, **settings}
    return serving(folder, shards=shards, settings=settings, web=True)


@pytest.fixture(scope="session")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One that may write, with two shards."""
    folder = tmp_path_factory.mktemp("web")
    with serving_web(folder, shards=2, web_writes="true", web_label="TEST") as deployment:
        yield deployment


def wait_until_answering(deployment: Deployment, wait_until: WaitUntil) -> None:
    """Wait until a dashboard that was killed answers again, and all is well. The coordinator alone
    calls it well until it misses a report."""

    def is_answered() -> bool:
        try:
            Visitor(deployment.web_port).get("/login")
        except (OSError, http.client.HTTPException):
            return False
        return True

    wait_until(is_answered)
    deployment.wait_until_serving()


@pytest.fixture
def visitor(dashboard: Deployment) -> Visitor:
    return Visitor(dashboard.web_port)


class LoadUntil(Protocol):
    def __call__(
        self, visitor: Visitor, path: str, condition: Callable[[PageAnswer], object]
    ) -> PageAnswer: ...


@pytest.fixture(scope="session")
def load_until(wait_until: WaitUntil) -> LoadUntil:
    """Load a page until a condition holds of it, and return that page: the next one may lack what
    a process reports that is held up for a moment."""

    def load(visitor: Visitor, path: str, condition: Callable[[PageAnswer], object]) -> PageAnswer:
        pages: list[PageAnswer] = []

        def holds() -> object:
            pages.append(visitor.get(path))
            return condition(pages[-1])

        wait_until(holds)
        return pages[-1]

    return load
