"""The marks of a deployment: what changed at one time, and may explain what figures show.

Restarts of processes, states of shards, configuration versions, mends of jobs. The last 500 are
kept, and stay in the file of the history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from pinlaterd.status import ProcessStatus, ShardStatus, Status

MOST_EVENTS = 500


class Event(msgspec.Struct, frozen=True):
    """A mark. `kind`: process, shard, config or mend; `about`: the process, shard or queue."""

    at_ms: int
    kind: str
    about: str
    text: str


class Events:
    """The last marks, the oldest first."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._pids: dict[str, int | None] = {}
        self._states: dict[tuple[str, str], str] = {}
        self._config_version = 0

    def add(self, at_ms: int, kind: str, about: str, text: str) -> None:
        """Mark something that has happened."""
        self._kept.append(Event(at_ms, kind, about, text))

    def since(self, at_ms: int) -> Sequence[Event]:
        """Return the marks from a time on."""
        return [event for event in self._kept if event.at_ms >= at_ms]

    def restore(self, events: Iterable[Event]) -> None:
        """Put marks of an earlier coordinator before the own ones."""
        own = [*self._kept]
        self._kept.clear()
        self._kept.extend((*events, *own))

    def look(self, status: Status, at_ms: int) -> None:
        """Mark what differs from the status before. What is seen first is no event."""
        for process in status["processes"]:
            self._look_at_process(process, at_ms)
        for shard in status["shards"]:
            self._look_at_shard(shard, at_ms)

    def _look_at_process(self, process: ProcessStatus, at_ms: int) -> None:
        name, pid = process["name"], process["pid"]
        before = self._pids.get(name)
        if pid is not None:
            if before not in (None, pid):
                self.add(at_ms, "process", name, f"{name} restarted, pid {pid}")
            self._pids[name] = pid
        self._look_at_state("process", name, process["state"], at_ms)

    def _look_at_shard(self, shard: ShardStatus, at_ms: int) -> None:
        state = shard["state"]
        if shard["degraded"]:
            state = f"degraded: {shard['degraded']}"
        elif shard["dequeue_only"]:
            state = f"{state}, dequeue-only"
        self._look_at_state("shard", shard["name"], state, at_ms)

    def _look_at_state(self, kind: str, name: str, state: str, at_ms: int) -> None:
        before = self._states.get((kind, name))
        self._states[kind, name] = state
        if before not in (None, state):
            self.add(
                at_ms,
                kind,
                name,
                f"{kind} {name}: {state}" if kind == "shard" else f"{name} is {state}",
            )
