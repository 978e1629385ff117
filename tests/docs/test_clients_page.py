"""The examples of docs/clients.md are part of programs that the tests run (tests/clients)."""

from __future__ import annotations

import re
from pathlib import Path

from tests.clients.languages import LANGUAGES, SOURCES

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
EXAMPLES: list[tuple[str, str]] = re.findall(
    r"\]\(\.\./tests/clients/(\S+)\):\n\n```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL
)


def without_indentation(code: str) -> str:
    return "\n".join(line.strip() for line in code.splitlines())


def test_each_example_is_part_of_a_program_that_is_run():
    assert [path.partition("/")[0] for path, _ in EXAMPLES] == list(LANGUAGES)
    for path, example in EXAMPLES:
        program = without_indentation((SOURCES / path).read_text())
        assert without_indentation(example) in program, f"{path} differs from {PAGE}"
