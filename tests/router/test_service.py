"""The router's service over several shards, each the whole ShardService on SQLite in this process.

What is tried here is what a test over sockets can't force: hints that are wrong, clients that go
at the worst moment, shards that refuse, and which calls a request takes.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from pinlaterd.clock import Clock
from pinlaterd.config.password import hash_password
from pinlaterd.config.schema import Config, ServerSettings, ShardSettings
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.errors import (
    DequeueRateLimited,
    EnqueuedInPart,
    EnqueueRejected,
    ErrorCode,
    InvalidRequest,
    NoHealthyShards,
    Overloaded,
    PasswordInvalid,
    PinLaterError,
    QueueNotFound,
    ShardConnectionFailed,
    StorageError,
)
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CallContext,
    ClaimedJob,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    DequeueRequest,
    DequeueResult,
    EnqueueRequest,
    EnqueueWithOptionsResult,
    Job,
    JobDescriptor,
    JobOptions,
    JobRecord,
    JobState,
    LookupRequest,
    Method,
    QueueKey,
    Request,
    Result,
    RetryFailedRequest,
    ScanRequest,
    ScanResult,
)
from pinlaterd.router.call import Shared
from pinlaterd.router.enqueue import EnqueueByKey
from pinlaterd.router.rate_limits import RateLimits
from pinlaterd.router.service import RouterService
from pinlaterd.router.shards import ShardSet
from pinlaterd.rpc import codec, tuned
from pinlaterd.rpc.connection import Answer, Connection
from pinlaterd.shard.service import ShardService
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ShardEntry, Snapshot
from pinlaterd.wire.envelope import Op, ReadyCounts, ReplyEntry, ShardCall, Status
from pinlaterd.wire.key_placement import KeyHomes, KeyPlacement
from tests.clocks import FakeClock
from tests.router.local_shard import LocalShard, Tell

QUEUE = "mail"
ANSWER_SECONDS = 60.0


class Client:
    """Stands in for a connection with one call, and takes its answer; `gone` when told so."""

    def __init__(self) -> None:
        self.gone = False
        self.peer = "192.0.2.1:4711"
        self.reads = True
        self.slots: list[Answer] = []
        self.oneway_calls = self.calls_that_may_wait = 0
        self.server = self.budget = self
        self.message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def room(self) -> int:
        return 1 << 30

    def is_lost(self) -> bool:
        return self.gone

    def is_next(self, _answer: Answer) -> bool:
        return self.reads

    def end(self) -> None:
        """It goes, and the call that it waits for hears of it."""
        self.gone = True
        [answer] = self.slots
        assert answer.on_gone is not None
        answer.on_gone()

    def answered(self, _answer: Answer, message: bytes) -> bool:
        if not self.gone:
            self.message.set_result(message)
        return not self.gone

    async def bodies(self) -> list[bytes]:
        """Of the jobs in the answer to a dequeue."""
        message = await asyncio.wait_for(self.message, ANSWER_SECONDS)
        result = cast("DequeueResult", codec.decode_reply(Method.DEQUEUE, message))
        return [job.body for job in result.jobs]


class AdvancingClock(Clock):
    """`advance` makes it later than it is."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead = 0.0
        self.monotonic = lambda: time.monotonic() + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += seconds


class Site:
    """A router and its shards, on the loop of `runner`."""

    runner: asyncio.Runner

    def __init__(self, folder: Path, shards: int, settings: ServerSettings) -> None:
        names = [str(number) for number in range(1, shards + 1)]
        self.clock = AdvancingClock()
        self.placement = KeyPlacement()
        config = Config(
            server=settings,
            shards={
                name: ShardSettings(
                    name=name, engine="sqlite", dequeue_only=False, file=f"{folder}/{name}.sqlite"
                )
                for name in names
            },
            queues={},
        )
        self.services = {
            name: ShardService(
                name, SqliteEngine(folder / f"{name}.sqlite"), config, self.clock, Stats()
            )
            for name in names
        }
        for service in self.services.values():
            service.open()
            service.create_queues([QUEUE])
        self.deleted: list[str] = []
        self.shards = ShardSet(
            lambda name, _endpoint, _listener: LocalShard(
                self.services[name], self.shards, self.clock
            ),
            self.clock.monotonic,
            self.deleted.append,
        )
        self.follow(names)
        for shard in self.locals():
            assert shard.facts is not None
            self.shards.welcomed(shard, shard.facts)
        self.limits = RateLimits(FakeClock())  # whose tokens `fill` gives
        self.shared = Shared(self.shards, self.limits, self.clock, Stats(), Random(1), settings)
        self.router = RouterService(self.shared)

    def follow(self, names: Iterable[str]) -> None:
        """There are these shards."""
        entries = [ShardEntry(name, dequeue_only=False) for name in names]
        self.placement = self.placement.followed_by({entry.name: True for entry in entries}, 1)
        for service in self.services.values():
            service.follow_keys(self.placement)
        self.shards.follow(Snapshot(1, tuple(entries), 0, keys=self.placement))

    def fill(self, tokens: float) -> None:
        """From now on the queue has a limit, and so many tokens; no others come."""
        self.limits.follow({QUEUE: 0.0}, {})
        self.limits.follow({QUEUE: 1e-9}, {})
        self.limits.follow({QUEUE: tokens or 1e-9}, {QUEUE: tokens})

    def locals(self) -> list[LocalShard]:
        return cast("list[LocalShard]", list(self.shards.by_name.values()))

    def shard(self, name: str) -> LocalShard:
        return cast("LocalShard", self.shards.by_name[name])

    def begin(self, method: Method, request: Request, *, oneway: bool = False) -> Client:
        client = Client()
        message = codec.encode_call(method, 7, CallContext("web:h1"), request)
        if oneway:
            message = message[:3] + b"\x04" + message[4:]
        self.handle(message, client)
        return client

    def handle(self, message: bytes, client: Client) -> None:
        self.router.handle(message, cast("Connection", client))

    async def call(self, method: Method, request: Request) -> Result:
        message = await asyncio.wait_for(self.begin(method, request).message, ANSWER_SECONDS)
        assert codec.peek_seqid(message) == 7
        return codec.decode_reply(method, message)

    async def enqueue(self, *jobs: Job) -> list[str]:
        return list(
            cast(
                "Sequence[str]", await self.call(Method.ENQUEUE, EnqueueRequest(QUEUE, list(jobs)))
            )
        )

    async def enqueue_on(self, name: str, *jobs: Job) -> list[str]:
        """As through another router: ours learns of it only if the shard's counts reach it."""
        shard = self.shard(name)
        message = codec.encode_call(
            Method.ENQUEUE, 1, CallContext("web:h2"), EnqueueRequest(QUEUE, list(jobs))
        )
        reply = await shard.ask(ShardCall(message, self.clock.monotonic() + ANSWER_SECONDS))
        return list(cast("Sequence[str]", codec.decode_reply(Method.ENQUEUE, reply.payload)))

    async def dequeue(self, limit: int, **options: object) -> Sequence[ClaimedJob]:
        request = DequeueRequest(QUEUE, limit)._replace(**options)  # type: ignore[arg-type]
        return cast("DequeueResult", await self.call(Method.DEQUEUE, request)).jobs

    async def settle(self, *, waiting: int) -> None:
        """Until all calls have ended but so many dequeues, which wait."""
        admission = self.router.admission
        async with asyncio.timeout(ANSWER_SECONDS):
            while (admission.waiting, admission.in_flight) != (waiting, 0):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)

    async def lookup(self, descriptors: Sequence[str]) -> list[JobRecord]:
        request = LookupRequest(descriptors, include_body=True)
        found = cast("Mapping[str, JobRecord]", await self.call(Method.LOOKUP, request))
        return [found[descriptor] for descriptor in descriptors]

    async def states(self, descriptors: Sequence[str]) -> list[int]:
        return [record.state for record in await self.lookup(descriptors)]

    def close(self) -> None:
        for service in self.services.values():
            service.close()


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """Of three shards; `pytest.mark.site` says if of others, and settings."""
    marker = request.node.get_closest_marker("site")

    async def made(shards: int = 3, **settings: Any) -> Site:
        return Site(tmp_path, shards, ServerSettings(**settings))

    with asyncio.Runner() as runner:
        built = runner.run(made(**(marker.kwargs if marker else {})))
        built.runner = runner
        yield built
        assert built.router.admission.in_flight == 0
        built.close()


def shard_of(descriptor: str) -> str:
    parsed = JobDescriptor.parse(descriptor)
    assert parsed is not None
    return parsed.shard


async def test_no_lower_priority_leaves_while_a_shard_of_stale_hints_holds_a_better_one(
    site: Site,
) -> None:
    await site.enqueue_on("1", Job(b"low", priority=2))
    site.shard("2").ready = {}
    await site.enqueue_on("2", Job(b"high", priority=1))
    site.shard("2").ready = {}  # the router has not heard of it

    first = await site.dequeue(1)
    second = await site.dequeue(1)

    assert [job.body for job in (*first, *second)] == [b"high", b"low"]


async def test_a_short_answer_is_given_only_after_all_shards_were_asked(site: Site) -> None:
    for name in ("1", "2", "3"):
        await site.enqueue_on(name, Job(name.encode()), Job(name.encode()))
        site.shard(name).ready = {}

    jobs = await site.dequeue(10)

    assert sorted(job.body for job in jobs) == [b"1", b"1", b"2", b"2", b"3", b"3"]


async def test_whatever_the_hints_say_the_best_jobs_of_all_shards_leave_first(site: Site) -> None:
    rng = Random(5)
    for _ in range(30):
        present: list[int] = []
        for shard in site.locals():
            jobs = [Job(b"x", priority=rng.randint(1, 3)) for _ in range(rng.randint(0, 4))]
            if jobs:
                await site.enqueue_on(shard.name, *jobs)
            present += [job.priority for job in jobs]
        while present:
            for shard in site.locals():
                if rng.random() < 0.5:
                    shard.ready = {QUEUE: tuple(rng.choices(range(3), k=3))}
            limit = rng.randint(1, 5)
            best, present = sorted(present)[:limit], sorted(present)[limit:]
            taken = [JobDescriptor.parse(job.descriptor) for job in await site.dequeue(limit)]
            assert sorted(found.priority for found in taken if found) == best


@pytest.mark.site(shards=2)
async def test_what_several_shards_gave_a_client_that_has_gone_is_there_for_others(
    site: Site,
) -> None:
    client, asked = Client(), list[Tell]()

    def go_at_the_second(on_reply: Tell) -> bool:
        asked.append(on_reply)
        client.gone |= len(asked) == 2
        return False

    for shard in site.locals():
        await site.enqueue_on(shard.name, Job(b"x"))
        on_call(shard, Method.DEQUEUE, go_at_the_second)
    request = DequeueRequest(QUEUE, 5)
    site.handle(codec.encode_call(Method.DEQUEUE, 7, CallContext("web:h1"), request), client)
    await site.settle(waiting=0)

    jobs = [*await site.dequeue(5, max_wait_ms=9_000)]
    while len(jobs) < 2:
        jobs += await site.dequeue(5, max_wait_ms=9_000)

    assert [job.attempts_remaining for job in jobs] == [2, 2]


@pytest.mark.site(shards=2)
async def test_what_several_shards_gave_a_client_that_did_not_read_it_is_there_for_others(
    site: Site,
) -> None:
    for name in ("1", "2"):
        await site.enqueue_on(name, Job(b"x"))
    client = site.begin(Method.DEQUEUE, DequeueRequest(QUEUE, 5))
    assert len(await client.bodies()) == 2

    [answer] = client.slots
    assert answer.on_undelivered is not None
    answer.on_undelivered(
        client.message.result(), False
    )  # as its connection does when that is lost

    jobs = [*await site.dequeue(5, max_wait_ms=9_000)]
    while len(jobs) < 2:
        jobs += await site.dequeue(5, max_wait_ms=9_000)
    assert [job.attempts_remaining for job in jobs] == [2, 2]


async def test_better_jobs_that_others_take_first_leave_no_answer_short(
    site: Site, monkeypatch
) -> None:
    await site.enqueue_on("1", Job(b"low", priority=3))
    # Whenever it is asked there was one, and will be one.
    monkeypatch.setattr(site.shard("2"), "ready_counts", lambda _queue: (1, 0, 0))

    assert [job.body for job in await site.dequeue(10)] == [b"low"]


@pytest.mark.parametrize("dry_run", [False, True])
async def test_a_full_answer_of_one_shard_takes_one_call(site: Site, dry_run) -> None:
    await site.enqueue_on("2", *[Job(b"x") for _ in range(5)])
    before = [len(shard.calls) for shard in site.locals()]

    assert len(await site.dequeue(5, dry_run=dry_run)) == 5

    assert sum(len(shard.calls) for shard in site.locals()) == sum(before) + 1


async def test_acks_of_one_shard_go_along_with_the_dequeue_in_one_call(site: Site) -> None:
    await site.enqueue_on("2", *[Job(b"x") for _ in range(4)])
    done = await site.dequeue(2)
    before = sum(len(shard.calls) for shard in site.locals())

    await site.dequeue(2, acks=AckRequest(QUEUE, [AckInfo(job.descriptor) for job in done]))

    assert sum(len(shard.calls) for shard in site.locals()) == before + 1
    assert await site.states([job.descriptor for job in done]) == [2, 2]


async def test_a_waiting_dequeue_asks_a_shard_that_joins_and_has_not_counted_the_queue_yet(
    site: Site,
) -> None:
    await site.enqueue_on("3", Job(b"kept"))
    away = site.shard("3")
    away.serves(serves=False)
    away.ready = {}
    waiting = site.begin(Method.DEQUEUE, DequeueRequest(QUEUE, 1, max_wait_ms=30_000))
    await site.settle(waiting=1)

    away.serves()
    site.shards.welcomed(away, site.services["3"].facts()._replace(counts=()))

    assert await waiting.bodies() == [b"kept"]


async def test_a_dequeue_is_granted_the_tokens_there_are_and_pays_for_what_it_gets(
    site: Site,
) -> None:
    await site.enqueue_on("1", *[Job(b"x") for _ in range(4)])
    site.fill(10)

    assert len(await site.dequeue(3)) == 3
    assert len(await site.dequeue(100)) == 1  # that was all: seven less one are left
    await site.enqueue_on("2", *[Job(b"x") for _ in range(20)])
    assert len(await site.dequeue(100)) == 6
    with pytest.raises(DequeueRateLimited, match=QUEUE):
        await site.dequeue(1)


async def test_dry_runs_are_free(site: Site) -> None:
    await site.enqueue_on("1", *[Job(b"x") for _ in range(5)])
    await site.enqueue_on("2", *[Job(b"x") for _ in range(5)])
    for tokens in (0, 2):
        site.fill(tokens)
        assert len(await site.dequeue(8, dry_run=True)) == 8

    assert len(await site.dequeue(8)) == 2


async def test_a_dequeue_waits_for_a_token_and_then_for_a_job(site: Site) -> None:
    site.fill(0)
    waiting = site.begin(Method.DEQUEUE, DequeueRequest(QUEUE, 1, max_wait_ms=30_000))
    with pytest.raises(DequeueRateLimited):
        await site.dequeue(1)
    site.fill(1)
    assert len(await site.dequeue(1, dry_run=True)) == 0
    assert not waiting.message.done()

    await site.enqueue_on("3", Job(b"new"))

    assert await waiting.bodies() == [b"new"]


async def test_what_comes_while_a_dequeue_waits_for_its_token_is_found(site: Site) -> None:
    site.fill(0)
    waiting = site.begin(Method.DEQUEUE, DequeueRequest(QUEUE, 1, max_wait_ms=30_000))
    with pytest.raises(DequeueRateLimited):
        await site.dequeue(1)
    await site.enqueue_on("1", Job(b"new"))

    site.fill(1)

    assert await waiting.bodies() == [b"new"]


async def test_no_token_is_spent_for_a_client_that_does_not_read(site: Site, monkeypatch) -> None:
    await site.enqueue_on("1", Job(b"x"))
    site.fill(0)
    waiting = site.begin(Method.DEQUEUE, DequeueRequest(QUEUE, 1, max_wait_ms=30_000))
    await site.settle(waiting=1)
    monkeypatch.setattr(waiting, "room", lambda: 0)
    waiting.reads = False

    site.fill(1)

    assert await waiting.bodies() == []
    assert len(await site.dequeue(1)) == 1


@pytest.mark.site(max_waiting_dequeues=1)
async def test_so_many_may_wait_and_one_whose_client_goes_makes_room(site: Site) -> None:
    wait = DequeueRequest(QUEUE, 1, max_wait_ms=30_000)
    waiting = site.begin(Method.DEQUEUE, wait)
    await site.settle(waiting=1)
    with pytest.raises(PinLaterError, match="overloaded: 1 dequeues wait"):
        await site.call(Method.DEQUEUE, wait)
    await site.settle(waiting=1)

    waiting.end()
    await site.settle(waiting=0)

    other = site.begin(Method.DEQUEUE, wait)
    await site.settle(waiting=1)
    await site.enqueue(Job(b"x"))
    await asyncio.wait_for(other.message, ANSWER_SECONDS)


async def test_a_wait_does_not_begin_once_the_client_has_gone(site: Site) -> None:
    site.fill(0)
    wait = DequeueRequest(QUEUE, 1, max_wait_ms=30_000)
    site.begin(Method.DEQUEUE, wait)
    gone = site.begin(Method.DEQUEUE, wait)
    gone.gone = True  # before it has found that it has to wait for a token

    await site.settle(waiting=1)


async def test_a_dequeue_may_wait_for_longer_than_the_time_of_a_call(site: Site) -> None:
    wait = DequeueRequest(QUEUE, 1, max_wait_ms=30_000)
    waiting = site.begin(Method.DEQUEUE, wait)
    await site.settle(waiting=1)

    site.clock.advance(ServerSettings().request_timeout_ms / 1000 + 1)
    await site.enqueue_on("1", Job(b"late"))

    assert await waiting.bodies() == [b"late"]


async def test_of_two_that_wait_the_second_gets_the_job_that_the_first_does_not_read(
    site: Site, monkeypatch
) -> None:
    wait = DequeueRequest(QUEUE, 1, max_wait_ms=30_000)
    first, second = (site.begin(Method.DEQUEUE, wait) for _ in range(2))
    await site.settle(waiting=2)
    monkeypatch.setattr(first, "room", lambda: 0)
    first.reads = False

    await site.enqueue_on("1", Job(b"x"))

    assert await second.bodies() == [b"x"]
    assert await first.bodies() == []


@pytest.mark.site(shards=1, max_calls_in_flight=2)
async def test_so_many_calls_may_be_in_flight_and_no_more(site: Site) -> None:
    held: list[Tell] = []

    def hold(on_reply: Tell) -> bool:
        held.append(on_reply)
        return True

    on_call(site.shard("1"), Method.COUNT, hold)
    count = CountRequest(QUEUE, JobState.PENDING)
    counting = [site.begin(Method.COUNT, count) for _ in range(2)]

    with pytest.raises(Overloaded, match="2 calls are in flight already"):
        await site.enqueue(Job(b"x"))

    while len(held) < 2:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)
    for tell in held:
        tell(ReplyEntry(0, Status.REFUSED, b"is down"))
    for client in counting:
        await asyncio.wait_for(client.message, ANSWER_SECONDS)
    await site.enqueue(Job(b"x"))


async def test_a_oneway_dequeue_does_not_wait(site: Site) -> None:
    wait = DequeueRequest(QUEUE, 1, max_wait_ms=30_000)
    site.begin(Method.DEQUEUE, wait, oneway=True)

    await site.settle(waiting=0)


@pytest.mark.parametrize(
    ("method", "search"),
    [
        (Method.COUNT, CountRequest(QUEUE, JobState.PENDING)),
        (Method.SCAN, ScanRequest(QUEUE, JobState.PENDING)),
    ],
)
async def test_a_search_whose_client_goes_before_it_has_begun_is_ended(
    site: Site, method, search
) -> None:
    before = [len(shard.calls) for shard in site.locals()]
    client = site.begin(method, search)
    client.end()

    await site.router.finish_calls(ANSWER_SECONDS)

    assert [len(shard.calls) for shard in site.locals()] == before


async def test_a_scan_that_accepts_a_part_names_shards_that_are_or_become_unavailable(
    site: Site,
) -> None:
    head = codec.Head(Method.SCAN.value, 0, oneway=False, strict=True)

    def answer(name: str, status: Status, payload: bytes = b"") -> None:
        def intercept(call: ShardCall, tell: Tell) -> bool:
            tell(ReplyEntry(call.call_id, status, payload))
            return True

        site.shard(name).intercept = intercept

    async def scan(*, accept_partial: bool = True) -> tuple[int, Sequence[str] | None]:
        request = ScanRequest(QUEUE, JobState.PENDING, accept_partial=accept_partial)
        page = cast("ScanResult", await site.call(Method.SCAN, request))
        assert page.in_state == page.looked_at
        return page.looked_at, page.missing_shards

    for name, at in {"1": 1, "2": 20, "3": 300}.items():
        found = ScanResult([], looked_at=at, in_state=at)
        answer(name, Status.DONE, codec.encode_reply(head, found))
    assert await scan() == (321, None)
    site.shard("2").is_returning = True
    site.shard("2").serves(serves=False)
    assert await scan() == (301, ["2"])
    site.shard("2").is_returning = False
    with pytest.raises(ShardConnectionFailed, match="shard 2"):
        await scan(accept_partial=False)
    answer("3", Status.FAILED, codec.encode_error(head, StorageError("the store is closed")))
    assert await scan() == (1, ["2", "3"])
    answer("3", Status.FAILED, codec.encode_error(head, QueueNotFound(QUEUE)))
    with pytest.raises(QueueNotFound):
        await scan()
    answer("3", Status.LOST)
    assert await scan() == (1, ["2", "3"])
    answer("1", Status.LOST)
    with pytest.raises(ShardConnectionFailed, match="went away"):
        await scan()


async def test_a_degraded_shard_gets_no_new_work_but_its_acks(site: Site) -> None:
    [descriptor] = await site.enqueue_on("2", Job(b"a"))
    [job] = await site.dequeue(1)
    await site.enqueue_on("2", Job(b"b"))
    site.shard("2").says(degraded=True)
    calls_before = len(site.shard("2").calls)

    placed = {shard_of(d) for _ in range(30) for d in await site.enqueue(Job(b"x"))}
    assert placed == {"1", "3"}
    assert len(await site.dequeue(100)) == 30
    assert len(site.shard("2").calls) == calls_before

    ack = AckInfo(job.descriptor, claim_descriptor=job.claim_descriptor)
    await site.call(Method.ACK, AckRequest(QUEUE, [ack]))
    assert await site.states([descriptor]) == [JobState.SUCCEEDED]


async def test_where_all_are_degraded_they_are_used_all_the_same(site: Site) -> None:
    for shard in site.locals():
        shard.says(degraded=True)

    await site.enqueue(Job(b"a"))

    assert [job.body for job in await site.dequeue(5)] == [b"a"]


async def test_an_enqueue_that_a_shard_refuses_goes_to_another(site: Site) -> None:
    site.services["1"].close()
    site.services["2"].close()

    descriptors = [*await site.enqueue(Job(b"a")), *await site.enqueue(Job(b"b"))]

    assert {shard_of(descriptor) for descriptor in descriptors} == {"3"}


def fill(site: Site, *names: str) -> None:
    """Their files may not grow any more."""
    for name in names:
        engine = cast("SqliteEngine", site.services[name]._engine)
        engine.db.execute("PRAGMA max_page_count = 1")


@pytest.mark.parametrize("jobs", [1, 1500])
@pytest.mark.site(shards=2)
async def test_where_all_stores_are_full_the_caller_is_told_which_and_the_cure(
    site: Site, jobs
) -> None:
    fill(site, "1", "2")

    with pytest.raises(Overloaded) as caught:
        await site.enqueue(*[Job(b"x" * 10_000)] * jobs)

    told = caught.value.message
    for name in ("1", "2"):
        assert f"shard {name}: the store is full: " in told
    assert told.count("make room") == 2
    assert "; nothing was stored; try later" in told
    assert "of the jobs" not in told


@pytest.mark.site(shards=2)
async def test_of_shards_that_refuse_for_another_reason_that_is_told_too(site: Site) -> None:
    fill(site, "1")
    site.services["2"].close()

    with pytest.raises(
        Overloaded, match=r"shard 1: the store is full.*shard 2: can't reach its store"
    ):
        await site.enqueue(Job(b"x" * 100_000))


@pytest.mark.site(shards=3)
async def test_a_reason_that_several_shards_give_is_told_once(site: Site) -> None:
    for name in "123":
        refusal = ReplyEntry(0, Status.SILENT if name == "2" else Status.REFUSED, b"is down")
        answer_with(refusal, site.shard(name), Method.COUNT, [1])

    with pytest.raises(ShardConnectionFailed) as caught:
        await site.call(Method.COUNT, CountRequest(QUEUE, JobState.PENDING))

    assert caught.value.message == (
        "shard 1, 2, 3: shard 1, 3: is down; nothing was done there; shard 2: does not "
        "answer; whether the call was carried out is not known"
    )


@pytest.mark.site(shards=1)
async def test_an_ack_is_told_that_the_store_is_full(site: Site) -> None:
    [descriptor] = await site.enqueue(Job(b"a"))
    [job] = await site.dequeue(1)
    fill(site, "1")
    acks = AckRequest(QUEUE, succeeded=[AckInfo(job.descriptor, "x" * 5_000)])

    with pytest.raises(ShardConnectionFailed, match=r"shard 1: the store is full.*nothing was"):
        await site.call(Method.ACK, acks)

    assert await site.states([descriptor]) == [JobState.IN_PROGRESS]


async def test_a_shard_that_joins_gets_the_queues_of_the_others(site: Site) -> None:
    site.services["1"].create_queues(["only_here"])
    facts = site.services["1"].facts()

    site.shards.welcomed(site.shard("1"), facts)
    last = site.shard("2").calls[-1]

    assert (last.op, last.message) == (Op.ENSURE_QUEUES, b'["only_here"]')


def on_call(shard: LocalShard, method: Method, act: Callable[[Tell], bool]) -> None:
    """Have `act` see each call of `method` to `shard` first; True: it needs no other answer."""
    no_calls = (Op.RELEASE, Op.ENSURE_QUEUES, Op.END_SEARCH)
    shard.intercept = lambda call, on_reply: (
        call.op not in no_calls and is_method(call.message, method) and act(on_reply)
    )


def answer_with(
    reply: ReplyEntry,
    shard: LocalShard,
    method: Method,
    numbers: Container[int],
    late: AdvancingClock | None = None,
) -> list[Tell]:
    """Have the calls of those numbers, from 1 on, answered with `reply`; if a clock is given, once
    the time of a call is over. Returns who has called."""
    asked: list[Tell] = []

    def answer(on_reply: Tell) -> bool:
        asked.append(on_reply)
        if len(asked) not in numbers:
            return False
        if late is not None:
            late.advance(ServerSettings().request_timeout_ms / 1000)
        asyncio.get_running_loop().call_soon(on_reply, reply)
        return True

    on_call(shard, method, answer)
    return asked


async def test_a_shard_that_is_welcomed_while_a_queue_is_created_gets_it_too(site: Site) -> None:
    late = site.shard("3")
    late.serves(serves=False)

    def welcome(_: Tell) -> bool:
        late.serves()
        return False

    on_call(site.shard("1"), Method.CREATE_QUEUE, welcome)
    await site.call(Method.CREATE_QUEUE, CreateQueueRequest("new"))

    assert all("new" in service.facts().queues for service in site.services.values())


async def test_a_shard_that_refused_to_create_a_queue_is_asked_again(site: Site) -> None:
    site.services["1"].create_queues(["new"])  # as another router had it done
    other = site.shard("2")

    def refuse(_call: ShardCall, on_reply: Tell) -> bool:
        other.intercept = lambda _call, _on_reply: False
        on_reply(ReplyEntry(0, Status.REFUSED, b"is busy"))
        return True

    other.intercept = refuse
    site.shards.welcomed(site.shard("1"), site.services["1"].facts())

    assert other.intercept is not refuse
    async with asyncio.timeout(ANSWER_SECONDS):
        while "new" not in site.services["2"].facts().queues:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


async def test_a_queue_is_deleted_while_one_shard_after_the_other_is_moved(site: Site) -> None:
    site.shared.settings = ServerSettings(admin_password_hash=hash_password("open"))
    moves = 5
    went: list[bool] = []

    def go_and_come_back(on_reply: Tell) -> bool:
        if len(went) == moves:
            return False
        went.append(True)
        on_reply(ReplyEntry(0, Status.REFUSED, b"is down"))
        return True

    on_call(site.shard("2"), Method.DELETE_QUEUE, go_and_come_back)
    await site.call(Method.DELETE_QUEUE, DeleteQueueRequest(QUEUE, "open"))

    assert site.services["2"].facts().queues == ()
    deletes = [c for c in site.shard("1").calls if is_method(c.message, Method.DELETE_QUEUE)]
    assert len(deletes) == moves + 1


@pytest.mark.site(shards=2, request_timeout_ms=500)
async def test_of_an_address_one_wrong_password_is_tried_a_second_and_named_in_the_log(
    site: Site, caplog
) -> None:
    site.shared.settings = ServerSettings(admin_password_hash=hash_password("open"))

    request = DeleteQueueRequest(QUEUE, "guess")
    guesses = [site.begin(Method.DELETE_QUEUE, request) for _ in range(9)]
    answers = [await asyncio.wait_for(guess.message, ANSWER_SECONDS) for guess in guesses]

    assert [codec.peek_error(answer) for answer in answers] == [
        ErrorCode.PASSWORD_INVALID,
        *[ErrorCode.UNKNOWN] * 8,
    ]
    assert caplog.text.count("the password is not the admin password") == 1
    assert "deleteQueue by 192.0.2.1:4711 ('web:h1'): queue='mail': failed" in caplog.text
    assert "guess" not in caplog.text


@pytest.mark.site(shards=2)
async def test_wrong_passwords_of_one_address_delay_no_other(
    site: Site, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine hashes for long.
    monkeypatch.setattr("pinlaterd.config.password._WRONG_PASSWORD_SECONDS", 5.0)
    site.shared.settings = ServerSettings(admin_password_hash=hash_password("open"))
    with pytest.raises(PasswordInvalid):
        await site.call(Method.DELETE_QUEUE, DeleteQueueRequest(QUEUE, "guess"))
    waiting = site.begin(Method.DELETE_QUEUE, DeleteQueueRequest(QUEUE, "guess"))

    other = Client()
    other.peer = "192.0.2.2:4711"
    request = DeleteQueueRequest(QUEUE, "open")
    site.handle(codec.encode_call(Method.DELETE_QUEUE, 7, CallContext("web:h1"), request), other)
    assert codec.peek_error(await asyncio.wait_for(other.message, ANSWER_SECONDS)) is None

    assert not waiting.message.done()
    assert "deleteQueue by 192.0.2.2:4711 ('web:h1'): queue='mail': done" in caplog.text
    assert "open" not in caplog.text
    await asyncio.wait_for(waiting.message, ANSWER_SECONDS)


@pytest.mark.site(shards=2)
async def test_who_deletes_or_retries_how_many_jobs_is_in_the_log(site: Site, caplog) -> None:
    site.shared.settings = ServerSettings(admin_password_hash=hash_password("open"))
    await site.enqueue_on("1", *[Job(b"x", attempts_allowed=1)] * 2)
    await site.enqueue_on("2", *[Job(b"x", attempts_allowed=1)] * 3)
    failed = [AckInfo(job.descriptor) for job in await site.dequeue(5)]
    await site.call(Method.ACK, AckRequest(QUEUE, [], failed))

    await site.call(Method.RETRY_FAILED, RetryFailedRequest(QUEUE, limit=4))
    await site.call(Method.DELETE_JOBS, DeleteJobsRequest(QUEUE, JobState.PENDING, limit=3))
    with pytest.raises(PinLaterError):
        await site.call(Method.RETRY_FAILED, RetryFailedRequest("no\u2028such\x1b[31mqueue"))
    await site.call(Method.DELETE_QUEUE, DeleteQueueRequest(QUEUE, "open"))

    who = "192.0.2.1:4711 ('web:h1')"
    retried, deleted, refused, dropped = [record.getMessage() for record in caplog.records]
    assert retried.startswith(f"retryFailedJobs by {who}: queue='mail', ")
    assert retried.endswith(", limit=4: 4 jobs")
    assert deleted.startswith(f"deleteJobs by {who}: queue='mail', state=PENDING, ")
    assert deleted.endswith(", limit=3: 3 jobs")
    assert refused.startswith(rf"retryFailedJobs by {who}: queue='no\u2028such\x1b[31mqueue', ")
    assert ": failed: " in refused
    assert refused.isprintable()
    assert dropped == f"deleteQueue by {who}: queue='mail': done"


def is_method(message: bytes, method: Method) -> bool:
    return codec.peek(message).method is method


@pytest.mark.site(shards=2)
async def test_a_queue_that_was_deleted_while_a_shard_was_away_is_known_no_more(site: Site) -> None:
    here, away = site.shard("1"), site.shard("2")
    for shard in (here, away):
        site.shards.counted(shard, [ReadyCounts("old", (0,))])
    site.shards.counted(here, [ReadyCounts("old", ())])
    assert site.deleted == []

    site.shards.welcomed(away, site.services["2"].facts())

    assert site.deleted == ["old"]
    assert not site.shards.knows_queue("old")


@pytest.mark.site(shards=2)
async def test_a_shard_that_joins_gets_the_queues_of_one_that_is_away_for_a_moment(
    site: Site,
) -> None:
    joining, away = site.shard("1"), site.shard("2")
    site.services["2"].create_queues(["new"])  # while the other one was restarted
    site.shards.counted(away, [ReadyCounts("new", (0,))])
    away.serves(serves=False)
    away.is_returning = True

    site.shards.welcomed(joining, site.services["1"].facts())

    async with asyncio.timeout(ANSWER_SECONDS):
        while "new" not in site.services["1"].facts().queues:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


def remove_on(site: Site, name: str, method: Method) -> None:
    """The shard is removed as soon as it has such a call."""

    def remove(_: Tell) -> bool:
        site.follow([other for other in site.shards.by_name if other != name])
        return False

    on_call(site.shard(name), method, remove)


@pytest.mark.site(shards=2)
async def test_a_shard_may_be_removed_while_jobs_are_deleted(site: Site) -> None:
    await site.enqueue_on("1", *[Job(b"x")] * 3)
    await site.enqueue_on("2", *[Job(b"x")] * 10)
    remove_on(site, "2", Method.DELETE_JOBS)

    delete = DeleteJobsRequest(QUEUE, JobState.PENDING, limit=10)
    assert await site.call(Method.DELETE_JOBS, delete) == 3 + 5


@pytest.mark.site(shards=2)
async def test_a_shard_may_be_removed_while_jobs_are_retried(site: Site) -> None:
    for name in ("1", "2"):
        await site.enqueue_on(name, *[Job(b"x", attempts_allowed=1)] * 3)
    failed = [AckInfo(job.descriptor) for job in await site.dequeue(6)]
    await site.call(Method.ACK, AckRequest(QUEUE, [], failed))
    remove_on(site, "2", Method.RETRY_FAILED)

    assert await site.call(Method.RETRY_FAILED, RetryFailedRequest(QUEUE)) == 3


@pytest.mark.site(shards=2, max_frame_bytes=100_000)
async def test_an_answer_of_several_shards_has_the_size_that_it_may_have(site: Site) -> None:
    found = [
        descriptor
        for name in ("1", "2")
        for descriptor in await site.enqueue_on(name, Job(b"x" * 60_000))
    ]
    assert len(await site.lookup(found[:1])) == 1

    with pytest.raises(InvalidRequest, match="more than 100000 bytes; look up fewer"):
        await site.lookup(found)


async def test_a_dequeue_whose_time_ran_out_names_the_shard_that_took_it(site: Site) -> None:
    """The others are asked after the deadline, and refuse: they are not to blame."""
    await site.enqueue_on("1", Job(b"x"))
    # The first call is the whole one, which is then divided.
    answer_with(ReplyEntry(0, Status.LATE), site.shard("1"), Method.DEQUEUE, [2], site.clock)
    with pytest.raises(ShardConnectionFailed, match="shard 1: did not answer in time") as caught:
        await site.dequeue(1, coverage=0.99)

    assert "shard 2, 3: got the call after its deadline" in caught.value.message


def go(shard: LocalShard) -> None:
    """Have a shard leave in order, as when it is moved or restarted."""
    shard.is_returning = True
    shard.serves(serves=False)


def go_when_asked(site: Site, most: int, *, lost: int = 0) -> list[str]:
    """Have the first `most` shards that get a part of a dequeue leave, the first `lost` of them by
    a crash. Return the list to which their names are added."""
    gone: list[str] = []

    def intercept(shard: LocalShard, call: ShardCall, tell: Tell) -> bool:
        if call.whole or len(gone) == most:
            return False
        gone.append(shard.name)
        go(shard)
        status = Status.LOST if len(gone) <= lost else Status.REFUSED
        asyncio.get_running_loop().call_soon(tell, ReplyEntry(0, status, b"is down"))
        return True

    for shard in site.locals():
        shard.intercept = partial(intercept, shard)
    return gone


@pytest.mark.parametrize("options", [{}, {"max_wait_ms": 60_000}, {"dry_run": True}])
@pytest.mark.parametrize("most", [2, 3])
@pytest.mark.site(shards=4)
async def test_a_dequeue_that_asked_only_shards_that_are_moved_asks_others(
    site: Site, options: Mapping[str, Any], most: int
) -> None:
    for shard in site.locals():
        await site.enqueue_on(shard.name, Job(b"x"))
    gone = go_when_asked(site, most)

    found = await site.dequeue(4, coverage=0.5, **options)

    assert len(gone) == most
    assert found
    assert not {shard_of(job.descriptor) for job in found} & set(gone)


async def begin_while_all_are_gone(site: Site, request: DequeueRequest) -> Client:
    """Begin a dequeue, which waits for the shards to come back."""
    for shard in site.locals():
        go(shard)
    taking = site.begin(Method.DEQUEUE, request)
    while not (any(shard.unsent for shard in site.locals()) or taking.message.done()):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)
    return taking


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("acks", [False, True])
@pytest.mark.parametrize("coverage", [1.0, 0.99])
async def test_while_all_shards_are_moved_a_dequeue_and_its_acks_wait(
    site: Site, shards: int, acks: bool, coverage: float
) -> None:
    site.follow([str(number) for number in range(1, shards + 1)])
    await site.enqueue_on("1", Job(b"a"), Job(b"b"))
    [first] = await site.dequeue(1)
    ack = AckRequest(QUEUE, [AckInfo(first.descriptor)]) if acks else None

    request = DequeueRequest(QUEUE, 9, ack, coverage=coverage)
    taking = await begin_while_all_are_gone(site, request)
    for shard in site.locals():
        shard.serves()

    assert await taking.bodies() == [b"b"]
    state = JobState.SUCCEEDED if acks else JobState.IN_PROGRESS
    assert await site.states([first.descriptor]) == [state]


async def swept_until(shard: LocalShard, condition: Callable[[], object]) -> None:
    async with asyncio.timeout(ANSWER_SECONDS):
        while not condition():
            shard.sweep()
            await asyncio.sleep(0)


@pytest.mark.parametrize("coverage", [1.0, 0.5])
@pytest.mark.site(shards=2)
async def test_what_one_shard_gives_does_not_wait_for_another_that_is_returning(
    site: Site, coverage: float
) -> None:
    for shard in site.locals():
        await site.enqueue_on(shard.name, Job(shard.name.encode()))
    request = DequeueRequest(QUEUE, 9, coverage=coverage)
    taking = await begin_while_all_are_gone(site, request)

    gone, back = sorted(site.locals(), key=lambda shard: not shard.unsent)
    gone.sweep()
    assert not taking.message.done()
    back.serves()
    await swept_until(gone, taking.message.done)

    assert await taking.bodies() == [back.name.encode()]


@pytest.mark.site(shards=2)
async def test_acks_of_a_dequeue_wait_for_their_shard_whatever_others_give(site: Site) -> None:
    await site.enqueue_on("1", Job(b"a"))
    await site.enqueue_on("2", Job(b"b"))
    held = await site.dequeue(2)
    await site.enqueue_on("1", Job(b"c"))
    request = DequeueRequest(QUEUE, 9, AckRequest(QUEUE, [AckInfo(job.descriptor) for job in held]))
    taking = await begin_while_all_are_gone(site, request)
    gone, back = site.shard("2"), site.shard("1")

    back.serves()
    await swept_until(gone, lambda: not back.calls_in_flight)
    assert gone.unsent
    assert not taking.message.done()
    gone.serves()

    assert await taking.bodies() == [b"c"]
    assert await site.states([job.descriptor for job in held]) == [JobState.SUCCEEDED] * 2


@pytest.mark.site(shards=4)
async def test_a_shard_that_failed_while_others_are_moved_is_named(site: Site) -> None:
    gone = go_when_asked(site, 2, lost=1)

    with pytest.raises(ShardConnectionFailed) as caught:
        await site.dequeue(4, coverage=0.5)

    assert caught.value.message.startswith(f"shard {gone[0]}: went away with the call in flight")


@pytest.mark.site(shards=2)
async def test_a_dequeue_fails_once_no_shard_is_expected_back(site: Site) -> None:
    taking = await begin_while_all_are_gone(site, DequeueRequest(QUEUE, 1))
    for shard in site.locals():
        shard.is_returning = False
        shard.serves(serves=False)

    with pytest.raises(ShardConnectionFailed, match="shard 1, 2: is down"):
        codec.decode_reply(Method.DEQUEUE, await asyncio.wait_for(taking.message, ANSWER_SECONDS))


@pytest.mark.parametrize(
    ("reply", "mark"),
    [
        (ReplyEntry(0, Status.REFUSED, b"is full"), EnqueuedInPart.NOT_STORED),
        (ReplyEntry(0, Status.LOST), EnqueuedInPart.MAY_BE_STORED),
    ],
)
@pytest.mark.site(shards=1)
async def test_of_an_enqueue_that_is_stored_in_part_it_is_told_which(
    site: Site, reply, mark
) -> None:
    # Three calls validate, then the first part is stored.
    answer_with(reply, site.shard("1"), Method.ENQUEUE, range(5, 99))
    with pytest.raises(EnqueuedInPart) as caught:
        await site.enqueue(*[Job(b"x")] * 2500)

    descriptors = caught.value.descriptors
    stored = [descriptor for descriptor in descriptors if descriptor not in ("", "?")]
    assert len(descriptors) == 2500
    assert 800 < len(stored) < 900
    assert descriptors.count(mark) == 2500 - len(stored)
    assert await site.states(stored) == [JobState.PENDING] * len(stored)
    assert f"{len(stored)} of the 2500 jobs are stored" in caught.value.message


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.site(shards=2)
async def test_no_shard_is_tried_with_a_long_list_that_names_others_too(
    site: Site, others: int
) -> None:
    descriptors = [f"{QUEUE}:s1:p1:{number}" for number in range(1, 2000)]
    await site.call(Method.LOOKUP, LookupRequest([*descriptors, *[f"{QUEUE}:s2:p1:1"] * others]))

    message = b"lookupJobs"
    calls = [c for shard in site.locals() for c in shard.calls if message in c.message]
    assert [call.whole for call in calls] == [not others] * (1 + others)


LONG_ACKS = AckRequest(QUEUE, (), [AckInfo(f"{QUEUE}:s1:p1:9", "m", i) for i in range(10_000)])
LONG_LISTS: dict[str, tuple[Method, Request]] = {
    "jobs": (Method.ENQUEUE, EnqueueRequest(QUEUE, [Job(b"x")] * 10_000)),
    "acks of both shards": (
        Method.ACK,
        AckRequest(
            QUEUE, (), [AckInfo(f"{QUEUE}:s{1 + i % 2}:p1:9", "m", i) for i in range(10_000)]
        ),
    ),
    "acks of one shard": (Method.ACK, LONG_ACKS),
}


@pytest.mark.parametrize("name", LONG_LISTS)
@pytest.mark.site(shards=2)
async def test_other_calls_come_in_between_the_parts_of_a_long_list(
    site: Site, monkeypatch, name
) -> None:
    """Router and shards share one loop here: between two of its turns each may read one part, and
    the router all that it reads beside the loop."""
    read: list[int] = []

    def count_elements(reader: str) -> None:
        read_elements = getattr(tuned, reader)

        def count(message: bytes, at: int, elements: int, *more: int) -> Any:
            if threading.current_thread() is threading.main_thread():
                read.append(elements)
            return read_elements(message, at, elements, *more)

        monkeypatch.setattr(tuned, reader, count)

    count_elements("read_jobs")
    count_elements("read_acks")
    calling = asyncio.ensure_future(site.call(*LONG_LISTS[name]))
    in_a_turn, in_flight = 0, 0
    while not calling.done():
        await asyncio.sleep(0)
        in_a_turn = max(in_a_turn, sum(read))
        in_flight = max(in_flight, *[shard.calls_in_flight for shard in site.locals()])
        read.clear()
    await calling

    assert 0 < in_a_turn <= 3_000
    assert in_flight == 1


@pytest.mark.site(shards=2)
async def test_a_long_list_of_acks_in_an_unusual_order_is_carried_out(site: Site) -> None:
    """Thrift lets a client write the failed ones first."""
    stored = await site.enqueue(*[Job(b"x", attempts_allowed=1)] * 3_000)
    assert len(await site.dequeue(3_000)) == 3_000
    acks = [AckInfo(descriptor) for descriptor in stored]
    succeeded, failed = acks[:1_500], acks[1_500:]
    message = codec.encode_call(
        Method.ACK, 7, CallContext("web:h1"), AckRequest(QUEUE, succeeded, failed)
    )
    first, second = [message.index(b"\x0f\x00" + number) for number in (b"\2", b"\3")]
    client = Client()

    swapped = message[second:-2] + message[first:second]
    site.handle(message[:first] + swapped + message[-2:], client)
    answer = await asyncio.wait_for(client.message, ANSWER_SECONDS)

    assert codec.decode_reply(Method.ACK, answer) is None
    states = await site.states(stored)
    assert states == [JobState.SUCCEEDED] * 1_500 + [JobState.FAILED] * 1_500


@pytest.mark.site(shards=2)
async def test_a_large_enqueue_in_an_unusual_layout_is_carried_out(site: Site) -> None:
    """A field that nobody knows, behind the jobs."""
    jobs = [Job(b"%d" % number) for number in range(2_500)]
    request = EnqueueRequest(QUEUE, jobs)
    message = codec.encode_call(Method.ENQUEUE, 7, CallContext("web:h1"), request)
    client = Client()

    site.handle(message[:-2] + b"\x03\x00\x77\x01" + message[-2:], client)
    answer = await asyncio.wait_for(client.message, ANSWER_SECONDS)

    stored = cast("Sequence[str]", codec.decode_reply(Method.ENQUEUE, answer))
    assert len(set(stored)) == len(jobs)
    assert await site.states(stored) == [JobState.PENDING] * len(jobs)


@pytest.mark.parametrize("change", [lambda m: m[:-9], lambda m: m + b"more"], ids=["short", "long"])
@pytest.mark.site(shards=2)
async def test_a_long_list_that_is_malformed_is_the_callers_to_mend(
    site: Site, caplog, change
) -> None:
    message = codec.encode_call(Method.ACK, 7, CallContext("w"), LONG_ACKS)
    client = Client()

    site.handle(change(message), client)
    answer = await asyncio.wait_for(client.message, ANSWER_SECONDS)

    with pytest.raises(InvalidRequest):
        codec.decode_reply(Method.ACK, answer)
    assert not caplog.records


@pytest.mark.site(shards=1)
async def test_an_enqueue_that_no_shard_can_look_at_first_is_not_begun(site: Site) -> None:
    # The second part that is to be looked at.
    answer_with(ReplyEntry(0, Status.REFUSED, b"is busy"), site.shard("1"), Method.ENQUEUE, [2])
    jobs = [Job(b"x")] * 2_499 + [Job(b"x", attempts_allowed=0)]

    with pytest.raises(Overloaded, match="is busy; nothing was stored"):
        await site.enqueue(*jobs)

    assert await site.dequeue(10) == []


@pytest.mark.site(shards=1)
async def test_an_empty_answer_at_the_deadline_proves_nothing(site: Site) -> None:
    await site.enqueue_on("1", Job(b"x"))
    # As one that had no time to look; then it refuses late calls.
    answer_with(ReplyEntry(0, Status.DONE), site.shard("1"), Method.DEQUEUE, [2], site.clock)
    with pytest.raises(ShardConnectionFailed):
        await site.dequeue(1, coverage=0.99)


@pytest.mark.site(shards=1)
async def test_once_the_time_of_an_enqueue_is_up_no_more_of_its_parts_are_stored(
    site: Site,
) -> None:
    # Three calls validate; of the second part that is stored nothing is heard in time.
    late = ReplyEntry(0, Status.LATE)
    asked = answer_with(late, site.shard("1"), Method.ENQUEUE, [5], site.clock)
    with pytest.raises(EnqueuedInPart, match="the time of the call was over") as caught:
        await site.enqueue(*[Job(b"x")] * 2500)

    assert len(asked) == 5
    assert caught.value.descriptors.count(EnqueuedInPart.MAY_BE_STORED) == 833
    assert caught.value.descriptors.count(EnqueuedInPart.NOT_STORED) == 833


@pytest.mark.site(shards=2)
async def test_a_call_that_has_retried_all_does_not_look_for_more(site: Site) -> None:
    """It would find those of its own jobs that have failed again by then."""
    for name in ("1", "2"):
        await site.enqueue_on(name, *[Job(b"poison", attempts_allowed=1)] * 5)
    acks = [AckInfo(job.descriptor) for job in await site.dequeue(10)]
    await site.call(Method.ACK, AckRequest(QUEUE, [], acks))

    assert await site.call(Method.RETRY_FAILED, RetryFailedRequest(QUEUE)) == 10

    for shard in site.locals():
        assert [call.op for call in shard.calls].count(Op.OLDEST_FAILED) == 1


@pytest.mark.site(shards=2)
async def test_thousands_of_jobs_are_retried_oldest_first_and_deleted_to_the_limit(
    site: Site,
) -> None:
    for _ in range(3):
        for name in ("1", "2"):
            await site.enqueue_on(name, *[Job(b"x", attempts_allowed=1)] * 1000)
    failed = [job.descriptor for _ in range(6) for job in await site.dequeue(1000)]
    for at in range(0, 6000, 1000):
        acks = [AckInfo(descriptor) for descriptor in failed[at : at + 1000]]
        await site.call(Method.ACK, AckRequest(QUEUE, [], acks))

    request = RetryFailedRequest(QUEUE, limit=5000)
    assert await site.call(Method.RETRY_FAILED, request) == 5000
    assert set(await site.states(failed[:3000])) == {JobState.PENDING}
    assert await site.call(Method.RETRY_FAILED, request) == 1000
    assert await site.call(Method.RETRY_FAILED, request) == 0

    delete = DeleteJobsRequest(QUEUE, JobState.PENDING, limit=3001)
    assert await site.call(Method.DELETE_JOBS, delete) == 3001
    assert await site.call(Method.DELETE_JOBS, delete) == 2999
    assert await site.call(Method.DELETE_JOBS, delete) == 0


@pytest.mark.site(shards=1)
@pytest.mark.parametrize(
    ("method", "request_"),
    [
        (Method.ENQUEUE, EnqueueRequest(QUEUE, [Job(bytes(1000))])),
        (Method.ENQUEUE, EnqueueRequest("no such queue", [Job(bytes(1000))])),
        (Method.ACK, AckRequest(QUEUE, [AckInfo(f"{QUEUE}:s1:p1:1")])),
        (Method.LOOKUP, LookupRequest([f"{QUEUE}:s9:p1:1"])),
    ],
    ids=["stored", "refused", "acked", "fanned out"],
)
async def test_an_answer_that_waits_for_earlier_ones_does_not_keep_its_request(
    site: Site, method, request_
) -> None:
    message, client = codec.encode_call(method, 7, CallContext("web:h1"), request_), Client()
    before = sys.getrefcount(message)

    site.handle(message, client)
    await asyncio.wait_for(client.message, ANSWER_SECONDS)
    await asyncio.sleep(0)
    site.shard("1").calls.clear()

    assert len(client.slots) == 1  # as in the line of its connection
    assert sys.getrefcount(message) == before


@pytest.mark.site(shards=1)
async def test_no_look_up_is_answered_before_the_shards_are_known(site: Site) -> None:
    """As in a router that began before the coordinator: "there is no such job" would be untrue."""
    site.follow([])

    with pytest.raises(NoHealthyShards):
        await site.call(Method.LOOKUP, LookupRequest([f"{QUEUE}:s1:p1:1"], include_body=False))


async def test_a_dry_run_in_an_unusual_layout_claims_nothing(site: Site) -> None:
    """Fields that nobody knows stand behind dryRun."""
    await site.enqueue_on("1", Job(b"a"))
    await site.enqueue_on("2", Job(b"b"))
    acks = AckRequest(QUEUE, [AckInfo(f"{QUEUE}:s1:p1:999")])
    request = DequeueRequest(QUEUE, 5, acks, dry_run=True)
    message = codec.encode_call(Method.DEQUEUE, 7, CallContext("web:h1"), request)
    client = Client()

    site.handle(message[:-2] + b"\x0b\x00\x77" + bytes([0, 0, 0, 30]) + bytes(32), client)

    assert sorted(await client.bodies()) == [b"a", b"b"]
    assert len(await site.dequeue(5)) == 2


@pytest.mark.site(shards=2)
async def test_a_call_for_every_shard_says_whether_it_had_begun_when_one_was_down(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pinlaterd.router.fan_out._RETRIED_AT_A_TIME", 2)
    await site.enqueue_on("1", *[Job(b"x", attempts_allowed=1)] * 4)
    failed = [AckInfo(job.descriptor) for job in await site.dequeue(4)]
    await site.call(Method.ACK, AckRequest(QUEUE, [], failed))
    asked: list[Tell] = []

    def see(on_reply: Tell) -> bool:
        asked.append(on_reply)
        if len(asked) == 2:  # after the look at its jobs: two are retried
            site.shard("2").serves(serves=False)
        return False

    on_call(site.shard("1"), Method.RETRY_FAILED, see)
    for done in ("a part of it may have been done", "nothing was done"):
        with pytest.raises(ShardConnectionFailed, match=f"needs every shard; {done}"):
            await site.call(Method.RETRY_FAILED, RetryFailedRequest(QUEUE, limit=4))

    assert len(await site.dequeue(4)) == 2


def keyed(number: int) -> Job:
    return Job(b"x", options=JobOptions(f"k{number}"))


async def test_a_job_with_a_key_is_stored_by_no_other_shard_than_its_own(site: Site) -> None:
    homes = {n: site.shards.homes.of(QueueKey(QUEUE, f"k{n}")).responsible for n in range(30)}
    mine, others = next(n for n in homes if homes[n] == "2"), [n for n in homes if homes[n] != "2"]
    site.shard("2").serves(serves=False)

    with pytest.raises(ShardConnectionFailed, match="shard 2: is down; nothing was done there"):
        await site.enqueue(keyed(mine))
    with pytest.raises(EnqueuedInPart) as in_part:
        await site.enqueue(*map(keyed, homes))
    found = await site.call(Method.ENQUEUE, EnqueueRequest(QUEUE, [keyed(n) for n in others]))

    stored = [descriptor for descriptor in in_part.value.descriptors if descriptor != "?"]
    assert found == EnqueueWithOptionsResult(stored, [True] * len(others))
    assert {shard_of(descriptor) for descriptor in stored} == {"1", "3"}


async def test_many_jobs_with_keys_are_divided_beside_the_event_loop(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide, threads = EnqueueByKey._by_responsible, set[threading.Thread]()

    def noted(enqueue: EnqueueByKey, homes: KeyHomes) -> dict[str, list[int]]:
        threads.add(threading.current_thread())
        return divide(enqueue, homes)

    monkeypatch.setattr(EnqueueByKey, "_by_responsible", noted)
    await site.enqueue(*map(keyed, range(2000)))

    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    "wrong",
    [
        Job(b"x", run_after_ms=-1),
        Job(b"x", options=JobOptions("k", expires_at_ms=-1)),
        Job(b"x", options=JobOptions("k", run_after_us=-1)),
        Job(b"x", options=JobOptions("k", expires_at_us=-1)),
        Job(b"x", options=JobOptions(key_of_all_queues=True)),
    ],
)
async def test_of_jobs_with_keys_none_is_stored_if_one_is_refused(site: Site, wrong: Job) -> None:
    with pytest.raises(EnqueueRejected, match=r"jobs\[30\]"):
        await site.enqueue(*map(keyed, range(30)), wrong, keyed(30))

    keys = [QueueKey(QUEUE, f"k{number}") for number in range(31)]
    assert await site.call(Method.LOOKUP, LookupRequest((), keys=keys)) == {}


async def test_a_shard_that_follows_another_placement_is_waited_for(site: Site) -> None:
    service = site.services[site.shards.homes.of(QueueKey(QUEUE, "k1")).responsible]
    service.follow_keys(site.placement.followed_by({"1": True}, 9))

    enqueued = asyncio.ensure_future(site.enqueue(keyed(1)))
    looked_up = asyncio.ensure_future(
        site.call(Method.LOOKUP, LookupRequest((), keys=[QueueKey(QUEUE, "k1")]))
    )
    await asyncio.sleep(0.1)
    assert not enqueued.done()
    service.follow_keys(site.placement)

    await enqueued
    assert looked_up.done() or await looked_up is not None
