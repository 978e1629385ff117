"""Thrift messages to and from `pinlaterd.model`: what others use of this package's codec.

    peek            a call's way, from its first bytes
    decode_call     a call -> Call(head, context, request)
    encode_call     a request -> a call, for shards and servers
    encode_reply, encode_error, encode_unknown_method    the answer to a call, in the call's form
    DequeueAnswer, encode_dequeued    a dequeue's answer, as its jobs come in
    decode_reply    an answer -> its result, or the error that it carries, raised
    peek_error      the code of the error that an answer carries, without decoding it
    peek_jobs       how many jobs an answer to a dequeue carries
    peek_seqid      which call a message belongs to

Messages are TBinaryProtocol without transport framing; one call or one answer each. Bytes that
are no well-formed message raise ProtocolError; a well-formed one that is not what the interface
says raises InvalidRequest, or InvalidEnqueue in an enqueue. Ranges are not checked here: types are.

Each hot message has two ways that mean the same, a fast one for its usual layout and the general
one for all others; tests hold them against each other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, NoReturn, cast

from pinlaterd.errors import (
    EnqueuedInPart,
    ErrorCode,
    InvalidEnqueue,
    InvalidRequest,
    PinLaterError,
    ProtocolError,
)
from pinlaterd.model import (
    CallContext,
    ClaimedJob,
    CreateQueueRequest,
    DeleteQueueRequest,
    DequeueResult,
    Method,
    QueueNamesRequest,
    Request,
    Result,
)
from pinlaterd.rpc import fast_read, fast_write
from pinlaterd.rpc.binding import (
    APPLICATION_ERROR,
    METHODS,
    PINLATER_ERROR,
    ApplicationErrorBody,
    CallArguments,
    DequeueMetadata,
    DequeueResponse,
    ErrorBody,
    ResultBody,
)
from pinlaterd.rpc.error_codes import code_in, error_from_code
from pinlaterd.rpc.fast_write import DequeueAnswer
from pinlaterd.rpc.message import I32, Head, message_head, read_call_head, read_message_head
from pinlaterd.rpc.misfits import misfit
from pinlaterd.rpc.peek import UNUSUAL, Peek, peek
from pinlaterd.rpc.reader import UNLIMITED, Mismatch, Reader
from pinlaterd.rpc.thrift_types import ApplicationError, MessageType
from pinlaterd.rpc.writer import write_struct

__all__ = [
    "Call",
    "DequeueAnswer",
    "Head",
    "Peek",
    "decode_call",
    "decode_reply",
    "encode_call",
    "encode_dequeued",
    "encode_error",
    "encode_reply",
    "encode_unknown_method",
    "error_from_code",
    "peek",
    "peek_error",
    "peek_jobs",
    "peek_seqid",
]


class Call(NamedTuple):
    head: Head
    context: CallContext
    request: Request


_FAST_CALLS: Final[Mapping[Method, Callable[[bytes, int, int], tuple[CallContext, Request]]]] = {
    Method.ENQUEUE: fast_read.read_enqueue,
    Method.DEQUEUE: fast_read.read_dequeue,
    Method.ACK: fast_read.read_ack,
}
_FAST_RESULTS: Final[Mapping[Method, Callable[[bytes, int], Result]]] = {
    Method.ENQUEUE: fast_read.read_enqueue_result,
    Method.DEQUEUE: fast_read.read_dequeue_result,
}
_FAST_WRITES: Final[Mapping[type[Any], Callable[[Any], bytes]]] = fast_write.REQUESTS

_new: Final = tuple.__new__  # half the cost of calling a NamedTuple, for each call of each client
_METHODS: Final = {method.value: method for method in Method}
_CONTEXT_FIELD: Final = b"\x0c\x00\x01"
_REQUEST_FIELD: Final = b"\x0c\x00\x02"
_ERROR_FIELD: Final = b"\x0c\x00\x01"
_ERROR_CODE: Final = _ERROR_FIELD + b"\x08\x00\x01"


# --- calls ----------------------------------------------------------------------------------


def decode_call(message: bytes, most_elements: int = UNLIMITED) -> Call:
    """Raises ProtocolError, InvalidRequest or InvalidEnqueue; one of the latter two for a list of
    more than `most_elements`, at its head, before any of them is decoded."""
    head, at = read_call_head(message)
    method = _METHODS.get(head.method_name)
    if method is None:
        raise InvalidRequest(f"there is no method {head.method_name[:80]!r}")
    fast = _FAST_CALLS.get(method)
    if fast is not None:
        try:
            context, request = fast(message, at, most_elements)
            return _new(Call, (head, context, request))
        except UNUSUAL:
            pass
    return _decode_arguments(head, method, message, at, most_elements)


def _decode_arguments(
    head: Head, method: Method, message: bytes, at: int, most_elements: int = UNLIMITED
) -> Call:
    """The general way, whatever the layout."""
    reader = Reader(message, at, most_elements)
    try:
        arguments: CallArguments = reader.read_struct(METHODS[method].arguments)
    except Mismatch as mismatch:
        raise _invalid(method)(f"{method.value}: {mismatch}") from None
    reader.finish()
    request: Request
    match method:
        case Method.CREATE_QUEUE:
            request = CreateQueueRequest(arguments.name)
        case Method.DELETE_QUEUE:
            request = DeleteQueueRequest(arguments.name, arguments.password)
        case Method.QUEUE_NAMES:
            request = QueueNamesRequest()
        case _:
            request = arguments.request
    return Call(head, arguments.context, request)


def encode_call(method: Method, seqid: int, context: CallContext, request: Request) -> bytes:
    """Raises InvalidRequest, InvalidEnqueue for an enqueue, for what Thrift's types cannot hold."""
    head = message_head(Head(method.value, seqid, oneway=False, strict=True), MessageType.CALL)
    try:
        return head + _arguments(method, context, request)
    except (struct.error, ValueError, TypeError, AttributeError) as error:
        problem = misfit(METHODS[method].arguments, _as_arguments(context, request))
        if problem is None:
            raise
        raise _invalid(method)(f"{method.value}: {problem}") from error


def _arguments(method: Method, context: CallContext, request: Request) -> bytes:
    bound = METHODS[method].arguments
    parts: list[bytes] = []
    fast = _FAST_WRITES.get(type(request))
    if fast is not None:
        context_type = bound.fields[1].type.struct
        assert context_type is not None
        parts.append(_CONTEXT_FIELD)
        write_struct(parts, context_type, context)
        parts += (_REQUEST_FIELD, fast(request), b"\0")
        return b"".join(parts)
    write_struct(parts, bound, _as_arguments(context, request))
    return b"".join(parts)


def _as_arguments(context: CallContext, request: Request) -> CallArguments:
    match request:
        case CreateQueueRequest(queue):
            return CallArguments(context, name=queue)
        case DeleteQueueRequest(queue, password):
            return CallArguments(context, name=queue, password=password)
        case _:
            return CallArguments(context, request)


def _invalid(method: Method) -> type[InvalidRequest | InvalidEnqueue]:
    return InvalidEnqueue if method is Method.ENQUEUE else InvalidRequest


# --- answers --------------------------------------------------------------------------------


def encode_reply(head: Head, result: Result) -> bytes:
    """The answer to a call whose method is one of ours."""
    method = _METHODS[head.method_name]
    start = message_head(head, MessageType.REPLY)
    if isinstance(result, DequeueResult):
        return start + fast_write.dequeue_result(result)
    if method is Method.ENQUEUE:
        return start + fast_write.enqueue_result(cast("list[str]", result))
    parts = [start]
    write_struct(parts, METHODS[method].result, ResultBody(success=result))
    return b"".join(parts)


def encode_dequeued(head: Head, answer: DequeueAnswer) -> bytes:
    """The answer to a dequeue."""
    return message_head(head, MessageType.REPLY) + answer.encode()


def encode_error(head: Head, error: PinLaterError) -> bytes:
    """The answer to a call that failed."""
    descriptors = list(error.descriptors) if isinstance(error, EnqueuedInPart) else None
    body = ErrorBody(code_in(head.method_name, error), error.message, descriptors)
    parts = [message_head(head, MessageType.REPLY), _ERROR_FIELD]
    write_struct(parts, PINLATER_ERROR, body)
    parts.append(b"\0")
    return b"".join(parts)


def encode_unknown_method(head: Head) -> bytes:
    """The TApplicationException with which every Thrift server answers a method it lacks."""
    body = ApplicationErrorBody(
        f"unknown method: {head.method_name[:80]!r}", ApplicationError.UNKNOWN_METHOD
    )
    parts = [message_head(head, MessageType.EXCEPTION)]
    write_struct(parts, APPLICATION_ERROR, body)
    return b"".join(parts)


def decode_reply(method: Method, message: bytes) -> Result:
    """Raises the error that the answer carries, its message unchanged; ProtocolError for what is no
    answer to `method`."""
    head = read_message_head(message)
    if head.kind == MessageType.REPLY and head.method_name == method:
        fast = _FAST_RESULTS.get(method)
        if fast is not None:
            try:
                return fast(message, head.at)
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
    """The general way, whatever the layout."""
    bound = METHODS[method].result
    reader = Reader(message, at)
    try:
        body: ResultBody = reader.read_struct(bound)
    except Mismatch as mismatch:
        raise ProtocolError(f"the answer to {method.value}: {mismatch}") from None
    reader.finish()
    if body.e is not None:
        raise error_from_code(body.e.code, body.e.message, body.e.descriptors)
    if 0 in bound.fields and body.success is None:
        raise ProtocolError(f"the answer to {method.value} has neither a result nor an error")
    match method:
        case Method.ENQUEUE:
            return cast("list[str]", body.success.descriptors)
        case Method.DEQUEUE:
            return _dequeue_result(body.success)
        case _:
            return cast("Result", body.success)


def _dequeue_result(response: DequeueResponse) -> DequeueResult:
    unknown = DequeueMetadata()
    return DequeueResult(
        [
            ClaimedJob(descriptor, body, *response.metadata.get(descriptor, unknown))
            for descriptor, body in response.jobs.items()
        ]
    )


def _raise_application_error(message: bytes, at: int) -> NoReturn:
    reader = Reader(message, at)
    try:
        body: ApplicationErrorBody = reader.read_struct(APPLICATION_ERROR)
    except Mismatch as mismatch:
        raise ProtocolError(f"a TApplicationException: {mismatch}") from None
    raise PinLaterError(
        f"the server could not process the call: {body.message} "
        f"(TApplicationException of type {body.kind})"
    )


def peek_error(message: bytes) -> ErrorCode | None:
    """The code of the error that an answer of ours carries; None if it is a result."""
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
    """How many jobs an answer of ours to dequeueJobs carries; 0 if it is an error."""
    head = read_message_head(message)
    if head.kind != MessageType.REPLY:
        return 0
    return fast_read.count_dequeued(message, head.at)


def peek_seqid(message: bytes) -> int:
    """The sequence number of a call or an answer."""
    return read_message_head(message).seqid
