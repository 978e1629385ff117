"""Clients on virtual time: each calls a router, keeps what it has claimed, and records what it saw.

The history is the checker's (`tests.checker.history`). A client may end its connection while a call
runs; then, and where an answer does not come, the outcome is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from random import Random
from typing import Any, NamedTuple

import zmq

from pinlaterd.errors import (
    DequeueRateLimited,
    EnqueueRejected,
    InvalidRequest,
    NoHealthyShards,
    PinLaterError,
    QueueNotFound,
)
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CallContext,
    CheckpointInfo,
    CheckpointRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DequeueRequest,
    EnqueueRequest,
    Job,
    JobState,
    LookupRequest,
    Method,
    Request,
    RetryFailedRequest,
)
from pinlaterd.rpc import codec
from tests.checker.calls import row_of, row_of_claim
from tests.checker.history import FAIL, OK, UNKNOWN, Record
from tests.simulation.deployment import thrift_endpoint
from tests.simulation.network import DealerSocket, Network
from tests.simulation.world import AsyncProcess

PRIORITIES = (1, 2)
# An answer that has not come by then will not: beyond the time for a call, and its wait.
_ANSWER_SECONDS = 3.0
_DIES = 0.05  # so many calls: their client ends its connection within 0.2 s
_REFUSED = (EnqueueRejected, InvalidRequest, NoHealthyShards, QueueNotFound)
_METHODS: dict[type, Method] = {
    AckRequest: Method.ACK,
    CheckpointRequest: Method.CHECKPOINT,
    CreateQueueRequest: Method.CREATE_QUEUE,
    DeleteJobsRequest: Method.DELETE_JOBS,
    DequeueRequest: Method.DEQUEUE,
    EnqueueRequest: Method.ENQUEUE,
    LookupRequest: Method.LOOKUP,
    RetryFailedRequest: Method.RETRY_FAILED,
}


class Claimed(NamedTuple):
    queue: str
    descriptor: str
    claim: str


class Client:
    """One connection to one router at a time, and one call at a time on it."""

    def __init__(
        self,
        name: str,
        network: Network,
        routers: Sequence[str],
        queues: Mapping[str, float | None],
        rng: Random,
    ) -> None:
        """`queues`: with their rates, jobs/s."""
        self.name = name
        self.records: list[Record] = []
        self.held: list[Claimed] = []
        self.known: list[str] = []  # descriptors
        self._stale: list[Claimed] = []
        self._network = network
        self._routers = routers
        self._queues = list(queues)
        self._rates = queues
        self._rng = rng
        self._numbers = count(1)
        self._greeted = asyncio.Event()
        self._answer: asyncio.Future[bytes | None] | None = None
        self._socket: DealerSocket | None = None
        self.process: AsyncProcess
        self._operations: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (30, self.enqueue),
            (40, self.dequeue),
            (15, self.ack),
            (6, self.checkpoint),
            (6, self.look_up),
            (2, self.retry),
            (2, self.delete),
        ]

    # --- the connection ------------------------------------------------------------------------

    def _connect(self) -> DealerSocket:
        socket = DealerSocket(self._network, self.process)
        loop, descriptor = self.process.loop, socket.getsockopt(zmq.FD)

        def readable() -> None:
            while socket.getsockopt(zmq.EVENTS):
                self._answered(socket.recv())

        loop.add_reader(descriptor, readable)
        self._greeted.clear()

        def ended() -> None:
            loop.call_soon(self._answered, None)

        socket.on_connect, socket.on_end = self._greeted.set, ended
        socket.connect(thrift_endpoint(self._rng.choice(self._routers)))
        return socket

    async def _connected(self) -> None:
        if self._socket is None or (self._greeted.is_set() and self._socket.connection is None):
            self.hang_up()
            self._socket = self._connect()
        await self._greeted.wait()

    def hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _exchange(self, record: Record, message: bytes, seconds: float) -> bytes | None:
        """The answer; None if it did not come."""
        loop = self.process.loop
        until = loop.time() + seconds
        assert self._socket is not None
        if self._socket.connection is None:
            return None
        self._socket.send(message)
        dies = self._rng.random() < _DIES
        if dies:
            until = loop.time() + self._rng.random() * 0.2
        self._answer = loop.create_future()
        timer = loop.call_at(until, self._answered, None)
        answer = await self._answer
        timer.cancel()
        if answer is None:
            self.hang_up()
            if dies:
                record.arguments |= {"abandoned": True, "cut": True}
        return answer

    def _answered(self, answer: bytes | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    async def _call(self, record: Record, request: Request, source: str = "") -> Any:
        """The result; None if there is none, which the record says by its outcome."""
        method = _METHODS[type(request)]
        seqid = next(self._numbers)
        wait_ms = record.arguments.get("wait_ms", 0)
        context = CallContext(source or f"{self.name}:host")
        message = codec.encode_call(method, seqid, context, request)
        record.t0 = self.process.loop.time()
        self.records.append(record)  # also what ends with this client is on record
        record.t1, record.outcome = float("inf"), UNKNOWN
        answer = await self._exchange(record, message, _ANSWER_SECONDS + wait_ms / 1000)
        record.t1 = self.process.loop.time()
        if answer is None:
            return None
        try:
            result = codec.decode_reply(method, answer)
        except DequeueRateLimited:
            record.outcome, record.result = OK, []
            record.arguments["limited"] = True
            return []
        except _REFUSED as error:
            record.outcome, record.arguments["error"] = FAIL, error.message
        except PinLaterError as error:
            record.arguments["error"] = error.message
        else:
            record.outcome = OK
            return result
        return None

    def _record(self, operation: str, **arguments: Any) -> Record:
        return Record(0.0, 0.0, self.name, operation, arguments)

    # --- operations ----------------------------------------------------------------------------

    async def run(self, until: float) -> None:
        """Operations at random until that time."""
        rng, loop = self._rng, self.process.loop
        weights = [weight for weight, _ in self._operations]
        while loop.time() < until:
            ((_, operation),) = rng.choices(self._operations, weights)
            await self._connected()
            await operation()
            await asyncio.sleep(rng.expovariate(4.0))
        self.hang_up()

    async def create_queues(self) -> None:
        for queue in self._queues:
            record = self._record("create_queue", queue=queue)
            while record.outcome != OK or not record.t1:
                record = self._record("create_queue", queue=queue)
                await self._connected()
                await self._call(record, CreateQueueRequest(queue))
        self.hang_up()

    async def enqueue(self) -> None:
        rng, queue = self._rng, self._rng.choice(self._queues)
        amount = rng.choice((1, 1, 2, 3, 12))  # the last is split over shards
        jobs: list[tuple[str, int, int, int]] = []
        for _ in range(amount):
            delay_ms = rng.choice((0, 0, 0, 500, 3000))
            body = f"{self.name}-{next(self._numbers)}"
            jobs.append((body, rng.choice(PRIORITIES), rng.choice((1, 2, 3)), delay_ms))
        now_ms = self._now_ms()
        request = EnqueueRequest(
            queue,
            [
                Job(body.encode(), priority, now_ms + delay_ms if delay_ms else None, attempts)
                for body, priority, attempts, delay_ms in jobs
            ],
        )
        record = self._record("enqueue", queue=queue, jobs=jobs)
        found = await self._call(record, request)
        if found is not None:
            record.result = list(found)
            self.known += found

    async def dequeue(self) -> None:
        rng, queue = self._rng, self._rng.choice(self._queues)
        wait_ms = rng.choice((0, 0, 300, 2000))
        limit = rng.choice((1, 2, 5))
        coverage = rng.choice((1.0, 1.0, 0.5))
        source = f"{self.name}:d{next(self._numbers)}"
        succeeded, failed = self._take_acks(queue) if rng.random() < 0.6 else ([], [])
        record = self._record(
            "dequeue",
            queue=queue,
            limit=limit,
            wait_ms=wait_ms,
            coverage=coverage,
            dry_run=False,
            limited=self._rates[queue] is not None,
            source=source,
            succeeded=succeeded,
            failed=failed,
        )
        acks = _ack_request(queue, succeeded, failed) if succeeded or failed else None
        request = DequeueRequest(queue, limit, acks, coverage=coverage, max_wait_ms=wait_ms)
        found = await self._call(record, request, source)
        if not found:
            record.result = [] if record.outcome == OK else record.result
            return
        record.result = [row_of_claim(job) for job in found.jobs]
        self.held += [Claimed(queue, job.descriptor, job.claim_descriptor) for job in found.jobs]

    def _take_acks(self, queue: str) -> tuple[list[Any], list[Any]]:
        """Acks of some of what is held, and at times of what was held before."""
        rng = self._rng
        mine = [claimed for claimed in self.held if claimed.queue == queue]
        chosen = rng.sample(mine, rng.randint(0, len(mine)))
        self.held = [claimed for claimed in self.held if claimed not in chosen]
        stale = [claimed for claimed in self._stale if claimed.queue == queue]
        if stale and rng.random() < 0.3:
            chosen.append(rng.choice(stale))
        self._stale = [*self._stale, *chosen][-20:]
        succeeded, failed = [], []
        for claimed in dict.fromkeys(chosen):
            if rng.random() < 0.6:
                succeeded.append([claimed.descriptor, claimed.claim])
            else:
                failed.append([claimed.descriptor, claimed.claim, rng.choice((0, 0, 1000))])
        return succeeded, failed

    async def ack(self) -> None:
        queue = self._rng.choice(self._queues)
        succeeded, failed = self._take_acks(queue)
        if succeeded or failed:
            record = self._record("ack", queue=queue, succeeded=succeeded, failed=failed)
            await self._call(record, _ack_request(queue, succeeded, failed))

    async def checkpoint(self) -> None:
        rng = self._rng
        if not self.held:
            return
        held = rng.choice(self.held)
        to_pending = rng.random() < 0.5
        if to_pending:
            self.held.remove(held)
            self._stale.append(held)
        delay_ms = rng.choice((0, 500))
        attempts = rng.choice((None, None, 3))
        requests = [[held.descriptor, held.claim, None, to_pending, delay_ms, attempts]]
        record = self._record(
            "checkpoint", queue=held.queue, source=f"{self.name}:host", requests=requests
        )
        info = CheckpointInfo(
            held.descriptor,
            None,
            to_pending,
            self._now_ms() + delay_ms if delay_ms else None,
            attempts,
            claim_descriptor=held.claim,
        )
        await self._call(record, CheckpointRequest(held.queue, [info]))

    async def look_up(self) -> None:
        if not self.known:
            return
        descriptors = self._rng.sample(self.known, min(5, len(self.known)))
        record = self._record("lookup", descriptors=descriptors)
        found = await self._call(record, LookupRequest(descriptors, include_body=True))
        if found is not None:
            record.result = {name: row_of(job) for name, job in found.items()}

    async def retry(self) -> None:
        queue, priority = self._rng.choice(self._queues), self._rng.choice(PRIORITIES)
        arguments = {"priority": priority, "attempts": 2, "delay_ms": 0, "limit": 3}
        record = self._record("retry", queue=queue, **arguments)
        request = RetryFailedRequest(queue, priority, 2, limit=3)
        record.result = await self._call(record, request)

    async def delete(self) -> None:
        queue, priority = self._rng.choice(self._queues), self._rng.choice(PRIORITIES)
        state = self._rng.choice((JobState.SUCCEEDED, JobState.FAILED))
        record = self._record("delete", queue=queue, state=int(state), priority=priority, limit=2)
        request = DeleteJobsRequest(queue, state, priority, limit=2)
        record.result = await self._call(record, request)

    def _now_ms(self) -> int:
        return self._network.world.now_ms()


def _ack_request(queue: str, succeeded: Sequence[Any], failed: Sequence[Any]) -> AckRequest:
    return AckRequest(
        queue,
        [AckInfo(descriptor, claim_descriptor=claim) for descriptor, claim in succeeded],
        [
            AckInfo(descriptor, retry_delay_ms=delay_ms, claim_descriptor=claim)
            for descriptor, claim, delay_ms in failed
        ],
    )
