"""Signatures of failures: alike for jobs that failed alike."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.signature import MOST_CHARS, TIMED_OUT, UNSAID, Signature, attempts_of, signature

PLACE = "(mail.py:12 in send)"


@pytest.mark.parametrize(
    ("status", "message", "place"),
    [
        (
            f"ConnectTimeout: smtp3 did not answer {PLACE}",
            "ConnectTimeout: smtp# did not answer",
            1,
        ),
        (
            f"ConnectTimeout: smtp12 did not answer {PLACE}; ",
            "ConnectTimeout: smtp# did not answer",
            1,
        ),
        (f"KeyError: 'a' (b.py:1 in f); ValueError: 7 {PLACE}", "ValueError: #", 1),
        (f"KeyError: 'a'; b (b.py:1 in <lambda>); x; y 8 {PLACE}; ", "x; y #", 1),
        (f"KeyError: 'a' (b.py:1 in f)ValueError: 7 {PLACE}", "ValueError: #", 1),  # retried
        ("smtp3 is awaysmtp14 is away", "smtp# is away", 0),
        ("no (a.py:1 in b) yet", "no (a.py:1 in b) yet", 0),
        ("at 0x7f3a of 3fa85f64-5717-4562-b3fc-2c963f66afa6", "at # of #", 0),
        ("""no address in "Ada (17)" and 'it'""", "no address in # and #", 0),
        ("can't open 'a.txt' or \"b", "can't open # or #", 0),
        ("HTTP 503 (code 17): 9.5 s", "HTTP # (code 17): #.# s", 0),
        ("no (place:here in it", "no (place:here in it", 0),
        ("", "", 0),
    ],
)
def test_what_varies_is_left_out(status: str, message: str, place: int):
    assert signature(status) == Signature(message, "mail.py:12 in send" if place else "")


def test_all_places_of_a_traceback_are_kept_and_shown():
    found = signature("ValueError: no (smtp.py:30 in lookup < mail.py:12 in send)")

    assert found.place == "smtp.py:30 in lookup < mail.py:12 in send"
    assert str(found) == "ValueError: no (smtp.py:30 in lookup < mail.py:12 in send)"


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (f"ValueError: 7 {PLACE}; ", TIMED_OUT),
        ("", UNSAID),
        (f"ValueError: 7 {PLACE}", "ValueError: #"),
        (f"ValueError: 7 {PLACE};  expired", "expired"),
        ("not uploaded yet; ", "not uploaded yet"),
    ],
)
def test_a_last_attempt_that_said_nothing_timed_out(status: str, message: str):
    assert signature(status, failed=True).message == message


@given(st.text(alphabet="(); :1in'\"x0", max_size=300), st.booleans())
def test_any_text_has_one(status: str, failed: bool):
    found = signature(status, failed=failed)

    assert max(len(found.message), len(found.place)) <= MOST_CHARS


@pytest.mark.parametrize(
    "piece", ["(", "(a:1 in b); x", "(a)b", "(a:1 in b)x", "); ", "'", "(1", "1", "0x", "x:1 in "]
)
def test_hostile_statuses_take_no_longer_than_a_look_at_them(piece: str):
    status = piece * (5_000 // len(piece))

    assert _least_seconds(lambda: signature(status, failed=True)) < 0.02


@pytest.mark.parametrize("piece", ["); ", ":1 in ", "(a; ", ")a", "(a)b"])
def test_what_a_worker_says_may_be_long(piece: str):
    status = "(" + piece * 200_000

    assert _least_seconds(lambda: signature(status)) < 2
    assert _least_seconds(lambda: attempts_of(status)) < 2


def _least_seconds(act: Callable[[], object]) -> float:
    """Return the least of five times: Python may collect garbage meanwhile."""
    seconds = []
    for _ in range(5):
        began = time.process_time()
        act()
        seconds.append(time.process_time() - began)
    return min(seconds)
