"""Enqueues over HTTP beside the same over Thrift: `wrk`, and the load generator, in turn."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path

from benchmarks import frames
from benchmarks.deployment import BenchmarkFailed, Deployment
from benchmarks.load import Outcome
from benchmarks.report import Case, Measurement
from benchmarks.sections import Bench

SECTION = "http"
CONNECTIONS = 64
JOBS_A_CALL = (1, 100)
BODY_BYTES = 200
OVER_HTTP, OVER_THRIFT = "HTTP", "Thrift"
# What wrk runs: the same request again and again, and a line of JSON at the end.
_SCRIPT = """
wrk.method = "POST"
wrk.body = {body!r}
wrk.headers["Content-Type"] = "application/json"
function done(summary, latency)
  local errors = summary.errors
  io.write(string.format('\\n{{"calls": %d, "seconds": %f, "errors": %d}}\\n', summary.requests,
    summary.duration / 1e6, errors.connect + errors.read + errors.status + errors.timeout))
end
"""


def case(what: str, jobs: int) -> Case:
    return Case(SECTION, f"enqueue, {jobs} a call", CONNECTIONS, what)


def http(bench: Bench, run: int) -> None:
    if shutil.which("wrk") is None:
        raise BenchmarkFailed("wrk is needed: apt-get install wrk")
    with Deployment(bench.folder, shards=1, http=True) as service:
        for jobs in JOBS_A_CALL:
            with service.client() as client:
                client.create_queue(f"over_http_{jobs}")
                client.create_queue(f"over_thrift_{jobs}")
            script = partial(frames.enqueue, f"over_thrift_{jobs}", jobs)
            bench.measure(run, case(OVER_THRIFT, jobs), service, script)
            _wrk(bench, service, jobs, bench.warm_up_seconds)
            before = service.usage()
            outcome = _wrk(bench, service, jobs, bench.seconds)
            measured = Measurement.of(case(OVER_HTTP, jobs), run, outcome, before, service.usage())
            bench.report.add(measured)


def _wrk(bench: Bench, service: Deployment, jobs: int, seconds: float) -> Outcome:
    one = {"data": "x" * BODY_BYTES}
    body = json.dumps(one if jobs == 1 else {"jobs": [one] * jobs})
    script = Path(bench.folder, "enqueue.lua")
    script.write_text(_SCRIPT.format(body=body))
    url = f"http://127.0.0.1:{service.http_port}/v2/queues/over_http_{jobs}/jobs"
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}", "-s", str(script)]
    done = subprocess.run([*command, url], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    calls = said["calls"] - said["errors"]
    return Outcome(said["seconds"], calls, calls * jobs, errors=said["errors"])
