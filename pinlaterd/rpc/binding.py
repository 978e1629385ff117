"""Which struct of the interface is which type of `pinlaterd.model`, and which field which.

A Bound is a struct of the interface together with the Python type that is made of it: what the
reader and the writer work by. Names and types come from the interface; here stands only what is
called differently. Fields that are not given on the wire take the interface's default, or, where
it has none, the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CallContext,
    CheckpointInfo,
    CheckpointRequest,
    CountRequest,
    DeleteJobsRequest,
    DequeueRequest,
    EnqueueRequest,
    Job,
    JobRecord,
    JobState,
    LookupRequest,
    Method,
    RetryFailedRequest,
    ScanRequest,
    ScanResult,
)
from pinlaterd.rpc.interface import INTERFACE, Field, Type
from pinlaterd.rpc.thrift_types import TType


@dataclass(frozen=True, slots=True)
class BoundType:
    """A type on the wire and what is made of it: `struct` of structs, `enum` of i32."""

    code: int
    name: str  # as the interface calls it
    binary: bool = False
    struct: Bound | None = None
    enum: type[IntEnum] | None = None
    key: BoundType | None = None
    element: BoundType | None = None


@dataclass(frozen=True, slots=True)
class BoundField:
    id: int
    name: str
    key: str  # what the model calls it
    type: BoundType
    header: bytes


@dataclass(frozen=True, slots=True)
class Bound:
    name: str
    make: Callable[..., Any]
    fields: Mapping[int, BoundField]  # in the order of their ids
    required: frozenset[int]
    defaults: Mapping[str, object] = field(default_factory=dict)


class EnqueueResponse(NamedTuple):
    descriptors: list[str]


class DequeueMetadata(NamedTuple):
    """A server that lacks our extensions gives no claim."""

    attempts_allowed: int = 0
    attempts_remaining: int = 0
    claim_descriptor: str = ""
    claim_timeout_seconds: int = 0


class DequeueResponse(NamedTuple):
    jobs: Mapping[str, bytes] = {}
    metadata: Mapping[str, DequeueMetadata] = {}


class ErrorBody(NamedTuple):
    """PinLaterException. The code is a number: one that we do not know must not hide the rest."""

    code: int
    message: str
    descriptors: list[str] | None = None


class ApplicationErrorBody(NamedTuple):
    """TApplicationException, which is part of Thrift, not of the interface."""

    message: str = ""
    kind: int = 0


class ResultBody(NamedTuple):
    """Either of both, or neither in the answer of a void method."""

    success: Any = None
    e: ErrorBody | None = None


class CallArguments(NamedTuple):
    """The arguments of any method: the context, then one request or up to two texts."""

    context: CallContext
    request: Any = None
    name: str = ""
    password: str = ""


# Text on the wire by its declaration, but raw bytes all the same.
_BINARY: Final = {("PinLaterCheckpointJobRequest", "newBody")}

_STATES: Final = {"PinLaterJobState": JobState}

# Each struct: what it becomes, and the fields that are not called the same in snake case.
_STRUCTS: Final[dict[str, tuple[Callable[..., Any], dict[str, str]]]] = {
    "RequestContext": (CallContext, {"requestId": "request_id"}),
    "PinLaterJob": (
        Job,
        {
            "runAfterTimestampMillis": "run_after_ms",
            "numAttemptsAllowed": "attempts_allowed",
            "customStatus": "custom_status",
        },
    ),
    "PinLaterEnqueueRequest": (EnqueueRequest, {"queueName": "queue"}),
    "PinLaterEnqueueResponse": (EnqueueResponse, {"jobDescriptors": "descriptors"}),
    "PinLaterJobAckInfo": (
        AckInfo,
        {
            "jobDescriptor": "descriptor",
            "appendCustomStatus": "append_custom_status",
            "retryDelayMillis": "retry_delay_ms",
            "claimDescriptor": "claim_descriptor",
        },
    ),
    "PinLaterJobAckRequest": (
        AckRequest,
        {"queueName": "queue", "jobsSucceeded": "succeeded", "jobsFailed": "failed"},
    ),
    "PinLaterDequeueRequest": (
        DequeueRequest,
        {
            "queueName": "queue",
            "jobAckRequest": "acks",
            "dryRun": "dry_run",
            "maxWaitMillis": "max_wait_ms",
        },
    ),
    "PinLaterDequeueMetadata": (
        DequeueMetadata,
        {
            "attemptsAllowed": "attempts_allowed",
            "attemptsRemaining": "attempts_remaining",
            "claimDescriptor": "claim_descriptor",
            "claimTimeoutSeconds": "claim_timeout_seconds",
        },
    ),
    "PinLaterDequeueResponse": (DequeueResponse, {"jobMetadata": "metadata"}),
    "PinLaterCheckpointJobRequest": (
        CheckpointInfo,
        {
            "jobDescriptor": "descriptor",
            "newBody": "new_body",
            "moveToPending": "move_to_pending",
            "runAfterTimestampMillis": "run_after_ms",
            "numOfAttemptsAllowed": "attempts",
            "prependCustomStatus": "prepend_custom_status",
            "claimDescriptor": "claim_descriptor",
        },
    ),
    "PinLaterCheckpointJobsRequest": (
        CheckpointRequest,
        {"queueName": "queue", "requests": "checkpoints"},
    ),
    "PinLaterLookupJobRequest": (
        LookupRequest,
        {"jobDescriptors": "descriptors", "includeBody": "include_body"},
    ),
    "PinLaterJobInfo": (
        JobRecord,
        {
            "jobDescriptor": "descriptor",
            "jobState": "state",
            "attemptsAllowed": "attempts_allowed",
            "attemptsRemaining": "attempts_remaining",
            "customStatus": "custom_status",
            "createdAtTimestampMillis": "created_at_ms",
            "runAfterTimestampMillis": "run_after_ms",
            "updatedAtTimestampMillis": "updated_at_ms",
            "claimDescriptor": "claim_descriptor",
        },
    ),
    "PinLaterGetJobCountRequest": (
        CountRequest,
        {
            "queueName": "queue",
            "jobState": "state",
            "countFutureJobs": "future",
            "bodyRegexToMatch": "body_regex",
        },
    ),
    "PinLaterScanJobsRequest": (
        ScanRequest,
        {
            "queueName": "queue",
            "jobState": "state",
            "scanFutureJobs": "future",
            "bodyRegexToMatch": "body_regex",
        },
    ),
    "PinLaterScanJobsResponse": (ScanResult, {"scannedJobs": "jobs"}),
    "PinLaterRetryFailedJobsRequest": (
        RetryFailedRequest,
        {
            "queueName": "queue",
            "attemptsToAllow": "attempts_to_allow",
            "runAfterTimestampMillis": "run_after_ms",
        },
    ),
    "PinLaterDeleteJobsRequest": (
        DeleteJobsRequest,
        {"queueName": "queue", "jobState": "state", "bodyRegexToMatch": "body_regex"},
    ),
    "PinLaterException": (ErrorBody, {"errorCode": "code", "jobDescriptors": "descriptors"}),
}

# What a field becomes that neither the wire nor the interface nor the model gives.
_ABSENT: Final[dict[str, dict[str, object]]] = {
    "PinLaterJobInfo": {
        "run_after_ms": 0,
        "updated_at_ms": 0,
        "claim_descriptor": None,
        "body": None,
    }
}


def _bind_struct(name: str, cache: dict[str, Bound]) -> Bound:
    if name not in cache:
        make, names = _STRUCTS[name]
        cache[name] = _bind_fields(
            name, make, INTERFACE.structs[name], names, cache, _ABSENT.get(name, {})
        )
    return cache[name]


def _bind_fields(
    name: str,
    make: Callable[..., Any],
    fields: tuple[Field, ...],
    names: Mapping[str, str],
    cache: dict[str, Bound],
    absent: Mapping[str, object],
) -> Bound:
    bound = {}
    defaults = dict(absent)
    for each in fields:
        key = names.get(each.name, each.name)
        bound_type = _bind_type(each.type, cache, binary=(name, each.name) in _BINARY)
        bound[each.id] = bound_field(each.id, each.name, key, bound_type)
        if each.default is not None:
            defaults[key] = each.default
    required = frozenset(each.id for each in fields if each.required)
    return Bound(name, make, bound, required, defaults)


def bound_field(number: int, name: str, key: str, bound_type: BoundType) -> BoundField:
    header = bytes((bound_type.code,)) + number.to_bytes(2, "big")
    return BoundField(number, name, key, bound_type, header)


def _bind_type(declared: Type, cache: dict[str, Bound], *, binary: bool = False) -> BoundType:
    code = declared.code
    if code is TType.STRUCT:
        assert declared.name is not None
        return BoundType(code, declared.name, struct=_bind_struct(declared.name, cache))
    if declared.element is not None:
        element = _bind_type(declared.element, cache)
        if declared.key is None:
            return BoundType(code, f"{code.name.lower()}<{element.name}>", element=element)
        key = _bind_type(declared.key, cache)
        return BoundType(code, f"map<{key.name},{element.name}>", key=key, element=element)
    if declared.name in _STATES:
        return BoundType(code, declared.name, enum=_STATES[declared.name])
    is_binary = binary or declared.binary
    return BoundType(code, "binary" if is_binary else code.name.lower(), binary=is_binary)


@dataclass(frozen=True, slots=True)
class BoundMethod:
    """`result` is the struct of an answer: success in field 0, unless void, or the error."""

    arguments: Bound
    result: Bound


def _bind_methods(cache: dict[str, Bound]) -> dict[Method, BoundMethod]:
    methods = {}
    for name, method in INTERFACE.methods.items():
        # The interface language has no requiredness for arguments; all of ours are.
        arguments = tuple(
            Field(each.id, each.name, each.type, required=True) for each in method.arguments
        )
        methods[Method(name)] = BoundMethod(
            _bind_fields(name, CallArguments, arguments, {}, cache, {}),
            _bind_fields(f"{name} result", ResultBody, method.result, {}, cache, {}),
        )
    return methods


def _application_error() -> Bound:
    text = BoundType(TType.STRING, "string")
    number = BoundType(TType.I32, "i32")
    fields = {
        1: bound_field(1, "message", "message", text),
        2: bound_field(2, "type", "kind", number),
    }
    return Bound("TApplicationException", ApplicationErrorBody, fields, frozenset())


_cache: Final[dict[str, Bound]] = {}
METHODS: Final = _bind_methods(_cache)
PINLATER_ERROR: Final = _bind_struct("PinLaterException", _cache)
APPLICATION_ERROR: Final = _application_error()


def defaults(struct: str) -> dict[str, Any]:
    """What those fields of a struct are, as the model calls them, that are not given."""
    bound = _cache[struct]
    return {**getattr(bound.make, "_field_defaults", {}), **bound.defaults}
