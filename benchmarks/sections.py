"""The whole path against the engine alone: enqueues, dequeues, cycles, and without storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from benchmarks import engine_alone, frames
from benchmarks.deployment import (
    BenchmarkFailed,
    Deployment,
    Usages,
    patched,
)
from benchmarks.engine_alone import EngineLoad, Work
from benchmarks.frames import Script
from benchmarks.load import Generators, Load, Outcome, Window
from benchmarks.report import Case, Measurement, Report
from benchmarks.stores import Store
from benchmarks.trivial_server import TrivialServer
from pinlaterd.model import ClaimedJob, DequeueResult, Result
from pinlaterd.rpc import codec

SHARDS = 2
_numbers = count(1)  # of the shards of engines alone: each has a store of its own
CONNECTIONS = (1, 16, 64)
JOBS_A_CALL = (1, 10, 100)
DEQUEUE_LIMIT = 100
CYCLE_LENGTH = 10  # times as long as another case: a minute, unless --seconds says otherwise
WHOLE, ENGINE, PINLATER = "whole", "engine alone", "PinLater's statements"
PINLATER_DEQUEUES_PER_SECOND_AT_MOST = 30_000
CYCLE = Case("cycle", f"{DEQUEUE_LIMIT} a call, all three", 16, WHOLE)
CYCLE_OF_ENGINE = CYCLE._replace(connections=0, what=ENGINE)
STATEMENTS_WORK: Mapping[Work, str] = {"dequeue": "claim with acks", "full cycle": "full cycle"}
ENQUEUE_LIMIT = 500  # jobs a call, when a queue is only to be filled
FILL_SECONDS_AT_MOST = 300.0


@dataclass(frozen=True)
class Bench:
    """What every section needs. `scale`: 1 for the full number of jobs, less for a quick look."""

    folder: Path
    seconds: float
    warm_up_seconds: float
    scale: float
    report: Report
    generators: Generators
    store: Store

    @contextmanager
    def service(self) -> Iterator[Deployment]:
        """Two shards on the store, which is empty again afterwards."""
        try:
            with Deployment(self.folder, shards=SHARDS, shard=self.store.settings) as service:
                yield service
        finally:
            self.store.clear()

    def window(self) -> Window:
        return Window.soon(self.seconds, self.warm_up_seconds)

    @property
    def busy_seconds(self) -> float:
        return self.seconds + self.warm_up_seconds

    @property
    def idle_seconds(self) -> float:
        """For how long a service without calls is watched."""
        return 20.0 * max(self.scale, 0.25)

    def make_calls(
        self, service: Deployment, connections: int, script: Callable[[], Script], calls: int
    ) -> Future[Outcome]:
        """So many, however long they take."""
        window = Window.soon(FILL_SECONDS_AT_MOST, 0.0)
        return self.generators.start(
            Load(service.port, connections, script, window, max_calls=calls)
        )

    def fill(self, service: Deployment, queue: str, jobs: int) -> None:
        """Make a queue and store at least so many jobs in it."""
        with service.client() as client:
            client.create_queue(queue)
        script = partial(frames.enqueue, queue, ENQUEUE_LIMIT)
        outcome = self.make_calls(service, 4, script, -(-jobs // ENQUEUE_LIMIT)).result()
        if outcome.jobs < jobs or outcome.errors:
            raise BenchmarkFailed(
                f"{queue}: stored {outcome.jobs} of {jobs} jobs, with {outcome.errors} errors"
            )

    def measure(
        self,
        run: int,
        case: Case,
        service: Deployment,
        script: Callable[[], Script],
        *,
        until_dry: bool = False,
    ) -> None:
        window = self.window()
        load = Load(service.port, case.connections, script, window, until_dry=until_dry)
        future = self.generators.start(load)
        before, after = _usage_over(service, window, future)
        self.report.add(Measurement.of(case, run, future.result(), before, after))


def sleep_until(monotonic: float) -> None:
    time.sleep(max(0.0, monotonic - time.monotonic()))


def _usage_over(
    service: Deployment, window: Window, future: Future[Outcome]
) -> tuple[Usages, Usages]:
    """The processes' usage when measuring begins and when it ends; a failed load ends it."""
    sleep_until(window.measure_from)
    before = service.usage()
    if not future.done():
        sleep_until(window.until)
    return before, service.usage()


# --- enqueue ------------------------------------------------------------------------------


def enqueue(bench: Bench, run: int) -> None:
    with bench.service() as service:
        for jobs in JOBS_A_CALL:
            _engine(bench, run, enqueue_case(jobs), jobs, "enqueue")
            for connections in CONNECTIONS:
                queue = f"enqueue_{jobs}_{connections}"
                with service.client() as client:
                    client.create_queue(queue)
                script = partial(frames.enqueue, queue, jobs)
                bench.measure(run, enqueue_case(jobs, connections), service, script)


def enqueue_case(jobs: int, connections: int = 0) -> Case:
    """Over so many connections; 0: the engine alone."""
    return Case("enqueue", f"{jobs} a call", connections, WHOLE if connections else ENGINE)


# --- keys ---------------------------------------------------------------------------------

KEPT_KEYS = 1_000_000


def keys(bench: Bench, run: int) -> None:
    """Enqueues with random keys, each beside those without."""
    for jobs in (1, 100):
        _engine(bench, run, enqueue_case(jobs), jobs, "enqueue")
        _engine(bench, run, keys_case(jobs), jobs, "enqueue with keys")


def keys_case(jobs: int) -> Case:
    return Case("enqueue", f"{jobs} a call, with keys", 0, ENGINE)


# --- dequeue ------------------------------------------------------------------------------


def dequeue(bench: Bench, run: int) -> None:
    with bench.service() as service:
        for connections in CONNECTIONS:
            _engine(bench, run, dequeue_case(), DEQUEUE_LIMIT, "dequeue")
            queue = f"dequeue_{connections}"
            most = bench.store.dequeues_per_second_at_most / (2 if connections == 1 else 1)
            bench.fill(service, queue, round(most * bench.busy_seconds))
            script = partial(frames.DequeueWithAcks, queue, DEQUEUE_LIMIT)
            bench.measure(run, dequeue_case(connections), service, script, until_dry=True)
        case = dequeue_case()._replace(what=f"{ENGINE}, bodies from memory")
        _engine(bench, run, case, DEQUEUE_LIMIT, "dequeue from memory")


def dequeue_case(connections: int = 0) -> Case:
    """Over so many connections; 0: the engine alone, which reads all bodies from the store."""
    name = f"{DEQUEUE_LIMIT} a call, with acks"
    return Case("dequeue", name, connections, WHOLE if connections else ENGINE)


# --- a job's whole life --------------------------------------------------------------------


def cycle(bench: Bench, run: int) -> None:
    """Measure enqueues, dequeues and acks together, sustained: ten times as long as other cases."""
    _engine(bench, run, CYCLE_OF_ENGINE, DEQUEUE_LIMIT, "full cycle")
    sustained = replace(bench, seconds=bench.seconds * CYCLE_LENGTH)
    with bench.service() as service:
        with service.client() as client:
            client.create_queue("cycle")
        script = partial(frames.Cycle, "cycle", DEQUEUE_LIMIT)
        sustained.measure(run, CYCLE, service, script)
    if (whole := bench.report.median(CYCLE)) is not None:
        a_minute = whole.jobs_per_second * 60 / 1e6
        bench.report.facts["cycle"] = (
            f"{a_minute:.2f} million jobs a minute, each enqueued, dequeued and acknowledged"
        )


# --- PinLater's statements ----------------------------------------------------------------


def statements(bench: Bench, run: int) -> None:
    """The MySQL engine against PinLater's statements, in turn: claims with acks, full cycles."""
    for jobs in JOBS_A_CALL:
        for work in STATEMENTS_WORK:
            for what in (ENGINE, PINLATER):
                case = statements_case(work, jobs, what)
                _engine(bench, run, case, jobs, work, pinlater=what == PINLATER)
    bench.store.clear()


def statements_case(work: Work, jobs: int, what: str) -> Case:
    return Case("statements", f"{STATEMENTS_WORK[work]}, {jobs} a batch", 0, what)


# --- without storage ----------------------------------------------------------------------


def echo(bench: Bench, run: int) -> None:
    with (
        TemporaryDirectory(prefix="echo-", dir=bench.folder) as folder,
        patched(Path(folder), "benchmarks.echo"),
        Deployment(bench.folder, shards=SHARDS) as service,
    ):
        with service.client() as client:
            client.create_queue("echo")
        script = partial(frames.enqueue, "echo", 1)
        for connections in (16, 64):
            bench.measure(run, echo_case(connections), service, script)


def echo_case(connections: int) -> Case:
    return Case("echo", "1 a call", connections, "router and shards, no storage")


def generator(bench: Bench, run: int) -> None:
    """What the load generator itself can do, against a server that does next to nothing."""
    descriptors = [f"bench:s1:p1:{number}" for number in range(1_000_001, 1_000_101)]
    claim = "localhost:9010:1700000000000:bench:load:1000001"
    claimed = [ClaimedJob(d, frames.body(), 2, 2, claim, 600) for d in descriptors]
    cases: Sequence[tuple[str, Callable[[], Script], Result]] = [
        ("enqueue, 1 a call", partial(frames.enqueue, "bench", 1), descriptors[:1]),
        ("enqueue, 100 a call", partial(frames.enqueue, "bench", 100), descriptors),
        (
            "dequeue, 100 a call, with acks",
            partial(frames.DequeueWithAcks, "bench", 100),
            DequeueResult(claimed),
        ),
    ]
    for name, script, result in cases:
        head = codec.peek(script().first()[4:]).head
        with TrivialServer(frames.framed(codec.encode_reply(head, result))) as server:
            load = Load(server.port, 16, script, bench.window())
            outcome = bench.generators.start(load).result()
        case = Case("generator", name, 16, "load generator, trivial server")
        bench.report.add(Measurement.of(case, run, outcome))


# --- the engine alone -----------------------------------------------------------------------


def _engine(
    bench: Bench, run: int, case: Case, jobs: int, work: Work, *, pinlater: bool = False
) -> None:
    """The same number of processes as the service has shards; their rates add up."""
    with TemporaryDirectory(prefix="engine-", dir=bench.folder) as folder:
        stored = 0
        if work in ("dequeue", "dequeue from memory"):
            most = bench.store.dequeues_per_second_at_most
            if pinlater:
                most = min(most, PINLATER_DEQUEUES_PER_SECOND_AT_MOST)
            stored = round(most * bench.busy_seconds / SHARDS)
        if work == "enqueue with keys":
            stored = round(KEPT_KEYS * bench.scale)
        loads = [
            EngineLoad(
                shard=bench.store.shard(f"alone{next(_numbers)}", Path(folder)),
                work=work,
                jobs_per_batch=jobs,
                stored_jobs=stored,
                pinlater=pinlater,
            )
            for _ in range(SHARDS)
        ]
        found = engine_alone.measure(loads, bench.seconds, bench.warm_up_seconds)
    outcomes, durabilities = zip(*found, strict=True)
    if not pinlater:
        bench.report.facts["durability"] = durabilities[0]
    bench.report.add(
        Measurement(
            case=case,
            run=run,
            calls_per_second=sum(o.calls_per_second for o in outcomes),
            jobs_per_second=sum(o.jobs_per_second for o in outcomes),
            p50_ms=fmean(o.percentile_ms(50) for o in outcomes),
            p99_ms=max(o.percentile_ms(99) for o in outcomes),
            cpu_seconds_per_1000_jobs={
                f"engine {number}": o.cpu_seconds / o.jobs * 1000.0
                for number, o in enumerate(outcomes, 1)
                if o.jobs
            },
        )
    )
