"""Clients that take jobs of limited queues as fast as they may: a process on the clients' machine.

    python -m tests.cluster.pull --seconds 60 --rate QUEUE=10 ... HOST:PORT...

Demand goes from one router to the others every 5 s. At the end it prints, for each queue, when how
many jobs were got.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence

from pinlaterd.client import Client
from pinlaterd.errors import ConnectionFailed, DequeueRateLimited, PinLaterError

TURN_SECONDS = 5.0
_WAIT_MS = 500
_MOST_JOBS = 50
_AWAY_SECONDS = 0.2
_MOST_ENQUEUED = 1000


class Puller(threading.Thread):
    """Takes jobs of one queue through one router while it is its turn."""

    def __init__(self, router: str, place: int, places: int, queue: str, until: float) -> None:
        super().__init__(daemon=True)
        self.taken: list[tuple[float, int]] = []
        self._client = Client(router, timeout_seconds=5.0)
        self._place, self._places, self._queue, self._until = place, places, queue, until

    def run(self) -> None:
        while (now := time.monotonic()) < self._until:
            if not self._is_on(int(now / TURN_SECONDS)):
                time.sleep(TURN_SECONDS - now % TURN_SECONDS)
                continue
            try:
                jobs = self._client.dequeue(self._queue, limit=_MOST_JOBS, max_wait_ms=_WAIT_MS)
            except DequeueRateLimited:
                time.sleep(_AWAY_SECONDS)
            except (PinLaterError, ConnectionFailed):
                time.sleep(_AWAY_SECONDS)  # nothing of it was got; its rate may be spent
            else:
                self.taken.append((time.monotonic(), len(jobs)))

    def _is_on(self, turn: int) -> bool:
        """One router; then the one after; then all."""
        return turn % 3 == 2 or turn % self._places == self._place


def pull(routers: Sequence[str], rates: dict[str, float], seconds: float) -> None:
    with Client(routers[0]) as client:
        for queue, rate in rates.items():
            client.create_queue(queue)
            left = int(rate * seconds * 1.2) + 20
            while left > 0:
                client.enqueue(queue, [b"x"] * min(left, _MOST_ENQUEUED))
                left -= _MOST_ENQUEUED
    until = time.monotonic() + seconds
    pullers = {
        queue: [Puller(one, at, len(routers), queue, until) for at, one in enumerate(routers)]
        for queue in rates
    }
    for group in pullers.values():
        for puller in group:
            puller.start()
    for group in pullers.values():
        for puller in group:
            puller.join()
    found = {queue: sorted(t for p in group for t in p.taken) for queue, group in pullers.items()}
    sys.stdout.write(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rate", action="append", required=True)
    parser.add_argument("routers", nargs="+")
    options = parser.parse_args()
    rates = {queue: float(rate) for queue, _, rate in (r.partition("=") for r in options.rate)}
    pull(options.routers, rates, options.seconds)


if __name__ == "__main__":
    main()
