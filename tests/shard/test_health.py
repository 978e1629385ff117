"""When a store is degraded, and when it is well again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.config.schema import ServerSettings
from pinlaterd.shard.health import GOOD_IN_A_ROW, LEAST_USES, StoreHealth

SETTINGS = ServerSettings(
    health_failures_in_row=3,
    health_failure_share=0.5,
    health_window_seconds=10,
    health_slow_factor=10,
    health_slow_ms=500,
)
PACE = 0.01


@pytest.fixture
def health() -> StoreHealth:
    return StoreHealth(SETTINGS)


def use(health: StoreHealth, times: int, *, at: float = 0.0, seconds: float = PACE) -> None:
    for _ in range(times):
        health.succeeded(seconds, at)


def fail(health: StoreHealth, times: int, *, at: float = 0.0) -> None:
    for _ in range(times):
        health.failed(at)


def test_a_store_that_fails_several_times_in_a_row_is_degraded(health):
    fail(health, 2)
    use(health, 1)
    fail(health, 2)
    assert not health.degraded

    fail(health, 1)

    assert health.reason == "its store failed 3 times in a row"


def test_a_store_that_fails_half_of_the_time_is_degraded(health):
    for _ in range(4):
        fail(health, 1)
        use(health, 1)
    assert not health.degraded  # too few to tell

    fail(health, 1)
    use(health, 1)
    fail(health, 1)

    assert health.reason == "its store failed 6 of 11 times within 10 s"


def test_failures_are_forgotten_once_the_window_has_passed(health):
    for second in range(60):
        fail(health, 1, at=second * 5)
        use(health, 2, at=second * 5)
    assert not health.degraded

    for second in range(300, 305):
        fail(health, 2, at=second)
        use(health, 1, at=second)
    assert health.degraded


def test_a_store_that_becomes_much_slower_than_it_was_is_degraded(health):
    use(health, LEAST_USES)
    use(health, 100, seconds=PACE * 9)
    assert not health.degraded

    use(health, 100, seconds=2.0)

    assert health.reason.startswith("its store takes ")
    assert health.reason.endswith(" ms is normal")


def test_a_store_that_has_always_been_slow_is_as_it_should_be(health):
    use(health, 1000, seconds=5.0)

    assert not health.degraded


def test_a_few_slow_commits_are_nothing(health):
    use(health, 1000)
    use(health, 2, seconds=1.0)

    assert not health.degraded


def test_of_uses_that_are_rare_a_few_slow_ones_tell(health):
    use(health, 1000)
    use(health, 1, at=10, seconds=0.7)
    assert not health.degraded

    use(health, 1, at=12, seconds=0.7)

    assert health.degraded


def test_good_uses_in_a_row_make_it_well(health):
    fail(health, 3)
    use(health, GOOD_IN_A_ROW - 1, at=1)
    fail(health, 1, at=1)
    use(health, GOOD_IN_A_ROW - 1, at=2)
    assert health.degraded

    use(health, 1, at=3)

    assert not health.degraded
    fail(health, 2, at=3)
    assert not health.degraded  # what was before does not count any more
    fail(health, 1, at=3)
    assert health.degraded


def test_slow_uses_do_not_make_it_well(health):
    use(health, LEAST_USES)
    fail(health, 3)

    use(health, 10, at=1, seconds=1.0)
    assert health.degraded

    use(health, GOOD_IN_A_ROW, at=2)
    assert not health.degraded


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 3), st.floats(0, 100))))
def test_whatever_happens_good_uses_in_a_row_make_it_well(outcomes):
    health = StoreHealth(SETTINGS)
    now = 0.0
    for well, later, seconds in outcomes:
        now += later
        if well:
            health.succeeded(seconds, now)
        else:
            health.failed(now)

    for _ in range(GOOD_IN_A_ROW):
        health.succeeded(0.0, now)

    assert not health.degraded
