"""A worker: runs a consumer of the queues that have handlers, until it is to stop.

The consumer has an event loop in a thread of its own. The thread of `run` only waits for signals,
for `stop`, and for what the consumer can't go on with.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from types import FrameType

from pinlaterd.client.client import Client
from pinlaterd.client.consumer import Consumer
from pinlaterd.client.handlers import (
    Handlers,
    QueueHandler,
    check_plain,
    executor_of,
    start_thread,
)
from pinlaterd.client.in_flight import InFlight, QueueFigures
from pinlaterd.client.processes import WORKER_STOP_SIGNALS

# Python runs signal handlers in the main thread, and nothing wakes that if the system gave the
# signal to another one: so it looks this often.
_SIGNAL_SECONDS = 0.5
# They are opened as they are needed: one or two for each queue, and one for what is reported.
_MOST_CONNECTIONS = 10_000
# The jobs of a worker that was killed are handed out again so soon: claims are renewed each third.
_CLAIM_TIMEOUT_MS = 60_000


class _Message(Enum):
    STOP = auto()
    SIGNAL = auto()
    ENDED = auto()


class Worker:
    """Runs handlers for the jobs of their queues, until stopped."""

    def __init__(
        self,
        client: Client,
        handlers: Handlers,
        *,
        concurrency: int = 8,
        ack_interval_ms: int = 50,
        ahead_ms: int = 100,
        max_wait_ms: int = 2000,
        grace_seconds: float = 30.0,
        queues: Iterable[str] | None = None,
        set_up_process: Callable[[], object] | None = None,
    ) -> None:
        """`queues`: those to work on (default: all that have handlers). `concurrency`: how many
        jobs of a queue run at a time where its handler does not say. `ack_interval_ms`: how long
        the end of a job waits at most for a dequeue to take it along. `ahead_ms`: jobs that begin
        within so long are claimed in advance. `max_wait_ms`: how long a dequeue waits for a first
        job. `grace_seconds`: how long jobs that run may go on after `stop`. `set_up_process`:
        called first in each process that runs handlers, as to set up logging. The worker opens
        connections of its own, with the client's settings: those of `client` are the handlers'.
        Raises ValueError for what makes no sense.
        """
        for name, value, least in (
            ("concurrency", concurrency, 1),
            ("max_wait_ms", max_wait_ms, 1),
            ("ack_interval_ms", ack_interval_ms, 0),
            ("ahead_ms", ahead_ms, 0),
            ("grace_seconds", grace_seconds, 0),
        ):
            if not value >= least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if set_up_process is not None:
            check_plain("set_up_process", set_up_process)
        self._client = client
        self._max_wait_ms = max_wait_ms
        self._grace_seconds = grace_seconds
        # Messages to the thread of `run`. A signal handler may put one whatever that thread does.
        self._inbox: queue.SimpleQueue[_Message | BaseException] = queue.SimpleQueue()
        self._works = []
        for handler in _chosen(handlers, queues):
            places = handler.concurrency or concurrency
            in_flight = InFlight(
                handler.queue,
                client,
                places,
                ahead_seconds=ahead_ms / 1000,
                ack_seconds=ack_interval_ms / 1000,
                keeps_single_attempts=True,
            )
            self._works.append((in_flight, executor_of(handler, places, client, set_up_process)))
        self._stopping, self._hurry = asyncio.Event(), asyncio.Event()  # the consumer's thread's
        self._has_ended = False  # the consumer
        self._error: BaseException | None = None
        self._has_run = False

    def run(self, *, handle_signals: bool = True) -> None:
        """Work until `stop` is called, or SIGTERM or SIGINT comes.

        SIGHUP, unless it was ignored, and SIGQUIT stop it, too. Then no job is claimed or begun any
        more; those that wait are released at no attempt's cost, and those that run have
        `grace_seconds`. What still runs then is released, too: its task is cancelled, its process
        ended; a thread can't be ended, and goes on as a daemon. Jobs with a single attempt run at
        most once, and are never released: those that wait are begun within the grace, and what has
        not ended by then has failed. A second signal ends the grace at once. Signals are handled if
        this is the main thread, and `handle_signals`.

        Once the worker has stopped in order, raises the service's RequestError if a queue can't be
        worked on, as when it does not exist, and ProcessNotStarted if no process can run its
        handler. RuntimeError if called twice.
        """
        if self._has_run:
            raise RuntimeError("this Worker has run; make a new one")
        self._has_run = True
        in_main_thread = threading.current_thread() is threading.main_thread()
        with self._signals() if handle_signals and in_main_thread else nullcontext():
            loop = asyncio.new_event_loop()
            start_thread("worker", lambda: self._consume_in(loop), self._inbox.put)
            try:
                self._next_message()
            finally:  # an exception in this thread stops the worker in order, too
                _tell(loop, self._stopping.set)
                while not self._has_ended:
                    if self._next_message() is _Message.SIGNAL:
                        _tell(loop, self._hurry.set)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End `run` in order. Any thread may call it, and a signal handler; it may be repeated."""
        self._inbox.put(_Message.STOP)

    def queue_figures(self) -> Sequence[QueueFigures]:
        """Return the figures of each queue at this moment."""
        return [in_flight.facts() for in_flight, _ in self._works]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def note(_number: int, _frame: FrameType | None) -> None:
            self._inbox.put(_Message.SIGNAL)

        before = {
            number: signal.signal(number, note)
            for number in WORKER_STOP_SIGNALS
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                if handler is not None:  # else it is not Python's, and can't be restored
                    signal.signal(number, handler)

    def _next_message(self) -> _Message | BaseException:
        """Wait for a message, and note what it tells."""
        while True:
            with contextlib.suppress(queue.Empty):
                message = self._inbox.get(timeout=_SIGNAL_SECONDS)
                break
        if isinstance(message, BaseException):
            self._error = message if self._error is None else self._error
        self._has_ended |= message is _Message.ENDED
        return message

    # --- in the consumer's thread -----------------------------------------------------------

    def _consume_in(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._consume())
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._inbox.put(error)
        finally:
            self._inbox.put(_Message.ENDED)

    async def _consume(self) -> None:
        async with self._client.asynchronous(max_connections=_MOST_CONNECTIONS) as client:
            consumer = Consumer(
                client,
                max_wait_ms=self._max_wait_ms,
                fail=self._inbox.put,
                claim_timeout_ms=_CLAIM_TIMEOUT_MS,
            )
            try:
                for in_flight, executor in self._works:
                    consumer.add(in_flight, executor)
                await self._stopping.wait()
            finally:
                grace_seconds, hurry = self._grace_seconds, self._hurry
                await consumer.remove(*consumer.queues, grace_seconds=grace_seconds, hurry=hurry)


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # it has ended
        loop.call_soon_threadsafe(function)


def _chosen(handlers: Handlers, queues: Iterable[str] | None) -> list[QueueHandler]:
    of_queues = handlers.by_queue
    if not of_queues:
        raise ValueError("no handlers: decorate functions with @handlers.queue(...) first")
    names = list(of_queues) if queues is None else list(dict.fromkeys(queues))
    if unknown := [name for name in names if name not in of_queues]:
        raise ValueError(f"no handler for queue {unknown[0]!r}; there are: {', '.join(of_queues)}")
    return [of_queues[name] for name in names]
