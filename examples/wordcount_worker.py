#!/usr/bin/env python3
"""A worker: reads the file that a job names, counts its lines and words.

    python examples/wordcount_worker.py --queue files

The figures go into the job's custom status, where `pinlater lookup` shows them:
`lines=120 words=431 begun_ms=1763694000123`. Stop it with Ctrl-C or SIGTERM: it finishes what it
has begun. Start as many as you like, on any machine that reaches the service.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

from pinlaterd.client import Client, Handlers, Retry, RunningJob, Worker

RETRY_DELAY_SECONDS = 2.0


def count_words(job: RunningJob) -> str:
    """The handler: what it returns is appended to the job's custom status."""
    begun_ms = time.time_ns() // 1_000_000
    content = Path(os.fsdecode(job.body)).read_bytes()
    lines = content.count(b"\n")
    words = len(content.split())
    return f"lines={lines} words={words} begun_ms={begun_ms}"


def flaky(job: RunningJob, fail_first: str) -> str:
    """`count_words`, but the first attempt at a file called `fail_first` fails."""
    if job.attempt == 1 and Path(os.fsdecode(job.body)).name == fail_first:
        raise Retry(RETRY_DELAY_SECONDS, status="failed on purpose; ")
    return count_words(job)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the words of files that jobs name.")
    parser.add_argument("--host", nargs="+", default=["127.0.0.1"])
    parser.add_argument("--port", type=int, default=9010)
    parser.add_argument("--queue", default="files")
    parser.add_argument("--fail-first", default="", metavar="NAME", help="to see a retry")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")

    handlers = Handlers()

    @handlers.queue(options.queue, concurrency=4)
    def count(job: RunningJob) -> str:
        return flaky(job, options.fail_first)

    with Client(options.host, options.port, source=f"wordcount:{os.getpid()}") as client:
        Worker(client, handlers, max_wait_ms=1000).run()  # until SIGTERM or SIGINT


if __name__ == "__main__":
    main()
