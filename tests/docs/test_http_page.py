"""docs/http.md and docs/rickover.md do not promise what does not work: their commands are run, from
top to bottom."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path

from tests.deployment import MOST_PATIENT, Deployment, unused_port
from tests.docs.pages import REPOSITORY, python_blocks
from tests.http.conftest import http_of, serving_http


def _commands(page: str = "http.md") -> list[str]:
    """All command lines of the page; one may go on in the next line."""
    text = (REPOSITORY / "docs" / page).read_text("utf-8")
    lines = re.findall(r"^    (\S.*?(?:\|\n {8}.*)?)$", text, re.MULTILINE)
    programs = ("api=", "id=", "curl", "printf", "pinlater-admin", "seq")
    return [line for line in lines if line.startswith(programs)]


def _run(deployment: Deployment, line: str) -> str:
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=deployment.folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    assert "about:blank" not in done.stdout, f"{line}: {done.stdout}"
    return done.stdout


def test_the_commands_of_the_page_work(tmp_path, program_path, wait_until):
    program_path("curl", debian_package="curl")
    begin, *lines = _commands()
    said: dict[str, str] = {}
    with serving_http(tmp_path / "d") as deployment:
        here = begin.replace("9013", str(deployment.http_port))
        names = {"seq 1000000": "seq 1000"}
        for written in lines:
            line = reduce(lambda text, name: text.replace(*name), names.items(), written)
            said[line] = _run(deployment, f"{here}; {line}")
            if "/claims" in line:
                [job] = json.loads(said[line])["jobs"]
                names |= {"DESCRIPTOR": job["descriptor"], "CLAIM": job["claim"]}
            if "--token" in line:
                names["TOKEN"] = said[line].split()[-1]

    def answer(words: str) -> str:
        [found] = [text for line, text in said.items() if words in line]
        return found

    assert json.loads(answer("/acks"))["succeeded"][0]["outcome"] == "done"
    assert json.loads(answer("/jobs/mail:"))["state"] == "succeeded"
    assert len(json.loads(answer("?key="))["jobs"]) == 1
    assert len(answer("seq").splitlines()) == 1000


def test_the_commands_of_rickovers_page_work(tmp_path, program_path):
    program_path("curl", debian_package="curl")
    assignments, said = "", {}
    with serving_http(tmp_path / "d") as deployment:
        for line in _commands("rickover.md"):
            if line.startswith(("api=", "id=")):
                assignments += line.replace("9013", str(deployment.http_port)) + "; "
                # Random once, not with each of the lines that use it.
                id_ = _run(deployment, f"{assignments} echo $id").strip()
                assignments = re.sub(r"id=job_\S.*; ", f"id={id_}; ", assignments)
            else:
                said[line] = _run(deployment, assignments + line)

    assert all('"title"' not in text for text in said.values()), said
    assert any('"status":"succeeded"' in text for text in said.values())


def test_the_downstream_of_rickovers_page_runs_a_job(tmp_path, wait_until):
    [program] = python_blocks((REPOSITORY / "docs/rickover.md").read_text("utf-8"))
    port = unused_port()
    url = f"http://127.0.0.1:{port}"
    environment = {"DOWNSTREAM_URL": url, "DOWNSTREAM_WORKER_AUTH": "SECRET"}
    deployment = Deployment(tmp_path / "d", environment=environment)
    deployment.init(http=True, settings=MOST_PATIENT)
    api = http_of(deployment)
    settings = {"API": f"http://127.0.0.1:{deployment.http_port}", "PORT": str(port)}
    downstream = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **settings})
    try:
        with deployment.running():
            strategy = {"delivery_strategy": "at_least_once", "attempts": 7, "concurrency": 3}
            api.post("/v1/jobs", {"name": "invoice-shipped", **strategy})
            job = api.put("/v1/jobs/invoice-shipped/random_id", {"data": {"invoice": 17}}).body
            path = f"/v1/jobs/{job['id']}"
            wait_until(lambda: api.get(path).body["status"] == "succeeded")
    finally:
        downstream.kill()
        downstream.wait()
