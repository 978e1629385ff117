#!/usr/bin/env python3
"""A producer: enqueues a job for every file that it is given; the path is the body.

    python examples/wordcount_producer.py --queue files /etc/*.conf
    python examples/wordcount_producer.py --queue files --delay-seconds 60 report.txt

Prints the descriptors, one a line, for `pinlater lookup --job-descriptor`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from pinlaterd.client import Client, ConnectionFailed, Job


def main() -> int:
    parser = argparse.ArgumentParser(description="Enqueue a job for every file.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9010)
    parser.add_argument("--queue", default="files")
    parser.add_argument("--delay-seconds", type=float, default=0.0)
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()

    run_after_ms = round((time.time() + options.delay_seconds) * 1000)
    jobs = [
        Job(os.fsencode(Path(file).resolve()), run_after_ms=run_after_ms, attempts_allowed=3)
        for file in options.files
    ]
    with Client(options.host, options.port) as client:
        try:
            client.create_queue(options.queue)
            descriptors = client.enqueue(options.queue, jobs)
        except ConnectionFailed as error:
            print(error, file=sys.stderr)
            return 1
    print("\n".join(descriptors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
