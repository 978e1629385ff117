"""Workers that count how many jobs of a queue run at a time, by the claims that they got."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from pinlaterd.client import Client, ConnectionFailed, PinLaterError

_RUN_SECONDS = 0.004


class LimitedWorkers:
    """Threads that dequeue at the given ports, until they are stopped. `most`: the most jobs that
    ran at a time; `done`: those that were acknowledged."""

    def __init__(self, ports: Sequence[int], queue: str, *, each: int = 4) -> None:
        self.done = self.most = self._running = 0
        self._queue = queue
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(port,)) for port in ports for _ in range(each)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _work(self, port: int) -> None:
        with Client(port=port, source="worker", timeout_seconds=10) as client:
            while not self._stopping.is_set():
                with suppress(PinLaterError, ConnectionFailed):
                    self._run_one(client)

    def _run_one(self, client: Client) -> None:
        jobs = client.dequeue(self._queue, limit=1, max_wait_ms=200)
        if not jobs:
            return
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
        time.sleep(_RUN_SECONDS)
        with self._lock:
            self._running -= 1
        client.ack(self._queue, succeeded=jobs)
        self.done += 1
