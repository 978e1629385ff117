"""A load that keeps books: what was acknowledged, what was handed out to whom, how it ended.

Every body is unique. Threads enqueue and work through real clients while the test breaks things;
afterwards `check` holds the books against what the service says of every job. Claims must not
time out meanwhile: a job that is handed out again while its claim was neither acked nor failed
has had two live claims.
"""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pinlaterd.client import (
    AckInfo,
    ClaimedJob,
    Client,
    ConnectionFailed,
    Job,
    JobRecord,
    JobState,
    OutcomeUnknown,
    PinLaterError,
)
from pinlaterd.errors import EnqueueRejected, NoHealthyShards, Overloaded
from pinlaterd.model import JobDescriptor
from tests.deployment import Deployment

ATTEMPTS = 3
_BATCHES = (1, 20)
_DEQUEUE_LIMIT = 10
_DEQUEUE_WAIT_MS = 100
_MOST_UNFINISHED = 400
_PAUSE_SECONDS = 0.01
_DRAIN_SECONDS = 120.0
_ADVANCE_SECONDS = 120.0
CALL_SECONDS = 40.0  # longer than a test has its service take for a call
_LOOKUP_JOBS = 500


class HandOut(NamedTuple):
    """A job in a worker's hand. Times are monotonic seconds."""

    job: ClaimedJob
    received_at: float


class Ending:
    """How a handed-out job ended, to be acknowledged until the service has confirmed it."""

    def __init__(self, job: ClaimedJob) -> None:
        self.job = job
        # One job in five fails at its first attempt.
        first = job.attempts_remaining == ATTEMPTS
        self.succeeded = not (first and fails_first(job.body))
        self.began_at: float | None = None
        self.confirmed = False

    @property
    def info(self) -> AckInfo:
        return AckInfo(self.job.descriptor, claim_descriptor=self.job.claim_descriptor)


def fails_first(body: bytes) -> bool:
    return zlib.crc32(body) % 5 == 0


class Load:
    """Enqueuers and workers on one queue. All books are written under one lock."""

    def __init__(self, deployment: Deployment, queue: str, *, rest_seconds: float = 0.0) -> None:
        """`rest_seconds`: what an enqueuer waits after each call, so that little comes together
        while a test waits for long."""
        self.queue = queue
        self.acknowledged: dict[str, bytes] = {}  # descriptor -> body
        self.unsure: set[bytes] = set()  # bodies whose enqueue has an unknown outcome
        self.refused: set[bytes] = set()  # bodies that were certainly not stored, says the error
        self.hand_outs: list[HandOut] = []
        self.endings: list[Ending] = []
        self.errors: list[Exception] = []
        self.longest_call_seconds = 0.0  # without what a dequeue was asked to wait
        self.deployment = deployment
        self._rest_seconds = rest_seconds
        self._lock = threading.Lock()
        self._stop_enqueuing = threading.Event()
        self._stop_working = threading.Event()
        self._enqueuers = [
            threading.Thread(target=self._run, args=(self._enqueue, f"enqueuer{n}"), daemon=True)
            for n in range(2)
        ]
        self._workers = [
            threading.Thread(target=self._run, args=(self._work, f"worker{n}"), daemon=True)
            for n in range(2)
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        """The load runs before, during and after the block; then all that is pending is worked
        off."""
        for thread in (*self._enqueuers, *self._workers):
            thread.start()
        try:
            self.advance()
            yield
            self.advance()
            self._end(self._stop_enqueuing, self._enqueuers)
            self._drain()
        finally:
            self._stop_enqueuing.set()
            self._stop_working.set()
        self._end(self._stop_working, self._workers)

    def progress(self) -> int:
        """Acks confirmed so far: proof that the whole path works."""
        with self._lock:
            return sum(ending.confirmed for ending in self.endings)

    def advance(self) -> None:
        """Wait until the whole path has been gone again."""
        since, deadline = self.progress(), time.monotonic() + _ADVANCE_SECONDS
        while self.progress() < since + 20:
            assert time.monotonic() < deadline, f"the load stands still: {self.errors[-1:]}"
            time.sleep(_PAUSE_SECONDS)

    # --- the threads ----------------------------------------------------------------------

    def _run(self, body: Callable[[Client, str], None], name: str) -> None:
        with self.deployment.client(name, timeout_seconds=CALL_SECONDS) as client:
            body(client, name)

    def _enqueue(self, client: Client, name: str) -> None:
        for serial in itertools.count():
            self._stop_enqueuing.wait(self._rest_seconds)
            while self._unfinished() > _MOST_UNFINISHED and not self._stop_enqueuing.is_set():
                self._stop_enqueuing.wait(_PAUSE_SECONDS)
            if self._stop_enqueuing.is_set():
                return
            count = _BATCHES[serial % len(_BATCHES)]
            bodies = [f"{name}/{serial}/{n}".encode() for n in range(count)]
            jobs = [
                Job(body, priority=1 + serial % 3, attempts_allowed=ATTEMPTS) for body in bodies
            ]
            try:
                with self._timed():
                    descriptors = client.enqueue(self.queue, jobs)
            except (PinLaterError, ConnectionFailed) as error:
                with self._lock:
                    self.errors.append(error)
                    (self.refused if _stored_nothing(error) else self.unsure).update(bodies)
                self._stop_enqueuing.wait(_PAUSE_SECONDS)
            else:
                with self._lock:
                    assert self.acknowledged.keys().isdisjoint(descriptors), "a descriptor twice"
                    self.acknowledged.update(zip(descriptors, bodies, strict=True))

    def _work(self, client: Client, name: str) -> None:
        unconfirmed: list[Ending] = []
        while True:
            stopping = self._stop_working.is_set()
            unconfirmed = self._repeat_acks(client, unconfirmed)
            claimed = self._dequeue(client, [e for e in unconfirmed if e.began_at is None])
            # The last failed ack made its job pending again: somebody has to take it.
            if stopping and not unconfirmed and not claimed:
                return
            unconfirmed += claimed

    def _dequeue(self, client: Client, along: list[Ending]) -> list[Ending]:
        """Claim some more, sending new acks along; returns the endings of what was claimed."""
        now = time.monotonic()
        for ending in along:
            ending.began_at = now
        try:
            with self._timed(wait_ms=_DEQUEUE_WAIT_MS):
                jobs = client.dequeue(
                    self.queue,
                    limit=_DEQUEUE_LIMIT,
                    succeeded=[ending.info for ending in along if ending.succeeded],
                    failed=[ending.info for ending in along if not ending.succeeded],
                    max_wait_ms=_DEQUEUE_WAIT_MS,
                )
        except (PinLaterError, ConnectionFailed) as error:
            self._note(error)
            return []
        endings = [Ending(job) for job in jobs]
        with self._lock:
            for ending in along:
                ending.confirmed = True
            self.hand_outs += [HandOut(job, time.monotonic()) for job in jobs]
            self.endings += endings
        return endings

    def _repeat_acks(self, client: Client, unconfirmed: list[Ending]) -> list[Ending]:
        """Send acks of unknown outcome again, shard by shard: one that is down fails its own."""
        repeated = [e for e in unconfirmed if e.began_at is not None and not e.confirmed]
        for shard in {_shard_of(ending.job.descriptor) for ending in repeated}:
            mine = [e for e in repeated if _shard_of(e.job.descriptor) == shard]
            try:
                with self._timed():
                    client.ack(
                        self.queue,
                        succeeded=[ending.info for ending in mine if ending.succeeded],
                        failed=[ending.info for ending in mine if not ending.succeeded],
                    )
            except (PinLaterError, ConnectionFailed) as error:
                self._note(error)
            else:
                with self._lock:
                    for ending in mine:
                        ending.confirmed = True
        return [ending for ending in unconfirmed if not ending.confirmed]

    def _note(self, error: Exception) -> None:
        with self._lock:
            self.errors.append(error)
        self._stop_working.wait(_PAUSE_SECONDS)

    @contextmanager
    def _timed(self, *, wait_ms: int = 0) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began - wait_ms / 1000
            with self._lock:
                self.longest_call_seconds = max(self.longest_call_seconds, took)

    def _unfinished(self) -> int:
        with self._lock:
            return len(self.acknowledged) - len(self.endings)

    # --- the end --------------------------------------------------------------------------

    def _drain(self) -> None:
        deadline = time.monotonic() + _DRAIN_SECONDS
        with self.deployment.client() as client:
            while self._has_pending(client):
                assert time.monotonic() < deadline, "pending jobs are not handed out"
                time.sleep(_PAUSE_SECONDS)

    def _has_pending(self, client: Client) -> bool:
        try:
            return client.count(self.queue, JobState.PENDING) > 0
        except (PinLaterError, ConnectionFailed):
            # A process may be away still; a shard's first search takes a busy machine long.
            return True

    def _end(self, stop: threading.Event, threads: list[threading.Thread]) -> None:
        stop.set()
        for thread in threads:
            thread.join(_DRAIN_SECONDS)
            assert not thread.is_alive(), f"{thread.name} does not end"

    # --- the books against the service ----------------------------------------------------

    def check(self, *, claims_may_be_lost: bool = False) -> None:
        """No acknowledged job lost, none made twice, none with two live claims at a time.

        `claims_may_be_lost`: a process was killed or frozen, or its store failed, and with it
        answers to dequeues; otherwise every job was handed out, and its end confirmed."""
        assert not [error for error in self.errors if "internal error" in str(error)]
        records = self._records_once_served()
        self._check_none_lost(records)
        self._check_none_twice(records)
        self._check_claims()
        self._check_endings(records, claims_may_be_lost=claims_may_be_lost)

    def _records_once_served(self) -> dict[str, JobRecord]:
        """Read all jobs; a busy machine may take a shard's lease away amid that."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while True:
            try:
                return self._all_records()
            except (PinLaterError, ConnectionFailed):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def _all_records(self) -> dict[str, JobRecord]:
        """All jobs of the queue with their bodies, by descriptor."""
        with self.deployment.client() as client:
            found = [
                record.descriptor
                for state in JobState
                for record in client.scan(self.queue, state, page_size=1000)
            ]
            assert len(found) == len(set(found))
            records: dict[str, JobRecord] = {}
            for at in range(0, len(found), _LOOKUP_JOBS):
                records.update(client.lookup(found[at : at + _LOOKUP_JOBS], include_body=True))
        assert records.keys() == set(found)
        return records

    def _check_none_lost(self, records: dict[str, JobRecord]) -> None:
        lost = self.acknowledged.keys() - records.keys()
        assert not lost, f"{len(lost)} acknowledged jobs are lost, such as {min(lost)}"
        for descriptor, body in self.acknowledged.items():
            assert records[descriptor].body == body

    def _check_none_twice(self, records: dict[str, JobRecord]) -> None:
        bodies = Counter(record.body for record in records.values())
        twice = [body for body, count in bodies.items() if count > 1]
        assert not twice, f"{len(twice)} jobs were made twice, such as {twice[0]!r}"
        stored = {record.body for record in records.values() if record.body is not None}
        assert stored.isdisjoint(self.refused), "an enqueue that failed for sure was stored"
        assert stored - set(self.acknowledged.values()) <= self.unsure

    def _check_claims(self) -> None:
        ended = {ending.job.claim_descriptor: ending for ending in self.endings}
        assert len(ended) == len(self.endings), "two claims bear the same descriptor"
        last: dict[str, HandOut] = {}
        for hand_out in sorted(self.hand_outs, key=lambda one: one.received_at):
            before = last.get(hand_out.job.descriptor)
            if before is not None:
                ending = ended[before.job.claim_descriptor]
                assert not ending.succeeded, f"{before.job} succeeded, but came again"
                assert ending.began_at is not None, f"{hand_out.job}: two live claims"
                assert ending.began_at <= hand_out.received_at, f"{hand_out.job}: two live claims"
            last[hand_out.job.descriptor] = hand_out

    def _check_endings(self, records: dict[str, JobRecord], *, claims_may_be_lost: bool) -> None:
        """What was confirmed as succeeded is; the rest is with claims whose answers were lost."""
        succeeded = {ending.job.descriptor for ending in self.endings if ending.succeeded}
        for descriptor, record in records.items():
            if descriptor not in succeeded:
                assert record.state is JobState.IN_PROGRESS, f"{record} was never handed out"
                assert claims_may_be_lost, f"{record}: its dequeue was answered to nobody"
                continue
            assert record.state is JobState.SUCCEEDED, record
            assert record.body is not None
            failures = int(fails_first(record.body))
            assert record.attempts_remaining == ATTEMPTS - failures, record


def _stored_nothing(error: Exception) -> bool:
    """Whether an enqueue that ended so says for sure that nothing was stored."""
    if isinstance(error, ConnectionFailed):
        return not isinstance(error, OutcomeUnknown)
    return isinstance(error, EnqueueRejected | Overloaded | NoHealthyShards)


def _shard_of(descriptor: str) -> str:
    parsed = JobDescriptor.parse(descriptor)
    assert parsed is not None
    return parsed.shard


def shards_of(descriptors: Iterable[str]) -> set[str]:
    # A copy: threads may add descriptors meanwhile.
    return {_shard_of(descriptor) for descriptor in list(descriptors)}
