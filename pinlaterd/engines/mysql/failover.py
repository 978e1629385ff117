"""Failover between MySQL or MariaDB servers: the Failover seam.

    stop-writes   read_only on the old master, and the lock of each shard, taken from its owner
                  whose connection is ended. A crash leaves it read-only: repeat, or allow writes
                  by hand
    catch-up      until the replica has applied all that the old master has written
    promote       the replica stops replicating and takes writes. A crash leaves it anywhere
                  between: repeat. What it had applied was noted first, and need not be proven again
    follow        the old master becomes a replica of the new one, if it has nothing that it lacks

An owner can't write once its connection is gone: it opens a shard only where it gets the lock,
which is held here, and where the server takes writes. The lock alone would end with our connection.
"""

from __future__ import annotations

from collections.abc import Sequence

from pinlaterd.clock import polls
from pinlaterd.config.schema import Address, ShardSettings
from pinlaterd.engines.failover import (
    PROOF_WORDS,
    Examination,
    Handover,
    Notes,
    Pair,
    PairFailover,
    ServerFacts,
    Step,
    is_same_server,
)
from pinlaterd.engines.mysql.replication import Position, ReplicaStatus, ReplicationServer
from pinlaterd.errors import StorageError, StorageNotCommitted

_CONNECT_SECONDS = 10.0

# Keys of notes: where the old master stood when it was proven that the replica has all, and where
# the new one's log goes on from there.
_PROVEN, _GOES_ON, _BY_GTID, _ENCRYPTED = "proven", "goes_on", "by_gtid", "encrypted"
# Whether the old master took writes before they were stopped.
_BEFORE = "before"
_WRITABLE, _READ_ONLY = "writable", "read-only"
_YES = "yes"


class MysqlFailover(PairFailover[ReplicationServer]):
    """The connections are kept: locks end with theirs."""

    def _connect(self, place: Address) -> ReplicationServer:
        return ReplicationServer(place, self._handover.administrator)

    # --- looking -----------------------------------------------------------------------------

    def examine(self) -> Examination:
        old = self._old()
        master = ServerFacts(str(self._pair.master), self._unreachable)
        if old is not None:
            position = old.position()
            written = "" if position is None else str(position)
            master = master._replace(writable=old.is_writable(), written=written)
        replica = ServerFacts(str(self._pair.replica))
        try:
            new = self._new()
        except StorageError as error:
            return Examination(master, replica._replace(failure=error.message), [error.message], [])
        replica = replica._replace(writable=new.is_writable())
        obstacles = []
        if old is not None and old.identity == new.identity:
            obstacles = [f"{old} and {new} are the same server, or share a server_id"]
        status = new.replica_status()
        if status is None:
            lacking = f"{new} is no replica: nobody can say what it has"
            return Examination(master, replica, obstacles, [lacking])
        replica = replica._replace(
            replicates_from=str(status.source),
            received=status.received,
            applied=new.applied_gtids() if status.by_gtid else status.applied,
            behind_seconds=status.behind_seconds,
        )
        risks = self._risks(old, new, status)
        return Examination(master, replica, obstacles, risks, self._remarks(old, new))

    def _risks(
        self, old: ReplicationServer | None, new: ReplicationServer, status: ReplicaStatus
    ) -> list[str]:
        risks = []
        if old is None:
            risks.append(f"the master does not answer ({self._unreachable}); {PROOF_WORDS}")
        if old is not None and status.source_id:
            if status.source_id != old.identity:
                risks.append(f"{new} replicates from another server, {status.source}")
        elif not is_same_server(status.source, self._pair.master):
            risks.append(f"{new} replicates from {status.source}, not from this master")
        if status.channels > 1:
            risks.append(f"{new} replicates from {status.channels} masters")
        if status.filters:
            risks.append(f"{new} does not replicate everything: {status.filters}")
        if old is not None and not status.receives:
            why = status.receive_error or "it was stopped, or still connects"
            risks.append(f"{new} receives nothing from its master: {why}")
        if not status.applies:
            why = status.apply_error or "it was stopped"
            risks.append(f"{new} does not apply what it receives: {why}")
        return risks

    def _remarks(self, old: ReplicationServer | None, new: ReplicationServer) -> list[str]:
        remarks = []
        if not new.hands_on():
            remarks.append(
                f"{new} has no binary log of what it replicates (log_bin, log_slave_updates): the"
                " old master can't become its replica"
            )
        others = [] if old is None else sorted({*old.owned_shards()} - {*self._handover.shards})
        if others:
            remarks.append(
                f"{old} also has shard {', '.join(others)}, which etc/shards.yaml does not have"
                " there: their owners can't write any more"
            )
        return remarks

    # --- the steps ---------------------------------------------------------------------------

    def steps(self) -> Sequence[Step]:
        master, replica = self._pair
        promote = Step("promote", f"make {replica} writable", self._promote)
        if self._old() is None:
            catch_up = f"wait until {replica} has applied what it has received"
            return [Step("catch-up", catch_up, self._apply_the_rest, revocable=True), promote]
        return [
            Step("stop-writes", f"stop writes on {master}", self._stop_writes, revocable=True),
            Step(
                "catch-up",
                f"wait until {replica} has all that {master} has written",
                self._catch_up,
                revocable=True,
            ),
            promote,
        ]

    def last_steps(self) -> Sequence[Step]:
        master, replica = self._pair
        return [Step("follow", f"make {master} a replica of {replica}", self._follow)]

    def undo(self) -> None:
        if self._notes.get(_BEFORE) == _WRITABLE:
            self._answering_old().allow_writes()

    def _stop_writes(self) -> str:
        old = self._answering_old()
        if not self._notes.get(_BEFORE):
            self._notes.put(_BEFORE, _WRITABLE if old.is_writable() else _READ_ONLY)
        old.stop_writes()
        ended = sum([old.take_over(shard) for shard in self._handover.shards])
        return f"{old} is read-only; {ended} connections of owners were ended"

    def _catch_up(self) -> str:
        """Prove that the replica has all. It need not run if that was proven before and nobody has
        written since: then a crash came while the replica was being promoted."""
        old = self._answering_old()
        position = old.position()
        if position is None:
            raise StorageNotCommitted(f"{old} has no binary log (log_bin): it can have no replica")
        if self._notes.get(_PROVEN) == str(position):
            return f"proven before: nothing was written since {position}"
        for is_late in polls(self._handover.catch_up_seconds):
            status = self._new().replica_status()
            if status is not None and self._new().has_applied(position, status):
                self._notes.put(_BY_GTID, _YES if status.by_gtid else "")
                self._notes.put(_ENCRYPTED, _YES if status.encrypted else "")
                self._notes.put(_PROVEN, str(position))
                return f"{self._new()} has all up to {position}"
            if not self._may_wait(status, is_late=is_late):
                break
        return f"given up: loss was accepted; the master had come to {position}"

    def _may_wait(self, status: ReplicaStatus | None, *, is_late: bool) -> bool:
        """Tell whether the replica may yet get there; False if it can't and loss was accepted."""
        replica = self._new()
        if status is not None and status.applies and status.receives:
            if not is_late:
                return True
            behind = status.behind_seconds
            shown = "" if behind is None else f", {behind:.0f} s behind"
            raise StorageError(
                f"{replica} did not catch up within {self._handover.catch_up_seconds:g} s{shown};"
                " wait until it has, or allow it more with --catch-up-seconds"
            )
        if self._handover.accept_loss:
            return False
        why = "" if status is None else status.apply_error or status.receive_error
        raise StorageError(f"{replica} does not replicate any more: {why or 'it was stopped'}")

    def _apply_the_rest(self) -> str:
        """Apply all that was received, as far as that can be: the master is gone."""
        self._go_on_without_master()
        new = self._new()
        for is_late in polls(self._handover.catch_up_seconds):
            status = new.replica_status()
            if status is None or not status.applies:
                return f"{new} applies nothing: it stays as it is"
            if status.applied == status.received:
                return f"{new} has applied all that it received"
            if is_late:
                break
        raise StorageError(
            f"{new} has not applied within {self._handover.catch_up_seconds:g} s"
            " what it received; allow it more with --catch-up-seconds"
        )

    def _promote(self) -> str:
        new = self._new()
        if new.replica_status() is not None:
            new.stop_replicating()
        if not self._notes.get(_GOES_ON):
            position = new.position()  # before anybody writes there
            if position is not None:
                self._notes.put(_GOES_ON, position.place)
        new.allow_writes()
        if new.replica_status() is not None:
            new.forget_source()
        return f"{new} takes writes, and replicates from nobody"

    # --- the old master ----------------------------------------------------------------------

    def _follow(self) -> str:
        old, (master, replica) = self._old(), self._pair
        proven, goes_on = self._notes.get(_PROVEN), self._notes.get(_GOES_ON)
        by_hand = (
            f"{master} may have jobs that {replica} lacks: keep it from taking writes, save what"
            f" you need of it, and rebuild it as a replica of {replica}"
        )
        if not proven:
            return by_hand
        if old is None:
            return f"{master} does not answer; {by_hand}"
        status = old.replica_status()
        if status is not None and is_same_server(status.source, replica):
            return f"{old} replicates from {replica} already"
        if str(old.position()) != proven or old.is_writable():
            return f"{master} was written to meanwhile; {by_hand}"
        if not goes_on or not self._new().hands_on():
            return (
                f"{replica} has no binary log of what it replicates: set log_bin and"
                f" log_slave_updates there, and rebuild {master} as its replica"
            )
        file, _, offset = goes_on.rpartition(":")
        return self._replicate_back(old, Position(file, int(offset), ""))

    def _replicate_back(self, old: ReplicationServer, start: Position) -> str:
        replica, account = self._pair.replica, self._handover.replication
        by_hand = (
            f"make {self._pair.master} a replica of {replica} by hand: it is read-only and has"
            f" all up to {start} of that server's log"
        )
        try:
            old.replicate_from(
                replica,
                start,
                account,
                by_gtid=self._notes.get(_BY_GTID) == _YES,
                encrypted=self._notes.get(_ENCRYPTED) == _YES,
            )
            why = self._why_not_connected(old)
            if why:
                old.stop_replicating()
                old.forget_source()
                return (
                    f"user {account.user!r} can't replicate ({why}); name one who may with"
                    f" --replication-user the next time, and now {by_hand}"
                )
        except StorageError as error:
            return f"{error.message}; {by_hand}"
        return f"{old} replicates from {replica}, and is read-only"

    def _why_not_connected(self, old: ReplicationServer) -> str:
        """Say why the replica does not receive; "" once it does."""
        for is_late in polls(_CONNECT_SECONDS):
            status = old.replica_status()
            if status is not None and status.receives and status.applies:
                return ""
            why = "" if status is None else status.receive_error or status.apply_error
            if why or is_late:
                return why or f"not connected within {_CONNECT_SECONDS:g} s"
        raise AssertionError  # polls never end


def make_failover(
    _shard: ShardSettings, pair: Pair | None, handover: Handover, notes: Notes
) -> MysqlFailover:
    assert pair is not None
    return MysqlFailover(pair, handover, notes)
