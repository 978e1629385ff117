"""Tables as PinLater's server made them."""

from __future__ import annotations

from typing import Any


def make_tables(stranger: Any, shard: str, queue: str, charset: str = "latin1") -> None:
    """The tables of a queue, empty."""
    database = f"`plq_{shard}_{queue}`"
    stranger.execute(f"CREATE DATABASE {database} DEFAULT CHARACTER SET {charset}")
    for priority in (1, 2, 3):
        stranger.execute(
            f"CREATE TABLE {database}.jobs_p{priority} ("
            " local_id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,"
            " state TINYINT NOT NULL, claim_descriptor VARCHAR(200),"
            " attempts_allowed INT, attempts_remaining INT NOT NULL, custom_status VARCHAR(5000),"
            " updated_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP,"
            " created_at TIMESTAMP NOT NULL, run_after TIMESTAMP NOT NULL, body BLOB NOT NULL,"
            " INDEX (state, run_after), INDEX (claim_descriptor)) ENGINE = InnoDB"
        )
