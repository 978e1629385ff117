"""A rate divided over those who spend it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.coordinator.allocator import FLOOR_FRACTION, divide

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
