"""A worker: claims the jobs of queues, has their handlers run, and says how they ended.

    handlers = Handlers()

    @handlers.queue("images")
    def resize(job: RunningJob) -> str | None:
        image = fetch(job.body)
        if image is None:
            raise Retry(delay_seconds=60, status="not uploaded yet; ")
        return f"{shrink(image)} bytes"                # appended to the job's custom status

    Worker(Client("queue.example.com"), handlers).run()     # until SIGTERM or SIGINT

Delivery is at least once: a job whose worker dies, or is cut off for longer than the claim's
time-out, is handed out again. So a handler must be fit to run twice.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from pinlaterd.client.client import Client
from pinlaterd.client.handlers import Handlers
from pinlaterd.client.lane import Lane, LaneSettings
from pinlaterd.errors import RequestError

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Idle:
    """News: a lane that was stopped has no handler running."""


class _Stop:
    """News: stop in order; the second time: at once."""


_News = _Idle | _Stop | RequestError


class Worker:
    """Runs handlers for the jobs of their queues until stopped.

    Acks ride on the next dequeue, or go alone. Claims of jobs that take long are renewed well
    before they time out, and looked up: a handler whose claim is gone is told. A service that is
    away is waited for.
    """

    def __init__(
        self,
        client: Client,
        handlers: Handlers,
        *,
        queues: Collection[str] | None = None,
        concurrency: int = 8,
        ack_interval_ms: int = 50,
        ahead_ms: int = 100,
        max_wait_ms: int = 2000,
        grace_seconds: float = 30.0,
    ) -> None:
        """`queues`: those of the handlers' to work on (default: all). `concurrency`: jobs of a
        queue that run at a time, where its handler does not say. `ack_interval_ms`: how long an
        ack waits for a dequeue to take it along. `ahead_ms`: so many jobs are claimed in advance
        as the handlers begin in that time, judged by how long they took so far; 0 claims no job
        before it can begin. `max_wait_ms`: how long a dequeue waits for a first job, and so how
        long `stop` may take on an empty queue. `grace_seconds`: how long jobs may go on after
        `stop` before they are given back.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; it must be at least 1")
        if min(ack_interval_ms, ahead_ms, max_wait_ms, grace_seconds) < 0:
            raise ValueError("intervals and waits must be at least 0")
        wanted = list(handlers.by_queue) if queues is None else list(queues)
        unknown = [name for name in wanted if name not in handlers.by_queue]
        if unknown:
            raise ValueError(f"no handler for queue {', '.join(unknown)}")
        if not wanted:
            raise ValueError("no queue to work on: register a handler with @handlers.queue(NAME)")
        self._grace_seconds = grace_seconds
        self._news: SimpleQueue[_News] = SimpleQueue()  # safe in signal handlers
        self._lanes = [
            Lane(
                client,
                handlers.by_queue[name],
                handlers,
                LaneSettings(
                    handlers.by_queue[name].concurrency or concurrency,
                    ack_interval_ms,
                    ahead_ms,
                    max_wait_ms,
                ),
                on_idle=lambda: self._news.put(_Idle()),
                on_failure=self._news.put,
            )
            for name in wanted
        ]

    def stop(self) -> None:
        """Let `run` finish the jobs that run, tell how they ended, and return.

        Jobs that were claimed but not begun are given back at once, those that still run after the
        grace period then; neither costs an attempt. A second call ends the grace period. Callable
        from any thread, and from a signal handler; a worker that was stopped can't be run again.
        """
        self._news.put(_Stop())

    def run(self, *, handle_signals: bool = True) -> None:
        """Work until `stop` is called.

        In the main thread SIGTERM and SIGINT call it, unless `handle_signals` is false. Raises the
        service's RequestError if a queue can't be worked on, as when it does not exist.
        """
        in_main = threading.current_thread() is threading.main_thread()
        with _signals_call(self.stop) if handle_signals and in_main else _nothing():
            for lane in self._lanes:
                lane.start()
            news: _News | None = None
            try:
                news = self._wait_for_stop()
            finally:
                self._end()
        if isinstance(news, RequestError):
            raise news

    def _wait_for_stop(self) -> _News:
        while isinstance(news := self._news.get(), _Idle):
            pass
        return news

    def _end(self) -> None:
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.give_back_waiting()
        give_up_at = time.monotonic() + self._grace_seconds
        while not all(lane.idle for lane in self._lanes):
            try:
                news = self._news.get(timeout=max(0.0, give_up_at - time.monotonic()))
            except Empty:
                break
            if isinstance(news, _Stop):
                break
        for lane in self._lanes:
            lane.end()


@contextmanager
def _signals_call(stop: Callable[[], None]) -> Iterator[None]:
    def caught(_number: int, _frame: FrameType | None) -> None:
        stop()

    before: dict[signal.Signals, Any] = {s: signal.signal(s, caught) for s in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
