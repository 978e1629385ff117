"""Several servers: seeds of the simulation keep every promise, and what is left out is missed.

`python -m tests.simulation.cluster --seeds 2000` runs more of them.
"""

from __future__ import annotations

from itertools import chain

import pytest

from tests.simulation.cluster import BROKEN, simulate

SEEDS = 60
# What takes more seeds than this to be found is as good as not found.
SEED_BUDGET = 100
# By what it is found, and the faults that show it; where there are none, any.
FOUND = {
    "no claim": ("serves with", ()),
    "no second look": ("serves with", ("stop claimer", "kill shard")),
    "ZooKeeper's word": ("writes again", ()),
    "no server name": ("serves with", ("stop leader", "kill shard")),
    "unchecked write": ("was assigned after", ("stop leader",)),
    "foreign node": ("is no member", ()),
    "wall-clock incarnation": ("incarnation", ()),
    "no second reading": ("does not know", ("flap", "off")),
}
# One server an epoch: only a leader whose writes are not checked gives an epoch to two.
WITH = {"no server name": {"unchecked write"}}


def test_seeds_keep_every_promise():
    assert {seed: found for seed in range(SEEDS) if (found := simulate(seed).violations)} == {}


def test_a_seed_decides_everything():
    assert simulate(5).history == simulate(5).history


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_left_out_is_missed(broken):
    text, faults = FOUND[broken]
    left_out = frozenset({broken} | WITH.get(broken, set()))
    runs = (simulate(seed, left_out, faults).violations for seed in range(SEED_BUDGET))

    assert any(text in violation for violation in chain.from_iterable(runs))
