"""A Consumer in a program's own event loop, whose queues come and go; and how a wait is ended."""

from __future__ import annotations

import asyncio
import threading
import time

import psutil
import pytest

from pinlaterd.client import ClaimedJob, Client, Handlers, RunningJob, Worker
from pinlaterd.client.consumer import Consumer
from pinlaterd.client.handlers import TaskExecutor
from pinlaterd.client.in_flight import InFlight
from pinlaterd.errors import QueueNotFound
from pinlaterd.model import DequeueResult, Method
from tests.client.working import books, handlers_of, have_ended, records_of, running
from tests.shared_service import ADMIN_PASSWORD

DONE = ("SUCCEEDED", 2)


def add(consumer: Consumer, client: Client, handlers: Handlers) -> None:
    """Have the consumer work on the queue of these handlers, in its own event loop."""
    [handler] = handlers.by_queue.values()
    work = InFlight(handler.queue, client, 4, ahead_seconds=0.1, ack_seconds=0.05)
    consumer.add(work, TaskExecutor(handler, 4))


def test_queues_come_and_go_while_others_are_worked_on(client, queue, wait_until):
    other = f"{queue}_b"
    client.create_queue(other)
    errors: list[BaseException] = []
    left: list[str] = []
    hanging = asyncio.Event()

    async def handle(job: RunningJob) -> str:
        if job.body == b"hang":
            await job.asave(status="hangs; ")
            hanging.set()
            await asyncio.Event().wait()
        return "done"

    async def ended(descriptors: list[str]) -> None:
        await asyncio.to_thread(wait_until, lambda: have_ended(client, descriptors))

    async def come_and_go() -> None:
        async with client.asynchronous() as calls:
            consumer = Consumer(calls, max_wait_ms=60_000, fail=errors.append)
            for name in (queue, other):
                add(consumer, client, handlers_of(name, handle))
            with pytest.raises(ValueError, match="worked on already"):
                add(consumer, client, handlers_of(queue, handle))
            await ended(client.enqueue(queue, [b"1"]) + client.enqueue(other, [b"1"]))
            left.extend(client.enqueue(queue, [b"hang"]))
            await hanging.wait()
            await consumer.remove(queue, grace_seconds=0)
            left.extend(client.enqueue(queue, [b"2"]))
            await ended(client.enqueue(other, [b"2"]))
            # The server may have claimed one for the dequeue that was ended, and release it yet.
            await asyncio.to_thread(wait_until, lambda: books(client, left) == {("PENDING", 2): 2})
            add(consumer, client, handlers_of(queue, handle))
            await ended(left[1:])
            both = (consumer.remove(queue, other, grace_seconds=grace) for grace in (30, 0))
            await asyncio.gather(*both)
            assert not consumer.queues
            await client.leave_loop()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(come_and_go())

    wait_until(lambda: books(client, left) == {("PENDING", 2): 1, DONE: 1})
    assert records_of(client, left)[0].custom_status.startswith("hangs; ")
    assert not errors


def test_claims_of_a_queue_last_as_long_as_is_said_for_it(client, queue, wait_until):
    async def handle(job: RunningJob) -> str:
        return f"{job.claimed.claim_timeout_seconds} s"

    async def work() -> list[str]:
        async with client.asynchronous() as calls:
            consumer = Consumer(calls, max_wait_ms=100, fail=lambda _: None)
            [handler] = handlers_of(queue, handle).by_queue.values()
            in_flight = InFlight(queue, client, 1, ahead_seconds=0.1, ack_seconds=0.05)
            consumer.add(in_flight, TaskExecutor(handler, 1), claim_timeout_ms=7000)
            made: list[str] = client.enqueue(queue, [b"1"])
            await asyncio.to_thread(wait_until, lambda: have_ended(client, made))
            await consumer.remove(queue)
            return made

    assert records_of(client, asyncio.run(work()))[0].custom_status == "7 s"


def test_a_consumer_whose_client_is_closed_says_so_and_ends(client, queue):
    async def handle(job: RunningJob) -> None: ...

    async def close_the_client() -> BaseException:
        failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        async with client.asynchronous() as calls:
            consumer = Consumer(calls, max_wait_ms=100, fail=failed.set_result)
            add(consumer, client, handlers_of(queue, handle))
        error = await failed
        await consumer.remove(queue)
        return error

    assert "this client was closed" in str(asyncio.run(close_the_client()))


@pytest.mark.parametrize("kind", ["missing", "deleted"])
def test_a_deleted_queue_is_looked_for_and_one_that_never_was_is_an_error(
    client, queue, wait_until, monkeypatch, kind
):
    monkeypatch.setattr("pinlaterd.client.consumer._LONGEST_PAUSE_SECONDS", 0.1)
    other = f"{queue}_b"
    handlers = handlers_of(queue, lambda job: "done")
    handlers.queue(other)(lambda job: "done")
    if kind == "missing":
        with pytest.raises(QueueNotFound):
            Worker(client, handlers).run()
        return
    client.create_queue(other)
    with running(Worker(client, handlers)) as thread:
        first = client.enqueue(other, [b"1"])
        wait_until(lambda: have_ended(client, first))
        client.delete_queue(other, password=ADMIN_PASSWORD)
        descriptors = client.enqueue(queue, [b"1"] * 3)
        wait_until(lambda: have_ended(client, descriptors))
        client.create_queue(other)
        again = client.enqueue(other, [b"2"])
        wait_until(lambda: have_ended(client, again))
        assert thread.is_alive()


def test_more_queues_than_the_client_has_connections_and_a_stop_that_waits_for_no_job(
    service, client, queue, wait_until
):
    handlers = Handlers()
    names = [f"{queue}_{number}" for number in range(6)]
    with Client(port=service.port, max_connections=1) as only_one:
        for name in names:
            client.create_queue(name)
            handlers.queue(name)(lambda job: job.client.enqueue(queue, [b"next"])[0])
        worker = Worker(only_one, handlers, max_wait_ms=60_000)
        with running(worker):
            descriptors = [client.enqueue(name, [b"1"])[0] for name in names]
            wait_until(lambda: have_ended(client, descriptors))
            began = time.monotonic()

    assert time.monotonic() - began < 50  # some milliseconds, where the machine is idle


@pytest.mark.parametrize("connections", [1, 3])
def test_what_was_claimed_as_the_worker_stopped_is_released(
    server, wait_until, monkeypatch, connections
):
    """The server answers a dequeue that it had carried out when the worker hung up; a second
    dequeue may just wait for a connection."""
    monkeypatch.setattr("pinlaterd.client.worker._MOST_CONNECTIONS", connections)
    monkeypatch.setattr("pinlaterd.client.consumer._HANG_UP_SECONDS", 120)
    first, claimed = (
        ClaimedJob(f"mail:s1:p1:{number}", b"x", 2, 2, f"h:1:1:me:{number}", 60)
        for number in (1, 2)
    )
    waiting, answer = threading.Event(), threading.Event()

    def reply(call):
        if call.head.method_name != Method.DEQUEUE:
            return None
        if not call.request.max_wait_ms:
            return DequeueResult([first])
        if waiting.is_set():
            return DequeueResult([])
        waiting.set()
        answer.wait(120)
        return DequeueResult([claimed])

    server.reply = reply

    def has_hung_up() -> bool:
        ends = psutil.Process().net_connections("tcp")
        return any(e.laddr.port == server.port and e.status == "CLOSE_WAIT" for e in ends)

    handlers = handlers_of("mail", lambda job: "done", concurrency=1)
    worker = Worker(Client(port=server.port), handlers)
    with running(worker):
        assert waiting.wait(60)
        worker.stop()
        wait_until(has_hung_up)
        answer.set()

    [released] = [call for call in server.calls if call.head.method_name == Method.CHECKPOINT]
    [checkpoint] = released.request.checkpoints
    assert checkpoint.claim_descriptor == claimed.claim_descriptor
    assert checkpoint.move_to_pending
