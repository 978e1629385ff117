"""The layout of queues that we create: what is laid down, what a damaged or evicted hash costs, and
that queues of PinLater's layout stay as they are. Its behaviour is the conformance suite's."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest
import redis

from pinlaterd.engines.base import (
    Batch,
    Checkpoint,
    CheckpointOp,
    EnqueueOp,
    Release,
    ReleaseOp,
    Search,
    StorageEngine,
)
from pinlaterd.errors import StorageNotCommitted
from pinlaterd.model import Job, JobKey, JobState, Payload
from tests.clocks import FakeClock
from tests.conformance.engine.calls import STORAGE_CALLS
from tests.conformance.engine.harness import QUEUE, Ack, EngineHarness, ack_op, claim_op
from tests.servers.redis import RedisServer, redis_engine


@pytest.fixture
def lean(redis_server: RedisServer, shard: str, clock: FakeClock) -> Iterator[EngineHarness]:
    harness = EngineHarness(partial(redis_engine, redis_server.address, shard, lean=True), clock)
    harness.engine.create_queue(QUEUE, clock.now_ms())
    yield harness
    harness.engine.close()


def _keys(client: redis.Redis, shard: str) -> set[str]:
    return {key.decode() for key in client.scan_iter(f"pl?_{shard}*", count=10_000)}


def test_jobs_lie_in_few_keys_that_go_with_the_queue(
    lean: EngineHarness, stranger: redis.Redis, shard: str
):
    first, *_ = lean.enqueue(*[Job(b"x", custom_status="é")] * 50)
    lean.claim(limit=10)
    lean.fail(first)

    assert stranger.zrange(f"pls_{shard}", 0, -1) == [f"+{QUEUE}".encode()]
    hashes = {f"{kind}_{shard}_+{QUEUE}" for kind in ("plb", "plu")}
    sets = {f"plq_{shard}_+{QUEUE}.p1_s{state}" for state in (0, 1)} | {f"plx_{shard}_+{QUEUE}.p1"}
    others = {f"pls_{shard}", f"plj_{shard}_{QUEUE}", f"plm_{shard}", f"plo_{shard}"}
    assert _keys(stranger, shard) == hashes | sets | others

    lean.engine.delete_queue(QUEUE)
    assert _keys(stranger, shard) == others - {f"pls_{shard}"}


def test_a_job_that_is_deleted_leaves_nothing(
    lean: EngineHarness, stranger: redis.Redis, shard: str
):
    failed, succeeded, left = lean.enqueue(*[Job(b"x", attempts_allowed=1)] * 3)
    lean.claim(limit=2)
    lean.fail(failed)
    lean.succeed(succeeded)

    assert list(lean.engine.delete_found(QUEUE, JobState.FAILED, [failed])) == [failed]
    assert (
        lean.engine.collect_garbage(
            QUEUE, JobState.SUCCEEDED, updated_before_ms=lean.now_ms + 1, limit=9
        )
        == 1
    )

    assert stranger.hkeys(f"plb_{shard}_+{QUEUE}") == [str(left.local_id).encode()]
    assert not stranger.exists(f"plx_{shard}_+{QUEUE}.p1", f"plu_{shard}_+{QUEUE}")


def test_jobs_that_are_claimed_and_acked_together_are_one_run(
    lean: EngineHarness, stranger: redis.Redis, shard: str
):
    keys = lean.enqueue(*[b"x"] * 50)
    lean.claim(limit=50)
    running = f"plq_{shard}_+{QUEUE}.p1_s1"
    assert stranger.zcard(running) == 1

    lean.succeed(*keys[10:20])
    assert stranger.zcard(running) == 2
    lean.succeed(*reversed(keys[20:]), *keys[:10])

    assert not stranger.exists(running)
    assert stranger.zcard(f"plq_{shard}_+{QUEUE}.p1_s2") == 3
    assert lean.depths() == {(1, JobState.SUCCEEDED): 50}


def test_jobs_that_are_renewed_fail_or_are_refused_together_are_few_runs(
    lean: EngineHarness, stranger: redis.Redis, shard: str, clock: FakeClock
):
    keys = lean.enqueue(*[Job(b"x", attempts_allowed=1)] * 50)
    lean.claim(limit=50)
    clock.advance(1)
    strange = [
        CheckpointOp(QUEUE, "x", [Checkpoint(key, None, claim_descriptor="h:1:2:s:0")])
        for key in reversed(keys)
    ]
    before = stranger.zrange(f"plx_{shard}_+{QUEUE}.p1", 0, -1, withscores=True)
    results = lean.engine.apply(Batch(checkpoints=strange), lean.now_ms).checkpoints
    assert [result.done for result in results] == [0] * 50
    assert stranger.zrange(f"plx_{shard}_+{QUEUE}.p1", 0, -1, withscores=True) == before

    renewed = [Checkpoint(key, None) for key in [*keys[40:], *keys[39::-1], keys[7]]]
    assert lean.checkpoint(*renewed).done == 51
    assert stranger.zcard(f"plq_{shard}_+{QUEUE}.p1_s1") == 1
    assert {job.updated_at_ms for job in map(lean.job, keys)} == {lean.now_ms}

    lean.fail(*keys[10:])
    assert stranger.zcard(f"plq_{shard}_+{QUEUE}.p1_s3") == 1
    assert lean.depths() == {(1, JobState.IN_PROGRESS): 10, (1, JobState.FAILED): 40}


def test_a_batch_sees_what_it_did_to_a_job_before(lean: EngineHarness):
    claimed = lean.in_progress(*[b"x"] * 9)
    keys = [each.key for each in claimed]
    claims = [each.claim_descriptor for each in claimed]
    batch = Batch(
        acks=[ack_op(QUEUE, [keys[4], keys[8]], [keys[2]]), ack_op(QUEUE, [keys[2]], [keys[4]])],
        checkpoints=[
            CheckpointOp(
                QUEUE,
                "x",
                [
                    Checkpoint(keys[6], None, move_to_pending=True, claim_descriptor=claims[6]),
                    Checkpoint(keys[2], None, claim_descriptor=claims[2]),
                    Checkpoint(keys[4], None, claim_descriptor=claims[4]),
                    Checkpoint(keys[6], None, claim_descriptor=claims[6]),
                    Checkpoint(keys[1], None, claim_descriptor=claims[1]),
                ],
            )
        ],
        releases=[
            ReleaseOp(QUEUE, [Release(keys[at], claims[at]) for at in (8, 7, 6, 1, 1)]),
        ],
    )

    result = lean.engine.apply(batch, lean.now_ms)

    assert [(ack.succeeded, ack.failed, ack.noop) for ack in result.acks] == [(2, 1, 0), (0, 0, 2)]
    [checkpoints] = result.checkpoints
    assert (checkpoints.done, checkpoints.noop) == (2, 3)
    assert [each.key.local_id for each in checkpoints.requeued] == [keys[6].local_id]
    assert [each.key.local_id for each in result.releases[0]] == [
        keys[at].local_id for at in (7, 1)
    ]
    expected = [JobState.IN_PROGRESS] * 9
    expected[1] = expected[2] = expected[6] = expected[7] = JobState.PENDING
    expected[4] = expected[8] = JobState.SUCCEEDED
    assert lean.states(keys) == expected


def test_a_job_that_a_hand_made_pending_is_in_one_state_once_it_is_claimed(
    lean: EngineHarness, stranger: redis.Redis, shard: str
):
    keys = lean.enqueue(*[b"x"] * 5)
    lean.claim()
    score = 32 * lean.now_ms + len(str(keys[2].local_id))
    stranger.zadd(f"plq_{shard}_+{QUEUE}.p1_s0", {str(keys[2].local_id): score})

    assert [claimed.key for claimed in lean.claim()] == [keys[2]]
    assert lean.depths() == {(1, JobState.IN_PROGRESS): 5}
    assert lean.succeed(keys[2]).succeeded == 1
    assert lean.succeed(keys[2]).noop == 1


def test_a_job_that_a_hand_took_from_the_midst_of_a_claim_is_not_claimed(
    lean: EngineHarness, stranger: redis.Redis, shard: str
):
    keys = lean.enqueue(*[b"x"] * 6)
    wanted = [claim._replace(payload=Payload(b"x", 2, 2)) for claim in lean.wanted(limit=5)]
    stranger.zrem(f"plq_{shard}_+{QUEUE}.p1_s0", str(keys[2].local_id))

    [claimed] = lean.engine.apply(Batch(claims=[claim_op(QUEUE, wanted)]), lean.now_ms).claims

    assert [payload is None for payload in claimed] == [False, False, True, False, False]
    assert lean.states([keys[2], keys[5]]) == [None, JobState.PENDING]


def test_a_slice_takes_a_part_of_a_run(lean: EngineHarness, clock: FakeClock):
    keys = lean.enqueue(*[b"x"] * 10)
    lean.claim()
    clock.advance(1)
    times = {"claimed_before_ms": lean.now_ms, "now_ms": lean.now_ms}

    assert len(lean.engine.release_expired(QUEUE, limit=3, **times).retried) == 3
    lean.succeed(*keys[3:])
    before_ms = lean.now_ms + 1
    state = JobState.SUCCEEDED
    assert lean.engine.collect_garbage(QUEUE, state, updated_before_ms=before_ms, limit=4) == 4
    assert lean.depths() == {(1, JobState.PENDING): 3, (1, JobState.SUCCEEDED): 3}


def test_a_batch_of_jobs_that_make_no_runs(lean: EngineHarness):
    keys = lean.enqueue(*[b"x"] * 5000)
    wanted = [
        claim._replace(claim_descriptor=f"odd {at}:0")
        for at, claim in enumerate(lean.wanted(limit=5000))
    ]
    payloads = lean.engine.apply(Batch(claims=[claim_op(QUEUE, wanted)]), lean.now_ms).claims
    assert None not in payloads[0]

    more = lean.enqueue(*[b"x"] * 4000)
    again = [
        claim._replace(claim_descriptor=f"odd {at}:0")
        for at, claim in enumerate(lean.wanted(limit=4000))
    ]
    batch = Batch(
        acks=[ack_op(QUEUE, keys[:500:2], keys[1:500:2])], claims=[claim_op(QUEUE, again)]
    )
    [acked], [claimed] = lean.engine.apply(batch, lean.now_ms)[0::4]

    assert (acked.succeeded, acked.failed, None in claimed) == (250, 250, False)
    assert lean.job(more[7]).claim_descriptor == "odd 7:0"


def test_layouts_do_the_same(
    lean: EngineHarness,
    redis_server: RedisServer,
    stranger: redis.Redis,
    shard: str,
    clock: FakeClock,
):
    """Random batches, in both: runs are split, joined and taken apart in many ways."""
    plain = EngineHarness(partial(redis_engine, redis_server.address, f"{shard}plain"), clock)
    plain.engine.create_queue(QUEUE, clock.now_ms())
    stranger.copy(f"plj_{shard}_{QUEUE}", f"plj_{shard}plain_{QUEUE}", replace=True)
    rng = random.Random(7)
    claims: dict[JobKey, str] = {}
    keys: list[JobKey] = []
    counter = 0
    for _ in range(100):
        clock.advance(rng.choice((0, 0.001, 0.05)))
        both = [lean, plain]
        wanted = [
            store.wanted(limit=rng_limit) for rng_limit in [rng.randrange(30)] for store in both
        ]
        assert wanted[0] == wanted[1]
        source = rng.choice(("a", "b", "odd: 07"))
        renamed = [
            claim._replace(claim_descriptor=f"h:1:2:{source}:{counter + at}")
            for at, claim in enumerate(wanted[0])
        ]
        counter += len(renamed) + rng.choice((0, 0, 1))
        held = sorted(rng.sample(sorted(claims), rng.randrange(len(claims) + 1)))
        strangers = rng.sample(keys, min(len(keys), 2))
        acked = [
            Ack(
                key,
                rng.choice(("", "", "", "text")),
                claim_descriptor=rng.choice((None, claims.get(key), "h:1:2:a:0")),
            )
            for key in [*held, *strangers]
            if rng.random() < 0.7
        ]
        rng.shuffle(acked)
        at = rng.randrange(len(acked) + 1)
        batch = Batch(
            acks=[
                ack_op(QUEUE, acked[at + 1 :: 2], acked[:at]),
                ack_op(QUEUE, acked[at::2], ()),
            ],
            checkpoints=[
                CheckpointOp(
                    QUEUE,
                    source,
                    [
                        Checkpoint(key, None, move_to_pending=rng.random() < 0.3)
                        for key in rng.sample(held, len(held) // 4)
                    ],
                )
            ],
            releases=[
                ReleaseOp(
                    QUEUE, [Release(key, claims[key]) for key in rng.sample(held, len(held) // 5)]
                )
            ],
            enqueues=[EnqueueOp(QUEUE, [Job(b"x", attempts_allowed=2)] * rng.randrange(40))],
            claims=[claim_op(QUEUE, renamed)],
        )
        results = [store.engine.apply(batch, clock.now_ms()) for store in both]
        assert results[0] == results[1]
        keys += [JobKey(1, number) for ids in results[0].enqueues for number in ids]
        slices = [
            (
                store.engine.release_expired(
                    QUEUE, claimed_before_ms=store.now_ms - 100, limit=7, now_ms=store.now_ms
                ),
                store.engine.collect_garbage(
                    QUEUE, JobState.SUCCEEDED, updated_before_ms=store.now_ms - 200, limit=11
                ),
                store.engine.retry_failed(
                    QUEUE, 1, attempts=1, run_after_ms=store.now_ms, limit=3, now_ms=store.now_ms
                ),
            )
            for store in both
        ]
        assert slices[0] == slices[1]
        found = [store.engine.lookup(QUEUE, keys, include_body=True) for store in both]
        assert found[0] == found[1]
        assert lean.depths() == plain.depths() == Counter((1, job.state) for job in found[0])
        claims = {
            job.key: job.claim_descriptor or ""
            for job in found[0]
            if job.state is JobState.IN_PROGRESS
        }
    searchers = [store.engine.searcher()() for store in both]
    for state in JobState:
        search = Search(QUEUE, state, limit=10**6, future=False, now_ms=clock.now_ms())
        scans = [searcher.scan(search) for searcher in searchers]
        assert len(scans[0]) == lean.depths().get((1, state), 0)
        assert scans[0] == scans[1]
    for searcher in searchers:
        searcher.close()
    assert not lean.engine.check(repair=False)
    plain.engine.close()


def test_queues_of_both_layouts_are_served_side_by_side_whatever_is_created(
    lean: EngineHarness, redis_server: RedisServer, shard: str
):
    [ours] = lean.enqueue(b"lean")
    lean.engine.close()
    plain: StorageEngine = redis_engine(redis_server.address, shard, lean=False)
    plain.open(lean.now_ms)
    plain.create_queue("plain", lean.now_ms)
    plain.create_queue(QUEUE, lean.now_ms)  # there is one
    assert plain.lookup(QUEUE, [ours], include_body=True)[0].body == b"lean"
    plain.close()

    lean.engine.open(lean.now_ms)
    assert lean.engine.queues() == {QUEUE, "plain"}
    [other] = lean.enqueue(b"plain", queue="plain")
    batch = Batch(
        claims=[claim_op(QUEUE, lean.wanted()), claim_op("plain", lean.wanted(queue="plain"))]
    )
    claimed = lean.engine.apply(batch, lean.now_ms).claims

    assert claimed == [[(b"lean", 2, 2)], [(b"plain", 2, 2)]]
    assert other.local_id != ours.local_id


def test_no_id_is_given_twice_where_the_layout_changes(
    lean: EngineHarness, redis_server: RedisServer, shard: str
):
    before = lean.enqueue(*[b"x"] * 10)
    lean.engine.delete_queue(QUEUE)
    lean.engine.close()
    plain = redis_engine(redis_server.address, shard, lean=False)
    plain.open(lean.now_ms)
    plain.create_queue(QUEUE, lean.now_ms)
    plain.close()

    lean.engine.open(lean.now_ms)

    assert not {*lean.enqueue(b"y")} & {*before}


def test_a_queue_that_another_writer_created_as_well_is_deleted_with_ours(
    lean: EngineHarness, stranger: redis.Redis, shard: str
):
    stranger.zadd(f"pln_{shard}", {QUEUE: 1})
    lean.engine.close()
    lean.engine.open(lean.now_ms)

    lean.engine.delete_queue(QUEUE)
    lean.engine.close()
    lean.engine.open(lean.now_ms)

    assert QUEUE not in lean.engine.queues()


# --- evicted and damaged ------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [None, Payload(b"a", 2, 2)])
def test_jobs_that_were_evicted_are_not_claimed(
    lean: EngineHarness, stranger: redis.Redis, shard: str, payload: Payload | None
):
    lean.enqueue(b"a", b"b")
    wanted = [claim._replace(payload=payload) for claim in lean.wanted()]
    stranger.delete(f"plb_{shard}_+{QUEUE}")

    [payloads] = lean.engine.apply(Batch(claims=[claim_op(QUEUE, wanted)]), lean.now_ms).claims

    assert list(payloads) == [None, None]
    assert lean.depths() == {}


def test_their_acks_checkpoints_and_releases_are_no_ops(
    lean: EngineHarness, stranger: redis.Redis, shard: str
):
    first, second, third = (one.key for one in lean.in_progress(*[b"x"] * 3))
    stranger.delete(f"plb_{shard}_+{QUEUE}")

    assert lean.succeed(first).noop == 1
    assert lean.fail(second).noop == 1
    assert lean.checkpoint(Checkpoint(third, None, b"new")).noop == 1
    assert lean.depths() == {}


@pytest.mark.parametrize("kind", ["plb", "plx", "plu"])
def test_what_is_something_else_is_told_of_and_nothing_is_written(
    lean: EngineHarness, stranger: redis.Redis, shard: str, kind: str
):
    [running] = lean.in_progress(b"x")
    lean.enqueue(b"y")
    before = lean.depths()
    claims = [claim._replace(payload=Payload(b"y", 2, 2)) for claim in lean.wanted()]
    name = f"{kind}_{shard}_+{QUEUE}" + (".p1" if kind == "plx" else "")
    stranger.delete(name)
    stranger.set(name, "no such thing")

    needing = {
        "plb": Batch(enqueues=[EnqueueOp(QUEUE, [Job(b"z")])]),
        "plx": Batch(claims=[claim_op(QUEUE, claims)]),
        "plu": Batch(acks=[ack_op(QUEUE, (), [running.key])]),
    }
    with pytest.raises(StorageNotCommitted, match="holds string, expected"):
        lean.engine.apply(needing[kind], lean.now_ms)
    lean.states([running.key])
    with contextlib.suppress(StorageNotCommitted):
        lean.claim()
    assert lean.depths() == before
    for call in sorted(STORAGE_CALLS, key=lambda name: name == "delete_queue"):  # that is last
        with contextlib.suppress(StorageNotCommitted):
            STORAGE_CALLS[call](lean.engine)
    lean.engine.heartbeat()  # and not: must be opened again
    lean.engine.create_queue(QUEUE, lean.now_ms)
    assert lean.states(lean.enqueue(b"z")) == [JobState.PENDING]


@pytest.mark.parametrize("state", [JobState.IN_PROGRESS, JobState.SUCCEEDED])
def test_runs_that_were_evicted_leave_nothing_behind(
    lean: EngineHarness, stranger: redis.Redis, shard: str, state: JobState
):
    keys = [one.key for one in lean.in_progress(*[b"x"] * 5)]
    if state is JobState.SUCCEEDED:
        lean.succeed(*keys)
    stranger.delete(f"plx_{shard}_+{QUEUE}.p1")

    assert lean.states(keys) == [None] * 5
    if state is JobState.IN_PROGRESS:
        assert lean.succeed(keys[0]).noop == 1
        lean.engine.release_expired(
            QUEUE, claimed_before_ms=lean.now_ms + 1, limit=9, now_ms=lean.now_ms
        )
    lean.engine.check(repair=True)
    assert lean.depths() == {}


@pytest.mark.parametrize(
    "member",
    ["", "x", "1 2 1 5 6 h:", "1 1 9000 5 6 h:", "4 1 2 5 6 h:", "1 a 2 5 6 h:"],
)
def test_a_member_that_is_no_run_is_passed_over(
    lean: EngineHarness, stranger: redis.Redis, shard: str, member: str
):
    keys = [one.key for one in lean.in_progress(*[b"x"] * 5)]
    runs = f"plx_{shard}_+{QUEUE}.p1"
    stranger.zadd(runs, {member: 10.0, f"{member}{member}": keys[2].local_id})

    assert lean.succeed(JobKey(1, 1), *keys[:2]).noop == 1
    assert lean.succeed(*keys[2:]).succeeded == 3
    assert lean.states([JobKey(1, 1), *keys]) == [None, *[JobState.SUCCEEDED] * 5]
    assert len(stranger.zrange(runs, 0, -1)) <= 4


def test_an_ack_with_a_text_of_a_job_that_a_hand_removed_is_a_no_op(
    lean: EngineHarness, stranger: redis.Redis, shard: str
):
    first, second = (one.key for one in lean.in_progress(b"x", b"y"))
    stranger.hdel(f"plb_{shard}_+{QUEUE}", str(first.local_id))

    assert lean.succeed(Ack(first, "done")).noop == 1
    assert lean.succeed(Ack(second, "done")).succeeded == 1


@pytest.mark.parametrize("update", [None, "", "no"])
@pytest.mark.parametrize("record", ["", "no head", "no numbers here;x", "1 1 9999999999999999 0;x"])
def test_a_record_that_is_damaged_counts_as_one_without_numbers(
    lean: EngineHarness, stranger: redis.Redis, shard: str, record: str, update: str | None
):
    [key] = lean.enqueue(b"x")
    stranger.hset(f"plb_{shard}_+{QUEUE}", str(key.local_id), record)
    if update is not None:
        stranger.hset(f"plu_{shard}_+{QUEUE}", str(key.local_id), update)

    [claimed] = lean.claim()
    assert lean.job(key).attempts_allowed == 1
    assert lean.checkpoint(Checkpoint(key, None, b"new")).done == 1
    assert lean.fail(key).failed == 1

    assert claimed.key == key
    assert lean.states([key]) == [JobState.FAILED]


def test_a_checkpoint_replaces_the_body_and_keeps_the_rest(lean: EngineHarness):
    [claimed] = lean.in_progress(Job(b"old", attempts_allowed=3, custom_status="é;1"))
    before = lean.job(claimed.key)

    assert lean.checkpoint(Checkpoint(claimed.key, None, b"1 2 3;new")).done == 1

    after = lean.job(claimed.key)
    assert after == before._replace(
        body=b"1 2 3;new", run_after_ms=lean.now_ms, updated_at_ms=lean.now_ms
    )
    assert JobKey(1, claimed.key.local_id) == after.key
