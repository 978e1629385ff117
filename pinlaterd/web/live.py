"""Live figures: the newest of the service, sent to every page that shows them.

One sample a second serves all viewers, and none is taken while nobody looks. A stream sends the
cells of one page, `key: text`, that have changed. Viewers of the same page and rights share a
channel, which makes and encodes its cells once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from pinlaterd.client.coordinator import fetch_json, take_frame
from pinlaterd.clock import Clock, until_full
from pinlaterd.config.schema import UserSettings
from pinlaterd.errors import ConnectionFailed, PinLaterError
from pinlaterd.status import Facts
from pinlaterd.web.text import line

log = logging.getLogger(__name__)

_SECONDS = 1.0  # between samples
_OUTLINE_SECONDS = 10.0  # between those of the last hour
_OUTLINES = "/outlines.json?series=ready&points=36&servers=all"
# For the coordinator's answer, where an earlier one can be shown: the page says how old that is.
_PATIENCE_SECONDS = 1.5
_SHORT_PATIENCE_SECONDS = 0.02  # where that is of just now
_RECENT_SECONDS = 3.0
_MOST_TEXTS = 1_000  # that are kept
_MOST_BEHIND = 5  # events that a viewer has not taken yet

EVENT_STREAM = "text/event-stream"
Cells = Mapping[str, str]


class LiveFrame(NamedTuple):
    """The figures of the service at one time."""

    facts: Facts
    at: float  # monotonic
    lines: Mapping[str, str] = {}  # paths of the jobs ready in the last hour, by queue


CellSource = Callable[[LiveFrame, str, UserSettings | None], Cells]


class ServiceFrames:
    """Asks the coordinator of this server; used on the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.last: LiveFrame | None = None
        self._lines: Mapping[str, str] = {}
        self._next_outlines = 0.0
        self._asked_at = 0.0
        self._asking: asyncio.Task[LiveFrame] | None = None
        self.problem = ""  # why the last one is not newer

    @property
    def age_seconds(self) -> float | None:
        """The age of the last frame; None if there is none."""
        return None if self.last is None else self._clock.monotonic() - self.last.at

    async def now(self) -> LiveFrame:
        """Return what is known now, or was when the coordinator last answered. Raises
        ConnectionFailed if it never has."""
        age = self.age_seconds
        if self.last is not None and age is not None and age < _SECONDS:
            return self.last
        patience = self._patience(age)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
            # It may fail when nobody waits for it any more; `problem` says so then.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait({self._asking}, timeout=patience)
        if not self._asking.done():
            if patience != _SHORT_PATIENCE_SECONDS:
                self.problem = self.problem or "the coordinator does not answer"
        elif (error := self._asking.exception()) and (
            not isinstance(error, ConnectionFailed) or self.last is None
        ):
            raise error
        assert self.last is not None
        return self.last

    def _patience(self, age: float | None) -> float | None:
        """Return how long the coordinator is waited for; None: as long as it takes."""
        if age is None:
            return None
        now = self._clock.monotonic()
        before, self._asked_at = self._asked_at, now
        if self.problem and now - before < _RECENT_SECONDS:
            return 0.0
        return _SHORT_PATIENCE_SECONDS if age < _RECENT_SECONDS else _PATIENCE_SECONDS

    async def ask(self, path: str) -> Facts | None:
        """Return another page of the coordinator; None if it does not answer."""
        try:
            return await self.fetch(path)
        except ConnectionFailed:
            return None

    async def fetch(self, path: str) -> Facts:
        """Return another page of the coordinator. Raises ConnectionFailed."""
        found: Facts = await asyncio.to_thread(fetch_json, path, directory=Path(), url=None)
        return found

    async def _ask(self) -> LiveFrame:
        try:
            facts = await asyncio.to_thread(take_frame, Path())
        except ConnectionFailed as error:
            self.problem = str(error)
            raise
        now = self._clock.monotonic()
        if now >= self._next_outlines:
            self._next_outlines = now + _OUTLINE_SECONDS
            outlines = await self.ask(_OUTLINES) or {}
            # To draw a thousand takes as long as all other cells of as many queues.
            self._lines = await asyncio.to_thread(_lines_of, outlines)
        self.last, self.problem = LiveFrame(facts, now, self._lines), ""
        return self.last


def _lines_of(outlines: Mapping[str, Sequence[float | None]]) -> Mapping[str, str]:
    return {queue: line(values) for queue, values in outlines.items()}


class LookedUp:
    """Texts of a cell that calls find while somebody watches, since cells can't wait for calls.
    Used on the event loop."""

    def __init__(self, cell: str) -> None:
        self._cell = cell
        self._texts: dict[Hashable, str] = {}
        self._looking: dict[Hashable, asyncio.Task[None]] = {}

    async def now(self, key: Hashable, look: Callable[[], Awaitable[str]]) -> str:
        """Look for a text now, and keep it. Raises what `look` does."""
        self._texts[key] = found = await look()
        if len(self._texts) > _MOST_TEXTS:
            self._texts.pop(next(iter(self._texts)))
        return found

    def get(
        self, key: Hashable, look: Callable[[], Awaitable[str]], *, again: bool = True
    ) -> Cells:
        """Return the cell with the text that was found last; without one none. Look for it if it is
        not known, or `again`, unless that is under way."""
        if key not in self._looking and (again or key not in self._texts):
            self._looking[key] = asyncio.ensure_future(self._look(key, look))
        return {self._cell: self._texts[key]} if key in self._texts else {}

    async def _look(self, key: Hashable, look: Callable[[], Awaitable[str]]) -> None:
        try:
            with contextlib.suppress(ConnectionFailed, PinLaterError):  # the next look may find it
                await self.now(key, look)
        finally:
            del self._looking[key]


class _Channel:
    """The viewers of one page who may see the same of it."""

    def __init__(self, source: CellSource, name: str, user: UserSettings | None) -> None:
        self._source = source
        self._name = name
        self._user = user
        self._cells: Cells = {}  # as they were sent last
        self._whole = ""  # what viewers begin with until the next, as JSON; "": not made yet
        self.viewers: set[asyncio.Queue[bytes | None]] = set()

    def all_cells(self, frame: LiveFrame | None, age: float) -> bytes:
        """Return the event with which a viewer begins: with what others were sent last."""
        # After a restart all viewers come back at once. Those who come before the first frame begin
        # with nothing: `_cells` stays empty for them, so that the next event has all.
        if not self._whole and frame is not None:
            self._whole = _json(self._cells or self._cells_of(frame))
        return _event(age, self._whole or "{}")

    def publish(self, frame: LiveFrame | None, age: float) -> None:
        """Send every viewer what has changed; end those who take nothing."""
        cells = self._cells_of(frame)
        changed = {k: text for k, text in cells.items() if self._cells.get(k) != text}
        event = _event(age, _json(changed))
        self._cells, self._whole = cells, ""
        for viewer in self.viewers:
            is_behind = viewer.full()
            if is_behind:
                viewer.get_nowait()
            viewer.put_nowait(None if is_behind else event)

    def end(self) -> None:
        """End every viewer's stream, which its browser opens again."""
        for viewer in self.viewers:
            if viewer.full():
                viewer.get_nowait()
            viewer.put_nowait(None)

    def _cells_of(self, frame: LiveFrame | None) -> Cells:
        return {} if frame is None else self._source(frame, self._name, self._user)


def _json(cells: Cells) -> str:
    return json.dumps(cells, separators=(",", ":"))


def _event(age: float, cells: str) -> bytes:
    return f'data: {{"age":{age:.1f},"cells":{cells}}}\n\n'.encode()


class LiveStreams:
    """The streams of all viewers; used on the event loop."""

    def __init__(
        self,
        frames: ServiceFrames,
        clock: Clock,
        user_of: Callable[[web.Request], UserSettings | None],
    ) -> None:
        self._frames = frames
        self._clock = clock
        self._user_of = user_of
        self._began = clock.monotonic()
        self._sources: dict[str, CellSource] = {"nothing": lambda *_: {}}
        self._channels: dict[object, _Channel] = {}
        self._sampling: asyncio.Task[None] | None = None
        self._is_closed = False

    def add(self, page: str, source: CellSource) -> None:
        """Have `source` make the cells of a page, for the stream `/live?of=PAGE&name=NAME`."""
        self._sources[page] = source

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Send a viewer all cells of its page, then those that change, until it goes."""
        page, name = request.query.get("of", "nothing"), request.query.get("name", "")
        source, user = self._sources.get(page), self._user_of(request)
        if source is None or self._is_closed:
            raise web.HTTPNotFound
        answer = web.StreamResponse(headers={"Content-Type": EVENT_STREAM})
        await answer.prepare(request)
        key = (page, name, user and (user.queues, user.roles))
        channel = self._channels.setdefault(key, _Channel(source, name, user))
        viewer: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_BEHIND)
        channel.viewers.add(viewer)
        if self._sampling is None or self._sampling.done():
            self._sampling = asyncio.create_task(self._sample())
        try:
            event: bytes | None = channel.all_cells(self._frames.last, self._age())
            # Rights may be taken away while a stream is open.
            while event is not None and self._user_of(request) == user:
                await answer.write(event)
                event = await viewer.get()
        except ConnectionError:
            pass  # the viewer has gone
        finally:
            channel.viewers.discard(viewer)
            if not channel.viewers:
                self._channels.pop(key, None)
        return answer

    async def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        self._end_all()
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.wait({self._sampling})

    async def _sample(self) -> None:
        """Publish what is known, once a second, while anybody looks."""
        try:
            while self._channels:
                await asyncio.sleep(until_full(_SECONDS, self._clock.monotonic()))
                with contextlib.suppress(ConnectionFailed):
                    await self._frames.now()
                for channel in list(self._channels.values()):
                    channel.publish(self._frames.last, self._age())
        except Exception:
            self._end_all()
            log.exception("the stream of changes has a defect")

    def _end_all(self) -> None:
        for channel in self._channels.values():
            channel.end()

    def _age(self) -> float:
        age = self._frames.age_seconds
        return self._clock.monotonic() - self._began if age is None else age
