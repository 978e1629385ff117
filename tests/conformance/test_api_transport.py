"""SPEC section 2, transport: how calls travel, and what bytes may not do.

The time limit of a call is tested in test_api_shard_down.py; compact in full in tests/rpc and
tests/clients.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.Thrift import TApplicationException, TMessageType, TType
from thrift.transport import TTransport

from tests.conformance.api import (
    IN_PROGRESS,
    MAX_CALLS_PER_CONNECTION,
    MAX_FRAME_BYTES,
    Client,
    Deployment,
    Interface,
    Refused,
    one_engine,
)
from tests.conftest import WaitUntil

pytestmark = pytest.mark.service

NOT_UTF8 = b"caf\xe9"
ALL_BYTES = bytes(range(256))


@one_engine
@pytest.mark.parametrize(
    "form",
    [{}, {"strict": False}, {"framed": False}, {"compact": True}],
    ids=["framed strict", "framed non-strict", "unframed strict", "framed compact"],
)
def test_kinds_of_protocol(service: Deployment, queue, form):
    with service.client(**form) as client:
        (descriptor,) = client.enqueue(queue, ALL_BYTES)
        (claimed,) = client.dequeue(queue).values()
        client.ack(queue, succeeded=[descriptor])
        with pytest.raises(Refused, match="QUEUE_NOT_FOUND"):
            client.enqueue("nowhere", b"")

        assert claimed.body == ALL_BYTES
        assert queue in client.names()


@one_engine
def test_pipelined_calls_are_answered_in_order(service: Deployment, api: Interface, client, queue):
    calls = [
        ("enqueueJobs", client.enqueue_request(queue, *[b"job"] * 50)),
        ("getQueueNames",),
        ("no_such_method",),
        ("dequeueJobs", client.dequeue_request(queue, 5)),
        ("createQueue", queue),
    ]
    rounds = 20

    with service.wire() as wire:
        wire.send(
            *(
                api.message(*call, seqid=number * len(calls) + index)
                for number in range(rounds)
                for index, call in enumerate(calls)
            )
        )
        answers = [wire.receive() for _ in range(rounds * len(calls))]

    assert [answer.seqid for answer in answers] == list(range(rounds * len(calls)))
    assert [answer.method for answer in answers] == [call[0] for call in calls] * rounds


@one_engine
def test_more_pipelined_calls_than_are_worked_on_at_a_time(service: Deployment, api: Interface):
    calls = MAX_CALLS_PER_CONNECTION * 5
    with service.wire() as wire:
        wire.send(*(api.message("getQueueNames", seqid=number) for number in range(calls)))

        assert [wire.receive().seqid for _ in range(calls)] == list(range(calls))


@one_engine
def test_slow_call_is_not_overtaken(service: Deployment, api: Interface, client, queue):
    with service.wire() as wire:
        waiting = client.dequeue_request(queue, 1, maxWaitMillis=60_000)
        wire.send(
            api.message("dequeueJobs", waiting, seqid=1), api.message("getQueueNames", seqid=2)
        )

        assert wire.silent()
        client.enqueue(queue, b"wake up")

        assert [wire.receive().seqid for _ in range(2)] == [1, 2]


@one_engine
@pytest.mark.parametrize("method", ["no_such_method", "__can__finagle__trace__v3__", ""])
def test_unknown_method(service: Deployment, api: Interface, method):
    with service.wire() as wire:
        wire.send(api.message(method, seqid=7))
        answer = wire.receive()
        wire.send(api.message("getQueueNames", seqid=8))

        assert (answer.method, answer.kind, answer.seqid) == (method, TMessageType.EXCEPTION, 7)
        assert answer.value.type == TApplicationException.UNKNOWN_METHOD
        assert wire.receive().seqid == 8


@one_engine
def test_unknown_method_unframed(service: Deployment, api: Interface):
    """Where its end is can only be known by reading its arguments."""
    with service.wire() as wire:
        wire.send_bytes(api.message("__can__finagle__trace__v3__") + api.message("getQueueNames"))
        replies = wire.read_unframed(2)

    assert replies[0].value.type == TApplicationException.UNKNOWN_METHOD
    assert isinstance(replies[1].value, set)


@one_engine
def test_oneway_call_gets_no_answer(service: Deployment, api: Interface, client, queue):
    request = client.enqueue_request(queue, b"sent one way")
    with service.wire() as wire:
        wire.send(
            api.message("enqueueJobs", request, seqid=1, kind=TMessageType.ONEWAY),
            api.message("no_such_method", seqid=2, kind=TMessageType.ONEWAY),
            api.message(
                "enqueueJobs", client.enqueue_request("nowhere"), seqid=3, kind=TMessageType.ONEWAY
            ),
            api.message("getQueueNames", seqid=4),
        )

        assert wire.receive().seqid == 4
        assert wire.silent()
    assert client.count(queue) == 1


def test_oneway_dequeue_claims_nothing(
    service: Deployment, api: Interface, client: Client, queue, wait_until: WaitUntil
):
    """Nobody can be given the jobs, so that they are PENDING with all their attempts."""
    (descriptor,) = client.enqueue(queue, b"job")
    request = client.dequeue_request(queue, 10)
    with service.wire() as wire:
        wire.send(
            api.message("dequeueJobs", request, kind=TMessageType.ONEWAY),
            api.message("getQueueNames", seqid=2),
        )
        assert wire.receive().seqid == 2

    taken = {}
    wait_until(lambda: taken.update(client.dequeue(queue, 10)) or descriptor in taken)
    assert taken[descriptor].remaining == 2


@one_engine
def test_frame_beyond_the_limit_closes_its_connection_only(
    service: Deployment, api: Interface, client: Client, queue, wait_until: WaitUntil
):
    complaints = service.logs().count("max_frame_bytes")
    with service.wire() as wire:
        wire.send_bytes(struct.pack(">i", MAX_FRAME_BYTES + 1))

        assert wire.ended()
    assert queue in client.names()
    wait_until(lambda: service.logs().count("max_frame_bytes") > complaints)


@one_engine
def test_frame_in_pieces(service: Deployment, api: Interface, queue):
    message = api.message("getQueueNames", seqid=3)
    with service.wire() as wire:
        for byte in struct.pack(">i", len(message)) + message:
            wire.send_bytes(bytes([byte]))

        assert wire.receive().seqid == 3


def write_call(method: str, write_arguments: Callable[[TBinaryProtocol], None]) -> bytes:
    """A call whose arguments are written by hand."""
    buffer = TTransport.TMemoryBuffer()
    protocol = TBinaryProtocol(buffer)
    protocol.writeMessageBegin(method, TMessageType.CALL, 1)
    write_arguments(protocol)
    protocol.writeFieldStop()
    message: bytes = buffer.getvalue()
    return message


def write_context(protocol: TBinaryProtocol) -> None:
    protocol.writeFieldBegin("context", TType.STRUCT, 1)
    protocol.writeFieldBegin("source", TType.STRING, 1)
    protocol.writeString("by hand")
    protocol.writeFieldStop()


def write_unknown_fields(protocol: TBinaryProtocol) -> None:
    """One of each kind of type, as a newer client might send."""
    protocol.writeFieldBegin("later", TType.MAP, 300)
    protocol.writeMapBegin(TType.STRING, TType.LIST, 1)
    protocol.writeString("key")
    protocol.writeListBegin(TType.I64, 2)
    protocol.writeI64(1)
    protocol.writeI64(2)
    protocol.writeFieldBegin("later", TType.STRUCT, 301)
    protocol.writeFieldBegin("inner", TType.DOUBLE, 1)
    protocol.writeDouble(0.5)
    protocol.writeFieldStop()
    protocol.writeFieldBegin("later", TType.BOOL, 302)
    protocol.writeBool(True)


@one_engine
def test_unknown_fields_are_skipped(service: Deployment, client: Client, queue):
    def arguments(protocol: TBinaryProtocol) -> None:
        write_unknown_fields(protocol)
        write_context(protocol)
        protocol.writeFieldBegin("request", TType.STRUCT, 2)
        write_unknown_fields(protocol)
        protocol.writeFieldBegin("jobs", TType.LIST, 2)
        protocol.writeListBegin(TType.STRUCT, 1)
        write_unknown_fields(protocol)
        protocol.writeFieldBegin("body", TType.STRING, 1)
        protocol.writeBinary(b"from the future")
        protocol.writeFieldStop()
        protocol.writeFieldBegin("queueName", TType.STRING, 1)
        protocol.writeString(queue)
        protocol.writeFieldStop()

    with service.wire() as wire:
        wire.send(write_call("enqueueJobs", arguments))
        (descriptor,) = wire.receive().value.jobDescriptors

    assert client.info(descriptor, body=True).body == b"from the future"


@one_engine
@pytest.mark.parametrize(
    ("method", "missing", "code"),
    [
        ("enqueueJobs", "request", "ENQUEUE_REJECTED"),
        ("dequeueJobs", "request", "UNKNOWN"),
        ("createQueue", "name", "UNKNOWN"),
        ("getJobCount", "request", "UNKNOWN"),
    ],
)
def test_missing_argument_is_named(service: Deployment, method, missing, code):
    with service.wire() as wire:
        wire.send(write_call(method, write_context))
        refused = wire.receive().value

    assert refused.code == code
    assert refused.message.startswith("invalid request: ")
    assert missing in refused.message


@one_engine
def test_missing_field_is_named(service: Deployment, api: Interface, client: Client, queue):
    jobs = [client.job(b"good"), api.types.PinLaterJob(priority=2)]
    with service.wire() as wire:
        wire.send(api.message("enqueueJobs", client.enqueue_request(queue, *jobs)))
        wire.send(api.message("lookupJobs", api.types.PinLaterLookupJobRequest()))
        in_enqueue, in_lookup = wire.receive().value, wire.receive().value

    assert in_enqueue.code == "ENQUEUE_REJECTED"
    assert in_enqueue.message.startswith("invalid request: ")
    assert "body" in in_enqueue.message
    assert in_lookup.code == "UNKNOWN"
    assert in_lookup.message.startswith("invalid request: ")
    assert "jobDescriptors" in in_lookup.message
    assert client.count(queue) == 0


@one_engine
@pytest.mark.parametrize("state", [4, -1, 2**31 - 1])
def test_unknown_state_is_an_invalid_request(client: Client, queue, state):
    for call in (client.count, client.scan, client.delete_jobs):
        with pytest.raises(Refused, match=r"^UNKNOWN: invalid request: .*jobState"):
            call(queue, state)


@one_engine
def test_text_that_is_not_utf8_is_an_invalid_enqueue(service: Deployment, client: Client, queue):
    requests = [
        (client, NOT_UTF8, b"job"),
        (client, queue, client.job(b"job", customStatus=NOT_UTF8)),
    ]
    with service.client(source=NOT_UTF8) as odd_client:
        for caller, name, job in [*requests, (odd_client, queue, b"job")]:
            with pytest.raises(Refused, match=r"^ENQUEUE_REJECTED: invalid request: "):
                caller.enqueue(name, job)

    assert client.count(queue) == 0


@one_engine
def test_text_that_is_not_utf8_is_an_invalid_request(service: Deployment, client: Client, queue):
    (descriptor,) = client.enqueue(queue, b"job")
    client.dequeue(queue)
    calls: list[Callable[[], object]] = [
        lambda: client.ack(queue, [client.ack_info(descriptor, appendCustomStatus=NOT_UTF8)]),
        lambda: client.ack(queue, [client.ack_info(NOT_UTF8)]),
        lambda: client.checkpoint(
            queue, client.checkpoint_of(descriptor, prependCustomStatus=NOT_UTF8)
        ),
        lambda: client.lookup(NOT_UTF8),
        lambda: client.count(queue, bodyRegexToMatch=NOT_UTF8),
        lambda: client.scan(queue, continuation=NOT_UTF8),
    ]

    for call in calls:
        with pytest.raises(Refused, match=r"^UNKNOWN: invalid request: "):
            call()
    assert client.info(descriptor).jobState == IN_PROGRESS
    assert client.names()


def test_bodies_are_raw_bytes(client: Client, queue):
    (descriptor,) = client.enqueue(queue, ALL_BYTES + NOT_UTF8)
    (claimed,) = client.dequeue(queue).values()
    client.checkpoint(queue, client.checkpoint_of(descriptor, newBody=NOT_UTF8 + ALL_BYTES))

    assert claimed.body == ALL_BYTES + NOT_UTF8
    assert client.info(descriptor, body=True).body == NOT_UTF8 + ALL_BYTES
