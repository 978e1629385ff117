"""docs/migration.md as an operator of PinLater follows it: over to pinlaterd on a copy, and back.

PinLater is played by its own statements and scripts, on its own layout.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from pinlaterd.client import AckInfo, Client, Job, JobState
from pinlaterd.config.schema import ServerSettings, settings_of
from tests.conftest import FreePort, ProgramPath
from tests.deployment import PATIENT, Deployment, claim
from tests.docs.pages import README, ReadersShell, commands, section
from tests.servers.mariadb import HOST, PASSWD, USER, start_mariadb
from tests.servers.pinlater import PinLater, PinLaterOnMysql, PinLaterOnRedis
from tests.servers.redis import RedisServer, redis_program

__all__ = ["redis_program"]

PAGE = README.parent / "docs/migration.md"
JOBS = {JobState.PENDING: 5, JobState.IN_PROGRESS: 2, JobState.SUCCEEDED: 1, JobState.FAILED: 1}
# All that PinLater's server reads of its configuration.
PROPERTIES = """
ADMIN_PASSWORD_HASH BACKEND_CONNECTIONS_PER_SHARD BACKEND_CONNECTION_MAX_WAIT_MILLIS
BACKEND_DEQUEUE_CONCURRENCY_PER_QUEUE_PER_SHARD BACKEND_MONITOR_JOB_CLAIMED_TIMEOUT_SECONDS
BACKEND_MONITOR_JOB_FAILED_GC_TTL_HOURS BACKEND_MONITOR_JOB_SUCCEEDED_GC_TTL_HOURS
BACKEND_MONITOR_THREAD_DELAY_SECONDS BACKEND_MONITOR_UPDATE_MAX_SIZE BACKEND_NUM_AUTO_RETRIES
BACKEND_QUERY_PARALLELISM BACKEND_SOCKET_TIMEOUT_SECONDS MAX_CONCURRENT_REQUESTS
MONITOR_CONNECTIONS_PER_SHARD MONITOR_LOG_INTERVAL MONITOR_SOCKET_TIMEOUT_SECONDS
MYSQL_COUNT_LIMIT MYSQL_NUM_DB_PER_QUEUE NUM_PRIORITY_LEVELS OSTRICH_PORT PINLATER_BACKEND
QUEUE_CONFIG_FILE_PATH REDIS_HEALTH_CHECK_CONSECUTIVE_FAILURES
REDIS_HEALTH_CHECK_CONSECUTIVE_SUCCESSES REDIS_HEALTH_CHECK_PING_INTERVAL_SECONDS
SERVER_CONN_MAX_IDLE_TIME_MINUTES SERVER_SET_ENABLED SERVER_SET_PATH
SHARD_ALLOWED_HOSTNAME_PREFIX THRIFT_PORT
"""
# A file of the page: its name begins the sentence before it.
_FILE = re.compile(r"^`([\w.-]+)`[^\n]*:\n\n```\w+\n(.*?)```", re.MULTILINE | re.DOTALL)


class Migration(NamedTuple):
    """What the page's names stand for, PinLater's shard files, and PinLater on each shard."""

    engine: str
    names: Mapping[str, str]
    first: object  # the file of the shards that go over first
    all: object
    old: Sequence[PinLater]  # the second half of the shards goes over later
    copies: Sequence[PinLater]


class OperatorsShell(ReadersShell):
    def __init__(self, folder: Path, service: Deployment, names: Mapping[str, str]) -> None:
        super().__init__(folder, service)
        self._names = names
        for name, content in _FILE.findall(PAGE.read_text()):
            (folder / name).write_text(self._here(content))

    def follow(self, title: str) -> Sequence[str]:
        """What each command of a section prints."""
        return [self.run(line) for line in commands(section(PAGE, title))]

    def _here(self, line: str) -> str:
        names = "|".join(rf"\b{re.escape(name)}\b" for name in self._names)
        return re.sub(names, lambda found: self._names[found[0]], super()._here(line))


@pytest.fixture
def mysql(program_path: ProgramPath, free_port: FreePort, tmp_path: Path) -> Iterator[Migration]:
    for program in ("mysql", "mysqldump"):
        program_path(program, debian_package="mariadb-client")
    old, copy = (
        start_mariadb(program_path, tmp_path / name, free_port(), "--default-time-zone=+00:00")
        for name in ("old", "copy")
    )
    master = {"host": HOST, "port": copy.port}
    entry = {"master": master, "slave": None, "user": USER, "passwd": PASSWD}
    first = {"pinlaterdb001": entry}
    escaped = PASSWD.replace("\\", "\\\\")
    yield Migration(
        "MySQL",
        {
            "db1.example": HOST,
            "3306": str(old.port),
            "3307": str(copy.port),
            "secret": f'"{escaped}"',
        },
        first,
        first | {"pinlaterdb002": entry},
        *(
            [PinLaterOnMysql(server.connect(), shard) for shard in ("1", "1d1", "2", "2d1")]
            for server in (old, copy)
        ),
    )
    old.stop()
    copy.stop()


@pytest.fixture
def redis(redis_program: str, free_port: FreePort, tmp_path: Path) -> Iterator[Migration]:
    old, copy = (
        RedisServer(redis_program, tmp_path / name, free_port(), "--repl-diskless-sync-delay", "0")
        for name in ("old", "copy")
    )
    old.start()
    copy.start()
    config = {"master": {"host": HOST, "port": copy.port}, "slave": None}
    first, second = ({"name": name, "shardConfig": config} for name in "12")
    yield Migration(
        "Redis",
        {"redis1.example": HOST, "6379": str(old.port), "6380": str(copy.port)},
        {"shards": [first]},
        {"shards": [first, second]},
        *([PinLaterOnRedis(server.client(), shard) for shard in "12"] for server in (old, copy)),
    )
    old.stop()
    copy.stop()


@pytest.fixture(params=["mysql", "redis"])
def migration(request: pytest.FixtureRequest) -> Migration:
    found: Migration = request.getfixturevalue(request.param)
    return found


def _work(pinlater: PinLater) -> list[str]:
    """What PinLater's clients left in a shard: jobs of all states, the first two claimed."""
    pinlater.create_queue("mail")
    jobs = [pinlater.enqueue("mail", b"job %d" % number) for number in range(5)]
    assert sorted(pinlater.dequeue("mail", limit=5)) == sorted(jobs)
    _, _, done, failed, retried = jobs
    pinlater.succeed(done, "fine")
    pinlater.fail(failed, "no")
    for _ in range(2):
        assert [*pinlater.dequeue("mail", limit=1)] == [failed]
        pinlater.fail(failed, "no")
    pinlater.fail(retried, "again")
    jobs += [pinlater.enqueue("mail", b"low %d" % number, priority=3) for number in range(3)]
    jobs.append(pinlater.enqueue("mail", b"scheduled", delay_seconds=3600))
    assert pinlater.counts("mail") == JOBS
    return jobs


@pytest.mark.service
def test_over_to_a_copy_and_back(migration: Migration, tmp_path: Path):
    left = [_work(pinlater) for pinlater in migration.old]
    first = len(left) // 2
    over, later = ([one for jobs in part for one in jobs] for part in (left[:first], left[first:]))
    folder = tmp_path / "operator"
    folder.mkdir()
    deployment = Deployment(tmp_path / "jobs")
    shell = OperatorsShell(folder, deployment, migration.names)
    limits = {"queues": [{"name": "slow", "queueConfig": {"maxJobsPerSecond": 0.5}}]}
    for name, content in (
        ("shards.json", migration.first),
        ("all-shards.json", migration.all),
        ("queue_config.json", limits),
    ):
        (folder / name).write_text(json.dumps(content))
    with (folder / "settings.yaml").open("a") as settings:
        settings.writelines(f"{name}: {value}\n" for name, value in PATIENT.items())
    copies = migration.copies

    shell.follow(f"Rehearse on a copy of {migration.engine}")
    try:
        *_, status, stats, pending, dequeued = shell.follow("Start pinlaterd")
        assert "healthy" in status
        assert "dequeued 2 jobs" in dequeued
        for state, jobs in JOBS.items():
            scheduled = first if state is JobState.PENDING else 0
            assert f"{state.name}\t{jobs * first - scheduled}\n" in stats
        assert {line.split("\t")[0] for line in pending.splitlines()[1:]} == {
            one for jobs in left[:first] for one in jobs[4:8]
        }
        # PinLater goes on with its other shards, and then gives them up, too.
        assert len(copies[-1].dequeue("mail", limit=1)) == 1
        later.append(copies[-1].enqueue("mail", b"newest"))
        shell.follow("Go over shard by shard")
        with deployment.client() as client:
            ours = _go_on(client, over, later)
        shell.follow("Going back")
        back = shell.follow(f"Back on {migration.engine}")
        assert {*back} == {""}
        if migration.engine == "MySQL":
            added = (folder / "indexes-now.sql").read_text().splitlines()
            assert len(added) == 3 * len(copies)
            assert all("_fresh`.jobs_p" in line for line in added)
        theirs = _go_back(copies, ours)
        shell.run("pinlaterd up ~/jobs")
        with deployment.client() as client:
            assert {job.descriptor for job in client.dequeue("mail", limit=1000)} >= {*theirs}
    finally:
        deployment.destroy()


def _go_on(client: Client, over: Sequence[str], later: Sequence[str]) -> dict[str, bytes]:
    """Serve what PinLater left; the jobs of ours that are left then, by descriptor."""
    jobs = client.lookup([*over, *later], include_body=True)
    assert jobs.keys() == {*over, *later}
    assert jobs[later[-1]].body == b"newest"
    assert jobs[over[2]].custom_status == "fine"
    # A worker that dequeued from PinLater acknowledges to us.
    client.ack("mail", succeeded=[AckInfo(over[0])], failed=[AckInfo(over[1])])
    found = client.lookup(over[:2])
    assert [found[one].state for one in over[:2]] == [JobState.SUCCEEDED, JobState.PENDING]
    for _ in range(len(over) + len(later)):
        client.ack("mail", succeeded=client.dequeue("mail", limit=100))
    assert client.count("mail", JobState.PENDING) == 0

    client.create_queue("fresh")
    ours = {}
    for queue in ("mail", "fresh"):
        for number in range(12):
            body = b"ours %d" % number
            ours[client.enqueue(queue, [Job(body, 1 + number % 3, attempts_allowed=3)])[0]] = body
        claimed = claim(client, queue, 5)
        client.ack(queue, succeeded=claimed[:1], failed=claimed[1:2])
        del ours[claimed[0].descriptor]
    return ours


def _go_back(copies: Sequence[PinLater], ours: Mapping[str, bytes]) -> Sequence[str]:
    """PinLater serves what we left; the jobs that it has made since."""
    found: dict[str, bytes] = {}
    theirs = []
    # MariaDB rounds our times to PinLater's seconds, up as well: jobs are due once those have come.
    due = int(time.time()) + 1
    while time.time() < due:
        time.sleep(due - time.time())
    for pinlater in copies:
        assert pinlater.queue_names() == {"mail", "fresh"}
        for queue in ("mail", "fresh"):
            theirs.append(pinlater.enqueue(queue, b"theirs"))
            before = pinlater.counts(queue)
            claimed = pinlater.dequeue(queue, limit=100)
            timed_out = pinlater.time_out(queue)
            assert timed_out == len(claimed) + before[JobState.IN_PROGRESS]
            again = pinlater.dequeue(queue, limit=100)
            assert again.keys() >= claimed.keys()
            assert again.pop(theirs[-1]).body == b"theirs"
            pinlater.fail(theirs[-1])
            for descriptor, job in again.items():
                found[descriptor] = job.body
                pinlater.succeed(descriptor, "by PinLater")
            after = pinlater.counts(queue)
            assert after[JobState.IN_PROGRESS] == 0
            assert after[JobState.SUCCEEDED] == before[JobState.SUCCEEDED] + len(again)
            assert after[JobState.FAILED] == before[JobState.FAILED]
    assert found.items() >= ours.items()
    return [one for one in theirs if one.startswith("mail")]


# --- the page's tables ------------------------------------------------------------------------


def test_every_property_of_pinlater_is_on_the_page():
    first_column = [
        line.split("|")[1] for line in section(PAGE, "Settings").splitlines() if "|" in line
    ]

    assert {name for cell in first_column for name in re.findall(r"`([A-Z_]+)`", cell)} >= {
        *PROPERTIES.split()
    }


def test_settings_and_figures_of_ours_that_it_names_exist():
    text = PAGE.read_text()
    metrics = (PAGE.parent / "metrics.md").read_text()
    settings = settings_of(ServerSettings).keys() | {"passwd_file", "passwd_env"}

    for line in section(PAGE, "Settings").splitlines():
        for name in re.findall(r"`([a-z]+_[a-z_]+)`", line.split("|")[2] if "|" in line else ""):
            assert name in settings, name
    for name in re.findall(r"`((?:shard|router|connections|process|server)_[a-z_]+)`", text):
        assert name in settings or f"`{name}`" in metrics, name
    for name in re.findall(r"`QUEUE_([a-z_]+)`", text):
        assert f"`<queue>_{name}`" in metrics or name == "timeout_evict", name


def test_every_link_of_it_leads_somewhere():
    for page, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]+))?\)", PAGE.read_text()):
        target = (PAGE.parent / page) if page else PAGE
        assert target.exists(), page
        titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        known = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not anchor or anchor in known, anchor
