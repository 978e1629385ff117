"""A worker: claims jobs, hands them to functions, and tells the service how they ended.

    handlers = Handlers()

    @handlers.queue("images", concurrency=4)
    def resize(job: RunningJob) -> str | None:
        ...

    Worker(Client("queue.example.com"), handlers).run()       # SIGTERM and SIGINT stop it in order

Delivery is at least once: a job whose worker dies, or is cut off for longer than the claim's
time-out, is handed out again. So a handler must be fit to run twice. docs/worker.md is the guide.
"""

from __future__ import annotations

import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from types import FrameType

from pinlaterd.client.client import Client
from pinlaterd.client.consumer import CONNECTIONS_A_QUEUE, Consumer
from pinlaterd.client.executors import Executor, TaskExecutor, ThreadExecutor
from pinlaterd.client.handler_process import ChildPlan
from pinlaterd.client.handlers import Handlers, QueueHandler
from pinlaterd.client.in_flight import InFlight, QueueFigures
from pinlaterd.client.processes import ProcessExecutor
from pinlaterd.lifecycle import STOP_SIGNALS

# How long the end of what was abandoned, and the last acks, are waited for.
_LAST_WORDS_SECONDS = 10.0
# Python runs signal handlers in the main thread, and nothing wakes that if the system gave the
# signal to another one: so it looks this often.
_SIGNAL_SECONDS = 0.5


class _Message(Enum):
    STOP = auto()
    SIGNAL = auto()
    CONSUMER_ENDED = auto()


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
        """`queues`: those to work on, of the handlers' (default: all).

        `concurrency`: how many jobs of a queue run at a time where its handler does not say.
        `ack_interval_ms`: how long the end of a job waits at most for a dequeue to take it along.
        `ahead_ms`: jobs that begin within so long are claimed in advance. `max_wait_ms`: how long a
        dequeue waits for a first job, and so how long `stop` may take with nothing to do.
        `grace_seconds`: how long jobs that run may go on after `stop`. `set_up_process`: called
        first in each process that runs handlers, as to set up logging.

        The client needs three connections for each queue, beside those that handlers use. Raises
        ValueError for what makes no sense.
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
        self._client = client
        self._concurrency = concurrency
        self._ack_seconds = ack_interval_ms / 1000
        self._ahead_seconds = ahead_ms / 1000
        self._max_wait_ms = max_wait_ms
        self._grace_seconds = grace_seconds
        self._set_up_process = set_up_process
        # Messages to the thread of `run`. A signal handler may put one whatever that thread does.
        self._inbox: queue.SimpleQueue[_Message | BaseException] = queue.SimpleQueue()
        self._consumers = [self._consumer(handler) for handler in _chosen(handlers, queues)]
        self._consumers_left = len(self._consumers)
        _check_connections(client, len(self._consumers))
        self._error: BaseException | None = None
        self._has_run = False

    def run(self, *, handle_signals: bool = True) -> None:
        """Work until `stop` is called, or SIGTERM or SIGINT comes.

        Then no job is claimed or begun any more; those that wait are released at no attempt's
        cost, and those that run have `grace_seconds`. What still runs then is released, too: its
        task is cancelled, its process ended; a thread can't be, and goes on as a daemon. A second
        signal ends the grace at once. Signals are handled if this is the main thread, and
        `handle_signals`.

        Once the worker has stopped in order, raises the service's RequestError if a queue can't be
        worked on, as when it does not exist, and ProcessNotStarted if no process can run its
        handler. RuntimeError if called twice.
        """
        if self._has_run:
            raise RuntimeError("this Worker has run; make a new one")
        self._has_run = True
        in_main_thread = threading.current_thread() is threading.main_thread()
        with self._signals() if handle_signals and in_main_thread else nullcontext():
            try:
                for consumer in self._consumers:
                    consumer.start()
                self._note(self._next_message(math.inf))
            finally:  # an exception in this thread stops the worker in order, too
                self._end()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End `run` in order. Any thread may call it, and a signal handler; it may be repeated."""
        self._inbox.put(_Message.STOP)

    def queue_figures(self) -> Sequence[QueueFigures]:
        """What is done for each queue at this moment."""
        return [consumer.facts() for consumer in self._consumers]

    # --- its parts ------------------------------------------------------------------------

    def _consumer(self, handler: QueueHandler) -> Consumer:
        concurrency = handler.concurrency or self._concurrency
        return Consumer(
            handler.queue,
            self._client,
            self._executor(handler, concurrency),
            InFlight(
                handler.queue,
                self._client,
                concurrency,
                ahead_seconds=self._ahead_seconds,
                ack_seconds=self._ack_seconds,
            ),
            max_wait_ms=self._max_wait_ms,
            tell=lambda error: self._inbox.put(_Message.CONSUMER_ENDED if error is None else error),
        )

    def _executor(self, handler: QueueHandler, concurrency: int) -> Executor:
        """Not started yet. Raises ValueError if the handler can't run where it is to run."""
        if handler.run_in == "tasks":
            return TaskExecutor(handler, concurrency)
        if handler.run_in == "threads":
            return ThreadExecutor(handler, concurrency)
        plan = ChildPlan.of(handler, self._client, self._set_up_process)
        return ProcessExecutor(handler, concurrency, plan)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def note(_number: int, _frame: FrameType | None) -> None:
            self._inbox.put(_Message.SIGNAL)

        before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                if handler is not None:  # else it is not Python's, and can't be restored
                    signal.signal(number, handler)

    # --- the end --------------------------------------------------------------------------

    def _end(self) -> None:
        for consumer in self._consumers:
            consumer.stop()
        self._wait_until_ended(self._grace_seconds, may_hurry=True)
        for consumer in self._consumers:
            consumer.abandon()
        self._wait_until_ended(_LAST_WORDS_SECONDS + self._max_wait_ms / 1000)
        for consumer in self._consumers:
            consumer.give_up()

    def _wait_until_ended(self, seconds: float, *, may_hurry: bool = False) -> None:
        """Wait until all consumers have ended, for so long, or up to a signal if it `may_hurry`."""
        deadline = time.monotonic() + seconds
        while self._consumers_left:
            message = self._next_message(deadline)
            if message is None:
                return
            self._note(message)
            if may_hurry and message is _Message.SIGNAL:
                return

    def _next_message(self, deadline: float) -> _Message | BaseException | None:
        """Wait for a message; None once the deadline is over."""
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return self._inbox.get(timeout=min(left, _SIGNAL_SECONDS))
            except queue.Empty:
                if left <= _SIGNAL_SECONDS:
                    return None

    def _note(self, message: _Message | BaseException | None) -> None:
        if isinstance(message, BaseException):
            self._error = self._error or message
        elif message is _Message.CONSUMER_ENDED:
            self._consumers_left -= 1


def _check_connections(client: Client, queues: int) -> None:
    needed = CONNECTIONS_A_QUEUE * queues
    if client.max_connections < needed:
        raise ValueError(
            f"{queues} queues need {needed} connections, {CONNECTIONS_A_QUEUE} each, beside those "
            f"that handlers use; give the Client more max_connections than {client.max_connections}"
        )


def _chosen(handlers: Handlers, queues: Iterable[str] | None) -> list[QueueHandler]:
    of_queues = handlers.by_queue
    if not of_queues:
        raise ValueError("no handlers: decorate functions with @handlers.queue(...) first")
    names = list(of_queues) if queues is None else list(dict.fromkeys(queues))
    if unknown := [name for name in names if name not in of_queues]:
        raise ValueError(f"no handler for queue {unknown[0]!r}; there are: {', '.join(of_queues)}")
    return [of_queues[name] for name in names]
