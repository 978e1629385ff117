"""Clients that err, go away, or mean harm: each hears what is wrong, and no other one suffers."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import zlib
from http.client import HTTPConnection, HTTPResponse

import pytest

from tests.deployment import CALL_SECONDS, Deployment, frozen
from tests.http.conftest import HttpAnswer, HttpClient, claim, http_of, serving_http

JOBS = 40


def _request(path: str, body: bytes = b"{}") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _connect(api: HttpClient) -> socket.socket:
    return socket.create_connection(("127.0.0.1", api.port), timeout=CALL_SECONDS)


def _enqueue(api: HttpClient, mail: str, number: int = JOBS) -> None:
    api.post(f"{mail}/jobs", {"jobs": [{"data": n} for n in range(number)]})


@pytest.mark.parametrize("body", [b"{}", b'{"wait_ms": 5000}'])
def test_jobs_claimed_for_clients_that_close_at_once_are_pending_again(
    api, mail, body, http_service: Deployment, wait_until
):
    """Each claim is under way, answered, or being written when the end of its client shows; none is
    answered before, since what a client's kernel has acknowledged counts as received."""
    _enqueue(api, mail)
    with frozen(http_service.pid_of("http")):
        for _ in range(JOBS):
            with _connect(api) as gone:
                gone.sendall(_request(f"{mail}/claims", body))

    wait_until(lambda: api.get(mail).body["counts"]["pending"] == JOBS)
    jobs = claim(api, mail, JOBS)
    assert {job["attempts_remaining"] for job in jobs} == {2}


def test_a_claim_that_is_answered_to_a_closed_connection_is_pending_again(
    api, mail, http_service: Deployment, wait_until
):
    """The end of the client comes in together with the answer of the router."""
    _enqueue(api, mail, 1)
    router, http = http_service.pid_of("router"), http_service.pid_of("http")
    with _connect(api) as gone, frozen(router):
        gone.sendall(_request(f"{mail}/claims"))
        api.get("/v3")  # the claim was read by now
        with frozen(http):
            gone.close()
            # The router answers while nobody reads.
            _thaw_until_claimed(http_service, router, mail.rpartition("/")[2], wait_until)

    wait_until(lambda: api.get(mail).body["counts"]["pending"] == 1)


def _thaw_until_claimed(deployment: Deployment, router: int, queue: str, wait_until) -> None:
    import os
    import signal

    from pinlaterd.model import JobState

    os.kill(router, signal.SIGCONT)
    with deployment.client() as client:
        wait_until(lambda: client.count(queue, JobState.IN_PROGRESS) == 1)


def test_a_client_that_reads_its_claim_and_closes_keeps_it(api, mail):
    _enqueue(api, mail)
    claimed = [
        job
        for _ in range(JOBS)
        for job in api.post(
            f"{mail}/claims", {"wait_ms": 30_000}, headers={"Connection": "close"}
        ).body["jobs"]
    ]
    acks = [{"descriptor": job["descriptor"], "claim": job["claim"]} for job in claimed]
    answer = api.post("/v2/jobs/acks", {"succeeded": acks})

    assert [ack["outcome"] for ack in answer.body["succeeded"]] == ["done"] * JOBS


def test_a_body_that_inflates_without_end_is_refused(api, mail):
    bomb = gzip.compress(b'{"data": "' + bytes(64 * 1024 * 1024) + b'"}')

    refused = api.post(f"{mail}/jobs", bomb, headers={"Content-Encoding": "gzip"})

    assert (refused.status, refused.body["code"]) == (413, "TOO_LARGE")


def test_a_compressed_body_is_read_or_refused(api, mail):
    body, large = b'{"data": 1}', b'{"data": "' + b"x" * 900_000 + b'"}'
    raw = zlib.compress(body)[2:-4]
    sent = [
        *(gzip.compress(body), gzip.compress(large), gzip.compress(b"") + gzip.compress(body)),
        *(gzip.compress(body[:4]) + gzip.compress(body[4:]), zlib.compress(body), raw),
    ]

    encodings = ["gzip"] * 4 + ["deflate"] * 2
    for encoding, packed in zip(encodings, sent, strict=True):
        answer = api.post(f"{mail}/jobs", packed, headers={"Content-Encoding": encoding})
        assert answer.status == 201, (encoding, packed[:40])
    for encoding, packed in zip(encodings, sent, strict=True):
        for cut in (packed[:-1], packed[: len(packed) // 2]):
            answer = api.post(f"{mail}/jobs", cut, headers={"Content-Encoding": encoding})
            assert (answer.status, answer.body["code"]) == (400, "INVALID_REQUEST"), packed[:40]


def test_a_body_of_many_empty_streams_is_read(api, mail):
    packed = gzip.compress(b"") * 20_000 + gzip.compress(b'{"data": 1}')

    answer = api.post(f"{mail}/jobs", packed, headers={"Content-Encoding": "gzip"})

    assert answer.status == 201


def test_a_body_that_is_announced_too_large_is_refused_at_once(api, mail):
    with _connect(api) as client:
        client.sendall(_request(f"{mail}/jobs").replace(b"Length: 2", b"Length: 999999999"))
        answer = HTTPResponse(client)
        answer.begin()

        problem = answer.read()

    assert b"TOO_LARGE" in problem
    assert b"size 16777216 exceeded" in problem
    assert b"max_http_body_bytes" in problem


def test_a_request_of_rickovers_interface_that_is_too_large_is_told_as_it_does(api):
    with _connect(api) as client:
        client.sendall(_request("/v1/jobs").replace(b"Length: 2", b"Length: 999999999"))
        answer = HTTPResponse(client)
        answer.begin()
        error = json.loads(answer.read())

    assert (answer.status, error["id"]) == (413, "entity_too_large")
    assert error.keys() == {"id", "title"}


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"NO\r\n\r\n", "Invalid method encountered"),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 9000 + b"\r\n\r\n", "more than 8190 bytes"),
        (b"GET / HTTP/1.1\r\nA\xff: 1\r\n\r\n", "Invalid header token"),
        (_request("/v2/queues").replace(b"Length: 2", b"Length: x"), "Content-Length"),
        (_request("/").replace(b"Content-Length: 2", b"Transfer-Encoding: chunked"), "chunk size"),
    ],
)
def test_what_is_no_http_is_refused_as_a_problem(api, sent, why):
    with _connect(api) as client:
        client.sendall(sent)
        answer = HTTPResponse(client)
        answer.begin()
        problem = json.loads(answer.read())

    assert answer.headers["Content-Type"] == "application/problem+json"
    assert (answer.status, problem["status"], problem["code"]) == (400, 400, "INVALID_REQUEST")
    assert why in problem["detail"]
    assert "xxx" not in problem["detail"]


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1"])
def test_web_pages_of_others_can_do_nothing(api, mail, origin):
    """A page may post a body that looks like a form's to any address, and never sees the answer."""
    headers = {"Origin": origin, "Content-Type": "text/plain"}

    refused = api.post(f"{mail}/jobs", {"data": 1}, headers=headers)
    own = api.post(f"{mail}/jobs", {"data": 1}, headers={"Origin": f"http://127.0.0.1:{api.port}"})

    assert (refused.status, refused.body["code"]) == (403, "FORBIDDEN")
    assert own.status == 201


def test_a_name_that_is_not_ours_is_told_as_a_problem(api):
    answer = api.call("GET", "/v2/queues", headers={"Host": "evil.example"})

    assert (answer.status, answer.body["code"]) == (421, "INVALID_REQUEST")
    assert "http_hosts" in answer.body["detail"]


@pytest.mark.parametrize("more", [{"data": 2}, {"priority": 2}])
def test_fields_beside_a_list_of_jobs_are_refused(api, mail, more):
    answer = api.post(f"{mail}/jobs", {"jobs": [{"data": 1}], **more})

    assert answer.status == 400
    assert api.get(mail).body["counts"]["pending"] == 0


@pytest.mark.parametrize("field", ["limit", "wait_ms"])
@pytest.mark.parametrize("number", ["1e400", "-1", str(2**31), str(2**63), "1.5"])
def test_absurd_numbers_are_named(api, mail, field, number):
    answer = api.post(f"{mail}/claims", f'{{"{field}": {number}}}'.encode())

    assert (answer.status, answer.body["code"]) == (400, "INVALID_REQUEST")
    assert answer.body["errors"][0]["field"] == field


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/retry?preview=true&preview=false", "preview"),
        ("/pause?preview=false&preview=true", "preview"),
        ("/claims?limit=3", "limit"),
        ("/jobs?key=order-17", "key"),
        ("/retry?preview=%FF", ""),
    ],
)
def test_parameters_that_would_be_ignored_or_misread_are_refused(api, mail, path, field):
    answer = api.post(f"{mail}{path}", {"data": 1} if path.startswith("/jobs") else {})

    assert answer.status == 400
    assert [error["field"] for error in answer.body["errors"]] == [field]
    described = api.get(mail).body
    assert (described["paused"], described["counts"]["pending"]) == (False, 0)


def test_two_keys_for_one_job_are_refused(api, mail):
    connection = HTTPConnection("127.0.0.1", api.port, timeout=CALL_SECONDS)
    connection.putrequest("POST", f"{mail}/jobs")
    for key in ("order-1", "order-2"):
        connection.putheader("Idempotency-Key", key)
    connection.putheader("Content-Length", "10")
    connection.endheaders(b'{"data":1}')
    answer = connection.getresponse()
    problem = json.loads(answer.read())
    connection.close()

    assert (answer.status, problem["errors"][0]["field"]) == (400, "Idempotency-Key")
    assert api.get(mail).body["counts"]["pending"] == 0


def test_acks_of_a_deleted_queue_do_not_hide_the_outcomes_of_others(api, mail):
    api.post(f"{mail}/jobs", {"jobs": [{"data": 1}, {"data": 2}]})
    first, second = (
        {key: job[key] for key in ("descriptor", "claim")} for job in claim(api, mail, 2)
    )
    lost = {"descriptor": "nowhere:s1:p1:1", "claim": first["claim"]}

    acked = api.post(
        "/v2/jobs/acks",
        {"succeeded": [lost, first], "failed": [lost | {"descriptor": "nowhere:s1:p1:2"}]},
    )
    renewed = api.post("/v2/jobs/checkpoints", {"checkpoints": [second, lost]})
    only_lost = api.post("/v2/jobs/acks", {"succeeded": [lost]})

    assert [each["outcome"] for each in acked.body["succeeded"]] == ["stale", "done"]
    assert [each["outcome"] for each in acked.body["failed"]] == ["stale"]
    assert [each["outcome"] for each in renewed.body["checkpoints"]] == ["done", "stale"]
    assert (only_lost.status, only_lost.body["code"]) == (404, "QUEUE_NOT_FOUND")


def test_a_job_that_is_named_twice_changes_none_of_any_queue(api, mail):
    other = f"{mail}_b"
    api.put(other)
    for path in (mail, other):
        api.post(f"{path}/jobs", {"data": 1})
    [mine], [others] = claim(api, mail), claim(api, other)
    first, second = ({key: job[key] for key in ("descriptor", "claim")} for job in (mine, others))

    answer = api.post("/v2/jobs/acks", {"succeeded": [second, first], "failed": [first]})

    assert (answer.status, answer.body["errors"][0]["field"]) == (400, "failed[0].descriptor")
    assert [api.get(path).body["counts"]["in_progress"] for path in (mail, other)] == [1, 1]


def test_a_reason_that_cannot_be_noted_is_named(api, mail):
    answer = api.post(f"{mail}/pause", {"reason": "seen \u202e backwards"})

    assert (answer.status, answer.body["errors"][0]["field"]) == (400, "reason")


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "x-gzip", "gzip"])
def test_a_body_that_cannot_be_inflated_says_so(api, mail, encoding):
    answer = api.call("POST", f"{mail}/jobs", b'{"data":1}', headers={"Content-Encoding": encoding})

    assert answer.status == 400
    assert "encoding" in answer.body["detail"].lower()
    assert not any(alien in answer.body["detail"] for alien in ("\n", "install", "message:"))


def test_half_a_surrogate_pair_is_not_reported_as_a_cut_body(api, mail):
    answer = api.post(f"{mail}/jobs", b'{"data": "\\ud800"}')

    assert answer.status == 400
    assert "surrogate" in answer.body["detail"]


def test_limits_that_cannot_be_kept_leave_a_queue_that_is_reported(tmp_path):
    with serving_http(tmp_path) as deployment:
        api = http_of(deployment)
        (tmp_path / "etc" / "queues.yaml").write_text("queues: 3\n")
        first, again = (api.put("/v2/queues/new", {"limits": {"max_pending": 1}}) for _ in range(2))
        shown = api.get("/v2/queues/new")

    assert (first.status, again.status, shown.status) == (409, 409, 200)
    assert "the queue is there now, without limits" in first.body["detail"]
    assert "the queue is there now" not in again.body["detail"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory):
    with serving_http(tmp_path_factory.mktemp("hostile")) as deployment:
        api = http_of(deployment)
        for queue in ("mail", "other"):
            api.put(f"/v2/queues/{queue}")
        command = ("user", "add", "ada", "--role", "view", "--queue", "mail", "--password-stdin")
        deployment.admin(*command, stdin="geheim-äöü")
        yield deployment


@pytest.mark.parametrize("credentials", ["Basic ÿþ", "Basic ä", "Bearer ÿ", "Basic", "Bearer", "x"])
def test_credentials_of_any_bytes_are_refused(guarded, credentials):
    headers = {"Authorization": credentials}

    answer = http_of(guarded).call("GET", "/v2/queues", headers=headers)

    assert (answer.status, answer.body["code"]) == (401, "UNAUTHORIZED")


def test_a_user_sees_the_names_of_its_queues_only(guarded, wait_until):
    api = http_of(guarded).as_user("ada", "geheim-äöü")

    wait_until(lambda: api.get("/v2/queues").status == 200)
    assert api.get("/v2/queues").body["queues"] == [{"name": "mail"}]


def test_guesses_made_at_once_are_slowed_down_as_others(guarded):
    api = http_of(guarded)
    found: list[HttpAnswer] = []
    guesses = [
        threading.Thread(
            target=lambda n=n: found.append(api.as_user("ada", f"guess {n}").get("/v2/queues"))
        )
        for n in range(30)
    ]
    for guess in guesses:
        guess.start()
    for guess in guesses:
        guess.join()

    checked = [answer for answer in found if answer.status == 401]
    assert len(found) == 30
    assert len(checked) <= 6  # two are checked at a time
