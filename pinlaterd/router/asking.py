"""Asking several shards at once, and what their replies bear.

Relies on `shards` for whom to ask and on `rpc` for bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pinlaterd.config.schema import KIB
from pinlaterd.errors import PinLaterError
from pinlaterd.model import Method, Result
from pinlaterd.router.call import shard_failed, shards_failed
from pinlaterd.router.shards import Shard
from pinlaterd.rpc import codec
from pinlaterd.wire.link import Outcome, ShardCall, ShardReply

# Each step of a larger call takes milliseconds.
LARGE_BYTES = 64 * KIB


async def let_others_go_on(size: int) -> None:
    """Between the steps of a call whose message has so many bytes, if that is large."""
    if size > LARGE_BYTES:
        await asyncio.sleep(0)


async def ask_all(calls: Sequence[tuple[Shard, ShardCall]]) -> list[ShardReply]:
    return await asyncio.gather(*(shard.ask(call) for shard, call in calls))


def results_of(
    method: Method, shards: Sequence[Shard], replies: Sequence[ShardReply]
) -> list[Result]:
    """What each said; raises the first error that a shard gave, else names those that failed."""
    for shard, reply in zip(shards, replies, strict=True):
        if reply.outcome is Outcome.FAILED:
            result_of(shard, method, reply)
    failed = [
        (shard.name, reply)
        for shard, reply in zip(shards, replies, strict=True)
        if reply.outcome is not Outcome.DONE
    ]
    if failed:
        raise shards_failed(failed)
    return [result_of(shard, method, reply) for shard, reply in zip(shards, replies, strict=True)]


def result_of(shard: Shard, method: Method, reply: ShardReply) -> Result:
    """What the reply bears; raises the error that it bears, or what became of the call."""
    if reply.outcome in (Outcome.DONE, Outcome.FAILED):
        return codec.decode_reply(method, reply.payload)
    error: PinLaterError = shard_failed(shard.name, reply)
    raise error
