"""Handlers and hooks: what is registered, what is refused, and that hooks change nothing."""

from __future__ import annotations

import pickle
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest

from pinlaterd.client import (
    ClaimedJob,
    Client,
    Handlers,
    RunningJob,
    Worker,
    constant,
    never,
)


def plain(job: object) -> None: ...
async def waits(job: object) -> None: ...
def yields(job: object) -> Iterator[None]:
    yield


async def yields_async(job: object) -> AsyncIterator[None]:
    yield


class Waits:
    async def __call__(self, job: object) -> None: ...


def test_functions_stay_what_they_are():
    assert Handlers().queue("mail")(plain) is plain
    assert pickle.loads(pickle.dumps(plain)) is plain


@pytest.mark.parametrize(
    ("function", "options", "what"),
    [
        (plain, {"name": "no spaces"}, "letters, digits"),
        (plain, {"concurrency": 0}, "concurrency must be at least 1, got 0"),
        (plain, {"time_limit_seconds": 5}, "a thread can't be ended"),
        (plain, {"run_in": "process"}, "expected one of 'threads', 'tasks', 'processes'"),
        (plain, {"run_in": "tasks"}, "make it `async def`"),
        (waits, {"run_in": "processes"}, "a plain function, which may call asyncio.run"),
        (waits, {"run_in": "threads"}, "an `async def` runs in tasks"),
        (waits, {"time_limit_seconds": 0}, "above 0"),
        (yields, {}, "it has a `yield`"),
        (partial(yields_async), {}, "it has a `yield`"),
        (partial(Waits()), {"run_in": "threads"}, "an `async def` runs in tasks"),
        (plain, {"retry": 5}, "5 is no policy"),
        (plain, {"retry": {OSError: constant(1), ValueError: 5}}, "5 is no policy"),
    ],
)
def test_nonsense_is_refused_where_it_is_written(function, options, what):
    with pytest.raises((ValueError, TypeError), match=what):
        Handlers().queue(options.pop("name", "mail"), **options)(function)


def test_a_queue_has_one_handler():
    handlers = Handlers()
    handlers.queue("mail")(plain)

    with pytest.raises(ValueError, match="'mail' has a handler already: plain"):
        handlers.queue("mail", retry=never)(waits)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"max_wait_ms": 0}, "max_wait_ms must be at least 1"),
        ({"grace_seconds": float("nan")}, "grace_seconds must be at least 0"),
        ({"queues": ["post"]}, "no handler for queue 'post'; there are: mail"),
        ({"handlers": Handlers()}, "no handlers"),
    ],
)
def test_a_worker_refuses_nonsense(options, what):
    handlers = Handlers()
    handlers.queue("mail")(plain)

    with pytest.raises(ValueError, match=what):
        Worker(**({"client": Client(), "handlers": handlers} | options))


JOB = RunningJob("mail", ClaimedJob("mail:s1:p1:1", b"", 2, 2, "h:1:1:me:1", 60), Client(), now=0.0)


@pytest.mark.parametrize(
    ("redact", "said"),
    [
        (lambda text: text.replace("4111-1111", "hidden"), "ValueError: x"),
        (lambda text: sys.exit("no"), "ValueError (test_handlers.py:"),
        (lambda text: None, "ValueError (test_handlers.py:"),
    ],
    ids=["with a redact", "with one that raises", "with one that returns no text"],
)
def test_texts_of_exceptions_are_redacted_before_they_are_cut(redact, said, caplog):
    handlers = Handlers(redact=redact)

    @handlers.queue("mail")
    def refuse(job: object) -> None:
        raise ValueError("x" * 445 + "4111-1111")

    status = handlers.by_queue["mail"].run(JOB).status

    assert status.startswith(said)
    assert status.endswith(" in refuse); ")
    assert "4111" not in status
    assert ("redact failed" in caplog.text) == (said != "ValueError: x")


def test_what_can_redact_no_text_is_refused():
    with pytest.raises(TypeError, match="redact: expected a function of a text, got 'card'"):
        Handlers(redact="card")  # type: ignore[arg-type]
