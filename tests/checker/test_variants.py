"""The checker can fail: each broken variant is found, by its rule, with one of these seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checker.main import check
from tests.checker.variants import VARIANTS

pytestmark = pytest.mark.service

SEEDS = (1, 2, 3)
# Longer than a call has, with what the judge allows beside.
FAULT_SECONDS = (8,)


@pytest.mark.timeout(300)  # three deployments, on a busy machine
@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_variant_is_found(name: str, needs: Callable[[str], None], tmp_path: Path):
    variant = VARIANTS[name]
    needs("sqlite")
    for seed in SEEDS:
        found = check(
            "sqlite",
            variant.seconds,
            seed,
            tmp_path / str(seed),
            variant=name,
            faults=variant.faults,
            fault_seconds=FAULT_SECONDS,
            large=variant.large,
            drained=False,
        )
        if variant.rule in {violation.rule for violation in found}:
            return
    pytest.fail(f"{name} was not found with the seeds {SEEDS}: {found[:1]}")
