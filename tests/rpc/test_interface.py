"""The interface file: what every client is generated from, so nothing in it may ever drift."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pinlaterd.errors import ErrorCode
from pinlaterd.model import CONTINUATION_END, CONTINUATION_START, JobState
from pinlaterd.rpc.interface import INTERFACE, INTERFACE_FILE, STRUCTS, TType


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
    for name, declared in STRUCTS.items():
        of_model = declared.make._field_defaults
        for field in declared.fields:
            if field.key in of_model:
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
