"""SPEC section 2: what the interface file declares, as the Thrift compiler understands it.

structs: ids, required or optional, types, names, defaults    test_struct
extensions have ids from 100 up                               test_extensions_have_high_ids
methods: arguments, result, exception                         test_method
ErrorCode, PinLaterJobState, the constants                    test_numbers_and_constants
namespaces; generated code in other languages                 test_compiles_for
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from thrift.protocol.TProtocol import TProtocolException
from thrift.Thrift import TType

from tests.conformance.api import INTERFACE_FILE, Interface

# Enums travel as i32, and the generated code knows them as that.
STRUCTS = {
    "PinLaterJob": (
        "1 req binary body; 2 opt byte priority = 1; 3 opt i64 runAfterTimestampMillis; "
        "4 opt i32 numAttemptsAllowed = 2; 5 opt string customStatus = ''"
    ),
    "PinLaterEnqueueRequest": "1 req string queueName; 2 req list jobs",
    "PinLaterEnqueueResponse": "1 req list jobDescriptors",
    "PinLaterJobAckInfo": (
        "1 req string jobDescriptor; 2 opt string appendCustomStatus = ''; "
        "3 opt i64 retryDelayMillis = 0; 100 opt string claimDescriptor"
    ),
    "PinLaterJobAckRequest": (
        "1 req string queueName; 2 opt list jobsSucceeded; 3 opt list jobsFailed"
    ),
    "PinLaterDequeueRequest": (
        "1 req string queueName; 2 req i32 limit; 3 opt struct jobAckRequest; "
        "4 opt bool dryRun = False; 5 opt double coverage = 1.0; 100 opt i32 maxWaitMillis"
    ),
    "PinLaterDequeueMetadata": (
        "1 opt i32 attemptsAllowed; 2 opt i32 attemptsRemaining; "
        "100 opt string claimDescriptor; 101 opt i32 claimTimeoutSeconds"
    ),
    "PinLaterDequeueResponse": "1 opt map jobs; 2 opt map jobMetadata",
    "PinLaterCheckpointJobRequest": (
        "1 req string jobDescriptor; 2 opt string newBody; 3 opt bool moveToPending = False; "
        "4 opt i64 runAfterTimestampMillis; 5 opt i32 numOfAttemptsAllowed; "
        "6 opt string prependCustomStatus; 100 opt string claimDescriptor"
    ),
    "PinLaterCheckpointJobsRequest": "1 req string queueName; 2 req list requests",
    "PinLaterLookupJobRequest": "1 req list jobDescriptors; 2 opt bool includeBody = False",
    "PinLaterJobInfo": (
        "1 req string jobDescriptor; 2 req i32 jobState; 3 req i32 attemptsRemaining; "
        "4 req string customStatus; 5 req i64 createdAtTimestampMillis; "
        "6 opt i64 runAfterTimestampMillis; 7 opt i64 updatedAtTimestampMillis; "
        "8 opt string claimDescriptor; 9 opt binary body; 10 req i32 attemptsAllowed"
    ),
    "PinLaterGetJobCountRequest": (
        "1 req string queueName; 2 req i32 jobState; 3 opt byte priority; "
        "4 opt bool countFutureJobs = False; 5 opt string bodyRegexToMatch"
    ),
    "PinLaterScanJobsRequest": (
        "1 req string queueName; 2 req i32 jobState; 3 opt byte priority; "
        "4 opt bool scanFutureJobs = False; 5 opt string continuation = '0'; "
        "6 opt i32 limit = 100; 7 opt string bodyRegexToMatch"
    ),
    "PinLaterScanJobsResponse": "1 req list scannedJobs; 2 opt string continuation = '-1'",
    "PinLaterRetryFailedJobsRequest": (
        "1 req string queueName; 2 opt byte priority = 1; 3 opt i32 attemptsToAllow = 1; "
        "4 opt i64 runAfterTimestampMillis; 5 opt i32 limit = 1000"
    ),
    "PinLaterDeleteJobsRequest": (
        "1 req string queueName; 2 req i32 jobState; 3 opt byte priority = 1; "
        "4 opt string bodyRegexToMatch; 5 opt i32 limit = 1000"
    ),
    "PinLaterException": "1 req i32 errorCode; 2 req string message; 100 opt list jobDescriptors",
    "RequestContext": "1 req string source; 2 opt string requestId = ''",
}

# The second and later arguments, and what is returned.
METHODS = {
    "createQueue": ("2 string name", "void"),
    "deleteQueue": ("2 string name; 3 string password", "void"),
    "enqueueJobs": ("2 PinLaterEnqueueRequest request", "PinLaterEnqueueResponse"),
    "dequeueJobs": ("2 PinLaterDequeueRequest request", "PinLaterDequeueResponse"),
    "ackDequeuedJobs": ("2 PinLaterJobAckRequest request", "void"),
    "checkpointJobs": ("2 PinLaterCheckpointJobsRequest request", "void"),
    "lookupJobs": ("2 PinLaterLookupJobRequest request", "map"),
    "getJobCount": ("2 PinLaterGetJobCountRequest request", "i32"),
    "getQueueNames": ("", "set"),
    "scanJobs": ("2 PinLaterScanJobsRequest request", "PinLaterScanJobsResponse"),
    "retryFailedJobs": ("2 PinLaterRetryFailedJobsRequest request", "i32"),
    "deleteJobs": ("2 PinLaterDeleteJobsRequest request", "i32"),
}

# What a container or a struct holds, as the generated code writes it down.
INNER_TYPES = {
    ("PinLaterEnqueueRequest", "jobs"): "PinLaterJob",
    ("PinLaterEnqueueResponse", "jobDescriptors"): "UTF8",
    ("PinLaterJobAckRequest", "jobsSucceeded"): "PinLaterJobAckInfo",
    ("PinLaterJobAckRequest", "jobsFailed"): "PinLaterJobAckInfo",
    ("PinLaterDequeueRequest", "jobAckRequest"): "PinLaterJobAckRequest",
    ("PinLaterDequeueResponse", "jobs"): "UTF8 BINARY",
    ("PinLaterDequeueResponse", "jobMetadata"): "UTF8 PinLaterDequeueMetadata",
    ("PinLaterCheckpointJobsRequest", "requests"): "PinLaterCheckpointJobRequest",
    ("PinLaterLookupJobRequest", "jobDescriptors"): "UTF8",
    ("PinLaterScanJobsResponse", "scannedJobs"): "PinLaterJobInfo",
    ("lookupJobs_result", "success"): "UTF8 PinLaterJobInfo",
    ("getQueueNames_result", "success"): "UTF8",
}

PLAIN_TYPES = {
    TType.BOOL: "bool",
    TType.BYTE: "byte",
    TType.I32: "i32",
    TType.I64: "i64",
    TType.DOUBLE: "double",
    TType.STRUCT: "struct",
    TType.MAP: "map",
    TType.SET: "set",
    TType.LIST: "list",
}


def fields_of(struct: Any) -> list[tuple[int, int, str, Any, Any]]:
    return [field for field in struct.thrift_spec if field is not None]


def type_name(kind: int, inner: Any) -> str:
    if kind == TType.STRING:
        return "binary" if inner == "BINARY" else "string"
    return PLAIN_TYPES[kind]


def inner_types(inner: Any) -> str:
    """The names in what the generated code nests to describe a container or struct."""
    if isinstance(inner, (list, tuple)):
        if inner and isinstance(inner[0], type):
            return inner[0].__name__
        return " ".join(filter(None, map(inner_types, inner)))
    return inner if isinstance(inner, str) else ""


def is_required(struct: Any, name: str) -> bool:
    """Whether the generated check of `struct` misses the field, and nothing else."""
    value = struct(**{field[2]: None if field[2] == name else 0 for field in fields_of(struct)})
    try:
        value.validate()
    except TProtocolException as error:
        return name in str(error)
    return False


def described(struct: Any) -> str:
    """A struct as the tables above write it."""
    parts = []
    for number, kind, name, inner, default in fields_of(struct):
        required = "req" if is_required(struct, name) else "opt"
        text = f"{number} {required} {type_name(kind, inner)} {name}"
        parts.append(text if default is None else f"{text} = {default!r}")
    return "; ".join(parts)


@pytest.mark.parametrize("name", STRUCTS)
def test_struct(api: Interface, name):
    struct = getattr(api.types, name)

    assert described(struct) == STRUCTS[name]


@pytest.mark.parametrize(("owner", "field"), INNER_TYPES)
def test_container_holds(api: Interface, owner, field):
    struct = getattr(api.service if owner.endswith("_result") else api.types, owner)

    (inner,) = (spec[3] for spec in fields_of(struct) if spec[2] == field)

    assert inner_types(inner) == INNER_TYPES[owner, field]


def test_extensions_have_high_ids(api: Interface):
    extensions = {
        (name, number, field)
        for name in STRUCTS
        for number, _, field, _, _ in fields_of(getattr(api.types, name))
        if number > 10
    }

    assert extensions == {
        ("PinLaterDequeueRequest", 100, "maxWaitMillis"),
        ("PinLaterDequeueMetadata", 100, "claimDescriptor"),
        ("PinLaterDequeueMetadata", 101, "claimTimeoutSeconds"),
        ("PinLaterJobAckInfo", 100, "claimDescriptor"),
        ("PinLaterCheckpointJobRequest", 100, "claimDescriptor"),
        ("PinLaterException", 100, "jobDescriptors"),
    }


@pytest.mark.parametrize("name", METHODS)
def test_method(api: Interface, name):
    arguments, returns = METHODS[name]

    context, *others = fields_of(getattr(api.service, f"{name}_args"))
    outcomes = {
        number: (field, inner_types(inner) if kind == TType.STRUCT else type_name(kind, inner))
        for number, kind, field, inner, _ in fields_of(getattr(api.service, f"{name}_result"))
    }

    assert (context[0], context[2], inner_types(context[3])) == (1, "context", "RequestContext")
    assert arguments == "; ".join(
        f"{number} {inner_types(inner) if kind == TType.STRUCT else 'string'} {field}"
        for number, kind, field, inner, _ in others
    )
    assert outcomes.pop(1) == ("e", "PinLaterException")
    assert outcomes == ({} if returns == "void" else {0: ("success", returns)})


def test_there_is_no_other_method(api: Interface):
    methods = {name for name in vars(api.service.Iface) if not name.startswith("_")}

    assert methods == set(METHODS)


def test_numbers_and_constants(api: Interface):
    assert api.types.ErrorCode._NAMES_TO_VALUES == {
        "CONTINUATION_INVALID": 400,
        "PASSWORD_INVALID": 403,
        "QUEUE_NAME_INVALID": 410,
        "QUEUE_NAME_TOO_LONG": 411,
        "QUEUE_NOT_FOUND": 413,
        "PRIORITY_NOT_SUPPORTED": 416,
        "DEQUEUE_RATE_LIMITED": 429,
        "ENQUEUE_REJECTED": 430,
        "UNKNOWN": 500,
        "NO_HEALTHY_SHARDS": 501,
        "SHARD_CONNECTION_FAILED": 502,
    }
    assert api.types.PinLaterJobState._NAMES_TO_VALUES == {
        "PENDING": 0,
        "IN_PROGRESS": 1,
        "SUCCEEDED": 2,
        "FAILED": 3,
    }
    assert api.constants.CONTINUATION_START == "0"
    assert api.constants.CONTINUATION_END == "-1"


@pytest.mark.parametrize(
    ("language", "file", "says"),
    [
        ("py", "pinlater/PinLater.py", "class Client"),
        ("java", "com/pinterest/pinlater/thrift/PinLater.java", "class PinLater"),
        ("js:node", "PinLater.js", "PinLaterClient"),
        ("cpp", "PinLater.h", "namespace pinterest { namespace pinlater {"),
    ],
)
def test_compiles_for(thrift_compiler: str, tmp_path: Path, language, file, says):
    subprocess.run(
        [thrift_compiler, "--gen", language, "-out", str(tmp_path), str(INTERFACE_FILE)],
        check=True,
        capture_output=True,
    )

    assert says in (tmp_path / file).read_text()
