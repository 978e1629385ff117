"""README.md does not promise what does not work: its code is run against a real service."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()

pytestmark = pytest.mark.service


def code_block(holding: str) -> str:
    """The one block of Python in README.md that has these words in it."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    [found] = [block for block in blocks if holding in block]
    return found


def run(code: str, port: int, **environment: str) -> str:
    assert "9010" in code
    done = subprocess.run(
        [sys.executable, "-c", code.replace("9010", str(port))],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_of_the_tour_works(service):
    printed = run(code_block("client.enqueue"), service.port)

    assert printed.splitlines() == ["b'to: ada'", "b'to: grace'", "SUCCEEDED"]


def test_a_client_generated_by_apache_thrift_works(service, tmp_path, program_path):
    compiler = program_path("thrift", debian_package="thrift-compiler")
    interface = REPOSITORY / "thrift" / "pinlater.thrift"
    subprocess.run([compiler, "--gen", "py", "-out", str(tmp_path), str(interface)], check=True)

    code = code_block("RequestContext") + "print(done)\n"
    printed = run(code, service.port, PYTHONPATH=str(tmp_path))

    assert "jobDescriptor='mail:s" in printed
