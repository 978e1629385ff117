"""The interface file: what every client is generated from, so nothing in it may ever drift."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pinlaterd.errors import ErrorCode
from pinlaterd.model import CONTINUATION_END, CONTINUATION_START, JobState, Method
from pinlaterd.rpc.binding import METHODS, BoundType, defaults
from pinlaterd.rpc.interface import INTERFACE, INTERFACE_FILE, Field, Type
from pinlaterd.rpc.thrift_types import TType

STRUCTS = {
    "PinLaterJob": "1 req binary body; 2 opt byte priority = 1; 3 opt i64 runAfterTimestampMillis; "
    "4 opt i32 numAttemptsAllowed = 2; 5 opt string customStatus = ''",
    "PinLaterEnqueueRequest": "1 req string queueName; 2 req list<PinLaterJob> jobs",
    "PinLaterEnqueueResponse": "1 req list<string> jobDescriptors",
    "PinLaterJobAckInfo": "1 req string jobDescriptor; 2 opt string appendCustomStatus = ''; "
    "3 opt i64 retryDelayMillis = 0; 100 opt string claimDescriptor",
    "PinLaterJobAckRequest": "1 req string queueName; 2 opt list<PinLaterJobAckInfo> "
    "jobsSucceeded; 3 opt list<PinLaterJobAckInfo> jobsFailed",
    "PinLaterDequeueRequest": "1 req string queueName; 2 req i32 limit; "
    "3 opt PinLaterJobAckRequest jobAckRequest; 4 opt bool dryRun = False; "
    "5 opt double coverage = 1.0; 100 opt i32 maxWaitMillis",
    "PinLaterDequeueMetadata": "1 opt i32 attemptsAllowed; 2 opt i32 attemptsRemaining; "
    "100 opt string claimDescriptor; 101 opt i32 claimTimeoutSeconds",
    "PinLaterDequeueResponse": "1 opt map<string,binary> jobs; "
    "2 opt map<string,PinLaterDequeueMetadata> jobMetadata",
    "PinLaterCheckpointJobRequest": "1 req string jobDescriptor; 2 opt string newBody; "
    "3 opt bool moveToPending = False; 4 opt i64 runAfterTimestampMillis; "
    "5 opt i32 numOfAttemptsAllowed; 6 opt string prependCustomStatus; "
    "100 opt string claimDescriptor",
    "PinLaterCheckpointJobsRequest": "1 req string queueName; "
    "2 req list<PinLaterCheckpointJobRequest> requests",
    "PinLaterLookupJobRequest": "1 req list<string> jobDescriptors; 2 opt bool includeBody = False",
    "PinLaterJobInfo": "1 req string jobDescriptor; 2 req PinLaterJobState jobState; "
    "3 req i32 attemptsRemaining; 4 req string customStatus; "
    "5 req i64 createdAtTimestampMillis; 6 opt i64 runAfterTimestampMillis; "
    "7 opt i64 updatedAtTimestampMillis; 8 opt string claimDescriptor; 9 opt binary body; "
    "10 req i32 attemptsAllowed",
    "PinLaterGetJobCountRequest": "1 req string queueName; 2 req PinLaterJobState jobState; "
    "3 opt byte priority; 4 opt bool countFutureJobs = False; 5 opt string bodyRegexToMatch",
    "PinLaterScanJobsRequest": "1 req string queueName; 2 req PinLaterJobState jobState; "
    "3 opt byte priority; 4 opt bool scanFutureJobs = False; "
    "5 opt string continuation = '0'; 6 opt i32 limit = 100; 7 opt string bodyRegexToMatch",
    "PinLaterScanJobsResponse": "1 req list<PinLaterJobInfo> scannedJobs; "
    "2 opt string continuation = '-1'",
    "PinLaterRetryFailedJobsRequest": "1 req string queueName; 2 opt byte priority = 1; "
    "3 opt i32 attemptsToAllow = 1; 4 opt i64 runAfterTimestampMillis; 5 opt i32 limit = 1000",
    "PinLaterDeleteJobsRequest": "1 req string queueName; 2 req PinLaterJobState jobState; "
    "3 opt byte priority = 1; 4 opt string bodyRegexToMatch; 5 opt i32 limit = 1000",
    "PinLaterException": "1 req ErrorCode errorCode; 2 req string message; "
    "100 opt list<string> jobDescriptors",
    "RequestContext": "1 req string source; 2 opt string requestId = ''",
}

METHOD_TYPES = {
    "createQueue": ("2 string name", "void"),
    "deleteQueue": ("2 string name, 3 string password", "void"),
    "enqueueJobs": ("2 PinLaterEnqueueRequest request", "PinLaterEnqueueResponse"),
    "dequeueJobs": ("2 PinLaterDequeueRequest request", "PinLaterDequeueResponse"),
    "ackDequeuedJobs": ("2 PinLaterJobAckRequest request", "void"),
    "checkpointJobs": ("2 PinLaterCheckpointJobsRequest request", "void"),
    "lookupJobs": ("2 PinLaterLookupJobRequest request", "map<string,PinLaterJobInfo>"),
    "getJobCount": ("2 PinLaterGetJobCountRequest request", "i32"),
    "getQueueNames": ("", "set<string>"),
    "scanJobs": ("2 PinLaterScanJobsRequest request", "PinLaterScanJobsResponse"),
    "retryFailedJobs": ("2 PinLaterRetryFailedJobsRequest request", "i32"),
    "deleteJobs": ("2 PinLaterDeleteJobsRequest request", "i32"),
}


def type_text(declared: Type) -> str:
    if declared.key is not None and declared.element is not None:
        return f"map<{type_text(declared.key)},{type_text(declared.element)}>"
    if declared.element is not None:
        return f"{declared.code.name.lower()}<{type_text(declared.element)}>"
    return declared.name or ("binary" if declared.binary else declared.code.name.lower())


def field_text(field: Field) -> str:
    text = f"{field.id} {'req' if field.required else 'opt'} {type_text(field.type)} {field.name}"
    return text if field.default is None else f"{text} = {field.default!r}"


def test_structs_have_the_published_fields():
    loaded = {
        name: "; ".join(map(field_text, fields)) for name, fields in INTERFACE.structs.items()
    }

    assert loaded == STRUCTS


def test_methods_have_the_published_arguments_results_and_error():
    loaded = {}
    for name, method in INTERFACE.methods.items():
        context, *others = method.arguments
        assert (context.id, type_text(context.type), context.name) == (
            1,
            "RequestContext",
            "context",
        )
        *success, error = sorted(method.result, key=lambda field: field.id)
        assert (error.id, type_text(error.type), error.name) == (1, "PinLaterException", "e")
        assert not method.oneway
        arguments = ", ".join(f"{each.id} {type_text(each.type)} {each.name}" for each in others)
        loaded[name] = (arguments, type_text(success[0].type) if success else "void")

    assert loaded == METHOD_TYPES


def test_enums_and_constants_are_those_of_the_code():
    assert INTERFACE.enums["ErrorCode"] == {code.name: code.value for code in ErrorCode}
    assert INTERFACE.enums["PinLaterJobState"] == {state.name: state.value for state in JobState}
    assert set(INTERFACE.enums) == {"ErrorCode", "PinLaterJobState"}
    assert INTERFACE.constants == {
        "CONTINUATION_START": CONTINUATION_START,
        "CONTINUATION_END": CONTINUATION_END,
    }
    assert set(INTERFACE.methods) == {method.value for method in Method}


def bound_structs() -> dict[str, BoundType]:
    found: dict[str, BoundType] = {}

    def collect(bound: BoundType | None) -> None:
        if bound is None:
            return
        if bound.struct is not None and bound.name not in found:
            found[bound.name] = bound
            for field in bound.struct.fields.values():
                collect(field.type)
        collect(bound.key)
        collect(bound.element)

    for method in METHODS.values():
        for field in (*method.arguments.fields.values(), *method.result.fields.values()):
            collect(field.type)
    return found


def test_every_struct_is_bound_and_model_defaults_never_contradict_the_interface():
    bound = bound_structs()

    assert set(bound) == set(INTERFACE.structs)
    for name, bound_type in bound.items():
        assert bound_type.struct is not None
        of_model = getattr(bound_type.struct.make, "_field_defaults", {})
        for key, value in bound_type.struct.defaults.items():
            if key in of_model:
                assert of_model[key] == value, (name, key)
        optional = {
            field.key
            for field in bound_type.struct.fields.values()
            if field.id not in bound_type.struct.required
        }
        assert optional <= set(defaults(name)), name


def test_checkpoint_bodies_are_bytes_although_declared_text():
    checkpoint = bound_structs()["PinLaterCheckpointJobRequest"].struct

    assert checkpoint is not None
    assert checkpoint.fields[2].name == "newBody"
    assert checkpoint.fields[2].type.binary
    assert checkpoint.fields[2].type.code == TType.STRING


@pytest.mark.parametrize("language", ["py", "java", "js:node", "cpp"])
def test_the_apache_compiler_takes_it(language, tmp_path: Path, program_path):
    compiler = program_path("thrift", debian_package="thrift-compiler")

    done = subprocess.run(
        [compiler, "-strict", "--gen", language, "-o", tmp_path, INTERFACE_FILE.resolve()],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    generated = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("PinLater" in path.name for path in generated)


def test_the_package_carries_the_one_interface_file():
    published = Path(__file__).parents[2] / "thrift" / "pinlater.thrift"

    assert INTERFACE_FILE.resolve() == published.resolve()
