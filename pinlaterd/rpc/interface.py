"""Thrift: TBinaryProtocol, and the interface file as tables: structs, methods, and what of
`pinlaterd.model` they become.

thriftpy2 parses the file once, at import; readers and writers work by these tables. Nothing of the
file is written a second time in code: the model's annotations say what each struct becomes, and
here stands only what the model calls differently. (thriftpy2's own decoders trust the lengths that
a message claims, recurse as deep as it nests, and cannot say which field of which job is wrong.)
"""

from __future__ import annotations

import re
import struct
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args, get_type_hints

import thriftpy2
from thriftpy2.thrift import TApplicationException
from thriftpy2.thrift import TType as ParserType

from pinlaterd.errors import ProtocolError
from pinlaterd.model import (
    REQUESTS,
    AckOutcomes,
    CallContext,
    CheckpointOutcomes,
    FinishResult,
    JobRecord,
    Method,
    ScanResult,
    new_record,
)

# --- TBinaryProtocol ------------------------------------------------------------------------


class TType(IntEnum):
    """The types of values on the wire that TBinaryProtocol can carry."""

    STOP = 0
    BOOL = 2
    BYTE = 3
    DOUBLE = 4
    I16 = 6
    I32 = 8
    I64 = 10
    STRING = 11
    STRUCT = 12
    MAP = 13
    SET = 14
    LIST = 15


class MessageType(IntEnum):
    CALL = 1
    REPLY = 2
    EXCEPTION = 3
    ONEWAY = 4


# By type; numbers and booleans have as many bytes always.
FORMATS: Final = {
    int(TType.BOOL): "?",
    int(TType.BYTE): "b",
    int(TType.DOUBLE): "d",
    int(TType.I16): "h",
    int(TType.I32): "i",
    int(TType.I64): "q",
}
FIXED_SIZE: Final = {code: struct.calcsize(f">{letter}") for code, letter in FORMATS.items()}
# The fewest bytes that a value of each type takes: no more values than that can follow.
LEAST_SIZE: Final = {
    **FIXED_SIZE,
    int(TType.STRING): 4,
    int(TType.STRUCT): 1,
    int(TType.MAP): 6,
    int(TType.SET): 5,
    int(TType.LIST): 5,
}

MAX_DEPTH: Final = 64
# Ten for each of the 100,000 jobs that a call may have: half a second, but never in one go.
MAX_VALUES: Final = 1_000_000
# The unknown fields of a message together hold no more values than this: 20 ms of one process.
MAX_UNKNOWN_VALUES: Final = 50_000
# Values that a walk passes in one go: 4 ms.
_SLICE_VALUES: Final = 10_000

VERSION_1: Final = 0x8001
STRICT_CALL: Final = b"\x80\x01\x00\x01"
STRICT_REPLY: Final = b"\x80\x01\x00\x02"

U32: Final = struct.Struct(">I").unpack_from
I32: Final = struct.Struct(">i").unpack_from
pack_u32: Final = struct.Struct(">I").pack
pack_i32: Final = struct.Struct(">i").pack
_VERSION_AND_LENGTH: Final = struct.Struct(">HxxI").unpack_from
_STRING: Final = int(TType.STRING)
_STRUCT: Final = int(TType.STRUCT)
_MAP: Final = int(TType.MAP)


def type_name(code: int) -> str:
    """Name a type as the interface language does, for messages to people."""
    try:
        return TType(code).name.lower()
    except ValueError:
        return f"type {code}"


# --- where a value ends ---------------------------------------------------------------------


class BeyondEnd(ProtocolError):
    """The value is longer than it may be."""


# Yields how many bytes, from the start of the data, it needs to go on, or PAUSE to let others run
# first; is sent what has come by then; returns where the value ends.
Walk = Generator[int, "bytes | bytearray", int]
PAUSE: Final = 0
# What is open, innermost last. A struct: None. A list, set or map: [values to come, type of the
# next, type of the one after that].
_Levels = list[list[int] | None]


@dataclass(slots=True)
class ReadLimits:
    """The number of elements that a list may have, and of values that may still be passed over."""

    elements: int
    values: int

    def take(self, values: int) -> None:
        """Count values that were passed over. Raises ProtocolError once there are too many."""
        self.values -= values
        if self.values < 0:
            most = f"{MAX_VALUES}, {MAX_UNKNOWN_VALUES} of them in unknown fields"
            raise ProtocolError(f"too many values; a message may have {most}")


def skip_value(data: bytes, at: int, code: int, limits: ReadLimits) -> int:
    """Return the end of a value in an unknown field; all its bytes must be there."""
    if code in FIXED_SIZE:
        limits.take(1)
        end = at + FIXED_SIZE[code]
        _check_end(end, len(data))
        return end
    walk = _walk(data, at, [[1, code, code]], len(data), limits)
    try:
        while next(walk) == PAUSE:
            pass
    except StopIteration as ended:
        return int(ended.value)
    raise ProtocolError("the message ends within a value")


def walk_message(data: bytes | bytearray, start: int, max_bytes: int) -> Walk:
    """Walk to the end of the strict message that begins at `start`, of `max_bytes` at most."""
    while len(data) < start + 8:
        data = yield start + 8
    version, name_length = _VERSION_AND_LENGTH(data, start)
    if version != VERSION_1:
        raise ProtocolError("an unframed message does not begin with Thrift's version 1")
    at, max_end = start + 12 + name_length, start + max_bytes
    _check_end(at, max_end)
    return (yield from _walk(data, at, [None], max_end, ReadLimits(0, MAX_VALUES)))


def _walk(  # noqa: C901, PLR0912, PLR0915 - one step for each kind of value
    data: bytes | bytearray, at: int, levels: _Levels, max_end: int, limits: ReadLimits
) -> Walk:
    """Go to the end of what is open, without reading it.

    It looks at no byte twice, however small the pieces in which they come. It neither recurses nor
    allocates by what the bytes claim: its memory is one small entry for each level of nesting.
    """
    values = 0
    while levels:
        level = levels[-1]
        times = 1
        if level is None:
            while len(data) <= at:
                data = yield at + 1
            code = data[at]
            if code == 0:
                at += 1
                _check_end(at, max_end)
                levels.pop()
                continue
            at += 3
            while len(data) < at:
                data = yield at
        elif level[0] == 0:
            levels.pop()
            continue
        else:
            to_come, code, other = level
            if code == other and code in FIXED_SIZE:
                times = to_come
            level[:] = to_come - times, other, code
        values += 1
        if code in FIXED_SIZE:
            at += FIXED_SIZE[code] * times
        elif code == _STRING:
            while len(data) < at + 4:
                data = yield at + 4
            at += 4 + U32(data, at)[0]
        elif code == _STRUCT:
            _open(levels, None)
        elif code in LEAST_SIZE:
            size = LEAST_SIZE[code]
            while len(data) < at + size:
                data = yield at + size
            at += size
            _check_end(at, max_end)
            inner = _collection(data, at, max_end, is_map=code == _MAP)
            if inner is not None:
                _open(levels, inner)
        else:
            raise ProtocolError(f"there is no type {code} in Thrift's binary protocol")
        _check_end(at, max_end)
        if values == _SLICE_VALUES:
            limits.take(values)
            values = 0
            data = (yield PAUSE) or data
    limits.take(values)
    while len(data) < at:
        data = yield at
    return at


def _collection(
    data: bytes | bytearray, at: int, max_end: int, *, is_map: bool
) -> list[int] | None:
    """Return the level of a list, set or map whose head ends at `at`; None if it is empty."""
    (count,) = I32(data, at - 4)
    code = data[at - 5]
    key = data[at - 6] if is_map else code
    if count == 0:
        return None  # some writers leave the types of an empty map out
    if count < 0 or code not in LEAST_SIZE or key not in LEAST_SIZE:
        raise ProtocolError(f"a collection claims {count} values of types {key} and {code}")
    least = LEAST_SIZE[code] + (LEAST_SIZE[key] if is_map else 0)
    if at + count * least > max_end:
        raise BeyondEnd(f"a collection claims {count} values, more than its message holds")
    return [2 * count if is_map else count, key, code]


def _open(levels: _Levels, level: list[int] | None) -> None:
    if len(levels) >= MAX_DEPTH:
        raise ProtocolError(f"values are nested more than {MAX_DEPTH} levels deep")
    levels.append(level)


def _check_end(at: int, max_end: int) -> None:
    if at > max_end:
        raise BeyondEnd(f"a value claims {at - max_end} bytes more than there are")


# --- the interface --------------------------------------------------------------------------

INTERFACE_FILE: Final = Path(__file__).with_name("pinlater.thrift")
# As thriftpy2 parses it.
INTERFACE: Final = thriftpy2.load(str(INTERFACE_FILE), module_name="pinlater_thrift")


# Optional fields for which neither the interface nor the model has a default.
_ABSENT: Final = {"PinLaterJobInfo": {"run_after_ms": 0, "updated_at_ms": 0}}
# Optional fields whose default depends on the queue: they are read as None.
_OF_THE_QUEUE: Final = {"PinLaterJob": ("priority", "attempts_allowed")}


class Type(NamedTuple):
    """A type on the wire and what is made of it: `struct` of structs, `enum` of i32."""

    code: int
    name: str  # as the interface calls it
    binary: bool = False
    struct: Struct | None = None
    enum: type[IntEnum] | None = None
    key: Type | None = None  # of a map
    element: Type | None = None  # of a map (its values), a list or a set


class Field(NamedTuple):
    """`default`: the interface's, or None. `place`: which of the model's fields it is; those of the
    model's `options`, which stand beside the others on the wire, are counted on from the last."""

    id: int
    name: str
    key: str  # what the model calls it
    place: int
    type: Type
    required: bool
    default: object
    header: bytes  # type and id, as they stand in front of the value


class Struct:
    """A struct of the interface, and the NamedTuple that is made of it.

    `defaults` are the values of a struct of which no field is given: the interface's, or, where it
    has none, the model's.
    """

    def __init__(self, name: str, make: type[Any], fields: Iterable[Field]) -> None:
        self.name = name
        self.make = make
        self.fields = tuple(sorted(fields))  # by their ids, the order in which they are written
        absent = make._field_defaults | _ABSENT.get(name, {})
        self.defaults: list[Any] = [absent.get(key) for key in make._fields]
        self.size = len(self.defaults)
        self.options = _options_of(make)  # the record that `options` of `make` holds, or None
        self.options_at = make._fields.index("options") if self.options is not None else -1
        for field in self.fields:
            if field.key in _OF_THE_QUEUE.get(name, ()):
                self.defaults[field.place] = None
            elif field.default is not None:
                self.defaults[field.place] = field.default
        self.no_options: list[Any] = []
        if self.options is not None:
            self.no_options = list(self.options())
            self.defaults += self.no_options

    def made(self, values: list[Any]) -> Any:
        """Make the record of the values of all fields, which are in the order of their places."""
        if self.options is not None:
            options = values[self.size :]
            del values[self.size :]
            if options != self.no_options:
                values[self.options_at] = new_record(self.options, options)
        return new_record(self.make, values)


def _options_of(make: type[Any]) -> type[Any] | None:
    return _model_in(get_type_hints(make)["options"]) if "options" in make._fields else None


class EnqueueResponse(NamedTuple):
    descriptors: list[str]
    existed: list[bool] | None = None


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
    type: int = 0


class ResultBody(NamedTuple):
    """Either of both, or neither in the answer of a void method."""

    success: Any = None
    e: ErrorBody | None = None


class CallArguments(NamedTuple):
    """The arguments of any method: the context, then one request or its fields."""

    context: CallContext
    request: Any = None
    queue: str = ""
    password: str = ""


class MethodStructs(NamedTuple):
    """`result`: success in field 0, unless the method is void; or the error in field 1.
    `fields_of`: the request whose fields are arguments themselves, if they are."""

    arguments: Struct
    result: Struct
    fields_of: type[Any] | None


# What a result is, or consists of, where it is no plain value.
_RESULTS: Final[dict[Method, type[Any]]] = {
    Method.ACK_JOBS: AckOutcomes,
    Method.APPLY_CHECKPOINTS: CheckpointOutcomes,
    Method.FINISH: FinishResult,
    Method.ENQUEUE: EnqueueResponse,
    Method.DEQUEUE: DequeueResponse,
    Method.LOOKUP: JobRecord,
    Method.SCAN: ScanResult,
}
# Fields that the model does not just call the same in snake case.
_KEYS: Final = {
    "name": "queue",
    "queueName": "queue",
    "jobDescriptor": "descriptor",
    "jobDescriptors": "descriptors",
    "jobState": "state",
    "runAfterTimestampMillis": "run_after_ms",
    "createdAtTimestampMillis": "created_at_ms",
    "expiresAtTimestampMillis": "expires_at_ms",
    "runAfterTimestampMicros": "run_after_us",
    "expiresAtTimestampMicros": "expires_at_us",
    "updatedAtTimestampMillis": "updated_at_ms",
    "retryDelayMillis": "retry_delay_ms",
    "spreadMillis": "spread_ms",
    "maxWaitMillis": "max_wait_ms",
    "claimTimeoutMillis": "claim_timeout_ms",
    "maxMillis": "max_ms",
    "endedBeforeMillis": "ended_before_ms",
    "endedSinceMillis": "ended_since_ms",
    "numAttemptsAllowed": "attempts_allowed",
    "numOfAttemptsAllowed": "attempts",
    "jobsSucceeded": "succeeded",
    "jobsFailed": "failed",
    "jobAckRequest": "acks",
    "jobMetadata": "metadata",
    "requests": "checkpoints",
    "countFutureJobs": "future",
    "scanFutureJobs": "future",
    "scannedJobs": "jobs",
    "bodyRegexToMatch": "body_regex",
    "statusRegexToMatch": "status_regex",
    "errorCode": "code",
}
# Text by its declaration, but raw bytes all the same.
_BINARY: Final = {("PinLaterCheckpointJobRequest", "newBody")}

STRUCTS: Final[dict[str, Struct]] = {}


def headers(name: str, *keys: str) -> tuple[bytes, ...]:
    """Return the headers of these fields of a struct, by what the model calls them."""
    found = {field.key: field.header for field in STRUCTS[name].fields}
    return tuple([found[key] for key in keys])


def _load_struct(parsed: Any, make: type[Any]) -> Struct:
    name = parsed.__name__
    if name not in STRUCTS:
        STRUCTS[name] = Struct(name, make, _load_fields(name, make, parsed, get_type_hints(make)))
    return STRUCTS[name]


def _load_fields(
    name: str, make: type[Any], parsed: Any, annotations: Mapping[str, Any]
) -> list[Field]:
    """Return those fields of a struct that `make`, the model's, has, too."""
    defaults = dict(getattr(parsed, "default_spec", ()))
    options, names = _options_of(make), make._fields
    if options is not None:
        names, annotations = names + options._fields, {**get_type_hints(options), **annotations}
    fields = []
    for number, (code, field_name, *detail, required) in parsed.thrift_spec.items():
        key = _KEYS.get(field_name) or re.sub("([A-Z])", r"_\1", field_name).lower()
        if key not in names:
            continue  # nothing here uses it: it is skipped, as one that the interface lacks
        model = _model_in(annotations[key])
        declared = _load_type((code, *detail), model, binary=(name, field_name) in _BINARY)
        place, default = names.index(key), defaults.get(field_name)
        header = bytes((declared.code,)) + number.to_bytes(2, "big")
        fields.append(Field(number, field_name, key, place, declared, required, default, header))
    return fields


def _model_in(annotation: Any) -> type[Any] | None:
    """Find the model's class in an annotation such as `Sequence[Job] | None`, if there is one."""
    if parts := get_args(annotation):
        return next(filter(None, map(_model_in, parts)), None)
    is_model = hasattr(annotation, "_fields") or isinstance(annotation, type(IntEnum))
    return annotation if is_model else None


def _load_type(spec: Any, model: Any, *, binary: bool = False) -> Type:
    """Load a type, which thriftpy2 writes as its code, or as (code, what it is made of)."""
    code, *detail = spec if isinstance(spec, tuple) else (spec,)
    if code == ParserType.BINARY or binary:
        return Type(TType.STRING, "binary", binary=True)
    code = TType(code)
    name = code.name.lower()
    if code is TType.MAP:
        key, element = (_load_type(part, model) for part in detail[0])
        return Type(code, f"map<{key.name},{element.name}>", key=key, element=element)
    if code in (TType.LIST, TType.SET):
        element = _load_type(detail[0], model)
        return Type(code, f"{name}<{element.name}>", element=element)
    if code is TType.STRUCT:
        struct = _load_struct(detail[0], model)
        return Type(code, struct.name, struct=struct)
    if detail and model is not None:
        return Type(code, detail[0].__name__, enum=model)
    return Type(code, name)


def _load_method(method: Method) -> MethodStructs:
    parsed = getattr(INTERFACE.PinLater, f"{method}_args")
    annotations = get_type_hints(CallArguments) | {"request": REQUESTS[method]}
    arguments = [
        # The interface language has no requiredness for arguments; all of ours are.
        field._replace(required=True)
        for field in _load_fields(method, CallArguments, parsed, annotations)
    ]
    parsed = getattr(INTERFACE.PinLater, f"{method}_result")
    annotations = get_type_hints(ResultBody) | {"success": _RESULTS.get(method)}
    result = _load_fields(method, ResultBody, parsed, annotations)
    has_struct = any(field.key == "request" for field in arguments)
    return MethodStructs(
        Struct(method, CallArguments, arguments),
        Struct(f"{method} result", ResultBody, result),
        None if has_struct else REQUESTS[method],
    )


METHODS: Final = {method: _load_method(method) for method in Method}
APPLICATION_ERROR: Final = _load_struct(TApplicationException, ApplicationErrorBody)
