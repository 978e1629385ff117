"""The network between a shard and its server: slow, cut in the middle of commits, or silent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest

from pinlaterd.engines.redis import scripts
from pinlaterd.errors import ShardConnectionFailed
from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.faults.load import Load
from tests.faults.stores.store import (
    BACK_SECONDS,
    HANGING_SECONDS,
    Store,
    check_calls,
    check_others_serve,
    check_work_goes_elsewhere,
    facts_of,
)
from tests.servers.proxy import Cut

pytestmark = pytest.mark.service

# What a server is told when a batch is to be committed.
COMMITS = {"mysql": b"COMMIT", "redis": scripts.APPLY.sha.encode()}
# A commit is one round trip, or two, and slow by that.
DELAY_SECONDS = 0.25
# By then every shard has committed often enough to know what is normal.
JOBS_UNTIL_NORMAL = 3000
CUTS = (Cut.AFTER, Cut.BEFORE) * 3


@pytest.fixture
def store(store: Store) -> Iterator[Store]:
    """As the test finds it, the network is well afterwards."""
    yield store
    store.proxy.delay_seconds = 0
    store.proxy.go_on()


def test_a_slow_network(
    deployment: Deployment,
    load: Load,
    store: Store,
    wait_until: WaitUntil,
):
    """The shard says so, and gets no new work as long as it lasts."""

    def health_warning() -> str:
        return str(facts_of(deployment, store).get("health warning"))

    aside = f"{load.queue}_aside"
    with load.running(), deployment.client() as client:
        client.create_queue(aside)
        wait_until(lambda: load.progress() > JOBS_UNTIL_NORMAL, seconds=150)
        store.proxy.delay_seconds = DELAY_SECONDS
        wait_until(lambda: "is normal" in health_warning())
        check_work_goes_elsewhere(deployment, aside, without=[store])

        store.proxy.delay_seconds = 0
        wait_until(lambda: not health_warning())

    load.check()
    check_calls(load, disturbed=[store])  # on a busy machine a call may wait for too many commits


def test_connections_that_are_cut_in_the_middle_of_commits(
    deployment: Deployment,
    load: Load,
    store: Store,
    wait_until: WaitUntil,
):
    shard = deployment.pid_of(f"shard-{store.shard}")
    with load.running():
        for how in CUTS:
            before = store.proxy.cuts
            store.proxy.cut_at(COMMITS[store.shard], how)
            wait_until(partial(_is_cut, store, before))
            deployment.wait_until_serving(seconds=BACK_SECONDS)
            load.advance()

    load.check(claims_may_be_lost=True)
    check_calls(load, disturbed=[store])
    assert {type(error) for error in load.errors} <= {ShardConnectionFailed}
    assert deployment.pid_of(f"shard-{store.shard}") == shard


def _is_cut(store: Store, before: int) -> bool:
    return store.proxy.cuts > before


def test_a_network_that_swallows_everything(
    deployment: Deployment,
    load: Load,
    store: Store,
    wait_until: WaitUntil,
):
    """For longer than the lease: the server has ended the connection meanwhile, or the lease."""
    shard = deployment.pid_of(f"shard-{store.shard}")
    with load.running():
        store.proxy.hold()
        held_until = time.monotonic() + HANGING_SECONDS
        wait_until(lambda: facts_of(deployment, store).get("store warning"))
        check_others_serve(deployment, f"{load.queue}_aside", without=[store])
        wait_until(lambda: time.monotonic() > held_until)
        store.proxy.go_on()

        deployment.wait_until_serving(seconds=BACK_SECONDS)

    load.check(claims_may_be_lost=True)
    check_calls(load, disturbed=[store])
    assert deployment.pid_of(f"shard-{store.shard}") == shard
