"""The fast ways through the codec mean what the general ones mean, whatever the bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.errors import InvalidRequest, PinLaterError, ProtocolError
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    AlikeAcks,
    CallContext,
    ClaimedJob,
    DequeueRequest,
    DequeueResult,
    EnqueueRequest,
    EnqueueWithOptionsResult,
    Job,
    JobOptions,
    Method,
    Payload,
    Request,
    joined,
    runs_of,
)
from pinlaterd.rpc import codec, tuned
from pinlaterd.rpc.answers import DequeueAnswer, columns_of, read_dequeue_result
from pinlaterd.rpc.interface import (
    METHODS,
    CallArguments,
    DequeueMetadata,
    DequeueResponse,
    EnqueueResponse,
    ResultBody,
    Struct,
    Type,
)
from pinlaterd.rpc.peek import UNUSUAL, read_call_head, read_message_head
from pinlaterd.rpc.structs import UNLIMITED
from tests.rpc.strategies import Shape, calls
from tests.rpc.test_codec import CONTEXT, REQUESTS, RESULTS, head_of
from tests.rpc.thrift_bytes import Field, write_message

HOT = [Method.ENQUEUE, Method.DEQUEUE, Method.ACK]
USUAL = Shape(in_order=True, unknown=False, wrong=False)
UNORDERED = Shape(in_order=False, unknown=True, wrong=False)
WRONG = Shape(in_order=True, unknown=True, wrong=True)

FAST: dict[Method, Any] = {
    Method.ENQUEUE: tuned.read_enqueue,
    Method.DEQUEUE: tuned.read_dequeue,
    Method.ACK: tuned.read_ack,
    Method.ACK_JOBS: tuned.read_ack,
}
FORMS = st.booleans()


def outcome(read: Any, *arguments: Any) -> Any:
    """What it returns, or the type and message of the error it raises on purpose."""
    try:
        return read(*arguments)
    except (ProtocolError, PinLaterError) as error:
        return type(error), str(error)


def general(message: bytes) -> codec.Call:
    head, method, at = read_call_head(message)
    assert method is not None
    return codec._decode_arguments(head, method, message, at)


def normal(value: Any) -> Any:
    """NaN is not equal to itself, but its text is."""
    return repr(value)


@given(calls(HOT, USUAL), FORMS)
def test_what_is_usual_is_read_fast_and_alike(call, strict):
    name, fields = call
    message = write_message(name, fields, strict=strict)
    head, _, at = read_call_head(message)

    context, request = FAST[Method(name)](message, at, UNLIMITED)

    assert normal(codec.Call(head, context, request)) == normal(general(message))


ANY = st.one_of(calls(list(Method), UNORDERED), calls(list(Method), WRONG))


@given(ANY, FORMS)
def test_what_is_unusual_or_wrong_is_read_alike_and_is_the_callers_to_mend(call, strict):
    message = write_message(*call, strict=strict)

    found = outcome(codec.decode_call, message)

    assert normal(found) == normal(outcome(general, message))
    assert isinstance(found, codec.Call) or found[0] is not ProtocolError, found


SLICED = [Method.ENQUEUE]


def in_slices(message: bytes) -> Request:
    """What is decoded two elements at a time, put together; whole where that is not possible."""
    try:
        return _in_slices(message)
    except UNUSUAL:
        return whole(message)


def _in_slices(message: bytes) -> Request:
    sizes: list[int] = []

    def in_pairs(jobs: int) -> list[int]:
        sizes[:] = [2] * (jobs // 2) + [1] * (jobs % 2)
        return sizes

    parts = list(tuned.enqueue_parts(message, UNLIMITED, in_pairs))
    requests: list[Any] = [codec.decode_call(part.message).request for part in parts]
    assert [len(request.jobs) for request in requests] == sizes
    assert [part.jobs for part in parts] == sizes
    jobs = [job for request in requests for job in request.jobs]
    return EnqueueRequest(requests[0].queue if parts else "", jobs)


def whole(message: bytes) -> Request:
    request: Any = general(message).request
    return EnqueueRequest(request.queue if request.jobs else "", list(request.jobs))


@given(calls(SLICED, USUAL), FORMS)
def test_an_enqueue_that_is_cut_has_the_jobs_that_it_had(call, strict):
    message = write_message(*call, strict=strict)
    jobs = whole(message).jobs  # type: ignore[union-attr]

    cut = tuned.cut_enqueue(message, UNLIMITED, {})
    places = range(len(jobs))[::-2]

    assert list(cut.request.jobs) == list(jobs)
    part: Any = codec.decode_call(cut.part(places)).request
    assert (part.queue, list(part.jobs)) == (cut.request.queue, [jobs[place] for place in places])


@given(st.one_of(calls(SLICED, USUAL), calls(SLICED, UNORDERED), calls(SLICED, WRONG)), FORMS)
def test_what_is_decoded_in_slices_is_what_is_decoded_whole(call, strict):
    message = write_message(*call, strict=strict)

    assert normal(outcome(in_slices, message)) == normal(outcome(whole, message))


@given(calls(HOT, USUAL), st.data())
def test_a_message_that_ends_early_is_no_message(call, data):
    message = write_message(*call)
    end = data.draw(st.integers(0, len(message) - 1))

    assert outcome(codec.decode_call, message[:end])[0] is ProtocolError


@given(st.one_of(calls(list(Method), USUAL), calls(list(Method), WRONG)), st.data())
def test_changed_bytes_mean_the_same_both_ways_or_nothing(call, data):
    message = bytearray(write_message(*call))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.sampled_from([0, 1, 2, 11, 12, 15, 127, 128, 255]))
    changed = bytes(message)

    found = outcome(codec.decode_call, changed)

    if isinstance(found, codec.Call):
        assert normal(found) == normal(general(changed))
    elif found[0] is not ProtocolError and "there is no method" not in found[1]:
        assert found == outcome(general, changed)


@st.composite
def acks_that_are_nearly_alike(draw: st.DrawFn) -> bytes:
    """A call whose acks differ in their jobs' numbers, and perhaps in one other byte."""
    head = draw(st.sampled_from(["mail:s1:p1:", "x", ":", "mail:s1:p1:0", "é:"]))
    digits = draw(st.integers(1, 7))
    numbers = draw(st.lists(st.integers(0, 10**digits - 1), min_size=2, max_size=6))
    rest = draw(st.tuples(st.sampled_from(["", "ok"]), st.integers(0, 9), st.none() | st.just("c")))
    acks = [AckInfo(f"{head}{number:0{digits}}", *rest) for number in numbers]
    request = AckRequest("mail", acks, draw(st.sampled_from([[], acks])))
    message = bytearray(codec.encode_call(Method.ACK, 1, CallContext("a:b"), request))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(40, len(message) - 1))
        message[at] = draw(
            st.sampled_from([0, 1, 11, 48, 49, 58, 255, len(head), message[at] + 1 & 255])
        )
    return bytes(message)


@given(acks_that_are_nearly_alike())
def test_acks_that_are_nearly_alike_are_read_alike(message):
    found = outcome(codec.decode_call, message)

    assert normal(found) == normal(outcome(general, message))


def test_acks_that_are_shorter_and_longer_than_they_tell_are_read_alike():
    """Together they have as many bytes as they tell."""
    acks = [AckInfo(f"mail:s1:p1:{number}") for number in (10, 11, 12)]
    message = codec.encode_call(Method.ACK, 1, CallContext("a:b"), AckRequest("mail", acks))

    changed = message.replace(b":11", b":1").replace(b":12", b":122")

    assert outcome(codec.decode_call, changed) == outcome(general, changed)


def test_jobs_that_differ_in_all_are_read_as_they_were_written():
    jobs = [Job(b"%d" % number, number, number, number, "x" * number) for number in range(1, 5)]
    jobs += [Job(b"plain"), *jobs, Job(b"plain")]
    request = EnqueueRequest("mail", jobs)

    assert codec.decode_call(codec.encode_call(Method.ENQUEUE, 1, CONTEXT, request))[2] == request


def test_acks_that_are_alike_are_a_sequence_like_any_other():
    infos = [AckInfo(f"mail:s1:p1:{number}", "ok", 5, "c") for number in (10, 11, 12)]
    message = codec.encode_call(Method.ACK, 1, CallContext("a:b"), AckRequest("mail", infos))

    read = codec.decode_call(message).request

    assert isinstance(read, AckRequest)
    assert isinstance(read.succeeded, AlikeAcks)
    assert read.succeeded == infos
    assert list(read.succeeded[1:]) == infos[1:]
    assert read.succeeded[-1] == infos[-1]
    assert read.succeeded != infos[1:]


@given(st.binary(max_size=200))
def test_any_bytes_are_answered_or_refused(message):
    found = outcome(codec.decode_call, message)

    assert isinstance(found, codec.Call) or issubclass(found[0], (ProtocolError, InvalidRequest))


# --- writing --------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8"), max_size=200)
I8 = st.integers(-128, 127)
I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
CONTEXTS = st.builds(CallContext, TEXT, TEXT)
FEW_TEXTS = st.sampled_from(["", "é", "x" * 130])
TIMES = st.none() | I64
OPTIONS = st.none() | st.builds(JobOptions, TEXT, TIMES, st.booleans(), TIMES, TIMES)
# Neighbours in a list are often alike, but for what differs from job to job.
JOBS = st.one_of(
    st.builds(Job, st.binary(max_size=20), I8, st.none() | I64, I32, TEXT, OPTIONS),
    st.builds(
        Job,
        st.binary(max_size=9),
        st.just(1),
        st.sampled_from([None, 5]),
        st.just(2),
        FEW_TEXTS,
        OPTIONS,
    ),
)
ACKS = st.one_of(
    st.builds(AckInfo, TEXT, TEXT, I64, st.none() | TEXT),
    st.builds(AckInfo, FEW_TEXTS, FEW_TEXTS, st.just(0), st.none() | FEW_TEXTS),
)
ACK_REQUESTS = st.builds(AckRequest, TEXT, st.lists(ACKS, max_size=4), st.lists(ACKS, max_size=4))
HOT_REQUESTS = st.one_of(
    st.builds(EnqueueRequest, TEXT, st.lists(JOBS, max_size=4)),
    ACK_REQUESTS,
    st.builds(
        DequeueRequest,
        TEXT,
        I32,
        st.none() | ACK_REQUESTS,
        st.booleans(),
        st.floats(allow_nan=False),
        I32,
        st.none() | I32,
    ),
)
METHOD_OF = {EnqueueRequest: Method.ENQUEUE, AckRequest: Method.ACK, DequeueRequest: Method.DEQUEUE}


def as_fields(declared: Struct, value: Any) -> list[Field]:
    """A value of the model as the tree that an independent writer takes."""
    return [
        Field(field.id, field.type.code, as_tree(field.type, given))
        for field in declared.fields
        if (given := given_in(value, declared, field)) is not None
    ]


def given_in(value: Any, declared: Struct, field: Any) -> Any:
    if field.place < declared.size:
        return value[field.place]
    usual = declared.no_options[field.place - declared.size]
    given = getattr(value.options, field.key, usual)
    return None if given == usual else given


def as_tree(declared: Type, value: Any) -> Any:
    if declared.struct is not None:
        return as_fields(declared.struct, value)
    if declared.key is not None and declared.element is not None:
        key, element = declared.key, declared.element
        pairs = [(as_tree(key, name), as_tree(element, each)) for name, each in value.items()]
        return key.code, element.code, pairs
    if declared.element is not None:
        return declared.element.code, [as_tree(declared.element, each) for each in value]
    return value.encode() if isinstance(value, str) else value


@given(CONTEXTS, HOT_REQUESTS)
def test_a_request_is_written_byte_for_byte_alike(context, request_):
    method = METHOD_OF[type(request_)]
    message = codec.encode_call(method, 7, context, request_)

    arguments = as_fields(METHODS[method].arguments, CallArguments(context, request_))

    assert message == write_message(method.value, arguments)
    assert codec.decode_call(message)[1:] == (context, request_)


@pytest.mark.parametrize("method", Method)
def test_every_request_is_written_as_the_interface_says_and_read_back(method):
    request: Any = REQUESTS[method]
    arguments = CallArguments(CONTEXT, request)
    if method in {Method.CREATE_QUEUE, Method.DELETE_QUEUE}:
        arguments = CallArguments(CONTEXT, None, *request)

    message = codec.encode_call(method, 7, CONTEXT, request)

    declared = METHODS[method].arguments
    assert message == write_message(method.value, as_fields(declared, arguments))
    call = codec.decode_call(message)
    assert type(call.request) is type(request)
    assert call == (head_of(method), CONTEXT, request)


@pytest.mark.parametrize("method", sorted(RESULTS.keys() - {Method.ENQUEUE, Method.DEQUEUE}))
def test_every_result_is_written_as_the_interface_says(method):
    reply = codec.encode_reply(codec.Head(method.value, 1, False, True), RESULTS[method])

    body = as_fields(METHODS[method].result, ResultBody(RESULTS[method]))
    assert reply == write_message(method.value, body, kind=2, seqid=1)


@given(st.lists(TEXT, max_size=5))
def test_descriptors_are_written_and_read_alike(descriptors):
    reply = codec.encode_reply(codec.Head("enqueueJobs", 1, False, True), descriptors)

    body = as_fields(METHODS[Method.ENQUEUE].result, ResultBody(EnqueueResponse(descriptors)))

    at = read_message_head(reply).at
    assert reply == write_message("enqueueJobs", body, kind=2, seqid=1)
    assert codec.decode_reply(Method.ENQUEUE, reply) == descriptors
    assert codec._decode_result(Method.ENQUEUE, reply, at) == descriptors


@given(st.lists(st.tuples(TEXT, st.booleans()), max_size=5), st.booleans())
def test_an_answer_with_keys_that_is_cut_is_joined_again(jobs, has_more):
    """Also where a newer shard tells more of the jobs."""
    result = EnqueueWithOptionsResult([name for name, _ in jobs], [existed for _, existed in jobs])
    head = codec.Head("enqueueJobs", 1, False, True)
    reply = codec.encode_reply(head, result)
    new_field = b"\x02\x01\x2c\x01" if has_more else b""

    cut = codec.cut_keyed(reply[:-2] + new_field + reply[-2:])

    assert codec.encode_keyed(head, cut) == reply
    plain = codec.cut_keyed(codec.encode_reply(head, result.descriptors))
    assert plain == (cut.descriptors, bytes(len(jobs)))


KEYS = st.sampled_from([None, "", "a", "b"])


@given(st.lists(st.tuples(st.sampled_from([b"", b"x"]), st.integers(1, 2), KEYS), max_size=6))
def test_jobs_that_are_alike_are_those_of_a_list(jobs):
    """As they are read, cut, put together and divided into runs."""
    whole = [Job(body, p, options=None if k is None else JobOptions(k)) for body, p, k in jobs]
    message = codec.encode_call(Method.ENQUEUE, 1, CONTEXT, EnqueueRequest("mail", whole))

    read: Any = codec.decode_call(message).request

    assert list(read.jobs) == whole
    assert [read.jobs[at] for at in range(len(whole))] == whole
    assert list(read.jobs[1:]) == whole[1:]
    assert list(joined([read.jobs, read.jobs])) == whole * 2
    bodies = [(job.priority, body) for job, bodies in runs_of(read.jobs) for body in bodies]
    assert bodies == [(job.priority, job.body) for job in whole]


CLAIMED = st.builds(ClaimedJob, TEXT, st.binary(max_size=20), I32, I32, TEXT, I32)


@given(st.lists(CLAIMED, max_size=5, unique_by=lambda job: job.descriptor))
def test_claimed_jobs_are_written_and_read_alike(jobs):
    result = DequeueResult(jobs)
    reply = codec.encode_reply(codec.Head("dequeueJobs", 1, False, True), result)

    response = DequeueResponse(
        {job.descriptor: job.body for job in jobs},
        {job.descriptor: DequeueMetadata(*job[2:]) for job in jobs},
    )
    body = as_fields(METHODS[Method.DEQUEUE].result, ResultBody(response))

    at = read_message_head(reply).at
    assert reply == write_message("dequeueJobs", body, kind=2, seqid=1)
    assert read_dequeue_result(reply, at) == result
    assert codec._decode_result(Method.DEQUEUE, reply, at) == result


PREFIXES = st.sampled_from(["mail:s1:p1:", "50%:s1:p1:", "k\xf6nig:s1:p2:"])
PAYLOADS = st.builds(Payload, st.binary(max_size=3), st.integers(1, 2), st.integers(0, 2))


@given(PREFIXES, st.lists(PAYLOADS, min_size=1, max_size=5), st.integers(0, 12), st.integers(0, 12))
def test_jobs_whose_numbers_count_up_are_written_alike(prefix, payloads, first_id, first_claim):
    """Also where they do not have equally many digits."""
    local_ids = range(first_id, first_id + len(payloads))
    counted, plain = DequeueAnswer(), DequeueAnswer()

    columns = columns_of(payloads)
    counted.add_counted(prefix, local_ids, columns, "h:1:%d:", first_claim, 600)

    descriptors = [f"{prefix}{local_id}" for local_id in local_ids]
    claims = [f"h:1:%d:{first_claim + nth}" for nth in range(len(payloads))]
    plain.add(descriptors, columns, claims, 600)
    assert counted.encode() == plain.encode()
    assert len(counted) == len(plain)


@given(st.lists(CLAIMED, max_size=3), st.data())
def test_changed_answers_mean_the_same_both_ways_or_nothing(jobs, data):
    reply = bytearray(
        codec.encode_reply(codec.Head("dequeueJobs", 1, False, True), DequeueResult(jobs))
    )
    begin = read_message_head(bytes(reply)).at
    at = data.draw(st.integers(begin, len(reply) - 1))
    reply[at] = data.draw(st.integers(0, 255))
    changed = bytes(reply)

    try:
        fast = read_dequeue_result(changed, begin)
    except UNUSUAL:
        return
    assert fast == codec._decode_result(Method.DEQUEUE, changed, begin)
