"""Enqueues of a job a line."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import zlib
from collections.abc import Iterable, Iterator

import psutil
import pytest

from tests.deployment import CALL_SECONDS, COMMAND_SECONDS, Deployment
from tests.http.conftest import HttpAnswer, HttpClient, http_of, serving_http

LINES = {"Content-Type": "application/x-ndjson"}
MANY = 60_000


def _send(api: HttpClient, path: str, lines: Iterable[object]) -> HttpAnswer:
    """Send all lines, then read all answers."""
    given = (one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines)
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=CALL_SECONDS)
    try:
        body = (line + b"\n" for line in given)
        connection.request("POST", f"{path}/jobs", body, LINES, encode_chunked=True)
        answer = connection.getresponse()
        received = [json.loads(line) for line in answer.read().splitlines()]
    finally:
        connection.close()
    return HttpAnswer(answer.status, dict(answer.headers), received)


def _stream(api: HttpClient, path: str, length: str) -> socket.socket:
    """A connection on which lines may follow. `length`: the header that says how many."""
    client = socket.create_connection(("127.0.0.1", api.port), timeout=CALL_SECONDS)
    head = f"POST {path}/jobs HTTP/1.1\r\nHost: localhost\r\n{length}\r\n"
    client.sendall(f"{head}Content-Type: {LINES['Content-Type']}\r\n\r\n".encode())
    return client


def _jobs(number: int) -> Iterator[dict[str, int]]:
    return ({"data": n} for n in range(number))


def test_each_line_is_answered_in_order(api, mail):
    answer = _send(api, mail, [*_jobs(3), b"", {"data": 3, "priority": 2}])

    assert answer.status == 201
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    found = [api.get(f"/v2/jobs/{line['descriptor']}").body["data"] for line in answer.body]
    assert found == [0, 1, 2, 3]
    assert {line["existed"] for line in answer.body} == {False}


def test_lines_are_answered_while_more_come(api, mail):
    with _stream(api, mail, "Transfer-Encoding: chunked") as client:
        received = client.makefile("rb")
        for n in range(3):
            client.sendall(b'c\r\n{"data": %d}\n\r\n' % n)
            assert any(b"descriptor" in line for line in iter(received.readline, b""))
            assert api.get(mail).body["counts"]["pending"] == n + 1
        client.sendall(b"0\r\n\r\n")


def test_a_client_that_reads_late_loses_no_answer_and_takes_no_memory(
    api, mail, http_service: Deployment
):
    process = psutil.Process(http_service.pid_of("http"))
    before = process.memory_info().rss

    answer = _send(api, mail, _jobs(MANY))

    assert len({line["descriptor"] for line in answer.body}) == MANY
    assert api.get(mail).body["counts"]["pending"] == MANY
    assert process.memory_info().rss - before < 25_000_000


def test_a_mistake_ends_the_stream_and_says_what_was_stored(api, mail):
    answer = _send(api, mail, [*_jobs(2), b"", {"data": 1, "priority": "x"}, *_jobs(5)])

    *stored, last = answer.body
    assert (answer.status, len(stored)) == (201, 2)
    assert (last["code"], last["stored"], last["line"]) == ("INVALID_REQUEST", 2, 4)
    assert last["errors"][0]["field"] == "priority"
    assert last["detail"].startswith("line 4: ")
    assert api.get(mail).body["counts"]["pending"] == 2


@pytest.mark.parametrize(
    ("wrong", "code", "field"),
    [
        ({"data": 1, "priority": 9}, "PRIORITY_NOT_SUPPORTED", "priority"),
        ({"data": "x" * 2**20}, "ENQUEUE_REJECTED", "data"),
    ],
)
def test_jobs_before_one_beyond_the_limits_are_stored(api, mail, wrong, code, field):
    answer = _send(api, mail, [*_jobs(2), wrong, *_jobs(1)])

    *stored, last = answer.body
    assert len(stored) == last["stored"] == api.get(mail).body["counts"]["pending"] == 2
    assert (last["line"], last["code"], last["errors"][0]["field"]) == (3, code, field)


def test_a_mistake_in_the_first_line_is_a_problem(api, mail):
    answer = _send(api, mail, [b'{"data": "\xff"}'])

    assert answer.status == 400
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert (answer.body[0]["stored"], answer.body[0]["line"]) == (0, 1)


def test_a_refusal_of_the_service_says_what_was_stored(api, mail, wait_until):
    answers: list[HttpAnswer] = []

    def is_refused() -> bool:
        answers.append(_send(api, mail, _jobs(1500)))
        return "OVERLOADED" in answers[-1].body[-1].values()

    api.put(mail, {"limits": {"max_pending": 1000}})
    wait_until(is_refused)
    unknown = _send(api, "/v2/queues/nowhere", _jobs(1))

    assert answers[-1].body[-1]["stored"] == len(answers[-1].body) - 1
    assert ("which were stored" in answers[-1].body[-1]["detail"]) is (len(answers[-1].body) > 1)
    stored = [line for answer in answers for line in answer.body if "descriptor" in line]
    assert api.get(mail).body["counts"]["pending"] == len(stored)
    assert (unknown.status, unknown.body[0]["code"]) == (404, "QUEUE_NOT_FOUND")


def test_a_line_without_end_is_refused(api, mail):
    with _stream(api, mail, "Content-Length: 20000000") as client:
        client.sendall(b"x" * 20_000_000)
        answer = http.client.HTTPResponse(client)
        answer.begin()

        assert (answer.status, json.loads(answer.read())["code"]) == (413, "TOO_LARGE")


@pytest.mark.parametrize("lines", [0, 2])
def test_a_compressed_body_that_is_cut_at_the_end_of_a_line_is_refused(api, mail, lines):
    packed = zlib.compressobj(wbits=31)
    body = packed.compress(b'{"data": 1}\n' * lines) + packed.flush(zlib.Z_SYNC_FLUSH)

    headers = {**LINES, "Content-Encoding": "gzip"}
    answer = api.call("POST", f"{mail}/jobs", body, headers=headers, raw=True)

    *stored, last = [json.loads(line) for line in answer.body.splitlines()]
    assert answer.status == (201 if lines else 400)
    assert (last["status"], last["code"], last["stored"]) == (400, "INVALID_REQUEST", lines)
    assert len(stored) == lines == api.get(mail).body["counts"]["pending"]


def test_a_restart_ends_the_stream_with_what_was_stored(tmp_path):
    with serving_http(tmp_path / "d") as deployment:
        api = http_of(deployment)
        api.put("/v2/queues/mail")
        with _stream(api, "/v2/queues/mail", "Transfer-Encoding: chunked") as client:
            received: list[bytes] = []
            reader = threading.Thread(target=lambda: received.extend(client.makefile("rb")))
            reader.start()
            restart = deployment.start_admin("restart", "http")
            while reader.is_alive():
                with contextlib.suppress(OSError):
                    client.sendall(b'c\r\n{"data": 1}\n\r\n')
                reader.join(0.01)
        assert restart.wait(COMMAND_SECONDS) == 0
        pending = api.get("/v2/queues/mail").body["counts"]["pending"]

    *stored, last = [json.loads(line) for line in received if line.startswith(b"{")]
    assert (last["code"], last["stored"]) == ("UNAVAILABLE", len(stored))
    assert pending == len(stored)
