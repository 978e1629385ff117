"""The baseline does what PinLater did: a baseline that claims too little would flatter us."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.pinlater_statements import PinLaterShard
from pinlaterd.config.schema import Address, ShardSettings
from pinlaterd.model import JobState
from tests.conformance.engine.engines import shard_for
from tests.servers.mariadb import HOST, PASSWD, USER, MariaDB


@pytest.fixture
def settings(mariadb: MariaDB, tmp_path: Path) -> ShardSettings:
    master = Address(HOST, mariadb.port)
    return ShardSettings(shard_for(tmp_path), "mysql", master=master, user=USER, passwd=PASSWD)


@pytest.fixture
def pinlater(settings: ShardSettings) -> Iterator[PinLaterShard]:
    shard = PinLaterShard(settings)
    yield shard
    shard.close()


def test_every_job_is_claimed_once_and_finished(
    pinlater: PinLaterShard, settings: ShardSettings, mariadb: MariaDB
):
    pinlater.fill(500)
    pinlater.enqueue(7)

    claimed = [pinlater.claim(200) for _ in range(4)]
    for local_ids in claimed[:2]:
        pinlater.ack(local_ids)

    assert [len(local_ids) for local_ids in claimed] == [200, 200, 107, 0]
    assert len(set().union(*claimed)) == 507
    with mariadb.connect() as stranger, stranger.cursor() as cursor:
        cursor.execute(f"SELECT state FROM plq_{settings.name}_bench.jobs_p1")
        states = Counter(JobState(row[0]) for row in cursor.fetchall())
    assert states == {JobState.SUCCEEDED: 400, JobState.IN_PROGRESS: 107}
