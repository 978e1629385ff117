"""The interface file: what every client is generated from, so nothing in it may ever drift."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pinlaterd.errors import ErrorCode
from pinlaterd.model import CONTINUATION_END, CONTINUATION_START, JobState
from pinlaterd.rpc.binary import TType
from pinlaterd.rpc.interface import INTERFACE, INTERFACE_FILE, METHODS, Field, Struct, Type

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
    "PinLaterCheckpointJobRequest": "1 req string jobDescriptor; 2 opt binary newBody; "
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
    "PinLaterException": "1 req i32 errorCode; 2 req string message; "
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


def all_structs() -> dict[str, Struct]:
    found: dict[str, Struct] = {}

    def collect(declared: Type | None) -> None:
        if declared is None:
            return
        if declared.struct is not None and declared.name not in found:
            found[declared.name] = declared.struct
            for field in declared.struct.fields:
                collect(field.type)
        collect(declared.key)
        collect(declared.element)

    for method in METHODS.values():
        for field in (*method.arguments.fields, *method.result.fields):
            collect(field.type)
    return found


def field_text(field: Field) -> str:
    text = f"{field.id} {'req' if field.required else 'opt'} {field.type.name} {field.name}"
    return text if field.default is None else f"{text} = {field.default!r}"


def test_structs_have_the_published_fields():
    loaded = {name: "; ".join(map(field_text, each.fields)) for name, each in all_structs().items()}

    assert loaded == STRUCTS
    assert set(loaded) == {
        each.__name__
        for each in (
            *INTERFACE.__thrift_meta__["structs"],
            *INTERFACE.__thrift_meta__["exceptions"],
        )
    }


def test_methods_have_the_published_arguments_results_and_error():
    loaded = {}
    for method, (arguments, result, _) in METHODS.items():
        context, *others = arguments.fields
        assert field_text(context) == "1 req RequestContext context"
        *success, error = result.fields
        assert field_text(error) == "1 opt PinLaterException e"
        assert not getattr(INTERFACE.PinLater, f"{method}_result").oneway
        texts = ", ".join(f"{each.id} {each.type.name} {each.name}" for each in others)
        loaded[method.value] = (texts, success[0].type.name if success else "void")

    assert loaded == METHOD_TYPES
    assert set(loaded) == set(INTERFACE.PinLater.thrift_services)


def test_enums_and_constants_are_those_of_the_code():
    enums = {each.__name__: each._NAMES_TO_VALUES for each in INTERFACE.__thrift_meta__["enums"]}

    assert enums == {
        "ErrorCode": {code.name: code.value for code in ErrorCode},
        "PinLaterJobState": {state.name: state.value for state in JobState},
    }
    assert INTERFACE.PinLaterException.thrift_spec[1][2] is INTERFACE.ErrorCode
    assert INTERFACE.CONTINUATION_START == CONTINUATION_START
    assert INTERFACE.CONTINUATION_END == CONTINUATION_END


def test_defaults_of_the_model_never_contradict_the_interface():
    for name, declared in all_structs().items():
        of_model = declared.make._field_defaults
        for field in declared.fields:
            if field.key in of_model:
                assert declared.defaults[field.place] == of_model[field.key], (name, field.key)


def test_checkpoint_bodies_are_bytes_although_declared_text():
    field = all_structs()["PinLaterCheckpointJobRequest"].fields[1]

    assert field.name == "newBody"
    assert field.type.binary
    assert INTERFACE.PinLaterCheckpointJobRequest.thrift_spec[2][0] == TType.STRING


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
