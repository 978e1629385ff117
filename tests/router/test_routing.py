"""Choosing, dividing and merging: pure functions, tried on all that may come."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import cast
from unittest.mock import Mock, patch

from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.model import (
    CONTINUATION_END,
    AckInfo,
    AckRequest,
    JobRecord,
    JobState,
    ScanKey,
    ScanResult,
)
from pinlaterd.router import fan_out
from pinlaterd.router.enqueue import split_evenly
from pinlaterd.router.fan_out import acks_by_shard, merge_scans, share_of_oldest, share_of_page
from pinlaterd.router.shards import cover, less_loaded, plan_round
from pinlaterd.wire.link import ShardLink


def record(run_after_ms: int, shard: str, priority: int = 1, local_id: int = 1) -> JobRecord:
    descriptor = f"q:s{shard}:p{priority}:{local_id}"
    return JobRecord(descriptor, JobState.PENDING, 1, 1, "", 0, run_after_ms, 0, None, None)


def shards_with_calls(in_flight: Sequence[int]) -> list[ShardLink]:
    return cast("list[ShardLink]", [Mock(calls_in_flight=calls) for calls in in_flight])


def test_the_less_loaded_of_two_is_chosen():
    idle, busy = shards_with_calls([0, 9])

    assert {less_loaded([idle, busy], Random(n)) for n in range(50)} == {idle}


@given(st.integers(1, 20), st.floats(0.0001, 1.0))
def test_coverage_is_a_rounded_share_of_distinct_shards(count, coverage):
    covered = cover(range(count), coverage, Random(1))

    assert len(covered) == len(set(covered)) == max(1, round(coverage * count))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 100))
def test_a_round_never_asks_for_more_than_is_wanted(ready, wanted):
    portions = plan_round(ready, wanted)

    assert sum(jobs for _, jobs in portions) <= wanted
    assert all(jobs >= 0 for _, jobs in portions)


def test_one_shard_that_may_have_all_is_asked_alone():
    assert plan_round([3, 100, 100], 50) == [(1, 50)]


def test_without_hints_all_are_asked_what_they_hold():
    assert plan_round([0, 0], 10) == [(0, 0), (1, 0)]


def test_acks_are_divided_by_shard_and_the_bad_ones_named():
    request = AckRequest(
        "mail",
        succeeded=[AckInfo("mail:s1:p1:1"), AckInfo("mail:s2:p1:2"), AckInfo("nonsense")],
        failed=[AckInfo("mail:s1:p2:3"), AckInfo("other:s1:p1:4"), AckInfo("mail:s9:p1:5")],
    )

    requests, bad = acks_by_shard(request, {"1": "one", "2": "two"})

    assert [info.descriptor for info in requests["one"].succeeded] == ["mail:s1:p1:1"]
    assert [info.descriptor for info in requests["one"].failed] == ["mail:s1:p2:3"]
    assert [info.descriptor for info in requests["two"].succeeded] == ["mail:s2:p1:2"]
    assert bad == ["nonsense", "other:s1:p1:4", "mail:s9:p1:5"]


@given(st.integers(1, 100_000), st.integers(1, 1000))
def test_parts_are_few_full_and_nearly_equal(count, most):
    parts = split_evenly(count, most)

    assert sum(parts) == count
    assert max(parts) <= most
    assert max(parts) - min(parts) <= 1
    assert len(parts) == -(-count // most)


@given(
    st.lists(st.lists(st.integers(0, 50)).map(sorted), min_size=1, max_size=5), st.integers(0, 60)
)
def test_shares_are_those_of_the_oldest(candidates, limit):
    shares = share_of_oldest(dict(enumerate(candidates)), limit)

    taken = sorted(age for place, share in shares.items() for age in candidates[place][:share])
    assert taken == sorted(age for ages in candidates for age in ages)[:limit]
    assert all(shares.values())


def test_merged_scans_go_on_right_behind_the_last_job():
    one = ScanResult([record(30, "1"), record(10, "1")])
    two = ScanResult([record(30, "2"), record(20, "2")])

    merged = merge_scans([one, two], limit=3)

    assert [job.descriptor for job in merged.jobs] == ["q:s1:p1:1", "q:s2:p1:1", "q:s2:p1:1"]
    assert [job.run_after_ms for job in merged.jobs] == [30, 30, 20]
    assert ScanKey.parse_token(merged.continuation) == ScanKey(20, "2", 1, 1)


@given(
    st.integers(-(2**60), 2**60),
    st.from_regex(r"[A-Za-z0-9-]{1,16}", fullmatch=True),
    st.integers(1, 127),
    st.integers(0, 2**62),
)
def test_a_scan_token_is_read_back(run_after_ms, shard, priority, local_id):
    key = ScanKey(run_after_ms, shard, priority, local_id)

    assert ScanKey.parse_token(key.token()) == key


@given(st.text())
def test_other_tokens_are_none_of_ours(token):
    parsed = ScanKey.parse_token(token)

    assert parsed is None or parsed.token() == token


def test_a_scan_ends_where_a_shard_that_has_not_finished_does():
    unfinished = ScanResult([record(30, "1")], ScanKey(30, "1", 1, 1).token())
    whole = ScanResult([record(40, "2"), record(20, "2")])

    merged = merge_scans([unfinished, whole], limit=10)

    assert [job.run_after_ms for job in merged.jobs] == [40, 30]
    assert merged.continuation == unfinished.continuation


def test_shards_read_little_more_of_a_long_page_than_it_holds():
    assert [share_of_page(1_000, shards) for shards in (1, 2, 20)] == [1_000] * 3
    assert [share_of_page(2_000, shards) for shards in (1, 2, 20)] == [2_000, 1_125, 112]


@given(
    st.lists(st.lists(st.integers(0, 30)), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_long_pages_meet_each_job_once_and_in_order(times, limit):
    held = {
        str(shard): sorted((record(at, str(shard), 1, n) for n, at in enumerate(of)), key=_place)
        for shard, of in enumerate(times, 1)
    }
    found: list[JobRecord] = []
    after = None
    while after is None or after != CONTINUATION_END:
        with patch.object(fan_out, "_FULL_PAGE_JOBS", 3):
            share = share_of_page(limit, len(held))
        page = merge_scans([_part(jobs, share, after) for jobs in held.values()], limit)
        assert len(page.jobs) <= limit
        found += page.jobs
        after = page.continuation

    assert found == sorted((job for jobs in held.values() for job in jobs), key=_place)


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)), st.integers(1, 9))
def test_a_scan_goes_on_right_when_a_shard_comes_back_between_two_pages(one, two, limit):
    held = {
        shard: sorted((record(at, shard, 1, n) for n, at in enumerate(times)), key=_place)
        for shard, times in (("1", one), ("2", two))
    }
    first = page = merge_scans([_part(held["1"], limit, None)], limit)
    found = list(page.jobs)
    while page.continuation != CONTINUATION_END:
        parts = [_part(jobs, limit, page.continuation) for jobs in held.values()]
        page = merge_scans(parts, limit)
        found += page.jobs

    came_back = ScanKey.parse_token(first.continuation)
    behind = [job for job in held["2"] if came_back and _place(job) > came_back.sort_key()]
    assert found == sorted([*held["1"], *behind], key=_place)


def _place(job: JobRecord) -> tuple[int, str, int, int]:
    _, shard, priority, local_id = job.descriptor.split(":")
    return ScanKey(job.run_after_ms, shard[1:], int(priority[1:]), int(local_id)).sort_key()


def _part(jobs: Sequence[JobRecord], most: int, after: str | None) -> ScanResult:
    """A shard's answer to one call of a scan."""
    key = ScanKey.parse_token(after) if after else None
    left = [job for job in jobs if key is None or _place(job) > key.sort_key()]
    if len(left) <= most:
        return ScanResult(left)
    age, shard, priority, local_id = _place(left[most - 1])
    return ScanResult(left[:most], ScanKey(-age, shard, priority, local_id).token())
