"""A shard called by a command: blocking, one call at a time, past the routers.

A command that has to know for sure what became of a call uses this: the shard drops a call that is
past its deadline before it commits anything, so that once the deadline has passed, and the shard
answers others, nothing can happen any more that can't be seen in its store. Each shard is a
`ShardLink` on an event loop that runs only during calls. The current folder has to stay the
deployment's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterable

import zmq

from pinlaterd.clock import Clock
from pinlaterd.wire.envelope import (
    GiveUp,
    Op,
    ReadyCounts,
    ReplyEntry,
    ShardCall,
    ShardFacts,
    Status,
    new_context,
)
from pinlaterd.wire.link import ShardLink

# How long an answer may take beyond the deadline: the shard judges that when it takes up the call.
_GRACE_SECONDS = 5.0
_UNAVAILABLE = ReplyEntry(0, Status.REFUSED, b"is down")

# A command tells what becomes of its calls; it has no log.
logging.getLogger("pinlaterd.wire.link").addHandler(logging.NullHandler())


class ShardCallers(contextlib.ExitStack):
    """The shards that a command calls, each once it is asked for."""

    def __init__(self, endpoint_of: Callable[[str], str]) -> None:
        super().__init__()
        self._endpoint_of = endpoint_of
        self._callers: dict[str, ShardCaller] = {}
        self._context = new_context()
        self.callback(self._context.destroy, linger=0)  # monitors, too
        self._runner = self.enter_context(asyncio.Runner())

    def __getitem__(self, shard: str) -> ShardCaller:
        caller = self._callers.get(shard)
        if caller is None:
            caller = ShardCaller(shard, self._endpoint_of(shard), self._context, self._runner)
            self._callers[shard] = caller
            self.callback(caller.close)
        return caller


class ShardCaller:
    """One shard (a LinkListener). Each call is answered by its status; none raises."""

    def __init__(
        self,
        name: str,
        address: str,
        context: zmq.Context[zmq.Socket[bytes]],
        runner: asyncio.Runner,
    ) -> None:
        self.name = name
        self._runner = runner
        self._is_welcome = asyncio.Event()
        self._clock = Clock()

        async def connect() -> ShardLink:
            # No shard is expected back: `call` itself waits for it.
            return ShardLink(
                name, address, context, self, self._clock, max_bytes=sys.maxsize, return_seconds=0.0
            )

        self._link = runner.run(connect())

    def close(self) -> None:
        self._link.close()

    def call(self, message: bytes, *, seconds: float, op: Op = Op.CALL) -> ReplyEntry:
        """Have the shard do it within `seconds`, or not at all.

        REFUSED: nothing was done. LOST or LATE: nobody knows, until the deadline has passed and
        the shard answers again."""
        deadline = self._clock.monotonic() + seconds
        call = ShardCall(message, deadline, op, whole=False, patient=False, give_up=GiveUp.NEVER)
        call.grace_seconds = _GRACE_SECONDS
        return self._runner.run(self._call(call))

    async def _call(self, call: ShardCall) -> ReplyEntry:
        await asyncio.sleep(0)  # first of all, take what has come since the call before
        if not self._link.incarnation:
            self._is_welcome.clear()
            try:
                async with asyncio.timeout(call.deadline - self._clock.monotonic()):
                    await self._is_welcome.wait()
            except TimeoutError:
                return _UNAVAILABLE
        return await self._link.ask(call)

    # --- what the link hears (LinkListener) -----------------------------------------------

    def welcomed(self, link: ShardLink, facts: ShardFacts) -> None:
        self._is_welcome.set()

    def counted(self, link: ShardLink, counts: Iterable[ReadyCounts]) -> None: ...

    def assessed(self) -> None: ...

    def others_can_serve(self, link: ShardLink) -> bool:
        return False

    def queues_known(self) -> Iterable[str]:
        return ()
