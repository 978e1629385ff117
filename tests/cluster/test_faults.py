"""Machines, networks and processes of a cluster fail under load: who else serves, and how soon.

Each test's load is judged: nothing that was acknowledged is lost, no job has two live claims, and
no owner writes to a store once a later one has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

import pytest

from tests.cluster import faults
from tests.cluster.faults import CUTS, DIRECTIONS, SESSION_SECONDS, cut_from
from tests.cluster.run import Run
from tests.cluster.site import MOVABLE_SHARDS, Site

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]

Note = Callable[[str, float], None]

# Cuts are tests of their own; this site's clocks can't step.
KINDS = sorted(faults.FAULTS.keys() - {"cut", "clock"})


def test_the_commonest_faults_one_after_the_other(site: Site, note: Note):
    rng = Random(1)
    with Run(site) as run:
        note("off", faults.off(run, rng))
        note("leave", faults.leave(run, rng))
        note("freeze", faults.freeze(run, rng, longest_seconds=0.0))


@pytest.mark.rounds
@pytest.mark.parametrize("name", KINDS)
def test_all_are_served_again(name: str, site: Site, rounds: range, note: Note):
    rng = Random(1)
    with Run(site) as run:
        for _ in rounds:
            note(name, faults.FAULTS[name](run, rng))


@pytest.mark.rounds
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("what", CUTS)
def test_a_server_is_cut_off(what: str, direction: str, site: Site, rounds: range, note: Note):
    with Run(site) as run:
        for _ in rounds:
            note(f"cut from {what}, {direction}", cut_from(run, what, direction))


@pytest.mark.rounds
def test_a_freeze_shorter_than_the_session_moves_nothing(site: Site, rounds: range, note: Note):
    with Run(site) as run:
        for _ in rounds:
            victim = run.follower()
            with run.fault("short freeze", holds=True) as began:
                victim.machine.freeze()
                time.sleep(SESSION_SECONDS / 3)
                victim.machine.thaw()
                thawed = time.monotonic()
                note("thawed after a short freeze", run.wait_until_served(thawed))
            assert site.take_overs(began) == []


@pytest.mark.rounds
def test_a_shard_process_is_killed(site: Site, rounds: range, note: Note):
    with Run(site) as run:
        for number in rounds:
            owners = site.owners()
            shard = MOVABLE_SHARDS[number % len(MOVABLE_SHARDS)]
            with run.fault("shard killed") as began:
                owners[shard].kill(f"shard-{shard}")
                note("a shard's process killed", run.wait_until_served(began))
            assert site.take_overs(began) == []
