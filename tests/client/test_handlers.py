"""Handlers and hooks: what is registered, what is refused, and that hooks change nothing."""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from functools import partial, wraps

import pytest

from pinlaterd.client import (
    ClaimedJob,
    Client,
    Ending,
    Handlers,
    Retry,
    RunningJob,
    Worker,
    constant,
    never,
)
from tests.client.process_handlers import Evil


def plain(job: object) -> None: ...
async def waits(job: object) -> None: ...
def yields(job: object) -> Iterator[None]:
    yield


async def yields_async(job: object) -> AsyncIterator[None]:
    yield


class Waits:
    async def __call__(self, job: object) -> None: ...


def consumed(function):
    """A decorator that runs what has a `yield`."""

    @wraps(function)
    def run(job: object) -> int:
        return len([*function(job)])

    return run


@pytest.mark.parametrize(
    ("function", "run_in"),
    [
        (partial(Waits()), "tasks"),
        (Waits().__call__, "tasks"),
        (staticmethod(waits), "tasks"),
        (partial(staticmethod(waits)), "tasks"),
        (staticmethod(plain), "threads"),
        (consumed(yields), "threads"),
    ],
)
def test_what_is_called_decides_where_it_runs(function, run_in):
    handlers = Handlers()
    handlers.queue("mail")(function)

    assert handlers.by_queue["mail"].run_in == run_in


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
        (contextlib.contextmanager(yields), {}, "it has a `yield`"),
        (contextlib.asynccontextmanager(yields_async), {}, "it has a `yield`"),
        (Waits, {}, "expected a function, or an object whose class has `__call__`"),
        (5, {}, "expected a function"),
        (plain, {"name": plain}, "expected @handlers.queue"),
        (plain, {"retry": waits}, "waits is `async def` or has a `yield`"),
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
    with pytest.raises(TypeError, match="redact: expected a function, got 'card'"):
        Handlers(redact="card")  # type: ignore[arg-type]


@pytest.mark.parametrize("hook", [waits, Waits(), yields, contextlib.contextmanager(yields)])
@pytest.mark.parametrize("kind", ["before", "after", "on_error", "redact", "set_up_process"])
def test_a_hook_of_which_a_call_runs_nothing_is_refused(kind, hook):
    handlers = Handlers()
    handlers.queue("mail")(plain)

    register = {
        "redact": lambda: Handlers(redact=hook),
        "set_up_process": lambda: Worker(Client(), handlers, set_up_process=hook),
    }.get(kind, lambda: getattr(handlers, kind)(hook))

    with pytest.raises(ValueError, match=f"{kind}: .* is `async def` or has a `yield`"):
        register()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_what_a_hook_has_only_made_is_logged(caplog):
    handlers = Handlers()
    handlers.before(lambda _: waits(None))
    handlers.before(lambda job: [1])
    handlers.begin(JOB)

    assert len(caplog.records) == 1
    assert "a hook failed: test_what_a_hook_has_only_made_is_logged" in caplog.text
    assert "it returned a coroutine, which nobody runs" in caplog.text


@pytest.mark.parametrize("attempts", [1, 2])
def test_an_exception_whose_traceback_can_not_be_shown_is_an_outcome(caplog, attempts):
    caplog.set_level("DEBUG")
    handlers = Handlers()

    @handlers.queue("mail")
    def handle(job: object) -> None:
        raise Evil

    @handlers.before
    def fail(job: object) -> None:
        raise Evil

    job = RunningJob("mail", JOB.claimed._replace(attempts_remaining=attempts), JOB.client, now=0.0)
    handlers.begin(job)
    outcome = handlers.by_queue["mail"].run(job)

    assert outcome.ending is (Ending.FAILED if attempts == 1 else Ending.RETRIED)
    assert outcome.status.startswith("Evil (test_handlers.py:")
    for said in ("a hook failed", "mail:s1:p1:1 "):
        assert said in caplog.text
    assert caplog.text.count("(what was raised can't be shown)") == 2


class Disguised(Exception):
    """Whoever asks what it is gets another one."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise Disguised


def test_an_exception_that_can_not_be_asked_what_it_is_is_an_outcome():
    handlers = Handlers()

    @handlers.queue("mail")
    def handle(job: object) -> None:
        raise Disguised

    assert handlers.by_queue["mail"].run(JOB).status.startswith("Disguised:  (test_handlers.py:")


@pytest.mark.parametrize("seconds", [timedelta(seconds=5), float("nan"), "5"])
def test_a_delay_that_was_set_after_its_check_fails_the_attempt(seconds):
    handlers = Handlers()

    @handlers.queue("mail")
    def handle(job: object) -> None:
        not_yet = Retry(1)
        not_yet.delay_seconds = seconds
        raise not_yet

    outcome = handlers.by_queue["mail"].run(JOB)

    assert outcome.ending is Ending.RETRIED
    assert "delay_seconds: expected" in outcome.status


def test_a_filter_of_a_log_that_ends_programs_changes_no_outcome():
    def stop(_record: logging.LogRecord) -> bool:
        raise SystemExit

    log = logging.getLogger("pinlaterd.client.handlers")
    log.addFilter(stop)
    try:
        handlers = Handlers()
        handlers.queue("mail")(lambda job: 1 / 0)
        outcome = handlers.by_queue["mail"].run(JOB)
    finally:
        log.removeFilter(stop)

    assert outcome.status.startswith("ZeroDivisionError: division by zero (test_handlers.py:")
