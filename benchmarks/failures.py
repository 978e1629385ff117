"""A queue with a million failed jobs: its newest page, its groups, and dequeues beside searches.

Jobs are stored and failed by the engines, before the service starts: ten in a row say the same.
Two searches for a status that no job has go over all of them again and again, a second each call,
as pages of the dashboard do.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from functools import partial

from benchmarks import frames
from benchmarks.deployment import Deployment, cpu_seconds_between
from benchmarks.interference import BUSY, CONNECTIONS, JOBS_A_CALL, measure
from benchmarks.load import Window
from benchmarks.report import Case, Measurement
from benchmarks.sections import SHARDS, WHOLE, Bench, sleep_until
from pinlaterd.client import Client, JobChoice, calls
from pinlaterd.client.failures import FailureWindow
from pinlaterd.config.layout import DATA, ETC
from pinlaterd.config.load import load_config
from pinlaterd.engines import make_engine
from pinlaterd.engines.base import AckOp, Acks, Batch, ClaimOp, Claims, EnqueueOp, StorageEngine
from pinlaterd.model import Job, JobState, Method, Payload, ScanRequest

SECTION = "failures"
FAILED_JOBS = 1_000_000
QUEUE = "failed"
PAGE = Case(SECTION, "newest 50", 1, WHOLE)
GROUPS = Case(SECTION, "groups of 10,000", 1, WHOLE)
QUIET = Case(SECTION, "dequeues before searches", CONNECTIONS, WHOLE)
SEARCHED = Case(SECTION, "dequeues beside two searches", CONNECTIONS, WHOLE)

_BATCH_JOBS, _ALIKE = 1_000, 10
_GROUPED_TIMES = 5


def failures(bench: Bench, run: int) -> None:
    jobs = round(FAILED_JOBS * bench.scale)
    service = Deployment(bench.folder, shards=SHARDS, shard=bench.store.settings)
    began = time.monotonic()
    with contextlib.chdir(service.folder):
        _store_failed(jobs)
    bench.report.facts[SECTION] = f"{jobs:,} failed in {time.monotonic() - began:.0f} s"
    try:
        with service:
            bench.fill(service, BUSY, JOBS_A_CALL * CONNECTIONS * 10)
            request = ScanRequest(QUEUE, JobState.FAILED, limit=50, newest_end_first=True)
            with service.client() as client:
                next(client.scan(QUEUE, JobState.FAILED))  # so that there are searchers
                bench.measure(
                    run, PAGE, service, partial(frames.SameCall, Method.SCAN, request, 50)
                )
                bench.report.add(_grouped(service, client, run))
            measure(bench, run, QUIET, service)
            window = bench.window()
            searches = [
                bench.generators.call(partial(search, service.port, window, number))
                for number in range(2)
            ]
            measure(bench, run, SEARCHED, service, window)
            looked_at = [f"{one.result():,}" for one in searches]
            bench.report.facts["searches"] = f"looked at {' and '.join(looked_at)} jobs meanwhile"
    finally:
        bench.store.clear()


def _grouped(service: Deployment, client: Client, run: int) -> Measurement:
    """Measure how long it takes until the newest jobs are in groups, and what that costs."""
    seconds: list[float] = []
    before, own_before = service.usage(), time.process_time()
    for _ in range(_GROUPED_TIMES):
        began = time.monotonic()
        window = FailureWindow(QUEUE)
        while window.call is not None:
            window.take(client.run(window.call))
        window.groups("message", round(time.time() * 1000))
        seconds.append(time.monotonic() - began)
    used = {"client": time.process_time() - own_before}
    used |= cpu_seconds_between(before, service.usage())
    jobs = len(window.failures) * _GROUPED_TIMES
    ordered = sorted(seconds)
    return Measurement(
        GROUPS,
        run,
        p50_ms=ordered[_GROUPED_TIMES // 2] * 1000,
        p99_ms=ordered[-1] * 1000,
        cpu_seconds_per_1000_jobs={name: cpu / jobs * 1000 for name, cpu in used.items()},
    )


def search(port: int, window: Window, number: int) -> int:
    """Search all failed jobs for what none says; return at how many it has looked."""
    sleep_until(window.begin)
    looked_at = 0
    with Client("127.0.0.1", port, source=f"search:{number}", timeout_seconds=60.0) as client:
        choice = JobChoice(status_regex="never said")
        whole = calls.scan(
            QUEUE, JobState.FAILED, newest_end_first=True, max_ms=1_000, choice=choice
        )
        call = whole
        while time.monotonic() < window.until:
            page = client.run(call)
            looked_at += page.looked_at
            call = calls.page_after(call, page) or whole
    return looked_at


# --- what is stored ---------------------------------------------------------------------------


def _store_failed(jobs: int) -> None:
    """Have each shard of the deployment in this folder hold an equal part of so many failed jobs,
    of the same times."""
    config = load_config(ETC)
    DATA.mkdir(exist_ok=True)
    began_ms = int(time.time() * 1000) - 3_600_000
    for shard in config.shards.values():
        now_ms = began_ms
        engine = make_engine(shard, config.server)
        engine.open(now_ms)
        try:
            engine.create_queue(QUEUE, now_ms)
            for batch, statuses in _batches(jobs // len(config.shards)):
                _fail(engine, batch, statuses, now_ms)
                now_ms += 1
        finally:
            engine.close()


def _batches(jobs: int) -> Iterator[tuple[list[Job], list[str]]]:
    rng = random.Random(1)
    kinds = (
        "ConnectTimeout: smtp{} did not answer",
        "ValueError: no address in '{}'",
        "KeyError: {}",
    )
    for _ in range(0, jobs, _BATCH_JOBS):
        statuses = [
            f"{rng.choice(kinds).format(rng.randrange(100))} (mail.py:{rng.randrange(9)} in send)"
            for _ in range(0, _BATCH_JOBS, _ALIKE)
        ]
        yield [Job(frames.body(), attempts_allowed=1)] * _BATCH_JOBS, statuses


def _fail(engine: StorageEngine, jobs: list[Job], statuses: list[str], now_ms: int) -> None:
    local_ids = engine.apply(Batch(enqueues=[EnqueueOp(QUEUE, jobs)]), now_ms).enqueues[0]
    payloads = [Payload(frames.body(), 1, 1)] * len(jobs)
    claims = Claims(1, local_ids, payloads, f"localhost:9010:{now_ms}:mailer:web1:", 1)
    engine.apply(Batch(claims=[ClaimOp(QUEUE, [claims])]), now_ms)
    acks = [
        Acks(1, local_ids[at * _ALIKE : (at + 1) * _ALIKE], status)
        for at, status in enumerate(statuses)
    ]
    engine.apply(Batch(acks=[AckOp(QUEUE, (), acks)]), now_ms)
