"""The judge on what operators do: moved jobs, closed shards, copies put back; and on searches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checker import automaton
from tests.checker.history import FAIL, UNKNOWN
from tests.checker.test_judge import (
    FAILED,
    IN_PROGRESS,
    PENDING,
    SUCCEEDED,
    A,
    Story,
    Told,
    claim,
    stored,
    taken,
)

ON_TWO, AGAIN = "q:s2:p1:7", "q:s2:p1:8"
HALF_AN_HOUR_MS = 1_800_000
HELD = "host:9010:1000:pinlater-admin drain:1"


def _scheduled(delay_ms: int = HALF_AN_HOUR_MS) -> Story:
    return Story(wall_offset=0.0).enqueue(A, delay_ms=delay_ms)


def _moved(story: Story, *, at: float = 101, to: float = 104) -> Story:
    return story.tell("moved", {"shard": "1"}, at=at, to=to)


def _later(story: Story) -> Story:
    story.now = 110
    return story


def _left(held: str = HELD, **values: Any) -> list[Any]:
    return stored(SUCCEEDED, held=held, **values)


def _closed() -> Story:
    return Story().tell("closed", {"shard": "1"}, at=101, to=110)


def _copied(story: Story) -> Story:
    at = story.now
    story.fault("shard-1", at=at - 0.5, to=at + 0.5, kind="restore")
    return story.tell("copied", {"shards": ["1"]}, at=at)


def _restored(story: Story) -> Story:
    at = story.now
    story.fault("shard-1", at=at - 0.5, to=at + 0.5, kind="restore")
    return story.tell("restored", {"shards": ["1"]}, at=at)


def _moved_among_much_else() -> Story:
    """Scheduled, copied, claimed, retried and deleted at each place, or not: nobody knows."""
    story = Story(claim_seconds=5.0).enqueue(A, delay_ms=20_000)
    _moved(story)
    story.fault("router", at=104.5, to=140, kind="cut")
    given: dict[str, Any] = {"queue": "q", "priority": 1}
    for at in range(105, 150, 2):
        story.dequeue(outcome=UNKNOWN, at=at)
        for limit in (2, 100):
            retry = {**given, "limit": limit, "attempts": limit % 3, "delay_ms": 5000}
            story.tell("retry", retry, 2, at=at + 0.1)
        story.tell("delete", {**given, "state": at // 2 % 4, "limit": 2}, 2, at=at + 1)
    return story.row(A, *_left(), at=200).row(ON_TWO, *stored(PENDING), at=200)


def _searched(story: Story, *found: str, pattern: str = "^a/", **given: Any) -> Story:
    """In two calls, of which the first finds nothing; they take place now."""
    arguments = {"queue": "q", "state": PENDING, "pattern": pattern, "future": False, **given}
    begun = story.now
    rows = {descriptor: [PENDING, None, 2, 2, None, 0, 0, 0] for descriptor in found}
    story.tell("scan", {**arguments, "begun": begun}, {})
    story.tell("scan", {**arguments, "begun": begun}, rows)
    return story.tell("searched", arguments, list(found), at=begun, to=story.now)


def _counted(story: Story, count: int, pattern: str | None = "^a/") -> Story:
    return story.tell("count", {"queue": "q", "state": PENDING, "pattern": pattern}, count)


ACCEPTED: dict[str, Told] = {
    "a count that misses what a slow dequeue may have claimed": lambda: _counted(
        Story().enqueue(A).dequeue(at=103, to=104.5), 0
    ),
    "a moved job": lambda: (
        _moved(_scheduled())
        .lookup(A, *stored(IN_PROGRESS, held=HELD), at=102)
        .lookup(A, *_left(updated_ms=103_000), at=110)
        .row(A, *_left(updated_ms=103_000), at=120)
        .row(ON_TWO, *stored(PENDING, created_ms=103_000), at=120)
    ),
    "a moved job that is worked off": lambda: (
        _moved(_scheduled(20_000))
        .dequeue(taken(ON_TWO), at=130)
        .ack(ON_TWO, claim(1))
        .row(A, *_left(), at=140)
        .row(ON_TWO, *stored(SUCCEEDED, held=claim(1)), at=140)
    ),
    "a moved job with the attempts that it has left": lambda: (
        Story(wall_offset=0.0)
        .enqueue(A, attempts=3)
        .dequeue([A, "a", 3, 3, claim(1)])
        .tell("ack", {"queue": "q", "failed": [[A, claim(1), HALF_AN_HOUR_MS]]})
        .tell("moved", {"shard": "1"}, at=105, to=108)
        .row(A, SUCCEEDED, "a", 3, 2, HELD, 0, 0, 0, at=120)
        .row(ON_TWO, *stored(PENDING), at=120)
    ),
    "a job that a move that was cut short has left at both places": lambda: (
        _moved(_scheduled(20_000))
        .dequeue(taken(A), at=130)
        .dequeue(taken(ON_TWO, held=claim(2)), at=131)
        .row(A, *stored(IN_PROGRESS, held=claim(1)), at=140)
        .row(ON_TWO, *stored(IN_PROGRESS, held=claim(2)), at=140)
    ),
    "a job that a move that was cut short has stored twice": lambda: (
        _moved(_scheduled())
        .row(A, *_left(), at=120)
        .row(ON_TWO, *stored(PENDING), at=120)
        .row(AGAIN, *stored(PENDING), at=120)
    ),
    "a job whose move was cut short before its ack": lambda: (
        _moved(_scheduled())
        .row(A, *stored(IN_PROGRESS, held=HELD), at=120)
        .row(ON_TWO, *stored(PENDING), at=120)
    ),
    "a job that no other shard takes": lambda: _moved(_scheduled()).row(
        A, *stored(PENDING), at=120
    ),
    "a job that is moved there and back": lambda: (
        _moved(_moved(_scheduled()), at=111, to=114)
        .row(A, *_left(), at=120)
        .row(ON_TWO, *_left(), at=120)
        .row("q:s1:p1:9", *stored(PENDING), at=120)
    ),
    "a copy that is deleted before anybody meets it": lambda: (
        _moved(_scheduled())
        .tell("delete", {"queue": "q", "priority": 1, "state": PENDING, "limit": 9}, 1, at=110)
        .row(A, *_left(), at=120)
    ),
    "a job of unknown outcome that is moved": lambda: (
        _moved(
            Story()
            .fault("router", at=99, to=99.5)
            .enqueue(outcome=UNKNOWN, at=100, delay_ms=HALF_AN_HOUR_MS)
        )
        .row(A, *_left(), at=120)
        .row(ON_TWO, *stored(PENDING), at=120)
    ),
    "a moved job among much else": _moved_among_much_else,
    "an enqueue beside a shard that is closed": lambda: (
        _closed().enqueue("q:s2:p1:1", at=102).enqueue(A, body="b", at=111)
    ),
    "a drained shard with scheduled jobs": lambda: _scheduled().tell(
        "emptied", {"shard": "1"}, at=105, to=109
    ),
    "a job that is gone with a copy put back": lambda: _restored(
        _copied(Story()).enqueue(A, at=112)
    ).lookup(A),
    "a job that is as it was in the copy": lambda: (
        _restored(_copied(Story().enqueue(A)).dequeue(taken(), at=113).ack(A, claim(1), at=114))
        .lookup(A, *stored(PENDING))
        .dequeue(taken(held=claim(2)), at=130)
        .row(A, *stored(IN_PROGRESS, held=claim(2)))
    ),
    "an ack of a claim that a copy does not know": lambda: (
        _restored(_copied(Story().enqueue(A)).dequeue(taken(), at=113))
        .ack(A, claim(1))
        .row(A, *stored(PENDING))
    ),
    "a search": lambda: _counted(_searched(Story().enqueue(A), A), 1),
    "a search that a job does not match": lambda: _counted(
        _searched(Story().enqueue(A), pattern="^b/"), 0, "^b/"
    ),
    "a search beside an enqueue": lambda: _counted(
        _searched(Story(), A).enqueue(A, at=100, to=103), 1
    ),
    "a search for what is scheduled": lambda: _searched(_scheduled(), A, future=True),
    "a search for what is scheduled, beside its move": lambda: _searched(
        _moved(_scheduled()), future=True
    ),
    "a search for what was scheduled, and was moved and deleted": lambda: (
        _searched(_later(_moved(_scheduled())), future=True)
        .row(A, *_left(updated_ms=103_000), at=120)
        .tell("delete", {"queue": "q", "state": PENDING, "priority": 1, "limit": 9}, 1, at=112)
    ),
    "a search for what was moved and deleted at both places": lambda: _searched(
        _later(_moved(_scheduled())), future=True
    ),
    "a search that has met the job in an earlier call": lambda: _searched(
        Story().enqueue(A), A
    ).dequeue(taken(), at=101.5),
}


@pytest.mark.parametrize("story", ACCEPTED.values(), ids=ACCEPTED)
def test_a_history_that_keeps_the_promises(story: Told):
    assert story().violations() == []


BROKEN: dict[str, dict[str, Told]] = {
    "every job is explained": {
        "a job that is lost by its move": lambda: _moved(_scheduled()).row(A, *_left(), at=120),
        "a job that is ended before it is stored elsewhere": lambda: (
            _moved(_scheduled())
            .lookup(A, *stored(IN_PROGRESS, held=HELD), at=102)
            .row(A, *_left(), at=120)
        ),
        "a moved job that is forgotten where it was": lambda: (
            _moved(_scheduled()).lookup(A, at=110).row(ON_TWO, *stored(PENDING), at=120)
        ),
        "a moved job with more attempts": lambda: (
            _moved(_scheduled())
            .row(A, *_left(), at=120)
            .row(ON_TWO, PENDING, "a", 3, 3, None, 0, 0, 0, at=120)
        ),
        "a moved job with another body": lambda: (
            _moved(_scheduled())
            .row(A, *_left(), at=120)
            .row(ON_TWO, *stored(PENDING, "a/other"), at=120)
        ),
        "a moved job that runs before its time": lambda: _moved(_scheduled()).dequeue(
            taken(ON_TWO), at=130
        ),
        "a job that is moved although it is ready": lambda: (
            _moved(Story().enqueue(A))
            .row(A, *_left(), at=120)
            .row(ON_TWO, *stored(PENDING), at=120)
        ),
        "a job of the copy that is lost": lambda: _restored(_copied(Story().enqueue(A))).lookup(A),
        "a job that is neither as in the copy nor as after it": lambda: _restored(
            _copied(Story().enqueue(A)).dequeue(taken(), at=113)
        ).lookup(A, *stored(FAILED, remaining=0)),
        "a job that comes back without its copy": lambda: (
            _copied(Story().enqueue(A).dequeue(taken()))
            .ack(A, claim(1))
            .lookup(A, *stored(IN_PROGRESS, held=claim(1)))
        ),
        "an acknowledged job that is lost after the copy was put back": lambda: (
            _restored(_copied(Story())).enqueue(A).lookup(A)
        ),
        "a search that finds an ended job": lambda: _searched(
            Story().enqueue(A).dequeue(taken()), A
        ),
    },
    "one row a body": {
        "a move without an operator": lambda: (
            _scheduled().row(A, *_left(), at=120).row(ON_TWO, *stored(PENDING), at=120)
        ),
    },
    "closed shards take no jobs": {
        "an enqueue on a shard that is closed": lambda: _closed().enqueue(A, at=102),
        "a drained shard with a ready job": lambda: (
            Story().enqueue(A).tell("emptied", {"shard": "1"}, at=105, to=109)
        ),
    },
    "a descriptor names one job for ever": {
        "an id that is given out again by a copy put back": lambda: _restored(
            _copied(Story()).enqueue(A, at=112)
        ).enqueue(A, body="b"),
    },
    "claims are unique": {
        "a claim that is given out again by a copy put back": lambda: _restored(
            _copied(Story().enqueue(A)).dequeue(taken(), at=113)
        ).dequeue(taken(), at=130),
    },
    "no errors without faults": {
        "a service that does not recover from a copy": lambda: _restored(_copied(Story())).enqueue(
            outcome=FAIL, at=130
        ),
    },
    "searches are exact": {
        "a search that finds what does not exist": lambda: _searched(Story(), A),
        "a search that finds what does not match": lambda: _searched(
            Story().enqueue(A), A, pattern="^b/"
        ),
        "a search that misses a job": lambda: _searched(Story().enqueue(A)),
        "a search that misses a scheduled job": lambda: _searched(_scheduled(), future=True),
        "a search that misses a scheduled job that no move concerned": lambda: _searched(
            _later(_moved(_scheduled())), future=True
        ).row(A, *stored(PENDING), at=120),
        "a search that finds a job twice": lambda: _searched(Story().enqueue(A), A, A),
        "a count that is too low": lambda: _counted(Story().enqueue(A), 0),
        "a count that is too high": lambda: _counted(Story().enqueue(A), 2),
    },
}


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


def test_a_job_whose_search_would_not_end_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(automaton, "_MOST_CONFIGS", 50)

    (violation,) = _moved_among_much_else().violations()

    assert violation.rule == "every job is judged"
