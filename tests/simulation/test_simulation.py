"""Seeds of the simulation keep every promise, and broken variants of the service are caught.

Each run is a process of its own, in which the order of sets is decided by the seed, too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.variants import VARIANTS

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
SEEDS = 60
# A variant that takes more seeds than this to be caught is as good as not caught.
SEED_BUDGET = 100
# The faults that show what is missing.
WHERE = {
    "no-incarnation-check": ("--fault", "store"),
    "no-deadlines": ("--fault", "freeze"),
    "no-releases": ("--no-faults",),
    "lost-is-refused": ("--fault", "kill"),
}


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", "--processes", "1", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=840, check=False
    )


def test_seeds_keep_every_promise():
    done = simulate("--seeds", str(SEEDS))

    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    found = re.match(r"(\d+) seeds, (\d+) calls in ", done.stdout)
    assert found is not None
    seeds, calls = map(int, found.groups())
    assert seeds == SEEDS
    assert calls > 20 * SEEDS


def test_a_seed_decides_everything():
    assert simulate("--seed", "7").stdout == simulate("--seed", "7").stdout


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broken_variant_is_caught(variant):
    where = WHERE.get(variant, ())

    done = simulate("--seeds", str(SEED_BUDGET), "--variant", variant, *where)

    assert (done.returncode, done.stderr) == (1, "")
    assert "broken promises" in done.stdout
