"""A worker in a process of its own, for tests to kill: `worker_program.py PORT QUEUE LOG GRACE`.

Notes each job that it begins as a line in LOG. A job called `hang` never ends.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from pinlaterd.client import Client, Handlers, RunningJob, Worker


def main(port: str, queue: str, log: str, grace_seconds: str) -> None:
    handlers = Handlers()
    with Path(log).open("ab", buffering=0) as begun:

        @handlers.queue(queue, concurrency=4)
        def handle(job: RunningJob) -> None:
            begun.write(job.body + b"\n")
            if job.body == b"hang":
                threading.Event().wait()
            time.sleep(0.001)

        client = Client(port=int(port), source="worker_program")
        Worker(client, handlers, max_wait_ms=200, grace_seconds=float(grace_seconds)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
