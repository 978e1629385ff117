"""The interface file: what every client is generated from, so nothing in it may ever drift."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pinlaterd
from pinlaterd import model
from pinlaterd.engines.base import Acks, StoredJob
from pinlaterd.errors import ErrorCode
from pinlaterd.model import (
    CONTINUATION_END,
    CONTINUATION_START,
    QUEUE_DEFAULT,
    FinishOutcome,
    JobState,
)
from pinlaterd.rpc.interface import INTERFACE, INTERFACE_FILE, STRUCTS, DequeueMetadata, TType


def test_enums_and_constants_are_those_of_the_code():
    enums = {each.__name__: each._NAMES_TO_VALUES for each in INTERFACE.__thrift_meta__["enums"]}

    assert enums == {
        "ErrorCode": {code.name: code.value for code in ErrorCode},
        "PinLaterFinishOutcome": {each.name: each.value for each in FinishOutcome},
        "PinLaterJobState": {state.name: state.value for state in JobState},
    }
    assert INTERFACE.PinLaterException.thrift_spec[1][2] is INTERFACE.ErrorCode
    assert INTERFACE.CONTINUATION_START == CONTINUATION_START
    assert INTERFACE.CONTINUATION_END == CONTINUATION_END


def test_defaults_of_the_model_never_contradict_the_interface():
    for name, declared in STRUCTS.items():
        of_model = declared.make._field_defaults
        for field in declared.fields:
            if field.key in of_model and declared.defaults[field.place] is not QUEUE_DEFAULT:
                assert declared.defaults[field.place] == of_model[field.key], (name, field.key)


def test_checkpoint_bodies_are_bytes_although_declared_text():
    field = STRUCTS["PinLaterCheckpointJobRequest"].fields[1]

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


# --- fields to come -------------------------------------------------------------------------

GROWN_STRUCTS = (
    "PinLaterJob",
    "PinLaterJobAckInfo",
    "PinLaterDequeueMetadata",
    "PinLaterJobInfo",
    "RequestContext",
)
GROWN_RECORDS = (
    *(model.Job, model.Payload, model.ClaimedJob, model.JobRecord),
    *(model.CallContext, model.AckInfo, DequeueMetadata, Acks, StoredJob),
)
# All that passes through a codec and through a shard, with the new field wherever there is one.
USE_GROWN_RECORDS = """
import sys
from pathlib import Path
from types import MappingProxyType
from pinlaterd.clock import Clock
from pinlaterd.config.schema import Config, ServerSettings, ShardSettings
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.model import *
from pinlaterd.rpc import codec
from pinlaterd.rpc.interface import DequeueMetadata, DequeueResponse, ResultBody
from pinlaterd.shard.service import ShardService
from pinlaterd.stats import Stats
from pinlaterd.wire.envelope import CallEntry

folder, has_field = Path(sys.argv[1]), sys.argv[2] == "True"
new = {"note": "n"} if has_field else {}
context = CallContext("web:h1", **new)

def replied(method, result):
    head = codec.Head(method.value, 1, False, True)
    assert codec.decode_reply(method, codec.encode_reply(head, result)) == result

parts = [codec.reply_head(codec.Head("dequeueJobs", 1, False, True))]
metadata = {"mail:s1:p1:7": DequeueMetadata(2, 1, "h:1:1:w:1", 60, **new)}
response = DequeueResponse({"mail:s1:p1:7": b"a"}, metadata)
codec._WRITE_RESULT["dequeueJobs"](parts, ResultBody(response))
[claimed] = codec.decode_reply(Method.DEQUEUE, b"".join(parts)).jobs
assert claimed == ClaimedJob("mail:s1:p1:7", b"a", 2, 1, "h:1:1:w:1", 60, **new)
replied(Method.DEQUEUE, DequeueResult([ClaimedJob("mail:s1:p1:8", b"", 2, 1, "", 60)]))
record = JobRecord("mail:s1:p1:7", JobState.PENDING, 2, 2, "", 1, 2, 3, None, b"a", **new)
replied(Method.LOOKUP, {"mail:s1:p1:7": record})
replied(Method.SCAN, ScanResult([record]))

config = Config(ServerSettings(), MappingProxyType({"s1": ShardSettings("s1")}))
engine = SqliteEngine(folder / "s1.sqlite")
shard = ShardService("s1", engine, config, Clock(), Stats())
shard.open()

def call(method, request):
    message = codec.encode_call(method, 1, context, request)
    read = codec.decode_call(message)
    assert (read.context, read.request) == (context, request)
    shard.backlog.append(CallEntry(1, Clock().monotonic() + 60, message))
    while not (replies := shard.replies.take()):
        shard.run_batch()
        shard.run_slice(calls_wait=False)
    return codec.decode_reply(method, replies[b""][0].payload)

call(Method.CREATE_QUEUE, CreateQueueRequest("mail"))
usual = [Job(b"a"), Job(b"b", 2), Job(b"c", 2, custom_status="s")]
named = call(Method.ENQUEUE, EnqueueRequest("mail", [*usual, Job(b"d", 3, **new), Job(b"e")]))
jobs = call(Method.DEQUEUE, DequeueRequest("mail", 10)).jobs
assert [job.body for job in jobs] == [b"a", b"e", b"b", b"c", b"d"]
first, second, *others, last = [AckInfo(j.descriptor, "t", 0, j.claim_descriptor) for j in jobs]
failed = [second._replace(retry_delay_ms=60_000, **new)]
call(Method.ACK, AckRequest("mail", [first, first, *others], failed))
call(Method.ACK, AckRequest("mail", [AckInfo(last.descriptor), AckInfo(last.descriptor)], []))
found = call(Method.LOOKUP, LookupRequest(named, True))
states = [found[name].state for name in named]
assert states == [JobState.SUCCEEDED] * 4 + [JobState.PENDING], states
assert found[named[4]].attempts_remaining == 1
assert found[named[2]].custom_status == "st"
shard.close()
print("passed through")
"""


def add_line(file: Path, behind: str, anchor: str, line: str) -> None:
    """Add a line to `file` after the first one that begins with `anchor` behind `behind`."""
    text = file.read_text()
    end = text.index("\n", text.index(f"\n{anchor}", text.index(behind)) + 1)
    file.write_text(f"{text[:end]}\n{line}{text[end:]}")


@pytest.mark.parametrize(
    ("in_interface", "in_records"),
    [
        pytest.param(True, True, id="used"),
        pytest.param(True, False, id="in the interface alone"),
        pytest.param(False, True, id="in the records alone"),
    ],
)
def test_a_field_that_is_added_breaks_nothing_and_passes_through(
    tmp_path: Path, in_interface: bool, in_records: bool
):
    shutil.copytree(Path(pinlaterd.__file__).parent, tmp_path / "pinlaterd")
    interface = tmp_path / "pinlaterd" / "rpc" / INTERFACE_FILE.name
    for name in GROWN_STRUCTS if in_interface else ():
        begin = f"struct {name} {{"
        add_line(interface, begin, "  1: ", "  300: optional string note")
    for record in GROWN_RECORDS if in_records else ():
        module = tmp_path / (record.__module__.replace(".", "/") + ".py")
        begin, last = f"class {record.__name__}(", f"    {record._fields[-1]}: "
        add_line(module, begin, last, "    note: str | None = None")

    done = subprocess.run(
        [sys.executable, "-c", USE_GROWN_RECORDS, tmp_path, str(in_interface and in_records)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "passed through\n", done.stderr
