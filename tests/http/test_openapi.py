"""The description of the interface, and whether the interface is as it says."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.http.conftest import http_of, serving_http

EXAMPLES = 20  # of requests for each call and check


def test_the_description_names_every_call(api):
    answer = api.get("/v2/openapi.json")
    page = api.get("/v2/docs")

    assert answer.body["openapi"] == "3.1.0"
    operations = {(method, path) for path, each in answer.body["paths"].items() for method in each}
    assert ("post", "/v2/queues/{queue}/jobs") in operations
    assert ("get", "/v2/job-types/{name}") in operations
    assert len(operations) >= 16
    text = page.body.decode()
    assert all(f"{method.upper()} {path}" in text for method, path in operations)
    assert not re.search(r"(?:src|href)=.(?:https?:)?//", text)  # nothing from elsewhere


def test_the_description_has_the_methods_of_each_path(api):
    paths = api.get("/v2/openapi.json").body["paths"]
    for path in paths:
        sent = re.sub(r"{\w+}", "x", path)
        is_rickovers = path.startswith("/v2/job-types")
        refused, options = api.call("TRACE", sent), api.call("OPTIONS", sent)

        matching = [each for each in paths if re.fullmatch(re.sub(r"{\w+}", "[^/]+", each), sent)]
        described = {method for each in matching for method in paths[each]}
        allow = (options if is_rickovers else refused).headers["Allow"]
        allowed = set(allow.lower().split(", ")) - {"head", "options"}
        assert (refused.status, allowed) == (405, described), path
        assert ("Allow" in refused.headers) is not is_rickovers


def test_the_description_names_the_headers_of_requests_and_answers(api):
    paths = api.get("/v2/openapi.json").body["paths"]

    def sent(method: str, path: str) -> list[str]:
        parameters = paths[path][method]["parameters"]
        return [each["name"] for each in parameters if each["in"] == "header"]

    assert sent("post", "/v2/queues/{queue}/jobs") == ["Idempotency-Key"]
    assert sent("delete", "/v2/queues/{queue}") == ["X-Admin-Password"]
    assert sent("get", "/v2/queues/{queue}") == ["If-None-Match"]
    described = paths["/v2/queues/{queue}"]["get"]["responses"]
    for status, header in (("200", "ETag"), ("304", "ETag"), ("503", "Retry-After")):
        assert [*described[status]["headers"]] == [header]


def test_no_request_finds_an_undocumented_answer(tmp_path):
    with serving_http(tmp_path / "d", max_dequeue_wait_ms=100) as deployment:
        http_of(deployment).put("/v2/queues/mail")
        address = f"http://127.0.0.1:{deployment.http_port}"
        # No call describes a 500; 503 is right where a request has set max_pending to 0.
        checks = (
            "status_code_conformance,content_type_conformance,"
            "response_headers_conformance,response_schema_conformance"
        )
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{address}/v2/openapi.json"),
                *("--checks", checks, "--max-examples", str(EXAMPLES), "--seed", "1"),
                *("--request-timeout", "30", "--no-color", "--exclude-path", "/v2/docs"),
                *("--suppress-health-check", "too_slow"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
