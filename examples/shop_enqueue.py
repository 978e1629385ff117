#!/usr/bin/env python3
"""Jobs for shop_tasks.py: three orders, a catalogue to import, and a report each night.

    python shop_enqueue.py
    python shop_enqueue.py --host queue.example.com

Prints what each job is and its descriptor, for `pinlater lookup --job-descriptor`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping

from pinlaterd.client import Client, ConnectionFailed, Job, JobState

ORDERS = {
    "plain": {"card": "good", "cents": 1250, "to": "ada@example.com"},
    "slow": {"card": "slow", "cents": 999, "to": "grace@example.com"},  # succeeds when retried
    "stolen": {"card": "stolen", "cents": 90_000, "to": "mallory@example.com"},  # fails for good
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Make jobs for the workers of shop_tasks.py.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9010)
    options = parser.parse_args()

    with Client(options.host, options.port) as client:
        try:
            made = enqueue(client)
        except ConnectionFailed as error:
            print(error, file=sys.stderr)
            return 1
    for name, descriptor in made.items():
        print(name, descriptor)
    return 0


def enqueue(client: Client) -> dict[str, str]:
    """The descriptors of the jobs made, by name."""
    for queue in ("orders", "mail", "imports", "reports"):
        client.create_queue(queue)  # one that exists is left as it is
    orders = [Job(body(order), attempts_allowed=5) for order in ORDERS.values()]
    made = dict(zip(ORDERS, client.enqueue("orders", orders), strict=True))
    [made["import"]] = client.enqueue("imports", [body({"page": 1, "pages": 3})])
    if not is_reporting(client):
        [made["report"]] = client.enqueue("reports", [Job(b"", attempts_allowed=3)])
    return made


def is_reporting(client: Client) -> bool:
    """Whether there is a job for the reports already: one does those of all nights.
    Two programs that look at the same moment both enqueue one: have a single program do this."""
    waiting, due, running = (
        client.count("reports", JobState.PENDING, future=True),
        client.count("reports", JobState.PENDING),
        client.count("reports", JobState.IN_PROGRESS),
    )
    return waiting + due + running > 0


def body(facts: Mapping[str, object]) -> bytes:
    return json.dumps(facts).encode()


if __name__ == "__main__":
    sys.exit(main())
