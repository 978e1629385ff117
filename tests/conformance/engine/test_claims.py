"""Claims and their release."""

from __future__ import annotations

import pytest

from pinlaterd.engines.base import Batch, Checkpoint, ClaimOp, ClaimRoom, EnqueueOp, Release
from pinlaterd.model import Job, JobKey, JobState, Payload, PendingKey
from tests.conformance.engine.harness import Ack, Claim, EngineHarness, ack_op, claim_op


def test_a_payload_in_memory_is_handed_out_without_a_read(store: EngineHarness):
    store.enqueue(b"a", b"b")
    first, second = store.wanted()
    fresh = Payload(b"a", 2, 2)

    [payloads] = store.engine.apply(
        Batch(claims=[claim_op("mail", [first._replace(payload=fresh), second])]), store.now_ms
    ).claims

    assert payloads[0] is fresh
    assert payloads[1] == (b"b", 2, 2)


def test_claims_of_many_queues_and_priorities_in_one_batch(store: EngineHarness):
    store.engine.create_queue("other", store.now_ms)
    store.enqueue(Job(b"m1"), Job(b"m2", priority=2))
    store.enqueue(Job(b"o1"), queue="other")
    ops = [
        claim_op("other", store.wanted(queue="other")),
        claim_op("mail", store.wanted(priority=2) + store.wanted(priority=1)),
        claim_op("mail", []),
    ]

    claims = store.engine.apply(Batch(claims=ops), store.now_ms).claims

    assert [[p[0] for p in op if p] for op in claims] == [[b"o1"], [b"m2", b"m1"], []]
    assert store.depths("other") == {(1, JobState.IN_PROGRESS): 1}
    assert store.depths() == {(1, JobState.IN_PROGRESS): 1, (2, JobState.IN_PROGRESS): 1}


@pytest.mark.parametrize("first_claim", [10**15 - 2, 9 * 10**15 - 2, 10**17])
def test_acks_name_claims_of_any_number(store: EngineHarness, first_claim: int):
    """Those of the thousandth shard have 16 digits."""
    keys = store.enqueue(*[b"x"] * 4)
    names = [f"host:9010:1:worker:{first_claim + at}" for at in range(4)]
    claims = [Claim(key, name) for key, name in zip(keys, names, strict=True)]
    store.engine.apply(Batch(claims=[claim_op("mail", claims)]), store.now_ms)
    acks = [Ack(key, claim_descriptor=name) for key, name, _ in claims]

    assert [store.job(key).claim_descriptor for key in keys] == names
    assert store.succeed(*acks[1:], *acks[:1]).succeeded == 4


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_in_the_place_of_a_job_that_is_not_pending_no_other_is_claimed(
    store: EngineHarness, missing: int
):
    """Of jobs whose numbers count up, with others behind them."""
    keys = store.enqueue(*[b"%d" % number for number in range(6)])
    claims = [store.claim_on(key)._replace(payload=Payload(b"x", 2, 2)) for key in keys[:4]]
    store.engine.delete_found("mail", JobState.PENDING, [keys[missing]])

    [found] = store.engine.apply(Batch(claims=[claim_op("mail", claims)]), store.now_ms).claims

    assert [at for at, payload in enumerate(found) if payload is None] == [missing]
    held = [JobState.IN_PROGRESS if at != missing else None for at in range(4)]
    assert store.states(keys) == [*held, JobState.PENDING, JobState.PENDING]


def test_a_batch_goes_from_acks_to_claims(store: EngineHarness):
    [claimed] = store.in_progress(b"old")
    retry_at = PendingKey(store.now_ms, claimed.key.local_id)
    again = store.claim_on(claimed.key)._replace(payload=Payload(b"old", 2, 1))
    batch = Batch(
        acks=[ack_op("mail", (), [Ack(claimed.key)])],
        enqueues=[EnqueueOp("mail", [Job(b"new")])],
        claims=[claim_op("mail", [again])],
    )

    result = store.engine.apply(batch, store.now_ms)

    assert result.acks[0].requeued == [(1, retry_at)]
    assert result.claims[0][0] == (b"old", 2, 1)
    assert store.job(claimed.key).claim_descriptor == again.claim_descriptor
    assert store.depths() == {(1, JobState.PENDING): 1, (1, JobState.IN_PROGRESS): 1}


def test_a_job_enqueued_and_claimed_in_one_batch(store: EngineHarness):
    [key] = store.enqueue(b"first")
    coming = JobKey(1, key.local_id + 1)
    claim = Claim(coming, "host:9010:1:worker:1", Payload(b"second", 2, 2))

    result = store.engine.apply(
        Batch(
            enqueues=[EnqueueOp("mail", [Job(b"second")])],
            claims=[claim_op("mail", [claim])],
        ),
        store.now_ms,
    )

    if list(result.enqueues[0]) == [coming.local_id]:
        assert result.claims[0][0] == (b"second", 2, 2)
    else:
        assert result.claims[0][0] is None


# --- what fits ------------------------------------------------------------------------------


def fitted(
    store: EngineHarness, *ops: ClaimOp, room: ClaimRoom | None = None
) -> list[list[bytes | None]]:
    """The bodies that these ops were given; None: the job was not to be had."""
    answers = store.engine.apply(
        Batch(claims=ops, claim_room=room or ClaimRoom()), store.now_ms
    ).claims
    return [[payload[0] if payload else None for payload in answer] for answer in answers]


A, B, C = b"a" * 10, b"b" * 10, b"c" * 10
# Jobs by number, how many bytes their op may take, and whether it takes one in any case.
Asked = tuple[list[int], int, bool]
WHAT_FITS: dict[str, tuple[list[bytes], list[Asked], ClaimRoom, list[list[bytes]]]] = {
    "an answer ends before the job with which it would be too large": (
        [A, B, C, b""], [([0, 1, 2, 3], 29, True)], ClaimRoom(), [[A, B]],
    ),
    "each job takes some bytes beside its body": (
        [A, b"", B], [([0, 1, 2], 20, True)], ClaimRoom(job_bytes=5), [[A, b""]],
    ),
    "no other answer gets a job that comes behind one that did not fit": (
        [A, B, C], [([0, 1], 10, True), ([2], 99, True)], ClaimRoom(20), [[A], []],
    ),
    "the first job of a batch has room however large it is": (
        [A, B, C], [([0, 1], 1, True), ([2], 99, True)], ClaimRoom(1), [[A], []],
    ),
    "the first job of an answer fits it unless there is something in it": (
        [A, B, C], [([0], 1, True), ([1], 1, True), ([2], 1, False)], ClaimRoom(), [[A], [B], []],
    ),
}  # fmt: skip


@pytest.mark.parametrize("in_memory", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize(("bodies", "asked", "room", "given"), WHAT_FITS.values(), ids=WHAT_FITS)
def test_claims_end_before_what_does_not_fit(
    store: EngineHarness,
    bodies: list[bytes],
    asked: list[Asked],
    room: ClaimRoom,
    given: list[list[bytes]],
    in_memory: tuple[int, ...],
):
    keys = store.enqueue(*bodies)
    before = [store.job(key) for key in keys]
    claims = store.wanted()
    for number in in_memory:
        claims[number] = claims[number]._replace(payload=Payload(bodies[number], 2, 2))
    ops = [
        claim_op("mail", [claims[number] for number in numbers], most_bytes, at_least_one=one)
        for numbers, most_bytes, one in asked
    ]

    assert fitted(store, *ops, room=room) == given

    claimed = [body for answer in given for body in answer]
    left = [job for job in before if job.body not in claimed]
    assert [store.job(job.key) for job in left] == left
    assert store.depths() == {
        (1, JobState.IN_PROGRESS): len(claimed),
        (1, JobState.PENDING): len(left),
    }


def test_all_ops_of_a_batch_share_its_room(store: EngineHarness):
    store.engine.create_queue("other", store.now_ms)
    store.enqueue(A, B, C)
    store.enqueue(A, B, queue="other")
    others = store.wanted(queue="other")
    ops = [
        claim_op("mail", store.wanted(), most_bytes=25),
        claim_op("other", others[:1]),
        claim_op("other", others[1:]),
    ]

    assert fitted(store, *ops, room=ClaimRoom(35)) == [[A, B], [A], []]
    assert store.depths("other") == {(1, JobState.IN_PROGRESS): 1, (1, JobState.PENDING): 1}


def test_what_is_not_to_be_had_takes_no_room(store: EngineHarness):
    keys = store.enqueue(A, B, C)
    claims = store.wanted()
    store.engine.delete_found("mail", JobState.PENDING, keys[:1])

    assert fitted(store, claim_op("mail", claims, most_bytes=1), room=ClaimRoom(1)) == [[None, B]]


def test_no_lower_priority_is_claimed_behind_a_job_that_does_not_fit(store: EngineHarness):
    store.enqueue(A, B, Job(b"small", priority=2))
    claims = store.wanted(priority=1) + store.wanted(priority=2)

    assert fitted(store, claim_op("mail", claims, most_bytes=15)) == [[A]]

    assert store.depths() == {
        (1, JobState.IN_PROGRESS): 1,
        (1, JobState.PENDING): 1,
        (2, JobState.PENDING): 1,
    }


def test_a_claim_is_changed_by_its_holder_alone(store: EngineHarness):
    [claimed] = store.in_progress(b"a", source="web")
    before, other = store.job(claimed.key), "host:9010:1:web:0"
    change = Checkpoint(claimed.key, None, new_body=b"b")

    assert list(store.release(Release(claimed.key, other))) == []
    assert store.checkpoint(change, source="web2").noop == 1
    assert store.checkpoint(change._replace(claim_descriptor=other), source="web").noop == 1

    assert store.job(claimed.key) == before


def test_what_tries_the_room_of_a_store_leaves_nothing_behind(store: EngineHarness):
    store.enqueue(b"a")

    store.engine.try_enqueue("mail")
    store.engine.try_enqueue("")  # where there is no queue yet

    assert len(store.wanted()) == 1
