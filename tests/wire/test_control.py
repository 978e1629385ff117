"""The control channel's messages, and the snapshot's file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.stats import Stats
from pinlaterd.wire.control import (
    ControlClient,
    ControlServer,
    ProcessState,
    Report,
    ShardEntry,
    Snapshot,
    pack_report,
    pack_snapshot,
    read_snapshot,
    unpack_report,
    unpack_snapshot,
    write_snapshot,
)
from pinlaterd.wire.envelope import MalformedEnvelope

SNAPSHOT = Snapshot(7, (ShardEntry("1", False), ShardEntry("2d1", True)), 1234)


def stats() -> Stats:
    filled = Stats()
    filled.count("mail_enqueue", 3)
    filled.record("shard_commit_ms", 2.5)
    return filled


def test_a_report_survives_the_wire():
    report = Report(
        "shard-1", "shard", 42, 1000, ProcessState.STANDBY, {"a": "b"}, stats().snapshot(), False
    )

    assert unpack_report(pack_report(report)) == report


def test_a_snapshot_survives_the_wire_and_the_file(tmp_path):
    assert unpack_snapshot(pack_snapshot(SNAPSHOT)) == SNAPSHOT

    path = tmp_path / "snapshot.json"
    assert read_snapshot(path) is None
    write_snapshot(SNAPSHOT, path)
    assert read_snapshot(path) == SNAPSHOT
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("{")
    assert read_snapshot(path) is None


@given(st.binary(max_size=100).filter(lambda data: data != b"{}"))
def test_bytes_of_strangers_are_malformed_and_nothing_worse(data):
    with pytest.raises(MalformedEnvelope):
        unpack_report(data)
    with pytest.raises(MalformedEnvelope):
        unpack_snapshot(data)


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
        found = [report for _, message in arrived if (report := unpack_report(message))]
    return found[0]


def test_only_changes_travel_until_a_snapshot_asks_for_all(endpoint, wait_until):
    server, figures = ControlServer(endpoint=endpoint), stats()
    client = ControlClient("shard-1", "shard", figures, 1000, endpoint=endpoint)
    try:
        [(peer, first), *_] = exchange(client, server, wait_until)
        report = unpack_report(first)
        assert report is not None
        assert report.full
        assert report.stats == figures.snapshot()

        for _, message in exchange(client, server, wait_until):
            assert unpack_report(message) is None  # nothing changed: a heartbeat

        figures.count("mail_dequeue")
        changed = next_report(client, server, wait_until)
        assert changed.stats["counters"] == {"mail_dequeue": 1}
        assert not changed.full

        server.send(peer, SNAPSHOT)
        wait_until(lambda: client.receive() == SNAPSHOT)
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
            report = unpack_report(arrived[0][1])
            assert report is not None
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
