"""Details of callers and failures, which processes report only when they are asked.

Routers know which sources call, shards what failed attempts said and how much each source does. A
frame asks for a summary once a second, the page of workers for everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from pinlaterd.clock import Clock
from pinlaterd.wire.control import Details, DetailsQuestion

_OLD_SECONDS = 5.0  # after which an answer counts for nothing
_AGAIN_SECONDS = 0.9
_ANSWER_SECONDS = 0.3
_LOOK_SECONDS = 0.01


class DetailsControl:
    """Asks processes for details. Used on the coordinator's event loop."""

    def __init__(self, clock: Clock, ask: Callable[[DetailsQuestion], int]) -> None:
        """`ask` sends a question to all processes that answer some, and returns how many."""
        self._clock = clock
        self._ask = ask
        self._asked_at = -_AGAIN_SECONDS
        self._answers: dict[bytes, tuple[float, Details]] = {}  # by peer

    def heard(self, peer: bytes, details: Details) -> None:
        """Note an answer."""
        self._answers[peer] = (self._clock.monotonic(), details)

    def ask_again(self) -> int:
        """Ask for a summary, unless that was done just now; return how many are to answer."""
        now = self._clock.monotonic()
        if now - self._asked_at < _AGAIN_SECONDS:
            return 0
        self._asked_at = now
        return self._ask(DetailsQuestion())

    async def wait_for_first(self) -> None:
        """Ask for a summary, and wait for it unless there is one."""
        began, asked = self._clock.monotonic(), self.ask_again()
        if not self._latest():
            await self._wait(began, asked, whole=False)

    async def gather(self) -> Sequence[Details]:
        """Ask for everything; return what is answered in time."""
        began = self._clock.monotonic()
        await self._wait(began, self._ask(DetailsQuestion(whole=True)), whole=True)
        return [one for at, one in self._answers.values() if at >= began and one.whole]

    async def _wait(self, began: float, asked: int, *, whole: bool) -> None:
        until = began + _ANSWER_SECONDS
        while self._clock.monotonic() < until:
            answers = [one for at, one in self._answers.values() if at >= began]
            if sum([one.whole >= whole for one in answers]) >= asked:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    def _latest(self) -> Sequence[tuple[float, Details]]:
        """Return how old each answer is, and the answer; forget those that are too old."""
        now = self._clock.monotonic()
        for peer in [peer for peer, (at, _) in self._answers.items() if now - at > _OLD_SECONDS]:
            del self._answers[peer]
        return [(now - at, details) for at, details in self._answers.values()]

    # --- what frames show -------------------------------------------------------------------------

    def unasked(self, queues: Iterable[str]) -> Mapping[str, float]:
        """Return since when nobody has asked for jobs of queues, in seconds, as routers saw it;
        nothing while no router has answered."""
        routers = [(age, one) for age, one in self._latest() if one.seconds]
        if not routers:
            return {}
        return {
            queue: min([age + one.unasked.get(queue, one.seconds) for age, one in routers])
            for queue in queues
        }

    def failures(self) -> Mapping[str, dict[str, int]]:
        """Return how many attempts failed in the last minutes, by queue and signature."""
        found: dict[str, dict[str, int]] = {}
        for _, details in self._latest():
            for queue, counts in details.failures.items():
                known = found.setdefault(queue, {})
                for text, attempts in counts.items():
                    known[text] = known.get(text, 0) + attempts
        return found
