"""A server as replication sees it: its position, whose replica it is, and the statements for both.

MariaDB and MySQL count transactions in different ways and have renamed statements and columns at
different times; all that is known of it is here. Three kinds of positions are compared:

MariaDB with GTIDs   @@gtid_binlog_pos of the master against @@gtid_slave_pos of the replica
MySQL with GTIDs     gtid_executed of both, as sets
without              file and offset in the master's binary log
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from pinlaterd.config.schema import Address
from pinlaterd.engines.failover import Account
from pinlaterd.engines.mysql.connection import (
    FAULTS,
    MysqlAddress,
    MysqlConnection,
    code_of,
    describe,
    quote_text,
)
from pinlaterd.engines.mysql.ownership import ServerLock
from pinlaterd.errors import StorageError

_ANSWER_SECONDS = 30.0
_NO_PRIVILEGE = frozenset({1044, 1142, 1227})
_UNKNOWN_DATABASE, _UNKNOWN_TABLE = 1049, 1146
# An owner whose connection was ended has lost its lock within so many seconds.
_LOCK_ATTEMPTS = 15
_FILTERS = re.compile(r"Replicate_(Do|Ignore|Wild_Do|Wild_Ignore)_|Replicate_Rewrite_DB")
# What MySQL has renamed, in this order; MariaDB and old MySQL have the names on the left.
_RENAMED = (("Master", "Source"), ("Slave", "Replica"))


class Words(NamedTuple):
    """The words of SQL that differ between servers."""

    replica: bytes
    source: bytes
    replica_status: bytes
    binlog_status: bytes


class Position(NamedTuple):
    """A position in a server's binary log."""

    file: str
    offset: int
    gtids: str  # "" without GTIDs

    @property
    def place(self) -> str:
        return f"{self.file}:{self.offset}"

    def __str__(self) -> str:
        return self.gtids or self.place


class ReplicaStatus(NamedTuple):
    """The state of replication as a replica reports it."""

    source: Address
    source_id: str  # server_uuid of its master, in MariaDB server_id; "" before it ever connected
    receives: bool
    receive_error: str
    applies: bool
    apply_error: str
    received: str  # file and offset of the master's log
    applied: str
    behind_seconds: float | None
    by_gtid: bool
    encrypted: bool
    filters: str  # "" if everything is replicated
    channels: int  # from how many masters


class ReplicationServer:
    """One server, for somebody who may administer it."""

    def __init__(self, place: Address, account: Account) -> None:
        """Connect. Raises StorageError."""
        self.server = MysqlAddress(place.host, place.port, account.user, account.passwd)
        self._db = MysqlConnection(self.server, patience_seconds=_ANSWER_SECONDS)
        version = str(self._value(b"VERSION()"))
        self._version = _version(version)
        self._words = words_of(version, is_mariadb=self._db.is_mariadb)
        identity = b"@@server_id" if self._db.is_mariadb else b"@@server_uuid"
        self.identity = str(self._value(identity))

    def __str__(self) -> str:
        return str(self.server)

    def close(self) -> None:
        self._db.close()

    # --- what it says ------------------------------------------------------------------------

    def is_writable(self) -> bool:
        return str(self._value(b"@@global.read_only")).upper() in ("0", "OFF")

    def position(self) -> Position | None:
        """Return its position; None if it writes no binary log, from which replicas could read."""
        with self._guarded():
            rows = self._db.named_rows(self._words.binlog_status)
        if not rows:
            return None
        gtids = ""
        if self._db.is_mariadb:
            gtids = self._value(b"@@global.gtid_binlog_pos")
        elif str(self._value(b"@@global.gtid_mode")).upper() == "ON":
            gtids = self._value(b"@@global.gtid_executed")
        return Position(rows[0]["File"], int(rows[0]["Position"]), gtids.replace("\n", ""))

    def hands_on(self) -> bool:
        """Tell whether its binary log has what it replicated, so that others can go on."""
        name = b"log_slave_updates"
        if not self._db.is_mariadb and self._version >= (8, 0, 26):
            name = b"log_replica_updates"
        return bool(self._value(b"@@global.log_bin AND @@global." + name))

    def replica_status(self) -> ReplicaStatus | None:
        """Return its status as a replica; None if it is none."""
        with self._guarded():
            rows = self._db.named_rows(self._words.replica_status)
        return replica_status(rows[0], channels=len(rows)) if rows else None

    def applied_gtids(self) -> str:
        name = b"gtid_slave_pos" if self._db.is_mariadb else b"gtid_executed"
        return str(self._value(b"@@global." + name)).replace("\n", "")

    def has_applied(self, position: Position, status: ReplicaStatus) -> bool:
        """Tell whether this replica has all up to its master's `position`."""
        if not status.by_gtid or not position.gtids:
            return status.applied == position.place
        if self._db.is_mariadb:
            return is_included(position.gtids, self.applied_gtids())
        wanted = quote_text(position.gtids)
        return bool(self._value(b"GTID_SUBSET(%b, @@global.gtid_executed)" % wanted))

    def owned_shards(self) -> list[str]:
        """List the shards that an owner has ever opened here, of whatever deployment."""
        with self._guarded():
            rows = self._db.rows(
                b"SELECT schema_name FROM information_schema.schemata"
                b" WHERE schema_name LIKE 'plm\\_%'"
            )
        return [str(name).removeprefix("plm_") for (name,) in rows]

    # --- what it is told ---------------------------------------------------------------------

    def stop_writes(self) -> None:
        """Wait for commits under way, and refuse writes of all but administrators after."""
        self._do(b"SET GLOBAL read_only = 1")
        if not self._db.is_mariadb:
            self._do(b"SET GLOBAL super_read_only = 1")

    def allow_writes(self) -> None:
        if not self._db.is_mariadb:
            self._do(b"SET GLOBAL super_read_only = 0")
        self._do(b"SET GLOBAL read_only = 0")

    def take_over(self, shard: str) -> int:
        """Own a shard until this connection ends; returns how many owners' connections were ended
        for that."""
        with self._guarded():
            lock = ServerLock(shard, self.server)
            return lock.take(self._db, attempts=_LOCK_ATTEMPTS, ends_after=0)

    def stop_replicating(self) -> None:
        self._do(b"STOP " + self._words.replica)

    def forget_source(self) -> None:
        """Be nobody's replica any more. Replication has been stopped."""
        self._do(b"RESET " + self._words.replica + b" ALL")

    def replicate_from(
        self, source: Address, start: Position, account: Account, *, by_gtid: bool, encrypted: bool
    ) -> None:
        """Begin to, from `start` in its log. The server itself has all up to there."""
        if by_gtid and self._db.is_mariadb:
            self._do(b"SET GLOBAL gtid_slave_pos = @@global.gtid_binlog_pos")
        word = self._words.source
        options = [
            b"%b_HOST = %b" % (word, quote_text(source.host)),
            b"%b_PORT = %d" % (word, source.port),
            b"%b_USER = %b" % (word, quote_text(account.user)),
            b"%b_PASSWORD = %b" % (word, quote_text(account.passwd)),
            b"%b_SSL = %d" % (word, encrypted),
        ]
        if not by_gtid:
            options.append(b"%b_LOG_FILE = %b" % (word, quote_text(start.file)))
            options.append(b"%b_LOG_POS = %d" % (word, start.offset))
        elif self._db.is_mariadb:
            options.append(b"MASTER_USE_GTID = slave_pos")
        else:
            options.append(b"%b_AUTO_POSITION = 1" % word)
        verb = b"CHANGE MASTER TO "
        if word == b"SOURCE":
            verb = b"CHANGE REPLICATION SOURCE TO "
            options.append(b"GET_SOURCE_PUBLIC_KEY = 1")
        self._do(verb + b", ".join(options))
        self._do(b"START " + self._words.replica)

    # --- how it is asked ---------------------------------------------------------------------

    def _value(self, expression: bytes) -> Any:
        with self._guarded():
            [[value]] = self._db.rows(b"SELECT " + expression)
        return value

    def _do(self, statement: bytes) -> None:
        with self._guarded():
            self._db.execute(statement)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except FAULTS as fault:
            message = f"{self.server}: {describe(fault)}"
            if code_of(fault) in _NO_PRIVILEGE:
                message += (
                    f"; user {self.server.user!r} may not administer it: name one who may with"
                    " --user; docs/operations.md, Failover, lists the privileges"
                )
            raise StorageError(message) from fault


def _version(text: str) -> tuple[int, ...]:
    numbers = re.match(r"[0-9.]+", text)
    return tuple(int(part) for part in (numbers[0] if numbers else "0").split(".") if part)


def words_of(version: str, *, is_mariadb: bool) -> Words:
    numbers = (0,) if is_mariadb else _version(version)
    replica, source = (b"REPLICA", b"SOURCE") if numbers >= (8, 0, 23) else (b"SLAVE", b"MASTER")
    replicas = b"ALL SLAVES" if is_mariadb else replica
    binlog = b"BINARY LOG" if numbers >= (8, 4) else b"MASTER"
    return Words(replica, source, b"SHOW %b STATUS" % replicas, b"SHOW %b STATUS" % binlog)


def replica_status(said: Mapping[str, Any], *, channels: int) -> ReplicaStatus:
    """Parse a row of SHOW REPLICA STATUS, whatever the server calls it."""
    row: dict[str, Any] = {}
    for name, value in said.items():
        for old, new in _RENAMED:
            name = name.replace(old, new)  # noqa: PLW2901
        row[name] = value
    behind = row["Seconds_Behind_Source"]
    filters = [f"{name} {value}" for name, value in row.items() if value and _FILTERS.match(name)]
    source_id = row.get("Source_UUID") or row["Source_Server_Id"] or ""
    return ReplicaStatus(
        source=Address(str(row["Source_Host"]), int(row["Source_Port"])),
        source_id=str(source_id),
        receives=row["Replica_IO_Running"] == "Yes",
        receive_error=str(row["Last_IO_Error"] or ""),
        applies=row["Replica_SQL_Running"] == "Yes",
        apply_error=str(row["Last_SQL_Error"] or ""),
        received=f"{row['Source_Log_File']}:{row['Read_Source_Log_Pos']}",
        applied=f"{row['Relay_Source_Log_File']}:{row['Exec_Source_Log_Pos']}",
        behind_seconds=None if behind is None else float(behind),
        by_gtid=row.get("Using_Gtid", "No") != "No" or str(row.get("Auto_Position")) == "1",
        encrypted=row["Source_SSL_Allowed"] == "Yes",
        filters=", ".join(filters),
        channels=channels,
    )


def is_included(wanted: str, gtids: str) -> bool:
    """Tell whether MariaDB's `gtids` (DOMAIN-SERVER-NUMBER, …) reach `wanted` in each domain."""
    reached = _numbers(gtids)
    return all(reached.get(domain, -1) >= number for domain, number in _numbers(wanted).items())


def _numbers(gtids: str) -> Mapping[str, int]:
    numbers: dict[str, int] = {}
    for gtid in filter(None, gtids.split(",")):
        domain, _, number = gtid.strip().split("-")
        numbers[domain] = max(int(number), numbers.get(domain, -1))
    return numbers
