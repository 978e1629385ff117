"""Errors to codes of the interface, and back.

Pure; relies on `pinlaterd.errors` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pinlaterd.errors import (
    ContinuationInvalid,
    DequeueRateLimited,
    EnqueuedInPart,
    EnqueueRejected,
    ErrorCode,
    InvalidEnqueue,
    InvalidRequest,
    NoHealthyShards,
    Overloaded,
    PasswordInvalid,
    PinLaterError,
    PriorityNotSupported,
    QueueNameInvalid,
    QueueNameTooLong,
    QueueNotFound,
    ShardConnectionFailed,
)
from pinlaterd.model import Method

_BY_CODE: Final[dict[int, type[PinLaterError]]] = {
    kind.code: kind
    for kind in (
        ContinuationInvalid,
        PasswordInvalid,
        QueueNameInvalid,
        QueueNameTooLong,
        QueueNotFound,
        PriorityNotSupported,
        DequeueRateLimited,
        EnqueueRejected,
        NoHealthyShards,
        ShardConnectionFailed,
        PinLaterError,
    )
}

# Where a code has several meanings, the beginning of the message tells them apart.
_BY_BEGINNING: Final[dict[tuple[int, str], type[PinLaterError]]] = {
    (ErrorCode.UNKNOWN, "invalid request"): InvalidRequest,
    (ErrorCode.UNKNOWN, "overloaded"): Overloaded,
    (ErrorCode.ENQUEUE_REJECTED, "invalid request"): InvalidEnqueue,
    (ErrorCode.ENQUEUE_REJECTED, "overloaded"): Overloaded,
}


def code_in(method_name: str, error: PinLaterError) -> ErrorCode:
    """The code that `error` has in an answer of this method: in an enqueue, what no code names is
    ENQUEUE_REJECTED, as long as it is sure that nothing was stored."""
    if method_name == Method.ENQUEUE and isinstance(error, (InvalidRequest, Overloaded)):
        return ErrorCode.ENQUEUE_REJECTED
    return error.code


def error_from_code(
    code: int, message: str, descriptors: Sequence[str] | None = None
) -> PinLaterError:
    """The error that an answer carries, with its very message. A code that this version does not
    know is a plain PinLaterError. `descriptors` make it an EnqueuedInPart."""
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
