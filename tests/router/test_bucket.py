"""Token buckets to the token, and the meter of demand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinlaterd.router.rate_limits import DemandMeter, TokenBucket

MANY = 10**12


def test_it_starts_empty_and_fills_by_its_rate():
    bucket = TokenBucket(10, now=0)

    assert bucket.take(5, 0) == 0
    assert bucket.take(5, 0.2) == 2
    assert bucket.take(5, 0.2) == 0
    assert bucket.take(5, 1.2) == 5
    assert bucket.take(9, 1.2) == 5


@pytest.mark.parametrize("rate", [0.1, 1, 1.5, 1.99, 2, 3.7, 10])
def test_it_holds_one_seconds_worth_and_at_least_one(rate):
    bucket = TokenBucket(rate, now=0)

    assert bucket.take(MANY, 1000) == max(1, math.floor(rate))
    assert bucket.take(MANY, 1000) == 0


def test_rate_0_stops():
    bucket = TokenBucket(0, now=0)

    assert bucket.take(1, 1e6) == 0
    assert bucket.seconds_to_token(1e6) == math.inf
    bucket.set_rate(5, 1e6)
    assert bucket.take(1, 1e6) == 0
    assert bucket.set_rate(0, 1e6 + 1) == 5
    assert bucket.take(1, 2e6) == 0


@settings(max_examples=20)
@given(st.floats(0.01, 1e4), st.floats(0.0005, 0.49))
def test_nothing_drifts_in_hours_of_looking_often(rate, step):
    bucket = TokenBucket(rate, now=1e6)
    steps = 20_000

    taken = sum(bucket.take(MANY, 1e6 + number * step) for number in range(steps + 1))

    assert math.floor(rate * steps * step - 1e-3) <= taken <= rate * steps * step + 1e-3


@given(
    st.floats(0.01, 1e4),
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 2000), st.floats(0, 1)), max_size=60),
)
def test_whatever_is_returned_never_more_than_the_rate_and_one_bucket(rate, calls):
    bucket, now, spent = TokenBucket(rate, now=0), 0.0, 0
    for seconds, wanted, part in calls:
        now += seconds
        taken = bucket.take(wanted, now)
        used = round(taken * part)
        bucket.put(taken - used, now)
        spent += used
        assert bucket.tokens(now) <= bucket.capacity
        assert spent <= rate * now + 1e-6


def test_a_cut_returns_what_the_smaller_bucket_cannot_hold():
    bucket = TokenBucket(10, now=0)

    assert bucket.set_rate(4, 1) == 6
    assert bucket.take(MANY, 1) == 4
    assert bucket.set_rate(2, 1) == 0

    bucket.put(100.5, 1)
    assert bucket.take(MANY, 1) == 2


@given(st.floats(0.01, 1e5), st.integers(1, 100))
def test_it_says_when_the_next_token_comes(rate, taken_before):
    bucket = TokenBucket(rate, now=0)
    bucket.take(taken_before, 5)
    if bucket.take(1, 5):
        return

    seconds = bucket.seconds_to_token(5)

    assert bucket.take(1, 5 + seconds * 0.999) == 0
    assert bucket.take(1, 5 + seconds + 1e-9) == 1


def test_demand_is_that_of_the_last_second():
    meter = DemandMeter()
    for tenth in range(50):
        meter.add(3, 100 + tenth / 10)

    assert meter.per_second(105) == pytest.approx(30, rel=0.2)
    assert meter.per_second(106.2) == 0
