"""docs/clients.md says what the tests run (tests/clients): programs, libraries, generators."""

from __future__ import annotations

import json
import re

from tests.clients import languages
from tests.clients.languages import LANGUAGES, SOURCES
from tests.clients.test_other_languages import EVERYWHERE, SPOKEN
from tests.docs.pages import REPOSITORY, section

PAGE = REPOSITORY / "docs" / "clients.md"
EXAMPLES: list[tuple[str, str]] = re.findall(
    r"\]\(\.\./tests/clients/(\S+)\):\n\n```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL
)
TITLES = {"python": "Python", "nodejs": "Node.js", "java": "Java", "perl": "Perl", "cpp": "C++"}


def without_indentation(code: str) -> str:
    return "\n".join(line.strip() for line in code.splitlines())


def tried() -> dict[str, list[str]]:
    """The rows of the table of what was tried, by language: library, and a cell a form."""
    rows = re.findall(r"^\| (.+) \|$", section(PAGE, "What was tried"), re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    assert cells[0] == ["language", "library", *EVERYWHERE]
    return {
        language: row[1:]
        for language, title in TITLES.items()
        for row in cells
        if re.match(rf"{re.escape(title)}[ \d]", row[0])
    }


def test_each_example_is_part_of_a_program_that_is_run():
    assert [path.partition("/")[0] for path, _ in EXAMPLES] == list(LANGUAGES)
    for path, example in EXAMPLES:
        program = without_indentation((SOURCES / path).read_text())
        assert without_indentation(example) in program, f"{path} differs from {PAGE}"


def test_the_stubs_are_made_as_they_are_in_the_tests():
    makers = (SOURCES / "languages.py").read_text()
    for language, title in TITLES.items():
        generators = re.findall(r"thrift --gen (\S+) -out gen", section(PAGE, title))
        assert generators, language
        for generator in generators:
            assert f'workshop.generate("{generator}")' in makers, f"{language}: {generator}"
    assert languages.INTERFACE == REPOSITORY / "thrift" / "pinlater.thrift"


def test_the_table_has_what_is_tried_and_nothing_else():
    rows = tried()

    assert rows.keys() == SPOKEN.keys() == LANGUAGES.keys()
    for language, (_, *answers) in rows.items():
        says_yes = [
            form for form, answer in zip(EVERYWHERE, answers, strict=True) if answer == "yes"
        ]
        assert says_yes == [form for form in EVERYWHERE if form in SPOKEN[language]], language


def test_the_table_names_the_versions_that_are_installed():
    lock = (REPOSITORY / "requirements-dev.lock").read_text()
    [python] = re.findall(r"^thrift==(\S+)", lock, re.MULTILINE)
    packages = json.loads((SOURCES / "nodejs/package-lock.json").read_text())["packages"]
    nodejs = packages["node_modules/thrift"]["version"]

    rows = tried()

    assert f"`thrift` {python} from PyPI" in rows["python"][0]
    assert f"`thrift` {nodejs} from npm" in rows["nodejs"][0]
