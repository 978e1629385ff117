"""Thrift messages to and from `pinlaterd.model`: what others use of this package's codec.

    peek            a call's way, from its first bytes
    decode_call     a call -> Call(head, context, request)
    encode_call     a request -> a call, for shards and servers
    encode_reply, encode_error, encode_unknown_method    the answer to a call, in the call's form
    encode_enqueued    an enqueue's answer, of jobs whose descriptors differ in their numbers
    cut_keyed, encode_keyed    an enqueue's answer in pieces, one for each job
    DequeueAnswer, encode_dequeued    a dequeue's answer, as its jobs come in
    decode_reply    an answer -> its result, or the error that it carries, raised
    peek_error      the code of the error that an answer carries, without decoding it
    peek_jobs       how many jobs an answer to a dequeue carries
    peek_seqid      which call a message belongs to

Messages are TBinaryProtocol without transport framing; one call or one answer each. Bytes that
are no well-formed message raise ProtocolError; a well-formed one that is not what the interface
says raises InvalidRequest, or InvalidEnqueue in an enqueue. Ranges are not checked here: types are.

Enqueues, dequeues, acks and their answers are read in two ways that mean the same, a tuned one for
the usual layout (`tuned`) and the general one for all others; tests compare them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple, NoReturn, cast

from pinlaterd.errors import (
    EnqueuedInPart,
    ErrorCode,
    InvalidEnqueue,
    InvalidRequest,
    NoHealthyShards,
    Overloaded,
    PinLaterError,
    ProtocolError,
    RequestError,
    ShardConnectionFailed,
)
from pinlaterd.model import (
    NO_DEFAULTS,
    QUEUE_DEFAULT,
    CallContext,
    ClaimedJob,
    DequeueResult,
    EnqueueRequest,
    EnqueueWithOptionsResult,
    JobDefaults,
    Method,
    Payload,
    Request,
    Result,
    new_record,
)
from pinlaterd.rpc import tuned
from pinlaterd.rpc.answers import (
    DESCRIPTORS,
    CutEnqueued,
    DequeueAnswer,
    columns_of,
    count_dequeued,
    counted_text,
    cut_enqueued,
    join_enqueued,
    read_dequeue_result,
)
from pinlaterd.rpc.interface import (
    APPLICATION_ERROR,
    I32,
    METHODS,
    STRUCTS,
    ApplicationErrorBody,
    CallArguments,
    DequeueMetadata,
    DequeueResponse,
    ErrorBody,
    MessageType,
    ResultBody,
    Struct,
    TType,
    Type,
    pack_i32,
    pack_u32,
)
from pinlaterd.rpc.peek import (
    CALL_HEADS,
    UNUSUAL,
    Head,
    Peek,
    message_head,
    peek,
    read_call_head,
    read_message_head,
    reply_head,
)
from pinlaterd.rpc.structs import (
    UNFIT,
    UNLIMITED,
    Mismatch,
    problem,
    read_struct,
    sized,
    struct_writer,
    texts_writer,
)

__all__ = [
    "CutEnqueued",
    "DequeueAnswer",
    "Head",
    "Peek",
    "peek",
]  # of other modules, for users of this one


class Call(NamedTuple):
    head: Head
    context: CallContext
    request: Request


_TUNED_CALLS: Final[Mapping[Method, Callable[[bytes, int, int], tuple[CallContext, Request]]]] = {
    Method.DEQUEUE: tuned.read_dequeue,
    Method.ACK: tuned.read_ack,
    Method.ACK_JOBS: tuned.read_ack,
}
_ENQUEUE: Final = Method.ENQUEUE  # to look a member up costs as much as a call
# The arguments of a call behind the context, which is the first of all.
_WRITE_REQUEST: Final = {
    method: struct_writer(Struct(method, CallArguments, structs.arguments.fields[1:]))
    for method, structs in METHODS.items()
}
_WRITE_RESULT: Final = {
    method.value: struct_writer(structs.result) for method, structs in METHODS.items()
}
_write_descriptors: Final = texts_writer(DESCRIPTORS)
_write_context: Final = struct_writer(STRUCTS["RequestContext"])
_write_error: Final = struct_writer(STRUCTS["PinLaterException"])
_write_application_error: Final = struct_writer(APPLICATION_ERROR)
# Longer contexts are not remembered.
_USUAL_CONTEXT_CHARS: Final = 200
_UNKNOWN_METHOD: Final = 1  # of the types of a TApplicationException

_ERROR_FIELD: Final = b"\x0c\x00\x01"
_ERROR_CODE: Final = _ERROR_FIELD + b"\x08\x00\x01"


# --- calls ----------------------------------------------------------------------------------


def decode_call(
    message: bytes,
    most_elements: int = UNLIMITED,
    job_defaults: Mapping[str, JobDefaults] = NO_DEFAULTS,
) -> Call:
    """Decode a call; `job_defaults`: of the queues where jobs have others than usual.

    Raises ProtocolError, InvalidRequest or InvalidEnqueue; one of the latter two for a list of
    more than `most_elements`, at its head, before any of them is decoded."""
    head, method, at = read_call_head(message)
    if method is None:
        raise InvalidRequest(f"there is no method {head.method_name[:80]!r}")
    read = _TUNED_CALLS.get(method)
    request: Request
    try:
        if method is _ENQUEUE:
            context, request = tuned.read_enqueue(message, at, most_elements, job_defaults)
            return new_record(Call, (head, context, request))
        if read is not None:
            context, request = read(message, at, most_elements)
            return new_record(Call, (head, context, request))
    except UNUSUAL:
        pass
    return _decode_arguments(head, method, message, at, most_elements, job_defaults)


def _with_defaults(
    request: EnqueueRequest, job_defaults: Mapping[str, JobDefaults]
) -> EnqueueRequest:
    """Give the jobs what they do not say."""
    priority, attempts = job_defaults.get(request.queue, JobDefaults())
    jobs = [
        job._replace(
            priority=priority if job.priority is QUEUE_DEFAULT else job.priority,
            attempts_allowed=(
                attempts if job.attempts_allowed is QUEUE_DEFAULT else job.attempts_allowed
            ),
        )
        for job in request.jobs
    ]
    return request._replace(jobs=jobs)


def _decode_arguments(
    head: Head,
    method: Method,
    message: bytes,
    at: int,
    most_elements: int = UNLIMITED,
    job_defaults: Mapping[str, JobDefaults] = NO_DEFAULTS,
) -> Call:
    """Decode in the general way, whatever the layout."""
    try:
        arguments: CallArguments = read_struct(
            message, at, METHODS[method].arguments, most_elements
        )
    except Mismatch as mismatch:
        raise _invalid(method)(f"{method.value}: {mismatch}") from None
    request, make = arguments.request, METHODS[method].fields_of
    if make is not None:
        request = make(*[getattr(arguments, key) for key in make._fields])
    if method is _ENQUEUE:
        request = _with_defaults(request, job_defaults)
    return Call(head, arguments.context, request)


def encode_call(method: Method, seqid: int, context: CallContext, request: Request) -> bytes:
    """Raises InvalidRequest, InvalidEnqueue for an enqueue, for what Thrift's types cannot hold."""
    try:
        usual_context = len(context.source) + len(context.request_id) <= _USUAL_CONTEXT_CHARS
        written = (_remembered_context if usual_context else _context)(context)
        parts = [CALL_HEADS[method], pack_i32(seqid), written]
        _WRITE_REQUEST[method](parts, _as_arguments(method, context, request))
        return b"".join(parts)
    except UNFIT as error:
        arguments = Type(TType.STRUCT, method, struct=METHODS[method].arguments)
        found = problem(arguments, _as_arguments(method, context, request))
        if found is None:
            raise
        raise _invalid(method)(f"{method.value}: {found}") from error


def _context(context: CallContext) -> bytes:
    parts = [b"\x0c\x00\x01"]
    _write_context(parts, context)
    return b"".join(parts)


# A client has the same context in all its calls.
_remembered_context = lru_cache(maxsize=256)(_context)


def _as_arguments(method: Method, context: CallContext, request: Request) -> CallArguments:
    if METHODS[method].fields_of is not None:
        return CallArguments(context, **request._asdict())
    return CallArguments(context, request)


def _invalid(method: Method) -> type[InvalidRequest | InvalidEnqueue]:
    return InvalidEnqueue if method is Method.ENQUEUE else InvalidRequest


# --- answers --------------------------------------------------------------------------------


def encode_reply(head: Head, result: Result) -> bytes:
    """Encode the answer to a call whose method is one of ours."""
    method_name = head.method_name
    parts = [reply_head(head)]
    if method_name == Method.DEQUEUE:
        parts.append(_dequeued(cast("DequeueResult", result)).encode())
    elif method_name == Method.ENQUEUE and not isinstance(result, EnqueueWithOptionsResult):
        _write_descriptors(parts, result)
        parts.append(b"\0\0")
    else:
        _WRITE_RESULT[method_name](parts, ResultBody(result))
    return b"".join(parts)


def _dequeued(result: DequeueResult) -> DequeueAnswer:
    answer = DequeueAnswer()
    for timeout_seconds, group in groupby(result.jobs, attrgetter("claim_timeout_seconds")):
        jobs = list(group)
        payloads = [Payload(job.body, job.attempts_allowed, job.attempts_remaining) for job in jobs]
        claims = [job.claim_descriptor for job in jobs]
        descriptors = [job.descriptor for job in jobs]
        answer.add(descriptors, columns_of(payloads), claims, timeout_seconds)
    return answer


def encode_enqueued(head: Head, prefix: str, local_ids: Sequence[int]) -> bytes:
    """Encode the answer to an enqueue at one priority; `prefix` begins the descriptors."""
    least = greatest = local_ids[0]
    if len(local_ids) > 1:
        least, greatest = min(local_ids), max(local_ids)
    text = counted_text(prefix, least, greatest)
    if text is None:
        return encode_reply(head, [f"{prefix}{local_id}" for local_id in local_ids])
    keys = [text % local_id for local_id in local_ids]
    count = pack_u32(len(keys))
    return b"".join((reply_head(head), DESCRIPTORS, count, *keys, b"\0\0"))


def encode_keyed(head: Head, cut: CutEnqueued) -> bytes:
    """Write the answer to an enqueue of which some jobs have keys."""
    return reply_head(head) + join_enqueued(cut)


def cut_keyed(message: bytes) -> CutEnqueued:
    """Cut the answer to an enqueue, which is no error."""
    head = read_message_head(message)
    try:
        return cut_enqueued(message, head.at)
    except UNUSUAL:
        result = decode_reply(Method.ENQUEUE, message)
    if not isinstance(result, EnqueueWithOptionsResult):
        texts = cast("Sequence[str]", result)
        result = EnqueueWithOptionsResult(texts, [False] * len(texts))
    return CutEnqueued([sized(text) for text in result.descriptors], bytes(result.existed))


def encode_dequeued(head: Head, answer: DequeueAnswer) -> bytes:
    """Encode the answer to a dequeue."""
    return reply_head(head) + answer.encode()


def encode_error(head: Head, error: PinLaterError) -> bytes:
    """Encode the answer to a call that failed. In an enqueue, what no code names is
    ENQUEUE_REJECTED, as long as it is sure that nothing was stored."""
    code = error.code
    if head.method_name == Method.ENQUEUE and isinstance(error, (InvalidRequest, Overloaded)):
        code = ErrorCode.ENQUEUE_REJECTED
    descriptors = list(error.descriptors) if isinstance(error, EnqueuedInPart) else None
    parts = [reply_head(head), _ERROR_FIELD]
    _write_error(parts, ErrorBody(code, error.message, descriptors))
    parts.append(b"\0")
    return b"".join(parts)


def encode_unknown_method(head: Head) -> bytes:
    """Encode the TApplicationException with which a Thrift server answers a method it lacks."""
    parts = [message_head(head, MessageType.EXCEPTION)]
    text = f"unknown method: {head.method_name[:80]!r}"
    _write_application_error(parts, ApplicationErrorBody(text, _UNKNOWN_METHOD))
    return b"".join(parts)


def decode_reply(method: Method, message: bytes) -> Result:
    """Raises the error that the answer carries, its message unchanged; ProtocolError for what is no
    answer to `method`."""
    head = read_message_head(message)
    if head.kind == MessageType.REPLY and head.method_name == method:
        if method is Method.DEQUEUE:
            try:
                return read_dequeue_result(message, head.at)
            except UNUSUAL:
                pass
    elif head.kind == MessageType.EXCEPTION:
        _raise_application_error(message, head.at)
    else:
        raise ProtocolError(
            f"expected the answer to {method.value}, got a message of type {head.kind} "
            f"about {head.method_name[:80]!r}"
        )
    return _decode_result(method, message, head.at)


def _decode_result(method: Method, message: bytes, at: int) -> Result:
    """Decode a result in the general way, whatever the layout."""
    declared = METHODS[method].result
    try:
        body: ResultBody = read_struct(message, at, declared)
    except Mismatch as mismatch:
        raise ProtocolError(f"the answer to {method.value}: {mismatch}") from None
    success, error = body.success, body.e
    if error is not None:
        raise error_from_code(error.code, error.message, error.descriptors)
    if success is None and any(field.key == "success" for field in declared.fields):
        raise ProtocolError(f"the answer to {method.value} has neither a result nor an error")
    match method:
        case Method.ENQUEUE:
            if success.existed is not None:
                return EnqueueWithOptionsResult(*success)
            return cast("list[str]", success.descriptors)
        case Method.DEQUEUE:
            return _dequeue_result(success)
        case _:
            return cast("Result", success)


def _dequeue_result(response: DequeueResponse) -> DequeueResult:
    unknown = DequeueMetadata()
    return DequeueResult(
        [
            ClaimedJob(descriptor, body, **response.metadata.get(descriptor, unknown)._asdict())
            for descriptor, body in response.jobs.items()
        ]
    )


def _raise_application_error(message: bytes, at: int) -> NoReturn:
    try:
        body: ApplicationErrorBody = read_struct(message, at, APPLICATION_ERROR)
    except Mismatch as mismatch:
        raise ProtocolError(f"a TApplicationException: {mismatch}") from None
    raise PinLaterError(
        f"the server could not process the call: {body.message} "
        f"(TApplicationException of type {body.type})"
    )


def peek_error(message: bytes) -> ErrorCode | None:
    """Read the code of the error that an answer of ours carries; None if it is a result."""
    head = read_message_head(message)
    if head.kind == MessageType.EXCEPTION:
        return ErrorCode.UNKNOWN
    if not message.startswith(_ERROR_CODE, head.at):
        return None
    try:
        return ErrorCode(I32(message, head.at + len(_ERROR_CODE))[0])
    except (ValueError, struct.error):
        return ErrorCode.UNKNOWN


def peek_jobs(message: bytes) -> int:
    """Count the jobs that an answer of ours to dequeueJobs carries; 0 if it is an error."""
    head = read_message_head(message)
    if head.kind != MessageType.REPLY:
        return 0
    return count_dequeued(message, head.at)


def peek_seqid(message: bytes) -> int:
    """Read the sequence number of a call or an answer."""
    return read_message_head(message).seqid


# --- errors ---------------------------------------------------------------------------------

# The last one of a code is what it means by itself.
_KINDS: Final[Sequence[type[PinLaterError]]] = (
    *RequestError.__subclasses__(),
    NoHealthyShards,
    ShardConnectionFailed,
    PinLaterError,
)
_BY_CODE: Final[dict[int, type[PinLaterError]]] = {kind.code: kind for kind in _KINDS}

# Where a code has several meanings, the beginning of the message tells them apart.
_BY_BEGINNING: Final[dict[tuple[int, str], type[PinLaterError]]] = {
    (ErrorCode.UNKNOWN, "invalid request"): InvalidRequest,
    (ErrorCode.UNKNOWN, "overloaded"): Overloaded,
    (ErrorCode.ENQUEUE_REJECTED, "invalid request"): InvalidEnqueue,
    (ErrorCode.ENQUEUE_REJECTED, "overloaded"): Overloaded,
}


def error_from_code(
    code: int, message: str, descriptors: Sequence[str] | None = None
) -> PinLaterError:
    """Make the error that an answer carries, with its very message. A code that this version does
    not know is a plain PinLaterError. `descriptors` make it an EnqueuedInPart."""
    beginning = message.partition(": ")[0]
    kind = _BY_BEGINNING.get((code, beginning)) or _BY_CODE.get(code, PinLaterError)
    if descriptors is not None:
        kind = EnqueuedInPart
    # Their constructors make messages; this one has its message already.
    error = kind.__new__(kind)
    PinLaterError.__init__(error, message)
    if isinstance(error, ShardConnectionFailed):
        error.shards = ()
    if isinstance(error, EnqueuedInPart):
        error.descriptors = descriptors or ()
    return error
