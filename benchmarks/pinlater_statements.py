"""What MySQL does with PinLater's own statements: what the MySQL engine is held against.

One insert a job; a claim by `UPDATE … LIMIT`, then a select by the claim descriptor;
one update an ack; each a transaction of its own, on a table as PinLater made it. They go to the
same server, with the same durability, over the same driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pymysql

from benchmarks import frames
from pinlaterd.config.schema import ShardSettings
from pinlaterd.model import JobState

_TABLE = """
CREATE TABLE jobs_p1 (
    local_id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
    state TINYINT NOT NULL,
    claim_descriptor VARCHAR(200),
    attempts_allowed INT NOT NULL,
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
_INSERT_INTO = (
    "INSERT INTO jobs_p1 (state, attempts_allowed, attempts_remaining, custom_status,"
    " created_at, run_after, body) VALUES "
)
_ROW = "(%s, 2, 2, '', NOW(), NOW(), %s)"
_CLAIM = (
    "UPDATE jobs_p1 SET claim_descriptor = %s, state = %s"
    " WHERE state = %s AND run_after <= NOW() LIMIT %s"
)
_SELECT_CLAIMED = (
    "SELECT local_id, attempts_allowed, attempts_remaining, updated_at, created_at, body"
    " FROM jobs_p1 WHERE claim_descriptor = %s"
)
_ACK = (
    "UPDATE jobs_p1 SET state = %s, custom_status = SUBSTRING(CONCAT(custom_status, %s), 1, 5000)"
    " WHERE local_id = %s"
)
_FILL_JOBS = 500  # a statement


class PinLaterShard:
    """One connection to one queue of one shard."""

    def __init__(self, shard: ShardSettings) -> None:
        assert shard.master is not None
        self._db: Any = pymysql.connect(
            host=shard.master.host,
            port=shard.master.port,
            user=shard.user,
            password=shard.passwd,
            charset="utf8mb4",
            autocommit=True,
        )
        self._cursor = self._db.cursor()
        database = f"plq_{shard.name}_bench"
        self._cursor.execute(f"CREATE DATABASE {database}")
        self._db.select_db(database)
        self._cursor.execute(_TABLE)
        self._claims = count(1)

    def fill(self, jobs: int) -> None:
        """Make so many jobs, before the clock starts: many rows a statement."""
        row = self._cursor.mogrify(_ROW, (JobState.PENDING.value, frames.body()))
        for _ in range(-(-jobs // _FILL_JOBS)):
            self._cursor.execute(_INSERT_INTO + ", ".join([row] * _FILL_JOBS))

    def enqueue(self, jobs: int) -> None:
        for _ in range(jobs):
            self._cursor.execute(_INSERT_INTO + _ROW, (JobState.PENDING.value, frames.body()))

    def claim(self, limit: int) -> Sequence[int]:
        """The local ids of what it claimed; all of their rows were read."""
        claim = f"localhost:9010:1700000000000:bench:load:{next(self._claims)}"
        states = (JobState.IN_PROGRESS.value, JobState.PENDING.value)
        self._cursor.execute(_CLAIM, (claim, *states, limit))
        self._cursor.execute(_SELECT_CLAIMED, (claim,))
        return [row[0] for row in self._cursor.fetchall()]

    def ack(self, local_ids: Sequence[int]) -> None:
        for local_id in local_ids:
            self._cursor.execute(_ACK, (JobState.SUCCEEDED.value, "", local_id))

    def close(self) -> None:
        self._db.close()
