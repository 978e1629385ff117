"""Where dequeues wait for jobs (`maxWaitMillis`), woken by the counts that shards publish.

It relies on asyncio only. First come, first woken: of those who wait for a queue, as many are
woken as jobs are ready, so that one job does not stir a thousand workers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class _Waiter(NamedTuple):
    woken: asyncio.Future[None]
    has_gone: Callable[[], bool]


class WaitingRoom:
    """Dequeues that found nothing, by queue."""

    def __init__(self) -> None:
        self._waiters: dict[str, deque[_Waiter]] = {}

    def __len__(self) -> int:
        return sum(len(waiters) for waiters in self._waiters.values())

    def __contains__(self, queue: str) -> bool:
        """Whether anybody waits for `queue`."""
        return queue in self._waiters

    async def wait(self, queue: str, seconds: float, has_gone: Callable[[], bool]) -> bool:
        """Wait for news of `queue`; False once `seconds` have passed without any."""
        waiter = _Waiter(asyncio.get_running_loop().create_future(), has_gone)
        self._waiters.setdefault(queue, deque()).append(waiter)
        try:
            await asyncio.wait_for(waiter.woken, seconds)
        except TimeoutError:
            return False
        finally:
            self._forget(queue, waiter)
        return True

    def wake_all(self) -> None:
        """Wake everybody: nobody will get anything any more."""
        for queue in list(self._waiters):
            self.wake(queue, len(self._waiters[queue]))

    def wake(self, queue: str, ready: int) -> None:
        """`ready` jobs of `queue` can be had: wake as many of those who still want one."""
        waiters = self._waiters.get(queue)
        while waiters and ready > 0:
            waiter = waiters.popleft()
            if not waiter.woken.done():
                waiter.woken.set_result(None)
                if not waiter.has_gone():
                    ready -= 1

    def _forget(self, queue: str, waiter: _Waiter) -> None:
        waiters = self._waiters.get(queue)
        if waiters is None:
            return
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            del self._waiters[queue]
