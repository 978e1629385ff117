"""Virtual time: processes of a simulated machine, each a greenlet, on one deterministic schedule.

A process runs in no time until it sleeps, blocks, or its event loop has nothing ready; then the
world runs the process that is due next, in an order that the seed draws. A killed process is never
resumed, a frozen one (SIGSTOP) not before it is thawed. `_VirtualLoop` relies on private parts of
asyncio's loops: how one turn is run, and when the next timer is due.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from greenlet import greenlet

from pinlaterd.clock import Clock

_BASE_MS = 1_700_000_000_000


class World:
    """The clock, the schedule and the processes. `run(until)` is the simulation."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.greenlet = greenlet.getcurrent()  # in which `run` is called
        self.now = 1_000.0  # monotonic seconds
        self._turns: list[tuple[float, float, int, Callable[[], None]]] = []
        self._numbers = count()

    def now_ms(self) -> int:
        """The wall clock: milliseconds since the epoch."""
        return _BASE_MS + int(self.now * 1000)

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Run `action` at `time`; those of the same moment in random order."""
        due = max(time, self.now)
        heappush(self._turns, (due, self.rng.random(), next(self._numbers), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run(self, until: float) -> None:
        while self._turns and self._turns[0][0] <= until:
            time, _, _, action = heappop(self._turns)
            self.now = time
            action()
        self.now = until


class WorldClock(Clock):
    """A clock on virtual time."""

    def __init__(self, world: World) -> None:
        self._world = world
        super().__init__()

    def now_ms(self) -> int:
        self._last_ms = max(self._last_ms, self._world.now_ms())
        return int(self._last_ms)

    def monotonic(self) -> float:
        return self._world.now

    def elapsed(self) -> float:
        return self.monotonic()

    def look(self) -> bool:
        return False

    def resume(self, now_ms: int) -> None:
        pass


class Process:
    """Runs `main` until it returns, sleeping by `sleep` alone. `wake` ends a sleep early."""

    def __init__(self, world: World, main: Callable[[], object]) -> None:
        self.world = world
        self.alive = True
        self.on_exit: Callable[[], None] = lambda: None
        self.edges: set[int] = set()  # descriptors that became readable; of a blocking process
        self._thawed_at = -math.inf
        self._turn = 0  # a turn that was scheduled under an earlier number is void
        self._main = main
        self._greenlet = greenlet(self._run, world.greenlet)
        self._schedule(world.now)

    @property
    def frozen(self) -> bool:
        return self._thawed_at > self.world.now

    def kill(self) -> None:
        """kill -9."""
        self.alive = False
        self._turn += 1

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after `seconds`."""
        self._thawed_at = max(self._thawed_at, self.world.now + seconds)

    def wake(self) -> None:
        """Something came in: the process runs on, once it may."""
        if self.alive and greenlet.getcurrent() is not self._greenlet:
            self._schedule(self.world.now)

    def sleep(self, seconds: float) -> None:
        """Called by the process itself: returns after `seconds`, or when it is woken."""
        self._schedule(self.world.now + max(0.0, seconds))
        self.world.greenlet.switch()

    def block(self, seconds: float) -> None:
        """Called by the process itself: a system call that nothing interrupts."""
        until = self.world.now + seconds
        while self.world.now < until:
            self.sleep(until - self.world.now)

    def _schedule(self, time: float) -> None:
        if math.isinf(time):
            return
        self._turn += 1
        turn = self._turn
        self.world.at(time, lambda: self._resume(turn))

    def _resume(self, turn: int) -> None:
        if not self.alive or turn != self._turn:
            return
        if self.frozen:
            self.world.at(self._thawed_at, lambda: self._resume(turn))
            return
        self._greenlet.switch()

    def _run(self) -> None:
        self._main()
        self.alive = False
        self.on_exit()


class AsyncProcess(Process):
    """A process whose `main` is a coroutine on an event loop of its own, in virtual time."""

    def __init__(self, world: World, main: Callable[[], Coroutine[Any, Any, object]]) -> None:
        self.loop = _VirtualLoop(world, self)
        self._coroutine = main
        super().__init__(world, self._run_loop)

    def _run_loop(self) -> None:
        loop = self.loop
        done = loop.create_task(self._coroutine())
        while not done.done():
            loop.turn()
            self.sleep(loop.idle_seconds())
        done.result()


class _Selector(selectors.BaseSelector):
    """Descriptors of simulated sockets: an edge makes one readable once."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}
        self.edges: set[int] = set()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self.register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = [self._keys[edge] for edge in sorted(self.edges) if edge in self._keys]
        self.edges.clear()
        return [(key, selectors.EVENT_READ) for key in found]

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, world: World, process: Process) -> None:
        self.selector = _Selector()
        self._world = world
        super().__init__(self.selector)
        self._process = process
        self._clock_resolution = 1e-9
        self.set_exception_handler(self._failed)
        self.failures: list[str] = []

    def _make_self_pipe(self) -> None:
        """No other thread wakes this loop."""

    def _close_self_pipe(self) -> None: ...

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self._process.alive and "exception" in context:
            raise context["exception"]

    def time(self) -> float:
        return self._world.now

    def edge(self, descriptor: int) -> None:
        self.selector.edges.add(descriptor)
        self._process.wake()

    def turn(self) -> None:
        asyncio.events._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]
        finally:
            asyncio.events._set_running_loop(None)

    def idle_seconds(self) -> float:
        if self._ready or self.selector.edges:  # type: ignore[attr-defined]
            return 0.0
        timers = self._scheduled  # type: ignore[attr-defined]
        return max(0.0, timers[0].when() - self._world.now) if timers else math.inf
