"""The marks of a deployment: what changed at one time, and may explain what figures show.

Restarts of processes, states of shards, configuration versions, mends of jobs. The last 500 are
kept, and stay in the file of the history.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from pinlaterd.config.schema import Config
from pinlaterd.errors import how_many
from pinlaterd.model import Method
from pinlaterd.status import ProcessStatus, ShardStatus, Status
from pinlaterd.wire.control import Mend

MOST_EVENTS = 500
_TOGETHER_MS = 60_000
_MOST_TEXT_CHARS = 300
_MOST_QUEUES = 20  # with a mark each of one configuration, which leaves room for other marks


class Event(msgspec.Struct, frozen=True):
    """A mark. `kind`: process, shard, config or mend; `about`: the process, shard or
    queue; of a configuration "" where it is about no queue."""

    at_ms: int
    kind: str
    about: str
    text: str
    jobs: int = 0  # that a mend has changed, by this method
    method: str = ""


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

    def add_mend(self, at_ms: int, mend: Mend) -> None:
        """Mark jobs that calls have changed; those of one queue within a minute are one mark."""
        jobs = mend.jobs
        for event in reversed(self._kept):
            if event.at_ms < at_ms - _TOGETHER_MS:
                break
            if (event.kind, event.about, event.method) == ("mend", mend.queue, mend.method):
                jobs += event.jobs
                self._kept.remove(event)
                break
        done = "retried" if mend.method == Method.RETRY_FAILED else "deleted"
        text = f"{mend.queue}: {how_many(jobs, 'job')} {done}"
        self._kept.append(Event(at_ms, "mend", mend.queue, text, jobs, mend.method))

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


def merged_events(by_server: Mapping[str, Sequence[Event] | None]) -> Sequence[Event]:
    """Return the marks of several servers, the oldest first, with the servers' names. Every server
    takes on each configuration: that is one mark, the first server's."""
    found: list[Event] = []
    known: Counter[tuple[str, str]] = Counter()  # configurations, by what they are about and say
    for server, events in by_server.items():
        here: Counter[tuple[str, str]] = Counter()
        for event in events or ():
            if event.kind != "config":
                found.append(msgspec.structs.replace(event, text=f"{server}: {event.text}"))
                continue
            here[event.about, event.text] += 1
            if here[event.about, event.text] > known[event.about, event.text]:
                found.append(event)
        known |= here
    return sorted(found, key=lambda event: event.at_ms)


def changes_between(before: Config, after: Config) -> Mapping[str, str]:
    """Say what differs between two configurations, by queue, "" for none; of settings that may be
    secret their names."""
    texts = [*_differing(before.server, after.server)]
    for name in sorted(before.shards.keys() | after.shards.keys()):
        old, new = before.shards.get(name), after.shards.get(name)
        if old is None or new is None:
            texts.append(f"shard {name} {'added' if old is None else 'removed'}")
        else:
            texts += [f"shard {name}: {setting}" for setting in _differing(old, new)]
    texts += [
        part
        for part in ("users", "job_types", "pushes")
        if getattr(before, part) != getattr(after, part)
    ]
    found: dict[str, str] = {}
    for queue in sorted(before.queues.keys() | after.queues.keys()):
        settings = after.queue(queue)
        if differing := _differing(before.queue(queue), settings):
            said = ", ".join([f"{one} {_said(getattr(settings, one))}" for one in differing])
            found[queue] = f"{queue}: {said}"[:_MOST_TEXT_CHARS]
    if len(found) > _MOST_QUEUES:
        texts.append(f"settings of {how_many(len(found), 'queue')}")
        found.clear()
    if texts or not found:
        found[""] = ", ".join(texts)[:_MOST_TEXT_CHARS] or "the files"
    return found


def _differing(before: Any, after: Any) -> Sequence[str]:
    names = [field.name for field in fields(before)]
    return [name for name in names if getattr(before, name) != getattr(after, name)]


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value in (None, "") else str(value)
