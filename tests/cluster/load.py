"""The load of a cluster, as a process on the clients' machine: every call, through every router.

    python -m tests.cluster.load --history FILE --run NUMBER --shards 1,2 HOST:PORT...

It prints `runs` once it does. A line of its input names the servers to use from then on: it prints
`moved` once no call goes elsewhere. When its input ends it stops enqueuing, works off all that is
ready, prints `drained` and ends. Its clients are the checker's, and probes, which tell soon whether
a shard takes an enqueue and an ack through a router.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from pinlaterd.client import Client as ServiceClient
from pinlaterd.model import JobDescriptor
from tests.checker.calls import Calls, Claim, Target
from tests.checker.clients import (
    QUEUES,
    Builder,
    Client,
    Enqueuer,
    Keeper,
    Searcher,
    Shared,
    Worker,
    drain,
)
from tests.checker.history import History
from tests.checker.site import PASSWORD

# Its claims outlast every run.
PROBE = "probe"
PROBE_CLAIM_SECONDS = 3600.0
# Longer than a server takes at most, so that it is the server that gives up.
PATIENCE_SECONDS = 13.0
_DRAIN_SECONDS = 60.0
_END_SECONDS = 30.0
# How often each shard is asked for an ack through each router; more is enqueued than that takes.
_PROBE_SECONDS = 0.25
_ENQUEUES_FOR_AN_ACK = 1.3
_STOCK = 4
_SCHEDULED_MS = (1000, 3000)  # the end of a run waits for them


class RovingCalls(Calls):
    """Go to the server that was named first, and to others while that is not to be used."""

    targets: ClassVar[Sequence[Target]] = ()
    all: ClassVar[list[RovingCalls]] = []

    def __init__(self, name: str, target: Target, history: History) -> None:
        super().__init__(name, target, history)
        self._home = target
        self._busy = threading.Lock()  # while a call is made
        self.all.append(self)

    def _exchange(self, message: bytes, wait_seconds: float, read_bytes: int | None) -> bytes:
        with self._busy:
            target = self._home
            if target not in self.targets:
                target = self.targets[zlib.crc32(self.name.encode()) % len(self.targets)]
            if target != self._target:
                self.close()
                self._target = target
            return super()._exchange(message, wait_seconds, read_bytes)

    @classmethod
    def move(cls, targets: Sequence[Target]) -> None:
        cls.targets = targets
        for calls in cls.all:
            with calls._busy:
                pass  # its call elsewhere has ended


class EnqueueProbe(Client):
    """Enqueues all the time; the router chooses the shard."""

    shards = 1

    def work(self) -> Iterator[float]:
        while not self.shared.stop_enqueuing.is_set():
            self.serial += 1
            self.calls.enqueue(PROBE, [(f"{self.name}.{self.serial}/0", 1, 3, 0)])
            yield 2 * _PROBE_SECONDS / self.shards / _ENQUEUES_FOR_AN_ACK  # there are two


class Stock(Client):
    """Keeps claims for the probes of one router, by shard."""

    def __init__(self, name: str, calls: Calls, shared: Shared, shards: Sequence[str]) -> None:
        super().__init__(name, calls, shared)
        self.claims: dict[str, deque[Claim]] = {shard: deque() for shard in shards}

    def work(self) -> Iterator[float]:
        while not self.shared.stop_enqueuing.is_set():
            if any(len(held) < _STOCK for held in self.claims.values()):
                for claim in self.calls.dequeue(PROBE, limit=4 * len(self.claims)) or ():
                    descriptor = JobDescriptor.parse(claim.descriptor)
                    assert descriptor is not None
                    self.claims[descriptor.shard].append(claim)
            yield _PROBE_SECONDS


class AckProbe(Client):
    """Ends jobs of one shard through one router."""

    def __init__(self, name: str, calls: Calls, shared: Shared, held: deque[Claim]) -> None:
        super().__init__(name, calls, shared)
        self._held = held

    def work(self) -> Iterator[float]:
        while not self.shared.stop_enqueuing.is_set():
            if self._held:
                self.calls.ack(PROBE, succeeded=[self._held.popleft()])
            yield _PROBE_SECONDS


def make_clients(
    targets: Sequence[Target], shards: Sequence[str], run: int, history: History, shared: Shared
) -> Iterator[Client]:
    EnqueueProbe.shards = len(shards)
    Client.scheduled_ms = _SCHEDULED_MS
    for at, target in enumerate(targets):
        place = f"{run}{at}"  # bodies are unique over all runs

        def calls(name: str, target: Target = target) -> Calls:
            return RovingCalls(name, target, history)

        kinds: list[type[Client]] = [Enqueuer, Worker, Worker, EnqueueProbe, EnqueueProbe]
        kinds += [(Keeper, Builder, Searcher)[at % 3]]
        for number, kind in enumerate(kinds):
            name = f"{kind.__name__.lower()}{place}{number}"
            yield kind(name, calls(name), shared)
        stock = Stock(f"stock{place}", calls(f"stock{place}"), shared, shards)
        yield stock
        for shard, held in stock.claims.items():
            name = f"ackprobe{place}s{shard}"
            yield AckProbe(name, calls(name), shared, held)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--run", type=int, required=True)
    parser.add_argument("--shards", required=True)
    parser.add_argument("routers", nargs="+")
    options = parser.parse_args()
    RovingCalls.targets = targets = targets_of(options.routers)
    with ServiceClient(options.routers[0]) as service:
        for queue in sorted({*QUEUES, PROBE} & service.queue_names()):
            service.delete_queue(queue, password=PASSWORD)
        for queue in (*QUEUES, PROBE):
            service.create_queue(queue)
    history = History(options.history)
    shared = Shared(PASSWORD, random.Random(options.run).randrange(1 << 30))
    shards = options.shards.split(",")
    clients = list(make_clients(targets, shards, options.run, history, shared))
    for client in clients:
        client.start()
    say("runs")
    for line in sys.stdin:
        RovingCalls.move(targets_of(line.split()))
        say("moved")
    shared.stop_enqueuing.set()
    time.sleep(1.0)
    shared.stop.set()
    for client in clients:
        client.join(_END_SECONDS)
    for client in clients:
        if client.error or client.is_alive():
            say(f"{client.name}: {client.error or 'does not end'}")
    last = RovingCalls("last", targets[0], history)
    drain(last, history, seconds=_DRAIN_SECONDS)
    history.close()
    say("drained")


def targets_of(routers: Sequence[str]) -> Sequence[Target]:
    places = [router.split(":") for router in routers]
    return [Target(int(port), PATIENCE_SECONDS, host=host) for host, port in places]


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
