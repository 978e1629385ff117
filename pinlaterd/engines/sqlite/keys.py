"""The keys of jobs: which job holds a key, without a random write for each job.

A key is in its job's row of `options`. Its hash is in an index: a recent one in memory, an older
one in the table `key_hashes`, in the order of the hashes. In memory they are in buckets by their
first bits. Once many are there, each commit that brings some also moves a bucket or more to the
file: those hashes lie side by side, and so share pages. A sweep passes over all buckets; when it
ends, all jobs that were there when it began are in the file ('hashed_id'). So an owner begins with
the jobs above that id.

The hashes of deleted jobs go the same way. Some are lost if their owner is killed: what they should
have removed does no harm, since each hash that is found is compared with `options`.
"""

from __future__ import annotations

import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from pinlaterd.engines.base import KeyHolder
from pinlaterd.engines.sqlite.file import id_list, insert_rows
from pinlaterd.model import JobKey

# Hashes in memory, of some 120 bytes each. Those that come during a sweep double what an owner
# begins with. With a million in the file, the 200 of a bucket share 6 of its pages.
_IN_MEMORY = 200_000
_CACHE_KIB = 32 * 1024  # holds the pages of a million hashes
_HASH_BYTES = 8
_HASH = struct.Struct(">q").unpack
_BUCKETS = 1024
_BUCKET_SHIFT = 8 * _HASH_BYTES - 10  # hashes have signs, and so have the numbers of buckets

# Hashes of one statement: padded to the next of these numbers, it is compiled once for each.
_LISTED_HASHES = (1, 10, 100)
_FINDS = {
    size: f"WITH wanted (key_hash) AS (VALUES {', '.join(['(?)'] * size)})"  # noqa: S608
    " SELECT local_id FROM wanted CROSS JOIN key_hashes USING (key_hash)"
    for size in _LISTED_HASHES
}
# The job has to be there: a hand may have deleted it without its options.
_HOLDERS = (
    "SELECT options.key, jobs.priority, jobs.local_id FROM json_each(?) AS held"
    " CROSS JOIN options ON options.local_id = held.value"
    " CROSS JOIN jobs ON jobs.local_id = options.local_id WHERE options.scope = ?"
)
SCOPE_OF_ALL = 0  # of keys of all queues; others have their queue's number
# Neither counts a job whose queue was deleted.
_HOLDERS_OF_ALL = (
    "SELECT options.key, jobs.priority, jobs.local_id, queues.name FROM json_each(?) AS held"
    " CROSS JOIN options ON options.local_id = held.value"
    " CROSS JOIN jobs ON jobs.local_id = options.local_id"
    " CROSS JOIN queues ON queues.id = options.queue AND NOT queues.dropped"
    " WHERE options.scope = ?"
)
_WITH_KEYS = (
    "SELECT scope, key, local_id FROM options WHERE local_id BETWEEN ? AND ? AND key IS NOT NULL"
)
_PUT = "INSERT OR IGNORE INTO key_hashes"
_REMOVE = "DELETE FROM key_hashes WHERE key_hash = ? AND local_id = ?"


class KeysOfScope(NamedTuple):
    """Keys of one scope, and the jobs that have them."""

    scope: int
    keys: Sequence[str]
    local_ids: Sequence[int]


def hash_of(scope: int, key: str) -> int:
    """Return the hash of a key within a scope."""
    digest = blake2b(f"{scope} {key}".encode(), digest_size=_HASH_BYTES).digest()
    hashed: int = _HASH(digest)[0]
    return hashed


class KeyIndex:
    """The index of one file, for its owner. What a transaction changes is changed in memory once it
    is committed."""

    def __init__(self) -> None:
        # By bucket: the job of each hash; and hashes of jobs that were deleted, with those.
        self._recent: list[dict[int, int]] = []
        self._gone: list[set[tuple[int, int]]] = []
        self._in_memory = 0
        self._newest_id = 0  # of the jobs with keys
        self._next_bucket = 0  # where the sweep goes on
        self._newest_of_sweep = 0  # `_newest_id` when it began
        # Of the transaction that goes on. `_moved`: how many buckets it moves to the file.
        self._added: dict[int, int] = {}
        self._removed: list[tuple[int, int]] = []
        self._moved = 0
        # Of the keys that were looked for last, by scope: a transaction stores these next.
        self._hashes: dict[int, Mapping[str, int]] = {}

    def open(self, db: sqlite3.Connection) -> None:
        """Begin with the jobs whose hashes the file lacks; it has the tables."""
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self.undo()
        self._recent = [{} for _ in range(_BUCKETS)]
        self._gone = [set() for _ in range(_BUCKETS)]
        self._in_memory = self._next_bucket = 0
        row = db.execute("SELECT value FROM meta WHERE key = 'hashed_id'").fetchone()
        [newest_id] = db.execute("SELECT coalesce(max(local_id), 0) FROM options").fetchone()
        self._newest_id = self._newest_of_sweep = newest_id
        found: defaultdict[int, tuple[list[str], list[int]]] = defaultdict(lambda: ([], []))
        for scope, key, local_id in db.execute(_WITH_KEYS, (row[0] + 1 if row else 0, newest_id)):
            found[scope][0].append(key)
            found[scope][1].append(local_id)
        for scope, (keys, local_ids) in found.items():
            self.add(db, KeysOfScope(scope, keys, local_ids))
        self.commit()

    def find(self, db: sqlite3.Connection, scope: int, keys: Sequence[str]) -> dict[str, JobKey]:
        """Return the jobs that hold those of `keys` that are held."""
        rows = self._holders(db, _HOLDERS, scope, keys)
        return {key: JobKey(*job_key) for key, *job_key in rows}

    def find_of_all(self, db: sqlite3.Connection, keys: Sequence[str]) -> dict[str, KeyHolder]:
        """Do the same for keys of all queues."""
        rows = self._holders(db, _HOLDERS_OF_ALL, SCOPE_OF_ALL, keys)
        return {
            key: KeyHolder(priority, local_id, True, queue)
            for key, priority, local_id, queue in rows
        }

    def _holders(
        self, db: sqlite3.Connection, select: str, scope: int, keys: Sequence[str]
    ) -> list[tuple[Any, ...]]:
        hashes, recent = [hash_of(scope, key) for key in keys], self._recent
        self._hashes[scope] = dict(zip(keys, hashes, strict=True))
        found = [recent[each >> _BUCKET_SHIFT].get(each) for each in hashes]
        local_ids = [local_id for local_id in found if local_id is not None]
        first = 0
        while first < len(hashes):
            left = len(hashes) - first
            size = next((size for size in _LISTED_HASHES if size >= left), _LISTED_HASHES[-1])
            some = hashes[first : first + size]
            rows = db.execute(_FINDS[size], some + [None] * (size - len(some)))
            local_ids += [local_id for (local_id,) in rows]
            first += size
        if not local_ids:
            return []
        wanted, holders = set(keys), db.execute(select, (id_list(local_ids), scope))
        return [row for row in holders if row[0] in wanted]

    # --- within a transaction ------------------------------------------------------------------

    def add(self, db: sqlite3.Connection, stored: KeysOfScope) -> None:
        """Note keys that were stored. Of equal hashes, one is in memory."""
        scope, known = stored.scope, self._hashes.get(stored.scope, {})
        hashes = [known.get(key) or hash_of(scope, key) for key in stored.keys]
        self._newest_id = max(self._newest_id, *stored.local_ids)
        added, recent = self._added, self._recent
        for each, local_id in zip(hashes, stored.local_ids, strict=True):
            if each in added or each in recent[each >> _BUCKET_SHIFT]:
                insert_rows(db, _PUT, [(each, local_id)])
            else:
                added[each] = local_id

    def remove(self, db: sqlite3.Connection, spans: Iterable[tuple[int, int]]) -> None:
        """Note jobs whose options are about to be deleted."""
        for span in spans:
            for scope, key, local_id in db.execute(_WITH_KEYS, span):
                self._removed.append((hash_of(scope, key), local_id))

    def move(self, db: sqlite3.Connection, *, everything: bool = False) -> None:
        """Move hashes to the file, if there are too many in memory: of the next buckets, those of
        earlier transactions."""
        changes = len(self._added) + len(self._removed)
        most, moved = _BUCKETS - self._next_bucket, 0
        if everything:
            self._next_bucket, most = 0, _BUCKETS
            self._newest_of_sweep = self._newest_id
        elif self._in_memory + changes <= _IN_MEMORY:
            return
        while self._moved < most and (everything or moved <= 2 * changes):
            bucket = self._next_bucket + self._moved
            recent, gone = self._recent[bucket], self._gone[bucket]
            insert_rows(db, _PUT, sorted(recent.items()))
            db.executemany(_REMOVE, sorted(gone))
            moved += len(recent) + len(gone)
            self._moved += 1
        if self._moved == most:
            db.execute("REPLACE INTO meta VALUES ('hashed_id', ?)", (self._newest_of_sweep,))

    def commit(self) -> None:
        """Do in memory what the transaction has done."""
        for _ in range(self._moved):
            recent, gone = self._recent[self._next_bucket], self._gone[self._next_bucket]
            self._in_memory -= len(recent) + len(gone)
            recent.clear()
            gone.clear()
            self._next_bucket += 1
        if self._next_bucket == _BUCKETS:
            self._next_bucket, self._newest_of_sweep = 0, self._newest_id
        for each, local_id in self._added.items():
            self._recent[each >> _BUCKET_SHIFT][each] = local_id
        self._in_memory += len(self._added)
        for each, local_id in self._removed:
            recent = self._recent[each >> _BUCKET_SHIFT]
            if recent.get(each) == local_id:
                del recent[each]
                self._in_memory -= 1
            else:
                self._gone[each >> _BUCKET_SHIFT].add((each, local_id))
                self._in_memory += 1
        self.undo()

    def undo(self) -> None:
        """Forget what the transaction was to change."""
        self._added, self._removed, self._moved, self._hashes = {}, [], 0, {}
