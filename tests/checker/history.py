"""The history of a run: one JSON line an operation, a fault, the start of a process, a stored row.

Times are seconds of one monotonic clock, or of a simulation's. `outcome` is "ok", "fail" (it
certainly had no effect) or "unknown". Arguments and results by operation:

    settings      arguments: the fields of Settings
    enqueue       {queue, jobs: [[body, priority, attempts, delay_ms]]} -> [descriptor]; an unknown
                  one that says what was stored: [descriptor, null (unknown) or "" (is not)]
    dequeue       {queue, limit, wait_ms, coverage, dry_run, limited, source, succeeded, failed} ->
                  [[descriptor, body, attempts_allowed, attempts_remaining, claim]]; seen: the
                  descriptors that a client had read when it died
    ack           {queue, succeeded: [[descriptor, claim or null]],
                  failed: [[descriptor, claim or null, delay_ms]]}
    checkpoint    {queue, source, requests: [[descriptor, claim or null, new body or null,
                  move_to_pending, delay_ms, attempts or null]]}
    lookup, scan  {descriptors} or {queue, state} -> {descriptor: ROW}, ROW being [state, body or
                  null, allowed, remaining, claim or null, created_ms, run_after_ms, updated_ms]
    retry         {queue, priority, attempts, delay_ms, limit} -> count
    delete        {queue, state, priority, limit} -> count
    scan          also {future, pattern, begun}: part of a search whose first call began then
    searched      {queue, state, future, pattern} -> [descriptor], all that a search found
    count         {queue, state, future, pattern} -> count
    create_queue, delete_queue, queue_names
    fault         {kind, places, holds, away, queues}: places are the parts whose calls may fail
                  (shard-NAME, router); holds what it delays: "", "calls" to the router,
                  "commits" to a store, "shard"; away the shards that hand out nothing meanwhile,
                  though no call fails; queues those concerned, if not all are
    start         {program, pid}: at its t0 that process began
    moved         {shard}: while an operator's drain moved its scheduled jobs to other shards
    closed        {shard}: while no new job may come to it
    emptied       {shard}: when a drain was done that waited until nothing was ready there
    copied        {shards}: while they stood still and a copy of their stores was made
    restored      {shards}: the same, and that copy was put back
    drained       {queue}: from t0 on no job of it was ready, says the service
    row           {shard, descriptor} -> ROW, read from the store itself at the end
    depths        {queue} -> {state: count}, the gauges at the end
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OK, FAIL, UNKNOWN = "ok", "fail", "unknown"


# So long after a restart a router may not have heard yet that the shard serves again.
_RETURN_SECONDS = 1.0


@dataclass(slots=True)
class Record:
    t0: float
    t1: float
    process: str
    operation: str
    arguments: dict[str, Any] = field(default_factory=dict)
    outcome: str = OK
    result: Any = None
    server: str = ""

    def __str__(self) -> str:
        return (
            f"{self.t0:.3f}-{self.t1:.3f} {self.process} {self.operation} {self.arguments} "
            f"-> {self.outcome} {self.result}"
        )[:300]


@dataclass(frozen=True)
class Settings:
    """What the judge has to know of the deployment and of the bounds that hold for it."""

    request_seconds: float = 10.0
    claim_seconds: float = 600.0
    queue_claim_seconds: dict[str, float] = field(default_factory=dict)
    ttl_seconds: float = 86_400.0
    in_progress_limits: dict[str, int] = field(default_factory=dict)
    recovery_seconds: float = 10.0
    # How much later than its deadline an answer, or the effect of an unknown call, may come.
    grace_seconds: float = 1.0
    release_seconds: float = 2.0
    # A silent shard is noticed within `notice_seconds`; from then on p99 of calls that others can
    # serve is at most twice the usual one, and a tenth of a second and `margin_seconds` beside.
    notice_seconds: float = 1.5
    margin_seconds: float = 0.5
    # A dequeue may go on without a shard that has been silent so long (four looks, 0.25 s each).
    silence_seconds: float = 0.75
    # Wall clock minus monotonic clock: stored times bear the former. None: they prove nothing.
    wall_offset: float | None = None


class History:
    """A log that many threads write; each line is complete, whatever ends the process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def add(self, record: Record) -> None:
        line = json.dumps(asdict(record), separators=(",", ":")) + "\n"
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield Record(**json.loads(line))


class Windows:
    """Spans of time, merged where they overlap."""

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for start, end in sorted(spans):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def first_within(self, start: float, end: float) -> float | None:
        """The first moment of [start, end] that a span covers."""
        at = bisect_left(self._ends, start)
        if at == len(self._ends) or self._starts[at] > end:
            return None
        return max(start, self._starts[at])

    def touch(self, start: float, end: float) -> bool:
        return self.first_within(start, end) is not None


class Faults:
    """The faults of a history: what may fail, and until when an unknown call may take effect."""

    def __init__(self, records: Iterable[Record], settings: Settings) -> None:
        self._settings = settings
        self.all = [record for record in records if record.operation == "fault"]
        recovery = settings.recovery_seconds
        self._any = self._windows(lambda record: bool(record.arguments["places"]), recovery)
        self._under_way = self._windows(lambda _: True, _RETURN_SECONDS)
        self._by_place: dict[str, Windows] = {}
        self._away: dict[str, Windows] = {}

    def _windows(self, matches: Any, after: float) -> Windows:
        return Windows((r.t0, r.t1 + after) for r in self.all if matches(r))

    def calm(self, t0: float, t1: float) -> bool:
        """Whether no fault, nor the time that recovery from one may take, falls in this span."""
        return not self._any.touch(t0, t1)

    def touch(self, t0: float, t1: float) -> bool:
        """Whether any fault at all was under way, or had just ended."""
        return self._under_way.touch(t0, t1)

    def alone(self, fault: Record) -> bool:
        """Whether no other was under way meanwhile."""
        return not any(
            other is not fault and other.t0 <= fault.t1 and fault.t0 <= other.t1
            for other in self.all
        )

    def spares(self, place: str, t0: float, t1: float) -> bool:
        """The same for one place, and for the router, which every call passes."""
        if place not in self._by_place:
            hurt = {place, "router"}
            self._by_place[place] = self._windows(
                lambda record: not hurt.isdisjoint(record.arguments["places"]),
                self._settings.recovery_seconds,
            )
        return not self._by_place[place].touch(t0, t1)

    def serves(self, shard: str, t0: float, t1: float) -> bool:
        """Whether a shard is spared, and was not restarted either."""
        if shard not in self._away:
            self._away[shard] = self._windows(
                lambda record: shard in record.arguments.get("away", ()), _RETURN_SECONDS
            )
        return self.spares(shard, t0, t1) and not self._away[shard].touch(t0, t1)

    def settled_at(self, record: Record) -> float:
        """When a call of unknown outcome has taken effect, or never will.

        Its time runs from the moment at which the router read it, so a call that was held up
        before may be late. A commit under way when its shard froze, or said to a store that
        does not move, may take effect when that goes on.
        """
        patience = self._settings.request_seconds + self._settings.grace_seconds
        patience += record.arguments.get("wait_ms", 0) / 1000
        end = max(record.t1, record.t0 + patience)
        for fault in self.all:
            if fault.t0 > end or fault.t1 < record.t0:
                continue
            match fault.arguments.get("holds", ""):
                case "calls":
                    end = max(end, fault.t1 + patience)
                case "commits":
                    end = max(end, fault.t1 + self._settings.grace_seconds)
                case "shard" if record.t0 <= fault.t0:
                    end = max(end, fault.t1 + self._settings.grace_seconds)
        return float(end)
