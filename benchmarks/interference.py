"""Dequeues while others ask for much: a slow reader, a search over all bodies, maintenance.

The load is paced well below what the service can do, as a service in use is: with every core
busy, whatever else runs doubles the latency of everything, and nothing is learnt. Each
disturbance is compared with a quiet window right before it.
"""

from __future__ import annotations

import select
import socket
import time
from dataclasses import replace
from functools import partial

from benchmarks import frames
from benchmarks.deployment import Deployment
from benchmarks.load import START_SECONDS, Load, Window
from benchmarks.report import Case, Measurement
from benchmarks.sections import SHARDS, WHOLE, Bench, sleep_until
from pinlaterd.model import CountRequest, DequeueRequest, JobState, Method

CONNECTIONS = 8
CALLS_PER_SECOND = 200.0  # dequeues, and as many enqueues
JOBS_A_CALL = 10

SLOW_READERS = 4
SLOW_CALLS = 4  # pipelined by each, and one more for each answer taken
SLOW_JOBS = 100
SLOW_BODY_BYTES = 10_000
SLOW_ANSWER_BYTES = SLOW_JOBS * SLOW_BODY_BYTES
SLOW_BYTES_PER_SECOND = 1_000_000  # each takes
SLOW_RECEIVE_BYTES = 50_000

SEARCHED_JOBS = 200_000
EXPIRING_JOBS = 100_000
CLAIM_SECONDS = 12.0  # after which their claims expire
CLAIM_LIMIT = 500

BUSY, ARCHIVE, EXPIRING, LARGE = "busy", "archive", "expiring", "large"

SECTION = "interference"


def interference(bench: Bench, run: int) -> None:
    with Deployment(
        bench.folder,
        shards=SHARDS,
        settings={"monitor_interval_seconds": 0.5},
        queues={EXPIRING: {"job_claimed_timeout_seconds": CLAIM_SECONDS}},
    ) as service:
        bench.fill(service, BUSY, JOBS_A_CALL * CONNECTIONS * 10)
        bench.fill(service, ARCHIVE, round(SEARCHED_JOBS * bench.scale))
        with service.client() as client:
            client.create_queue(LARGE)
            for _ in range(SHARDS * 2):
                client.enqueue(LARGE, [frames.body(SLOW_BODY_BYTES)] * SLOW_JOBS)
        _slow_reader(bench, run, service)
        _search(bench, run, service, round(SEARCHED_JOBS * bench.scale))
        _maintenance(bench, run, service, round(EXPIRING_JOBS * bench.scale))


def quiet(name: str) -> Case:
    return Case(SECTION, f"before {name}", CONNECTIONS, WHOLE)


def disturbed(name: str) -> Case:
    return Case(SECTION, name, CONNECTIONS, WHOLE)


DISTURBANCES = ("slow reader", "body search", "maintenance")


def _slow_reader(bench: Bench, run: int, service: Deployment) -> None:
    measure(bench, run, quiet("slow reader"), service)
    window = bench.window()
    reader = bench.generators.call(partial(read_slowly, service.port, window))
    measure(bench, run, disturbed("slow reader"), service, window)
    read = reader.result()
    bench.report.facts["slow reader"] = f"{SLOW_READERS} of them took {read / 1e6:.1f} MB"


def read_slowly(port: int, window: Window) -> int:
    """Keep calls for large answers pipelined, and take these at a trickle; returns bytes taken."""
    request = DequeueRequest(LARGE, SLOW_JOBS, dry_run=True)
    call = frames.call_frame(Method.DEQUEUE, request)
    sleep_until(window.begin)
    readers: dict[socket.socket, int] = {}  # bytes taken
    for _ in range(SLOW_READERS):
        reader = socket.create_connection(("127.0.0.1", port))
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_RECEIVE_BYTES)
        reader.sendall(call * SLOW_CALLS)
        readers[reader] = 0
    pause = SLOW_RECEIVE_BYTES / SLOW_BYTES_PER_SECOND
    while time.monotonic() < window.until:
        for reader in select.select(readers, (), (), pause)[0]:
            taken = readers[reader]
            readers[reader] += len(reader.recv(SLOW_RECEIVE_BYTES))
            if readers[reader] // SLOW_ANSWER_BYTES > taken // SLOW_ANSWER_BYTES:
                reader.sendall(call)
        time.sleep(pause)
    for reader in readers:
        reader.close()
    return sum(readers.values())


def _search(bench: Bench, run: int, service: Deployment, jobs: int) -> None:
    measure(bench, run, quiet("body search"), service)
    window = bench.window()
    request = CountRequest(ARCHIVE, JobState.PENDING, body_regex="[g-z]+[0-9]{3}never$")
    script = partial(frames.SameCall, Method.COUNT, request, 1)
    searches = bench.generators.start(Load(service.port, 1, script, window))
    measure(bench, run, disturbed("body search"), service, window)
    outcome = searches.result()
    bench.report.facts["body search"] = (
        f"{outcome.calls} searches over {jobs:,} bodies, {outcome.errors} errors, "
        f"p50 {outcome.percentile_ms(50):,.0f} ms"
    )


def _maintenance(bench: Bench, run: int, service: Deployment, jobs: int) -> None:
    bench.fill(service, EXPIRING, jobs)
    measure(bench, run, quiet("maintenance"), service)
    request = DequeueRequest(EXPIRING, CLAIM_LIMIT)
    script = partial(frames.SameCall, Method.DEQUEUE, request, CLAIM_LIMIT)
    expiry = time.monotonic() + START_SECONDS + CLAIM_SECONDS
    bench.make_calls(service, 2, script, jobs // CLAIM_LIMIT).result()
    with service.client() as client:
        claimed = client.count(EXPIRING, JobState.IN_PROGRESS)
        begin = expiry - bench.warm_up_seconds
        window = Window(begin, expiry, expiry + bench.seconds)
        measure(bench, run, disturbed("maintenance"), service, window)
        left = client.count(EXPIRING, JobState.IN_PROGRESS)
    expired = f"{claimed - left:,} of {claimed:,} claims expired meanwhile"
    bench.report.facts["maintenance"] = expired


def measure(
    bench: Bench, run: int, case: Case, service: Deployment, window: Window | None = None
) -> None:
    """Dequeues with acks, and as many enqueues; only the dequeues are reported."""
    window = window or bench.window()
    half = CONNECTIONS // 2
    enqueues = Load(
        service.port, half, partial(frames.enqueue, BUSY, JOBS_A_CALL), window, CALLS_PER_SECOND
    )
    dequeues = Load(
        service.port, half, partial(frames.DequeueWithAcks, BUSY, JOBS_A_CALL), window,
        CALLS_PER_SECOND,
    )  # fmt: skip
    both = [bench.generators.start(load) for load in (enqueues, dequeues)]
    enqueued, dequeued = (future.result() for future in both)
    cpu_share = enqueued.cpu_share + dequeued.cpu_share
    bench.report.add(replace(Measurement.of(case, run, dequeued), generator_cpu_share=cpu_share))
