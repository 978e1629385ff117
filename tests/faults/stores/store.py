"""A shard's server that a test can disturb, and how a deployment is told of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pinlaterd.client import ClaimedJob, JobState
from tests.deployment import Deployment
from tests.faults.load import Load, shards_of
from tests.servers import mariadb
from tests.servers.mariadb import MariaDB
from tests.servers.proxy import HOST, Proxy
from tests.servers.redis import RedisServer

REQUEST_SECONDS = 10.0
LEASE_SECONDS = 6.0
# What a busy machine may add to the deadline of a call.
SLACK_SECONDS = 10.0
# For how long a store hangs: leases end, and a call that waits for it to go on is late.
HANGING_SECONDS = REQUEST_SECONDS + SLACK_SECONDS + 4.0
# What a call may take whose shards are well, on a busy machine: it has not waited for a deadline.
UNDISTURBED_SECONDS = 9.0
BACK_SECONDS = 120.0
SLOW_MS = 200  # less than the slow network of a test makes of a commit
ENGINES = ("mysql", "redis")

SETTINGS = {
    "request_timeout_ms": round(REQUEST_SECONDS * 1000),
    "owner_lease_seconds": LEASE_SECONDS,
    "health_slow_ms": SLOW_MS,
    "health_slow_factor": 5,
    "monitor_interval_seconds": 0.5,
    "job_claimed_timeout_seconds": 600,
}


@dataclass(frozen=True)
class Store:
    """A shard's server, and the way to it."""

    shard: str
    server: MariaDB | RedisServer
    proxy: Proxy

    @contextmanager
    def frozen(self) -> Iterator[None]:
        os.kill(self.server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.server.pid, signal.SIGCONT)


def shard_settings(engine: str, port: int) -> Mapping[str, object]:
    master = {"engine": engine, "master": {"host": HOST, "port": port}}
    user = {"user": mariadb.USER, "passwd": mariadb.PASSWD} if engine == "mysql" else {}
    return master | user


def facts_of(deployment: Deployment, store: Store) -> Mapping[str, str]:
    """What the shard's process says of itself."""
    found = deployment.processes_called(f"shard-{store.shard}").values()
    return {name: fact for process in found for name, fact in process["facts"].items()}


# --- what has to hold whatever happens to a store ------------------------------------------------


def check_others_serve(deployment: Deployment, queue: str, *, without: Iterable[Store]) -> None:
    """A queue can be made while these shards are down, and the others serve it."""
    with deployment.client(timeout_seconds=UNDISTURBED_SECONDS) as client:
        client.create_queue(queue)
    check_work_goes_elsewhere(deployment, queue, without=without)


def check_work_goes_elsewhere(
    deployment: Deployment, queue: str, *, without: Iterable[Store]
) -> None:
    """Each call goes well, and soon."""
    expected = {"sqlite", *ENGINES} - {store.shard for store in without}
    with deployment.client(timeout_seconds=UNDISTURBED_SECONDS) as client:
        descriptors = [client.enqueue(queue, [b"x"])[0] for _ in range(30)]
        assert shards_of(descriptors) <= expected
        jobs: list[ClaimedJob] = []
        while len(jobs) < len(descriptors):  # one of the others may be held up for a moment
            jobs += client.dequeue(queue, limit=len(descriptors))
        assert {job.descriptor for job in jobs} == set(descriptors)
        client.ack(queue, succeeded=jobs)
        assert {job.state for job in client.lookup(descriptors).values()} == {JobState.SUCCEEDED}


def check_in_time(load: Load) -> None:
    """Each call was answered by its deadline."""
    assert load.longest_call_seconds < REQUEST_SECONDS + SLACK_SECONDS


def check_calls(load: Load, *, disturbed: Iterable[Store]) -> None:
    """Each was answered by its deadline; if some failed, they needed a shard that was disturbed."""
    check_in_time(load)
    names = [f"shard {store.shard}" for store in disturbed]
    errors = [str(error) for error in load.errors]
    strange = [text for text in errors if not any(name in text for name in names)]
    assert strange == [], strange[:3]
