"""Exceptions that go from one process to another: class, text and a handler's word come along."""

from __future__ import annotations

import threading

import pytest

from pinlaterd.client import Later, Retry
from pinlaterd.client.carried_errors import CarriedError


class NeedsTwo(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{why} ({code})")
        self.code = code


class NotYet(Retry):
    """What a handler's own class says must survive what it holds."""

    def __init__(self, lock: object) -> None:
        super().__init__(delay_seconds=60, status="locked; ")
        self.lock = lock


class Refuses(Exception):
    def __reduce__(self) -> str:
        raise RuntimeError("no")

    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain"),
        OSError(2, "No such file", "x.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        NeedsTwo(7, "because"),
        NeedsTwo(threading.Lock(), "because"),  # type: ignore[arg-type]
    ],
    ids=["plain", "of the system", "of several arguments", "of our own", "that can not be pickled"],
)
def test_class_and_text_come_along(error):
    came = CarriedError.of(error).restored()

    assert (type(came), str(came)) == (type(error), str(error))
    assert type(error).__name__ in str(came.__cause__)


def test_state_comes_along_where_it_can():
    came = CarriedError.of(NotYet(threading.Lock())).restored()
    assert isinstance(came, NotYet)
    assert (came.delay_seconds, came.status) == (60, "locked; ")

    later = CarriedError.of(Later(run_after_ms=5, body=b"b", attempts=3)).restored()
    assert isinstance(later, Later)
    assert (later.delay_seconds, later.run_after_ms, later.body, later.attempts) == (
        None,
        5,
        b"b",
        3,
    )


def test_a_class_that_is_found_nowhere_becomes_its_base():
    class Local(LookupError):
        pass

    came = CarriedError.of(Local("gone")).restored()

    assert (type(came), str(came)) == (LookupError, "gone")
    assert type(CarriedError.of(Refuses()).restored()) is Refuses


def test_one_whose_module_is_unknown_here_is_told_by_its_traceback():
    came = CarriedError(b"cnowhere\nMissing\n.", "Traceback: Missing: gone").restored()

    assert "No module named 'nowhere'" in str(came)
    assert "Missing: gone" in str(came.__cause__)
