"""The machine's wall clock is stepped by an hour, as faketime does it to the shards' processes; and
time in which a shard is away.

Claims end by elapsed time, and jobs are handed out as if the clock had not been stepped, also by
shards that were restarted meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from pinlaterd.client import ClaimedJob, Client, Job, JobState
from tests.conftest import ProgramPath, WaitUntil
from tests.deployment import Deployment, frozen
from tests.faults.load import shards_of
from tests.faults.stores.store import SETTINGS, Store, shard_settings

pytestmark = pytest.mark.service

HOUR = 3600
BRIEF_SECONDS = 6
AWAY_SECONDS = 25.0  # a busy machine takes some for stopping and starting, when claims age
SHARDS = ("csqlite", "cmysql", "credis")
_LIBRARY = "libfaketime.so.1"


class SteppedClock:
    """The wall clock of a deployment's processes, but for supervisord."""

    def __init__(self, file: Path, library: str) -> None:
        self._file = file
        self._library = library
        self.step(0)

    def step(self, seconds: int) -> None:
        """From the machine's time."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.rename(self._file)

    def environment(self) -> str:
        """As supervisord takes it."""
        return (
            f'LD_PRELOAD="{self._library}",FAKETIME_TIMESTAMP_FILE="{self._file}",'
            'FAKETIME_NO_CACHE="1",DONT_FAKE_MONOTONIC="1"'
        )


@pytest.fixture(scope="module")
def clock(program_path: ProgramPath, tmp_path_factory: pytest.TempPathFactory) -> SteppedClock:
    program_path("faketime", debian_package="faketime")
    [library] = Path("/usr/lib").glob(f"*/faketime/{_LIBRARY}")
    return SteppedClock(tmp_path_factory.mktemp("c") / "step", str(library))


@pytest.fixture(scope="module")
def deployment(
    clock: SteppedClock, stores: Mapping[str, Store], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("d"))
    shards: dict[str, Mapping[str, object]] = {"csqlite": {}} | {
        f"c{name}": shard_settings(name, store.proxy.port) for name, store in stores.items()
    }
    queues = {
        name: {"job_claimed_timeout_seconds": seconds}
        for name, seconds in (("brief", BRIEF_SECONDS), ("away", AWAY_SECONDS - 1))
    }
    deployment.init(shards=shards, settings=SETTINGS, queues=queues)
    conf = deployment.folder / "etc/supervisord.conf"
    text = conf.read_text().replace(
        "[supervisord]\n", f"[supervisord]\nenvironment = {clock.environment()}\n"
    )
    conf.write_text(text)
    with deployment.running():
        yield deployment
        clock.step(0)


def on_every_shard(client: Client, queue: str, job: Callable[[], Job]) -> list[str]:
    descriptors: list[str] = []
    while len(shards_of(descriptors)) < len(SHARDS):
        descriptors += client.enqueue(queue, [job()])
    return descriptors


def states(client: Client, descriptors: list[str]) -> set[tuple[JobState, int]]:
    return {(job.state, job.attempts_remaining) for job in client.lookup(descriptors).values()}


def claim(client: Client, queue: str, descriptors: list[str]) -> list[ClaimedJob]:
    jobs: list[ClaimedJob] = []
    while len(jobs) < len(descriptors):  # a shard may be held up for a moment
        jobs += client.dequeue(queue, limit=len(descriptors) + 1)
    assert {job.descriptor for job in jobs} == set(descriptors)
    return jobs


def is_told_of(deployment: Deployment, step: int) -> bool:
    under_way = f"clock was stepped by {step:+d} s; this is followed if it lasts"
    warned = [text for text in deployment.status()["warnings"] if under_way in text]
    return all(f"shard-{name}" in "".join(warned) for name in SHARDS)


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_a_step_and_back_with_a_restart_in_between(
    deployment: Deployment, clock: SteppedClock, step: int, wait_until: WaitUntil
):
    with deployment.client() as client:
        for queue in ("held", "brief", "due"):
            client.create_queue(queue)
        in_half_an_hour_ms = round(time.time() * 1000) + HOUR * 500
        held = on_every_shard(client, "held", lambda: Job(b"", attempts_allowed=2))
        jobs = claim(client, "held", held)
        on_every_shard(client, "due", lambda: Job(b"later", run_after_ms=in_half_an_hour_ms))
        waits = on_every_shard(client, "due", lambda: Job(b"before"))

        clock.step(step)
        wait_until(lambda: is_told_of(deployment, step))
        wait_until(lambda: deployment.stats()["gauges"]["shard_clock_step_ms"] > 0.99 * HOUR * 1000)
        brief = on_every_shard(client, "brief", lambda: Job(b"", attempts_allowed=2))
        claimed_at = time.monotonic()
        claim(client, "brief", brief)
        # What is due before the step is due after it.
        claim(client, "due", waits)
        deployment.supervisorctl("restart", *[f"shard-{name}" for name in SHARDS])
        deployment.wait_until_serving()
        claim(client, "due", on_every_shard(client, "due", lambda: Job(b"meanwhile")))
        assert states(client, held) == {(JobState.IN_PROGRESS, 2)}
        wait_until(lambda: states(client, brief) == {(JobState.PENDING, 1)})
        assert time.monotonic() - claimed_at > BRIEF_SECONDS
        client.ack("brief", succeeded=claim(client, "brief", brief))

        stored = on_every_shard(client, "due", lambda: Job(b"stored while it was stepped"))
        clock.step(0)
        wait_until(lambda: deployment.stats()["gauges"]["shard_clock_step_ms"] == 0)
        claim(client, "due", stored)
        assert states(client, held) == {(JobState.IN_PROGRESS, 2)}
        client.ack("held", succeeded=jobs)
        assert states(client, held) == {(JobState.SUCCEEDED, 2)}
        client.delete_jobs("due", JobState.PENDING)


def test_time_in_which_a_shard_is_away_ends_no_claim(deployment: Deployment):
    with deployment.client() as client:
        client.create_queue("away")
        descriptors = on_every_shard(client, "away", lambda: Job(b"", attempts_allowed=2))
        began = time.monotonic()
        jobs = claim(client, "away", descriptors)
        with frozen(deployment.pid_of("shard-csqlite")):
            names = ["shard-cmysql", "shard-credis"]
            deployment.supervisorctl("stop", *names)
            time.sleep(max(0.0, AWAY_SECONDS - (time.monotonic() - began)))
            deployment.supervisorctl("start", *names)
        deployment.wait_until_serving()

        client.ack("away", succeeded=jobs)

        assert states(client, descriptors) == {(JobState.SUCCEEDED, 2)}
