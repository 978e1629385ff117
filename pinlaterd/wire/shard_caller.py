"""A shard called by a command: blocking, one call at a time, past the routers.

A command that has to know for sure what became of a call uses this: the shard drops a call that is
past its deadline before it commits anything, so that once the deadline has passed, and the shard
answers others, nothing can happen any more that can't be seen in its store. Each shard is a
`ShardLink` on an event loop that runs only during calls; it follows the shard's owner, as
run/snapshot.json names it. The current folder has to stay the deployment's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import NamedTuple

import zmq

from pinlaterd.clock import Clock
from pinlaterd.config import layout
from pinlaterd.config.active import read_active
from pinlaterd.errors import ConfigError
from pinlaterd.wire.control import read_snapshot
from pinlaterd.wire.curve import ClusterKey
from pinlaterd.wire.envelope import (
    GiveUp,
    Op,
    ReplyEntry,
    ShardCall,
    ShardFacts,
    Status,
    new_context,
)
from pinlaterd.wire.link import LinkListener, ShardLink

# How long an answer may take beyond the deadline: the shard judges that when it takes up the call.
_GRACE_SECONDS = 5.0
_UNAVAILABLE = ReplyEntry(0, Status.REFUSED, b"is down")
_LOOK_AGAIN_SECONDS = 0.25

# A command tells what becomes of its calls; it has no log.
logging.getLogger("pinlaterd.wire").addHandler(logging.NullHandler())


class Route(NamedTuple):
    """The way from this server to a shard's owner."""

    endpoint: str
    key: ClusterKey | None = None


def route_to(shard: str) -> Route:
    """Find the route by run/snapshot.json. Raises ConfigError."""
    snapshot = read_snapshot()
    if snapshot is None or not snapshot.server:
        return Route(layout.shard_endpoint(shard))
    active = read_active()
    if active is None:
        raise ConfigError([f"{layout.CONFIG_FILE}: can't be read; does the coordinator run?"])
    key = ClusterKey.load(layout.ETC / layout.CLUSTER_KEY_FILE, active.config.server.cluster)
    endpoint = next((snapshot.endpoint_of(e) for e in snapshot.shards if e.name == shard), "")
    return Route(endpoint, key)


class ShardCallers(contextlib.ExitStack):
    """The shards that a command calls, each once it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._callers: dict[str, ShardCaller] = {}
        self._context = new_context()
        self.callback(self._context.destroy, linger=0)  # monitors, too
        self._runner = self.enter_context(asyncio.Runner())

    def __getitem__(self, shard: str) -> ShardCaller:
        caller = self._callers.get(shard)
        if caller is None:
            caller = ShardCaller(shard, self._context, self._runner)
            self._callers[shard] = caller
            self.callback(caller.close)
        return caller


class ShardCaller(LinkListener):
    """One shard. Each call is answered by its status; none raises."""

    def __init__(
        self,
        name: str,
        context: zmq.Context[zmq.Socket[bytes]],
        runner: asyncio.Runner,
    ) -> None:
        self.name = name
        self._runner = runner
        self._is_welcome = asyncio.Event()
        self._clock = Clock()
        route = route_to(name)

        async def connect() -> ShardLink:
            # No shard is expected back: `call` itself waits for it.
            return ShardLink(
                name,
                route.endpoint,
                context,
                self,
                self._clock,
                max_bytes=sys.maxsize,
                return_seconds=0.0,
                key=route.key,
            )

        self._link = runner.run(connect())

    def close(self) -> None:
        self._link.close()

    def call(
        self, message: bytes, *, seconds: float, op: Op = Op.CALL, placement: int = 0
    ) -> ReplyEntry:
        """Have the shard do it within `seconds`, or not at all; `placement`: of keys.

        REFUSED: nothing was done. LOST or LATE: nobody knows, until the deadline has passed and
        the shard answers again."""
        deadline = self._clock.monotonic() + seconds
        call = ShardCall(message, deadline, op, whole=False, patient=False, give_up=GiveUp.NEVER)
        call.grace_seconds, call.placement = _GRACE_SECONDS, placement
        return self._runner.run(self._call(call))

    async def _call(self, call: ShardCall) -> ReplyEntry:
        await asyncio.sleep(0)  # first of all, take what has come since the call before
        while not self._link.incarnation:
            seconds = call.deadline - self._clock.monotonic()
            if seconds <= 0:
                return _UNAVAILABLE
            self._is_welcome.clear()
            if endpoint := route_to(self.name).endpoint:
                self._link.move_to(endpoint)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(seconds, _LOOK_AGAIN_SECONDS)):
                    await self._is_welcome.wait()
        return await self._link.ask(call)

    # --- what the link hears (LinkListener) -----------------------------------------------

    def membership(self) -> tuple[str, str]:
        return "", ""  # to a person's command, no shard is refused

    def welcomed(self, link: ShardLink, facts: ShardFacts) -> None:
        self._is_welcome.set()
