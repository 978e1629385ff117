"""Each process is killed at each of its steps, and the coordinator at all of them, while jobs of a
type that runs at most once are enqueued, handed out and reported: an id names one job, a job is
sent once, no more run than may, and all of them end."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import pinlaterd
from pinlaterd.config.schema import queue_of_type
from tests.conftest import WaitUntil
from tests.deployment import PATIENT, Deployment
from tests.faults.steps import ITSELF, STEPS, arm
from tests.http.conftest import HttpAnswer, HttpClient
from tests.http.test_v1_jobs import new_id
from tests.push.downstream import Downstream, Received, downstream

pytestmark = pytest.mark.service

CONCURRENCY = 2
JOBS = 3  # at each step
WORK_SECONDS = 0.02
AGAIN_SECONDS = 0.05
TYPE = "once"
ROOT = Path(__file__).parents[2]


class Rickover:
    """A client that repeats what was not answered, and a downstream that reports each job."""

    def __init__(self) -> None:
        self.api = HttpClient(0)
        self.most_at_work = self._at_work = 0
        self.received: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._reports = ThreadPoolExecutor(16)

    def until_answered(self, method: str, path: str, body: object = None) -> HttpAnswer:
        """Call until the answer is no failure of the service."""
        while True:
            try:
                answer = self.api.call(method, path, body)
            except (OSError, http.client.HTTPException):
                answer = HttpAnswer(503, {}, b"")
            if answer.status < 500:
                return answer
            time.sleep(AGAIN_SECONDS)

    def take(self, received: Received) -> None:
        job_id = received.path.rpartition("/")[2]
        with self._lock:
            self.received[job_id] += 1
            self._at_work += 1
            self.most_at_work = max(self.most_at_work, self._at_work)
        self._reports.submit(self._report, received.path)

    def _report(self, path: str) -> None:
        time.sleep(WORK_SECONDS)
        with self._lock:  # it ends before the service may know
            self._at_work -= 1
        self.until_answered("POST", path, {"status": "succeeded", "attempt": 1})

    def enqueue(self) -> list[str]:
        """Enqueue jobs, each until it is answered; return their ids."""
        ids = [new_id() for _ in range(JOBS)]
        with ThreadPoolExecutor(JOBS) as threads:
            answers = list(threads.map(self._enqueue, ids))
        assert {answer.status for answer in answers} <= {202, 400}, answers
        return ids

    def _enqueue(self, job_id: str) -> HttpAnswer:
        return self.until_answered("PUT", f"/v1/jobs/{TYPE}/{job_id}", {"data": 1})

    def has_ended(self, job_id: str) -> bool:
        state = self.until_answered("GET", f"/v1/jobs/{TYPE}/{job_id}").body.get("status")
        return state in ("succeeded", "failed")

    def archived(self) -> dict[str, str]:
        """Return the states of all jobs that have ended, by their ids."""
        found: dict[str, str] = {}
        path = f"/v1/archived-jobs?name={TYPE}"
        while path:
            answer = self.until_answered("GET", path)
            for job in answer.body:
                assert job["id"] not in found, job
                found[job["id"]] = job["status"]
            path = answer.headers.get("Link", "").partition("<")[2].partition(">")[0]
        return found


@pytest.fixture
def rickover() -> Rickover:
    return Rickover()


@pytest.fixture
def there(rickover: Rickover) -> Iterator[Downstream]:
    with downstream(rickover.take) as there:
        yield there


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """The folder in which steps are armed."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "pinlaterd").symlink_to(Path(pinlaterd.__file__).parent)
    (root / "sitecustomize.py").write_text(
        f"import sys\nfrom pathlib import Path\nsys.path.append({str(ROOT)!r})\n"
        f"from tests.faults import steps\nsteps.watch(Path({str(root)!r}))\n"
    )
    return root


@pytest.fixture
def deployment(tmp_path: Path, steps: Path, there: Downstream, victim: str) -> Iterator[Deployment]:
    environment = {"PYTHONPATH": str(steps), "DOWNSTREAM_URL": there.url}
    made = Deployment(tmp_path / "d", environment=environment)
    # Jobs whose claim is lost to a kill have ended soon, but not while a busy machine holds the
    # downstream up; with the coordinator none is lost.
    seconds = 60 if victim == "coordinator" else 4
    settings = {**PATIENT, "monitor_interval_seconds": 0.1, "push_timeout_seconds": seconds}
    queues = {queue_of_type(TYPE): {"job_claimed_timeout_seconds": seconds + 1}}
    made.init(shards=2, settings=settings, queues=queues, http=True)
    with made.running():
        yield made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["http", "push", "router", "shard", "coordinator"])
def test_killed_at_every_step(
    deployment: Deployment, rickover: Rickover, steps: Path, wait_until: WaitUntil, victim: str
) -> None:
    rickover.api = HttpClient(deployment.http_port)
    fields = {"delivery_strategy": "at_most_once", "attempts": 1, "concurrency": CONCURRENCY}
    assert rickover.api.post("/v1/jobs", {"name": TYPE, **fields}).status == 201

    ids: list[str] = []
    for name, step in STEPS.items():
        if victim not in (step.kind, "coordinator"):
            continue
        deployment.wait_until_serving()
        is_other = step.kind != victim
        armed = arm(steps, name, deployment.pid_of(victim) if is_other else ITSELF)
        ids += rickover.enqueue()
        wait_until(lambda: not armed.exists())  # noqa: B023 - before it changes
        wait_until(lambda: all(map(rickover.has_ended, ids[-JOBS:])))  # noqa: B023 - likewise

    archived = rickover.archived()
    assert sorted(archived) == sorted(ids), "each once"
    assert max(rickover.received.values()) == 1
    assert rickover.most_at_work <= CONCURRENCY
    if victim == "coordinator":
        assert set(archived.values()) == {"succeeded"}, "no job needs it"
