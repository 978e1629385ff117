"""Small enqueues that arrive together."""

from __future__ import annotations

import json
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.deployment import CALL_SECONDS, Deployment, frozen
from tests.http.conftest import http_of, serving_http

MANY = 40


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory):
    with serving_http(tmp_path_factory.mktemp("gathering")) as deployment:
        http_of(deployment).put("/v2/queues/mail")
        yield deployment


def _at_once(deployment: Deployment, bodies: list[object]) -> list[tuple[int, Any]]:
    """The answers to enqueues that are all read before the first call of them is answered."""
    with ExitStack() as connections:
        sent = []
        with frozen(deployment.pid_of("router")):
            for body in bodies:
                one = HTTPConnection("127.0.0.1", deployment.http_port, timeout=CALL_SECONDS)
                connections.callback(one.close)
                one.request("POST", "/v2/queues/mail/jobs", json.dumps(body))
                sent.append(one)
            http_of(deployment).get("/v3")  # the others were read by now
        answers = [one.getresponse() for one in sent]
        return [(answer.status, json.loads(answer.read())) for answer in answers]


def _calls(deployment: Deployment) -> int:
    """How many enqueues the routers have answered."""
    metrics = deployment.stats()["metrics"]
    return int(metrics.get("PinLaterService.enqueueJobs_msec", {"count": 0})["count"])


def test_each_of_many_has_its_own_outcome_and_they_take_few_calls(deployment, wait_until):
    answers = _at_once(deployment, [{"data": n} for n in range(MANY)])

    api = http_of(deployment)
    found = [api.get(f"/v2/jobs/{body['descriptor']}").body["data"] for _, body in answers]
    assert found == list(range(MANY))
    wait_until(lambda: _calls(deployment))
    assert _calls(deployment) <= 5


def test_a_mistake_fails_alone(deployment):
    bodies: list[object] = [{"data": n, "priority": 9 if n == 7 else 1} for n in range(MANY)]
    answers = _at_once(deployment, bodies)

    assert [status for status, _ in answers] == [201] * 7 + [400] + [201] * (MANY - 8)
    assert answers[7][1]["code"] == "PRIORITY_NOT_SUPPORTED"
