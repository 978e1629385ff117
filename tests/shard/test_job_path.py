"""Enqueue, dequeue, ack and checkpoint on one shard, as a router sees them."""

from __future__ import annotations

import pytest

from pinlaterd.config.schema import ServerSettings
from pinlaterd.engines.base import Claims
from pinlaterd.errors import (
    EnqueueRejected,
    InvalidRequest,
    PinLaterError,
    PriorityNotSupported,
    QueueNotFound,
)
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CallContext,
    CheckpointInfo,
    CheckpointRequest,
    ClaimedJob,
    DequeueRequest,
    DequeueResult,
    EnqueueRequest,
    Job,
    JobOptions,
    JobState,
    Method,
    QueueNamesRequest,
)
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Head
from pinlaterd.shard.dequeue import JOB_OVERHEAD_BYTES
from pinlaterd.shard.state import ClaimDescriptors
from pinlaterd.wire.envelope import Op, Status

HEAD = Head("dequeueJobs", 1, oneway=False, strict=True)


def bodies(jobs) -> list[bytes]:
    return [job.body for job in jobs]


# --- enqueue --------------------------------------------------------------------------------


UNPRINTABLE = ["web\n", "a\0b", "\x7f", "\x9b31m", "a\u2028b", "\u2029", "\u202egpj", "\u2066a"]


@pytest.mark.parametrize("source", ["x" * 121, "ü" * 61, *UNPRINTABLE])
def test_a_source_that_claims_cannot_bear(shard, source):
    with pytest.raises(EnqueueRejected, match="invalid request: the context's source"):
        shard.enqueue(b"a", source=source)
    with pytest.raises(InvalidRequest, match="the context's source"):
        shard.call(DequeueRequest("mail", 1), source=source)
    with pytest.raises(InvalidRequest, match="the context's source"):
        shard.call(CheckpointRequest("mail", ()), source=source)


@pytest.mark.parametrize("source", ["", "x" * 120, "ü" * 60, "web 1", "網站-ή"])
def test_a_source_that_claims_can_bear(shard, source):
    shard.enqueue(b"a", source=source)

    assert bodies(shard.call(DequeueRequest("mail", 1), source=source).jobs) == [b"a"]


def test_validate_stores_nothing(shard):
    good = shard.entry(EnqueueRequest("mail", [Job(b"a")]), op=Op.VALIDATE)
    bad = shard.entry(EnqueueRequest("mail", [Job(b"a", priority=9)]), op=Op.VALIDATE)

    statuses = [reply.status for reply in shard.replies(good, bad)]

    assert statuses == [Status.DONE, Status.FAILED]
    assert shard.counts() == (0, 0, 0)


# --- dequeue --------------------------------------------------------------------------------


def test_max_jobs_and_lowest_priority_of_the_router_cap_a_dequeue(shard):
    shard.enqueue(Job(b"a"), Job(b"b"), Job(b"c", priority=2))
    request = DequeueRequest("mail", 10)

    assert bodies(shard.call(request, max_jobs=0).jobs) == []
    assert bodies(shard.call(request, max_jobs=1).jobs) == [b"a"]
    assert bodies(shard.call(request, lowest_priority=1).jobs) == [b"b"]
    assert bodies(shard.call(request).jobs) == [b"c"]


def test_more_jobs_than_a_batch_may_hold_take_several(make_shard):
    shard = make_shard(max_response_bytes=64 << 20)
    shard.create()
    for _ in range(5):
        shard.enqueue(*[Job(b"x")] * 1000)

    assert len(shard.dequeue(5_000)) == 5_000


@pytest.fixture
def reopened(make_shard):
    """A shard that holds such jobs, of which it has nothing in memory."""

    def reopen(*jobs, **settings):
        before = make_shard(**settings)
        before.create()
        for job in jobs:
            before.enqueue(job)
        before.service.close()
        return make_shard(**settings)

    return reopen


def test_a_job_that_was_scheduled_before_a_restart_runs_when_it_is_due(reopened, clock):
    shard = reopened(Job(b"a", run_after_ms=clock.now_ms() + 1_000))
    assert shard.dequeue() == []

    clock.advance(1)

    assert bodies(shard.dequeue()) == [b"a"]


def test_an_answer_from_several_commits_is_within_its_bound(make_shard):
    shard = make_shard(max_response_bytes=3_000 * JOB_OVERHEAD_BYTES)
    shard.create()
    for _ in range(4):
        shard.enqueue(*[b""] * 1_000)

    assert len(shard.dequeue(4_000)) == 3_000


def test_what_does_not_fit_an_answer_can_be_had_by_the_next(reopened):
    shard = reopened(
        Job(bytes(3_000), priority=2),
        *[bytes([number]) * 3_000 for number in range(7)],
        max_response_bytes=10_000,
    )

    answers = [bodies(shard.dequeue(10)) for _ in range(3)]

    assert [[body[0] for body in answer] for answer in answers] == [[0, 1, 2], [3, 4, 5], [6, 0]]
    assert shard.dequeue() == []
    assert shard.count(JobState.IN_PROGRESS) == 8


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_job_larger_than_any_answer_is_handed_out_alone(reopened, in_memory):
    jobs = bytes(5_000), b"small", bytes(6_000)
    shard = reopened(*([] if in_memory else jobs), max_response_bytes=2_000)
    if in_memory:
        shard.enqueue(*jobs)

    assert [len(job.body) for job in shard.dequeue(9)] == [5_000]
    assert [len(job.body) for job in shard.dequeue(9)] == [5]
    assert [len(job.body) for job in shard.dequeue(9)] == [6_000]


def test_dequeues_of_jobs_too_large_for_one_batch_are_answered_in_full(reopened):
    """A batch has room for 64 KiB of bodies here, a dequeue for all that it asks for."""
    jobs = [bytes([number]) * 50_000 for number in range(12)]
    shard = reopened(*jobs, shard_buffer_bytes=1 << 20)

    results = shard.results(*[DequeueRequest("mail", 3)] * 4)

    assert [len(result.jobs) for result in results] == [3] * 4
    assert sorted(job.body for result in results for job in result.jobs) == jobs
    assert shard.counts()[0] == 0


def test_what_does_not_fit_an_answer_can_be_had_by_others_of_the_same_batch(reopened):
    shard = reopened(*[bytes(5_000)] * 4)
    first = shard.entry(DequeueRequest("mail", 100), most_bytes=6_000)
    others = [shard.entry(DequeueRequest("mail", limit)) for limit in (2, 2)]

    replies = shard.replies(first, *others)

    assert [reply.jobs for reply in replies] == [1, 2, 1]


@pytest.mark.parametrize("in_memory", [True, False])
def test_no_worse_job_leaves_before_one_that_does_not_fit_an_answer(reopened, in_memory):
    jobs = *[Job(bytes(5_000))] * 3, Job(b"low", priority=2)
    shard = reopened(*([] if in_memory else jobs))
    if in_memory:
        shard.enqueue(*jobs)
    first = shard.entry(DequeueRequest("mail", 3), most_bytes=6_000)
    others = [shard.entry(DequeueRequest("mail", limit)) for limit in (1, 9)]

    answers = [bodies(shard.decode(reply).jobs) for reply in shard.replies(first, *others)]

    assert answers == [[bytes(5_000)], [bytes(5_000)], [bytes(5_000), b"low"]]


def test_jobs_without_room_in_a_batch_delay_no_acks_and_enqueues(reopened):
    shard = reopened(*[bytes(50_000)] * 3, shard_buffer_bytes=1 << 20)
    [held] = shard.dequeue(1)

    acked = AckRequest("mail", [AckInfo(held.descriptor)])
    first, second, stored = shard.results(
        DequeueRequest("mail", 2),
        DequeueRequest("mail", 1, acked),
        EnqueueRequest("mail", [Job(b"small")]),
    )

    assert len(first.jobs) + len(second.jobs) == 3
    assert len(stored) == 1
    assert shard.state(held.descriptor) is JobState.SUCCEEDED


# --- acks -----------------------------------------------------------------------------------


def test_acks_of_jobs_that_no_store_can_hold_change_nothing(shard):
    shard.ack([f"mail:ss1:{job}" for job in ("p1:9999999999999999999", "p1:0", "p0:1", "p200:1")])

    assert shard.counters()["mail_ack_noop"] == 4
    [claimed] = shard.enqueue(b"a")
    shard.dequeue()
    number = claimed.rpartition(":")[2]
    shard.ack([f"mail:ss1:p200:{number[:-1]}", f"mail:ss1:p200:{number}"])
    assert shard.state(claimed) is JobState.IN_PROGRESS


def test_failed_jobs_come_back_in_their_order(shard):
    shard.enqueue(b"1", b"2", b"3")

    shard.ack(failed=[job.descriptor for job in reversed(shard.dequeue())])

    assert bodies(shard.dequeue()) == [b"1", b"2", b"3"]


def test_shards_that_begin_in_the_same_millisecond_give_different_claims():
    server = ServerSettings(advertised_host="box")
    first, second = (ClaimDescriptors(server, 5, position=place).take("web", 3) for place in (0, 1))

    claims = [set(Claims(1, range(3), [None] * 3, *named).descriptors) for named in (first, second)]
    assert not claims[0] & claims[1]


def test_scheduled_jobs_are_acked_without_a_dequeue_unless_they_are_due(shard):
    in_an_hour_ms = shard.clock.now_ms() + 3_600_000
    later, due, claimed = shard.enqueue(
        Job(b"a", run_after_ms=in_an_hour_ms), Job(b"b", attempts_allowed=2), b"c"
    )
    shard.dequeue()
    shard.ack(failed=[due])
    shard.enqueue(Job(b"d", run_after_ms=in_an_hour_ms))
    request = AckRequest("mail", [AckInfo(later, "moved"), AckInfo(due, "x"), AckInfo(claimed)])

    for _ in range(2):
        assert shard.call(request, source="mover", op=Op.ACK_SCHEDULED) is None

    records = shard.lookup(later, due, claimed)
    assert (records[later].state, records[later].custom_status) == (JobState.SUCCEEDED, "moved")
    assert records[due].state is JobState.PENDING
    assert records[claimed].state is JobState.IN_PROGRESS
    assert shard.counters()["mail_ack_succeeded"] == 1
    shard.clock.advance(3_600)
    assert bodies(shard.dequeue()) == [b"b", b"d"]


def test_a_scheduled_job_that_may_expire_is_acked_as_any_other(shard):
    in_an_hour_ms = shard.clock.now_ms() + 3_600_000
    options = JobOptions(expires_at_ms=2 * in_an_hour_ms)
    [job] = shard.enqueue(Job(b"a", run_after_ms=in_an_hour_ms, options=options))

    shard.call(AckRequest("mail", [AckInfo(job, "moved")]), op=Op.ACK_SCHEDULED)

    [record] = shard.lookup(job).values()
    assert (record.state, record.custom_status) == (JobState.SUCCEEDED, "moved")
    assert record.end_reason is None


@pytest.mark.parametrize(
    "bad", ["nonsense", "mail:ss2:p1:1", "post:ss1:p1:1", "mail:ss1:p1:x", "mail:ss1:p1:٣", ""]
)
def test_a_call_that_names_jobs_of_others_is_the_routers_to_divide(shard, bad):
    (descriptor,) = shard.enqueue(b"a")
    shard.dequeue()
    acks = AckRequest("mail", [AckInfo(descriptor), AckInfo(bad)])
    requests = [
        acks,
        DequeueRequest("mail", 1, acks),
        CheckpointRequest("mail", [CheckpointInfo(descriptor), CheckpointInfo(bad)]),
    ]

    assert shard.results(*requests) == [Status.FOREIGN] * 3
    assert shard.state(descriptor) is JobState.IN_PROGRESS


def test_a_dequeue_that_takes_only_some_shards_is_the_routers_to_divide(shard):
    shard.enqueue(b"a")

    assert shard.results(DequeueRequest("mail", 1, coverage=0.5)) == [Status.FOREIGN]
    assert shard.counts() == (1, 0, 0)


# --- checkpoints ----------------------------------------------------------------------------


# --- many at once ---------------------------------------------------------------------------


def test_a_bad_call_costs_the_others_in_its_batch_nothing(shard):
    jobs = [Job(b"a")]
    results = shard.results(
        EnqueueRequest("mail", jobs),
        EnqueueRequest("mail", [Job(b"b", priority=9)]),
        EnqueueRequest("nowhere", jobs),
        EnqueueRequest("mail", jobs),
        DequeueRequest("mail", 0),
    )

    assert [type(result) for result in results] == [
        list,
        PriorityNotSupported,
        QueueNotFound,
        list,
        InvalidRequest,
    ]
    assert shard.counts() == (2, 0, 0)


def test_all_calls_that_are_there_go_into_one_commit(shard):
    before = shard.stats.snapshot()["histograms"].get("shard_commit_ms")
    assert before is None

    stored = shard.results(*[EnqueueRequest("mail", [Job(b"a")]) for _ in range(64)])

    assert len({descriptor for of_call in stored for descriptor in of_call}) == 64
    committed = shard.stats.snapshot()["histograms"]["shard_commit_ms"]
    assert committed.count == 1
    assert shard.counters()["mail_enqueue"] == 64


def test_concurrent_dequeues_never_share_a_job(shard):
    shard.enqueue(*[b"%d" % number for number in range(50)])

    results = shard.results(*[DequeueRequest("mail", 10)] * 7)

    handed_out = [job.body for result in results for job in result.jobs]
    assert sorted(handed_out) == sorted(b"%d" % number for number in range(50))


def test_calls_past_their_deadline_are_dropped_before_the_commit(shard):
    late = shard.entry(EnqueueRequest("mail", [Job(b"a")]), deadline=shard.clock.monotonic())

    assert [reply.status for reply in shard.replies(late)] == [Status.REFUSED]

    assert shard.counts() == (0, 0, 0)
    assert shard.counters()["shard_calls_expired"] == 1


def test_bytes_that_are_no_call_are_answered_and_harm_nobody(shard):
    good = shard.entry(EnqueueRequest("mail", [Job(b"a")]))
    broken = shard.raw(good.message[:-3])
    unknown = shard.raw(
        codec.encode_call(Method.QUEUE_NAMES, 5, CallContext("x"), QueueNamesRequest()).replace(
            b"getQueueNames", b"getQueueNamez"
        )
    )
    garbage = shard.raw(b"\x80\x01")
    empty = shard.raw(b"")

    replies = shard.replies(broken, unknown, garbage, empty, good)

    assert [reply.status for reply in replies] == [
        Status.FAILED,
        Status.DONE,
        Status.DONE,
        Status.DONE,
        Status.DONE,
    ]
    with pytest.raises(PinLaterError, match="invalid request"):
        codec.decode_reply(Method.ENQUEUE, replies[0].payload)
    with pytest.raises(PinLaterError, match="unknown method"):
        codec.decode_reply(Method.QUEUE_NAMES, replies[1].payload)


# --- answers that can't be delivered --------------------------------------------------------


def test_released_claims_are_pending_again_at_no_attempts_cost(shard):
    (descriptor,) = shard.enqueue(b"a")
    jobs = shard.dequeue()
    reply = codec.encode_reply(HEAD, DequeueResult(jobs))

    (released,) = shard.replies(shard.raw(reply, Op.RELEASE))

    assert released.status is Status.DONE
    (again,) = shard.dequeue()
    assert (again.descriptor, again.attempts_remaining) == (descriptor, 2)
    shard.replies(shard.raw(reply, Op.RELEASE))  # that claim holds no more
    assert shard.state(descriptor) is JobState.IN_PROGRESS


def test_a_job_that_is_to_run_at_most_once_is_released_only_while_no_byte_has_left(shard):
    (once, more) = shard.enqueue(Job(b"a", attempts_allowed=1), b"b")
    for op, again in ((Op.RELEASE, {once, more}), (Op.RELEASE_SENT, {more})):
        reply = codec.encode_reply(HEAD, DequeueResult(shard.dequeue()))
        shard.replies(shard.raw(reply, op))
        released = {job for job in (once, more) if shard.state(job) is JobState.PENDING}
        assert released == again

    shard.clock.advance(700)
    shard.turn()
    while shard.service.busy:
        shard.turn()

    assert shard.state(once) is JobState.FAILED


def test_a_release_that_means_nothing_is_harmless(shard):
    job = ClaimedJob("nonsense", b"", 1, 1, "claim", 1)
    other = job._replace(descriptor="gone:ss1:p1:1")
    meaningless = [b"", b"\0\0", codec.encode_reply(HEAD, DequeueResult([job, other]))]

    replies = shard.replies(*[shard.raw(message, Op.RELEASE) for message in meaningless])

    assert {reply.status for reply in replies} == {Status.DONE}


def test_an_answer_whose_router_has_gone_is_taken_back(shard):
    shard.enqueue(b"a")
    (reply,) = shard.replies(shard.entry(DequeueRequest("mail", 1)))

    shard.service.undelivered(b"router", [reply])
    shard.turn()

    assert shard.counts() == (1, 0, 0)
    assert bodies(shard.dequeue()) == [b"a"]


# --- counts ---------------------------------------------------------------------------------


def test_counts_are_told_when_they_change(shard):
    shard.service.take_counts()
    shard.enqueue(Job(b"a", priority=2), b"b")
    assert list(shard.service.take_counts()) == [("mail", (1, 1, 0))]

    shard.dequeue()
    assert list(shard.service.take_counts()) == [("mail", (0, 0, 0))]
    assert shard.service.take_counts() == ()


def test_the_confirmation_of_an_empty_queue_is_told_each_time(shard):
    shard.service.take_counts()

    shard.dequeue()

    assert list(shard.service.take_counts()) == [("mail", (0, 0, 0))]
