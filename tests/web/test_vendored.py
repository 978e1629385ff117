"""uPlot is in the package as npm has it, with its licence and checksums."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ROOT / "pinlaterd/web/static"
PUBLISHED = ROOT / "build/browser/node_modules/uplot/dist"
NOTE = (FILES / "uPlot.txt").read_text()
VENDORED = re.findall(r"^([0-9a-f]{64})  (uPlot\S+)$", NOTE, re.MULTILINE)


def test_the_note_has_the_licence_and_names_every_file():
    assert "Permission is hereby granted, free of charge" in NOTE
    assert {name for _, name in VENDORED} == {path.name for path in FILES.glob("uPlot*.*s")}


@pytest.mark.parametrize(("digest", "name"), VENDORED)
def test_a_file_is_what_the_note_says_and_npm_publishes(digest, name):
    assert hashlib.sha256((FILES / name).read_bytes()).hexdigest() == digest
    if not PUBLISHED.exists():
        pytest.skip(f"{PUBLISHED} is missing; `tools/test` installs it where npm is")
    assert (FILES / name).read_bytes() == (PUBLISHED / name).read_bytes()
