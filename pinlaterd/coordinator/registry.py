"""The processes that report, the state of each, and all figures.

Without sockets and timers: whether a process has ended or gone silent is determined when it is
asked for. Figures are totals: when a process is replaced by a new one of its name, its
counters and histograms stay in that name's totals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from pinlaterd.clock import Clock
from pinlaterd.stats import StatsSnapshot, empty, merge
from pinlaterd.stats.registry import apply, forget, raised, totals
from pinlaterd.wire.control import ProcessState, Report

SILENT_SECONDS = 3.0  # three reports missed

SILENT = "silent"
STOPPED = "stopped"


class ProcessView(NamedTuple):
    """A process as others are told of it. `state`: as it reported, or silent, or stopped."""

    process: str
    kind: str
    pid: int
    started_at_ms: int
    state: str
    silent_seconds: float
    facts: Mapping[str, str]
    config_version: int = 0

    @property
    def gone(self) -> bool:
        return self.state in (SILENT, STOPPED)


@dataclass(slots=True)
class _Member:
    report: Report  # the last one, with all figures so far, `earlier` included
    heard_at: float
    earlier: StatsSnapshot | None = None  # totals of those that it has replaced


class Registry:
    """What processes reported, by the peers (connections) that they reported through."""

    def __init__(self, clock: Clock, is_alive: Callable[[int], bool]) -> None:
        """`is_alive`: whether a process of that pid exists."""
        self._clock = clock
        self._is_alive = is_alive
        self._members: dict[bytes, _Member] = {}

    def heard(self, peer: bytes, report: Report | None) -> bool:
        """Note a report, or a heartbeat (None). False: `peer` has to tell all, since what it
        sent says nothing without what went before."""
        now = self._clock.monotonic()
        member = self._members.get(peer)
        if report is None:
            if member is not None:
                member.heard_at = now
            return member is not None
        if report.full:
            earlier = self._end_earlier_connection(report)
            if earlier is not None:
                report = replace(report, stats=merge([earlier, report.stats]))
            self._members[peer] = _Member(report, now, earlier)
            return True
        if member is None:
            return False
        self._forget_earlier(report)
        changes = report.changes
        if member.earlier is not None:
            changes = changes._replace(now=raised(changes.now, member.earlier))
        stats = member.report.stats
        apply(stats, changes)
        member.report = replace(report, stats=stats, full=True, dropped=())
        member.heard_at = now
        return True

    def knows(self, peer: bytes) -> bool:
        return peer in self._members

    def peers(self) -> Sequence[bytes]:
        """Those that a new snapshot has to be sent to."""
        return list(self._members)

    def serving(self, process: str) -> Report | None:
        """What the process of that name that serves said last; None if there is none."""
        for member in self._members.values():
            view = self._view(member)
            if view.process == process and view.state == ProcessState.SERVING:
                return member.report
        return None

    def views(self) -> Sequence[ProcessView]:
        """Every process that was heard of and not replaced, by name."""
        self._retire_replaced()
        found = [self._view(member) for member in self._members.values()]
        return sorted(found, key=lambda view: (view.process, view.started_at_ms))

    def stats(self) -> Mapping[str, StatsSnapshot]:
        """Figures by process name, not to be changed. Of processes that have gone only totals are
        left."""
        self._retire_replaced()
        found: dict[str, list[StatsSnapshot]] = {}
        for member in self._members.values():
            stats = member.report.stats
            kept = totals(stats) if self._view(member).gone else stats
            found.setdefault(member.report.process, []).append(kept)
        return {
            name: snapshots[0] if len(snapshots) == 1 else merge(snapshots)
            for name, snapshots in sorted(found.items())
        }

    def _forget_earlier(self, report: Report) -> None:
        """Figures of a deleted queue go from the totals of earlier processes, too."""
        for member in self._members.values():
            if member.report.process == report.process:
                for name in report.dropped:
                    forget(member.report.stats, name)
                    if member.earlier is not None:
                        forget(member.earlier, name)

    def _end_earlier_connection(self, report: Report) -> StatsSnapshot | None:
        """Of the process that reports all. Returns the totals of those that it has replaced."""
        identity = (report.process, report.pid, report.started_at_ms)
        for peer, member in self._members.items():
            known = member.report
            if (known.process, known.pid, known.started_at_ms) == identity:
                del self._members[peer]
                return member.earlier
        return None

    def _retire_replaced(self) -> None:
        """Those that have gone make room for a live process of the same name. One that lives
        stays beside it: a shard's owner and its standby bear one name."""
        gone = {peer for peer, member in self._members.items() if self._view(member).gone}
        live = {
            member.report.process: member
            for peer, member in self._members.items()
            if peer not in gone
        }
        for peer in gone:
            old = self._members[peer].report
            heir = live.get(old.process)
            if heir is not None:
                del self._members[peer]
                left = totals(old.stats)
                heir.earlier = merge([heir.earlier or empty(), left])
                heir.report = replace(heir.report, stats=merge([left, heir.report.stats]))

    def _view(self, member: _Member) -> ProcessView:
        report = member.report
        silent_seconds = self._clock.monotonic() - member.heard_at
        state: str = report.state
        if not self._is_alive(report.pid):
            state = STOPPED
        elif silent_seconds > SILENT_SECONDS:
            state = SILENT
        return ProcessView(
            report.process,
            report.kind,
            report.pid,
            report.started_at_ms,
            state,
            silent_seconds,
            report.facts,
            report.config_version,
        )
