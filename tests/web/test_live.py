"""The stream of changes: cells as they change, while anybody looks, and how old they are."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from pinlaterd.web.live import LiveFrame, _Channel
from tests.deployment import Deployment, frozen
from tests.web.conftest import Visitor, serving_web

SECONDS = 60


class Stream:
    """A stream of changes that is open."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._answer = connection.getresponse()
        assert self._answer.headers["Content-Type"] == "text/event-stream"

    def beat(self) -> Any:
        """The next event."""
        line = self._answer.readline()
        assert line.startswith(b"data: "), line
        assert self._answer.readline() == b"\n"
        return json.loads(line[6:])

    def until(self, key: str, text: str, *, hidden: str | None = None) -> None:
        """Read on until a cell has this text. Fail if any that is sent by then has `hidden`."""
        for _ in range(SECONDS):
            cells: Mapping[str, str] = self.beat()["cells"]
            assert hidden is None or hidden not in "".join(cells.values())
            if cells.get(key) == text:
                return
        pytest.fail(f"{key} did not become {text}")


@contextmanager
def stream(deployment: Deployment, of: str, visitor: Visitor | None = None) -> Iterator[Stream]:
    connection = http.client.HTTPConnection("127.0.0.1", deployment.web_port, timeout=SECONDS)
    cookies = visitor.sent_cookies if visitor is not None else ""
    connection.request("GET", f"/live?of={of}", headers={"Cookie": cookies})
    try:
        yield Stream(connection)
    finally:
        connection.close()


def test_a_cell_is_sent_when_it_changes_and_only_then(dashboard, visitor, wait_until):
    with dashboard.client() as client:
        client.create_queue("live_mail")
        wait_until(lambda: "live_mail" in visitor.get("/?all=1").body)
        with (
            stream(dashboard, "overview") as overview,
            stream(dashboard, "queue&name=live_mail") as queue,
        ):
            overview.until("live_mail ready", "0")
            client.enqueue("live_mail", [b"1", b"2"])
            overview.until("live_mail ready", "2")
            queue.until("figure ready", "2")
            assert "live_mail ready" not in overview.beat()["cells"]


def test_a_name_that_is_no_operation_ends_nobodys_stream(dashboard, visitor):
    visitor.get("/")
    with (
        stream(dashboard, "overview") as overview,
        stream(dashboard, f"op&name={'9' * 5_000}") as hostile,
    ):
        assert hostile.beat()["cells"] == {}
        for _ in range(3):
            assert overview.beat()


def test_a_viewer_that_takes_nothing_ends_no_other_stream():
    channel = _Channel(lambda *_: {"ready": "1"}, "", None)
    slow, *others = [asyncio.Queue[bytes | None](1) for _ in range(20)]
    channel.viewers.update((slow, *others))
    slow.put_nowait(b"before")

    channel.publish(LiveFrame({}, 0), 0)

    assert slow.get_nowait() is None
    assert None not in [viewer.get_nowait() for viewer in others]


def test_viewers_who_come_together_begin_with_cells_that_were_made_once():
    made = iter("123")
    channel = _Channel(lambda *_: {"ready": next(made)}, "", None)
    frame = LiveFrame({}, 0.0)

    assert {channel.all_cells(frame, 0.04) for _ in range(50)} == {_begun("1")}
    channel.publish(frame, 0.0)
    assert channel.all_cells(frame, 0.04) == _begun("2")


def test_a_viewer_who_begins_before_the_first_figures_is_sent_all_of_them():
    channel = _Channel(lambda *_: {"ready": "1"}, "", None)
    early = asyncio.Queue[bytes | None](1)
    channel.viewers.add(early)
    frame = LiveFrame({}, 0.0)

    assert channel.all_cells(None, 0.0) == b'data: {"age":0.0,"cells":{}}\n\n'
    assert channel.all_cells(frame, 0.0) == _begun("1")
    channel.publish(frame, 0.0)
    assert early.get_nowait() == _begun("1")


def _begun(ready: str) -> bytes:
    return b'data: {"age":0.0,"cells":{"ready":"%s"}}\n\n' % ready.encode()


def test_a_frozen_coordinator_is_said_and_its_figures_stay(dashboard, visitor, wait_until):
    visitor.get("/")
    with frozen(dashboard.pid_of("coordinator")), stream(dashboard, "overview") as overview:
        wait_until(lambda: overview.beat()["age"] > 5)
        page = visitor.get("/")
        assert page.status == 200
        assert 'class="stale"' in page.body
        assert "These figures are old" in page.text
        assert "Not known: the coordinator does not answer." in visitor.get("/system").text
    with stream(dashboard, "overview") as overview:
        wait_until(lambda: overview.beat()["age"] < 2)
    dashboard.wait_until_serving()  # it takes processes for silent that reported meanwhile


def test_a_dashboard_that_has_never_heard_of_the_service_says_so(tmp_path, wait_until):
    with serving_web(tmp_path / "d") as deployment:
        visitor = Visitor(deployment.web_port)

        def text() -> str:
            """What it says while it has no figures."""
            try:
                answer = visitor.get("/")
            except (OSError, http.client.HTTPException):  # it does not listen yet
                return ""
            return answer.text if answer.status == 503 else ""

        with frozen(deployment.pid_of("coordinator")):
            deployment.kill("web")
            wait_until(text)
            assert "No answer from the coordinator" in text()
            for said in (text(), visitor.get("/workers").text):
                assert "none within 5 s. It may be slow: load the page again." in said
