"""The checker for a short while on every engine; tools/check-promises runs it for longer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checker.main import check
from tests.checker.site import ENGINES

pytestmark = pytest.mark.service

SECONDS = 15.0
FAULT_SECONDS = (1, 4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ENGINES)
def test_promises_are_kept(engine: str, needs: Callable[[str], None], tmp_path: Path):
    needs(engine)
    found = check(engine, SECONDS, 9, tmp_path, fault_seconds=FAULT_SECONDS)
    assert found == []
