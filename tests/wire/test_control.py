"""The control channel's messages, and the files of what was said there."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.lifecycle import process_place
from pinlaterd.stats import Stats
from pinlaterd.wire.control import (
    ControlClient,
    ControlServer,
    Heartbeat,
    Holding,
    MalformedMessage,
    NoteFile,
    ProcessState,
    RateGrant,
    RateReport,
    Report,
    RouterId,
    ShardEntry,
    Snapshot,
    pack,
    read_snapshot,
    unpack,
    write_snapshot,
)

SNAPSHOT = Snapshot(7, (ShardEntry("1", False), ShardEntry("2d1", True)), 1234)
ROUTER = RouterId("router-1", 42, 1000)


def stats() -> Stats:
    filled = Stats()
    filled.count("mail_enqueue", 3)
    filled.record("shard_commit_ms", 2.5)
    return filled


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat(),
        Report(
            "shard-1", "shard", 4, 1, ProcessState.STANDBY, {"a": "b"}, stats().snapshot(), False
        ),
        RateReport(ROUTER, 7, {"mail": 2.5}, {"mail": 30.0}, {"mail": 0.25}),
        SNAPSHOT,
        RateGrant(8, {"mail": 3.5, "paused": 0.0}, {"mail": 1.5}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_survives_the_wire(message):
    assert unpack(pack(message)) == message


GRANT = b'{"type":"RateGrant","number":1,"shares":{},"credits":%s}'


@given(
    st.binary(max_size=100)
    | st.sampled_from([b"{}", GRANT % b'{"a":-1}', GRANT % b'{"a":NaN}', GRANT % b"[]"])
)
def test_bytes_of_others_are_malformed_and_nothing_worse(data):
    with pytest.raises(MalformedMessage):
        unpack(data)


def test_the_snapshot_is_what_was_written_or_nothing(tmp_path):
    path = tmp_path / "snapshot.json"
    assert read_snapshot(path) is None
    write_snapshot(SNAPSHOT, path)
    assert read_snapshot(path) == SNAPSHOT
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("{")
    assert read_snapshot(path) is None


def test_what_routers_hold_is_what_was_written_or_nothing(tmp_path):
    path = tmp_path / "rates.json"
    notes = NoteFile(path, msgspec.json.Decoder(tuple[str, list[Holding]]))
    assert notes.read() == []

    notes.write([Holding(ROUTER, 7, {"mail": 2.5})])
    assert notes.read() == [Holding(ROUTER, 7, {"mail": 2.5})]
    assert list(tmp_path.iterdir()) == [path]

    path.write_text(path.read_text().replace(process_place(), "another boot"))
    assert notes.read() == []

    path.write_text("[[")
    assert notes.read() == []


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return "ipc://control.ipc"


def exchange(client, server, wait_until, state=ProcessState.SERVING):
    """What the server gets of one report; the client tries until there is a connection."""
    arrived: list[tuple[bytes, bytes]] = []

    def got():
        if not arrived:
            client.report(state, {})
        found = server.receive()
        while found is not None:
            arrived.append(found)
            found = server.receive()
        return arrived

    wait_until(got)
    return arrived


def next_report(client, server, wait_until):
    """The next report that is more than a heartbeat, of which some may still be on their way."""
    found: list[Report] = []
    while not found:
        arrived = exchange(client, server, wait_until)
        messages = [unpack(message) for _, message in arrived]
        found = [message for message in messages if isinstance(message, Report)]
    return found[0]


def test_only_changes_travel_until_a_snapshot_asks_for_all(endpoint, wait_until):
    server, figures = ControlServer(endpoint=endpoint), stats()
    client = ControlClient("shard-1", "shard", figures, 1000, endpoint=endpoint)
    try:
        [(peer, first), *_] = exchange(client, server, wait_until)
        report = unpack(first)
        assert isinstance(report, Report)
        assert report.full
        assert report.stats == figures.snapshot()

        for _, message in exchange(client, server, wait_until):
            assert unpack(message) == Heartbeat()  # nothing changed

        figures.count("mail_dequeue")
        changed = next_report(client, server, wait_until)
        assert changed.stats["counters"] == {"mail_dequeue": 1}
        assert not changed.full

        server.send(peer, SNAPSHOT)
        wait_until(lambda: client.receive() == SNAPSHOT)
        figures.count("mail_dequeue")  # which alone would be told otherwise
        again = next_report(client, server, wait_until)
        assert again.full
        assert again.stats == figures.snapshot()
    finally:
        client.close()
        server.close()


def test_without_a_coordinator_nothing_fails_and_nothing_piles_up(endpoint, wait_until):
    client = ControlClient("router", "router", stats(), 1000, endpoint=endpoint)
    try:
        for _ in range(5):
            client.report(ProcessState.STARTING, {})
        assert client.receive() is None

        server = ControlServer(endpoint=endpoint)
        try:
            arrived = exchange(client, server, wait_until)
            report = unpack(arrived[0][1])
            assert isinstance(report, Report)
            assert (report.state, report.full) == (ProcessState.SERVING, True)
        finally:
            server.close()
    finally:
        client.close()


def test_a_peer_that_has_gone_is_passed_over(endpoint):
    server = ControlServer(endpoint=endpoint)
    try:
        server.send(b"nobody", SNAPSHOT)
    finally:
        server.close()
