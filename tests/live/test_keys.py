"""Jobs with keys, enqueued again and again while shards come and go, and processes are killed."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from pinlaterd.client import Client, Job, JobOptions, JobState, PinLaterError
from pinlaterd.client.calls import EnqueuedJob
from pinlaterd.errors import ConnectionFailed
from tests.deployment import serving
from tests.live.conftest import BASE, is_dequeue_only, serves

pytestmark = pytest.mark.service

THREE = f"{BASE}  3: {{}}\n"
THREADS = 4
WINDOW = 40  # so many keys are enqueued again and again at a time


class KeyedLoad:
    """Clients that all enqueue the same keys, alone and several a call, and repeat what failed."""

    def __init__(self, client: Client, queue: str) -> None:
        self._client = client
        self._queue = queue
        self._stop = threading.Event()
        self._next = 0  # of the keys; any thread raises it
        self.answers: dict[str, list[EnqueuedJob]] = defaultdict(list)
        self.failures: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(THREADS) as threads:
            runs = [threads.submit(self._run, Random(number)) for number in range(THREADS)]
            try:
                yield
            finally:
                self._stop.set()
            for run in runs:
                run.result()

    def advance(self, wait_until) -> None:
        """Wait until the load has gone on for a while."""
        reached = self._next + WINDOW
        wait_until(lambda: self._next > reached)

    def _run(self, rng: Random) -> None:
        while not self._stop.is_set():
            self._next += 1
            last = self._next
            keys = {
                f"k{rng.randint(max(0, last - WINDOW), last)}" for _ in range(rng.choice([1, 8]))
            }
            jobs = [Job(key.encode(), options=JobOptions(key)) for key in keys]
            try:
                found = self._client.enqueue_keyed(self._queue, jobs)
            except (PinLaterError, ConnectionFailed) as error:
                self.failures.append(str(error))
                continue
            for key, answer in zip(keys, found, strict=True):
                self.answers[key].append(answer)

    def check(self) -> None:
        """Check that each key has one job, and that one answer at most says that it was new."""
        stored = Counter(
            job.options.key
            for job in self._client.scan(self._queue, JobState.PENDING)
            if job.options
        )
        assert not [key for key, jobs in stored.items() if jobs > 1]
        for key, answers in self.answers.items():
            assert stored[key] == 1
            assert len({answer.descriptor for answer in answers}) == 1, key
            assert sum(not answer.existed for answer in answers) <= 1, key
        found = self._client.lookup_keys(self._queue, self.answers)
        assert {key: job.descriptor for key, job in found.items()} == {
            key: answers[0].descriptor for key, answers in self.answers.items()
        }


@pytest.fixture
def keyed(client: Client, queue: str) -> KeyedLoad:
    return KeyedLoad(client, queue)


def test_keys_stay_held_while_shards_come_and_go(live, client, queue, keyed, wait_until):
    with keyed.running():
        keyed.advance(wait_until)
        live.shards(THREE)
        live.wait_until_followed(lambda s: serves(s, "1", "2", "3"))
        keyed.advance(wait_until)
        live.shards("shards:\n  1: {dequeue_only: true}\n  2: {}\n  3: {}\n")
        live.wait_until_followed(lambda s: is_dequeue_only(s, "1"))
        keyed.advance(wait_until)
        live.shards("shards:\n  1: {}\n  2: {dequeue_only: true}\n  3: {}\n")
        live.wait_until_followed(lambda s: is_dequeue_only(s, "2") and not is_dequeue_only(s, "1"))
        keyed.advance(wait_until)

    keyed.check()
    assert keyed.failures == []
    shards = {answers[0].descriptor.split(":")[1] for answers in keyed.answers.values()}
    assert shards == {"s1", "s2", "s3"}


def test_keys_stay_held_whatever_is_killed(live, client, queue, keyed, wait_until):
    with keyed.running():
        for programs in (
            ["shard-1"],
            ["router"],
            ["shard-2", "coordinator"],
            ["shard-1", "router"],
        ):
            keyed.advance(wait_until)
            for program in programs:
                live.deployment.kill(program)
            live.deployment.wait_until_serving()
        live.shards(THREE)
        live.deployment.kill("coordinator")
        live.deployment.wait_until_serving()
        live.wait_until_followed(lambda s: serves(s, "1", "2", "3"))
        live.deployment.kill("shard-1")
        live.deployment.kill("shard-3")
        live.deployment.wait_until_serving()
        keyed.advance(wait_until)

    keyed.check()


def test_keys_stay_held_where_their_placement_was_damaged(tmp_path: Path):
    jobs = [Job(b"", options=JobOptions(f"k{number}")) for number in range(40)]
    settings = {"request_timeout_ms": 60_000, "shard_restart_grace_ms": 60_000}
    with serving(tmp_path / "d", settings=settings) as deployment:
        with deployment.client() as client:
            client.create_queue("mail")
            stored = client.enqueue("mail", jobs)
        deployment.down()
        (deployment.folder / "data/key_placement.json").write_bytes(b'{"number": 5, "sha')
        deployment.write("shards", {"1": {}, "2": {}})
        deployment.up()
        with deployment.client() as client:
            again = client.enqueue("mail", jobs)
            pending = client.count("mail", JobState.PENDING)

    assert again == stored
    assert pending == len(jobs)
