"""tools/check-promises --cluster: what it does is what was asked for, and its table says so."""

from __future__ import annotations

import argparse
from random import Random

import pytest

from tests.checker.run import Violation
from tests.cluster.promises import Found, check, counts_of, planned
from tests.cluster.site import Site


def test_faults_come_as_often_as_asked_for_in_a_seeded_order():
    counts = counts_of("off:3,freeze:2,cut")
    names = list(planned(counts, Random(1), Found()))
    assert names == list(planned(counts, Random(1), Found()))
    assert sorted(names) == ["cut", "freeze", "freeze", "off", "off", "off"]


def test_planned_moves_go_on_until_so_many_shards_have_moved():
    found, names = Found(), []
    for name in planned(counts_of("moves:9,off:1"), Random(1), found):
        names.append(name)
        found.moved += 3 * (name == "moves")
    assert sorted(names) == ["moves", "moves", "moves", "off"]


@pytest.mark.parametrize("text", ["fire:2", "off:many", "off,,cut"])
def test_what_is_no_kind_or_count_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="is no KIND:COUNT; kinds are off, "):
        counts_of(text)


def test_the_table_tells_medians_failed_calls_and_violations():
    found = Found(moved=5)
    found.seconds["off"] += [4.0, 6.0, 5.5]
    found.violations += [Violation("no errors without faults", "x")] * 2
    found.violations.append(Violation("owners never overlap", "y"))
    assert found.table().splitlines() == [
        "fault               times  median s  longest s",
        "off                     3      5.50       6.00",
        "shards moved in order: 5",
        "failed calls outside faults: 2",
        "other violations: 1",
        "    owners never overlap: 1",
    ]


@pytest.mark.service
@pytest.mark.rounds
@pytest.mark.timeout(300)
def test_a_cluster_is_hurt_and_judged(site: Site):
    found, rng = Found(), Random(1)
    check(site, planned(counts_of("kill:1,moves:4"), rng, found), rng, found)
    assert found.violations == []
    assert found.seconds.keys() == {"kill", "moves"}
    assert found.moved >= 4
