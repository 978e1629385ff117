"""Processes are killed while jobs are pushed: none is lost, and single attempts are sent once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from pinlaterd.client import AckInfo, Client, ConnectionFailed, Job, JobState, PinLaterError
from tests.conftest import WaitUntil
from tests.deployment import PATIENT, serving
from tests.push.downstream import Received, downstream

pytestmark = pytest.mark.service

_JOBS, _LIMIT = 400, 16
_WORK_SECONDS = 0.05
_ANSWER_SECONDS = 20.0


class Workshop:
    """Takes each job, works on it and calls back; notes how many it works on at a time."""

    def __init__(self) -> None:
        self.client: Client | None = None  # once there is a service
        self.most_at_work = 0
        self._at_work: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(100)

    def take(self, received: Received) -> None:
        job = received.body
        with self._lock:
            self._at_work[job["queue"]] += 1
            self.most_at_work = max(self.most_at_work, self._at_work["often"])
        self._threads.submit(self._work, job)

    def _work(self, job: Mapping[str, str]) -> None:
        time.sleep(_WORK_SECONDS)
        ack = AckInfo(job["descriptor"], "", 0, job["claim"])
        with self._lock:  # it is no longer at work once the service may know that
            self._at_work[job["queue"]] -= 1
        until = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < until:
            with suppress(ConnectionFailed, PinLaterError):
                assert self.client is not None
                self.client.ack(job["queue"], succeeded=[ack])
                return


@pytest.mark.parametrize(
    ("victim", "is_killed"),
    [("push-1", True), ("push-1", False), ("router", True), ("shard-1", True)],
    ids=["push", "push is restarted", "router", "shard"],
)
def test_no_job_is_lost_and_none_of_one_attempt_is_sent_twice(
    tmp_path: Path, wait_until: WaitUntil, victim: str, *, is_killed: bool
) -> None:
    workshop = Workshop()
    with downstream(workshop.take) as there:
        # Nothing is lost by a restart, so that nothing has to wait for its time-out.
        seconds = 8 if is_killed else 60
        push = {"url": f"{there.url}/", "timeout_seconds": seconds, "max_in_progress": _LIMIT}
        queues = {name: {"push": push, "paused": True} for name in ("once", "often")}
        settings = {**PATIENT, "push_hosts": "127.0.0.1", "job_claimed_timeout_seconds": 30}
        settings["monitor_interval_seconds"] = 0.2
        folder = tmp_path / "d"
        with (
            serving(folder, shards=2, settings=settings, queues=queues) as deployment,
            deployment.client() as client,
        ):
            workshop.client = client
            for queue, attempts in (("once", 1), ("often", 9)):
                client.create_queue(queue)
                jobs = [Job(b"%d" % number, attempts_allowed=attempts) for number in range(_JOBS)]
                client.enqueue(queue, jobs)
            deployment.write("queues", {name: {"push": push} for name in queues})
            for part in (_JOBS // 4, _JOBS):
                wait_until(partial(_has_come, there.received, part), seconds=60)
                wait_until(lambda: victim in deployment.pids())
                if is_killed:
                    deployment.kill(victim)
                else:
                    deployment.admin("restart", "push")
            for queue in queues:
                wait_until(partial(_is_empty, client, queue), seconds=90)

            sent = Counter(received.body["descriptor"] for received in there.received)
            assert client.count("often", JobState.SUCCEEDED) == _JOBS
            once = {job: times for job, times in sent.items() if job.startswith("once:")}
            assert set(once.values()) == {1}
            assert workshop.most_at_work <= _LIMIT
            lost = client.count("once", JobState.FAILED)
            assert client.count("once", JobState.SUCCEEDED) + lost == _JOBS
            most = 4 * _LIMIT if is_killed else 0
            assert lost <= most, "only what was claimed when a process was killed"


def _has_come(received: Sequence[Received], jobs: int) -> bool:
    return len(received) >= jobs


def _is_empty(client: Client, queue: str) -> bool:
    try:
        states = (JobState.PENDING, JobState.IN_PROGRESS)
        scheduled = client.count(queue, JobState.PENDING, future=True)
        return scheduled + sum(client.count(queue, state) for state in states) == 0
    except (ConnectionFailed, PinLaterError):
        return False
