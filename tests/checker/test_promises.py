"""The checker for a short while on every engine; tools/check-promises runs it for longer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checker import history
from tests.checker.main import check
from tests.checker.run import is_move_claim, rows

pytestmark = pytest.mark.service

# 90 seconds over all engines.
SECONDS = 22.5
FAULT_SECONDS = (1, 4)
# What comes first on each engine, so that no fault of another kind is left to the draw.
FIRST = {
    "sqlite": ("clock", "flushes fail", "torn log"),
    "mysql": ("drain", "mysql locks", "store cut"),
    "redis": ("store cut", "flushes fail", "torn log"),
    "redis-always": ("clock", "no processor", "store cut"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", FIRST)
def test_promises_are_kept(engine: str, needs: Callable[[str], None], tmp_path: Path):
    needs(engine)
    found = check(
        engine, SECONDS, 9, tmp_path, fault_seconds=FAULT_SECONDS, first_faults=FIRST[engine]
    )
    assert found == []
    records = list(history.read(tmp_path / "history.jsonl"))
    made = {record.arguments["kind"] for record in records if record.operation == "fault"}
    assert made >= {*FIRST[engine]}
    started = {record.arguments["program"] for record in records if record.operation == "start"}
    assert started >= {"router", "shard-1", "shard-2", "coordinator", "supervisord"}
    if "drain" in FIRST[engine]:
        stored = (row for r in records if r.operation == "row" for _, row in rows(r))
        assert any(is_move_claim(row.claim) for row in stored)
