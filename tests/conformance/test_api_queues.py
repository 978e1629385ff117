"""SPEC sections 1 and 3: queues.

deleteQueue without a password set, and a shard that joins later: test_api_shards_changed.py. With a
shard down: test_api_shard_down.py.
"""

from __future__ import annotations

import re

import pytest

from tests.conformance.api import (
    ADMIN_PASSWORD,
    PENDING,
    STATES,
    Backend,
    Client,
    Deployment,
    Refused,
    one_engine,
)

pytestmark = pytest.mark.service


def test_queue_exists_on_every_shard(client: Client, queue):
    assert set(client.enqueue_on_every_shard(queue)) == {"1", "2", "3"}


def test_create_is_idempotent(client: Client, queue):
    (descriptor,) = client.enqueue(queue, b"kept")

    client.create(queue)

    assert queue in client.names()
    assert client.info(descriptor).jobState == PENDING


@one_engine
@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a-b",
        "a b",
        "a.b",
        "a:b",
        "a/../b",
        "größe",
        "a'; DROP TABLE jobs; --",
        "a\n",
        "a\0",
    ],
)
def test_name_of_other_characters(client: Client, name):
    with pytest.raises(Refused, match=r"^QUEUE_NAME_INVALID: "):
        client.create(name)

    assert name not in client.names()


def test_name_too_long(client: Client, backend: Backend):
    longest = backend.queue_name_characters
    for excess in (1, 36):
        name = "q" * (longest + excess)
        with pytest.raises(Refused, match=rf"^QUEUE_NAME_TOO_LONG: .*\b{excess}\b"):
            client.create(name)
        assert name not in client.names()


def test_longest_name(client: Client, backend: Backend):
    name = "Az09_" + "q" * (backend.queue_name_characters - 5)

    client.create(name)
    (descriptor,) = client.enqueue(name, b"job")

    assert name in client.names()
    assert client.dequeue(name).keys() == {descriptor}


def test_delete_drops_queue_and_jobs_on_every_shard(service: Deployment, client: Client, queue):
    by_shard = client.enqueue_on_every_shard(queue)
    descriptors = [d for on_shard in by_shard.values() for d in on_shard]
    client.dequeue(queue)

    client.delete(queue, ADMIN_PASSWORD)

    with service.client() as other:
        assert queue not in other.names()
        assert other.lookup(*descriptors) == {}
        with pytest.raises(Refused, match=r"^QUEUE_NOT_FOUND: "):
            other.dequeue(queue)


@one_engine
@pytest.mark.parametrize("password", ["", "wrong horse", ADMIN_PASSWORD + " "])
def test_delete_with_a_wrong_password(client: Client, queue, password):
    (descriptor,) = client.enqueue(queue, b"kept")

    for name in (queue, "nowhere"):
        with pytest.raises(Refused, match=r"^PASSWORD_INVALID: "):
            client.delete(name, password)

    assert client.info(descriptor).jobState == PENDING
    assert queue in client.names()


def test_delete_of_no_queue(client: Client):
    client.delete("nowhere", ADMIN_PASSWORD)

    assert "nowhere" not in client.names()


def test_new_queue_of_an_old_name_is_empty_and_reuses_no_descriptor(client: Client, queue):
    old = {d for on_shard in client.enqueue_on_every_shard(queue).values() for d in on_shard}

    client.delete(queue, ADMIN_PASSWORD)
    client.create(queue)

    assert [client.count(queue, state) for state in STATES] == [0, 0, 0, 0]
    assert client.dequeue(queue, 100) == {}
    new = {d for on_shard in client.enqueue_on_every_shard(queue).values() for d in on_shard}
    assert not old & new
    assert client.lookup(*old) == {}


@one_engine
def test_unknown_queue(client: Client):
    calls = [
        lambda: client.enqueue("nowhere", b"job"),
        lambda: client.enqueue("nowhere", *[b"job"] * 1001),
        lambda: client.dequeue("nowhere"),
        lambda: client.dequeue("nowhere", dryRun=True),
        lambda: client.dequeue("nowhere", maxWaitMillis=60_000),
        lambda: client.ack("nowhere"),
        lambda: client.ack("nowhere", succeeded=["nowhere:s1:p1:1"]),
        lambda: client.checkpoint("nowhere"),
        lambda: client.checkpoint("nowhere", client.checkpoint_of("nowhere:s1:p1:1")),
        lambda: client.count("nowhere"),
        lambda: client.scan("nowhere"),
        lambda: client.retry_failed("nowhere"),
        lambda: client.delete_jobs("nowhere", PENDING),
    ]

    for call in calls:
        with pytest.raises(Refused) as refused:
            call()
        assert re.match("QUEUE_NOT_FOUND: .*nowhere", str(refused.value))
