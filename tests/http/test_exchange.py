"""What every answer of the interface has in common: compression, tags, HEAD, pages of others."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.http.conftest import http_of, serving_http

PAGE = "https://jobs.example.com"


def _large(api, mail) -> str:
    api.post(f"{mail}/jobs", {"jobs": [{"data": "x" * 200} for _ in range(50)]})
    return f"{mail}/jobs?state=pending"


@pytest.mark.parametrize("takes", ["gzip", "br, gzip;q=0.5"])
def test_a_large_answer_is_compressed_for_those_who_take_it(api, mail, takes):
    path = _large(api, mail)
    plain = api.get(path)
    packed = api.call("GET", path, headers={"Accept-Encoding": takes, "Accept": "*/*"}, raw=True)

    assert packed.headers["Content-Encoding"] == "gzip"
    assert len(packed.body) < 5_000
    assert json.loads(gzip.decompress(packed.body)) == plain.body
    assert "Content-Encoding" not in plain.headers


@pytest.mark.parametrize("takes", ["gzip;q=0", "identity", "br"])
def test_an_answer_is_sent_as_it_is_to_others(api, mail, takes):
    answer = api.call("GET", _large(api, mail), headers={"Accept-Encoding": takes})

    assert "Content-Encoding" not in answer.headers
    assert answer.headers["Vary"] == "Accept-Encoding"


def test_who_knows_an_answer_is_not_sent_it_again(api, mail):
    descriptor = api.post(f"{mail}/jobs", {"data": 1}).body["descriptor"]
    for path in (mail, f"{mail}/jobs", f"/v2/jobs/{descriptor}"):
        known = {"If-None-Match": api.get(path).headers["ETag"]}
        again = api.call("GET", path, headers=known)
        assert (again.status, again.body) == (304, b"")
        assert again.headers["ETag"] == known["If-None-Match"]
    api.post(f"{mail}/jobs", {"data": 2})
    changed = api.call("GET", f"{mail}/jobs", headers=known)

    assert (changed.status, len(changed.body["jobs"])) == (200, 2)


def test_head_is_get_without_the_body(api, mail):
    head, get = api.call("HEAD", mail), api.get(mail)

    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == get.headers["Content-Length"]
    assert head.headers["ETag"] == get.headers["ETag"]


def test_pages_of_other_origins_may_call_once_that_is_configured(tmp_path, wait_until):
    asks = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, idempotency-key",
    }
    with serving_http(tmp_path / "d") as deployment:
        api = http_of(deployment)
        off = api.call("OPTIONS", "/v2/queues", headers=asks)
        with (deployment.folder / "etc/pinlaterd.yaml").open("a") as file:
            file.write(f"http_cors_origins: http://localhost:3000,{PAGE}\n")
        wait_until(lambda: api.call("OPTIONS", "/v2/queues", headers=asks).status == 204)
        on = api.call("OPTIONS", "/v2/queues/mail", headers=asks)
        made = api.call("PUT", "/v2/queues/mail", headers={"Origin": PAGE})
        error = api.call("GET", "/v2/queues/nowhere", headers={"Origin": PAGE})
        other = api.call("PUT", "/v2/queues/mail", headers={"Origin": "https://evil.example"})

    assert "Access-Control-Allow-Origin" not in off.headers
    assert "idempotency-key" in on.headers["Access-Control-Allow-Headers"].lower()
    assert (made.status, error.status, other.status) == (201, 404, 403)
    for answer in (on, made, error):
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    assert "Access-Control-Allow-Origin" not in other.headers
