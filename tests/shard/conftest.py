"""A whole shard in the test's own process: the real service on the real engine, without sockets."""

from __future__ import annotations

import dataclasses
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, cast

import pytest

from pinlaterd.config.schema import (
    Config,
    ServerSettings,
    ShardSettings,
    default_queue_settings,
)
from pinlaterd.engines.base import StorageEngine
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.errors import PinLaterError
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CallContext,
    ClaimedJob,
    CountRequest,
    CreateQueueRequest,
    DequeueRequest,
    DequeueResult,
    EnqueueRequest,
    Job,
    JobRecord,
    JobState,
    LookupRequest,
    Method,
    Request,
)
from pinlaterd.rpc import codec
from pinlaterd.shard.service import ShardService
from pinlaterd.shard.timekeeping import Timekeeper
from pinlaterd.stats import Stats
from pinlaterd.wire.envelope import CallEntry, Op, ReplyEntry, Status
from tests.clocks import FakeClock

ROUTER = b"router"
SHARD = "s1"
SECONDS_TO_ANSWER = 10.0
METHODS = {
    "AckRequest": Method.ACK,
    "CheckpointRequest": Method.CHECKPOINT,
    "CountRequest": Method.COUNT,
    "CreateQueueRequest": Method.CREATE_QUEUE,
    "DeleteJobsRequest": Method.DELETE_JOBS,
    "DeleteQueueRequest": Method.DELETE_QUEUE,
    "DequeueRequest": Method.DEQUEUE,
    "EnqueueRequest": Method.ENQUEUE,
    "LookupRequest": Method.LOOKUP,
    "QueueNamesRequest": Method.QUEUE_NAMES,
    "RetryFailedRequest": Method.RETRY_FAILED,
    "ScanRequest": Method.SCAN,
}


class Shard:
    """Calls a ShardService as a router would, and drives its loop until it has answered."""

    def __init__(self, service: ShardService, engine: StorageEngine, clock: FakeClock) -> None:
        self.service = service
        self.engine = engine
        self.clock = clock
        self.stats: Stats
        self._next_id = 0
        self._methods: dict[int, Method] = {}

    def entry(self, request: Request, *, source: str = "web:h1", **options: Any) -> CallEntry:
        """`request` as a router sends it; `options` are those of CallEntry."""
        self._next_id += 1
        method = METHODS[type(request).__name__]
        self._methods[self._next_id] = method
        deadline = options.pop("deadline", self.clock.monotonic() + SECONDS_TO_ANSWER)
        message = codec.encode_call(method, self._next_id, CallContext(source), request)
        return CallEntry(self._next_id, deadline, message, router=ROUTER, **options)

    def raw(self, message: bytes, op: Op = Op.CALL) -> CallEntry:
        self._next_id += 1
        deadline = self.clock.monotonic() + SECONDS_TO_ANSWER
        return CallEntry(self._next_id, deadline, message, op, router=ROUTER)

    def submit(self, *entries: CallEntry) -> None:
        self.service.backlog.extend(entries)

    def turn(self) -> list[ReplyEntry]:
        """One turn of the loop."""
        self.service.run_batch()
        self.service.run_slice(calls_wait=False)
        searches = self.service.searches
        fileno = searches.fileno
        if fileno is not None:
            select.select([fileno], [], [], 0 if self.service.busy else 0.1)
            searches.receive()
        return list(self.service.replies.take().get(ROUTER, ()))

    def replies(self, *entries: CallEntry) -> list[ReplyEntry]:
        """All of them in one batch; their answers, in their order."""
        self.submit(*entries)
        found: dict[int, ReplyEntry] = {}
        give_up = time.monotonic() + 30
        while len(found) < len(entries):
            found.update({reply.call_id: reply for reply in self.turn()})
            if time.monotonic() > give_up:
                pytest.fail("no answer within 30 s")
        return [found[entry.call_id] for entry in entries]

    def results(self, *requests: Request, **options: Any) -> list[Any]:
        """The results of `requests`, in one batch; those that failed: the error."""
        entries = [self.entry(request, **options) for request in requests]
        return [self.decode(reply) for reply in self.replies(*entries)]

    def decode(self, reply: ReplyEntry) -> Any:
        if reply.status not in (Status.DONE, Status.FAILED):
            return reply.status
        try:
            return codec.decode_reply(self._methods[reply.call_id], reply.payload)
        except PinLaterError as error:
            return error

    def call(self, request: Request, **options: Any) -> Any:
        """The result of `request`; raises the error that it was answered with."""
        (result,) = self.results(request, **options)
        if isinstance(result, Exception):
            raise result
        return result

    # --- what most tests do --------------------------------------------------------------------

    def create(self, queue: str = "mail") -> None:
        self.call(CreateQueueRequest(queue))

    def enqueue(self, *jobs: Job | bytes, queue: str = "mail", **options: Any) -> list[str]:
        made = [job if isinstance(job, Job) else Job(job) for job in jobs]
        return list(self.call(EnqueueRequest(queue, made), **options))

    def dequeue(self, limit: int = 100, *, queue: str = "mail", **fields: Any) -> list[ClaimedJob]:
        result = self.call(DequeueRequest(queue, limit, **fields))
        return list(cast("DequeueResult", result).jobs)

    def ack(
        self,
        succeeded: Sequence[str] = (),
        failed: Sequence[str] = (),
        *,
        queue: str = "mail",
        delay_ms: int = 0,
    ) -> None:
        self.call(
            AckRequest(
                queue,
                [AckInfo(descriptor) for descriptor in succeeded],
                [AckInfo(descriptor, retry_delay_ms=delay_ms) for descriptor in failed],
            )
        )

    def lookup(self, *descriptors: str, body: bool = False) -> dict[str, JobRecord]:
        return cast("dict[str, JobRecord]", self.call(LookupRequest(descriptors, body)))

    def state(self, descriptor: str) -> JobState | None:
        record = self.lookup(descriptor).get(descriptor)
        return None if record is None else record.state

    def count(self, state: JobState, queue: str = "mail", **fields: Any) -> int:
        return cast("int", self.call(CountRequest(queue, state, **fields)))

    def counters(self) -> dict[str, int]:
        return self.stats.snapshot()["counters"]

    def counts(self, queue: str = "mail") -> tuple[int, ...]:
        """What routers are told of ready jobs."""
        facts = {counts.queue: counts.counts for counts in self.service.facts().counts}
        return facts[queue]


MakeShard = Callable[..., Shard]


class AlwaysAwake(Timekeeper):
    """The clock may move by hours between two turns, and that is time served."""

    def awake(self) -> None: ...


class ShardClock(FakeClock):
    """Moves only when told to. By the real clock, which the searcher has, it is ahead."""

    def __init__(self) -> None:
        super().__init__()
        self._monotonic = time.monotonic() + 3600


@pytest.fixture
def clock() -> ShardClock:
    return ShardClock()


@pytest.fixture
def make_shard(tmp_path: Path, clock: FakeClock) -> Iterator[MakeShard]:
    """Opens shards; `settings` are those of ServerSettings, `queues` those of queues.yaml."""
    opened: list[Shard] = []

    def make(
        name: str = SHARD,
        engine: StorageEngine | None = None,
        server: ServerSettings | None = None,
        timekeeper: Timekeeper | None = None,
        queues: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        **settings: Any,
    ) -> Shard:
        server = dataclasses.replace(server or ServerSettings(advertised_host="box"), **settings)
        shards = {name: ShardSettings(name)}
        stats = Stats()
        store = engine or SqliteEngine(tmp_path / f"{name}.sqlite")
        usual = default_queue_settings(server)
        limited = {queue: dataclasses.replace(usual, **given) for queue, given in queues.items()}
        config = Config(server, MappingProxyType(shards), limited)
        keeper = timekeeper or AlwaysAwake(clock)
        service = ShardService(name, store, config, clock, stats, Random(1), keeper)
        service.open()
        shard = Shard(service, store, clock)
        shard.stats = stats
        opened.append(shard)
        return shard

    yield make
    for shard in opened:
        shard.service.close()


@pytest.fixture
def shard(make_shard: MakeShard) -> Shard:
    """With the queue `mail`."""
    made = make_shard()
    made.create()
    return made
