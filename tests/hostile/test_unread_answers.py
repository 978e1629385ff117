"""Answers that nobody reads: large ones are counted from the moment they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pinlaterd.client import Job, JobState
from pinlaterd.model import (
    CallContext,
    DequeueRequest,
    LookupRequest,
    Method,
    Request,
    ScanRequest,
)
from pinlaterd.rpc import codec
from tests.deployment import Deployment
from tests.hostile.conftest import MIB, Bystander, peak_bytes
from tests.hostile.wire import RawConnection
from tests.rpc.thrift_bytes import framed

PIPELINED = 40
READ = 4
BODY_BYTES = 1 * MIB
JOBS = 30  # which fit into one answer
CLAIMED = 200
# As docs/operations.md has it, beside what a process had before.
ROUTER_BYTES = 256 * MIB
CLAIMS_BYTES = 3 * 128 * MIB  # on their way through the router
SHARD_BYTES = 200 * MIB
# Its buffer, and all claims that are under way: once as jobs, and once encoded.
SHARD_CLAIMS_BYTES = (32 + 2 * 128) * MIB
LONG_JOBS = 2_000
SCANS_BYTES = 100 * MIB
CALLS = 100  # of the other client
CALLS_SECONDS = 60.0  # two on a quiet machine


@pytest.fixture(autouse=True)
def unharmed(bystander: Bystander) -> Bystander:
    """What processes keep of freed memory is not judged here: peaks are."""
    return bystander


@pytest.fixture(scope="module")
def descriptors(deployment: Deployment) -> list[str]:
    with deployment.client() as client:
        client.create_queue("large")
        return [client.enqueue("large", [bytes(BODY_BYTES)])[0] for _ in range(JOBS)]


@pytest.fixture(scope="module")
def claimable(deployment: Deployment) -> str:
    """A queue of many large jobs: on a busy disk so much takes longer than the other client may."""
    with deployment.client() as client:
        client.create_queue("claimed")
        for _ in range(CLAIMED):
            client.enqueue("claimed", [bytes(BODY_BYTES)])
    return "claimed"


@pytest.fixture(scope="module")
def long_statuses(deployment: Deployment) -> str:
    """A queue. All of its jobs in one answer would be 40 MB, which a router holds four times."""
    status = "\N{GRINNING FACE}" * 5_000
    with deployment.client() as client:
        client.create_queue("long")
        for _ in range(LONG_JOBS // 100):
            client.enqueue("long", [Job(b"", custom_status=status)] * 100)
    return "long"


@pytest.mark.parametrize("method", [Method.LOOKUP, Method.DEQUEUE])
def test_processes_stay_small(
    deployment: Deployment, unharmed: Bystander, wait_until, descriptors, method
):
    requests: dict[Method, Request] = {
        Method.LOOKUP: LookupRequest(descriptors, include_body=True),
        Method.DEQUEUE: DequeueRequest("large", JOBS, dry_run=True),
    }
    message = codec.encode_call(method, 7, CallContext("hostile"), requests[method])
    with _pipelined(deployment, unharmed, wait_until, message, ROUTER_BYTES) as connection:
        # Once the client reads, the others are made.
        for _ in range(READ):
            answer = connection.receive_message()
            assert answer is not None
            assert codec.peek_error(answer) is None


def test_claims_leave_processes_small(
    deployment: Deployment, unharmed: Bystander, wait_until, claimable: str
):
    """What the calls may bring together is six times what they are granted."""
    request = DequeueRequest(claimable, JOBS)
    message = codec.encode_call(Method.DEQUEUE, 7, CallContext("hostile"), request)
    with _pipelined(
        deployment,
        unharmed,
        wait_until,
        message,
        ROUTER_BYTES + CLAIMS_BYTES,
        shard_bytes=SHARD_CLAIMS_BYTES,
    ) as connection:
        assert connection.receive_message() is not None


def test_scans_of_long_statuses_leave_processes_small(
    deployment: Deployment, unharmed: Bystander, wait_until, long_statuses: str
):
    request = ScanRequest(long_statuses, JobState.PENDING, limit=LONG_JOBS)
    message = codec.encode_call(Method.SCAN, 7, CallContext("hostile"), request)
    with _pipelined(deployment, unharmed, wait_until, message, SCANS_BYTES) as connection:
        sizes = {name: peak_bytes(pid) for name, pid in deployment.pids().items()}
        for _ in range(READ):
            assert connection.receive_message() is not None
        for name, pid in deployment.pids().items():
            assert peak_bytes(pid) < sizes[name] + SCANS_BYTES, name


@contextmanager
def _pipelined(
    deployment: Deployment,
    unharmed: Bystander,
    wait_until,
    message: bytes,
    router_bytes: int,
    shard_bytes: int = SHARD_BYTES,
) -> Iterator[RawConnection]:
    """After so many calls, and while another client works, no process is too large."""
    sizes = {name: peak_bytes(pid) for name, pid in deployment.pids().items()}
    with RawConnection(deployment.port) as connection:
        connection.send(framed(message) * PIPELINED)
        calls = unharmed.calls
        wait_until(lambda: unharmed.calls > calls + CALLS, seconds=CALLS_SECONDS)

        for name, pid in deployment.pids().items():
            most = shard_bytes if name.startswith("shard") else router_bytes
            assert peak_bytes(pid) < sizes[name] + most
        yield connection


def test_connections_that_read_nothing_leave_room_for_others(
    deployment: Deployment, unharmed: Bystander, wait_until, descriptors
):
    """Together they ask for more than may be under way at once."""
    message = codec.encode_call(
        Method.LOOKUP, 7, CallContext("hostile"), LookupRequest(descriptors, include_body=True)
    )
    sizes = {name: peak_bytes(pid) for name, pid in deployment.pids().items()}
    connections = [RawConnection(deployment.port) for _ in range(20)]
    try:
        for connection in connections:
            connection.send(framed(message) * 2)
        calls = unharmed.calls
        wait_until(lambda: unharmed.calls > calls + CALLS, seconds=CALLS_SECONDS)
        for name, pid in deployment.pids().items():
            most = SHARD_BYTES if name.startswith("shard") else ROUTER_BYTES
            assert peak_bytes(pid) < sizes[name] + most
    finally:
        for connection in connections:
            connection.socket.close()
