"""A move of a shard's jobs, and queues that go away meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from pinlaterd.admin.moving import Move, Shards
from pinlaterd.admin.shard_calls import ShardCalls
from pinlaterd.errors import PinLaterError, QueueNotFound
from pinlaterd.model import Method
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Head
from pinlaterd.wire.link import Outcome, ShardReply
from pinlaterd.wire.shard_caller import ShardCaller


class Source:
    """A shard without scheduled jobs. `names`: its queues; `missing`: how often it then says of one
    that it has it not; `deleted`: those that are gone then."""

    name = "1"

    def __init__(
        self, names: Sequence[str], missing: dict[str, int], deleted: Sequence[str] = ()
    ) -> None:
        self.names = list(names)
        self.missing = missing
        self.deleted = deleted
        self.visited: list[str] = []

    def queues(self) -> list[str]:
        return list(self.names)

    def priorities(self) -> int:
        return 1

    def held(self, queue: str) -> list[object]:
        return []

    def hold(self, queue: str, *_: object) -> list[object]:
        if self.missing.get(queue, 0):
            self.missing[queue] -= 1
            self.names = [name for name in self.names if name not in self.deleted]
            raise QueueNotFound(queue)
        self.visited.append(queue)
        return []


def move(source: Source) -> None:
    shards = Shards(cast("ShardCalls", source), list, list)
    Move(shards, lambda _: None).run()


def test_a_queue_that_is_deleted_meanwhile_does_not_stop_it():
    source = Source(["a", "b"], {"a": 9}, deleted=["a"])

    move(source)

    assert source.visited == ["b"]


def test_a_queue_that_is_made_again_is_moved():
    source = Source(["a", "b"], {"a": 1})

    move(source)

    assert source.visited == ["a", "b"]


def test_a_queue_that_a_shard_lacks_although_it_is_there_stops_it():
    with pytest.raises(QueueNotFound):
        move(Source(["a"], {"a": 9}))


class Caller:
    """Answers each call with the next of `replies`."""

    name = "1"

    def __init__(self, *replies: ShardReply) -> None:
        self.replies = list(replies)

    def call(self, *_: object, **__: object) -> ShardReply:
        return self.replies.pop(0)


NAMES = Head(Method.QUEUE_NAMES.value, 0, oneway=False, strict=True)


def failed(error: PinLaterError) -> ShardReply:
    return ShardReply(Outcome.FAILED, codec.encode_error(NAMES, error))


def test_what_a_store_refuses_for_a_while_is_asked_again():
    answer = ShardReply(Outcome.DONE, codec.encode_reply(NAMES, frozenset(["a"])))
    locked = failed(PinLaterError("the search failed: locked"))

    shard = ShardCalls(cast("ShardCaller", Caller(locked, locked, answer)))

    assert shard.queues() == ["a"]


def test_what_is_refused_for_good_is_not_asked_again():
    shard = ShardCalls(cast("ShardCaller", Caller(failed(QueueNotFound("a")))))

    with pytest.raises(QueueNotFound):
        shard.queues()
