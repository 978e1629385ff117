"""The codec against Apache Thrift's own Python library: a second implementation of every byte."""

from __future__ import annotations

import pytest

from pinlaterd.errors import ErrorCode, QueueNotFound
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CallContext,
    CheckpointInfo,
    CheckpointRequest,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    DequeueRequest,
    EnqueueRequest,
    Job,
    JobState,
    LookupRequest,
    Method,
    QueueNamesRequest,
    RetryFailedRequest,
    ScanRequest,
)
from pinlaterd.rpc import codec
from tests.rpc.test_codec import REQUESTS, RESULTS, head_of
from tests.rpc.thrift_bytes import PASSED_THROUGH

CLAIM = "jobs1:9010:1:mailer:web7:1"


def apache_calls(types):
    """Method, arguments as an Apache client gives them, and what they are to us."""
    info = types.PinLaterJobAckInfo
    acks = types.PinLaterJobAckRequest(
        "mail", [info("mail:s1:p1:1"), info("mail:s1:p1:2", "ok", 5, CLAIM)], [info("x")]
    )
    our_acks = AckRequest(
        "mail",
        [AckInfo("mail:s1:p1:1"), AckInfo("mail:s1:p1:2", "ok", 5, CLAIM)],
        [AckInfo("x")],
    )
    failed = types.PinLaterJobState.FAILED
    return [
        ("createQueue", ["mail"], CreateQueueRequest("mail")),
        ("deleteQueue", ["mail", "grün"], DeleteQueueRequest("mail", "grün")),
        (
            "enqueueJobs",
            [
                types.PinLaterEnqueueRequest(
                    "mail",
                    [
                        types.PinLaterJob(b"\xff\0"),
                        types.PinLaterJob(b"b", 3, 1_700_000_000_000, 9, "späť"),
                        types.PinLaterJob(b"c", priority=None, customStatus=None),
                    ],
                )
            ],
            EnqueueRequest(
                "mail",
                [Job(b"\xff\0"), Job(b"b", 3, 1_700_000_000_000, 9, "späť"), Job(b"c")],
            ),
        ),
        ("dequeueJobs", [types.PinLaterDequeueRequest("mail", 5)], DequeueRequest("mail", 5)),
        (
            "dequeueJobs",
            [types.PinLaterDequeueRequest("mail", 5, acks, True, 0.25, 700)],
            DequeueRequest("mail", 5, our_acks, True, 0.25, 700),
        ),
        ("ackDequeuedJobs", [acks], our_acks),
        (
            "checkpointJobs",
            [
                types.PinLaterCheckpointJobsRequest(
                    "mail",
                    [
                        types.PinLaterCheckpointJobRequest("a"),
                        types.PinLaterCheckpointJobRequest("b", "ü", True, 1, 2, "c", CLAIM),
                    ],
                )
            ],
            CheckpointRequest(
                "mail",
                [CheckpointInfo("a"), CheckpointInfo("b", "ü".encode(), True, 1, 2, "c", CLAIM)],
            ),
        ),
        ("lookupJobs", [types.PinLaterLookupJobRequest(["a"], True)], LookupRequest(["a"], True)),
        (
            "getJobCount",
            [types.PinLaterGetJobCountRequest("mail", failed)],
            CountRequest("mail", JobState.FAILED),
        ),
        ("getQueueNames", [], QueueNamesRequest()),
        (
            "scanJobs",
            [types.PinLaterScanJobsRequest("mail", failed, limit=3)],
            ScanRequest("mail", JobState.FAILED, limit=3),
        ),
        (
            "retryFailedJobs",
            [types.PinLaterRetryFailedJobsRequest("mail", limit=3)],
            RetryFailedRequest("mail", limit=3),
        ),
        (
            "deleteJobs",
            [types.PinLaterDeleteJobsRequest("mail", failed, bodyRegexToMatch="x")],
            DeleteJobsRequest("mail", JobState.FAILED, body_regex="x"),
        ),
    ]


@pytest.mark.parametrize("strict", [True, False])
def test_we_read_what_an_apache_client_writes(apache, strict):
    context = apache.types.RequestContext("mailer:web7", "r1")
    for method, arguments, expected in apache_calls(apache.types):
        message = apache.write(method, context, *arguments, strict=strict)

        call = codec.decode_call(message)

        assert call.request == expected
        assert call.context == CallContext("mailer:web7", "r1")
        assert call.head == codec.Head(method, 7, oneway=False, strict=strict)
        assert codec.peek(message).canonical is (method in PASSED_THROUGH)


class EchoingHandler:
    """Gives `result` to every call, and keeps its arguments."""

    def __init__(self, result: object) -> None:
        self.result = result
        self.arguments: tuple[object, ...] = ()

    def __getattr__(self, method: str):
        def call(*arguments: object) -> object:
            self.arguments = arguments
            if isinstance(self.result, Exception):
                raise self.result
            return self.result

        return call


def test_an_apache_server_reads_what_we_write(apache):
    empty_results = {
        "enqueueJobs": apache.types.PinLaterEnqueueResponse([]),
        "dequeueJobs": apache.types.PinLaterDequeueResponse({}, {}),
        "lookupJobs": {},
        "getQueueNames": set(),
        "scanJobs": apache.types.PinLaterScanJobsResponse([]),
        "ackJobs": apache.types.PinLaterJobAckResponse([], []),
        "finishJobs": apache.types.PinLaterFinishJobsResponse([]),
        "applyCheckpoints": apache.types.PinLaterCheckpointJobsResponse([]),
    }
    # Apache's library insists on text where PinLater's clients put bytes.
    checkpoint = CheckpointInfo("b", b"text", True, 1, 2, "c", CLAIM)
    requests = {**REQUESTS, Method.CHECKPOINT: CheckpointRequest("mail", [checkpoint])}
    for method, request in requests.items():
        handler = EchoingHandler(empty_results.get(method.value, 0))
        message = codec.encode_call(method, 9, CallContext("a:b"), request)

        answer = apache.serve(message, handler)

        context, *arguments = handler.arguments
        assert context == apache.types.RequestContext("a:b", "")
        again = codec.decode_call(apache.write(method.value, context, *arguments, seqid=9))
        assert again.request == request
        assert codec.peek_seqid(answer) == 9
        codec.decode_reply(method, answer)


def test_an_apache_client_reads_our_results(apache):
    got = {
        method: apache.read(method.value, codec.encode_reply(head_of(method), result))
        for method, result in RESULTS.items()
    }

    assert got[Method.CREATE_QUEUE] is None
    assert got[Method.ENQUEUE].jobDescriptors == RESULTS[Method.ENQUEUE]
    assert got[Method.COUNT] == 17
    assert got[Method.QUEUE_NAMES] == {"mail", "push"}
    dequeued = got[Method.DEQUEUE]
    assert dequeued.jobs == {"mail:s1:p1:1": b"\xff", "mail:s1:p2:1": b""}
    metadata = dequeued.jobMetadata["mail:s1:p1:1"]
    assert (metadata.attemptsAllowed, metadata.attemptsRemaining) == (2, 1)
    assert metadata.claimDescriptor == "jobs1:9010:1700000000000:mailer:web7:12"
    assert metadata.claimTimeoutSeconds == 600
    found = got[Method.LOOKUP]["a"]
    assert (found.jobState, found.attemptsAllowed, found.body) == (3, 3, b"\xff")
    assert got[Method.LOOKUP]["b"].claimDescriptor is None
    scanned = got[Method.SCAN]
    assert scanned.continuation == "token"
    assert [job.jobDescriptor for job in scanned.scannedJobs] == ["mail:s1:p1:1"]


def test_we_read_an_apache_servers_results_and_errors(apache):
    types = apache.types
    call = codec.encode_call(Method.COUNT, 1, CallContext("a:b"), REQUESTS[Method.COUNT])

    counted = apache.serve(call, EchoingHandler(5))
    missing = types.PinLaterException(types.ErrorCode.QUEUE_NOT_FOUND, "no such queue")
    failed = apache.serve(call, EchoingHandler(missing))

    assert codec.decode_reply(Method.COUNT, counted) == 5
    with pytest.raises(QueueNotFound, match=r"^no such queue$"):
        codec.decode_reply(Method.COUNT, failed)


@pytest.mark.parametrize("code", ErrorCode)
def test_an_apache_client_reads_our_errors(apache, code):
    error = codec.error_from_code(code, "why: grüß")

    with pytest.raises(apache.types.PinLaterException) as caught:
        apache.read("createQueue", codec.encode_error(head_of(Method.CREATE_QUEUE), error))

    assert caught.value.errorCode == code
    assert caught.value.message == "why: grüß"
