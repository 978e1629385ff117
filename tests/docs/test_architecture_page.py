"""The packages and modules: what docs/architecture.md and docstrings list is what is there."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from pinlaterd.config.kinds import KINDS
from tests.docs.pages import REPOSITORY, section

_SOURCES = REPOSITORY / "pinlaterd"
_PACKAGES = sorted(path.parent for path in _SOURCES.glob("*/**/__init__.py"))
# "NAME, NAME   what they are for"; a long list of names may have a line of its own.
_ROW = re.compile(r"^(?:    )?([\w.]+(?:, [\w.]+)*  +(?=\S)|[\w.]+(?:, [\w.]+)+$)", re.MULTILINE)
_LAYER = re.compile(r"^    (\w+(?: │ \w+)*)  ", re.MULTILINE)


@pytest.mark.parametrize("package", _PACKAGES, ids=lambda path: str(path.relative_to(_SOURCES)))
def test_the_docstring_of_a_package_lists_its_modules(package: Path) -> None:
    source = (package / "__init__.py").read_text("utf-8")
    docstring = ast.get_docstring(ast.parse(source), clean=False) or ""
    listed = [name for row in _ROW.findall(docstring) for name in row.strip().split(", ")]

    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    texts = {path.name for path in package.iterdir() if path.suffix in {".sql", ".lua"}}
    assert sorted(listed) == sorted(modules | packages | texts)


def test_operators_read_of_every_kind_of_process() -> None:
    operations = REPOSITORY / "docs/operations.md"
    table = section(operations, "The processes")
    restarts = section(operations, "Restarts and upgrades")

    assert [kind.name for kind in KINDS if f"\n| `{kind.name}" not in table] == []
    assert [kind.name for kind in KINDS if kind.name not in restarts] == []


def test_the_layers_of_the_page_are_those_that_imports_obey() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    page = section(REPOSITORY / "docs/architecture.md", "The packages")

    assert _LAYER.findall(page) == [layer.replace("|", "│") for layer in layers]
