"""A load over a cluster while things befall it: what its clients saw, in figures and judged."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import NamedTuple, Self

from pinlaterd.model import JobDescriptor
from tests.checker import history, rows
from tests.checker.automaton import Phase
from tests.checker.clients import CLAIM_SECONDS
from tests.checker.history import History, Record, Settings
from tests.checker.judge import judge
from tests.checker.run import Row, Violation
from tests.cluster.load import PROBE, PROBE_CLAIM_SECONDS
from tests.cluster.site import (
    MYSQL_SHARDS,
    REDIS_SHARDS,
    SHARDS,
    THRIFT_PORT,
    Server,
    Site,
)

_REQUEST_SECONDS = 10.0
# What a call in flight at a fault may take until nothing of it is left.
_RECOVERY_SECONDS = 10.0
# The longest that a test waits for what should come within 10 s.
_SERVED_SECONDS = 120.0
_REST_SECONDS = 60.0
_POLL_SECONDS = 0.2

_numbers = itertools.count(1)


class Served(NamedTuple):
    """A call of a probe that was answered."""

    server: str
    shard: str
    operation: str
    began: float
    ended: float


class Run:
    """One load; `with` runs it, and judges what it saw."""

    def __init__(self, site: Site, *, servers: Sequence[Server] = ()) -> None:
        """`servers`: whose routers the clients use, if not all."""
        self.site = site
        self.servers = servers or site.servers
        number = next(_numbers)
        self._path = site.folder / f"history-{number}.jsonl"
        self._faults = History(site.folder / f"faults-{number}.jsonl")
        self._faults_path = site.folder / f"faults-{number}.jsonl"
        self._process = site.clients.start(
            *(sys.executable, "-m", "tests.cluster.load", "--history", str(self._path)),
            *("--run", str(number), "--shards", ",".join(site.shards), *_targets(self.servers)),
        )
        self.violations: list[Violation] = []  # once it has ended
        self._began = time.monotonic()
        self._read_bytes = 0
        self._served: list[Served] = []

    def __enter__(self) -> Self:
        assert self._line() == "runs"
        self._faults.add(Record(0.0, 0.0, "test", "settings", asdict(self._settings())))
        self.wait_until_served(time.monotonic())
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if kind is not None:
            self.site.clients.end_all()
            return
        said = list(iter(self._line, ""))
        # At any time a shard may be moved: it hands out nothing for a moment, and no call fails.
        away = {"kind": "moves", "places": [], "away": self._shards_hurt()}
        self._faults.add(Record(self._began, time.monotonic(), "test", "fault", away))
        self._faults.close()
        assert said == ["drained"], said
        self.violations = judge(
            [*history.read(self._path), *history.read(self._faults_path), *self._stored()]
        )
        for text in self.site.returned_writers():
            self.violations.append(Violation("owners never overlap", text))
        assert self.violations == [], f"{self.violations[:3]}; {self._path}"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    @staticmethod
    def _settings() -> Settings:
        wall_offset = time.time() - time.monotonic()
        claims = {**CLAIM_SECONDS, PROBE: PROBE_CLAIM_SECONDS}
        return Settings(
            request_seconds=_REQUEST_SECONDS,
            claim_seconds=PROBE_CLAIM_SECONDS,
            queue_claim_seconds=claims,
            recovery_seconds=_RECOVERY_SECONDS,
            grace_seconds=2.5,
            wall_offset=wall_offset,
        )

    def _stored(self) -> Sequence[Record]:
        """All rows, once they are the same twice: claims may run out meanwhile. Those made
        before several faults in a row got the time for which their shard was away."""
        found: Sequence[Record] = ()
        deadline = time.monotonic() + _REST_SECONDS
        while True:
            before, found = found, list(self._rows())
            if [_row(record) for record in before] == [_row(record) for record in found]:
                if not any(map(_is_overdue, found)) or time.monotonic() > deadline:
                    return found
                time.sleep(1.0)
            assert time.monotonic() < deadline + 10, "the stores do not come to rest"

    def _rows(self) -> Iterator[Record]:
        yield from rows.of_mysql(self.site.mariadb, MYSQL_SHARDS)
        yield from rows.of_redis(self.site.redis, REDIS_SHARDS)
        for folder in self.site.data_folders():
            yield from rows.of_sqlite(folder)

    def use(self, servers: Sequence[Server]) -> None:
        """Have the clients go to these; their calls elsewhere come to an end."""
        self.servers = servers
        assert self._process.stdin is not None
        self._process.stdin.write(f"{' '.join(_targets(servers))}\n".encode())
        self._process.stdin.flush()
        assert self._line() == "moved"

    # --- faults -----------------------------------------------------------------------------

    @contextmanager
    def fault(
        self,
        kind: str,
        *,
        places: Sequence[str] = (),
        holds: bool = False,
        over_seconds: float = 0.0,
    ) -> Iterator[float]:
        """Let calls to `places`, or to all, fail during the block; with `holds`, let it delay some,
        too. No call may fail if the block takes at most `over_seconds`."""
        began = time.monotonic()
        yield began
        if time.monotonic() - began <= over_seconds:
            return
        hurt = places or ["router", *self._shards_hurt()]
        arguments = {"kind": kind, "places": hurt, "holds": "calls" if holds else ""}
        self._faults.add(Record(began, time.monotonic(), "test", "fault", arguments))

    def _shards_hurt(self) -> Sequence[str]:
        return [f"shard-{shard}" for shard in self.site.shards]

    def follower(self, *, all_move: bool = False) -> Server:
        """Choose a server that does not lead, and give it shards of each kind of store; with
        `all_move`, one whose shards others can all own."""
        return self._with_shards(self.site.follower(all_move=all_move))

    def leader(self) -> Server:
        return self._with_shards(self.site.leader())

    def _with_shards(self, server: Server) -> Server:
        self.site.give_shards(server)
        return server

    # --- figures ----------------------------------------------------------------------------

    def wait_until_served(
        self,
        since: float,
        *,
        servers: Sequence[Server] | None = None,
        shards: Sequence[str] | None = None,
    ) -> float:
        """Seconds from `since` until each shard had taken an enqueue and an ack through the router
        of each server, of calls that began after that."""
        routers = [s.machine.address for s in servers or self.servers]
        wanted = set(itertools.product(routers, shards or self.site.shards, ("enqueue", "ack")))
        deadline = time.monotonic() + _SERVED_SECONDS
        while True:
            first = self.first_served(since)
            if wanted <= first.keys():
                return max(first[each] for each in wanted) - since
            missing = sorted(wanted - first.keys())
            tails = "".join(server.log_tail() for server in self.site.servers)
            assert time.monotonic() < deadline, f"not served: {missing}{tails}"
            time.sleep(_POLL_SECONDS)

    def first_served(self, since: float) -> Mapping[tuple[str, str, str], float]:
        """When a call that began after `since` was answered, by router, shard and operation."""
        self._read()
        first: dict[tuple[str, str, str], float] = {}
        for served in self._served:
            if served.began >= since:
                key = (served.server, served.shard, served.operation)
                first[key] = min(served.ended, first.get(key, served.ended))
        return first

    def longest_call(self, since: float, *, shards: Sequence[str] | None = None) -> float:
        """Of a probe's, on one of these shards."""
        self._read()
        found = [s for s in self._served if s.began >= since and s.shard in (shards or SHARDS)]
        return max((s.ended - s.began for s in found), default=0.0)

    def _read(self) -> None:
        """What the probes have written since."""
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            whole, _, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            if b'"queue":"probe"' in line and b'"outcome":"ok"' in line:
                self._served += _served(Record(**json.loads(line)))


def _targets(servers: Sequence[Server]) -> Sequence[str]:
    return [f"{server.machine.address}:{THRIFT_PORT}" for server in servers]


def _row(record: Record) -> tuple[str, object]:
    return record.arguments["descriptor"], record.result


def _is_overdue(record: Record) -> bool:
    """Whether it is a claim that should have ended without any fault."""
    queue, row = record.arguments["descriptor"].partition(":")[0], Row(*record.result)
    seconds = CLAIM_SECONDS.get(queue, PROBE_CLAIM_SECONDS) + _RECOVERY_SECONDS / 2
    return row.state == Phase.IN_PROGRESS and time.time() - row.updated_ms / 1000 > seconds


def _served(record: Record) -> Iterator[Served]:
    match record.operation:
        case "enqueue":
            descriptors = record.result
        case "ack":
            descriptors = [descriptor for descriptor, _ in record.arguments["succeeded"]]
        case _:
            return
    server = record.server.partition(":")[0]
    for descriptor in descriptors:
        parsed = JobDescriptor.parse(descriptor)
        assert parsed is not None
        yield Served(server, parsed.shard, record.operation, record.t0, record.t1)
