"""A rate divided over those who spend it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.coordinator.membership import Alone
from pinlaterd.coordinator.shares import FLOOR_FRACTION, divide, server_share

rates = st.floats(0, 1e6)
demands = st.dictionaries(st.text(max_size=3), st.floats(), min_size=1, max_size=8)


@given(rates, demands)
def test_the_shares_add_up_to_the_rate_and_everybody_has_a_floor(rate, wanted):
    shares = divide(rate, wanted)

    assert sum(shares.values()) == pytest.approx(rate)
    floor = rate * FLOOR_FRACTION / len(wanted)
    assert all(share >= floor * 0.999 for share in shares.values())


def test_more_demand_more_share():
    shares = divide(100, {"router-1": 30, "router-2": 10, "router-3": 0})

    assert shares == pytest.approx(
        {"router-1": 70.833, "router-2": 25.833, "router-3": 3.333}, 1e-3
    )


def test_without_demand_it_is_divided_evenly():
    assert divide(9, {"a": 0, "b": -1, "c": float("nan")}) == {"a": 3, "b": 3, "c": 3}
    assert divide(9, {}) == {}


def test_what_is_reserved_comes_off_first():
    assert divide(10, {"a": 1}, {"cut off": 4}) == {"a": pytest.approx(6)}
    assert divide(10, {"a": 1}, {"cut off": 40}) == {"a": 0}


def test_servers_share_evenly():
    assert server_share(9, "a:1", ["a:1", "b:1", "c:1"]) == 3
    assert server_share(9, "x:1", []) == 9

    alone = Alone("host", 9010)
    assert server_share(9, alone.own, alone.servers()) == 9
