"""A PinLater server, as its stores see it: the statements and scripts that it sends, on its layout.

Each call is carried out, as there, by itself; times are the server's own clock's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import redis

from pinlaterd.model import JobState

PRIORITIES = (1, 2, 3)
_HOST = "pinlater-host:9010:1421450000123"
_claims = count(1)


class Dequeued(NamedTuple):
    body: bytes
    attempts_allowed: int
    attempts_remaining: int


def _claim(source: str) -> str:
    return f"{_HOST}:{source}:{next(_claims)}"


# --- MySQL ------------------------------------------------------------------------------------

_TABLE = """
CREATE TABLE {table} (
    local_id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
    state TINYINT NOT NULL,
    claim_descriptor VARCHAR(200),
    attempts_allowed INT,
    attempts_remaining INT NOT NULL,
    custom_status VARCHAR(5000),
    updated_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP,
    created_at TIMESTAMP NOT NULL,
    run_after TIMESTAMP NOT NULL,
    body BLOB NOT NULL,
    INDEX (state, run_after),
    INDEX (claim_descriptor)
) ENGINE = InnoDB
"""
_APPENDED = "custom_status = SUBSTRING(CONCAT(custom_status, %s), 1, 5000)"


def make_tables(cursor: Any, shard: str, queue: str, charset: str = "latin1") -> None:
    """The tables of a queue, empty."""
    database = f"`plq_{shard}_{queue}`"
    cursor.execute(f"CREATE DATABASE {database} DEFAULT CHARACTER SET {charset}")
    for priority in PRIORITIES:
        cursor.execute(_TABLE.format(table=f"{database}.jobs_p{priority}"))


class PinLaterOnMysql:
    """`db`: a connection that commits each statement, in the time zone of PinLater."""

    def __init__(self, db: Any, shard: str) -> None:
        self._cursor = db.cursor()
        self._shard = shard

    def create_queue(self, queue: str) -> None:
        make_tables(self._cursor, self._shard, queue)

    def queue_names(self) -> set[str]:
        self._cursor.execute("SHOW DATABASES")
        names = [name for (name,) in self._cursor.fetchall() if name.startswith("plq")]
        return {name.split("_", 2)[2] for name in names if name.split("_")[1] == self._shard}

    def enqueue(self, queue: str, body: bytes, *, priority: int = 1, delay_seconds: int = 0) -> str:
        self._cursor.execute(
            f"INSERT INTO {self._table(queue, priority)} (state, attempts_allowed,"
            " attempts_remaining, custom_status, created_at, run_after, body) VALUES"
            " (0, 3, 3, SUBSTRING('', 1, 5000), NOW(), NOW() + INTERVAL %s SECOND, %s)",
            (delay_seconds, body),
        )
        return f"{queue}:s{self._shard}:p{priority}:{self._cursor.lastrowid}"

    def dequeue(self, queue: str, limit: int, *, source: str = "web:host") -> dict[str, Dequeued]:
        found: dict[str, Dequeued] = {}
        claim = _claim(source)
        for priority in PRIORITIES:
            table = self._table(queue, priority)
            self._cursor.execute(
                f"UPDATE {table} SET claim_descriptor = %s, state = 1"
                " WHERE state = 0 AND run_after <= NOW() LIMIT %s",
                (claim, limit - len(found)),
            )
            self._cursor.execute(
                "SELECT local_id, attempts_allowed, attempts_remaining, updated_at, created_at,"
                f" body FROM {table} WHERE claim_descriptor = %s",
                (claim,),
            )
            for local_id, allowed, remaining, _, _, body in self._cursor.fetchall():
                descriptor = f"{queue}:s{self._shard}:p{priority}:{local_id}"
                found[descriptor] = Dequeued(body, allowed, remaining)
        return found

    def succeed(self, descriptor: str, status: str = "") -> None:
        table, local_id = self._place(descriptor)
        self._cursor.execute(
            f"UPDATE {table} SET state = 2, {_APPENDED} WHERE local_id = %s", (status, local_id)
        )

    def fail(self, descriptor: str, status: str = "") -> None:
        table, local_id = self._place(descriptor)
        self._cursor.execute(
            f"UPDATE {table} SET state = 3, {_APPENDED}, attempts_remaining = 0"
            " WHERE local_id = %s AND state = 1 AND attempts_remaining = 1",
            (status, local_id),
        )
        self._cursor.execute(
            f"UPDATE {table} SET state = 0, {_APPENDED}, run_after = NOW(),"
            " claim_descriptor = NULL, attempts_remaining = attempts_remaining - 1"
            " WHERE local_id = %s AND state = 1 AND attempts_remaining > 1",
            (status, local_id),
        )

    def time_out(self, queue: str) -> int:
        """Every claim."""
        timed_out = 0
        for priority in PRIORITIES:
            timed_out += self._cursor.execute(
                f"UPDATE {self._table(queue, priority)} SET state = 0, claim_descriptor = NULL,"
                " attempts_remaining = attempts_remaining - 1 WHERE state = 1"
                " AND updated_at < NOW() + INTERVAL 1 DAY AND attempts_remaining > 1 LIMIT 5000"
            )
        return timed_out

    def counts(self, queue: str) -> Mapping[JobState, int]:
        counts = dict.fromkeys(JobState, 0)
        for priority in PRIORITIES:
            for state in JobState:
                self._cursor.execute(
                    "SELECT COUNT(*) FROM (SELECT 1 FROM"
                    f" {self._table(queue, priority)} WHERE state = %s LIMIT 100000) AS job_info",
                    (int(state),),
                )
                counts[state] += self._cursor.fetchone()[0]
        return counts

    def _table(self, queue: str, priority: int | str) -> str:
        return f"`plq_{self._shard}_{queue}`.jobs_p{priority}"

    def _place(self, descriptor: str) -> tuple[str, int]:
        queue, _, priority, local_id = descriptor.split(":")
        return self._table(queue, priority[1:]), int(local_id)


# --- Redis ------------------------------------------------------------------------------------

# The id is a number of Lua's here, and becomes part of the key as Lua writes numbers: 14 digits.
_ENQUEUE = """
local id = redis.call('INCR', KEYS[1])
redis.call('HMSET', KEYS[2] .. id, 'bd', ARGV[1], 'al', ARGV[2], 'ar', ARGV[2],
  'ca', ARGV[3], 'ua', ARGV[3], 'cs', '')
redis.call('ZADD', KEYS[3], ARGV[4], id)
return id
"""
_DEQUEUE = """
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', '0', ARGV[2])
local found = {}
if #ids > 0 then
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, #ids - 1)
end
for _, id in ipairs(ids) do
  redis.call('ZADD', KEYS[2], ARGV[1], id)
  if redis.call('EXISTS', KEYS[3] .. id) == 1 then
    local job = redis.call('HMGET', KEYS[3] .. id, 'bd', 'al', 'ar', 'ca', 'ua')
    found[#found + 1] = { id, job[1], job[2], job[3], job[4], job[5] }
    redis.call('HMSET', KEYS[3] .. id, 'ua', ARGV[1], 'cd', ARGV[3])
  end
end
return found
"""
_SUCCEED = """
if redis.call('ZREM', KEYS[1], ARGV[1]) ~= 1 then
  return -1
end
redis.call('ZADD', KEYS[3], ARGV[2], ARGV[1])
redis.call('HMSET', KEYS[2] .. ARGV[1], 'cs', ARGV[3], 'ua', ARGV[2])
"""
_RETRY_OR_END = """
local remaining = tonumber(redis.call('HGET', prefix .. id, 'ar'))
if remaining > 1 then
  redis.call('ZADD', pending, now, id)
  redis.call('HDEL', prefix .. id, 'cd')
else
  redis.call('ZADD', failed, now, id)
end
redis.call('HINCRBY', prefix .. id, 'ar', -1)
redis.call('HSET', prefix .. id, 'ua', now)
"""
_FAIL = f"""
local prefix, pending, failed, id, now = KEYS[2], KEYS[3], KEYS[4], ARGV[1], ARGV[2]
if redis.call('ZREM', KEYS[1], id) ~= 1 then
  return -1
end
{_RETRY_OR_END}
redis.call('HSET', prefix .. id, 'cs', ARGV[3])
"""
_TIME_OUT = f"""
local prefix, pending, failed, now = KEYS[2], KEYS[3], KEYS[4], ARGV[1]
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '+inf', 'LIMIT', '0', 1000)
for _, id in ipairs(ids) do
  redis.call('ZREM', KEYS[1], id)
  {_RETRY_OR_END}
end
return #ids
"""


class PinLaterOnRedis:
    def __init__(self, client: redis.Redis, shard: str) -> None:
        self._client: Any = client
        self._shard = shard

    def create_queue(self, queue: str) -> None:
        self._client.zadd(f"pln_{self._shard}", {queue: time.time()}, nx=True)

    def queue_names(self) -> set[str]:
        return {name.decode() for name in self._client.zrange(f"pln_{self._shard}", 0, -1)}

    def enqueue(self, queue: str, body: bytes, *, priority: int = 1, delay_seconds: int = 0) -> str:
        assert queue in self.queue_names()
        keys = [f"plj_{self._shard}_{queue}", self._prefix(queue), self._set(queue, priority, 0)]
        now = time.time()
        local_id = self._eval(_ENQUEUE, keys, body, 3, f"{now:.3f}", f"{now + delay_seconds:.3f}")
        return f"{queue}:s{self._shard}:p{priority}:{local_id}"

    def dequeue(self, queue: str, limit: int, *, source: str = "web:host") -> dict[str, Dequeued]:
        found: dict[str, Dequeued] = {}
        claim = _claim(source)
        for priority in PRIORITIES:
            sets = [self._set(queue, priority, state) for state in (0, 1)]
            keys = [*sets, self._prefix(queue)]
            limit_now = limit - len(found)
            for local_id, body, allowed, remaining, created, updated in self._eval(
                _DEQUEUE, keys, f"{time.time():.3f}", limit_now, claim
            ):
                assert min(float(created), float(updated)) > 0
                descriptor = f"{queue}:s{self._shard}:p{priority}:{local_id.decode()}"
                found[descriptor] = Dequeued(body, int(allowed), int(remaining))
        return found

    def succeed(self, descriptor: str, status: str = "") -> None:
        queue, priority, local_id = self._place(descriptor)
        running, done = (self._set(queue, priority, state) for state in (1, 2))
        keys = [running, self._prefix(queue), done]
        self._eval(_SUCCEED, keys, local_id, f"{time.time():.3f}", status)

    def fail(self, descriptor: str, status: str = "") -> None:
        queue, priority, local_id = self._place(descriptor)
        self._eval(
            *(_FAIL, self._ends(queue, priority), local_id, f"{time.time():.3f}", status),
        )

    def time_out(self, queue: str) -> int:
        """Every claim."""
        now = f"{time.time():.3f}"
        return sum(self._eval(_TIME_OUT, self._ends(queue, one), now) for one in PRIORITIES)

    def counts(self, queue: str) -> Mapping[JobState, int]:
        return {
            state: sum(
                self._client.zcard(self._set(queue, priority, state)) for priority in PRIORITIES
            )
            for state in JobState
        }

    def _eval(self, script: str, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        return self._client.eval(script, len(keys), *keys, *arguments)

    def _prefix(self, queue: str) -> str:
        return f"plh_{self._shard}_{queue}."

    def _set(self, queue: str, priority: int | str, state: int) -> str:
        return f"plq_{self._shard}_{queue}.p{priority}_s{int(state)}"

    def _ends(self, queue: str, priority: int | str) -> list[str]:
        pending, running, failed = (self._set(queue, priority, state) for state in (0, 1, 3))
        return [running, self._prefix(queue), pending, failed]

    def _place(self, descriptor: str) -> tuple[str, str, str]:
        queue, _, priority, local_id = descriptor.split(":")
        return queue, priority[1:], local_id


PinLater = PinLaterOnMysql | PinLaterOnRedis
