"""Where dequeues wait for jobs (`maxWaitMillis`), woken by the counts that shards publish.

It relies on asyncio only. First come, first woken: of those who wait for a queue, as many are
woken as jobs are ready, so that one job does not stir a thousand workers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

_Woken = asyncio.Future[None]


class WaitingRoom:
    """Dequeues that found nothing, by queue."""

    def __init__(self) -> None:
        # Whether each has gone, the first to come first. Thousands may end at once: a deque would
        # be searched for each of them.
        self.queues: dict[str, OrderedDict[_Woken, Callable[[], bool]]] = {}

    def __len__(self) -> int:
        return sum(len(waiters) for waiters in self.queues.values())

    async def wait(self, queue: str, seconds: float, has_gone: Callable[[], bool]) -> bool:
        """Wait for news of `queue`; False once `seconds` have passed without any."""
        woken: _Woken = asyncio.get_running_loop().create_future()
        self.queues.setdefault(queue, OrderedDict())[woken] = has_gone
        try:
            await asyncio.wait_for(woken, seconds)
        except TimeoutError:
            return False
        finally:
            self._forget(queue, woken)
        return True

    def wake_all(self) -> None:
        """Wake everybody: nobody will get anything any more."""
        for queue in list(self.queues):
            self.wake(queue, len(self.queues[queue]))

    def wake(self, queue: str, ready: int) -> None:
        """`ready` jobs of `queue` can be had: wake as many of those who still want one."""
        waiters = self.queues.get(queue)
        while waiters and ready > 0:
            woken, has_gone = waiters.popitem(last=False)
            if not woken.done():
                woken.set_result(None)
                if not has_gone():
                    ready -= 1

    def _forget(self, queue: str, woken: _Woken) -> None:
        waiters = self.queues.get(queue)
        if waiters is None:
            return
        waiters.pop(woken, None)
        if not waiters:
            del self.queues[queue]
