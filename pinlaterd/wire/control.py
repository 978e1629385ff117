"""The control channel: what processes tell the coordinator, and what it tells them.

    process (DEALER) -> coordinator (ROUTER)    a Report, once a second and after each Snapshot;
                                                when nothing changed, a heartbeat of two bytes
    coordinator -> process                      the Snapshot, to each newcomer, and to all on change
    router <-> coordinator                      demand for rates and shares of them: `wire.rates`

A report carries only the figures that changed since the one before. A process that gets a Snapshot
sends all of its figures next: so a restarted coordinator, which answers heartbeats of processes it
does not know with the Snapshot, soon knows everything again. All messages are JSON.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pinlaterd.config.files import replace_file
from pinlaterd.config.layout import COORDINATOR_ENDPOINT, SNAPSHOT_FILE
from pinlaterd.stats import Stats, StatsSnapshot
from pinlaterd.stats.registry import Changes
from pinlaterd.wire import rates
from pinlaterd.wire.envelope import MalformedEnvelope
from pinlaterd.wire.rates import RateGrant, RateReport

_HEARTBEAT = b"{}"
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MESSAGES_IN_TRANSIT = 100  # for each process; a process that can't send just tries again
_LINGER_MS = 200  # for the last report of a process that ends
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 1000


class ProcessState(StrEnum):
    """What a process says of itself."""

    STARTING = "starting"
    STANDBY = "standby"  # another process owns the shard's store
    SERVING = "serving"
    STOPPING = "stopping"


class Report(msgspec.Struct, frozen=True):
    """What a process says. `stats`: all figures if `full`, else those that changed."""

    process: str  # as supervisord names it: router, shard-1, …
    kind: str  # router, shard
    pid: int
    started_at_ms: int
    state: ProcessState
    facts: Mapping[str, str]
    stats: StatsSnapshot
    full: bool = True
    config_version: int = 0  # of the configuration that it follows
    dropped: tuple[str, ...] = ()  # names of figures that went, before `stats` came

    @property
    def changes(self) -> Changes:
        return Changes(self.stats, self.dropped)


class ShardEntry(msgspec.Struct, frozen=True):
    name: str
    dequeue_only: bool


class Snapshot(msgspec.Struct, frozen=True):
    """What all processes have to agree on. A later one has a greater version."""

    version: int
    shards: tuple[ShardEntry, ...]
    generated_at_ms: int
    config_version: int = 0  # what run/config.json holds by now; a later one may be there


_REPORTS, _SNAPSHOTS = msgspec.json.Decoder(Report), msgspec.json.Decoder(Snapshot)


def pack_report(report: Report) -> bytes:
    return msgspec.json.encode(report)


def unpack_report(message: bytes) -> Report | None:
    """The report, or None for a heartbeat."""
    if message == _HEARTBEAT:
        return None
    try:
        return _REPORTS.decode(message)
    except ValueError as error:
        raise MalformedEnvelope("report") from error


def pack_snapshot(snapshot: Snapshot) -> bytes:
    return msgspec.json.encode(snapshot)


def unpack_snapshot(message: bytes) -> Snapshot:
    try:
        return _SNAPSHOTS.decode(message)
    except ValueError as error:
        raise MalformedEnvelope("snapshot") from error


def write_snapshot(snapshot: Snapshot, path: Path = SNAPSHOT_FILE) -> None:
    replace_file(path, pack_snapshot(snapshot))


def read_snapshot(path: Path = SNAPSHOT_FILE) -> Snapshot | None:
    """The last snapshot, for a process that starts while the coordinator is away; None if
    there is none that can be read."""
    try:
        return unpack_snapshot(path.read_bytes())
    except (OSError, MalformedEnvelope):
        return None


_Told = tuple[ProcessState, dict[str, str], int]  # the last: the configuration that is followed


class ControlClient:
    """A process's end. Never blocks, and never fails because the coordinator is away.

    The owner calls `report` once a second and when its state changes. It calls `receive` when
    `fileno()` is readable and after each `report`: the descriptor is edge-triggered.
    """

    def __init__(
        self,
        process: str,
        kind: str,
        stats: Stats,
        started_at_ms: int,
        *,
        endpoint: str = COORDINATOR_ENDPOINT,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        self.config_version = 0  # what the owner follows, for the next report
        self._about = (process, kind, os.getpid(), started_at_ms)
        self._stats = stats
        # As the coordinator knows it; None: it has to be told all, all figures included.
        self._told: _Told | None = None
        self._grants: list[RateGrant] = []  # received, not taken yet
        self._socket = (context or zmq.Context.instance()).socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, _MESSAGES_IN_TRANSIT)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        # nothing piles up for a coordinator that is away: what it needs is the latest
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.connect(endpoint)

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def report(self, state: ProcessState, facts: Mapping[str, str]) -> None:
        """Tell what changed since the last report, or just that we live."""
        now = (state, dict(facts), self.config_version)
        changes = self._stats.take_changes()
        if self._told is None:
            message = self._pack(now, Changes(self._stats.snapshot()), full=True)
        elif changes or now != self._told:
            message = self._pack(now, changes, full=False)
        else:
            message = _HEARTBEAT
        try:
            self._socket.send(message, zmq.NOBLOCK)
            self._told = now
        except zmq.Again:
            self._told = None

    def _pack(self, now: _Told, changes: Changes, *, full: bool) -> bytes:
        state, facts, version = now
        return pack_report(
            Report(*self._about, state, facts, changes.now, full, version, changes.dropped)
        )

    def receive(self) -> Snapshot | None:
        """The latest snapshot that has come, if any. Raises MalformedEnvelope for what this
        version can't read."""
        latest = None
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if message.startswith(rates.TAG):
                self._grants.append(rates.unpack_rate_grant(message))
            else:
                latest = message
        if latest is None:
            return None
        self._told = None
        return unpack_snapshot(latest)

    def take_grants(self) -> list[RateGrant]:
        """The grants that `receive` met on its way, in their order."""
        grants, self._grants = self._grants, []
        return grants

    def report_rates(self, report: RateReport) -> None:
        """Lost if the coordinator is away; after the next Snapshot it is reported again."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(rates.pack_rate_report(report), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


class ControlServer:
    """The coordinator's end. `fileno()` is edge-triggered: `receive` until it returns nothing,
    also after each `send`."""

    def __init__(
        self, *, endpoint: str = COORDINATOR_ENDPOINT, context: zmq.Context[Any] | None = None
    ) -> None:
        self._socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _MESSAGES_IN_TRANSIT)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self._socket.bind(endpoint)

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self) -> tuple[bytes, bytes] | None:
        """A peer and its message, for `unpack_report`; None if there is none."""
        try:
            frames: Sequence[bytes] = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return (frames[0], frames[1]) if len(frames) == 2 else (frames[0], b"")

    def send(self, peer: bytes, snapshot: Snapshot) -> None:
        """Peers that have gone are passed over, and so are those that do not read."""
        self._send(peer, pack_snapshot(snapshot))

    def grant(self, peer: bytes, grant: RateGrant) -> None:
        """The same. A grant that was not confirmed in time has to be followed by another."""
        self._send(peer, rates.pack_rate_grant(grant))

    def _send(self, peer: bytes, message: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart((peer, message), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
