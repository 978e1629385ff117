"""What a worker costs: jobs/s against the same calls made by hand, and how soon it begins a job.

Throughput: one worker process with 16 threads and a handler that does nothing, against `pinlater
bench dequeue` with as many jobs a call as the worker's dequeues had; one shard, in turn, with one
connection and with as many as the worker has threads.

Delay: one job at a time comes to a worker that waits for it. Two round trips without storage are
measured beside it, over the same connection, and the delay is judged by both: a look-up of nothing,
which the router answers, and getQueueNames, which goes the whole way to the shard and back.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.deployment import BenchmarkFailed, Deployment
from benchmarks.load import START_SECONDS, Outcome, Window, percentile
from benchmarks.report import Case, Measurement
from benchmarks.sections import Bench, sleep_until
from pinlaterd.client import Client, Handlers, RunningJob, Worker
from pinlaterd.client.in_flight import FETCHERS

SECTION = "worker"
THREADS = 16
CONNECTIONS_BY_HAND = (1, THREADS)
# The most that one shard hands out: so many are stored, that no queue runs dry.
JOBS_PER_SECOND_AT_MOST = 120_000
WORKER = Case(SECTION, "no-op handlers", FETCHERS, f"worker, {THREADS} threads")
JOBS_A_DEQUEUE = "jobs a dequeue"

DELAYED_JOBS = 1_000
WARM_UP_JOBS = 50
# Between two jobs: long enough for the worker to wait again, and at no fixed beat of its timers.
PAUSE_SECONDS = (0.002, 0.010)
ANSWER_SECONDS = 15.0
DELAY = Case(SECTION, "one job at a time", 1, "enqueue called to handler begun")
DELAY_FROM_ANSWER = DELAY._replace(what="enqueue answered to handler begun")
ROUTER_ROUND_TRIP = DELAY._replace(what="look-up of nothing")
SHARD_ROUND_TRIP = DELAY._replace(what="getQueueNames")
DELAYS = (DELAY, DELAY_FROM_ANSWER, ROUTER_ROUND_TRIP, SHARD_ROUND_TRIP)

_MOMENT = struct.Struct("d")


def by_hand(connections: int) -> Case:
    return Case(SECTION, "the same calls", connections, "pinlater bench dequeue")


def worker(bench: Bench, run: int) -> None:
    with Deployment(bench.folder, shards=1) as service:
        jobs_a_dequeue = _throughput_of_worker(bench, run, service)
        for connections in CONNECTIONS_BY_HAND:
            _throughput_by_hand(bench, run, service, jobs_a_dequeue, connections)
        _delay(bench, run, service, max(100, round(DELAYED_JOBS * bench.scale)))


# --- throughput ---------------------------------------------------------------------------------


def _throughput_of_worker(bench: Bench, run: int, service: Deployment) -> int:
    """Returns how many jobs a dequeue had."""
    queue = "noop"
    bench.fill(service, queue, round(JOBS_PER_SECOND_AT_MOST * bench.busy_seconds))
    window = bench.window()
    future = bench.generators.call(partial(work_through, service.port, queue, window))
    sleep_until(window.measure_from)
    before = service.usage()
    worked = future.result()
    jobs_a_dequeue = max(1, round(worked.jobs / max(1, worked.calls)))
    measured = Measurement.of(WORKER, run, worked, before, service.usage())
    bench.report.add(replace(measured, figures={JOBS_A_DEQUEUE: jobs_a_dequeue}))
    return jobs_a_dequeue


def work_through(port: int, queue: str, window: Window) -> Outcome:
    """Run a worker in this process, and count its dequeues and jobs within the window."""
    handlers = Handlers()
    begun = itertools.count()

    @handlers.queue(queue, concurrency=THREADS)
    def do_nothing(_job: RunningJob) -> None:
        next(begun)

    def seen() -> tuple[float, int, int, float]:
        [figures] = running.queue_figures()
        # To look at the count counts as a job: two in all are not worth a lock for each.
        return time.monotonic(), next(begun), figures.dequeues, time.process_time()

    with Client(port=port, source="bench:worker") as client:
        running = Worker(client, handlers)
        thread = threading.Thread(target=running.run, kwargs={"handle_signals": False})
        sleep_until(window.begin)
        thread.start()
        sleep_until(window.measure_from)
        before = seen()
        sleep_until(window.until)
        after = seen()
        running.stop()
        thread.join()
    seconds, jobs, dequeues, cpu_seconds = (b - a for a, b in zip(before, after, strict=True))
    return Outcome(seconds, int(dequeues), int(jobs), cpu_seconds=cpu_seconds)


def _throughput_by_hand(
    bench: Bench, run: int, service: Deployment, jobs_a_call: int, connections: int
) -> None:
    queue = f"by_hand_{connections}"
    found = _pinlater_bench(
        *("dequeue", "--create", "--queue", queue, "--port", str(service.port)),
        *("--fill", str(round(JOBS_PER_SECOND_AT_MOST * bench.busy_seconds))),
        *("--batch-size", str(jobs_a_call), "--concurrency", str(connections)),
        *("--seconds", str(bench.seconds)),
    )
    calls = found["kinds"]["dequeue"]
    bench.report.add(
        Measurement(
            by_hand(connections),
            run,
            calls_per_second=calls["calls_per_second"],
            jobs_per_second=calls["jobs_per_second"],
            p50_ms=calls["p50_ms"],
            p99_ms=calls["p99_ms"],
            figures={JOBS_A_DEQUEUE: calls["jobs"] / max(1, calls["calls"])},
            note="ran dry" if found["ran_out"] else "",
        )
    )


def _pinlater_bench(*arguments: str) -> dict[str, Any]:
    """What `pinlater bench` finds."""
    done = subprocess.run(
        [sys.executable, "-m", "pinlaterd.cli.pinlater", "bench", *arguments, "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BenchmarkFailed(f"pinlater bench {' '.join(arguments)}: {done.stderr}{done.stdout}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- delay --------------------------------------------------------------------------------------


def _delay(bench: Bench, run: int, service: Deployment, jobs: int) -> None:
    queue = "delay"
    with service.client() as client:
        client.create_queue(queue)
    report_to = bench.folder / f"moments-{run}"
    count = jobs + WARM_UP_JOBS
    # The socket that the worker reports to is there before any job is.
    timed = bench.generators.call(partial(time_jobs, service.port, queue, report_to, jobs))
    worked = bench.generators.call(partial(report_begins, service.port, queue, report_to, count))
    delays = timed.result()
    worked.result()
    for case, seconds in zip(DELAYS, zip(*delays, strict=True), strict=True):
        p50_ms, p99_ms = (percentile(seconds, percent) * 1000 for percent in (50, 99))
        bench.report.add(
            Measurement(case, run, p50_ms=p50_ms, p99_ms=p99_ms, note=f"{len(seconds):,} jobs")
        )


def report_begins(port: int, queue: str, report_to: Path, jobs: int) -> None:
    """Run a worker in this process for so many jobs; each tells when its handler began."""
    handlers = Handlers()
    begun = itertools.count(1)
    all_begun = threading.Event()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports,
        Client(port=port, source="bench:worker") as client,
    ):

        @handlers.queue(queue, concurrency=THREADS)
        def tell(_job: RunningJob) -> None:
            began_at = time.monotonic()
            reports.sendto(_MOMENT.pack(began_at), str(report_to))
            if next(begun) == jobs:
                all_begun.set()

        running = Worker(client, handlers)
        thread = threading.Thread(target=running.run, kwargs={"handle_signals": False})
        thread.start()
        all_begun.wait(ANSWER_SECONDS + jobs * ANSWER_SECONDS / 100)
        running.stop()
        thread.join()


def time_jobs(
    port: int, queue: str, report_to: Path, jobs: int
) -> list[tuple[float, float, float, float]]:
    """Enqueue one job after the other, each when the one before has begun; seconds of each job, as
    DELAYS has them."""
    delays = []
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports,
        Client(port=port, source="bench:client") as client,
    ):
        reports.bind(str(report_to))
        reports.settimeout(ANSWER_SECONDS)
        time.sleep(START_SECONDS)
        for _ in range(WARM_UP_JOBS + jobs):
            time.sleep(random.uniform(*PAUSE_SECONDS))
            start = time.monotonic()
            client.lookup([])
            looked_up = time.monotonic()
            client.queue_names()
            named = time.monotonic()
            client.enqueue(queue, [b"now"])
            answered = time.monotonic()
            [began_at] = _MOMENT.unpack(reports.recv(_MOMENT.size))
            delays.append(
                (began_at - named, began_at - answered, looked_up - start, named - looked_up)
            )
    return delays[WARM_UP_JOBS:]
