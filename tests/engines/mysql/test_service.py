"""A whole service on a store that PinLater laid down, with PinLater's configuration as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pinlaterd.client import AckInfo, Client, JobState
from tests.conftest import WaitUntil
from tests.deployment import MOST_PATIENT, Deployment, claim
from tests.servers.mariadb import HOST, PASSWD, USER, MariaDB
from tests.servers.pinlater import make_tables

pytestmark = pytest.mark.service

QUEUE = "old"
CLAIM = "pinlater-host:9010:1421450000123:test:7"
# The number in the name of a server of PinLater's configuration, and the shards that it stands for.
NUMBER, SHARDS = "0470", ("470", "470d1")
LAST_OLD_ID = 100


def _pinlaters_json(server: MariaDB) -> str:
    """The file that PinLater's server is given."""
    address = {"host": HOST, "port": server.port}
    settings = {
        "master": address,
        "slave": address,
        "user": USER,
        "passwd": PASSWD,
        "dequeueOnly": False,
    }
    return json.dumps({f"pinlaterdb{NUMBER}": settings})


def _lay_down_pinlaters_jobs(stranger: Any, shard: str) -> None:
    """1: pending. 2: claimed a moment ago. 3: claimed an hour ago, by a server that is gone.
    4: done, with nothing in the columns that may be empty."""
    make_tables(stranger, shard, QUEUE)
    table = f"`plq_{shard}_{QUEUE}`.jobs_p1"
    for local_id, state, held, allowed, status, age_seconds in (
        (1, 0, None, 3, "", 60),
        (2, 1, CLAIM, 3, "began;", 1),
        (3, 1, CLAIM, 3, None, 3600),
        (4, 2, None, None, None, 60),
    ):
        stranger.execute(
            f"INSERT INTO {table} (local_id, state, claim_descriptor, attempts_allowed,"
            " attempts_remaining, custom_status, updated_at, created_at, run_after, body)"
            " SELECT %s, %s, %s, %s, 3, %s, at, at, at, %s FROM (SELECT NOW() - INTERVAL %s SECOND"
            " AS at) AS age",
            (local_id, state, held, allowed, status, b"job %d\xff" % local_id, age_seconds),
        )
    stranger.execute(f"ALTER TABLE {table} AUTO_INCREMENT = {LAST_OLD_ID + 1}")


@pytest.fixture
def service(
    mariadb: MariaDB, stranger: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder: Path = tmp_path_factory.mktemp("service")
    for shard in SHARDS:
        _lay_down_pinlaters_jobs(stranger, shard)
    deployment = Deployment(folder)
    deployment.init(
        shards=1,
        settings={"mysql_num_db_per_queue": 2, "monitor_interval_seconds": 0.1, **MOST_PATIENT},
    )
    (deployment.folder / "etc/shards.yaml").write_text(_pinlaters_json(mariadb))
    with deployment.running():
        yield deployment
    for shard in SHARDS:
        stranger.execute(f"DROP DATABASE IF EXISTS `plq_{shard}_{QUEUE}`")
        stranger.execute(f"DROP DATABASE IF EXISTS `plm_{shard}`")


def test_pinlaters_jobs_are_served_with_pinlaters_configuration(
    service: Deployment, wait_until: WaitUntil
):
    """Claims of the server before have a whole time-out to be acknowledged."""
    old = [[f"{QUEUE}:s{shard}:p1:{number}" for number in (1, 2, 3, 4)] for shard in SHARDS]
    pending, running, stuck, done = ([jobs[at] for jobs in old] for at in range(4))

    with service.client() as client:
        assert QUEUE in client.queue_names()
        found = client.lookup([*pending, *running, *stuck, *done])
        assert [found[name].state for name in (*pending, *running, *stuck, *done)] == (
            [JobState.PENDING] * 2 + [JobState.IN_PROGRESS] * 4 + [JobState.SUCCEEDED] * 2
        )
        assert {found[name].claim_descriptor for name in (*running, *stuck)} == {CLAIM}
        assert {found[name].attempts_remaining for name in stuck} == {3}
        assert {(found[name].custom_status, found[name].attempts_allowed) for name in done} == {
            ("", 1)
        }
        _finish(client, pending, running)

        new: list[str] = []

        def are_on_all_shards() -> bool:
            new.extend(client.enqueue(QUEUE, [b"new"]))
            return {name.split(":")[1] for name in new} == {f"s{shard}" for shard in SHARDS}

        wait_until(are_on_all_shards)
        assert all(int(name.rpartition(":")[2]) > LAST_OLD_ID for name in new)


def _finish(client: Client, ready: list[str], running: list[str]) -> None:
    claimed = claim(client, QUEUE, len(ready))
    assert client.dequeue(QUEUE, limit=10) == []
    assert {job.descriptor: job.body for job in claimed} == {
        name: b"job %s\xff" % name[-1].encode() for name in ready
    }
    client.ack(
        QUEUE,
        succeeded=[*claimed, *[AckInfo(name, "ended", claim_descriptor=CLAIM) for name in running]],
    )
    found = client.lookup([*ready, *running])
    assert {job.state for job in found.values()} == {JobState.SUCCEEDED}
    assert {found[name].custom_status for name in running} == {"began;ended"}
