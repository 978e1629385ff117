"""Keys that PinLater made: its jobs are served, finished and looked up as they stand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import redis

from pinlaterd.engines.base import Checkpoint, Requeued, Search, StoredJob
from pinlaterd.model import JobKey, JobState, PendingKey
from tests.clocks import FakeClock
from tests.conformance.engine.engines import EngineMaker
from tests.conformance.engine.harness import QUEUE, EngineHarness
from tests.servers.pinlater import Dequeued, PinLaterOnRedis
from tests.servers.redis import RedisServer, redis_engine

NOW_MS = 1_700_000_000_000
CLAIM = "pinlater-host:9010:1421450000123:web:host:7"
LAST_ID = 20


class PinLater:
    """Lays down what PinLater writes: times as decimal seconds, no run-after in the hash."""

    def __init__(self, client: redis.Redis, shard: str) -> None:
        self.client = client
        self.shard = shard
        client.zadd(f"pln_{shard}", {QUEUE: 1_421_450_000.5})
        client.set(f"plj_{shard}_{QUEUE}", LAST_ID)

    def put(
        self,
        local_id: int,
        state: JobState,
        score: float,
        *,
        priority: int = 1,
        body: bytes = b"body",
        status: str = "",
        remaining: int = 3,
    ) -> JobKey:
        fields: dict[str, bytes | str | int | float] = {
            "bd": body,
            "cs": status,
            "ca": 1_421_450_000.123,
            "ua": score if state is not JobState.PENDING else 1_421_450_000.123,
            "al": 3,
            "ar": remaining,
        }
        if state is not JobState.PENDING:
            fields["cd"] = CLAIM
        self.client.hset(self.job(local_id), mapping=fields)  # type: ignore[arg-type]
        self.client.zadd(
            f"plq_{self.shard}_{QUEUE}.p{priority}_s{int(state)}", {str(local_id): score}
        )
        return JobKey(priority, local_id)

    def job(self, local_id: int) -> str:
        return f"plh_{self.shard}_{QUEUE}.{local_id}"


@pytest.fixture
def pinlater(stranger: redis.Redis, shard: str) -> PinLater:
    return PinLater(stranger, shard)


@pytest.fixture
def serve(make: EngineMaker, clock: FakeClock, pinlater: PinLater) -> Iterator[EngineHarness]:
    """The harness is opened by the first use, when the keys are there."""
    harness = EngineHarness(make, clock)
    yield harness
    harness.engine.close()


def test_its_queues_are_taken_over_and_its_ids_never_given_again(serve: EngineHarness):
    assert serve.engine.queues() == {QUEUE}
    assert min(serve.enqueue(b"new", b"newer")) > JobKey(1, LAST_ID)


def test_jobs_of_all_states_are_looked_up_by_their_old_descriptors(
    serve: EngineHarness, pinlater: PinLater
):
    created_ms = 1_421_450_000_123
    pending = pinlater.put(3, JobState.PENDING, 1_421_450_009.877, priority=2, body=b"\xff\0")
    running = pinlater.put(4, JobState.IN_PROGRESS, 1_421_450_010.001, status="é")
    succeeded = pinlater.put(5, JobState.SUCCEEDED, 1_421_450_011.5)
    failed = pinlater.put(6, JobState.FAILED, 1_421_450_012.25, remaining=0)

    found = [serve.job(key) for key in (pending, running, succeeded, failed)]

    assert found == [
        StoredJob(
            *(pending, JobState.PENDING, 3, 3, "", created_ms),
            *(1_421_450_009_877, created_ms, None, b"\xff\0"),
        ),
        StoredJob(
            *(running, JobState.IN_PROGRESS, 3, 3, "é", created_ms),
            *(1_421_450_010_001, 1_421_450_010_001, CLAIM, b"body"),
        ),
        StoredJob(
            *(succeeded, JobState.SUCCEEDED, 3, 3, "", created_ms),
            *(1_421_450_011_500, 1_421_450_011_500, CLAIM, b"body"),
        ),
        StoredJob(
            *(failed, JobState.FAILED, 3, 0, "", created_ms),
            *(1_421_450_012_250, 1_421_450_012_250, CLAIM, b"body"),
        ),
    ]
    assert serve.depths() == {
        (2, JobState.PENDING): 1,
        (1, JobState.IN_PROGRESS): 1,
        (1, JobState.SUCCEEDED): 1,
        (1, JobState.FAILED): 1,
    }


def test_a_pending_job_is_claimed_and_finished(serve: EngineHarness, pinlater: PinLater):
    key = pinlater.put(7, JobState.PENDING, 1_421_450_009.877, body=b"work")

    [claimed] = serve.claim()
    running = serve.job(key)
    result = serve.succeed(key)

    assert claimed.payload == (b"work", 3, 3)
    assert running.run_after_ms == 1_421_450_009_877
    assert (result.succeeded, result.noop) == (1, 0)
    done = serve.job(key)
    assert (done.state, done.run_after_ms) == (JobState.SUCCEEDED, 1_421_450_009_877)
    assert done.updated_at_ms == serve.now_ms


def test_a_running_job_is_finished_by_the_worker_that_had_it(
    serve: EngineHarness, pinlater: PinLater
):
    first, second, third = (
        pinlater.put(local_id, JobState.IN_PROGRESS, 1_699_999_999.5) for local_id in (1, 2, 3)
    )

    assert serve.succeed(first).succeeded == 1
    assert serve.fail(second).requeued == [Requeued(1, PendingKey(serve.now_ms, 2))]
    assert serve.checkpoint(Checkpoint(third, None), source="web").noop == 1
    assert serve.checkpoint(Checkpoint(third, None, b"more"), source="web:host").done == 1
    assert serve.states([first, second, third]) == [
        JobState.SUCCEEDED,
        JobState.PENDING,
        JobState.IN_PROGRESS,
    ]
    assert serve.job(third).body == b"more"


def test_a_running_job_times_out_and_a_failed_one_is_retried(
    serve: EngineHarness, pinlater: PinLater
):
    running = pinlater.put(1, JobState.IN_PROGRESS, 1_421_450_000.25)
    failed = pinlater.put(2, JobState.FAILED, 1_421_450_000.75, remaining=0)
    garbage = pinlater.put(3, JobState.SUCCEEDED, 1_421_450_000.75)

    expired = serve.engine.release_expired(
        QUEUE, claimed_before_ms=serve.now_ms - 600_000, limit=10, now_ms=serve.now_ms
    )
    retried = serve.engine.retry_failed(
        QUEUE, 1, attempts=5, run_after_ms=serve.now_ms, limit=10, now_ms=serve.now_ms
    )
    collected = serve.engine.collect_garbage(
        QUEUE, JobState.SUCCEEDED, updated_before_ms=serve.now_ms, limit=10
    )

    assert expired == ([Requeued(1, PendingKey(serve.now_ms, 1))], 0)
    assert retried == [Requeued(1, PendingKey(serve.now_ms, 2))]
    assert collected == 1
    assert serve.ready() == [running, failed]
    assert serve.states([garbage]) == [None]


def test_searches_find_its_jobs(serve: EngineHarness, pinlater: PinLater):
    for local_id in range(1, 8):
        pinlater.put(local_id, JobState.SUCCEEDED, 1_421_450_000 + local_id / 7)
    pinlater.put(8, JobState.PENDING, 1_421_450_000.5, body=b"needle")
    searcher = serve.engine.searcher()()

    succeeded = searcher.scan(
        Search(QUEUE, JobState.SUCCEEDED, limit=10, future=False, now_ms=serve.now_ms)
    )
    found = searcher.find(Search(QUEUE, JobState.PENDING, limit=5, body_regex="need"))

    assert [job.key.local_id for job in succeeded] == [7, 6, 5, 4, 3, 2, 1]
    assert list(found) == [JobKey(1, 8)]
    searcher.close()


@pytest.mark.parametrize("before", ["ours", "lean, deleted"])
def test_pinlaters_own_scripts_go_on_with_the_ids_of_a_queue_that_we_had(
    make: EngineMaker, clock: FakeClock, stranger: redis.Redis, shard: str,
    redis_server: RedisServer, before: str,
):  # fmt: skip
    if before != "ours":
        lean = EngineHarness(partial(redis_engine, redis_server.address, shard, lean=True), clock)
        lean.engine.create_queue(QUEUE, clock.now_ms())
        [ended] = lean.enqueue(b"x")
        lean.engine.delete_queue(QUEUE)
        lean.engine.close()
    store = EngineHarness(make, clock)
    store.engine.create_queue(QUEUE, clock.now_ms())
    [ours] = store.enqueue(b"ours")
    store.engine.close()
    theirs = PinLaterOnRedis(stranger, shard)

    descriptors = [f"{QUEUE}:s{shard}:p1:{ours.local_id}", theirs.enqueue(QUEUE, b"theirs")]
    claimed = theirs.dequeue(QUEUE, limit=9)
    theirs.fail(descriptors[1])

    bodies = (b"ours", 2, 2), (b"theirs", 3, 3)
    assert claimed == dict(zip(descriptors, [Dequeued(*one) for one in bodies], strict=True))
    store.reopen()
    key = ours._replace(local_id=ours.local_id + 1)
    job = store.job(key)
    assert (job.state, job.body, job.attempts_remaining) == (JobState.PENDING, b"theirs", 2)
    [newest] = store.enqueue(b"newest")
    assert newest.local_id > key.local_id
    if before != "ours":
        store.engine.delete_queue(QUEUE)
        store.engine.close()
        lean.reopen()
        lean.engine.create_queue(QUEUE, clock.now_ms())
        assert lean.enqueue(b"x")[0].local_id > ended.local_id
        lean.engine.close()
    else:
        store.engine.close()


def _read_in_pages(store: EngineHarness, limit: int) -> list[PendingKey]:
    read: list[PendingKey] = []
    while page := store.engine.read_pending(
        QUEUE, 1, after=read[-1] if read else None, until_ms=store.now_ms, limit=limit
    ):
        assert len(page) <= limit
        read += page
    return read


def test_whatever_the_numbers_and_times_any_page_is_in_order(
    serve: EngineHarness, stranger: redis.Redis, shard: str
):
    chance = random.Random(4711)
    key = f"plq_{shard}_{QUEUE}.p1_s0"
    for _ in range(60):
        # microseconds, as PinLater's clients may give them, in few milliseconds
        begin = chance.choice([0, 1_421_450_000_000_000, 4_102_444_800_000_000])
        jobs = {
            chance.randrange(1, 10 ** chance.randrange(1, 7)): begin + chance.randrange(4_000)
            for _ in range(chance.randrange(1, 80))
        }
        stranger.delete(key)
        stranger.zadd(key, {str(local_id): at / 1_000_000 for local_id, at in jobs.items()})

        read: list[PendingKey] = []
        until_ms = 2**53
        while page := serve.engine.read_pending(
            *(QUEUE, 1),
            after=read[-1] if read else None,
            until_ms=until_ms,
            limit=chance.randrange(1, 30),
        ):
            read += page

        whole_ms = {local_id: (at + 500) // 1_000 for local_id, at in jobs.items()}
        assert read == sorted(PendingKey(ms, local_id) for local_id, ms in whole_ms.items())


def test_its_jobs_and_ours_stand_in_one_order(serve: EngineHarness, pinlater: PinLater):
    ours = serve.enqueue(*[b"x"] * 90)
    first, last = ours[0].local_id, ours[-1].local_id
    for local_id in (3, 15, first - 10, 10 * last):
        pinlater.put(local_id, JobState.PENDING, serve.now_ms / 1000)

    read = _read_in_pages(serve, limit=8)

    ids = [3, 15, first - 10, *[key.local_id for key in ours], 10 * last]
    assert read == [PendingKey(serve.now_ms, local_id) for local_id in ids]


def test_more_jobs_of_one_millisecond_than_are_put_in_order_at_once(
    serve: EngineHarness, pinlater: PinLater, stranger: redis.Redis, shard: str
):
    ids = range(1, 12_001)
    stranger.zadd(
        f"plq_{shard}_{QUEUE}.p1_s0", {str(local_id): 1_421_450_000.5 for local_id in ids}
    )

    first = serve.engine.read_pending(QUEUE, 1, after=None, until_ms=serve.now_ms, limit=500)
    after = PendingKey(1_421_450_000_500, 9_998)
    later = serve.engine.read_pending(QUEUE, 1, after=after, until_ms=serve.now_ms, limit=4)

    assert [key.local_id for key in first] == list(range(1, 501))
    assert [key.local_id for key in later] == [9_999, 10_000, 10_001, 10_002]


def test_far_times_and_what_is_no_job_at_all_break_no_read(
    serve: EngineHarness, pinlater: PinLater, stranger: redis.Redis, shard: str
):
    never = [253_402_300_799.0, 1e13, 1e15]
    for local_id, seconds in enumerate(never, 1):
        pinlater.put(local_id, JobState.PENDING, seconds)
    junk: dict[str, float] = {"": 1.5, "nine": 1.5, "007": 1.5, "9" * 20: 1.5, "1.5": 1e14}
    stranger.zadd(f"plq_{shard}_{QUEUE}.p1_s0", junk)

    for limit in (1, 2, 100):
        read: list[PendingKey] = []
        while page := serve.engine.read_pending(
            QUEUE, 1, after=read[-1] if read else None, until_ms=2**62, limit=limit
        ):
            read += page
        assert read == [PendingKey(round(at * 1000), i) for i, at in enumerate(never, 1)]


def test_fields_that_are_missing_break_nothing(
    serve: EngineHarness, stranger: redis.Redis, shard: str
):
    stranger.hset(f"plh_{shard}_{QUEUE}.9", "cs", b"\xff no text")
    stranger.zadd(f"plq_{shard}_{QUEUE}.p1_s0", {"9": 1_421_450_000.5})

    [claimed] = serve.claim()

    assert claimed.payload == (b"", 1, 1)
    assert serve.job(claimed.key).custom_status == "\ufffd no text"
    assert serve.fail(claimed.key).failed == 1
    assert serve.states([claimed.key]) == [JobState.FAILED]
