"""What bytes mean, and what is said of those that mean nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import pytest

from pinlaterd.errors import (
    ContinuationInvalid,
    DequeueRateLimited,
    EnqueueRejected,
    ErrorCode,
    InvalidEnqueue,
    InvalidRequest,
    NoHealthyShards,
    Overloaded,
    PasswordInvalid,
    PinLaterError,
    PriorityNotSupported,
    ProtocolError,
    QueueNameInvalid,
    QueueNameTooLong,
    QueueNotFound,
    ShardConnectionFailed,
)
from pinlaterd.model import (
    QUEUE_DEFAULT,
    AckInfo,
    AckOutcomes,
    AckRequest,
    CallContext,
    CheckpointInfo,
    CheckpointOutcomes,
    CheckpointRequest,
    ClaimedJob,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    DequeueRequest,
    DequeueResult,
    EnqueueRequest,
    FinishInfo,
    FinishOutcome,
    FinishRequest,
    FinishResult,
    Job,
    JobChoice,
    JobDefaults,
    JobOptions,
    JobRecord,
    JobState,
    LookupRequest,
    Method,
    QueueKey,
    QueueNamesRequest,
    Request,
    Result,
    RetryFailedRequest,
    ScanRequest,
    ScanResult,
)
from pinlaterd.rpc import codec
from tests.rpc.thrift_bytes import (
    BOOL,
    BYTE,
    I32,
    I64,
    LIST,
    MAP,
    SET,
    STRING,
    STRUCT,
    Field,
    context,
    enqueue,
    job,
    queue_names,
    write_message,
)

CONTEXT = CallContext("test:here", "r1")
CLAIM = "jobs1:9010:1700000000000:mailer:web7:12"

REQUESTS: dict[Method, Request] = {
    Method.CREATE_QUEUE: CreateQueueRequest("mail"),
    Method.DELETE_QUEUE: DeleteQueueRequest("mail", "secret"),
    Method.ENQUEUE: EnqueueRequest(
        "mail",
        [
            Job(b"a"),
            Job(b"", 3, 1_700_000_000_000, 7, "grüße"),
            Job(b"\xff\0" * 99),
            Job(b"b", options=JobOptions("schlüssel")),
            Job(b"c", options=JobOptions("k2", run_after_us=1_234_567, expires_at_us=7)),
        ],
    ),
    Method.DEQUEUE: DequeueRequest(
        "mail",
        100,
        AckRequest(
            "mail",
            [AckInfo("mail:s1:p1:1"), AckInfo("mail:s1:p1:2", "ok", 0, CLAIM)],
            [AckInfo("mail:s1:p1:3", "näh", 5000, CLAIM)],
        ),
        dry_run=True,
        coverage=0.5,
        max_wait_ms=1000,
    ),
    Method.ACK: AckRequest("mail", [], [AckInfo("mail:s1:p1:3", "no", 5000)]),
    Method.ACK_JOBS: AckRequest("mail", [], [AckInfo("mail:s1:p1:3", "no", 0, CLAIM, False)]),
    Method.CHECKPOINT: CheckpointRequest(
        "mail",
        [
            CheckpointInfo("mail:s1:p1:1"),
            CheckpointInfo("mail:s1:p1:2", b"\xff\xfe", True, 5, 6, "half", CLAIM),
        ],
    ),
    Method.APPLY_CHECKPOINTS: CheckpointRequest("mail", [CheckpointInfo("mail:s1:p1:1")]),
    Method.FINISH: FinishRequest(
        "mail",
        [
            FinishInfo("mail:s1:p1:1", JobState.FAILED, 0),
            FinishInfo("mail:s1:p1:2", JobState.PENDING, 1, 2, False, 5000, "näh"),
        ],
    ),
    Method.LOOKUP: LookupRequest(
        ["mail:s1:p1:1", "nonsense"], include_body=True, keys=[QueueKey("mail", "k")]
    ),
    Method.COUNT: CountRequest("mail", JobState.FAILED, 2, future=True, body_regex="a.b"),
    Method.QUEUE_NAMES: QueueNamesRequest(),
    Method.SCAN: ScanRequest(
        *("mail", JobState.PENDING, 1, True, "token", 7, "x", True, 1000, True),
        JobChoice(None, 2_000, 1_000, "a|b", "KeyError: #", "a.py:1 in f", "web:h1"),
    ),
    Method.RETRY_FAILED: RetryFailedRequest(
        "mail",
        2,
        3,
        4,
        5,
        "x",
        60_000,
        True,
        JobChoice(["mail:s1:p1:1", "ö"], 17, 16, "a|b", "KeyError: #", "a.py:1 in f", "web"),
    ),
    Method.DELETE_JOBS: DeleteJobsRequest(
        "mail", JobState.SUCCEEDED, 2, "x", 9, options=JobChoice(ended_before_ms=17)
    ),
}

RECORD = JobRecord("mail:s1:p1:1", JobState.FAILED, 3, 0, "ö", 1, 2, 3, CLAIM, b"\xff")
KEYED = RECORD._replace(claim_descriptor=None, body=None, options=JobOptions("ü", run_after_us=7))
RESULTS: dict[Method, Result] = {
    Method.CREATE_QUEUE: None,
    Method.ENQUEUE: ["mail:s1:p1:1", "q" * 150, "täg"],
    Method.DEQUEUE: DequeueResult(
        [
            ClaimedJob("mail:s1:p1:1", b"\xff", 2, 1, CLAIM, 600),
            ClaimedJob("mail:s1:p2:1", b"", 2, 2, "", 600),
        ]
    ),
    Method.ACK_JOBS: AckOutcomes([True, False, True], []),
    Method.APPLY_CHECKPOINTS: CheckpointOutcomes([True, False]),
    Method.FINISH: FinishResult([FinishOutcome.DONE, FinishOutcome.OTHER_ATTEMPTS]),
    Method.LOOKUP: {"a": RECORD, "b": KEYED},
    Method.COUNT: 17,
    Method.QUEUE_NAMES: frozenset({"mail", "push"}),
    Method.SCAN: ScanResult([RECORD._replace(body=None)], "token", 7, 1_000_000, ["2"]),
}


def head_of(method: Method, *, strict: bool = True) -> codec.Head:
    return codec.Head(method.value, 7, oneway=False, strict=strict)


@pytest.mark.parametrize("method", RESULTS)
@pytest.mark.parametrize("strict", [True, False])
def test_a_result_is_read_as_it_was_written(method, strict):
    reply = codec.encode_reply(head_of(method, strict=strict), RESULTS[method])

    assert codec.decode_reply(method, reply) == RESULTS[method]
    assert codec.peek_error(reply) is None
    assert codec.peek_seqid(reply) == 7


def test_the_jobs_of_an_answer_are_counted_without_reading_them():
    result = RESULTS[Method.DEQUEUE]
    assert isinstance(result, DequeueResult)
    assert result.jobs

    assert codec.peek_jobs(codec.encode_reply(head_of(Method.DEQUEUE), result)) == len(result.jobs)
    assert codec.peek_jobs(codec.encode_error(head_of(Method.DEQUEUE), Overloaded("x"))) == 0


def test_an_answer_is_in_the_form_of_its_call():
    for strict in (True, False):
        head = codec.decode_call(queue_names(strict=strict, seqid=-5)).head
        reply = codec.encode_reply(head, frozenset())

        assert head == codec.Head("getQueueNames", -5, oneway=False, strict=strict)
        assert reply.startswith(b"\x80\x01\x00\x02") == strict
        assert codec.peek_seqid(reply) == -5


def test_fields_that_are_not_given_take_the_defaults_of_the_interface():
    queue, state = Field(1, STRING, b"mail"), Field(2, I32, 3)
    given = {
        Method.ENQUEUE: [queue, Field(2, LIST, (STRUCT, [job(b"x")]))],
        Method.DEQUEUE: [queue, Field(2, I32, 5)],
        Method.ACK: [queue],
        Method.CHECKPOINT: [queue, Field(2, LIST, (STRUCT, [[Field(1, STRING, b"d")]]))],
        Method.LOOKUP: [Field(1, LIST, (STRING, [b"d"]))],
        Method.COUNT: [queue, state],
        Method.SCAN: [queue, state],
        Method.RETRY_FAILED: [queue],
        Method.DELETE_JOBS: [queue, state],
    }
    expected = {
        Method.ENQUEUE: EnqueueRequest("mail", [Job(b"x", 1, None, 2, "")]),
        Method.DEQUEUE: DequeueRequest("mail", 5, None, False, 1.0, 0),
        Method.ACK: AckRequest("mail", (), ()),
        Method.CHECKPOINT: CheckpointRequest("mail", [CheckpointInfo("d")]),
        Method.LOOKUP: LookupRequest(["d"], False),
        Method.COUNT: CountRequest("mail", JobState.FAILED, None, False, None),
        Method.SCAN: ScanRequest("mail", JobState.FAILED, None, False, "0", 100, None),
        Method.RETRY_FAILED: RetryFailedRequest("mail", 1, 1, None, 1000),
        Method.DELETE_JOBS: DeleteJobsRequest("mail", JobState.FAILED, 1, None, 1000),
    }

    for method, fields in given.items():
        message = write_message(method.value, [context(), Field(2, STRUCT, fields)])
        call = codec.decode_call(message)

        assert call.request == expected[method]
        assert call.context == CallContext("test:here", "")


def test_coverage_is_not_judged_here():
    request = DequeueRequest("mail", -5, coverage=math.inf)

    message = codec.encode_call(Method.DEQUEUE, 1, CONTEXT, request)

    assert codec.decode_call(message).request == request


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        (
            enqueue(job(b"x"), [Field(2, BYTE, 1)]),
            InvalidEnqueue,
            (
                "enqueueJobs: request.jobs[1].body is missing; "
                "PinLaterJob requires a binary in field 1"
            ),
        ),
        (
            enqueue(job(b"x", Field(2, STRING, b"1"))),
            InvalidEnqueue,
            "enqueueJobs: request.jobs[0].priority is of type string; expected byte",
        ),
        (
            enqueue(job(b"x", Field(5, STRING, b"ab\xff"))),
            InvalidEnqueue,
            (
                "enqueueJobs: request.jobs[0].customStatus is not valid UTF-8 at byte 2; "
                "text has to be UTF-8"
            ),
        ),
        (
            enqueue(job(b"x"), queue=b"\xc3"),
            InvalidEnqueue,
            "enqueueJobs: request.queueName is not valid UTF-8 at byte 0; text has to be UTF-8",
        ),
        (
            enqueue(job(b"x", Field(1, STRING, b"y"))),
            InvalidEnqueue,
            "enqueueJobs: request.jobs[0].body is given twice; expected it once",
        ),
        (
            write_message(
                "enqueueJobs",
                [
                    context(),
                    Field(2, STRUCT, [Field(1, STRING, b"q"), Field(2, LIST, (STRING, [b"x"]))]),
                ],
            ),
            InvalidEnqueue,
            "enqueueJobs: request.jobs holds values of type string; expected PinLaterJob",
        ),
        (
            write_message(
                "getJobCount",
                [context(), Field(2, STRUCT, [Field(1, STRING, b"q"), Field(2, I32, 7)])],
            ),
            InvalidRequest,
            (
                "getJobCount: request.jobState is 7; "
                "choose from 0 PENDING, 1 IN_PROGRESS, 2 SUCCEEDED, 3 FAILED"
            ),
        ),
        (
            write_message("getQueueNames", []),
            InvalidRequest,
            "getQueueNames: context is missing; getQueueNames requires a RequestContext in field 1",
        ),
        (
            write_message("createQueue", [context()]),
            InvalidRequest,
            "createQueue: name is missing; createQueue requires a string in field 2",
        ),
    ],
)
def test_what_is_wrong_is_said_where_and_what_would_be_right(message, error, says):
    with pytest.raises(error) as caught:
        codec.decode_call(message)

    assert caught.value.message == f"invalid request: {says}"


def test_a_method_that_does_not_exist_is_peeked_and_answered_as_unknown(apache):
    peeked = codec.peek(write_message("__can__finagle__trace__v3__", [], seqid=3))

    assert peeked.method is None
    assert not peeked.canonical
    answer = codec.encode_unknown_method(peeked.head)
    unknown = pytest.importorskip("thrift.Thrift").TApplicationException
    with pytest.raises(unknown) as caught:
        apache.read("getQueueNames", answer)
    assert caught.value.type == unknown.UNKNOWN_METHOD
    assert "__can__finagle__trace__v3__" in caught.value.message
    assert codec.peek_seqid(answer) == 3
    assert codec.peek_error(answer) == ErrorCode.UNKNOWN
    with pytest.raises(PinLaterError, match="__can__finagle__trace__v3__"):
        codec.decode_reply(Method.QUEUE_NAMES, answer)


def test_a_method_name_that_is_no_text_is_an_unknown_method():
    message = write_message("getQueueNames", [context()]).replace(b"getQueue", b"\xff\xfetQueue")

    head = codec.peek(message).head

    assert codec.peek(message).method is None
    assert codec.peek_seqid(codec.encode_unknown_method(head)) == 7


ERRORS = [
    ContinuationInvalid("x"),
    PasswordInvalid("no"),
    QueueNameInvalid("a b"),
    QueueNameTooLong("a" * 65, 64),
    QueueNotFound("mail"),
    PriorityNotSupported(9, 3),
    DequeueRateLimited("slow"),
    EnqueueRejected("all shards are dequeue-only"),
    InvalidRequest("limit is 0; expected at least 1"),
    Overloaded("too many calls"),
    PinLaterError("something: else"),
    NoHealthyShards(),
    ShardConnectionFailed(["1", "2"], "down"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_what_it_was(error):
    answer = codec.encode_error(head_of(Method.DEQUEUE), error)

    assert codec.peek_error(answer) == error.code
    with pytest.raises(PinLaterError) as caught:
        codec.decode_reply(Method.DEQUEUE, answer)
    assert type(caught.value) is type(error)
    assert caught.value.message == str(caught.value) == error.message
    assert caught.value.code == error.code


@pytest.mark.parametrize("error", [InvalidRequest("x"), InvalidEnqueue("x"), Overloaded("x")])
def test_in_an_enqueue_what_no_code_names_is_enqueue_rejected(error):
    answer = codec.encode_error(head_of(Method.ENQUEUE), error)

    assert codec.peek_error(answer) == ErrorCode.ENQUEUE_REJECTED
    with pytest.raises(PinLaterError) as caught:
        codec.decode_reply(Method.ENQUEUE, answer)
    assert caught.value.message == error.message
    expected = Overloaded if isinstance(error, Overloaded) else InvalidEnqueue
    assert type(caught.value) is expected


def test_a_code_of_a_later_version_still_gives_its_message():
    failure = [Field(1, I32, 599), Field(2, STRING, b"new")]
    answer = write_message("createQueue", [Field(1, STRUCT, failure)], kind=2)

    with pytest.raises(PinLaterError, match=r"^new$"):
        codec.decode_reply(Method.CREATE_QUEUE, answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        write_message("createQueue", [], kind=1),
        write_message("deleteQueue", [], kind=2),
        write_message("createQueue", [], kind=2) + b"x",
        write_message("createQueue", [], kind=2)[:-1],
        write_message("createQueue", [Field(1, I32, 5)], kind=2),
    ],
)
def test_what_is_no_answer_to_the_call_is_a_protocol_error(answer):
    with pytest.raises(ProtocolError):
        codec.decode_reply(Method.CREATE_QUEUE, answer)


def test_an_answer_needs_a_result_where_the_method_has_one():
    with pytest.raises(ProtocolError, match="neither a result nor an error"):
        codec.decode_reply(Method.COUNT, write_message("getJobCount", [], kind=2))


def test_an_older_servers_dequeue_answer_lacks_our_extensions():
    success = [
        Field(1, MAP, (STRING, STRING, [(b"a", b"A"), (b"b", b"B")])),
        Field(2, MAP, (STRING, STRUCT, [(b"a", [Field(1, I32, 3), Field(2, I32, 2)])])),
    ]
    answer = write_message("dequeueJobs", [Field(0, STRUCT, success)], kind=2)

    result = codec.decode_reply(Method.DEQUEUE, answer)

    assert result == DequeueResult(
        [ClaimedJob("a", b"A", 3, 2, "", 0), ClaimedJob("b", b"B", 0, 0, "", 0)]
    )


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (
            EnqueueRequest("mail", [Job(b"x"), Job(b"x", priority=300)]),
            "jobs[1].priority: expected -128 to 127, got 300",
        ),
        (
            EnqueueRequest("mail", [Job(b"x", run_after_ms=1.5e12)]),  # type: ignore[arg-type]
            "jobs[0].run_after_ms: expected a whole number, got 1500000000000.0",
        ),
        (
            EnqueueRequest("mail", [Job("text")]),  # type: ignore[arg-type]
            "jobs[0].body: expected bytes, got 'text'",
        ),
        (
            EnqueueRequest("mail", [Job(120)]),  # type: ignore[arg-type]
            "jobs[0].body: expected bytes, got 120",
        ),
        (
            EnqueueRequest("mail", [Job(b"x", custom_status="\ud800")]),
            "jobs[0].custom_status: a text that can't be UTF-8: surrogates not allowed",
        ),
        (
            AckRequest("mail", succeeded=["mail:s1:p1:1"]),  # type: ignore[list-item]
            "succeeded[0]: expected PinLaterJobAckInfo, got 'mail:s1:p1:1'",
        ),
        (
            LookupRequest(5),  # type: ignore[arg-type]
            "descriptors: expected a list, got 5",
        ),
    ],
)
def test_what_thrift_cannot_hold_is_refused_before_it_is_sent(request_, problem):
    method = {EnqueueRequest: Method.ENQUEUE, AckRequest: Method.ACK}.get(
        type(request_), Method.LOOKUP
    )
    refused = InvalidEnqueue if method is Method.ENQUEUE else InvalidRequest
    with pytest.raises(refused) as caught:
        codec.encode_call(method, 1, CONTEXT, request_)

    assert caught.value.message == f"invalid request: {method.value}: request.{problem}"


# --- hostile bytes --------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    """A call with an unknown field of that many structs within each other."""
    value = b"\x0c\x00\x63" * depth + b"\0" * depth
    return queue_names()[:-1] + value + b"\0"


def test_nesting_is_followed_to_a_bound_and_no_deeper():
    assert codec.decode_call(nested(60)).request == QueueNamesRequest()
    with pytest.raises(ProtocolError, match="nested"):
        codec.decode_call(nested(70))
    with pytest.raises(ProtocolError, match="nested"):
        codec.decode_call(nested(1_000_000))


@pytest.mark.parametrize("count", [0x7FFF_FFFF, 0xFFFF_FFFF, 0x8000_0000, 1_000_000])
@pytest.mark.parametrize(
    "head",
    [
        b"\x0b\x00\x63",  # a string
        b"\x0f\x00\x63\x0c",  # lists of structs, lists, nothing known
        b"\x0f\x00\x63\x0f",
        b"\x0f\x00\x63\x02",
        b"\x0f\x00\x63\x63",
        b"\x0e\x00\x63\x0b",
        b"\x0d\x00\x63\x0b\x0d",
    ],
)
def test_a_claimed_length_is_not_believed(head, count):
    message = queue_names()[:-1] + head + count.to_bytes(4, "big") + b"\0" * 40

    with pytest.raises(ProtocolError):
        codec.decode_call(message)


def test_a_list_may_have_as_many_elements_as_are_allowed_and_no_more():
    message = codec.encode_call(Method.LOOKUP, 1, CONTEXT, LookupRequest(["a", "b"]))

    assert codec.decode_call(message, 2).request == LookupRequest(["a", "b"])
    with pytest.raises(InvalidRequest, match="has 2 elements; at most 1"):
        codec.decode_call(message, 1)


@pytest.mark.parametrize("count", [0x7FFF_FFFF, 0xFFFF_FFFF, 50])
def test_a_claimed_number_of_jobs_is_not_believed(count):
    message = enqueue(job(b"x"))
    at = message.index(b"\x0f\x00\x02\x0c") + 4
    message = message[:at] + count.to_bytes(4, "big") + message[at + 4 :]

    with pytest.raises(ProtocolError):
        codec.decode_call(message)


@pytest.mark.parametrize(
    "message",
    [
        write_message("getQueueNames", [context(), Field(99, LIST, (STRUCT, [()] * 50_000))]),
        write_message("getQueueNames", [context(), *[Field(99, BOOL, 1)] * 50_001]),
        enqueue(*[job(b"x", Field(99, SET, (LIST, [(BYTE, [])] * 500)))] * 100),
    ],
    ids=["one", "many", "of many jobs"],
)
def test_unknown_fields_cannot_buy_much_time(message):
    with pytest.raises(ProtocolError, match="too many values; a message may have"):
        codec.decode_call(message, 1_000)


def test_what_newer_servers_add_to_the_answer_is_read():
    added = [Field(299 + number, I32, 1) for number in range(9)]
    required = [Field(2, I32, 0), Field(3, I32, 1), Field(10, I32, 1), Field(5, I64, 1)]
    record = [Field(1, STRING, b"q:s1:p1:1"), Field(4, STRING, b""), *required, *added]
    answer = [Field(0, MAP, (STRING, STRUCT, [(b"%d" % n, record) for n in range(10_000)]))]
    message = write_message("lookupJobs", answer, kind=2)

    assert (
        len(cast("Mapping[str, JobRecord]", codec.decode_reply(Method.LOOKUP, message))) == 10_000
    )


def test_unknown_fields_of_every_type_are_skipped():
    fields = [
        Field(90, BOOL, 1),
        Field(91, I64, -1),
        Field(92, LIST, (I32, [1, 2])),
        Field(93, SET, (STRING, [b"a", b"bb"])),
        Field(94, MAP, (STRING, STRUCT, [(b"k", [Field(1, BYTE, 1)])])),
        Field(95, MAP, (0, 0, [])),
        Field(96, LIST, (LIST, [(STRING, [b"x"]), (STRING, [])])),
        Field(97, MAP, (I32, MAP, [(1, (BYTE, BYTE, [(1, 2)])), (2, (BYTE, BOOL, []))])),
    ]
    message = write_message("getQueueNames", [*fields, context(), *fields])

    assert codec.decode_call(message).context == CallContext("test:here")


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x80",
        b"\x80\x01\x00\x01",
        b"\x80\x02\x00\x01\x00\x00\x00\x01a\x00\x00\x00\x00\x00",
        b"\xff" * 40,
        b"\x7f\xff\xff\xffabc",
        b"\x80\x01\x00\x01\xff\xff\xff\xff" + b"\0" * 20,
        write_message("getQueueNames", [context()], kind=2),
        write_message("getQueueNames", [context()], kind=9),
    ],
)
def test_what_begins_no_call_is_a_protocol_error(message):
    with pytest.raises(ProtocolError):
        codec.peek(message)
    with pytest.raises(ProtocolError):
        codec.decode_call(message)


def test_bytes_behind_the_end_are_a_protocol_error():
    with pytest.raises(ProtocolError, match="2 bytes follow"):
        codec.decode_call(queue_names() + b"\0\0")


def test_a_job_that_does_not_say_it_has_its_queues_defaults():
    """In the layout that is usual and in others, unless they are given."""
    jobs = [Job(b"a", QUEUE_DEFAULT, None, QUEUE_DEFAULT), Job(b"b"), Job(b"c", QUEUE_DEFAULT)]
    message = codec.encode_call(Method.ENQUEUE, 1, CONTEXT, EnqueueRequest("mail", jobs))
    unusual = message[:-1] + b"\x08\x00\x63\x00\x00\x00\x01\x00"  # an unknown field follows

    for each in (message, unusual):
        own = codec.decode_call(each, job_defaults={"mail": JobDefaults(3, 7)}).request
        usual = codec.decode_call(each, job_defaults={"post": JobDefaults(3, 7)}).request

        said = [Job(b"a", 3, None, 7), Job(b"b"), Job(b"c", 3)]
        assert own == EnqueueRequest("mail", said)
        assert usual == EnqueueRequest("mail", [Job(b"a"), Job(b"b"), Job(b"c")])
