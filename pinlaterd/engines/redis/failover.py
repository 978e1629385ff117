"""The Failover seam between Redis servers. RedisFailover, where nobody else watches over them:

    hand-over   the old master itself stops writes, waits until the replica has all, and changes
                places with it (FAILOVER, since 6.2). It gives up by itself, too, and is then as
                before. A crash of ours leaves it to one of both ends: repeat
    promote     in place of that, where the master does not answer: REPLICAOF NO ONE. A crash leaves
                it anywhere between: repeat
    release     the leases of owners that the old master had are ended, so that none waits for their
                end. It is a courtesy: what fences an owner off is the token in the shard's record

An owner that writes to a server that is a replica is refused, before anything is stored.

SentinelFailover, of a master that Sentinels watch over:

    hold      the shards are taken from their owners, and kept, so that nothing is acknowledged
              any more; then every replica has to confirm that it has all. A crash leaves them held
              until the time is over, and then the owners go on
    ask       a Sentinel begins a failover. From here on the Sentinels carry it out by themselves
    switch    until they have agreed on another master
    release   the shards are free there
    follow    the old master becomes a replica at once. Sentinels would see to it, too, but only
              when they have seen it claim to be a master for a while

Without the hold, what an owner wrote between the promotion and the old master's end would be lost:
Sentinels promote a replica first. Shards find the new master by themselves.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import closing

from pinlaterd.clock import polls
from pinlaterd.config.schema import Address, ShardSettings
from pinlaterd.engines.failover import (
    PROOF_WORDS,
    Examination,
    Failover,
    Handover,
    Notes,
    Pair,
    PairFailover,
    ServerFacts,
    Step,
    is_same_server,
)
from pinlaterd.engines.redis import scripts
from pinlaterd.engines.redis.connection import RedisClient, Server
from pinlaterd.engines.redis.servers import Link, Sentinels, read_link, sentinels_of
from pinlaterd.errors import StorageError, address_of

_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 5.0
_FOLLOW_SECONDS = 10.0


class RedisFailover(PairFailover[RedisClient]):
    def _connect(self, place: Address) -> RedisClient:
        account = self._handover.administrator
        server = Server(place.host, place.port, account.user, account.passwd)
        connection = RedisClient(server, _ANSWER_SECONDS)
        try:
            read_link(connection)  # a server that lets nobody in answers, too
        except StorageError:
            connection.close()
            raise
        return connection

    # --- looking -----------------------------------------------------------------------------

    def examine(self) -> Examination:
        old = self._old()
        at_master = None if old is None else read_link(old)
        master = _facts(ServerFacts(str(self._pair.master), self._unreachable), at_master)
        replica = ServerFacts(str(self._pair.replica))
        try:
            at_replica = read_link(self._new())
        except StorageError as error:
            return Examination(master, replica._replace(failure=error.message), [error.message], [])
        replica = _facts(replica, at_replica)
        if at_master is None:
            return Examination(master, replica, [], self._risks_alone(at_replica))
        return Examination(master, replica, self._obstacles(at_master, at_replica), [])

    def _risks_alone(self, at_replica: Link) -> list[str]:
        risks = [f"the master does not answer ({self._unreachable}); {PROOF_WORDS}"]
        source = at_replica.source
        if source is None:
            risks.append(f"{self._pair.replica} is no replica: nobody can say what it has")
        elif not is_same_server(source, self._pair.master):
            risks.append(f"{self._pair.replica} replicates from {source}, not from this master")
        return risks

    def _obstacles(self, at_master: Link, at_replica: Link) -> list[str]:
        """Say what is in the way: a master that answers hands over in order, or not at all."""
        master, replica = self._pair
        if at_master.run_id == at_replica.run_id:
            return [f"{master} and {replica} are the same server"]
        if at_master.source is not None:
            return [f"{master} is a replica itself, of {at_master.source}"]
        if at_replica.source is None:
            return [f"{replica} is no replica: make it one of {master} (REPLICAOF)"]
        if not at_replica.is_connected and is_same_server(at_replica.source, master):
            return [f"{replica} is not connected to its master, or is loading what that sends"]
        # Names may differ; who is connected has its master's history.
        if not at_replica.is_connected or at_replica.replication_id != at_master.replication_id:
            return [f"{replica} replicates from another server, {at_replica.source}"]
        if self._as_listed(at_master) is None:
            return [f"{master} does not list {replica} among its replicas that are online"]
        return []

    def _as_listed(self, at_master: Link) -> Address | None:
        """Return the address under which the master lists the replica; None if it does not."""
        return next(
            (at for at in at_master.replicas if is_same_server(at, self._pair.replica)), None
        )

    # --- the steps ---------------------------------------------------------------------------

    def steps(self) -> Sequence[Step]:
        master, replica = self._pair
        release = Step("release", "end the leases of owners there", self._release)
        if self._old() is None:
            return [Step("promote", f"make {replica} a master", self._promote), release]
        words = f"have {master} stop writes, wait for {replica}, and change places with it"
        return [Step("hand-over", words, self._hand_over, revocable=True), release]

    def last_steps(self) -> Sequence[Step]:
        words = f"see that {self._pair.master} replicates from {self._pair.replica}"
        return [Step("follow", words, self._follow)]

    def undo(self) -> None:
        """Call a hand-over off that is under way; one that failed leaves the old master one.

        Raises StorageError if the servers have changed places by then."""
        self.close()  # an interrupted call leaves its connection of no use
        old = self._answering_old()
        if read_link(old).failover_state == "waiting-for-sync":
            old.administer("FAILOVER", "ABORT")
        while (link := read_link(old)).failover_state != "no-failover":
            time.sleep(_POLL_SECONDS)
        if link.source is not None:
            raise StorageError(f"{old.server} is a replica of {link.source} already")

    def _hand_over(self) -> str:
        old = self._answering_old()
        replica = self._pair.replica
        link = read_link(old)
        if link.source is not None and is_same_server(link.source, replica):
            return f"done before: {old.server} is a replica of {replica}"
        if link.failover_state == "no-failover":
            place = self._as_listed(link)
            if place is None:
                raise StorageError(f"{old.server} does not list {replica} as a replica any more")
            limit_ms = round(self._handover.catch_up_seconds * 1000)
            old.administer("FAILOVER", "TO", place.host, place.port, "TIMEOUT", limit_ms)
        while (link := read_link(old)).failover_state != "no-failover":
            time.sleep(_POLL_SECONDS)
        if link.source is None:
            raise StorageError(
                f"{old.server} gave the failover up and goes on as the master: {replica} did not"
                f" have all within {self._handover.catch_up_seconds:g} s. Its log says more; allow"
                " it more with --catch-up-seconds"
            )
        return f"{replica} is the master, and has all that {self._pair.master} acknowledged"

    def _promote(self) -> str:
        self._go_on_without_master()
        new = self._new()
        new.administer("REPLICAOF", "NO", "ONE")
        return f"{new.server} is a master"

    def _release(self) -> str:
        new = self._new()
        for shard in self._handover.shards:
            new.run(scripts.RELEASE_LEASE, (shard,))
        return f"shards at {new.server} have no owner"

    def _follow(self) -> str:
        old, (master, replica) = self._old(), self._pair
        if old is None:
            return (
                f"{master} does not answer, and may have jobs that {replica} lacks: keep it from"
                f" being used as a master, save what you need of it, and then give it"
                f" REPLICAOF {replica.host} {replica.port}, which replaces all it has"
            )
        for is_late in polls(_FOLLOW_SECONDS):
            link = read_link(old)
            if link.is_connected:
                break
            if link.source is None:
                return f"{master} is a master still; see its log"
            if is_late:
                return (
                    f"{master} is a replica of {link.source}, but not connected to it: see its log,"
                    " and set masterauth (and masteruser) there if it is not let in"
                )
        return f"{master} replicates from {replica}"


def _facts(facts: ServerFacts, link: Link | None) -> ServerFacts:
    if link is None:
        return facts
    offset = str(link.offset)
    if link.source is None:
        return facts._replace(writable=True, written=offset)
    return facts._replace(
        writable=False,
        replicates_from=str(link.source),
        received=offset,
        applied=offset,
        behind_seconds=link.silent_seconds,
    )


# What Sentinels take: they wait for each other's votes, and for the replica.
_SWITCH_SECONDS = 60.0


class SentinelFailover(Failover):
    def __init__(self, sentinels: Sentinels, handover: Handover) -> None:
        self._sentinels = sentinels
        self._handover = handover
        self._master: Server | None = None  # the old one
        self._successor: Server | None = None

    def close(self) -> None:
        """Do nothing: no connection is kept."""

    def _old(self) -> Server:
        if self._master is None:
            self._master = self._sentinels.find()
        return self._master

    def _connected(self, server: Server) -> closing[RedisClient]:
        """Connect by the shard's own account, which administers what Sentinels do not."""
        seconds = max(_ANSWER_SECONDS, self._handover.catch_up_seconds + 1)
        return closing(RedisClient(server, seconds))

    def examine(self) -> Examination:
        replica = ServerFacts("whom Sentinels choose")
        try:
            old = self._old()
        except StorageError as error:
            master = ServerFacts("whom Sentinels name", error.message)
            return Examination(master, replica, [error.message], [])
        facts = ServerFacts(address_of(old.host, old.port))
        try:
            with self._connected(old) as connection:
                link = read_link(connection)
        except StorageError as error:
            left = f"{error.message}; Sentinels replace such a master by themselves"
            return Examination(facts._replace(failure=error.message), replica, [left], [])
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
        words = f"make {self._old()} a replica, which Sentinels would do a little later"
        return [Step("follow", words, self._follow)]

    def successor(self) -> Address:
        server = self._successor or self._sentinels.find()
        return Address(server.host, server.port)

    def undo(self) -> None:
        self._free(self._old())

    def _hold(self) -> str:
        held_seconds = self._handover.catch_up_seconds + _SWITCH_SECONDS
        token = f"0:0:a failover by process {os.getpid()} on {socket.gethostname()}"
        with self._connected(self._old()) as connection:
            for shard in self._handover.shards:
                connection.run(scripts.HOLD, (shard, token, round(held_seconds * 1000)))
            wanted = len(read_link(connection).replicas)
            limit_ms = round(self._handover.catch_up_seconds * 1000)
            confirmed: int = connection.read("WAIT", wanted, limit_ms)
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
        for is_late in polls(_SWITCH_SECONDS):
            found = self._sentinels.find()
            if (found.host, found.port) != (old.host, old.port) and self._is_master(found):
                self._successor = found
                return f"{found} is the master"
            if is_late:
                break
        raise StorageError(
            f"Sentinels still name {old} after {_SWITCH_SECONDS:g} s; their logs say why"
        )

    def _is_master(self, server: Server) -> bool:
        try:
            with self._connected(server) as connection:
                return read_link(connection).source is None
        except StorageError:
            return False

    def _release(self) -> str:
        server = self._successor or self._sentinels.find()
        self._free(server)
        return f"the shards are free at {server}"

    def _follow(self) -> str:
        old, place = self._old(), self.successor()
        try:
            with self._connected(old) as connection:
                connection.administer("REPLICAOF", place.host, place.port)
        except StorageError as error:
            return f"{error.message}; Sentinels will see to it"
        return f"{old} replicates from {place}"

    def _free(self, server: Server) -> None:
        with self._connected(server) as connection:
            for shard in self._handover.shards:
                connection.run(scripts.RELEASE_LEASE, (shard,))


def make_failover(
    shard: ShardSettings, pair: Pair | None, handover: Handover, notes: Notes
) -> Failover:
    if shard.sentinel is not None:
        account = handover.administrator
        sentinels = sentinels_of(shard.sentinel, account.user, account.passwd)
        return SentinelFailover(sentinels, handover)
    assert pair is not None, "only Sentinels know the servers themselves"
    return RedisFailover(pair, handover, notes)
