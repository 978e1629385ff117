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

from pinlaterd.engines.failover import Account, Place
from pinlaterd.engines.mysql.connection import Connection, Server
from pinlaterd.engines.mysql.faults import FAULTS, code_of, describe
from pinlaterd.engines.mysql.literals import quote_text
from pinlaterd.errors import StorageError

_ANSWER_SECONDS = 30.0
_NO_PRIVILEGE = frozenset({1044, 1142, 1227})
_FILTERS = re.compile(r"Replicate_(Do|Ignore|Wild_Do|Wild_Ignore)_|Replicate_Rewrite_DB")
# What MySQL has renamed, in this order; MariaDB and old MySQL have the names on the left.
_RENAMED = (("Master", "Source"), ("Slave", "Replica"))


class Statements(NamedTuple):
    """What differs between servers only in its words."""

    replica_status: bytes
    binlog_status: bytes
    start: bytes
    stop: bytes
    forget: bytes


_OF_MARIADB = Statements(
    b"SHOW ALL SLAVES STATUS",
    b"SHOW MASTER STATUS",
    b"START SLAVE",
    b"STOP SLAVE",
    b"RESET SLAVE ALL",
)
_OF_OLD_MYSQL = _OF_MARIADB._replace(replica_status=b"SHOW SLAVE STATUS")
_OF_MYSQL = Statements(
    b"SHOW REPLICA STATUS",
    b"SHOW MASTER STATUS",
    b"START REPLICA",
    b"STOP REPLICA",
    b"RESET REPLICA ALL",
)
_OF_NEW_MYSQL = _OF_MYSQL._replace(binlog_status=b"SHOW BINARY LOG STATUS")


class Position(NamedTuple):
    """How far a server has written its binary log."""

    file: str
    offset: int
    gtids: str  # "" without GTIDs

    def __str__(self) -> str:
        return self.gtids or f"{self.file}:{self.offset}"


class ReplicaStatus(NamedTuple):
    """What a replica says of its replication."""

    source: Place
    source_id: str  # server_uuid of its master, in MariaDB server_id; "" before it ever connected
    receives: bool
    receive_error: str
    applies: bool
    apply_error: str
    received: tuple[str, int]  # file and offset of the master's log
    applied: tuple[str, int]
    behind_seconds: float | None
    by_gtid: bool
    encrypted: bool
    filters: str  # "" if everything is replicated
    channels: int  # from how many masters

    @property
    def applied_all_received(self) -> bool:
        return self.received == self.applied


class ReplicationServer:
    """One server, for somebody who may administer it."""

    def __init__(self, place: Place, account: Account) -> None:
        """Connect. Raises StorageError."""
        self.server = Server(place.host, place.port, account.user, account.passwd)
        self._db = Connection(self.server, patience_seconds=_ANSWER_SECONDS)
        with self._said():
            [[version, server_id]] = self._db.rows(b"SELECT VERSION(), @@server_id")
            self.identity = str(server_id)
            if not self._db.is_mariadb:
                [[self.identity]] = self._db.rows(b"SELECT @@server_uuid")
        self._version = _version(str(version))
        self._statements = statements_for(str(version), is_mariadb=self._db.is_mariadb)

    def __str__(self) -> str:
        return str(self.server)

    @property
    def is_mariadb(self) -> bool:
        return self._db.is_mariadb

    def close(self) -> None:
        self._db.close()

    # --- what it says ------------------------------------------------------------------------

    def is_writable(self) -> bool:
        with self._said():
            [[read_only]] = self._db.rows(b"SELECT @@global.read_only")
        return str(read_only).upper() in ("0", "OFF")

    def position(self) -> Position | None:
        """None if it writes no binary log, from which replicas could read."""
        with self._said():
            rows = self._db.named_rows(self._statements.binlog_status)
            if not rows:
                return None
            gtids = ""
            if self._db.is_mariadb:
                [[gtids]] = self._db.rows(b"SELECT @@global.gtid_binlog_pos")
            elif self._has_gtids():
                [[gtids]] = self._db.rows(b"SELECT @@global.gtid_executed")
        return Position(rows[0]["File"], int(rows[0]["Position"]), gtids.replace("\n", ""))

    def _has_gtids(self) -> bool:
        [[mode]] = self._db.rows(b"SELECT @@global.gtid_mode")
        return str(mode).upper() == "ON"

    def hands_on(self) -> bool:
        """Whether its binary log has what it replicated, so that others can go on from there."""
        name = b"log_slave_updates"
        if not self._db.is_mariadb and self._version >= (8, 0, 26):
            name = b"log_replica_updates"
        with self._said():
            [[logs, hands_on]] = self._db.rows(b"SELECT @@global.log_bin, @@global." + name)
        return bool(logs) and bool(hands_on)

    def replica_status(self) -> ReplicaStatus | None:
        """None if it is no replica."""
        with self._said():
            rows = self._db.named_rows(self._statements.replica_status)
        if not rows:
            return None
        return replica_status(rows[0], channels=len(rows))

    def applied_gtids(self) -> str:
        name = b"gtid_slave_pos" if self._db.is_mariadb else b"gtid_executed"
        with self._said():
            [[gtids]] = self._db.rows(b"SELECT @@global." + name)
        return str(gtids).replace("\n", "")

    def has_applied(self, position: Position, status: ReplicaStatus) -> bool:
        """Whether this replica has all up to its master's `position`."""
        if not status.by_gtid or not position.gtids:
            return status.applied == (position.file, position.offset)
        if self._db.is_mariadb:
            return is_included(position.gtids, self.applied_gtids())
        with self._said():
            [[included]] = self._db.rows(
                b"SELECT GTID_SUBSET(%b, @@global.gtid_executed)" % quote_text(position.gtids)
            )
        return bool(included)

    def owned_shards(self) -> list[str]:
        """The shards that an owner has ever opened here, of whatever deployment."""
        with self._said():
            rows = self._db.rows(
                b"SELECT schema_name FROM information_schema.schemata"
                b" WHERE schema_name LIKE 'plm\\_%'"
            )
        return [str(name).removeprefix("plm_") for (name,) in rows]

    # --- what it is told ---------------------------------------------------------------------

    def stop_writes(self) -> None:
        """Waits for commits under way. From then on only administrators can write."""
        with self._said():
            self._db.execute(b"SET GLOBAL read_only = 1")
            if not self._db.is_mariadb:
                self._db.execute(b"SET GLOBAL super_read_only = 1")

    def allow_writes(self) -> None:
        with self._said():
            if not self._db.is_mariadb:
                self._db.execute(b"SET GLOBAL super_read_only = 0")
            self._db.execute(b"SET GLOBAL read_only = 0")

    def take_lock(self, name: str, seconds: float) -> int | None:
        """Until this connection ends. None once it is ours, else the connection that has it."""
        lock = quote_text(name)
        with self._said():
            [[locked]] = self._db.rows(b"SELECT GET_LOCK(%b, %.3f)" % (lock, seconds))
            if locked == 1:
                return None
            [[holder]] = self._db.rows(b"SELECT IS_USED_LOCK(%b)" % lock)
        return int(holder or 0)

    def end_connection(self, connection: int) -> None:
        """It may have ended by itself."""
        unknown = 1094
        with self._said():
            try:
                self._db.execute(b"KILL %d" % connection)
            except FAULTS as fault:
                if code_of(fault) != unknown:
                    raise

    def start_replicating(self) -> None:
        with self._said():
            self._db.execute(self._statements.start)

    def stop_replicating(self) -> None:
        with self._said():
            self._db.execute(self._statements.stop)

    def forget_source(self) -> None:
        """Be nobody's replica any more. Replication has been stopped."""
        with self._said():
            self._db.execute(self._statements.forget)

    def replicate_from(
        self, source: Place, start: Position, account: Account, *, by_gtid: bool, encrypted: bool
    ) -> None:
        """Begin to, from `start` in its log. The server itself has all up to there."""
        with self._said():
            if by_gtid and self._db.is_mariadb:
                self._db.execute(b"SET GLOBAL gtid_slave_pos = @@global.gtid_binlog_pos")
            statement = self._change_source(
                source, start, account, by_gtid=by_gtid, encrypted=encrypted
            )
            self._db.execute(statement)
            self._db.execute(self._statements.start)

    def _change_source(
        self, source: Place, start: Position, account: Account, *, by_gtid: bool, encrypted: bool
    ) -> bytes:
        new_words = self._statements in (_OF_MYSQL, _OF_NEW_MYSQL)
        word = b"SOURCE" if new_words else b"MASTER"
        options = [
            b"%b_HOST = %b" % (word, quote_text(source.host)),
            b"%b_PORT = %d" % (word, source.port),
            b"%b_USER = %b" % (word, quote_text(account.user)),
            b"%b_PASSWORD = %b" % (word, quote_text(account.passwd)),
            b"%b_SSL = %d" % (word, encrypted),
        ]
        if not by_gtid:
            options += [
                b"%b_LOG_FILE = %b" % (word, quote_text(start.file)),
                b"%b_LOG_POS = %d" % (word, start.offset),
            ]
        elif self._db.is_mariadb:
            options.append(b"MASTER_USE_GTID = slave_pos")
        else:
            options.append(b"%b_AUTO_POSITION = 1" % word)
        if new_words:
            options.append(b"GET_SOURCE_PUBLIC_KEY = 1")
        verb = b"CHANGE REPLICATION SOURCE TO " if new_words else b"CHANGE MASTER TO "
        return verb + b", ".join(options)

    def mark_unclean(self, shard_database: bytes) -> None:
        """Note an unclean end for the next owner of a shard, if it was ever owned."""
        unknown_database, unknown_table = 1049, 1146
        with self._said():
            try:
                self._db.execute(
                    b"UPDATE %b.owner SET value = 0 WHERE name = 'clean'" % shard_database
                )
            except FAULTS as fault:
                if code_of(fault) not in (unknown_database, unknown_table):
                    raise

    @contextmanager
    def _said(self) -> Iterator[None]:
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


def _renamed(column: str) -> str:
    for old, new in _RENAMED:
        column = column.replace(old, new)
    return column


def statements_for(version: str, *, is_mariadb: bool) -> Statements:
    if is_mariadb:
        return _OF_MARIADB
    numbers = _version(version)
    if numbers >= (8, 4):
        return _OF_NEW_MYSQL
    return _OF_MYSQL if numbers >= (8, 0, 23) else _OF_OLD_MYSQL


def replica_status(said: Mapping[str, Any], *, channels: int) -> ReplicaStatus:
    """Of a row of SHOW REPLICA STATUS, or what it is called on that server."""
    row = {_renamed(name): value for name, value in said.items()}
    behind = row["Seconds_Behind_Source"]
    filters = [f"{name} {value}" for name, value in row.items() if value and _FILTERS.match(name)]
    source_id = row.get("Source_UUID") or row["Source_Server_Id"] or ""
    return ReplicaStatus(
        source=Place(str(row["Source_Host"]), int(row["Source_Port"])),
        source_id=str(source_id),
        receives=row["Replica_IO_Running"] == "Yes",
        receive_error=str(row["Last_IO_Error"] or ""),
        applies=row["Replica_SQL_Running"] == "Yes",
        apply_error=str(row["Last_SQL_Error"] or ""),
        received=(str(row["Source_Log_File"]), int(row["Read_Source_Log_Pos"])),
        applied=(str(row["Relay_Source_Log_File"]), int(row["Exec_Source_Log_Pos"])),
        behind_seconds=None if behind is None else float(behind),
        by_gtid=row.get("Using_Gtid", "No") != "No" or str(row.get("Auto_Position")) == "1",
        encrypted=row["Source_SSL_Allowed"] == "Yes",
        filters=", ".join(filters),
        channels=channels,
    )


def is_included(wanted: str, gtids: str) -> bool:
    """Whether MariaDB's `gtids` (DOMAIN-SERVER-NUMBER, …) reach `wanted` in each domain."""
    reached = _numbers(gtids)
    return all(reached.get(domain, -1) >= number for domain, number in _numbers(wanted).items())


def _numbers(gtids: str) -> Mapping[str, int]:
    numbers: dict[str, int] = {}
    for gtid in filter(None, gtids.split(",")):
        domain, _, number = gtid.strip().split("-")
        numbers[domain] = max(int(number), numbers.get(domain, -1))
    return numbers
