"""The Client's promises: typed calls, errors by code, and no call carried out twice unawares."""

from __future__ import annotations

import inspect
import threading

import pytest

from pinlaterd.client import AsyncClient, Client
from pinlaterd.errors import (
    ConnectionFailed,
    OutcomeUnknown,
    PinLaterError,
    QueueNotFound,
)
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CheckpointInfo,
    CheckpointRequest,
    ClaimedJob,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    DequeueRequest,
    DequeueResult,
    EnqueueRequest,
    Job,
    JobRecord,
    JobState,
    LookupRequest,
    QueueNamesRequest,
    RetryFailedRequest,
    ScanRequest,
    ScanResult,
)
from pinlaterd.rpc import codec
from tests.client.scripted_server import BreakOff, SayNothing

CLAIMED = ClaimedJob("mail:s1:p1:7", b"body", 3, 2, "h:9:1:me:4", 600)
RECORD = JobRecord("mail:s1:p1:7", JobState.FAILED, 3, 0, "why", 1, 2, 3, "h:9:1:me:4", b"body")


@pytest.fixture
def client(server, connect):
    with connect(port=server.port, source="test:here", timeout_seconds=60) as client:
        yield client


JOB = "mail:s1:p1:7"
DELETE = DeleteJobsRequest("mail", JobState.FAILED, 2, None, 3)
DRY_RUN = DequeueRequest("mail", 5, None, True, 0.5, 70)
ACKS = AckRequest("mail", [AckInfo(JOB, claim_descriptor="h:9:1:me:4")], [])
COUNT = CountRequest("mail", JobState.PENDING, 2, True, "x")
NEW_BODY = CheckpointInfo(JOB, new_body=b"new")
LATER = Job(b"b", 2, 1234, 5, "new")
IDS = ["mail:s1:p1:1", "mail:s1:p2:1"]
# Each with the request that it sends, and the answer to that.
OPERATIONS = [
    (lambda c: c.create_queue("mail"), CreateQueueRequest("mail"), None),
    (lambda c: c.delete_queue("mail", password="no"), DeleteQueueRequest("mail", "no"), None),
    (lambda c: c.enqueue("mail", [b"a", LATER]), EnqueueRequest("mail", [Job(b"a"), LATER]), IDS),
    (
        lambda c: c.dequeue("mail", limit=5, max_wait_ms=70, coverage=0.5, dry_run=True),
        DRY_RUN,
        DequeueResult([CLAIMED]),
    ),
    (
        lambda c: c.dequeue("mail", limit=5, succeeded=[CLAIMED]),
        DequeueRequest("mail", 5, ACKS),
        DequeueResult([]),
    ),
    (
        lambda c: c.ack("mail", failed=[AckInfo(JOB, "why", 50)]),
        AckRequest("mail", [], [AckInfo(JOB, "why", 50)]),
        None,
    ),
    (lambda c: c.checkpoint("mail", [NEW_BODY]), CheckpointRequest("mail", [NEW_BODY]), None),
    (lambda c: c.lookup([JOB], include_body=True), LookupRequest([JOB], True), {JOB: RECORD}),
    (
        lambda c: c.count("mail", JobState.PENDING, priority=2, future=True, body_regex="x"),
        COUNT,
        17,
    ),
    (lambda c: c.queue_names(), QueueNamesRequest(), frozenset({"a"})),
    (
        lambda c: list(c.scan("mail", JobState.FAILED, page_size=7)),
        ScanRequest("mail", JobState.FAILED, limit=7),
        ScanResult([RECORD]),
    ),
    (
        lambda c: c.retry_failed("mail", attempts_to_allow=2, run_after_ms=9, limit=3),
        RetryFailedRequest("mail", 1, 2, 9, 3),
        3,
    ),
    (lambda c: c.delete_jobs("mail", JobState.FAILED, priority=2, limit=3), DELETE, 0),
]


@pytest.mark.parametrize(("call", "request_sent", "answer"), OPERATIONS)
def test_each_operation_is_one_call_and_its_result(server, client, call, request_sent, answer):
    server.reply = lambda _: answer

    assert call(client) == getattr(answer, "jobs", answer)
    [sent] = server.calls
    assert sent.request == request_sent
    assert sent.context.source == "test:here"


@pytest.mark.parametrize(
    ("method", "request_type", "renamed"),
    [
        (Client.dequeue, DequeueRequest, {}),
        (Client.scan, ScanRequest, {"page_size": "limit"}),
        (Client.retry_failed, RetryFailedRequest, {}),
        (Client.delete_jobs, DeleteJobsRequest, {}),
    ],
)
def test_defaults_are_those_of_the_requests(method, request_type, renamed):
    parameters = inspect.signature(method).parameters
    ours = {renamed.get(name, name): each.default for name, each in parameters.items()}
    theirs = request_type._field_defaults
    both = ours.keys() & theirs
    assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_help_shows_an_operation_as_it_is_called(kind):
    shown = str(inspect.signature(kind(port=1).enqueue))

    assert shown == "(queue: 'str', jobs: 'Iterable[Job | bytes]') -> 'list[str]'"
    assert "return their descriptors" in kind.enqueue.__doc__


@pytest.mark.parametrize(
    "option",
    [
        {"timeout_seconds": 0},
        {"timeout_seconds": float("nan")},
        {"connect_timeout_seconds": float("inf")},
        {"max_connections": 0},
    ],
)
def test_numbers_that_make_no_sense_are_refused_at_once(option, connect):
    [name] = option
    with pytest.raises(ValueError, match=f"{name} must be "):
        connect(**option)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda c: c.ack("mail", succeeded=["mail:s1:p1:7"]), r"succeeded\[0\]"),
        (lambda c: c.dequeue("mail", limit=1, max_wait_ms="soon"), "max_wait_ms"),
        (lambda c: c.enqueue("mail", ["text"]), r"jobs\[0\].body: expected bytes, got 'text'"),
    ],
)
def test_what_thrift_cannot_hold_is_refused_by_name_and_not_sent(server, client, call, problem):
    with pytest.raises(PinLaterError, match=problem):
        call(client)
    assert server.calls == []


def test_a_scan_follows_continuations(server, client):
    pages = {"0": ScanResult([RECORD], "next"), "next": ScanResult([RECORD, RECORD])}
    server.reply = lambda call: pages[call.request.continuation]

    assert len(list(client.scan("mail", JobState.FAILED))) == 3
    assert [call.request.continuation for call in server.calls] == ["0", "next"]


def test_the_services_errors_are_raised_by_their_class_and_leave_the_connection_usable(
    server, client
):
    server.reply = lambda call: QueueNotFound(call.request.queue)
    with pytest.raises(QueueNotFound, match="'mail' does not exist"):
        client.enqueue("mail", [b"a"])
    server.reply = lambda _: 3

    assert client.count("mail", JobState.PENDING) == 3
    assert server.connections == 1


def test_an_idle_connection_that_the_server_closed_is_replaced_unseen(server, client, wait_until):
    server.reply = lambda _: ["mail:s1:p1:1"]
    client.enqueue("mail", [b"a"])
    server.close_connections()
    [[idle]] = client._idle.values()
    wait_until(idle.is_stale)

    assert client.enqueue("mail", [b"b"]) == ["mail:s1:p1:1"]
    assert server.connections == 2
    assert len(server.calls) == 2


@pytest.mark.parametrize(
    ("closed", "why"),
    [("server", "cannot connect .* refused"), ("client", "this client was closed")],
)
def test_an_ack_whose_repetition_fails_may_have_been_carried_out(server, client, closed, why):
    def close_and_break(_call):
        {"server": server, "client": client}[closed].close()
        return BreakOff()

    server.reply = close_and_break

    with pytest.raises(OutcomeUnknown, match=f"no answer from .*; {why}"):
        client.ack("mail", succeeded=[CLAIMED])


def test_an_answer_with_another_number_is_no_answer_and_ends_the_connection(server, client):
    def answer_another(call):
        other = call.head._replace(seqid=call.head.seqid + 1)
        message = codec.encode_reply(other, ["mail:s1:p1:1"])
        return len(message).to_bytes(4, "big") + message

    server.reply = answer_another
    with pytest.raises(OutcomeUnknown, match=r"sent is no answer .* belongs to another call"):
        client.enqueue("mail", [b"a"])

    server.reply = lambda _: ["mail:s1:p1:2"]
    assert client.enqueue("mail", [b"a"]) == ["mail:s1:p1:2"]
    assert server.connections == 2


def test_a_call_too_large_for_a_server_that_does_not_read_was_not_carried_out(silent_port, connect):
    with (
        connect(port=silent_port, timeout_seconds=2) as client,
        pytest.raises(ConnectionFailed, match="broke before the call was sent") as caught,
    ):
        client.enqueue("mail", [b"x" * (32 << 20)])
    assert not isinstance(caught.value, OutcomeUnknown)


@pytest.mark.parametrize(
    ("nonsense", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "an HTTP server answers there; the Thrift port is"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "what came back is not framed Thrift"),
        (b"\0\0\0\4nope", "is no answer to enqueueJobs"),
        (
            b"\0\0\0\1x and more than one answer",
            "more came back than one answer|is no answer to enqueueJobs",
        ),
    ],
)
def test_answers_that_are_no_thrift_are_told_apart(server, client, nonsense, told):
    server.reply = lambda _: nonsense

    with pytest.raises(OutcomeUnknown, match=told):
        client.enqueue("mail", [b"a"])


@pytest.mark.parametrize("alone", ["text", "", b"bytes", Job(b"x")])
def test_one_job_where_a_list_belongs_is_refused(server, client, alone):
    with pytest.raises(TypeError, match="jobs: expected a list, got a single"):
        client.enqueue("mail", alone)
    with pytest.raises(TypeError, match="descriptors: expected a list, got a single str"):
        client.lookup("mail:s1:p1:1")
    with pytest.raises(TypeError, match="succeeded: expected a list, got a single ClaimedJob"):
        client.ack("mail", succeeded=CLAIMED)
    assert server.calls == []


def test_an_answer_to_another_call_is_never_taken_for_ones_own(server, connect):
    answer = DequeueResult([CLAIMED])
    server.reply = lambda call: answer if call.request.max_wait_ms else SayNothing()
    with connect(port=server.port, timeout_seconds=1.5) as client:
        with pytest.raises(OutcomeUnknown, match="timed out"):
            client.dequeue("mail", limit=1)
        assert client.dequeue("mail", limit=1, max_wait_ms=30_000) == [CLAIMED]
    assert server.connections == 2


def test_threads_share_a_bounded_number_of_connections(server, connect):
    server.reply = lambda call: call.request.priority
    wrong: list[tuple[int, int]] = []
    with connect(port=server.port, max_connections=2) as client:

        def count(first: int) -> None:
            for priority in range(first, first + 10):
                found = client.count("mail", JobState.PENDING, priority=priority)
                if found != priority:
                    wrong.append((priority, found))

        threads = [threading.Thread(target=count, args=[first]) for first in range(0, 80, 10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert wrong == []
    assert len(server.calls) == 80
    assert server.connections <= 2


def test_when_all_connections_stay_in_use_the_caller_is_told(server, connect):
    holding = threading.Event()
    release = threading.Event()

    def hold(_call):
        holding.set()
        release.wait(120)
        return DequeueResult([])

    server.reply = hold
    with connect(port=server.port, max_connections=1, timeout_seconds=0.2) as client:
        holder = threading.Thread(
            target=lambda: client.dequeue("mail", limit=1, max_wait_ms=100_000), daemon=True
        )
        holder.start()
        assert holding.wait(60)
        with pytest.raises(ConnectionFailed, match="max_connections"):
            client.count("mail", JobState.PENDING)
        release.set()
        holder.join()


def test_a_closed_client_says_so(server, client):
    client.close()
    with pytest.raises(ConnectionFailed, match="closed"):
        client.queue_names()
