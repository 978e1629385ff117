"""How often `pinlater-admin job retry` and `job delete` repeat their calls."""

from __future__ import annotations

import pytest

from pinlaterd.admin.jobs import _in_calls


@pytest.mark.parametrize(
    ("short_seconds", "done"),
    [
        pytest.param(60.0, 10, id="a call that ends early has left nothing"),
        pytest.param(0.0, 25, id="a call whose time ran out is repeated to the limit"),
    ],
)
def test_a_call_is_repeated_only_if_its_time_ran_out(short_seconds: float, done: int):
    assert _in_calls(25, lambda left: min(10, left), short_seconds=short_seconds) == done


def test_calls_end_when_nothing_is_left():
    parts = iter([10, 5, 0])

    assert _in_calls(1000, lambda _: next(parts)) == 15
