"""The Worker when the service goes away under it: it waits, and its acks arrive all the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pinlaterd.client import (
    ConnectionFailed,
    Handlers,
    JobState,
    PinLaterError,
    RunningJob,
    Worker,
)
from tests.deployment import Deployment

pytestmark = pytest.mark.service


@pytest.fixture
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("d"))
    deployment.init(shards=1, settings={})
    try:
        deployment.up()
        yield deployment
    finally:
        deployment.destroy()


@pytest.mark.parametrize("program", ["router", "shard-1"])
def test_jobs_in_hand_are_acknowledged_once_a_killed_process_is_back(
    deployment, wait_until, program
):
    runs: list[bytes] = []
    begun, release = threading.Event(), threading.Event()

    handlers = Handlers()

    @handlers.queue("mail")
    def handle(job: RunningJob) -> str:
        runs.append(job.body)
        begun.set()
        release.wait(30)
        return "done"

    with deployment.client() as client:
        client.create_queue("mail")
        bodies = [b"%d" % n for n in range(4)]
        descriptors = client.enqueue("mail", bodies)
        worker = Worker(client, handlers, concurrency=4, max_wait_ms=200)
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            assert begun.wait(20)
            deployment.kill(program)
            release.set()

            def all_succeeded() -> bool:
                try:
                    records = client.lookup(descriptors).values()
                except (PinLaterError, ConnectionFailed):
                    return False
                return [r.state for r in records] == [JobState.SUCCEEDED] * 4

            wait_until(all_succeeded)
        finally:
            release.set()
            worker.stop()
            thread.join(30)
    assert not thread.is_alive()
    assert sorted(runs) == bodies
