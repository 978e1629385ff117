"""A move of a shard's jobs, and queues that go away meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import pytest

from pinlaterd.cli.moving import Move, ShardCalls
from pinlaterd.errors import PinLaterError, QueueNotFound
from pinlaterd.model import Method
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Head
from pinlaterd.wire.envelope import ReplyEntry, Status
from pinlaterd.wire.shard_caller import ShardCaller


class Source:
    """A shard without scheduled jobs, and with queues of which `deleted` are gone by now."""

    def __init__(self, names: Sequence[str], deleted: Sequence[str]) -> None:
        self.names = names
        self.deleted = deleted
        self.visited: list[str] = []

    def queues(self) -> Sequence[str]:
        return self.names

    def scan(self, queue: str, *_: object, **__: object) -> Iterator[object]:
        if queue in self.deleted:
            raise QueueNotFound(queue)
        self.visited.append(queue)
        yield from ()


def test_a_queue_that_is_deleted_meanwhile_does_not_stop_it():
    source = Source(["a", "b"], deleted=["a"])

    Move(cast("ShardCalls", source), list, lambda _: None).run()

    assert source.visited == ["b"]


class Caller:
    """Answers each call with the next of `replies`."""

    name = "1"

    def __init__(self, *replies: ReplyEntry) -> None:
        self.replies = list(replies)

    def call(self, *_: object, **__: object) -> ReplyEntry:
        return self.replies.pop(0)


NAMES = Head(Method.QUEUE_NAMES.value, 0, oneway=False, strict=True)


def failed(error: PinLaterError) -> ReplyEntry:
    return ReplyEntry(0, Status.FAILED, codec.encode_error(NAMES, error))


def test_what_a_store_refuses_for_a_while_is_asked_again():
    answer = ReplyEntry(0, Status.DONE, codec.encode_reply(NAMES, frozenset(["a"])))
    locked = failed(PinLaterError("the search failed: locked"))

    shard = ShardCalls(cast("ShardCaller", Caller(locked, locked, answer)))

    assert shard.queues() == ["a"]


def test_what_is_refused_for_good_is_not_asked_again():
    shard = ShardCalls(cast("ShardCaller", Caller(failed(QueueNotFound("a")))))

    with pytest.raises(QueueNotFound):
        shard.queues()
