"""A client and a downstream of Rickover, as a process on the clients' machine.

    python -m tests.cluster.rickover --jobs 200 --listen HOST:PORT --type NAME URL...

Each job is enqueued twice, on different servers, until one takes it; the downstream works for a
moment, and reports to any server that answers. It prints `half` once half of the jobs have ended,
and at last what came of them, as JSON: states by id, how many ran at a time at most, and each
attempt that was received.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from tests.push.downstream import Received, Reply, downstream

_WORK_SECONDS = 0.02
_ANSWER_SECONDS = 3.0
_AGAIN_SECONDS = 0.1
_END_SECONDS = 120.0
_ENDED = frozenset({"succeeded", "failed", "expired"})


class Api:
    """Rickover's interface, on whichever server answers."""

    def __init__(self, urls: Sequence[str], until: float) -> None:
        self._urls = list(urls)
        self._until = until

    def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Call servers in turn until one carries it out, or says why it never will."""
        urls = random.sample(self._urls, len(self._urls))
        sent = None if body is None else json.dumps(body).encode()
        while time.monotonic() < self._until:
            request = urllib.request.Request(urls[0] + path, sent, method=method)
            urls = [*urls[1:], urls[0]]
            try:
                with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
                    return answer.status, json.loads(answer.read() or b"null")
            except urllib.error.HTTPError as error:
                if error.code < HTTPStatus.INTERNAL_SERVER_ERROR:
                    return error.code, json.loads(error.read())
            except OSError:
                pass
            time.sleep(_AGAIN_SECONDS)
        raise TimeoutError(f"no server has carried out {method} {path}")


class Run:
    """One run of both."""

    def __init__(self, api: Api, job_type: str, jobs: int) -> None:
        self._api = api
        self._path = f"/v1/jobs/{job_type}/"
        self._ids = [f"job_{uuid.uuid4()}" for _ in range(jobs)]
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._reports = ThreadPoolExecutor(32)
        self._reported: set[str] = set()
        self.most_at_once = 0
        self.received: list[tuple[str, int]] = []  # ids, and the attempts that were left

    def take(self, received: Received) -> Reply:
        """Take a job over, and report that it has ended a moment later."""
        job_id, attempts = received.path.rpartition("/")[2], received.body["attempts"]
        with self._lock:
            self.received.append((job_id, attempts))
            self._running[job_id] += 1
            self.most_at_once = max(self.most_at_once, self._running.total())
        self._reports.submit(self._work, job_id, attempts)
        return Reply(202, {})

    def _work(self, job_id: str, attempts: int) -> None:
        time.sleep(_WORK_SECONDS)
        with self._lock:
            self._running[job_id] -= 1
        self._api.call("POST", self._path + job_id, {"status": "succeeded", "attempt": attempts})
        with self._lock:
            self._reported.add(job_id)
            if len(self._reported) == len(self._ids) // 2:
                _tell("half")

    def enqueue(self) -> None:
        """Enqueue each job twice."""
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(self._enqueue, [*self._ids, *self._ids]))

    def _enqueue(self, job_id: str) -> None:
        status, answer = self._api.call("PUT", self._path + job_id, {"data": job_id})
        if status != HTTPStatus.ACCEPTED and answer["id"] != "job_already_archived":
            raise AssertionError(answer)

    def states(self) -> Mapping[str, str]:
        """Wait until all jobs have ended; return how, by id."""
        with ThreadPoolExecutor(4) as threads:
            return dict(zip(self._ids, threads.map(self._state, self._ids), strict=True))

    def _state(self, job_id: str) -> str:
        while True:
            state: str = self._api.call("GET", self._path + job_id)[1]["status"]
            if state in _ENDED:
                return state
            time.sleep(_AGAIN_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--type", required=True)
    parser.add_argument("urls", nargs="+")
    given = parser.parse_args()
    host, _, port = given.listen.rpartition(":")
    run = Run(Api(given.urls, time.monotonic() + _END_SECONDS), given.type, given.jobs)
    with downstream(run.take, port=int(port), host=host):
        run.enqueue()
        states = run.states()
    found = {"states": states, "most_at_once": run.most_at_once, "received": run.received}
    _tell(json.dumps(found))


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
