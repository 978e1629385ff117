"""The jobs that the stores hold, read without pinlaterd: by SQL, and by Redis' own commands."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import redis

from tests.checker.calls import shown_body
from tests.checker.history import Record
from tests.servers.mariadb import MariaDB
from tests.servers.redis import RedisServer

_EPOCH_MS = "CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {}) / 1000 AS SIGNED)"


def of_sqlite(folder: Path) -> Iterator[Record]:
    for path in sorted(folder.glob("shard-*.sqlite")):
        shard = path.stem.removeprefix("shard-")
        with contextlib.closing(sqlite3.connect(path)) as db:
            yield from (
                _record(shard, f"{queue}:s{shard}:p{priority}:{local_id}", list(row))
                for queue, priority, local_id, *row in db.execute(
                    "SELECT queues.name, priority, local_id, state, body, attempts_allowed,"
                    " attempts_remaining, claim_descriptor, job_records.created_at, run_after,"
                    " updated_at FROM job_records JOIN queues ON queues.id = queue"
                    " WHERE NOT queues.dropped"
                )
            )


def of_mysql(server: MariaDB, shards: Sequence[str]) -> Iterator[Record]:
    with contextlib.closing(server.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        cursor.execute(
            "SELECT table_schema, table_name FROM information_schema.tables"
            " WHERE table_name LIKE 'jobs\\_p%'"
        )
        for database, table in cursor.fetchall():
            _, shard, queue = database.split("_", 2)
            if shard not in shards:
                continue
            times = [_EPOCH_MS.format(name) for name in ("created_at", "run_after", "updated_at")]
            cursor.execute(
                "SELECT local_id, state, body, attempts_allowed, attempts_remaining,"
                f" claim_descriptor, {', '.join(times)} FROM `{database}`.`{table}`"
            )
            priority = table.removeprefix("jobs_p")
            for local_id, *row in cursor.fetchall():
                row[4] = row[4].rstrip(" ") if row[4] else None  # it fills up its column
                yield _record(shard, f"{queue}:s{shard}:p{priority}:{local_id}", row)


def of_redis(server: RedisServer, shards: Sequence[str]) -> Iterator[Record]:
    with server.client() as client:
        for shard in shards:
            for name in [
                name for kind in ("pln", "pls") for name in client.zrange(f"{kind}_{shard}", 0, -1)
            ]:
                stored = name.decode()
                queue = stored.removeprefix("+")  # a queue of the lean layout
                for key in client.scan_iter(f"plq_{shard}_{stored}.p*"):
                    priority, _, state = key.decode().rpartition(".p")[2].partition("_s")
                    if not state.isdigit():
                        continue
                    if stored != queue and state != "0":
                        continue  # their runs have it all
                    for local_id, score in client.zrange(key, 0, -1, withscores=True):
                        held = _held_in_redis(client, f"{shard}_{stored}", local_id)
                        since_ms = int(score) // 32 if stored != queue else round(score * 1000)
                        descriptor = f"{queue}:s{shard}:p{priority}:{local_id.decode()}"
                        yield _record(shard, descriptor, _redis_row(int(state), since_ms, held))
                for key in client.scan_iter(f"plx_{shard}_{stored}.p*"):
                    priority = key.decode().rpartition(".p")[2]
                    for local_id, state, since_ms, claim in _in_runs(client, key):
                        held = _held_in_redis(client, f"{shard}_{stored}", local_id)
                        held[b"cd"] = claim
                        descriptor = f"{queue}:s{shard}:p{priority}:{local_id.decode()}"
                        yield _record(shard, descriptor, _redis_row(state, since_ms, held))


def _in_runs(client: redis.Redis, key: bytes) -> Iterator[tuple[bytes, int, int, bytes]]:
    """Id, state, the time since which it is in that state, and claim of jobs (common.lua)."""
    for run in cast("list[bytes]", client.zrange(key, 0, -1)):
        if b" " not in run:
            continue
        state, first, last, since_ms, number, claimer = run.split(b" ", 5)
        for at, local_id in enumerate(range(int(first), int(last) + 1)):
            claim = claimer + b"%d" % (int(number) + at) if number else claimer
            yield b"%d" % local_id, int(state), int(since_ms), claim


def _held_in_redis(client: redis.Redis, place: str, local_id: bytes) -> dict[bytes, bytes]:
    """By the names of fields that PinLater's layout has."""
    if "_+" not in place:
        held = client.hgetall(f"plh_{place}.".encode() + local_id)
        return cast("dict[bytes, bytes]", held)
    record, update = (
        cast("bytes | None", client.hget(f"{key}_{place}", local_id.decode()))
        for key in ("plb", "plu")
    )
    if record is None:
        return {}
    head, _, rest = record.partition(b";")
    allowed, updated_ms, run_after_ms, status_bytes = head.split(b" ")
    created_ms, remaining = updated_ms, allowed
    if update is not None:
        fields = update.partition(b";")[0].split(b" ")
        allowed, remaining, updated_ms, run_after_ms = fields
    return {
        b"bd": rest[int(status_bytes) :],
        b"al": allowed,
        b"ar": remaining,
        b"ca": b"%f" % (int(created_ms) / 1000),
        b"ua": b"%f" % (int(updated_ms) / 1000),
        b"ra": run_after_ms,
    }


def _redis_row(state: int, since_ms: int, held: dict[bytes, bytes]) -> list[Any]:
    return [
        state,
        held.get(b"bd", b""),
        int(held.get(b"al", 1)),
        int(held.get(b"ar", 0)),
        held[b"cd"].decode() if state and b"cd" in held else None,
        round(float(held.get(b"ca", 0)) * 1000),
        since_ms if state == 0 else round(float(held.get(b"ra", since_ms))),
        since_ms if state else round(float(held.get(b"ua", 0)) * 1000),
    ]


def _record(shard: str, descriptor: str, row: list[Any]) -> Record:
    now = time.monotonic()
    row[1] = shown_body(bytes(row[1]))
    row[4] = row[4] if row[4] and row[0] else None
    given = {"shard": shard, "descriptor": descriptor}
    return Record(now, now, "store", "row", given, result=row)
