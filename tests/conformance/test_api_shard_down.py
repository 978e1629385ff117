"""SPEC sections 1 to 4 and 10: shards that are stopped, killed, frozen, or doubled.

Each test leaves all shards running, whatever became of it.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest

from tests.conformance.api import (
    ADMIN_PASSWORD,
    ANSWER_SECONDS,
    IN_PROGRESS,
    PENDING,
    PINLATERD,
    REPOSITORY,
    REQUEST_TIMEOUT_MS,
    SUCCEEDED,
    Client,
    Deployment,
    Interface,
    Refused,
    Wire,
    local_id_of,
    one_engine,
    shard_of,
)
from tests.conftest import WaitUntil

pytestmark = pytest.mark.service

# What a busy machine may take longer.
SLACK_MS = 6000

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def service(mistreated: Deployment) -> Deployment:
    return mistreated


def all_shards_serve(client: Client) -> bool:
    """Counts need every shard."""
    try:
        client.count("probe")
    except Refused as refused:
        return refused.code == "QUEUE_NOT_FOUND"
    return True


@pytest.fixture
def client(service: Deployment, wait_until: WaitUntil) -> Iterator[Client]:
    with service.client() as connected:
        wait_until(lambda: all_shards_serve(connected))
        yield connected


@contextmanager
def stopped(service: Deployment, client: Client, *shards: str, wait: WaitUntil) -> Iterator[None]:
    try:
        for shard in shards:
            service.stop(f"shard-{shard}")
        wait(lambda: not all_shards_serve(client))
        yield
    finally:
        for shard in shards:
            service.start(f"shard-{shard}")
        wait(lambda: all_shards_serve(client))


@contextmanager
def frozen(service: Deployment, client: Client, *shards: str, wait: WaitUntil) -> Iterator[None]:
    pids = service.pids()
    try:
        for shard in shards:
            os.kill(pids[f"shard-{shard}"], signal.SIGSTOP)
        yield
    finally:
        for shard in shards:
            os.kill(pids[f"shard-{shard}"], signal.SIGCONT)
        wait(lambda: all_shards_serve(client))


class Scene(NamedTuple):
    """A queue with jobs on every shard, by shard, while shard 2 is down."""

    queue: str
    pending: dict[str, str]
    running: dict[str, str]


@pytest.fixture(scope="class")
def without_shard_2(service: Deployment, wait_until: WaitUntil) -> Iterator[Scene]:
    queue = "without_shard_2"
    with service.client() as client:
        wait_until(lambda: all_shards_serve(client))
        client.create(queue)
        in_hand = client.enqueue_on_every_shard(queue)
        client.dequeue(queue, 1000)
        waiting = client.enqueue_on_every_shard(queue, lambda _: client.job(b"", priority=2))
        with stopped(service, client, "2", wait=wait_until):
            yield Scene(
                queue,
                {shard: descriptors[0] for shard, descriptors in waiting.items()},
                {shard: descriptors[0] for shard, descriptors in in_hand.items()},
            )


@one_engine
class TestWithoutShard2:
    """None of these changes what another one needs."""

    @pytest.fixture
    def client(self, service: Deployment, without_shard_2) -> Iterator[Client]:
        with service.client() as connected:
            yield connected

    def test_what_needs_every_shard(self, client: Client, without_shard_2):
        queue = without_shard_2.queue
        calls = [
            lambda: client.delete(queue, ADMIN_PASSWORD),
            lambda: client.count(queue),
            lambda: client.scan(queue),
            lambda: client.retry_failed(queue),
            lambda: client.delete_jobs(queue, PENDING, priority=3),
        ]

        for call in calls:
            with pytest.raises(Refused, match=r"^SHARD_CONNECTION_FAILED: .*\b2\b"):
                call()

        assert queue in client.names()
        assert client.info(without_shard_2.pending["1"]).jobState == PENDING
        page = client.scan(queue, priority=2, acceptPartial=True)
        assert {shard_of(job.jobDescriptor) for job in page.scannedJobs} == {"1", "3"}
        assert page.missingShards == ["2"]

    def test_what_names_its_jobs(self, client: Client, without_shard_2):
        queue, descriptors = without_shard_2.queue, without_shard_2.running
        calls = [
            lambda: client.lookup(descriptors["2"]),
            lambda: client.lookup(*descriptors.values()),
            lambda: client.checkpoint(
                queue, *(client.checkpoint_of(d, newBody="new") for d in descriptors.values())
            ),
            lambda: client.ack(queue, succeeded=list(descriptors.values())),
            lambda: client.ack(queue, succeeded=[descriptors["2"]]),
            lambda: client.dequeue(
                queue, jobAckRequest=client.ack_request(queue, [descriptors["2"]])
            ),
        ]

        for call in calls:
            with pytest.raises(Refused, match=r"^SHARD_CONNECTION_FAILED: .*\b2\b"):
                call()

        for shard in ("1", "3"):
            info = client.info(descriptors[shard], body=True)
            assert (info.jobState, info.body) == (SUCCEEDED, b"new")

    def test_enqueue_goes_round_it(self, client: Client, without_shard_2):
        queue = without_shard_2.queue
        client.create(queue)

        few = client.enqueue_on_every_shard(
            queue, lambda _: client.job(b"", priority=3), each=10, shards=2
        )
        many = client.enqueue(queue, *[client.job(b"", priority=3)] * 1500)

        assert few.keys() == {"1", "3"}
        assert {shard_of(d) for d in many} <= {"1", "3"}
        assert len(client.lookup(*many)) == 1500

    def test_dequeue_goes_round_it(self, client: Client, without_shard_2):
        taken = client.dequeue(without_shard_2.queue, 10_000)

        assert {shard_of(d) for d in taken} == {"1", "3"}
        assert {without_shard_2.pending["1"], without_shard_2.pending["3"]} <= taken.keys()
        assert client.dequeue(without_shard_2.queue, 10) == {}


@one_engine
def test_shard_catches_up(service: Deployment, client: Client, wait_until: WaitUntil):
    client.create("before")
    by_shard = client.enqueue_on_every_shard("before")
    taken = list(client.dequeue("before", 1000))
    with stopped(service, client, "2", wait=wait_until):
        client.create("meanwhile")
        with pytest.raises(Refused, match=r"^SHARD_CONNECTION_FAILED: "):
            client.ack("before", succeeded=taken)

    client.ack("before", succeeded=taken)

    for on_shard in by_shard.values():
        assert {info.jobState for info in client.lookup(*on_shard).values()} == {SUCCEEDED}
    assert set(client.enqueue_on_every_shard("meanwhile")) == {"1", "2", "3"}


@one_engine
def test_no_healthy_shard(service: Deployment, client: Client, wait_until: WaitUntil):
    client.create("everywhere")
    (descriptor,) = client.enqueue("everywhere", b"job")
    calls = [
        lambda: client.create("nowhere"),
        lambda: client.enqueue("everywhere", b"job"),
        lambda: client.enqueue("everywhere", *[b"job"] * 1500),
        lambda: client.dequeue("everywhere"),
        client.names,
    ]

    def refused_with(call: Callable[[], object]) -> str:
        try:
            call()
        except Refused as refused:
            return refused.code
        return "nothing"

    with stopped(service, client, "1", "2", "3", wait=wait_until):
        wait_until(lambda: refused_with(client.names) == "NO_HEALTHY_SHARDS")
        assert [refused_with(call) for call in calls] == ["NO_HEALTHY_SHARDS"] * len(calls)

    assert client.dequeue("everywhere").keys() == {descriptor}


def test_killed_shard_keeps_what_was_answered(
    service: Deployment, client: Client, wait_until: WaitUntil
):
    client.create("killed")
    before = client.enqueue_on_every_shard("killed", each=3)
    descriptors = [d for on_shard in before.values() for d in on_shard]
    (done, failed, kept) = claimed = client.dequeue("killed", 3)
    client.ack("killed", succeeded=[done], failed=[client.ack_info(failed, retryDelayMillis=10**9)])
    expected = client.lookup(*descriptors)

    for program, pid in service.pids().items():
        if program.startswith("shard-"):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not all_shards_serve(client) or service.logs().count("exited:") >= 3)
    wait_until(lambda: all_shards_serve(client))

    assert client.lookup(*descriptors) == expected
    assert expected[kept].jobState == IN_PROGRESS
    client.ack("killed", succeeded=[client.ack_info(kept, claimDescriptor=claimed[kept].claim)])
    assert client.info(kept).jobState == SUCCEEDED
    for shard, (descriptor, *_) in client.enqueue_on_every_shard("killed").items():
        assert local_id_of(descriptor) > local_id_of(before[shard][-1])
    (again,) = client.dequeue("killed").values()
    assert started_ms(again.claim) > max(started_ms(job.claim) for job in claimed.values())


def started_ms(claim: str) -> int:
    return int(claim.split(":")[2])


def pending_count(client: Client, queue: str) -> int | None:
    """The pending jobs of the queue; None if the search for them did not end in time."""
    try:
        return client.count(queue)
    except Refused:
        return None


def test_frozen_shard_costs_no_call_its_answer_and_makes_no_job_twice(
    service: Deployment, api: Interface, client: Client, wait_until: WaitUntil
):
    client.create("frozen")
    by_shard = client.enqueue_on_every_shard("frozen", lambda _: client.job(b"", priority=3))
    bodies = [b"body %d" % number for number in range(30)]
    # Its first search starts a process: the one below is to wait for shard 2 alone.
    wait_until(lambda: pending_count(client, "frozen") is not None)
    with ExitStack() as stack:
        wires: list[Wire] = [stack.enter_context(service.wire()) for _ in bodies]
        looking, counting = stack.enter_context(service.wire()), stack.enter_context(service.wire())
        stack.enter_context(frozen(service, client, "2", wait=wait_until))
        started = time.monotonic()
        for wire, body in zip(wires, bodies, strict=True):
            wire.send(api.message("enqueueJobs", client.enqueue_request("frozen", body)))
        look_up = api.types.PinLaterLookupJobRequest(by_shard["2"])
        looking.send(api.message("lookupJobs", look_up))
        counting.send(api.message("getJobCount", api.types.PinLaterGetJobCountRequest("frozen", 0)))
        answers = [wire.receive().value for wire in wires]
        looked, counted = looking.receive().value, counting.receive().value
        took_ms = (time.monotonic() - started) * 1000

    assert took_ms < REQUEST_TIMEOUT_MS + SLACK_MS
    assert (looked.code, counted.code) == ("SHARD_CONNECTION_FAILED", "SHARD_CONNECTION_FAILED")
    stored = client.dequeue("frozen", 1000)
    times_stored = [[job.body for job in stored.values()].count(body) for body in bodies]
    for answer, times in zip(answers, times_stored, strict=True):
        if isinstance(answer, Refused):
            assert answer.code == "SHARD_CONNECTION_FAILED"
            assert times <= 1
        else:
            assert times == 1
            assert answer.jobDescriptors[0] in stored


def test_late_answer_gives_its_claims_back(
    service: Deployment, api: Interface, client: Client, wait_until: WaitUntil
):
    client.create("late")
    by_shard = client.enqueue_on_every_shard("late", each=2)
    descriptors = [d for on_shard in by_shard.values() for d in on_shard]
    message = api.message("dequeueJobs", client.dequeue_request("late", 1000))
    with (
        service.wire() as late,
        service.wire() as gone,
        frozen(service, client, "1", "2", "3", wait=wait_until),
    ):
        late.send(message)
        gone.send(message)
        gone.close()
        answer = late.receive().value

    assert isinstance(answer, Refused)

    # The shards have just woken up: a first search may not end in time.
    wait_until(lambda: pending_count(client, "late") == len(descriptors))
    for info in client.lookup(*descriptors).values():
        assert (info.jobState, info.attemptsRemaining) == (PENDING, 2)


def test_second_process_stands_by(service: Deployment, client: Client, wait_until: WaitUntil):
    queue, jobs = "stood_by", 20
    client.create(queue)
    second = subprocess.Popen(
        [*PINLATERD, "shard", "1", "--config", f"{service.folder}/etc"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert second.stderr is not None
    try:
        assert any("waits for its store" in line for line in second.stderr), "it has ended"
        descriptors = client.enqueue(queue, *[client.job(b"", numAttemptsAllowed=1)] * jobs)
        client.dequeue(queue, jobs)

        wait_until(lambda: client.count(queue, 3) == jobs)
        wait_until(lambda: service.counter(f"{queue}_timeout_done") >= jobs)

        assert service.counter(f"{queue}_timeout_done") == jobs
        assert len(client.lookup(*descriptors)) == jobs
        assert second.poll() is None
    finally:
        second.terminate()
        second.communicate(timeout=ANSWER_SECONDS)
