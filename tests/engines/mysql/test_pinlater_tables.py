"""Tables that PinLater made, with its jobs in all states, served as they stand."""

from __future__ import annotations

from typing import Any

import pytest

from pinlaterd.engines.base import Checkpoint, Release, Search
from pinlaterd.engines.mysql import searcher as searcher_module
from pinlaterd.engines.mysql.searcher import MysqlSearcher
from pinlaterd.model import Job, JobKey, JobOptions, JobState, PendingKey
from tests.clocks import FakeClock
from tests.conformance.engine.harness import END_OF_TIME_MS, QUEUE, Ack, EngineHarness, keyed
from tests.engines.mysql.conftest import NewEngine
from tests.servers.pinlater import make_tables

SECOND = 1000
CLAIM = "host:9010:1600000000000:web:7"
PENDING, RUNNING, DONE, FAILED = (JobKey(1, number) for number in (1, 4, 7, 10))


@pytest.fixture(params=["latin1", "utf8mb4"])
def charset(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def old(
    stranger: Any, shard: str, table: str, charset: str, new_engine: NewEngine, clock: FakeClock
):
    """PinLater's jobs, two minutes old; its server counted ids in steps of three."""
    make_tables(stranger, shard, QUEUE, charset)
    stranger.execute("SET time_zone = '+00:00', auto_increment_increment = 3")
    stranger.execute("SET auto_increment_offset = 1")
    enqueued = clock.now_ms() // SECOND - 120
    for state, claim, status in (
        (0, None, ""),
        (1, CLAIM, "café;"),
        (2, CLAIM, None),
        (3, CLAIM, "why"),
    ):
        stranger.execute(
            f"INSERT INTO {table} (state, claim_descriptor, attempts_allowed, attempts_remaining,"
            " custom_status, updated_at, created_at, run_after, body) VALUES"
            " (%s, %s, 3, %s, %s, FROM_UNIXTIME(%s), FROM_UNIXTIME(%s), FROM_UNIXTIME(%s), %s)",
            (state, claim, 0 if state == 3 else 2, status, *[enqueued] * 3, b"old\xff\0"),
        )
    store = EngineHarness(new_engine, clock)
    yield store
    store.engine.close()


def test_jobs_are_found_as_pinlater_left_them(old: EngineHarness):
    enqueued_ms = (old.now_ms // SECOND - 120) * SECOND

    assert old.states([PENDING, RUNNING, DONE, FAILED]) == list(JobState)
    running = old.job(RUNNING)
    assert running.claim_descriptor == CLAIM
    assert running.custom_status == "café;"
    assert running.body == b"old\xff\0"
    assert (running.attempts_allowed, running.attempts_remaining) == (3, 2)
    assert running.created_at_ms == running.run_after_ms == running.updated_at_ms == enqueued_ms
    assert old.job(DONE).custom_status == ""
    assert old.depths() == dict.fromkeys([(1, state) for state in JobState], 1)


def test_jobs_are_served_and_finished(old: EngineHarness):
    [claimed] = old.claim()
    assert claimed.key == PENDING
    assert claimed.payload == (b"old\xff\0", 3, 2)
    assert old.succeed(Ack(PENDING, "ok", 0, claimed.claim_descriptor)).succeeded == 1
    assert old.fail(Ack(RUNNING, "no", 60 * SECOND, CLAIM)).requeued == [
        (1, PendingKey((old.now_ms // SECOND + 60) * SECOND, RUNNING.local_id))
    ]
    retried = old.engine.retry_failed(
        QUEUE, 1, attempts=1, run_after_ms=old.now_ms, limit=9, now_ms=old.now_ms
    )

    assert [job.key.local_id for job in retried] == [FAILED.local_id]
    assert old.job(PENDING).custom_status == "ok"
    assert old.job(RUNNING).custom_status == "café;no"
    assert old.states([PENDING, RUNNING, DONE, FAILED]) == [
        JobState.SUCCEEDED,
        JobState.PENDING,
        JobState.SUCCEEDED,
        JobState.PENDING,
    ]


def test_times_are_floored_to_whole_seconds_and_told_so(old: EngineHarness, clock: FakeClock):
    clock.advance(0.789 - old.now_ms % SECOND / SECOND)
    [key] = old.enqueue(Job(b"new", run_after_ms=old.now_ms + 1))
    whole_ms = old.now_ms - old.now_ms % SECOND

    assert old.now_ms % SECOND == 789
    job = old.job(key)
    assert job.created_at_ms == job.run_after_ms == job.updated_at_ms == whole_ms
    keys = old.engine.read_pending(QUEUE, 1, after=None, until_ms=END_OF_TIME_MS, limit=9)
    assert PendingKey(whole_ms, key.local_id) in keys
    stored = PendingKey(whole_ms, key.local_id)
    last_read = PendingKey(old.now_ms, 2**63 - 1)  # as the ready index remembers where it has been
    for after, found in (
        (PendingKey(whole_ms, key.local_id - 1), [stored]),
        (PendingKey(whole_ms - 1, 2**63 - 1), [stored]),
        (stored, []),
        (last_read, []),
    ):
        behind = old.engine.read_pending(QUEUE, 1, after=after, until_ms=END_OF_TIME_MS, limit=9)
        assert behind == found
    old.claim()
    back = old.checkpoint(Checkpoint(key, old.now_ms + 1500, move_to_pending=True)).requeued
    assert back == [(1, PendingKey(whole_ms + 2 * SECOND, key.local_id))]
    assert old.job(key).run_after_ms == whole_ms + 2 * SECOND


def test_claims_time_out_never_early(old: EngineHarness, clock: FakeClock):
    clock.advance(0.9 - old.now_ms % SECOND / SECOND)
    old.succeed(RUNNING)
    [claimed] = old.claim()
    claimed_ms = old.now_ms

    def expire(age_ms: int):
        return old.engine.release_expired(
            QUEUE, claimed_before_ms=claimed_ms + age_ms, limit=9, now_ms=old.now_ms
        )

    assert expire(-200) == expire(0) == expire(50) == ([], 0)
    assert [job.key.local_id for job in expire(SECOND).retried] == [claimed.key.local_id]


@pytest.mark.parametrize("index", ["", "updated_at", "updated_at, local_id"])
def test_garbage_goes_by_its_age(old: EngineHarness, stranger: Any, table: str, index: str):
    """Whether or not somebody has made an index for it."""
    if index:
        stranger.execute(f"ALTER TABLE {table} ADD INDEX (state, {index})")
        old.reopen()

    def collect(state: JobState, age_seconds: int) -> int:
        return old.engine.collect_garbage(
            QUEUE, state, updated_before_ms=old.now_ms - age_seconds * SECOND, limit=9
        )

    assert collect(JobState.SUCCEEDED, 200) == 0
    assert collect(JobState.SUCCEEDED, 60) == 1
    assert collect(JobState.FAILED, 60) == 1


def test_a_claim_given_back_is_pending_again(old: EngineHarness):
    [claimed] = old.claim()

    requeued = old.release(Release(claimed.key, claimed.claim_descriptor))

    assert requeued == [(1, PendingKey(old.job(PENDING).run_after_ms, PENDING.local_id))]
    assert old.job(PENDING).claim_descriptor is None


def test_texts_that_the_charset_lacks_are_stored_with_question_marks(
    old: EngineHarness, charset: str
):
    [key] = old.enqueue(Job(b"a", custom_status="é日🦆"))
    claims = old.claim(source="wörker日")
    [claimed] = [one for one in claims if one.key == key]
    old.checkpoint(Checkpoint(key, None, prepend_custom_status="ü本"), source="wörker日")

    result = old.succeed(Ack(key, "語ñ", 0, claimed.claim_descriptor))

    assert result.succeeded == 1
    whole = "ü本é日🦆語ñ"
    assert old.job(key).custom_status == (whole if charset == "utf8mb4" else "ü?é??" + "?ñ")


def test_texts_that_differ_from_job_to_job_are_put_to_those_that_are_there(old: EngineHarness):
    keys = old.enqueue(*[Job(b"a", custom_status="ß") for _ in range(4)])
    old.claim(source="w")
    texts = ["é", "ñ", "x", "ü"]

    done = old.checkpoint(
        *[
            Checkpoint(key, None, prepend_custom_status=text)
            for key, text in zip(keys, texts, strict=True)
        ],
        source="w",
    ).done
    acks = [Ack(key, text) for key, text in zip(keys, texts, strict=True)]
    assert (done, old.succeed(*acks[:2]).succeeded, old.fail(*acks[2:]).failed) == (4, 2, 2)

    assert [old.job(key).custom_status for key in keys] == [f"{t}ß{t}" for t in texts]


def test_searches_read_them(old: EngineHarness):
    searcher = old.engine.searcher()()

    for state, key in zip(JobState, (PENDING, RUNNING, DONE, FAILED), strict=True):
        present = Search(QUEUE, state, (1, 2, 3), future=False, now_ms=old.now_ms)
        [job] = searcher.scan(present._replace(body_regex="^old"))
        assert job == old.job(key)._replace(body=None)
        assert [searcher.count(present._replace(future=future)) for future in (False, True)] == [
            1,
            0,
        ]
    searcher.close()


def test_pages_that_the_server_sorts_are_large(old: EngineHarness, monkeypatch: pytest.MonkeyPatch):
    """PinLater has an index by run-after, which pending jobs are walked by, and none by the end."""
    searcher, sizes = old.engine.searcher()(), []
    page_of = MysqlSearcher._page

    def page(self: MysqlSearcher, search: Search, *place: Any) -> Any:
        sizes.append(place[-1])
        return page_of(self, search, *place)

    monkeypatch.setattr(MysqlSearcher, "_page", page)
    for state, by_end in ((0, False), (3, False), (3, True)):
        search = Search(QUEUE, JobState(state), newest_end_first=by_end)
        assert len(searcher.scan(search)) == 1
    searcher.close()

    assert sizes == [searcher_module._KEYS, *[searcher_module._SORTED_KEYS] * 2]


def test_a_key_whose_job_pinlater_deleted_is_free(old: EngineHarness, stranger: Any, table: str):
    old.enqueue_keyed(keyed("k"))
    stranger.execute(f"DELETE FROM {table}")

    assert old.engine.find_keys(QUEUE, ["k"]) == {}
    [new] = old.enqueue_keyed(keyed("k"))
    assert old.engine.find_keys(QUEUE, ["k"]) == {"k": new}
    old.reopen()
    assert old.job(new).options == JobOptions("k")


def test_a_table_of_options_from_before_its_last_columns_gets_them(
    old: EngineHarness, stranger: Any, table: str
):
    [key] = old.enqueue_keyed(keyed("k"))
    options = table.replace("jobs_p1", "options")
    stranger.execute(f"ALTER TABLE {options} DROP run_after_us, DROP expires_at_us")
    old.reopen()

    assert old.job(key).options == JobOptions("k")
    exact = JobOptions("l", run_after_us=1_234_567)
    [key] = old.enqueue_keyed(Job(b"x", options=exact))
    assert old.job(key).options == exact


def test_rows_that_a_hand_left_half_empty_break_no_call(
    old: EngineHarness, stranger: Any, table: str, clock: FakeClock
):
    stranger.execute(
        f"ALTER TABLE {table} MODIFY state TINYINT, MODIFY attempts_remaining INT,"
        " MODIFY body BLOB, MODIFY run_after TIMESTAMP NULL, MODIFY created_at TIMESTAMP NULL,"
        " MODIFY updated_at TIMESTAMP NULL"
    )
    for local_id, state in {101: 0, 102: 1, 103: 3, 104: 2, 105: None, 106: 9}.items():
        stranger.execute(
            f"INSERT INTO {table} (local_id, state, updated_at) VALUES (%s, %s, NULL)",
            (local_id, state),
        )

    keys = [JobKey(1, local_id) for local_id in range(101, 107)]
    assert old.states(keys) == [*[JobState(state) for state in (0, 1, 3, 2)], None, None]
    stored = old.job(keys[0])
    assert stored == (
        keys[0], JobState.PENDING, 1, 0, "", 0, 0, 0, None, b"", None, None,
    )  # fmt: skip
    searcher = old.engine.searcher()()
    for state in JobState:
        searcher.scan(Search(QUEUE, state, future=False, now_ms=old.now_ms, body_regex="x"))
    searcher.close()
    assert old.succeed(Ack(keys[1])).succeeded == 1
    assert old.engine.retry_failed(
        QUEUE, 1, attempts=1, run_after_ms=old.now_ms, limit=9, now_ms=old.now_ms
    )
    assert keys[2] in [claimed.key for claimed in old.claim()]
