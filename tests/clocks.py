"""A clock that tests move."""

from pinlaterd.clock import Clock


class FakeClock(Clock):
    """A clock that moves only when it is told to."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 1000.0
        super().__init__()

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return self._monotonic

    def elapsed(self) -> float:
        return self.monotonic()

    def look(self) -> bool:
        return False

    def resume(self, now_ms: int) -> None:
        self._now_ms = now_ms

    def advance(self, seconds: float) -> None:
        self._now_ms += round(seconds * 1000)
        self._monotonic += seconds
