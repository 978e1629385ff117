"""Retry policies, and what becomes of what handlers raise."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from multiprocessing.pool import AsyncResult

import pytest

from pinlaterd.client import ClaimedJob, Client, RunningJob, constant, exponential, linear, never
from pinlaterd.client.running_job import (
    LONGEST_DELAY_SECONDS,
    MAX_ERROR_CHARS,
    Ending,
    Later,
    Outcome,
    Retries,
    Retry,
    delay_after,
    raised,
    returned,
)

SEVEN = constant(7)
JOB = RunningJob("q", ClaimedJob("q:s1:p1:1", b"", 2, 2, "h:1:1:me:1", 60), Client(), now=0.0)


def outcome_of(error: BaseException, retries: Retries = SEVEN) -> Outcome:
    return raised(error, JOB, retries)


def delays(retries: Retries, attempts: int = 4) -> list[float | None]:
    return [delay_after(OSError("x"), attempt, retries) for attempt in range(1, attempts + 1)]


def test_delays_grow_as_their_policy_says():
    assert delays(constant(30)) == [30] * 4
    assert delays(linear(10, most=25)) == [10, 20, 25, 25]
    assert delays(exponential(1, most=5, jitter=False)) == [1, 2, 4, 5]
    assert delays(never) == [None] * 4
    assert delays(lambda attempt, error: attempt + 0.5) == [1.5, 2.5, 3.5, 4.5]


def test_jitter_only_shortens_and_differs():
    drawn = {delay_after(OSError(), 1, exponential(100)) for _ in range(50)}

    assert len(drawn) > 10
    assert all(delay is not None and 50 <= delay <= 100 for delay in drawn)


def test_no_attempt_is_too_late_for_a_delay():
    assert delay_after(OSError(), 100_000, exponential(1, jitter=False)) == 3600
    assert delay_after(OSError(), 1, constant(1e12)) == LONGEST_DELAY_SECONDS


def test_the_nearest_base_class_decides_and_the_default_takes_the_rest():
    by_class: Retries = {OSError: constant(1), ConnectionError: constant(2), ValueError: never}

    assert delay_after(ConnectionResetError(), 1, by_class) == 2
    assert delay_after(FileNotFoundError(), 1, by_class) == 1
    assert delay_after(UnicodeError(), 1, by_class) is None
    assert is_the_default(delay_after(KeyError(), 1, by_class))


@pytest.mark.parametrize(
    "answer",
    [-1.0, float("nan"), float("inf"), "soon", ZeroDivisionError, SystemExit, GeneratorExit],
)
def test_a_policy_that_answers_nonsense_is_replaced(answer):
    def policy(attempt, error):
        if isinstance(answer, type):
            raise answer
        return answer

    assert is_the_default(delay_after(OSError(), 1, policy))


@pytest.mark.parametrize(
    "make",
    [
        lambda: constant(-1),
        lambda: linear(float("nan")),
        lambda: exponential(1, factor=0.5),
        lambda: Retry(-1),
        lambda: Retry(1e12),
        Later,
        lambda: Later(1, run_after_ms=1),
        lambda: Later(1, attempts=0),
    ],
)
def test_nonsense_is_refused_where_it_is_written(make):
    with pytest.raises(ValueError, match="expected"):
        make()


def test_what_is_returned_is_the_status():
    assert returned(None) == Outcome(Ending.SUCCEEDED)
    assert returned("12 kB \ud800").status == "12 kB ?"
    assert returned(12).status == "12"
    endless: list[object] = []
    endless.append(endless)
    assert returned(endless).status == "[[...]]"


def test_work_that_was_begun_is_a_result():
    thread = threading.Thread(target=int)
    thread.start()
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        for value in (thread, process, child, threading.Lock(), range(10**12)):
            assert returned(value).ending is Ending.SUCCEEDED
    thread.join()
    process.join()
    process.close()
    assert returned(process).ending is Ending.SUCCEEDED


async def waits() -> None: ...


@contextlib.contextmanager
def manages() -> Iterator[None]:
    yield


@contextlib.asynccontextmanager
async def manages_async() -> AsyncIterator[None]:
    yield


class Stream:
    def __aiter__(self) -> Stream:
        return self


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(
    "make",
    [
        waits,
        lambda: [waits()],
        lambda: {"a": waits()},
        lambda: [("b", frozenset([print]))],
        lambda: (each for each in "ab"),
        lambda: map(print, "ab"),
        lambda: functools.partial(print),
        lambda: print,
        Future,
        manages,
        manages_async,
        Stream,
        lambda: deque([waits()]),
        {"a": print}.values,
        threading.Thread,
        lambda: threading.Timer(1, print),
        multiprocessing.Process,
        lambda: object.__new__(AsyncResult),
    ],
)
def test_what_has_still_to_be_run_is_no_result(make):
    with pytest.raises(TypeError, match=r"the handler returned a .*, which nobody runs"):
        returned(make())


def test_retry_says_when_or_leaves_it_to_the_policy():
    assert outcome_of(Retry(3, "not yet")).delay_seconds == 3
    assert outcome_of(Retry(status="not yet")).delay_seconds == 7
    assert outcome_of(Retry(), never).ending is Ending.RETRIED
    assert is_the_default(outcome_of(Retry(), never).delay_seconds)


@pytest.mark.parametrize("error", [Retry(3), ValueError("x")])
def test_what_fails_at_the_last_attempt_has_failed(error):
    last = RunningJob("q", JOB.claimed._replace(attempts_remaining=1), JOB.client, now=0.0)

    assert raised(error, last, SEVEN).ending is Ending.FAILED


def test_an_error_is_told_with_its_place_and_cut():
    def deep() -> None:
        raise ValueError("half a pair \ud800 " + "x" * 1000)

    def handler() -> None:
        deep()

    def worker() -> BaseException:
        try:
            handler()
        except ValueError as error:
            return error
        raise AssertionError

    status = outcome_of(worker()).status

    assert status.startswith("ValueError: half a pair ? xxx")
    assert "in deep < test_outcomes.py:" in status
    assert len(status) == MAX_ERROR_CHARS


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit


def test_an_error_that_can_not_be_put_into_words_is_told_by_its_class():
    assert outcome_of(Unspeakable()).status == "Unspeakable; "


def is_the_default(delay: float | None) -> bool:
    return delay is not None and 0.5 <= delay <= 1
