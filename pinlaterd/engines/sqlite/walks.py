"""Walks over the keys of one state, in slices that use an index only.

PENDING jobs come in the order of a scan: run-after downwards, then local id upwards. IN_PROGRESS
ones come by local id, ended ones by the time of their end: no job is met twice, wherever it goes
while the walk goes on.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from pinlaterd.model import JobState

EARLIEST_MS, LATEST_MS = -(2**63), 2**63 - 1


class Place(NamedTuple):
    """How far a walk has come: by (run-after or time of the end, local id)."""

    time_ms: int
    local_id: int


class Walk(NamedTuple):
    """What to walk over. The times bound the run-after of PENDING jobs, or the end of others."""

    queue_id: int
    state: JobState
    priority: int
    from_ms: int
    to_ms: int


class Slice(NamedTuple):
    """Ids of jobs, and where the next slice begins; None: nothing is left."""

    local_ids: Sequence[int]
    next_place: Place | None


def begin(
    db: sqlite3.Connection,
    queue_id: int,
    state: JobState,
    priority: int,
    run_after_ms: tuple[int, int],
) -> tuple[Walk, Place]:
    """A walk over at least the jobs whose run-after is in a range, ends included."""
    if state is JobState.PENDING:
        return Walk(queue_id, state, priority, *run_after_ms), Place(run_after_ms[1], 0)
    newest_ms = LATEST_MS
    if state is not JobState.IN_PROGRESS:
        [newest_ms] = db.execute(
            "SELECT coalesce(max(ended_at), 0) FROM ended"
            " WHERE queue = ? AND state = ? AND priority = ?",
            (queue_id, int(state), priority),
        ).fetchone()
    return Walk(queue_id, state, priority, EARLIEST_MS, newest_ms), Place(EARLIEST_MS, 0)


def read_slice(db: sqlite3.Connection, walk: Walk, place: Place, most: int) -> Slice:
    """The keys from `place` on, at most so many."""
    if walk.state is JobState.PENDING:
        return _pending_slice(db, walk, place, most)
    if walk.state is JobState.IN_PROGRESS:
        return _claims_slice(db, walk, place, most)
    return _ended_slice(db, walk, place, most)


def _pending_slice(db: sqlite3.Connection, walk: Walk, place: Place, most: int) -> Slice:
    """The index runs both columns the same way, so jobs of the run-after at `place` are read
    apart, upwards; of those read downwards the last run-after may be cut short, and is left to
    the next slice."""
    local_ids = [
        local_id
        for (local_id,) in db.execute(
            "SELECT local_id FROM pending WHERE queue = ? AND priority = ?"
            " AND run_after = ? AND local_id > ? ORDER BY local_id LIMIT ?",
            (walk.queue_id, walk.priority, *place, most),
        )
    ]
    if len(local_ids) == most:
        return Slice(local_ids, Place(place.time_ms, local_ids[-1]))
    room = most - len(local_ids)
    below = db.execute(
        "SELECT run_after, local_id FROM pending WHERE queue = ? AND priority = ?"
        " AND run_after < ? AND run_after >= ? ORDER BY run_after DESC, local_id DESC LIMIT ?",
        (walk.queue_id, walk.priority, place.time_ms, walk.from_ms, room),
    ).fetchall()
    next_place = None
    if len(below) == room:
        cut_at_ms = below[-1][0]
        below = [key for key in below if key[0] != cut_at_ms]
        next_place = Place(cut_at_ms, 0)
    below.sort(key=lambda key: (-key[0], key[1]))
    return Slice(local_ids + [local_id for _, local_id in below], next_place)


def _claims_slice(db: sqlite3.Connection, walk: Walk, place: Place, most: int) -> Slice:
    rows = db.execute(
        "SELECT local_id FROM claims"
        " WHERE local_id > ? AND +queue = ? AND +priority = ? ORDER BY local_id LIMIT ?",
        (place.local_id, walk.queue_id, walk.priority, most),
    )
    local_ids = [local_id for (local_id,) in rows]
    if len(local_ids) < most:
        return Slice(local_ids, None)
    return Slice(local_ids, Place(place.time_ms, local_ids[-1]))


def _ended_slice(db: sqlite3.Connection, walk: Walk, place: Place, most: int) -> Slice:
    rows = db.execute(
        "SELECT ended_at, local_id FROM ended INDEXED BY ended_by_age"
        " WHERE queue = ? AND state = ? AND priority = ?"
        " AND (ended_at, local_id) > (?, ?) AND ended_at <= ?"
        " ORDER BY ended_at, local_id LIMIT ?",
        (walk.queue_id, int(walk.state), walk.priority, *place, walk.to_ms, most),
    ).fetchall()
    next_place = Place(*rows[-1]) if len(rows) == most else None
    return Slice([local_id for _, local_id in rows], next_place)
