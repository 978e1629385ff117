"""The checker can fail: each broken variant is found, by its rules, with one of these seeds. What
the simulation's variants break is left to those (tests/simulation).

A run takes several of them where none breaks another's rule, and all take the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checker.main import check
from tests.checker.variants import VARIANTS

pytestmark = pytest.mark.service

SEEDS = (2, 8, 1, 3, 4)
# So long that even a call repeated since has had its time, with what the judge allows beside.
FAULT_SECONDS = (10,)
TOGETHER = (
    ("latest-first", "one-claim-for-all", "refused-but-stored", "unanswered-calls"),
    ("forgotten-keys", "gauges-adrift", "claims-never-end"),
    ("no-claim-compare", "any-priority"),
    ("attempts-kept", "short-dequeue"),
    ("sent-is-released", "cuts-end-jobs"),
)
ALONE = [(name,) for name in VARIANTS if not any(name in names for names in TOGETHER)]


@pytest.mark.timeout(900)  # five deployments, on a busy machine
@pytest.mark.parametrize("names", [*TOGETHER, *ALONE], ids=",".join)
def test_broken_variants_are_found(
    names: tuple[str, ...], needs: Callable[[str], None], tmp_path: Path
):
    variants = [VARIANTS[name] for name in names]
    rules = {rule for variant in variants for rule in variant.rules}
    [(engine, faults, drained)] = {
        (variant.engine, variant.faults, variant.drained) for variant in variants
    }
    needs(engine)
    for turn, seed in enumerate(SEEDS):
        found = check(
            engine,
            # On a busy machine clients make few calls in that time.
            max(variant.seconds for variant in variants) * 2**turn,
            seed,
            tmp_path / str(seed),
            variant=",".join(names),
            faults=faults,
            fault_seconds=FAULT_SECONDS,
            large=False,
            first_faults=[fault for fault in faults if fault != "none"],
            drained=drained,
        )
        rules -= {violation.rule for violation in found}
        if not rules:
            return
    pytest.fail(f"not found with the seeds {SEEDS}: {rules}; but {found[:1]}")
