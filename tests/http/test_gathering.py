"""Small enqueues that arrive together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.deployment import Deployment, frozen
from tests.http.conftest import HttpAnswer, http_of, serving_http

MANY = 40


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory):
    with serving_http(tmp_path_factory.mktemp("gathering")) as deployment:
        http_of(deployment).put("/v2/queues/mail")
        yield deployment


def _at_once(
    deployment: Deployment, bodies: list[object], wait_until: Callable[..., object]
) -> list[HttpAnswer]:
    """The answers to enqueues that are all read before the first call of them is answered."""
    api, started = http_of(deployment), threading.Barrier(len(bodies) + 1)

    def enqueue(body: object) -> HttpAnswer:
        started.wait()
        return api.post("/v2/queues/mail/jobs", body)

    with ThreadPoolExecutor(len(bodies)) as pool:
        with frozen(deployment.pid_of("router")):
            found = [pool.submit(enqueue, body) for body in bodies]
            started.wait()
            wait_until(lambda: _open_connections(deployment) >= len(bodies))
            api.get("/v3")  # the others were read by now
        return [future.result() for future in found]


def _open_connections(deployment: Deployment) -> int:
    connections = psutil.Process(deployment.pid_of("http")).net_connections("tcp")
    ours = [one for one in connections if one.laddr.port == deployment.http_port]
    return sum(one.status == psutil.CONN_ESTABLISHED for one in ours)


def _calls(deployment: Deployment) -> int:
    """How many enqueues the routers have answered."""
    metrics = deployment.stats()["metrics"]
    return int(metrics.get("PinLaterService.enqueueJobs_msec", {"count": 0})["count"])


def test_each_of_many_has_its_own_outcome_and_they_take_few_calls(deployment, wait_until):
    answers = _at_once(deployment, [{"data": n} for n in range(MANY)], wait_until)

    api = http_of(deployment)
    found = [api.get(f"/v2/jobs/{answer.body['descriptor']}").body["data"] for answer in answers]
    assert found == list(range(MANY))
    wait_until(lambda: _calls(deployment))
    assert _calls(deployment) <= 5


def test_a_mistake_fails_alone(deployment, wait_until):
    bodies: list[object] = [{"data": n, "priority": 9 if n == 7 else 1} for n in range(MANY)]
    answers = _at_once(deployment, bodies, wait_until)

    assert [answer.status for answer in answers] == [201] * 7 + [400] + [201] * (MANY - 8)
    assert answers[7].body["code"] == "PRIORITY_NOT_SUPPORTED"
