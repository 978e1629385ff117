"""A deployment under attack, and a bystander whose every call must succeed meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pinlaterd.client import ClaimedJob, ConnectionFailed, Job, PinLaterError
from tests.conftest import WaitUntil
from tests.deployment import Deployment, serving

MIB = 1024 * 1024
GROWTH_BYTES = 50 * MIB  # for good
PEAK_BYTES = 400 * MIB  # for the moment: one frame may have 64 MiB, and is decoded
SLOWEST_SECONDS = 40.0
QUEUE = "target"
SETTINGS = {
    "request_timeout_ms": 20_000,
    "max_dequeue_wait_ms": 100,
    "monitor_interval_seconds": 0.5,
}


class Bystander:
    """Works on a queue of its own, on one connection, and remembers what went wrong."""

    def __init__(self, deployment: Deployment) -> None:
        self.calls = 0
        self.seconds: list[float] = []  # that each round of calls took
        self.errors: list[Exception] = []
        self._deployment = deployment
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * SLOWEST_SECONDS)
        assert not self._thread.is_alive()

    def _work(self) -> None:
        with self._deployment.client("bystander") as client:
            client.create_queue("bystander")
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    body = b"%d" % self.calls
                    client.enqueue("bystander", [Job(body)])
                    jobs: list[ClaimedJob] = []
                    while not jobs and time.monotonic() < began + SLOWEST_SECONDS:
                        # A shard that a busy machine holds up for a second is left out.
                        jobs = client.dequeue("bystander", limit=10, max_wait_ms=1_000)
                    client.ack("bystander", succeeded=jobs)
                    assert body in [job.body for job in jobs]
                except (PinLaterError, ConnectionFailed, AssertionError) as error:
                    self.errors.append(error)
                self.calls += 1
                self.seconds.append(time.monotonic() - began)
                self._stop.wait(0.005)


# What a fuzzed dequeue claims comes back, for the next one.
QUEUES = {name: {"job_claimed_timeout_seconds": 1} for name in (QUEUE, "claimed")}


@contextmanager
def attacked(folder: Path, shards: int | Mapping[str, object]) -> Iterator[Deployment]:
    with serving(folder, shards=shards, settings=SETTINGS, queues=QUEUES) as deployment:
        with deployment.client() as client:
            client.create_queue(QUEUE)
        yield deployment


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with attacked(tmp_path_factory.mktemp("d"), 2) as deployment:
        yield deployment


@pytest.fixture
def bystander(deployment: Deployment, wait_until: WaitUntil) -> Iterator[Bystander]:
    """Another client, which is not hurt. The peaks of processes are counted from its start."""
    for pid in deployment.pids().values():
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    bystander = Bystander(deployment)
    bystander.start()
    wait_until(lambda: bystander.calls > 3, seconds=3 * SLOWEST_SECONDS)
    yield bystander
    calls = bystander.calls
    wait_until(lambda: bystander.calls > calls + 3, seconds=3 * SLOWEST_SECONDS)
    bystander.stop()
    assert bystander.errors == []
    assert max(bystander.seconds) < SLOWEST_SECONDS


@pytest.fixture(autouse=True)
def unharmed(deployment: Deployment, bystander: Bystander, wait_until) -> Iterator[Bystander]:
    """What every hostile test leaves: the same processes, no larger."""
    pids = deployment.pids()
    assert len(pids) == 4, pids
    sizes = {name: _rss_bytes(pid) for name, pid in pids.items()}

    yield bystander

    assert deployment.pids() == pids
    for name, pid in pids.items():
        wait_until(lambda n=name, p=pid: _rss_bytes(p) < sizes[n] + GROWTH_BYTES)
        assert peak_bytes(pid) < sizes[name] + PEAK_BYTES


def peak_bytes(pid: int) -> int:
    """The most memory that the process has had since its test began."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _rss_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)
