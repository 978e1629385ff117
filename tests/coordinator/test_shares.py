"""A rate divided over those who spend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.config.schema import Config, ServerSettings, default_queue_settings
from pinlaterd.coordinator.allocator import FLOOR_FRACTION, divide
from pinlaterd.coordinator.rates import RateControl
from pinlaterd.stats import Stats
from pinlaterd.wire.control import (
    HOLDINGS,
    ControlServer,
    Holding,
    RateGrant,
    RateReport,
    RouterId,
)
from tests.clocks import FakeClock

rates = st.just(0.0) | st.floats(1e-6, 1e9)
demands = st.dictionaries(st.text(max_size=3), st.floats(0, 1e10), min_size=1, max_size=8)


@given(rates, demands)
def test_the_shares_add_up_to_the_rate_and_everybody_has_a_floor(rate, wanted):
    shares = divide(rate, wanted)

    assert sum(shares.values()) == pytest.approx(rate)
    floor = rate * FLOOR_FRACTION / len(wanted)
    assert all(share >= floor * 0.999 for share in shares.values())


@given(rates, demands)
def test_nothing_is_wasted_while_anyone_wants_more(rate, wanted):
    shares = divide(rate, wanted)

    spent = sum(min(shares[name], demand) for name, demand in wanted.items())
    assert spent >= min(rate * (1 - FLOOR_FRACTION), sum(wanted.values())) * 0.999999


@given(rates, demands)
def test_who_gets_less_than_he_wants_gets_as_much_as_anybody(rate, wanted):
    shares = divide(rate, wanted)

    for name, demand in wanted.items():
        if shares[name] < demand * 0.999999:
            assert shares[name] >= max(shares.values()) * 0.999999


def test_one_who_wants_all_gets_all_but_the_floors():
    shares = divide(100, {"router-1": 1000, "router-2": 0})

    assert shares == pytest.approx({"router-1": 99.5, "router-2": 0.5})


def test_without_demand_it_is_divided_evenly():
    assert divide(9, {"a": 0, "b": 0, "c": 0}) == pytest.approx({"a": 3, "b": 3, "c": 3})
    assert divide(9, {}) == {}
    assert divide(0, {"a": 1}) == {"a": 0}


class Control:
    """Takes what is sent, and what was noted by then."""

    def __init__(self) -> None:
        self.sent: list[tuple[RateGrant, Sequence[Holding]]] = []

    def send(self, _peer: bytes, grant: RateGrant) -> None:
        self.sent.append((grant, HOLDINGS.read()))


@pytest.mark.parametrize(("servers", "share"), [("a:1\n", 20.0), ("a:1\nb:1\n", 10.0)])
def test_a_server_of_a_set_grants_its_part_once_that_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: FakeClock, servers: str, share: float
):
    """A coordinator that comes after this one counts what routers may spend."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("set").write_text(servers)
    server = ServerSettings(server_set_file="set", server_set_name="a:1")
    limited = replace(default_queue_settings(server), max_jobs_per_second=20.0)
    config = Config(server, queues={"mail": limited})
    rates = RateControl(config, clock, Stats(), lambda _pid: True)
    router, control = RouterId("router", 1, 0), Control()

    rates.allocator.heard(b"peer", RateReport(router, 0, {}, {}, {}))
    assert rates.act(cast("ControlServer", control))

    [(grant, noted)] = control.sent
    assert grant.shares == {"mail": pytest.approx(share)}
    assert noted == [Holding(router, grant.number, grant.shares)]
