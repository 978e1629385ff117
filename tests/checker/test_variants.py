"""The checker can fail: each broken variant is found, by its rules, with one of these seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checker.main import check
from tests.checker.variants import VARIANTS

pytestmark = pytest.mark.service

SEEDS = (2, 8, 1)
# Longer than a call has, with what the judge allows beside.
FAULT_SECONDS = (8,)


@pytest.mark.timeout(300)  # three deployments, on a busy machine
@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_variant_is_found(name: str, needs: Callable[[str], None], tmp_path: Path):
    variant = VARIANTS[name]
    needs(variant.engine)
    rules = {variant.rules} if isinstance(variant.rules, str) else set(variant.rules)
    missed: set[str] = set()
    for seed in SEEDS:
        found = check(
            variant.engine,
            variant.seconds,
            seed,
            tmp_path / str(seed),
            variant=name,
            faults=variant.faults,
            fault_seconds=FAULT_SECONDS,
            large=variant.large,
            drained=variant.drained,
        )
        missed = rules - {violation.rule for violation in found}
        if not missed:
            return
    pytest.fail(f"{name} was not found with the seeds {SEEDS} by {missed}: {found[:1]}")
