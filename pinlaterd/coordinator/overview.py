"""The view of a server over time that the coordinator gives: frames, history and marks.

It samples every 5 s, and writes the history every 5 min and at the end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from pinlaterd.clock import Clock
from pinlaterd.config import layout
from pinlaterd.config.schema import MIB, Config
from pinlaterd.coordinator.events import Event, merged_events
from pinlaterd.coordinator.history import (
    KINDS,
    LONG_STEP_MS,
    PROCESS,
    QUEUE,
    SHARD,
    STEP_MS,
    Outlines,
    Series,
    is_of_hour,
    load_history,
    merged_outlines,
    merged_series,
    write_history,
)
from pinlaterd.coordinator.sampler import Sampler
from pinlaterd.coordinator.workers import DetailsControl, Workers
from pinlaterd.status import Facts, PauseNote, Sample, ServerFrame, whole_frame
from pinlaterd.wire.control import (
    Details,
    DetailsQuestion,
    EventsQuestion,
    FrameQuestion,
    HistoryQuestion,
    OutlinesQuestion,
    PeerQuestion,
)

log = logging.getLogger(__name__)

_SINCE = re.compile(r"([0-9]{1,15})([smhd]?)")
_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

# A coordinator that was killed had written the history within its step; with a minute to start.
_MOST_RESTART_MS = LONG_STEP_MS + 60_000
_HOUR_SECONDS = 3_600
_MOST_POINTS = 72
_OF_ALL = {"servers": "all"}  # the query of a request that is about all servers

T = TypeVar("T")


class AskOthers(Protocol):
    """Asks all other servers; None stands for one that does not answer."""

    async def __call__(
        self, question: PeerQuestion, kind: type[T], /
    ) -> Mapping[str, T | None]: ...


class QuestionError(Exception):
    """A request that can't be answered, and why."""


class Overview:
    """Frames, history and marks of one server. Used on the coordinator's event loop."""

    def __init__(
        self,
        clock: Clock,
        take: Callable[[], Sample],
        config_of: Callable[[], Config],
        ask_others: AskOthers,
        details: DetailsControl,
        path: Path = layout.HISTORY_FILE,
    ) -> None:
        """`take` returns the sample of this server."""
        self._clock = clock
        self._take = take
        self._config_of = config_of
        self._ask_others = ask_others
        self._details = details
        self._path = path
        written_ms = path.stat().st_mtime * 1000 if path.exists() else None
        self.history = load_history(path, config_of().server.history_mib * MIB)
        self.events = self.history.events
        if written_ms is not None:
            is_restart = clock.now_ms() - written_ms <= _MOST_RESTART_MS
            text = f"coordinator {'restarted' if is_restart else 'started'}, pid {os.getpid()}"
            self.events.add(clock.now_ms(), PROCESS.name, "coordinator", text)
        self._workers = Workers(clock, self._gather_details, config_of)
        self._sampler = Sampler(clock, take, self.history)
        self._next: asyncio.TimerHandle | None = None
        self._written_ms = clock.now_ms()
        self._writing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Sample from now on."""
        # In the middle of the 5 s of a point, so that no point is missed or comes twice.
        wait_ms = STEP_MS - (self._clock.now_ms() - STEP_MS // 2) % STEP_MS
        self._next = asyncio.get_running_loop().call_later(wait_ms / 1000, self._step)

    async def stop(self) -> None:
        """Write the history a last time."""
        await self._workers.close()
        if self._next is not None:
            self._next.cancel()
        if self._writing is not None:
            await self._writing
        write_history(self._path, self.history.pack())

    def _step(self) -> None:
        self.start()
        sample = self._sampler.step()
        now_ms = self._clock.now_ms()
        self.events.look(sample.status, now_ms)
        if now_ms - self._written_ms >= LONG_STEP_MS:
            self._written_ms = now_ms
            packed = self.history.pack()
            writing = asyncio.to_thread(write_history, self._path, packed)
            self._writing = asyncio.create_task(writing)

    # --- what is asked --------------------------------------------------------------------------

    def server_frame(self) -> ServerFrame:
        """Return this server's part of a frame, with what processes answered to the last one."""
        self._details.ask_again()
        frame = self._sampler.frame()
        (watched, unasked), failures = self._details.unasked(), self._details.failures()
        of_hour = self._details.failed_in_hour()
        hour_is_partial = any(
            process["kind"] == SHARD.name and process["uptime_seconds"] < _HOUR_SECONDS
            for process in frame.status["processes"]
        )
        for queue, part in frame.queues.items():
            part.unasked_seconds, part.watched_seconds = unasked.get(queue), watched
            part.failures = failures.get(queue, {})
            part.failed_in_hour, part.hour_is_partial = of_hour[queue], hour_is_partial
        return frame

    async def read_frame(self, query: Mapping[str, str]) -> Facts:
        """Return what has happened in the last seconds."""
        await self._details.wait_for_first()
        others = await self._others(query, FrameQuestion(), ServerFrame)
        limit = {"count_limit": self._config_of().server.count_limit}
        return {**whole_frame(self.server_frame(), others, self._pauses()), **limit}

    def _pauses(self) -> Mapping[str, PauseNote]:
        queues = self._config_of().queues
        return {
            name: PauseNote(queue.paused_by, queue.paused_at, queue.pause_reason)
            for name, queue in queues.items()
            if queue.paused
        }

    async def read_workers(self, _query: Mapping[str, str]) -> Facts:
        """Return who calls for jobs, and what each source does and holds."""
        queues = (await self.read_frame(_OF_ALL))["queues"]
        return await self._workers.page({row["name"]: row["in_progress"] or 0 for row in queues})

    async def _gather_details(self) -> Sequence[Details]:
        """Return what the processes of all servers know."""
        own, others = await asyncio.gather(
            self._details.gather(), self._ask_others(DetailsQuestion(whole=True), list[Details])
        )
        return [*own, *(one for found in others.values() for one in found or ())]

    async def read_failures(self, query: Mapping[str, str]) -> Facts:
        """Return what failed attempts of the `queue` that a request names have said. Raises
        QuestionError."""
        queue = query.get("queue")
        if not queue:
            raise QuestionError("name a queue: ?queue=NAME")
        found = await self._workers.failures(queue)
        return {"queue": queue, "failures": [one._asdict() for one in found]}

    async def _others(
        self, query: Mapping[str, str], question: PeerQuestion, kind: type[T]
    ) -> Mapping[str, T | None]:
        """Ask the other servers if a request is about all servers."""
        return await self._ask_others(question, kind) if is_whole(query) else {}

    def series(self, question: HistoryQuestion) -> Series:
        """Return the history of a subject as far as this server knows it."""
        kind, now_ms = KINDS[question.kind], self._clock.now_ms()
        return self.history.read(kind, question.name, question.since_ms, now_ms, question.step_ms)

    async def read_history(self, query: Mapping[str, str]) -> Facts:
        """Return the history that a request asks for: of the `queue`, `shard` or `process` that it
        names, `since` a time. Raises QuestionError."""
        kinds = [kind for kind in KINDS.values() if kind.name in query]
        if len(kinds) != 1:
            raise QuestionError("name one subject: ?queue=NAME, ?shard=NAME or ?process=NAME")
        kind, name, now_ms = kinds[0], query[kinds[0].name], self._clock.now_ms()
        since_ms = _since_ms(query, now_ms)
        step_ms = STEP_MS if is_of_hour(since_ms, now_ms) else LONG_STEP_MS
        question = HistoryQuestion(kind.name, name, since_ms, step_ms)
        parts, unanswered = await self._series_of_all(query, question)
        if len({part.step_ms for part in parts}) > 1:  # some have kept long points only
            question = HistoryQuestion(kind.name, name, since_ms, LONG_STEP_MS)
            parts, unanswered = await self._series_of_all(query, question)
        found = merged_series(kind, parts)
        return {
            kind.name: name,
            **msgspec.structs.asdict(found),
            "now_ms": now_ms,
            "unanswered": sorted({*unanswered, *self._gone_servers(query)}),
            "events": await self._events_since(query, found.from_ms),
        }

    async def _series_of_all(
        self, query: Mapping[str, str], question: HistoryQuestion
    ) -> tuple[Sequence[Series], Sequence[str]]:
        """Return what each server knows of a subject, and the servers that don't answer."""
        own, others = self.series(question), await self._others(query, question, Series)
        unanswered = [server for server, one in others.items() if one is None]
        return [own, *filter(None, others.values())], unanswered

    def _gone_servers(self, query: Mapping[str, str]) -> Sequence[str]:
        servers = self._take().status.get("servers", []) if is_whole(query) else []
        return [server["name"] for server in servers if server["state"] == "gone"]

    async def read_outlines(self, query: Mapping[str, str]) -> Outlines:
        """Return a `series` of all queues over the last hour, by so many `points`. Raises
        QuestionError."""
        series, points = query.get("series", "ready"), query.get("points", "36")
        if series not in QUEUE.series:
            raise QuestionError(f"series: choose from {', '.join(QUEUE.series)}")
        is_number = points.isdecimal() and len(points) <= len(str(_MOST_POINTS))
        if not is_number or not 1 <= int(points) <= _MOST_POINTS:
            raise QuestionError(f"points: choose from 1 to {_MOST_POINTS}")
        question = OutlinesQuestion(series, int(points))
        others = await self._others(query, question, Outlines)
        return merged_outlines(series, [self.outlines(question), *filter(None, others.values())])

    def outlines(self, question: OutlinesQuestion) -> Outlines:
        """Return the outlines of queues as far as this server knows them."""
        now_ms = self._clock.now_ms()
        return self.history.outlines(QUEUE, question.series, question.points, now_ms)

    async def read_events(self, query: Mapping[str, str]) -> Facts:
        """Return the marks `since` a time, all by default. Raises QuestionError."""
        since_ms = _since_ms(query, self._clock.now_ms(), default="0")
        return {"events": await self._events_since(query, since_ms)}

    async def _events_since(self, query: Mapping[str, str], since_ms: int) -> Sequence[Event]:
        own, server = self.events.since(since_ms), self._config_of().server.server
        others = await self._others(query, EventsQuestion(since_ms), list[Event])
        return merged_events({server: own, **others}) if others else own


def is_whole(query: Mapping[str, str]) -> bool:
    """Tell whether a request is about all servers of the cluster."""
    return query.get("servers") == _OF_ALL["servers"]


def _since_ms(query: Mapping[str, str], now_ms: int, default: str = "1h") -> int:
    """Read a time: so long ago (90s, 30m, 6h, 7d), or milliseconds since the epoch."""
    found = _SINCE.fullmatch(query.get("since", default))
    if found is None:
        raise QuestionError("since: expected a time ago, as 30m, 6h or 7d, or milliseconds")
    amount, unit = found.groups()
    return now_ms - int(amount) * _UNITS_MS[unit] if unit else int(amount)
