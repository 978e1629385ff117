"""SPEC section 2: what the interface file declares, and that the Thrift compiler understands it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.conformance.api import INTERFACE_FILE

# What clients were generated from. PinLater's part never changes; fields from 100 up may be added.
DECLARED = Path(__file__).with_name("declared.thrift")


def without_comments(file: Path) -> list[str]:
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", file.read_text(), flags=re.DOTALL)
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_declares_what_clients_rely_on():
    assert without_comments(INTERFACE_FILE) == without_comments(DECLARED)


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
