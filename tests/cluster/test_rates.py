"""The rate of a queue is that of the whole cluster, wherever its clients are, whatever fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import pytest

from tests.cluster.site import RATES, THRIFT_PORT, Server, Site

pytestmark = [pytest.mark.service, pytest.mark.rounds, pytest.mark.timeout(300)]

SECONDS = 30.0
# In which buckets that were full are emptied, and shares find their place.
QUIET_SECONDS = 5.0
# Of its rate: what a machine that stands still for longer than a bucket lasts loses, it loses by
# right. tests/rates is strict; here the promise that no fault may break is that none gives more.
LEAST, LEAST_WITH_A_FAULT = 0.5, 0.2
FAULT_AFTER_SECONDS = 12.0

Taken = dict[str, list[tuple[float, int]]]


def pulled(site: Site, meanwhile: Callable[[], object]) -> Taken:
    routers = [f"{server.machine.address}:{THRIFT_PORT}" for server in site.servers]
    rates = [option for queue, rate in RATES.items() for option in ("--rate", f"{queue}={rate}")]
    command = ("-m", "tests.cluster.pull", "--seconds", str(QUIET_SECONDS + SECONDS))
    puller = site.clients.start(site.python, *command, *rates, *routers)
    time.sleep(FAULT_AFTER_SECONDS)
    meanwhile()
    assert puller.stdout is not None
    found: Taken = json.loads(puller.stdout.read())
    return found


def check(taken: Taken, *, least: float) -> None:
    """`least`: the part of its rate that a queue gave."""
    for queue, rate in RATES.items():
        begin = max(at for at, _ in taken[queue]) - SECONDS
        jobs = sum(count for at, count in taken[queue] if at >= begin)
        wanted = rate * SECONDS
        slack = max(2.0, 0.02 * wanted)
        assert least * wanted - slack <= jobs <= wanted + slack, f"{queue}: {jobs}"


def test_demand_that_moves_gets_the_rate(site: Site):
    check(pulled(site, lambda: None), least=LEAST)


@pytest.mark.parametrize("fault", ["off", "cut from the others"])
def test_no_fault_gives_more(site: Site, fault: str):
    def hurt() -> None:
        victim = site.follower()
        if fault == "off":
            victim.machine.off()
        else:
            cut_from_others(site, victim, site.others(victim))

    check(pulled(site, hurt), least=LEAST_WITH_A_FAULT)


def cut_from_others(site: Site, server: Server, others: Sequence[Server]) -> None:
    for other in others:
        site.network.cut(server.machine, other.machine)
