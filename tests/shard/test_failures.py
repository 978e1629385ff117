"""Failed attempts by what they said, and the work of sources: exact counts in bounded memory."""

from __future__ import annotations

from pinlaterd.engines.base import Acks
from pinlaterd.model import JobKey
from pinlaterd.shard.failures import MOST_SIGNATURES, MOST_SOURCES, UNSAID, Failures

MINUTE_MS = 60_000
NOW_MS = 1_795_673_100_000


def failed(text, jobs=1, priority=1):
    return [Acks(priority, list(range(1, jobs + 1)), text)]


def test_attempts_that_failed_alike_are_counted_together_by_minutes():
    failures = Failures()
    for minutes, number in ((0, 1), (0, 2), (59, 3), (61, 4)):
        said = f"ConnectTimeout: smtp{number} did not answer (mail.py:12 in send); "
        failures.note("mail", "web3", failed(said, 3), frozenset(), NOW_MS + minutes * MINUTE_MS)

    [found] = failures.counts(NOW_MS + 61 * MINUTE_MS)

    assert (found.queue, found.signature) == ("mail", "ConnectTimeout: smtp# did not answer")
    assert (found.attempts, found.first_ms) == (12, NOW_MS)
    assert found.last_ms == NOW_MS + 61 * MINUTE_MS
    assert len(found.by_minute) == 60
    assert found.by_minute[-3:] == [3, 0, 3]
    assert sum(found.by_minute) == 6  # the others were more than an hour ago
    assert failures.lately(NOW_MS + 62 * MINUTE_MS) == {"mail": {found.signature: 3}}
    assert failures.lately(NOW_MS + 70 * MINUTE_MS) == {}
    assert failures.of_hour(NOW_MS + 61 * MINUTE_MS) == {"mail": 6}
    assert failures.of_hour(NOW_MS + 121 * MINUTE_MS) == {}


def test_acks_that_did_not_apply_are_no_failures():
    failures = Failures()

    failures.note("mail", "web3", failed("a", 3), {JobKey(1, 2), JobKey(2, 3)}, NOW_MS)
    failures.note("mail", "web3", failed("b"), {JobKey(1, 1)}, NOW_MS)

    assert [(one.signature, one.attempts) for one in failures.counts(NOW_MS)] == [("a", 2)]


def test_of_a_queue_those_that_failed_last_are_kept():
    failures = Failures()
    for number in range(MOST_SIGNATURES + 1):
        text = chr(97 + number // 26) + chr(97 + number % 26)
        failures.note("mail", "web3", failed(text), frozenset(), NOW_MS + number)
        failures.note("mail", "web3", failed("often"), frozenset(), NOW_MS + number)

    found = {one.signature: one.attempts for one in failures.counts(NOW_MS)}

    assert len(found) == MOST_SIGNATURES
    assert found["often"] == MOST_SIGNATURES + 1
    assert "aa" not in found
    assert failures.of_hour(NOW_MS) == {"mail": 2 * (MOST_SIGNATURES + 1)}


def test_an_attempt_that_said_nothing_and_a_queue_that_is_deleted():
    failures = Failures()
    failures.note("mail", "web3", failed(""), frozenset(), NOW_MS)
    assert [one.signature for one in failures.counts(NOW_MS)] == [UNSAID]

    failures.drop_queue("mail")

    assert failures.counts(NOW_MS) == []
    assert failures.of_hour(NOW_MS) == {}


def test_the_work_of_sources_is_counted_in_bounded_memory():
    failures = Failures()
    failures.handed_out("mail", "web3", 10)
    failures.note("mail", "web3", failed("a", 2), frozenset(), NOW_MS)
    failures.handed_out("mail", "web3", 5)

    assert failures.work() == [("mail", "web3", 15, 2)]
    for number in range(MOST_SOURCES):
        failures.handed_out("mail", f"web{number}:x", 1)
    assert len(failures.work()) == MOST_SOURCES


def test_recent_work_is_of_the_last_minutes():
    failures = Failures()
    failures.begin_span(NOW_MS)
    failures.handed_out("mail", "web3", 1_000)
    for minutes in (3, 6):
        failures.begin_span(NOW_MS + minutes * MINUTE_MS)
    assert failures.recent_work() == []

    failures.handed_out("mail", "web3", 4)
    failures.note("mail", "web3", failed("no", 4), frozenset(), NOW_MS + 7 * MINUTE_MS)

    assert failures.recent_work() == [("mail", "web3", 4, 4)]
    assert failures.work() == [("mail", "web3", 1_004, 4)]


def test_recent_work_of_a_source_that_was_forgotten_begins_anew():
    failures = Failures()
    failures.handed_out("mail", "back", 50)
    for minutes in (3, 6):
        failures.begin_span(NOW_MS + minutes * MINUTE_MS)
    for number in range(MOST_SOURCES):
        failures.handed_out("mail", f"other{number}", 1)

    failures.handed_out("mail", "back", 3)

    assert [one.jobs for one in failures.recent_work() if one.source == "back"] == [3]
