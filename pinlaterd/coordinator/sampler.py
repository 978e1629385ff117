"""The figures of this server over time: moments, the frames between them, and history.

A moment is taken every 5 s, and once a second while somebody asks for frames. Those of the last
minute are kept: what happened between two of them is history, or a frame.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from pinlaterd.clock import Clock
from pinlaterd.coordinator.history import LONG_STEP_MS, PROCESS, QUEUE, SHARD, STEP_MS, History
from pinlaterd.status import (
    Facts,
    Moment,
    QueueTotals,
    Recent,
    Sample,
    ServerFrame,
    commits_between,
    cpu_of,
    has_lost,
    moment_of,
    program_of,
    recent,
    server_frame,
    shard_frames,
    unreadable,
)

STEP_SECONDS = STEP_MS / 1000
_MINUTE_SECONDS = 60.0
# Processes report once a second: over less time a rate depends on which reports came just now.
_FRAME_SECONDS = 2.5
_FRESH_SECONDS = 0.9  # how old a frame may be
_FRAME_MOMENTS = 8
_NAN = math.nan
_SOME_ACTIVITY = 1e-3  # of a queue that has jobs, of which none comes or goes


class Sampler:
    """Takes moments of this server, and makes frames and history of them."""

    def __init__(self, clock: Clock, take: Callable[[], Sample], history: History) -> None:
        """`take` returns the sample of this server."""
        self._clock = clock
        self._take = take
        self._history = history
        self._steps: deque[Moment] = deque()  # every 5 s, those of the last minute
        self._asked: deque[Moment] = deque(maxlen=_FRAME_MOMENTS)  # once a second, while asked
        self._frame: ServerFrame | None = None
        # By queue: when a job was last seen to be handed out, and since when that would be seen.
        self._handed_out_at: dict[str, float] = {}
        self._known_since: dict[str, float] = {}
        self._balanced_ms = clock.now_ms()

    def step(self) -> Sample:
        """Take a moment, and note what has happened since the one before. Call it every 5 s."""
        sample = self._take()
        now = self._moment(sample)
        if self._steps:
            self._record(sample, now, self._steps[-1])
        self._steps.append(now)
        while now.at - self._steps[0].at > _MINUTE_SECONDS + STEP_SECONDS / 2:
            self._steps.popleft()
        return sample

    def frame(self) -> ServerFrame:
        """Return what happened in the last seconds; it is a second old at most."""
        at = self._clock.monotonic()
        if self._frame is not None and self._asked and at - self._asked[-1].at < _FRESH_SECONDS:
            return self._frame
        sample = self._take()
        now = self._moment(sample)
        known = sorted([*self._steps, *self._asked], key=lambda moment: moment.at)
        old_enough = (one for one in reversed(known) if now.at - one.at >= _FRAME_SECONDS)
        before = next(old_enough, known[0] if known else now)
        self._asked.append(now)
        self._frame = server_frame(sample, now, before, (self._steps or self._asked)[0])
        for queue, part in self._frame.queues.items():
            if queue in self._handed_out_at:
                handed_out_at, known_since = self._handed_out_at[queue], self._known_since[queue]
                part.silent_seconds = now.at - max(handed_out_at, known_since)
                part.silent_is_least = handed_out_at < known_since
        return self._frame

    def _latest(self) -> Moment | None:
        latest = [kept[-1] for kept in (self._steps, self._asked) if kept]
        return max(latest, key=lambda moment: moment.at) if latest else None

    def _moment(self, sample: Sample) -> Moment:
        """Take the moment of a sample. Idle queues share their totals with the moment before; those
        of shards that are unavailable keep their names. Rates begin again where counters were lost:
        what the other processes have counted since they began did not happen just now."""
        now, before = moment_of(sample), self._latest()
        if before is None or _joins_late(sample, now, before):
            self._steps.clear()
            self._asked.clear()
            self._known_since |= dict.fromkeys(now.queues, now.at)
            self._handed_out_at = dict.fromkeys(now.queues, -math.inf) | self._handed_out_at
            return now
        queues, is_lost = dict(now.queues), False
        for queue, totals in now.queues.items():
            earlier = before.queues.get(queue)
            if earlier is not None and earlier == totals:
                queues[queue] = earlier
                continue
            is_lost |= earlier is not None and has_lost(earlier, totals)
            if earlier is None:
                self._known_since[queue] = now.at
                self._handed_out_at.setdefault(queue, -math.inf)
            elif earlier.dequeued < totals.dequeued:
                self._handed_out_at[queue] = now.at
        if is_lost:
            self._steps.clear()
            self._asked.clear()
        if now.missing:
            gone = before.queues.keys() - queues.keys()
            queues |= {one: unreadable(before.queues[one]) for one in gone}
        for queue in self._handed_out_at.keys() - queues.keys():
            del self._handed_out_at[queue], self._known_since[queue]
        return now._replace(queues=queues)

    # --- history --------------------------------------------------------------------------------

    def _record(self, sample: Sample, now: Moment, before: Moment) -> None:
        history, now_ms = self._history, self._clock.now_ms()
        seconds = max(now.at - before.at, 1e-3)
        for queue, totals in now.queues.items():
            happened = recent(before.queues.get(queue), totals, seconds)
            row = _queue_row(totals, happened, is_known=not now.missing)
            activity = _activity(totals, happened)
            history.record(QUEUE, queue, now_ms, row, happened.wait, activity=activity)
        shards = {shard["name"]: shard for shard in sample.status["shards"]}
        for name, facts in shard_frames(sample, now, before).items():
            program = program_of(shards[name], sample.stats)
            commits = commits_between(program, now, before)
            history.record(SHARD, name, now_ms, _shard_row(facts), commits)
        cpu_percent = cpu_of(sample, now, before)
        for process in sample.status["processes"]:
            name, is_up = process["name"], bool(process["cpu_seconds"])
            row = (cpu_percent[name], process["rss_bytes"]) if is_up else (_NAN, _NAN)
            history.record(PROCESS, name, now_ms, row)
        if now_ms - self._balanced_ms >= LONG_STEP_MS:
            self._balanced_ms = now_ms
            history.balance()
            # A server that owns no shard for a while keeps what it knows.
            if now.queues and not now.missing:
                history.retain(QUEUE, now.queues)


def _joins_late(sample: Sample, now: Moment, before: Moment) -> bool:
    """Tell whether a process reports for the first time that has run for longer: what it did before
    did not happen just now."""
    new = now.processes - before.processes
    elapsed = now.at - before.at
    return any(
        process["name"] in new and process["uptime_seconds"] > elapsed + 1
        for process in sample.status["processes"]
    )


def _queue_row(totals: QueueTotals, happened: Recent, *, is_known: bool) -> Sequence[float]:
    depths = (totals.ready, totals.scheduled, totals.in_progress, totals.kept_failed)
    return (
        happened.enqueued,
        happened.dequeued,
        happened.succeeded,
        happened.failed + happened.timed_out,
        happened.refused + happened.rejected,
        *((*depths, totals.oldest_ms) if is_known else (_NAN,) * 5),
    )


def _shard_row(facts: Facts) -> Sequence[float]:
    jobs = facts["jobs"]
    depths = ("pending", "scheduled", "in_progress", "failed")
    return (
        facts["jobs_per_second"],
        facts["commits_per_second"],
        *(_NAN if jobs is None else jobs[name] for name in depths),
    )


def _activity(totals: QueueTotals, happened: Recent) -> float:
    moved = happened.enqueued + happened.dequeued + happened.succeeded + happened.failed
    if moved or not (totals.ready or totals.in_progress or totals.scheduled or totals.kept_failed):
        return moved
    return _SOME_ACTIVITY
