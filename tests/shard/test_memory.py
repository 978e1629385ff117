"""What a shard holds in memory, however deep its queues."""

from __future__ import annotations

import pytest

from pinlaterd.config.schema import MIB
from pinlaterd.model import DequeueRequest, EnqueueRequest, Job


def held_bytes(shard) -> float:
    shard.service.tick()
    return float(shard.stats.snapshot()["gauges"]["shard_buffer_bytes"])


def test_memory_stays_within_its_buffer_and_no_job_is_lost(make_shard):
    shard = make_shard(shard_buffer_bytes=1 * MIB)
    queues = [f"q{number}" for number in range(5)]
    for queue in queues:
        shard.create(queue)
        for _ in range(4):
            shard.enqueue(*[bytes(300)] * 1_000, queue=queue)
            assert held_bytes(shard) <= 1 * MIB

    for queue in queues:
        seen = [job.descriptor for _ in range(4) for job in shard.dequeue(1_000, queue=queue)]
        assert len(set(seen)) == 4_000
        assert held_bytes(shard) <= 1 * MIB


def test_large_bodies_do_not_fill_memory(make_shard):
    shard = make_shard(shard_buffer_bytes=4 * MIB)
    shard.create()
    for _ in range(8):
        shard.enqueue(*[bytes(MIB)] * 2)
        assert held_bytes(shard) <= 4 * MIB

    results = shard.results(*[DequeueRequest("mail", 4)] * 4)

    assert sum(len(result.jobs) for result in results) == 16


def test_memory_of_jobs_that_are_done_is_given_back(shard):
    empty = held_bytes(shard)
    for _ in range(3):
        shard.enqueue(*[bytes(500)] * 1_000)
        assert held_bytes(shard) > empty
        jobs = shard.dequeue(1_000)
        shard.ack([job.descriptor for job in jobs])
        assert held_bytes(shard) == empty


@pytest.mark.parametrize("calls", [1, 40])
def test_a_batch_is_bounded_in_jobs(shard, calls):
    per_call = 8_000 // calls
    requests = [EnqueueRequest("mail", [Job(b"a")] * per_call) for _ in range(calls)]

    shard.results(*requests)

    batches = shard.stats.snapshot()["histograms"]["shard_batch_jobs"]
    assert batches.maximum <= max(2_000 + per_call, per_call)
    assert shard.counters()["mail_enqueue"] == 8_000
