"""Counting, merging, and the texts."""

from __future__ import annotations

from itertools import zip_longest

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pinlaterd.coordinator import pages
from pinlaterd.coordinator.pages import PrometheusText, figures, ostrich
from pinlaterd.stats import (
    Histogram,
    Stats,
    StatsSnapshot,
    apply,
    empty,
    merge,
    percentiles,
    since,
)

samples = st.lists(st.floats(0.001, 1e9), min_size=1, max_size=200)


def filled() -> Stats:
    stats = Stats()
    stats.count("mail_enqueue", 3)
    stats.gauge("mail_pending", 2)
    stats.peak("mail_oldest_ready_age_ms", 70)
    stats.record("PinLaterService.enqueueJobs_msec", 20)
    stats.record_each(("PinLaterService.enqueueJobs_msec",), [20] * 3)
    return stats


# --- histograms ---------------------------------------------------------------------------


@given(samples, st.sampled_from([0.0001, 0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_within_five_percent(values, fraction):
    histogram = Histogram()
    for value in values:
        histogram.add(value)

    [found] = percentiles(histogram, [fraction])

    rank = max(1, -(-len(values) * fraction // 1))
    exact = sorted(values)[int(rank) - 1]
    assert found == pytest.approx(exact, rel=0.05)


@given(samples, samples)
def test_merging_is_as_if_all_had_been_recorded_in_one(left, right):
    first, second, both = Stats(), Stats(), Stats()
    for value in left:
        first.record("x", value)
        both.record("x", value)
    for value in right:
        second.record("x", value)
        both.record("x", value)

    merged = merge([first.snapshot(), second.snapshot()])["histograms"]["x"]

    expected = both.snapshot()["histograms"]["x"]
    assert merged.buckets == expected.buckets
    assert merged.count == expected.count
    assert merged.sum == pytest.approx(expected.sum)
    assert (merged.minimum, merged.maximum) == (min(left + right), max(left + right))


def test_buckets_are_bounded_whatever_is_recorded():
    stats = Stats()
    for exponent in range(-330, 309):
        stats.record("x", float(f"1e{exponent}"))
        stats.record("x", -float(f"1e{exponent}"))
    stats.record("x", 0)
    stats.record("x", float("inf"))

    assert len(stats.snapshot()["histograms"]["x"].buckets) < 600


def test_many_equal_samples_count_each():
    data = filled().snapshot()["histograms"]["PinLaterService.enqueueJobs_msec"]

    assert (data.count, data.sum, data.minimum, data.maximum) == (4, 80, 20, 20)


def test_an_empty_histogram_has_no_samples():
    assert percentiles(Histogram(), [0.5, 0.99]) == [0.0, 0.0]


# --- snapshots ----------------------------------------------------------------------------


def test_a_snapshot_survives_json():
    snapshot = filled().snapshot()

    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=StatsSnapshot) == snapshot


def test_merging_adds_counters_and_gauges_and_takes_the_highest_peak():
    first, second = filled(), filled()
    second.peak("mail_oldest_ready_age_ms", 50)

    merged = merge([first.snapshot(), second.snapshot(), empty()])

    assert merged["counters"] == {"mail_enqueue": 6}
    assert merged["gauges"] == {"mail_pending": 4}
    assert merged["peaks"] == {"mail_oldest_ready_age_ms": 70}


def test_changes_applied_to_what_was_give_what_is():
    stats = filled()
    before = stats.snapshot()
    stats.take_changes()
    stats.count("mail_enqueue")
    stats.gauge("mail_pending", 2)  # as it was
    stats.record("new", 1)

    changes = stats.take_changes()

    assert changes.now["counters"] == {"mail_enqueue": 4}
    assert not changes.now["gauges"]
    assert list(changes.now["histograms"]) == ["new"]
    apply(before, changes)
    assert before == stats.snapshot()
    assert not stats.take_changes()


def test_all_figures_of_a_queue_go_with_it():
    stats, shown = filled(), filled().snapshot()
    stats.count("mail_enqueue_enqueue")  # of another queue
    stats.record_each(("job_body_size_mail",), [3])
    apply(shown, stats.take_changes())

    stats.drop_queue("mail")
    stats.drop_gauge("never there")
    apply(shown, stats.take_changes())

    assert shown == stats.snapshot()
    assert shown["counters"] == {"mail_enqueue_enqueue": 1}
    assert not shown["gauges"]
    assert not shown["peaks"]
    assert list(shown["histograms"]) == ["PinLaterService.enqueueJobs_msec"]


# --- texts --------------------------------------------------------------------------------


def test_ostrichs_layout():
    assert ostrich(filled().snapshot()) == (
        "counters:\n"
        "  mail_enqueue: 3\n"
        "gauges:\n"
        "  mail_oldest_ready_age_ms: 70\n"
        "  mail_pending: 2\n"
        "labels:\n"
        "metrics:\n"
        "  PinLaterService.enqueueJobs_msec: (average=20, count=4, maximum=20, minimum=20, "
        "p50=20, p90=20, p95=20, p99=20, p999=20, p9999=20, sum=80)\n"
    )
    assert list(figures(filled().snapshot())) == ["counters", "gauges", "labels", "metrics"]


def test_a_name_can_not_forge_a_line():
    stats = Stats()
    stats.count("engine\ncounters:\n  x")

    assert ostrich(stats.snapshot()).count("\n") == 5


def series(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_prometheus_has_queue_method_code_and_process_as_labels():
    stats = filled()
    stats.count("PinLater.dequeueJobs.errors.QUEUE_NOT_FOUND")
    stats.count("my_mail_ack_noop", 2)
    stats.record("job_body_size_mail", 200)
    stats.record("mail_dequeue_delay_ms", 5)
    stats.gauge("shard_buffer_bytes", 7)
    stats.gauge("mail_rate_share", 2.5)

    found = series(
        b"".join(PrometheusText().of({"shard-1": stats.snapshot(), "shard-2": filled().snapshot()}))
    )

    one, two = ("process", "shard-1"), ("process", "shard-2")
    mail, method = ("queue", "mail"), ("method", "dequeueJobs")
    assert found["pinlaterd_queue_enqueue_total", (one, mail)] == 3
    assert found["pinlaterd_queue_enqueue_total", (two, mail)] == 3
    assert found["pinlaterd_queue_ack_noop_total", (one, ("queue", "my_mail"))] == 2
    assert found["pinlaterd_errors_total", (("code", "QUEUE_NOT_FOUND"), method, one)] == 1
    assert found["pinlaterd_queue_depth", (one, mail, ("state", "pending"))] == 2
    assert found["pinlaterd_queue_oldest_ready_age_ms", (one, mail)] == 70
    assert found["pinlaterd_queue_rate_share", (one, mail)] == 2.5
    assert found["pinlaterd_job_body_size_bytes_count", (one, mail)] == 1
    assert found["pinlaterd_queue_dequeue_delay_ms_sum", (one, mail)] == 5
    assert found["pinlaterd_shard_buffer_bytes", (one,)] == 7
    quantile = (("method", "enqueueJobs"), one, ("quantile", "0.99"))
    assert found["pinlaterd_call_msec", quantile] == 20


names = st.text(max_size=20) | st.sampled_from(
    ["a_enqueue", "a_b_enqueue", "job_body_size_a_dequeue_delay_ms", "a.b", "a-b", 'q"\\\n_enqueue']
)


@given(st.lists(names, max_size=8), st.text(max_size=8))
def test_prometheus_text_is_valid_whatever_things_are_called(found_names, process):
    stats = Stats()
    for name in found_names:
        stats.count(name)
        stats.gauge(name, 1)
        stats.record(name, 1)
    snapshots = {process: stats.snapshot(), "shard-1": stats.snapshot()}

    text = b"".join(PrometheusText().of(snapshots))

    families = list(text_string_to_metric_families(text.decode()))
    keys = [
        (sample.name, *sorted(sample.labels.items()))
        for family in families
        for sample in family.samples
    ]
    assert len(keys) == len(set(keys))


@pytest.fixture
def made(monkeypatch):
    """The names of figures whose lines were made."""
    found: list[str] = []

    def noted(process, kind, name, figure, make=pages._lines):
        found.append(name)
        return make(process, kind, name, figure)

    monkeypatch.setattr(pages, "_lines", noted)
    return found


def test_prometheus_makes_again_only_what_has_changed(made):
    """With 10,000 queues a page has hundreds of thousands of lines."""
    stats = filled()
    shown, text = stats.snapshot(), PrometheusText()
    stats.take_changes()
    before = b"".join(text.of({"shard-1": shown}))
    assert sorted(made) == sorted(
        [*shown["counters"], *shown["gauges"], *shown["peaks"], *shown["histograms"]]
    )

    made.clear()
    assert b"".join(text.of({"shard-1": shown})) == before
    assert not made

    stats.count("mail_enqueue")
    stats.record("PinLaterService.enqueueJobs_msec", 30)
    stats.count("other_enqueue")
    stats.drop_gauge("mail_pending")
    apply(shown, stats.take_changes())
    after = b"".join(text.of({"shard-1": shown}))
    assert sorted(made) == ["PinLaterService.enqueueJobs_msec", "mail_enqueue", "other_enqueue"]
    assert after == b"".join(PrometheusText().of({"shard-1": shown}))


def test_a_page_of_prometheus_is_made_in_short_parts_beside_others(made):
    """The loop serves others between two parts; some of them ask for this page, too."""
    stats, text = Stats(), PrometheusText()
    for number in range(6_000):
        stats.count(f"q{number}_enqueue")
    one = stats.snapshot()
    stats.count("q1_enqueue")
    stats.count("new_enqueue")
    two = stats.snapshot()

    for parts in zip_longest(text.of({"shard-1": one}), text.of({"shard-1": two}), fillvalue=b""):
        assert len(made) <= 2 * 2_000
        assert max(part.count(b"\n") for part in parts) <= 5_000
        made.clear()

    last = b"".join(text.of({"shard-1": two}))
    assert series(last) == series(b"".join(PrometheusText().of({"shard-1": two})))


# --- what came in between -----------------------------------------------------------------


def test_since_has_what_was_counted_and_recorded_in_between():
    stats = filled()
    before = stats.snapshot()
    stats.count("mail_enqueue", 4)
    stats.record_each(("PinLaterService.enqueueJobs_msec",), [1000] * 10)

    recent = since(before, stats.snapshot())

    assert recent["counters"] == {"mail_enqueue": 4}
    assert recent["gauges"] == before["gauges"]
    found = recent["histograms"]["PinLaterService.enqueueJobs_msec"]
    assert (found.count, found.sum) == (10, 10_000)
    assert percentiles(found, (0.01, 0.99)) == pytest.approx([1000, 1000], rel=0.05)


def test_since_takes_totals_that_began_restarted_as_a_whole():
    before = filled().snapshot()
    restarted = Stats()
    restarted.count("mail_enqueue", 1)
    restarted.record("PinLaterService.enqueueJobs_msec", 7)

    recent = since(before, restarted.snapshot())

    assert recent["counters"] == {"mail_enqueue": 1}
    assert recent["histograms"]["PinLaterService.enqueueJobs_msec"].count == 1
