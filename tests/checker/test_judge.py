"""The judge on histories made by hand: what it accepts, and what each rule finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.checker.history import FAIL, OK, UNKNOWN, Record
from tests.checker.judge import judge
from tests.checker.run import Violation

A, B = "q:s1:p1:1", "q:s1:p1:2"
CLAIM_SECONDS = 60.0


class Story:
    """Records a second apart; each call takes 0.2 s unless its times are given."""

    def __init__(self, **settings: Any) -> None:
        values = {"request_seconds": 3.0, "claim_seconds": CLAIM_SECONDS, **settings}
        self.records = [Record(0, 0, "checker", "settings", values)]
        self.now = 100.0

    def tell(
        self,
        operation: str,
        arguments: dict[str, Any],
        result: Any = None,
        outcome: str = OK,
        *,
        at: float | None = None,
        to: float | None = None,
    ) -> Story:
        t0 = self.now if at is None else at
        t1 = t0 + 0.2 if to is None else to
        self.records.append(Record(t0, t1, "c", operation, arguments, outcome, result))
        self.now = max(self.now, t0) + 1
        return self

    def enqueue(
        self,
        *descriptors: str,
        body: str = "a",
        outcome: str = OK,
        priority: int = 1,
        attempts: int = 2,
        delay_ms: int = 0,
        **times: Any,
    ) -> Story:
        jobs = [[body, priority, attempts, delay_ms]]
        result = list(descriptors) or None
        return self.tell("enqueue", {"queue": "q", "jobs": jobs}, result, outcome, **times)

    def dequeue(
        self,
        *taken: list[Any],
        outcome: str = OK,
        limit: int = 1,
        source: str = "w/1",
        **times: Any,
    ) -> Story:
        given = {"queue": "q", "limit": limit, "source": source}
        return self.tell("dequeue", given, list(taken), outcome, **times)

    def ack(self, descriptor: str, held: str | None, outcome: str = OK, **times: Any) -> Story:
        given = {"queue": "q", "succeeded": [[descriptor, held]]}
        return self.tell("ack", given, None, outcome, **times)

    def fail(self, descriptor: str, held: str | None, outcome: str = OK, **times: Any) -> Story:
        given = {"queue": "q", "failed": [[descriptor, held, 0]]}
        return self.tell("ack", given, None, outcome, **times)

    def lookup(self, descriptor: str, *row: Any, **times: Any) -> Story:
        found = {descriptor: list(row)} if row else {}
        return self.tell("lookup", {"descriptors": [descriptor]}, found, **times)

    def row(self, descriptor: str, *row: Any, **times: Any) -> Story:
        given = {"shard": "1", "descriptor": descriptor}
        return self.tell("row", given, list(row), **times)

    def fault(
        self,
        *places: str,
        at: float,
        to: float,
        kind: str = "kill",
        holds: str = "",
        away: Sequence[str] = (),
        queues: Sequence[str] = (),
    ) -> Story:
        given = {"kind": kind, "places": list(places), "holds": holds, "away": list(away)}
        given["queues"] = list(queues)
        return self.tell("fault", given, at=at, to=to)

    def violations(self) -> list[Violation]:
        return judge(self.records)


def claim(number: int, start: int = 1000, source: str = "w/1") -> str:
    return f"host:9010:{start}:{source}:{number}"


def taken(
    descriptor: str = A, body: str = "a", remaining: int = 2, held: str = claim(1)
) -> list[Any]:
    return [descriptor, body, 2, remaining, held]


def stored(
    state: int,
    body: str = "a",
    remaining: int = 2,
    held: str | None = None,
    created_ms: int = 0,
    updated_ms: int = 0,
) -> list[Any]:
    return [state, body, 2, remaining, held, created_ms, 0, updated_ms]


PENDING, IN_PROGRESS, SUCCEEDED, FAILED = range(4)
COUNTED = {"queue": "q", "state": PENDING, "future": False, "pattern": "a"}

Told = Callable[[], Story]


def _claimed() -> Story:
    return Story().enqueue(A).dequeue(taken())


def _once(source: str = "w/1", **times: Any) -> Story:
    """A job of one attempt, handed out in an answer that its client read in part."""
    story = Story().enqueue(A, attempts=1)
    given = {"queue": "q", "limit": 1, "source": source, "seen": [A]}
    return story.tell("dequeue", {**given, "abandoned": True}, None, UNKNOWN, **times)


def _two_at_a_time(limit: int, **second: Any) -> Story:
    story = Story(in_progress_limits={"q": limit}).enqueue(A).enqueue(B, body="b")
    story.dequeue(taken(), limit=2, at=103).ack(A, claim(1), at=105)
    return story.dequeue(taken(B, "b", held=claim(2, source="w/2")), source="w/2", **second)


def _lost_with_a_fault() -> Story:
    """A dequeue while shard 1 is killed, whose answer nobody got."""
    story = Story().enqueue(A).fault("shard-1", at=101, to=101.5)
    return story.dequeue(outcome=UNKNOWN, at=101.2, to=102)


def _stepped() -> Story:
    """While the machine's clock is an hour ahead or behind, which nobody may notice."""
    return Story(wall_offset=0.0).fault(at=101, to=104, kind="clock")


def _enqueued_in_part() -> Story:
    """Job a is stored, job b is not."""
    given = {"queue": "q", "jobs": [["a", 1, 2, 0], ["b", 1, 2, 0]]}
    return Story().fault("shard-1", at=99, to=99.5).tell("enqueue", given, [A, ""], UNKNOWN, at=100)


ACCEPTED: dict[str, Told] = {
    "a whole life": lambda: (
        _claimed()
        .ack(A, claim(1))
        .lookup(A, *stored(SUCCEEDED, held=claim(1)))
        .row(A, *stored(SUCCEEDED, held=claim(1)))
    ),
    "a store that takes long to read": lambda: (
        _claimed()
        .tell("drained", {"queue": "q"}, at=104)
        .row(A, *stored(IN_PROGRESS, held=claim(1)), at=105)
        .row(A, *stored(IN_PROGRESS, held=claim(1)), at=201)
    ),
    "an ack that is repeated": lambda: _claimed().ack(A, claim(1)).fail(A, claim(1)),
    "a failed attempt": lambda: (
        _claimed()
        .fail(A, claim(1))
        .dequeue(taken(remaining=1, held=claim(2)))
        .fail(A, claim(2))
        .row(A, *stored(FAILED, remaining=0))
    ),
    "a stale ack": lambda: (
        _claimed()
        .fail(A, claim(1))
        .dequeue(taken(remaining=1, held=claim(2)))
        .ack(A, claim(1))
        .row(A, *stored(IN_PROGRESS, remaining=1, held=claim(2)))
    ),
    "a read beside the call": lambda: (
        Story()
        .enqueue(A, at=100, to=102)
        .lookup(A, *stored(PENDING), at=101)
        .row(A, *stored(PENDING))
    ),
    "an unknown enqueue that was kept": lambda: (
        Story()
        .fault("router", at=99, to=99.5)
        .enqueue(outcome=UNKNOWN, at=100)
        .dequeue(taken(), at=102)
    ),
    "an unknown enqueue that was not kept": lambda: (
        Story()
        .fault("router", at=99, to=99.5)
        .enqueue(outcome=UNKNOWN, at=100)
        .row(B, *stored(PENDING, "b"), at=200)
        .enqueue(B, body="b", at=190)
    ),
    "a refused enqueue": lambda: (
        Story()
        .fault("router", at=99, to=99.5)
        .enqueue(outcome=FAIL, at=100)
        .enqueue(B, body="b", at=101)
        .row(B, *stored(PENDING, "b"))
    ),
    "an enqueue stored in part": lambda: _enqueued_in_part().row(A, *stored(PENDING)),
    "an ack of unknown outcome, either way": lambda: (
        _claimed()
        .fault("shard-1", at=101.9, to=102)
        .ack(A, claim(1), UNKNOWN, at=102)
        .lookup(A, *stored(IN_PROGRESS, held=claim(1)), at=103)
        .lookup(A, *stored(SUCCEEDED, held=claim(1)), at=104)
    ),
    "a claim that was lost, and released": lambda: _lost_with_a_fault().dequeue(taken(), at=104),
    "a claim that was lost, and timed out": lambda: (
        _lost_with_a_fault()
        .lookup(A, *stored(IN_PROGRESS, held=claim(9)), at=104)
        .dequeue(taken(remaining=1), at=101 + CLAIM_SECONDS + 2)
    ),
    "a claim that timed out": lambda: _claimed().dequeue(
        taken(remaining=1, held=claim(2)), at=102 + CLAIM_SECONDS
    ),
    "a checkpoint that renews the claim": lambda: (
        _claimed()
        .tell(
            "checkpoint",
            {"queue": "q", "source": "x", "requests": [[A, claim(1), "a/2", False, 0, None]]},
            at=140,
        )
        .lookup(A, *stored(IN_PROGRESS, "a/2", held=claim(1)), at=180)
    ),
    "a commit in a store that went on": lambda: (
        _claimed()
        .fault("shard-1", at=101.9, to=116, kind="stop", holds="commits")
        .ack(A, claim(1), UNKNOWN, at=102, to=105)
        .lookup(A, *stored(IN_PROGRESS, held=claim(1)), at=115.5)
        .row(A, *stored(SUCCEEDED, held=claim(1)), at=130)
    ),
    "failed jobs that are retried and deleted": lambda: (
        _claimed()
        .fail(A, claim(1))
        .dequeue(taken(remaining=1, held=claim(2)))
        .fail(A, claim(2))
        .tell("retry", {"queue": "q", "priority": 1, "attempts": 2, "delay_ms": 0, "limit": 9}, 1)
        .dequeue(taken(held=claim(3)))
        .tell("delete", {"queue": "q", "priority": 1, "state": IN_PROGRESS, "limit": 1}, 1)
        .lookup(A)
    ),
    "a short dequeue while the shard is down": lambda: (
        Story().enqueue(A).fault("shard-1", at=101, to=105).dequeue(at=102)
    ),
    "a short dequeue while the shard is restarted": lambda: (
        Story().enqueue(A).fault(at=101, to=105, kind="restart", away=["shard-1"]).dequeue(at=102)
    ),
    "a short dequeue before the job is due": lambda: (
        Story().enqueue(A, delay_ms=5000).dequeue(at=102).dequeue(taken(), at=106)
    ),
    "a short dequeue that waited for a shard": lambda: Story().enqueue(A).dequeue(at=102, to=102.8),
    "a short dequeue as soon as a shard was silent": lambda: (
        Story().enqueue(A).enqueue(B, body="b", at=102, to=103).dequeue(at=103.1)
    ),
    "a search that ended in vain where calls are slow": lambda: (
        Story().enqueue(A, at=100, to=102).tell("count", COUNTED, None, UNKNOWN, at=101, to=104)
    ),
    "a queue that is slow because it is locked": lambda: _beside(
        "shard-1", queues=["q"], seconds=1.5
    ),
    "slow calls beside a fault that concerns all": lambda: _beside("router", seconds=1.5),
    "a job of one attempt that fails after it was lost": lambda: _once().row(
        A, FAILED, "a", 1, 0, None, 0, 0, 0, at=110 + CLAIM_SECONDS
    ),
    "as many jobs as a limit allows": lambda: _two_at_a_time(2, at=104),
    "a job that may be begun when another one may have ended": lambda: _two_at_a_time(1, at=105.1),
    "another owner": lambda: (
        Story()
        .enqueue(A)
        .enqueue(B, body="b")
        .dequeue(taken())
        .dequeue(taken(B, "b", held=claim(1, start=2000)))
    ),
}


@pytest.mark.parametrize("story", ACCEPTED.values(), ids=ACCEPTED)
def test_a_history_that_keeps_the_promises(story: Told):
    assert story().violations() == []


BROKEN: dict[str, dict[str, Told]] = {
    "at most once": {
        "a job that was read twice": lambda: _once().dequeue(
            [A, "a", 1, 1, claim(2, source="w/2")], source="w/2"
        ),
        "a job that is pending again": lambda: _once().lookup(A, PENDING, "a", 1, 1, None, 0, 0, 0),
    },
    "limits are kept": {
        "one job too many": lambda: _two_at_a_time(1, at=104),
    },
    "every job is explained": {
        "a job that was lost": lambda: Story().enqueue(A).lookup(A),
        "a job that is in no store": lambda: (
            Story().enqueue(A).enqueue(B, body="b").row(B, *stored(PENDING, "b"))
        ),
        "a refused job that was stored": lambda: (
            Story()
            .fault("router", at=99, to=99.5)
            .enqueue(outcome=FAIL, at=100)
            .row(A, *stored(PENDING))
        ),
        "a refused job that was handed out": lambda: (
            Story().fault("router", at=99, to=99).enqueue(outcome=FAIL).dequeue(taken())
        ),
        "a job that its enqueue said to be stored, and is not": lambda: _enqueued_in_part().lookup(
            A
        ),
        "a job that its enqueue said not to be stored": lambda: (
            _enqueued_in_part().row(A, *stored(PENDING)).row(B, *stored(PENDING, "b"))
        ),
        "two claims at a time": lambda: _claimed().dequeue(taken(held=claim(2))),
        "a claim that ended before its time": lambda: _claimed().dequeue(
            taken(remaining=1, held=claim(2)), at=90 + CLAIM_SECONDS
        ),
        "an attempt that was not counted": lambda: (
            _claimed().fail(A, claim(1)).dequeue(taken(held=claim(2)))
        ),
        "an effect of two calls at the same time": lambda: (
            _claimed()
            .ack(A, claim(1), at=103)
            .ack(A, claim(1), at=103)
            .lookup(A, *stored(FAILED, held=claim(1)))
        ),
        "a stale ack that had an effect": lambda: (
            _claimed()
            .fail(A, claim(1))
            .dequeue(taken(remaining=1, held=claim(2)))
            .ack(A, claim(1))
            .lookup(A, *stored(SUCCEEDED, remaining=1, held=claim(2)))
        ),
        "an ack that was forgotten": lambda: (
            _claimed().ack(A, claim(1)).lookup(A, *stored(IN_PROGRESS, held=claim(1)))
        ),
        "a body that changed": lambda: Story().enqueue(A).dequeue(taken(body="a/other")),
        "a job handed out before it is due": lambda: (
            Story().enqueue(A, delay_ms=5000).dequeue(taken())
        ),
        "a job handed out early by a clock that stepped": lambda: (
            _stepped().enqueue(A, delay_ms=1_800_000, at=102).dequeue(taken(), at=103)
        ),
        "an unknown ack that came late": lambda: (
            _claimed()
            .fault("shard-1", at=101.9, to=116, kind="stop", holds="shard")
            .ack(A, claim(1), UNKNOWN, at=103, to=106)
            .lookup(A, *stored(IN_PROGRESS, held=claim(1)), at=115.5)
            .row(A, *stored(SUCCEEDED, held=claim(1)), at=130)
        ),
        "a lost claim where nothing was lost": lambda: (
            Story().enqueue(A).lookup(A, *stored(IN_PROGRESS, held=claim(1)))
        ),
        "a retry that stopped silently": lambda: (
            _claimed()
            .fail(A, claim(1))
            .dequeue(taken(remaining=1, held=claim(2)))
            .fail(A, claim(2))
            .tell(
                "retry", {"queue": "q", "priority": 1, "attempts": 2, "delay_ms": 0, "limit": 9}, 0
            )
            .row(A, *stored(FAILED, remaining=0))
        ),
    },
    "no short dequeue": {
        "a job held back by a clock that stepped": lambda: (
            _stepped().enqueue(A, at=102).dequeue(at=103)
        ),
        "a delayed job held back by a clock that stepped": lambda: (
            _stepped().enqueue(A, delay_ms=500, at=102).dequeue(at=103)
        ),
        "a short dequeue": lambda: Story().enqueue(A).dequeue(),
        "a short dequeue while another shard is restarted": lambda: (
            Story().enqueue(A).fault(at=101, to=105, kind="restart", away=["shard-2"]).dequeue()
        ),
    },
    "unknown calls end in their time": {
        "a time stored by a clock that stepped": lambda: (
            _stepped().enqueue(A, at=102).row(A, *stored(PENDING, created_ms=3_702_100), at=130)
        ),
        "a job stored after its call was over": lambda: (
            Story(wall_offset=0.0)
            .fault("shard-1", at=99, to=120, kind="stop", holds="shard")
            .enqueue(outcome=UNKNOWN, at=100, to=103)
            .row(A, *stored(PENDING, created_ms=119_000), at=130)
        ),
    },
    "one row a body": {
        "one body twice": lambda: (
            Story().enqueue(A).row(A, *stored(PENDING)).row(B, *stored(PENDING))
        ),
    },
    "a descriptor names one job for ever": {
        "a descriptor of two jobs": lambda: Story().enqueue(A).enqueue(A, body="b"),
    },
    "body exact": {
        "a body that nobody sent": lambda: Story().enqueue(A).row(B, *stored(PENDING, "x")),
    },
    "claims are unique": {
        "one claim for two jobs": lambda: (
            Story().enqueue(A).enqueue(B, body="b").dequeue(taken()).dequeue(taken(B, "b"))
        ),
    },
    "owners never overlap": {
        "an old owner that still writes": lambda: (
            Story()
            .enqueue(A)
            .enqueue(B, body="b")
            .dequeue(taken(held=claim(1, start=2000)))
            .dequeue(taken(B, "b"))
        ),
    },
    "lost claims are released": {
        "a claim that is not released": lambda: (
            Story()
            .enqueue(A)
            .tell(
                "dequeue",
                {"queue": "q", "limit": 1, "source": "w/1", "abandoned": True, "cut": True},
                None,
                UNKNOWN,
            )
            .row(A, *stored(IN_PROGRESS, held=claim(1)), at=110)
        ),
    },
    "no errors without faults": {
        "an error while a shard is restarted": lambda: (
            Story()
            .fault(at=101, to=105, kind="restart", away=["shard-1"])
            .enqueue(outcome=FAIL, at=102)
        ),
        "an error without a cause": lambda: Story().enqueue(outcome=FAIL),
        "a search that ended in vain": lambda: (
            Story().enqueue(A).tell("count", COUNTED, None, UNKNOWN, at=101, to=104)
        ),
    },
    "priorities in order": {
        "a lower priority first": lambda: (
            Story()
            .enqueue(A)
            .enqueue("q:s2:p2:1", body="b", priority=2)
            .dequeue(taken("q:s2:p2:1", "b"), limit=1)
        ),
    },
    "earliest first": {
        "a later job first": lambda: Story().enqueue(A).enqueue(B, body="b").dequeue(taken(B, "b")),
    },
    "answers come in time": {
        "an answer that came late": lambda: Story().enqueue(A, at=100, to=105),
    },
    "neighbours are not slowed": {
        "a neighbour that is slow": lambda: _beside("shard-2", seconds=1.5),
        "a queue that is slow beside one that is locked": lambda: _beside(
            "shard-1", queues=["locked"], seconds=1.5
        ),
    },
    "depths equal rows": {
        "a gauge that is wrong": lambda: (
            Story()
            .enqueue(A)
            .row(A, *stored(PENDING))
            .tell("depths", {"queue": "q"}, {"PENDING": 2})
        ),
    },
    "claims end": {
        "a claim that never ends": lambda: (
            _claimed()
            .tell("drained", {"queue": "q"}, at=200)
            .row(A, *stored(IN_PROGRESS, held=claim(1)), at=201)
        ),
    },
    "ready index equals store": {
        "a ready job that is never handed out": lambda: (
            Story(wall_offset=0.0)
            .enqueue(A)
            .tell("drained", {"queue": "q"})
            .row(A, *stored(PENDING))
        ),
    },
}


def _beside(
    *places: str, queues: Sequence[str] = (), seconds: float, kind: str = "stop", calls: int = 150
) -> Story:
    """Enqueues of 0.2 s, and then as many that take so long beside a fault."""
    story = Story().fault(*places, at=1000, to=1400, kind=kind, queues=queues)
    for number in range(2 * calls):
        at, took = (100.0, 0.2) if number < calls else (1002.0 - calls, seconds)
        at += number
        story.enqueue(f"q:s1:p1:{number}", body=f"n{number}", at=at, to=at + took)
    return story


def _lives(jobs: int) -> list[Record]:
    """Three records for each job, some of them beside a fault."""
    story = Story().fault("shard-2", at=100, to=400)
    for number in range(jobs):
        at, name, descriptor = 100.0 + number, f"n{number}", f"q:s1:p1:{number}"
        held = claim(number, source=f"w/{number}")
        story.enqueue(descriptor, body=name, at=at)
        story.dequeue(taken(descriptor, name, held=held), source=f"w/{number}", at=at + 0.3)
        story.ack(descriptor, held, at=at + 0.6)
    return story.records


@pytest.mark.parametrize(
    ("rule", "story"),
    [
        pytest.param(rule, story, id=name)
        for rule, stories in BROKEN.items()
        for name, story in stories.items()
    ],
)
def test_a_history_that_breaks_a_promise(rule: str, story: Told):
    assert rule in {violation.rule for violation in story().violations()}


def test_the_time_is_linear():
    def seconds(records: list[Record]) -> float:
        began = time.process_time()
        assert judge(records) == []
        return time.process_time() - began

    few, many = _lives(1_700), _lives(13_600)

    # Eight times as many take about eight times as long; 64 times if each looked at all the others.
    assert any(seconds(many) < 32 * seconds(few) for _ in range(3))
