"""The verdict of a queue: each rule, their order, and the words that an operator reads."""

from __future__ import annotations

import pytest

from pinlaterd.status import worst_first
from pinlaterd.verdict import QueueView, VerdictKind, VerdictLevel, judge, span, whole_span

MINUTE_MS = 60_000
STOPPED = QueueView(
    ready=48_210, oldest_ms=11 * MINUTE_MS, silent_seconds=360, unasked_seconds=360, enqueued=120
)
FAILING = QueueView(
    succeeded=16.4,
    failed=3.6,
    enqueued=20,
    dequeued=20,
    top_failure="ConnectTimeout: smtp# did not answer",
    top_failure_share=0.92,
)
BEHIND = QueueView(
    ready=9_001,
    in_progress=64,
    oldest_ms=12 * MINUTE_MS,
    oldest_before_ms=11.5 * MINUTE_MS,
    enqueued=120,
    dequeued=80,
    succeeded=80,
    silent_seconds=0,
)
PAUSED = QueueView(
    ready=310, is_paused=True, paused_by="ada", paused_at="02:10", pause_reason="disk check"
)
DRAINING = QueueView(
    ready=2_400, dequeued=24, enqueued=10, oldest_ms=41_000, oldest_before_ms=41_000
)
WELL = QueueView(ready=12, in_progress=16, enqueued=210, dequeued=211, succeeded=211)


@pytest.mark.parametrize(
    ("view", "level", "text"),
    [
        (
            QueueView(is_readable=False, shards_missing=["2"]),
            VerdictLevel.BAD,
            "Unreadable: shard 2 does not answer",
        ),
        (PAUSED, VerdictLevel.WARN, 'Paused by ada, 02:10: "disk check"'),
        (PAUSED._replace(paused_by="", paused_at="", pause_reason=""), VerdictLevel.WARN, "Paused"),
        (
            QueueView(refused=12, max_jobs_per_second=100),
            VerdictLevel.WARN,
            "Limited: 12 dequeues/s refused by max_jobs_per_second 100",
        ),
        (
            QueueView(rejected=3, max_pending=10_000, max_jobs_per_second=100),
            VerdictLevel.WARN,
            "Limited: 3 refusals/s of enqueues by max_pending 10,000",
        ),
        (
            STOPPED._replace(unasked_seconds=1, max_in_progress=2, in_progress=2),
            VerdictLevel.WARN,
            "Limited: ready jobs held by max_in_progress 2, for 6 min",
        ),
        (
            STOPPED._replace(unasked_seconds=1, max_in_progress=2, in_progress=1),
            VerdictLevel.BAD,
            "Stopped: workers ask and get no job, for 6 min",
        ),
        (
            STOPPED._replace(unasked_is_least=True),
            VerdictLevel.BAD,
            "Stopped: no worker asks, for at least 6 min",
        ),
        (
            # A router that was restarted does not know who asked before.
            STOPPED._replace(unasked_seconds=20, unasked_is_least=True),
            VerdictLevel.BAD,
            "Stopped: no job is handed out, for 6 min",
        ),
        (
            # The coordinator was restarted: nobody has asked, so nothing was handed out.
            STOPPED._replace(silent_seconds=2, silent_is_least=True),
            VerdictLevel.BAD,
            "Stopped: no worker asks, for 6 min",
        ),
        (
            STOPPED._replace(silent_seconds=12, silent_is_least=True, unasked_seconds=1),
            VerdictLevel.WARN,
            "Not known yet: no job was handed out in the 12 s that are known",
        ),
        (STOPPED, VerdictLevel.BAD, "Stopped: no worker asks, for 6 min"),
        (
            STOPPED._replace(unasked_seconds=1),
            VerdictLevel.BAD,
            "Stopped: workers ask and get no job, for 6 min",
        ),
        (
            STOPPED._replace(unasked_seconds=None),
            VerdictLevel.BAD,
            "Stopped: no job is handed out, for 6 min",
        ),
        (
            QueueView(timed_out=3 / 60, dequeued=1),
            VerdictLevel.BAD,
            "Claims time out: 3 in the last minute",
        ),
        (
            QueueView(timed_out=3 / 20, seconds=20),  # since the coordinator began
            VerdictLevel.BAD,
            "Claims time out: 3 in the last minute",
        ),
        (
            FAILING,
            VerdictLevel.BAD,
            "Failing 18 %: ConnectTimeout: smtp# did not answer",
        ),
        (BEHIND, VerdictLevel.WARN, "Behind +40 jobs/s, oldest 12 min"),
        (
            BEHIND._replace(max_jobs_per_second=80.0),
            VerdictLevel.WARN,
            "Behind +40 jobs/s, oldest 12 min, limit 80 jobs/s",
        ),
        (DRAINING, VerdictLevel.OK, "Draining, empty in about 2 min 51 s"),
        (WELL, VerdictLevel.OK, "Well"),
        (WELL._replace(shards_missing=["2", "3"]), VerdictLevel.OK, "Well without shard 2, 3"),
        (
            WELL._replace(succeeded=0, failed_in_hour=280),  # and no attempt has ended since
            VerdictLevel.OK,
            "Well: 280 attempts failed in the last hour",
        ),
        (
            QueueView(failed_in_hour=1, hour_is_partial=True),
            VerdictLevel.IDLE,
            "Idle: at least 1 attempt failed in the last hour",
        ),
        (WELL._replace(failed_in_hour=280), VerdictLevel.OK, "Well"),
        (QueueView(), VerdictLevel.IDLE, "Idle"),
    ],
)
def test_each_verdict_reads_as_a_sentence(view, level, text):
    found = judge(view)

    assert (found.text, found.level) == (text, level)
    assert found.word in found.text
    assert found.detail in found.text


def test_a_sentence_says_which_shards_it_is_without():
    sentence = judge(STOPPED._replace(shards_missing=["2"])).sentence

    assert sentence.endswith("for 6 min. These figures are without shard 2.")


def test_the_first_rule_that_holds_decides():
    """One thing after the other is mended, in the order of the rules."""
    view = STOPPED._replace(
        is_readable=False, is_paused=True, refused=1, timed_out=1, failed=1, oldest_before_ms=0
    )
    kinds = [judge(view).kind]
    for mended in (
        {"is_readable": True},
        {"is_paused": False},
        {"refused": 0},
        {"silent_seconds": 1, "unasked_seconds": 1},
        {"timed_out": 0},
        {"failed": 0},
        {"dequeued": 200},
        {"ready": 12, "silent_is_least": True},
        {"silent_is_least": False},
        {"ready": 0, "dequeued": 0, "enqueued": 0},
    ):
        view = view._replace(**mended)
        kinds.append(judge(view).kind)

    assert kinds == list(VerdictKind)


@pytest.mark.parametrize(
    ("view", "kind"),
    [
        # just enqueued, after a quiet night
        (STOPPED._replace(oldest_ms=2_000, silent_seconds=40_000), VerdictKind.WELL),
        (STOPPED._replace(ready=0), VerdictKind.WELL),
        (STOPPED._replace(silent_seconds=59), VerdictKind.WELL),
        (FAILING._replace(failed=0.8, succeeded=19.2), VerdictKind.WELL),  # 4 %
        (FAILING._replace(failed=1, succeeded=19), VerdictKind.FAILING),  # 5 %
        (FAILING._replace(failed=1 / 60, succeeded=0), VerdictKind.FAILING),  # the only one
        (BEHIND._replace(oldest_ms=100, oldest_before_ms=90), VerdictKind.WELL),
        (BEHIND._replace(dequeued=119.9), VerdictKind.WELL),
        (BEHIND._replace(oldest_before_ms=None), VerdictKind.WELL),  # a minute ago is not known
        (DRAINING._replace(ready=200), VerdictKind.WELL),  # gone within a minute
        (QueueView(ready=1), VerdictKind.WELL),
        (QueueView(scheduled=5), VerdictKind.IDLE),
    ],
)
def test_what_is_usual_is_no_verdict_against_a_queue(view, kind):
    assert judge(view).kind is kind


def test_banners_say_how_much_waits_and_why():
    assert judge(STOPPED).sentence == (
        "48,210 ready, the oldest for 11 min. No worker has asked for 6 min."
    )
    assert judge(FAILING).sentence == (
        "18 % of attempts in the last minute; 92 % of them ConnectTimeout: smtp# did not answer."
    )
    assert judge(PAUSED._replace(oldest_ms=52 * MINUTE_MS)).sentence == (
        '310 ready, the oldest for 52 min. Paused by ada, 02:10: "disk check".'
    )


def test_the_worst_come_first():
    views = {"index": WELL, "reports": PAUSED, "mail": STOPPED, "images": BEHIND, "pay": FAILING}
    rows = [
        {"name": name, "pending": view.ready, "verdict": judge(view)._asdict()}
        for name, view in views.items()
    ]

    assert [row["name"] for row in worst_first(rows)] == [
        *("mail", "pay", "images", "reports", "index")
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0 s"), (0.1, "0.1 s"), (41.2, "41 s"), (59.9, "1 min"), (90, "1 min 30 s")),
        *(
            (599.9, "10 min"),
            (671, "11 min"),
            (3_599, "1 h"),
            (7_200, "2 h"),
            (9_000, "2 h 30 min"),
        ),
        *((86_399, "1 d"), (129_600, "1 d 12 h"), (259_200, "3 d"), (907_200, "10 d")),
    ],
)
def test_times_are_said_to_five_percent(seconds, text):
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((600, "10 min"), (129_600, "1 d 12 h"), (900_000, "10 d 10 h")),
        *((0.5, "0.5 s"), (1_200 / 3_600 * 3_600, "20 min"), (90_061, "1 d 1 h 1 min 1 s")),
    ],
)
def test_times_that_somebody_has_set_are_said_whole(seconds, text):
    assert whole_span(seconds) == text
