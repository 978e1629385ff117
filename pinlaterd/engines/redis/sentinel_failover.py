"""Failover of a Redis master that Sentinels watch over: the Failover seam.

    hold      the shards are taken from their owners, and kept, so that nothing is acknowledged
              any more; then every replica has to confirm that it has all. A crash leaves them held
              until the time is over, and then the owners go on
    ask       a Sentinel begins a failover. From here on the Sentinels carry it out by themselves
    switch    until they have agreed on another master
    release   the shards are free there, and their next owners are told of an unclean end

Without the hold, what an owner wrote between the promotion and the old master's end would be lost:
Sentinels promote a replica first. Shards find the new master by themselves.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

from pinlaterd.clock import Clock
from pinlaterd.engines.failover import Examination, Failover, Handover, Place, ServerFacts, Step
from pinlaterd.engines.redis import scripts
from pinlaterd.engines.redis.connection import Connection, Server
from pinlaterd.engines.redis.replication import read_link
from pinlaterd.engines.redis.sentinel import Sentinels
from pinlaterd.errors import StorageError

_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 5.0
# What Sentinels take: they wait for each other's votes, and for the replica.
_SWITCH_SECONDS = 60.0


class SentinelFailover(Failover):
    def __init__(self, sentinels: Sentinels, handover: Handover, clock: Clock) -> None:
        self._sentinels = sentinels
        self._handover = handover
        self._clock = clock
        self._master: Server | None = None  # the old one
        self._successor: Server | None = None

    def close(self) -> None:
        """No connection is kept."""

    def _old(self) -> Server:
        if self._master is None:
            self._master = self._sentinels.find()
        return self._master

    def _connect(self, server: Server) -> Connection:
        """The shard's own account administers what Sentinels do not."""
        seconds = max(_ANSWER_SECONDS, self._handover.catch_up_seconds + 1)
        return Connection(server, seconds)

    def examine(self) -> Examination:
        replica = ServerFacts("whom Sentinels choose")
        try:
            old = self._old()
        except StorageError as error:
            master = ServerFacts("whom Sentinels name", error.message)
            return Examination(master, replica, [error.message], [])
        facts = ServerFacts(f"{old.host}:{old.port}")
        try:
            connection = self._connect(old)
            try:
                link = read_link(connection)
            finally:
                connection.close()
        except StorageError as error:
            left = f"{error.message}; Sentinels replace such a master by themselves"
            return Examination(facts._replace(trouble=error.message), replica, [left], [])
        facts = facts._replace(writable=link.source is None, written=str(link.offset))
        obstacles = []
        if link.source is not None:
            obstacles.append(f"{old} is a replica: a failover is under way already")
        elif not link.replicas:
            obstacles.append(f"{old} has no replica that is online")
        return Examination(facts, replica, obstacles, [])

    def steps(self) -> Sequence[Step]:
        old = self._old()
        return [
            Step("hold", f"stop writes on {old}, until its replicas have all", self._hold, True),
            Step("ask", f"ask {self._sentinels} for a failover", self._ask, revocable=True),
            Step("switch", "wait until they have agreed on another master", self._switch),
            Step("release", "let the shards be owned there", self._release),
        ]

    def last_steps(self) -> Sequence[Step]:
        """Sentinels make the old master a replica."""
        return []

    def successor(self) -> Place:
        server = self._successor or self._sentinels.find()
        return Place(server.host, server.port)

    def undo(self) -> None:
        self._free(self._old())

    def _hold(self) -> str:
        held_seconds = self._handover.catch_up_seconds + _SWITCH_SECONDS
        token = f"0:0:a failover by process {os.getpid()} on {socket.gethostname()}"
        connection = self._connect(self._old())
        try:
            for shard in self._handover.shards:
                connection.run(scripts.HOLD, (shard, token, round(held_seconds * 1000)))
            wanted = len(read_link(connection).replicas)
            limit_ms = round(self._handover.catch_up_seconds * 1000)
            confirmed: int = connection.read("WAIT", wanted, limit_ms)
        finally:
            connection.close()
        if not wanted or confirmed < wanted:
            raise StorageError(
                f"{confirmed} of {wanted} replicas of {self._old()} confirmed within"
                f" {self._handover.catch_up_seconds:g} s that they have all"
            )
        return f"{wanted} replicas have all that {self._old()} acknowledged"

    def _ask(self) -> str:
        return f"{self._sentinels.fail_over()} began"

    def _switch(self) -> str:
        old = self._old()
        deadline = self._clock.monotonic() + _SWITCH_SECONDS
        while True:
            found = self._sentinels.find()
            if (found.host, found.port) != (old.host, old.port) and self._is_master(found):
                self._successor = found
                return f"{found} is the master"
            if self._clock.monotonic() > deadline:
                raise StorageError(
                    f"Sentinels still name {old} after {_SWITCH_SECONDS:g} s; their logs say why"
                )
            time.sleep(_POLL_SECONDS)

    def _is_master(self, server: Server) -> bool:
        try:
            connection = self._connect(server)
            try:
                return read_link(connection).source is None
            finally:
                connection.close()
        except StorageError:
            return False

    def _release(self) -> str:
        server = self._successor or self._sentinels.find()
        self._free(server)
        return f"the shards are free at {server}"

    def _free(self, server: Server) -> None:
        connection = self._connect(server)
        try:
            for shard in self._handover.shards:
                connection.run(scripts.RELEASE_LEASE, (shard,))
        finally:
            connection.close()
