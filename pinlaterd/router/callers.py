"""The sources that call for jobs, as a router sees them: for which queue each asked, and when last.

A call costs a store into a dict, so that the job path does not become slower: sources stay bytes
until somebody asks for them, and calls are not counted, since shards know how many jobs each source
was handed. Calls in an unusual layout, which routers decode as a whole, are not seen here.

Beyond so many sources those that have not called for longest are forgotten. A router that was
restarted knows of those that have called since; so it reports for how long it has known, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pinlaterd.wire.control import Details, SourceCalls

MOST_SOURCES = 1_000
_KEPT_SOURCES = MOST_SOURCES * 9 // 10  # once there are too many
# Longer ones are of calls that shards refuse.
_MOST_QUEUE_CHARS, _MOST_SOURCE_BYTES = 64, 120

_Times = dict[tuple[str, bytes], float]


class Callers:
    """The last calls by queue and source, in monotonic seconds. Used on the router's event loop."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._dequeues: _Times = {}
        self._acks: _Times = {}

    def dequeues(self, queue: str, source: bytes, now: float) -> None:
        """Note a dequeue."""
        times = self._dequeues
        times[queue[:_MOST_QUEUE_CHARS], source[:_MOST_SOURCE_BYTES]] = now
        if len(times) > MOST_SOURCES:
            self._dequeues = _newest(times)
            self._began = min(self._dequeues.values())

    def acks(self, queue: str, source: bytes, now: float) -> None:
        """Note an ack, a checkpoint or a finish."""
        times = self._acks
        times[queue[:_MOST_QUEUE_CHARS], source[:_MOST_SOURCE_BYTES]] = now
        if len(times) > MOST_SOURCES:
            self._acks = _newest(times)

    def details(self, now: float, *, whole: bool) -> Details:
        """Answer the coordinator: who calls, if it asks for the `whole`, and which queues nobody
        asks for."""
        seconds, unasked = self.unasked(now)
        calls = self.sources(now) if whole else ()
        return Details(whole=whole, seconds=seconds, unasked=unasked, calls=calls)

    def unasked(self, now: float) -> tuple[float, Mapping[str, float]]:
        """Return since when this router knows of calls, and since when nobody has asked for jobs of
        each queue, in seconds."""
        found: dict[str, float] = {}
        for (queue, _), at in self._dequeues.items():
            found[queue] = min(found.get(queue, now - at), now - at)
        return now - self._began, found

    def sources(self, now: float) -> Sequence[SourceCalls]:
        """List all sources that are known."""

        def ago(times: _Times, key: tuple[str, bytes]) -> float | None:
            return round(now - times[key], 1) if key in times else None

        return [
            SourceCalls(
                key[0],
                key[1].decode("utf-8", "replace"),
                ago(self._dequeues, key),
                ago(self._acks, key),
            )
            for key in self._dequeues | self._acks
        ]


def _newest(times: _Times) -> _Times:
    """Return the latest of them."""
    latest = sorted(times, key=times.__getitem__, reverse=True)[:_KEPT_SOURCES]
    return {key: times[key] for key in latest}
