"""Errors say what was done by then: nothing, a part, or that it is not known."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from pinlaterd.client.calls import PreparedCall
from pinlaterd.config.password import hash_password
from pinlaterd.config.schema import Config, JobType
from pinlaterd.errors import (
    ConnectionFailed,
    EnqueueRejected,
    NoHealthyShards,
    OutcomeUnknown,
    Overloaded,
    QueueFull,
    QueueNotFound,
    ShardConnectionFailed,
)
from pinlaterd.http import changes
from pinlaterd.http.job_types import JobTypes
from pinlaterd.http.problems import FailedLater, problem_of
from pinlaterd.http.v1_jobs import JobHandlers
from pinlaterd.model import EnqueueWithOptionsResult, JobOptions
from pinlaterd.router_client import RouterClient
from tests.conftest import WaitUntil
from tests.deployment import CALL_SECONDS
from tests.http.conftest import HttpClient, claim, http_of, serving_http
from tests.http.test_v1_job_types import made_type

OPEN = "open sesame"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConnectionFailed("no router"), "no router; nothing was done"),
        (OutcomeUnknown("no answer; it may have been"), "no answer; it may have been"),
        (NoHealthyShards(), "`pinlater-admin status`; nothing was done"),
        (Overloaded("9 calls"), "overloaded: 9 calls; try again later; nothing was done"),
        (QueueFull("mail", 1000), "; retry after 1000 ms; nothing was stored"),
        (EnqueueRejected("busy; nothing was stored; try later"), "nothing was stored; try later"),
        (ShardConnectionFailed("2", "is down; nothing was done there"), "nothing was done there"),
        (QueueNotFound("mail"), "create it first"),
        (FailedLater(ConnectionFailed("no router"), "3 were"), "no router; 3 were"),
        (FailedLater(ShardConnectionFailed("2", "down; nothing was done"), "x"), "2: down; x"),
    ],
)
def test_nothing_was_done_is_said_where_it_is_so(error: Exception, says: str) -> None:
    problem = problem_of(error)

    assert problem is not None
    assert problem.detail.endswith(says)


# --- calls of the routers that fail after others ----------------------------------------------


class Routers:
    """Answers calls with what is given, one after the other, and raises what is an error."""

    def __init__(self, *answers: object) -> None:
        self._answers = iter(answers)

    async def run(self, call: PreparedCall[Any]) -> object:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return call.result(answer)


def after(*answers: object) -> RouterClient:
    return cast("RouterClient", Routers(*answers))


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([7, ConnectionFailed("no router")], "no router; at least 7 jobs were changed"),
        ([1, 0, Overloaded("busy")], "try again later; at least 1 job was changed"),
        ([0, Overloaded("busy")], "try again later; some jobs may have been changed"),
        ([0, ConnectionFailed("no router")], "no router; nothing was done"),
    ],
)
def test_a_change_that_fails_after_some_priorities_says_how_many(
    monkeypatch: pytest.MonkeyPatch, answers: list[object], says: str
) -> None:
    async def read(_: web.Request, of: type[Any]) -> object:
        return of()

    monkeypatch.setattr(changes, "read_body", read)
    request = SimpleNamespace(match_info={"queue": "mail"}, query={})
    handlers = changes.ChangeHandlers(after(*answers), cast("Any", None), Config)

    with pytest.raises((FailedLater, ConnectionFailed)) as raised:
        asyncio.run(handlers.retry_jobs(cast("web.Request", request)))

    problem = problem_of(raised.value)
    assert problem is not None
    assert problem.detail.endswith(says)


@pytest.mark.parametrize("existed", [False, True])
def test_a_job_that_was_stored_is_not_denied(tmp_path: Path, *, existed: bool) -> None:
    stored = EnqueueWithOptionsResult(["mail:s1:p1:1"], [existed])
    jobs = JobHandlers(after(stored, ConnectionFailed("no router")), JobTypes(tmp_path, Config()))
    type_: JobType = made_type("mail")

    with pytest.raises(FailedLater, match="the job was there before" if existed else "was stored"):
        asyncio.run(jobs._store(type_, b"1", None, JobOptions("job_1", key_of_all_queues=True)))


# --- real faults ------------------------------------------------------------------------------


def _claimed_on(api: HttpClient, queue: str, shard: str) -> Mapping[str, str]:
    """Return an ack for a job of a queue that a shard has."""
    api.put(f"/v2/queues/{queue}")
    while True:
        api.post(f"/v2/queues/{queue}/jobs", {"data": 1})
        for job in claim(api, f"/v2/queues/{queue}"):
            if f":s{shard}:" in job["descriptor"]:
                return {key: job[key] for key in ("descriptor", "claim")}


def test_what_was_done_while_a_shard_is_down(tmp_path: Path) -> None:
    with serving_http(tmp_path, shards=2, request_timeout_ms=8_000) as deployment:
        api = http_of(deployment)
        here, there = _claimed_on(api, "here", "1"), _claimed_on(api, "there", "2")
        deployment.supervisorctl("stop", "shard-2")
        renewed = api.post("/v2/jobs/checkpoints", {"checkpoints": [there, here]})
        acked = api.post("/v2/jobs/acks", {"succeeded": [here], "failed": [there]})
        alone = api.post("/v2/jobs/acks", {"succeeded": [there]})
        created = api.put("/v2/queues/made")
        paused = api.post("/v2/queues/here/pause")
        deleted = api.post("/v2/queues/here/delete", {"state": "succeeded"})
        names = api.get("/v2/queues").body["queues"]

    for answer in (renewed, acked, alone, created, paused, deleted):
        assert (answer.status, answer.body["code"]) == (503, "SHARD_CONNECTION_FAILED")
        assert answer.headers["Retry-After"]
        assert "shard 2" in answer.body["detail"]
    assert [each["outcome"] for each in renewed.body["checkpoints"]] == [None, "done"]
    assert [each["outcome"] for each in acked.body["succeeded"]] == ["done"]
    assert [each["outcome"] for each in acked.body["failed"]] == [None]
    assert "succeeded" not in alone.body
    assert created.body["detail"].endswith("; the queue was created")
    for answer in (paused, deleted):
        assert "; nothing was done" in answer.body["detail"]
    assert {"name": "made"} in names


def test_a_guesser_delays_no_other_address(tmp_path: Path, wait_until: WaitUntil) -> None:
    """Each wrong password of an address has to wait for a second after the one before."""
    password = f'"{hash_password(OPEN)}"'
    with serving_http(
        tmp_path, admin_password_hash=password, request_timeout_ms=10_000
    ) as deployment:
        api, log_file = http_of(deployment), deployment.folder / "run/log/http.log"
        api.put("/v2/queues/mail")
        statuses = list[int]()
        guesses = [
            threading.Thread(target=lambda: statuses.append(_delete_from("127.0.0.2", api.port)))
            for _ in range(15)
        ]
        for guess in guesses:
            guess.start()
        refused = "refused: DELETE /v2/queues/mail from 127.0.0.2: the password is not"
        wait_until(lambda: refused in log_file.read_text())
        deleted = api.delete("/v2/queues/mail", headers={"X-Admin-Password": OPEN})
        in_time = len(statuses)
        for guess in guesses:
            guess.join()
        wait_until(lambda: "deleted: queue 'mail' from 127.0.0.1" in log_file.read_text())

    assert deleted.status == 204
    assert in_time < len(guesses), "it had not to wait for them"
    assert set(statuses) == {403, 503}
    assert OPEN not in log_file.read_text()


def _delete_from(address: str, port: int) -> int:
    connection = http.client.HTTPConnection(
        "127.0.0.1", port, timeout=CALL_SECONDS, source_address=(address, 0)
    )
    connection.request("DELETE", "/v2/queues/mail", headers={"X-Admin-Password": "guess"})
    answer = connection.getresponse()
    assert json.loads(answer.read())["code"] in ("PASSWORD_INVALID", "OVERLOADED")
    connection.close()
    return answer.status
