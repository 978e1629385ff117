"""The rings of the history: what they say of the past, how much they take, and their file."""

from __future__ import annotations

import math

import pytest

from pinlaterd.coordinator.history import (
    LONG_STEP_MS,
    QUEUE,
    SHARD,
    STEP_MS,
    History,
    Outlines,
    load_history,
    merged_outlines,
    merged_series,
    write_history,
)
from pinlaterd.stats import Histogram

MIB = 1 << 20
NOW_MS = 1_795_673_100_000  # at the beginning of 5 min
HOUR_MS = 3_600_000


def row(**figures):
    return [figures.get(name, 0.0) for name in QUEUE.figures]


def waits(*values):
    found = Histogram()
    for value in values:
        found.add(value)
    return found


def known(history, name="mail", *, since_ms=NOW_MS, now_ms=NOW_MS):
    return history.read(QUEUE, name, since_ms, now_ms)


def test_a_point_every_five_seconds_and_gaps_where_nothing_was_known():
    history = History(MIB)
    for step in (0, 1, 4):
        history.record(QUEUE, "mail", NOW_MS + step * STEP_MS, row(ready=step), activity=1)
    history.record(
        QUEUE, "mail", NOW_MS + 5 * STEP_MS, row(ready=math.nan), waits(10, 20), activity=1
    )

    found = known(history, since_ms=NOW_MS - STEP_MS, now_ms=NOW_MS + 5 * STEP_MS)

    assert (found.step_ms, found.from_ms) == (STEP_MS, NOW_MS - STEP_MS)
    assert found.series["ready"] == [None, 0, 1, None, None, 4, None]
    assert found.series["wait_p99_ms"][:6] == [None] * 6  # nobody was handed a job
    assert found.series["wait_p99_ms"][6] == pytest.approx(20, rel=0.05)
    assert len(found.series) == 13


def test_five_minutes_have_the_mean_of_rates_greatest_ages_and_depths_and_percentiles_of_all():
    history = History(MIB)
    # 99 waits of 10 ms in each of 59 times, then 1,000 of 5 s: no mean of percentiles says that
    for step in range(60):
        samples = waits(*[10] * 9) if step < 59 else waits(*[5_000] * 100)
        most = {"oldest_ms": 9_000, "ready": 48_000} if step == 30 else {"oldest_ms": 1}
        figures = row(**{"in": step, **most})
        history.record(QUEUE, "mail", NOW_MS + step * STEP_MS, figures, samples, activity=1)

    found = known(history, since_ms=NOW_MS - HOUR_MS * 2, now_ms=NOW_MS + LONG_STEP_MS - 1)

    assert found.step_ms == LONG_STEP_MS
    assert found.series["in"][-1] == pytest.approx(29.5)
    assert found.series["oldest_ms"][-1] == 9_000
    assert found.series["ready"][-1] == 48_000
    assert found.series["wait_p50_ms"][-1] == pytest.approx(10, rel=0.05)
    assert found.series["wait_p95_ms"][-1] == pytest.approx(5_000, rel=0.05)


def test_an_hour_and_seven_days_are_kept_and_no_more():
    history = History(MIB)
    for minutes in range(0, 8 * 24 * 60, 5):
        at = NOW_MS + minutes * 60_000
        history.record(QUEUE, "mail", at, row(ready=minutes), activity=1)

    found = known(history, since_ms=NOW_MS, now_ms=at)
    hour = known(history, since_ms=at - HOUR_MS, now_ms=at)

    assert len(found.series["ready"]) == 7 * 24 * 12
    assert found.series["ready"][0] == 24 * 60
    assert len(hour.series["ready"]) == 720
    assert hour.series["ready"][-1] == minutes


def test_a_queue_takes_142_kb_and_the_quietest_keep_their_seven_days_only():
    history = History(10 * 142_272)
    history.record(SHARD, "1", NOW_MS, [0.0] * len(SHARD.figures))
    for number in range(12):
        history.record(QUEUE, f"q{number}", NOW_MS, row(**{"in": number}), activity=number + 1)

    steps = [known(history, f"q{number}").step_ms for number in range(12)]

    assert steps[0] == LONG_STEP_MS
    assert steps[11] == STEP_MS
    assert steps == sorted(steps, reverse=True)
    assert sum(map(len, history.pack())) < 10 * 142_272 + 4_096
    assert history.read(SHARD, "1", NOW_MS, NOW_MS).step_ms == STEP_MS


def test_a_queue_in_which_nothing_ever_happened_takes_no_memory():
    history = History(MIB)

    history.record(QUEUE, "mail", NOW_MS, row(), activity=0)

    assert known(history).series["ready"] == []


def test_what_was_written_is_there_again(tmp_path):
    history = History(MIB)
    history.record(QUEUE, "mail", NOW_MS, row(ready=7), waits(10), activity=1)
    history.record(SHARD, "1", NOW_MS, [3.0] * len(SHARD.figures))
    history.events.add(NOW_MS, "process", "router", "router restarted")
    path = tmp_path / "history"
    write_history(path, history.pack())

    again = load_history(path, MIB)

    later = NOW_MS + 2 * STEP_MS
    again.record(QUEUE, "mail", later, row(ready=9), activity=1)
    assert known(again, now_ms=later).series["ready"] == [7, None, 9]
    week = known(again, since_ms=NOW_MS - 2 * HOUR_MS, now_ms=later)
    assert week.series["wait_p50_ms"][-1] is None or week.series["ready"][-1] is not None
    assert [event.text for event in again.events.since(0)] == ["router restarted"]


def test_the_history_of_several_servers_adds_up():
    here, there, idle = History(MIB), History(MIB), History(MIB)
    for step in range(4):
        at = NOW_MS + step * STEP_MS
        figures = row(**{"in": 3, "oldest_ms": step})
        here.record(QUEUE, "mail", at, figures, waits(10), activity=1)
        if step:
            figures = row(**{"in": math.nan if step == 2 else 2, "oldest_ms": 1})
            there.record(QUEUE, "mail", at, figures, waits(500), activity=1)
    parts = [known(one, now_ms=NOW_MS + 3 * STEP_MS) for one in (here, there, idle)]

    found = merged_series(QUEUE, parts)

    assert (found.step_ms, found.from_ms) == (STEP_MS, NOW_MS)
    assert found.series["in"] == [3, 5, None, 5], "not known by one that was up"
    assert found.series["oldest_ms"] == [0, 1, 2, 3]
    assert found.series["wait_p99_ms"][1] == pytest.approx(500, rel=0.05)
    assert merged_series(QUEUE, parts[2:]).series["in"] == []


def test_a_server_that_was_away_has_no_part_and_one_that_starts_again_makes_a_gap():
    here, there = History(MIB), History(MIB)
    away = range(20, 60)  # of the points of 5 s: longer than a start takes
    for step in range(80):
        at = NOW_MS + step * STEP_MS
        here.record(QUEUE, "mail", at, row(ready=1), activity=1)
        if step > 5 and step not in away:
            there.record(QUEUE, "mail", at, row(ready=2), activity=1)

    now_ms = NOW_MS + 79 * STEP_MS
    parts = [known(one, now_ms=now_ms) for one in (here, there)]
    ready = merged_series(QUEUE, parts).series["ready"]

    assert len(ready) == 80
    assert (ready[5], ready[6], ready[19]) == (1, 3, 3)
    assert ready[20:31] == [None] * 11
    assert (ready[35], ready[59], ready[60]) == (1, 1, 3)


def test_long_points_are_read_where_they_are_asked_for():
    kept = History(MIB)
    kept.record(QUEUE, "mail", NOW_MS, row(ready=1), activity=1)

    found = kept.read(QUEUE, "mail", NOW_MS - 2 * STEP_MS, NOW_MS, LONG_STEP_MS)

    assert (found.step_ms, found.series["ready"][-1]) == (LONG_STEP_MS, 1)


def test_outlines_of_several_servers_add_up():
    here: Outlines = {"mail": [None, 2, 3]}
    there: Outlines = {"mail": [None, None, 4], "slow": [1, 1, 1]}
    parts = [here, there]

    assert merged_outlines("ready", parts) == {"mail": [None, 2, 7], "slow": [1, 1, 1]}
    assert merged_outlines("oldest_ms", parts)["mail"] == [None, 2, 4]


@pytest.mark.parametrize("damage", [b"", b"x", b"pinlaterd history 1\n00000000\n[]\n"])
def test_a_file_that_cannot_be_read_is_dropped_and_logged(tmp_path, caplog, damage):
    path = tmp_path / "history"
    path.write_bytes(damage)

    history = load_history(path, MIB)

    assert known(history).series["ready"] == []
    assert "is dropped" in caplog.text


def test_a_file_that_was_cut_short_is_dropped(tmp_path):
    history = History(MIB)
    history.record(QUEUE, "mail", NOW_MS, row(ready=7), activity=1)
    path = tmp_path / "history"
    write_history(path, history.pack())
    path.write_bytes(path.read_bytes()[:-1])

    assert known(load_history(path, MIB)).series["ready"] == []


@pytest.mark.parametrize("ahead_ms", [HOUR_MS // 2, HOUR_MS, 1_000 * HOUR_MS])
def test_a_clock_that_was_far_ahead_leaves_no_trace(ahead_ms: int):
    history = History(MIB)
    for at_ms, ready in (
        *((NOW_MS - STEP_MS, 1), (NOW_MS + ahead_ms, 2)),
        *((NOW_MS, 3), (NOW_MS + STEP_MS, 4)),
    ):
        history.record(QUEUE, "mail", at_ms, row(ready=ready), activity=1)

    found = known(history, since_ms=NOW_MS, now_ms=NOW_MS + STEP_MS)
    hour = known(history, since_ms=NOW_MS - HOUR_MS // 2, now_ms=NOW_MS + HOUR_MS // 2)
    assert found.series["ready"] == [3, 4]
    assert 2 not in hour.series["ready"]


def test_a_clock_that_is_set_back_writes_nothing_over():
    history = History(MIB)
    history.record(QUEUE, "mail", NOW_MS, row(ready=7), activity=1)

    history.record(QUEUE, "mail", NOW_MS - STEP_MS, row(ready=1), activity=1)

    assert known(history, since_ms=NOW_MS - STEP_MS).series["ready"] == [None, 7]
