"""One connection to a server, in whose session statements mean what they say; the values in them,
and its faults.

Everything that a statement's meaning depends on is pinned, whatever the server's defaults: UTC,
utf8mb4, strict and backslash-escaping sql_mode, READ COMMITTED. Everything has a time limit. A
connection that is lost stays lost: no reconnecting here, for what it held is lost with it.

Statements are bytes, and only here values become part of them. Their literals are safe because the
session has utf8mb4, in which no byte of a longer character can be taken for a quote or a backslash,
and an sql_mode without NO_BACKSLASH_ESCAPES and ANSI_QUOTES: a quote and a backslash are all that
has to be escaped; every other byte, zero included, stands for itself. The driver's own formatting
of arguments costs several times as much for each value.

PyMySQL's and the operating system's exceptions become pinlaterd's own by `storage_error`:

in a transaction  StorageNotCommitted: it is rolled back, by us or by the server
during a COMMIT   what is found out then; StorageError if nothing is
anything else     StorageError where something may have been changed

The store has to be reopened after a lost connection, for the lock that made us owner went with it;
where tables are gone, for the engine then finds what is there; and where a server has become
read-only, for the address may lead to another one by now.
"""

from __future__ import annotations

import math
import re
import select
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import pymysql
from pymysql import err
from pymysql.constants import CLIENT, CR, ER
from pymysql.cursors import DictCursor

from pinlaterd.engines.base import CUT_SECONDS
from pinlaterd.errors import StorageError, StorageFull, StorageNotCommitted, address_of

T = TypeVar("T")

_CONNECT_SECONDS = 5.0
# A network that is silent this long, while much patience is had with a statement, is gone.
_PROBE_AFTER_SECONDS, _PROBE_EVERY_SECONDS, _PROBES = 5, 5, 3
# What a statement's text may add to the values in it.
_PACKET_MARGIN_BYTES = 64 * 1024
# Beyond this a longer statement saves nothing.
_LARGEST_STATEMENT_BYTES = 4 << 20
# The longest that both kinds of server take.
_NEVER_SECONDS = 31_536_000

# The rows of an IN list stay a list: servers turn long ones into a join of their own.
_ONLY_MARIADB = ", in_predicate_conversion_threshold = 0"
# Cached figures of tables may be a day old, and AUTO_INCREMENT is among them.
_ONLY_MYSQL = ", information_schema_stats_expiry = 0"


# Before a statement that waits for locks all the same, on MariaDB; MySQL always waits a second.
WAIT_FOR_LOCKS = b"SET STATEMENT lock_wait_timeout = 1, innodb_lock_wait_timeout = 1 FOR "


class MysqlAddress(NamedTuple):
    """The address of a shard's master, and the account to use there."""

    host: str
    port: int
    user: str
    passwd: str

    def __str__(self) -> str:
        return f"mysql {address_of(self.host, self.port)}"


class MysqlConnection:
    """To be used by one thread. The driver's exceptions leave it as they are."""

    def __init__(
        self,
        server: MysqlAddress,
        *,
        patience_seconds: float,
        idle_seconds: float | None = None,
        read_only: bool = False,
        waits_for_locks: bool = True,
    ) -> None:
        """`patience_seconds`: how long an answer may take before the connection counts as lost.
        `idle_seconds`: how long the server keeps it without a statement (None: as long as can be).
        `waits_for_locks`: whether a statement waits for a third of the patience while another
        connection holds a lock that it needs; else it fails at once (MySQL: after a second).

        Raises StorageError if there is no such server, or it does not let us in."""
        self.patience_seconds = patience_seconds
        self._packet_bytes = _PACKET_MARGIN_BYTES  # until the server has told
        self.last_statement = b""
        try:
            self._db = pymysql.connect(
                host=server.host,
                port=server.port,
                user=server.user.encode(errors="surrogateescape"),
                # The driver would encode a str as Latin-1.
                password=server.passwd.encode(errors="surrogateescape"),
                charset="utf8mb4",
                autocommit=True,
                connect_timeout=min(_CONNECT_SECONDS, patience_seconds),
                read_timeout=patience_seconds,
                write_timeout=patience_seconds,
                client_flag=CLIENT.FOUND_ROWS | CLIENT.MULTI_STATEMENTS,
                program_name="pinlaterd",
            )
            self._cursor = self._db.cursor()
            self._watch_socket()
            self.is_mariadb = "mariadb" in self._db.get_server_info().lower()
            self._configure(
                patience_seconds, idle_seconds, read_only=read_only, waits_for_locks=waits_for_locks
            )
        except FAULTS as fault:
            raise connect_error(fault, str(server), server.user) from fault

    def _configure(
        self,
        patience_seconds: float,
        idle_seconds: float | None,
        *,
        read_only: bool,
        waits_for_locks: bool,
    ) -> None:
        idle = _NEVER_SECONDS if idle_seconds is None else math.ceil(idle_seconds)
        patience = math.ceil(patience_seconds)
        # The wait for a lock ends before the patience does. MySQL can't wait less than a second.
        lock_wait = max(1, patience // 3)
        if not waits_for_locks:
            lock_wait = 0 if self.is_mariadb else 1
        only_here = _ONLY_MARIADB if self.is_mariadb else _ONLY_MYSQL
        self.execute(
            b"SET SESSION time_zone = '+00:00',"
            b" sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION',"
            b" wait_timeout = %d, net_read_timeout = %d, net_write_timeout = %d,"
            b" innodb_lock_wait_timeout = %d, lock_wait_timeout = %d%s"
            % (idle, patience, patience, lock_wait, lock_wait, only_here.encode())
        )
        # Not by @@: a server that has no such variable (any more) would refuse all of them.
        found = dict(
            self.rows(
                b"SHOW SESSION VARIABLES WHERE variable_name IN"
                b" ('max_allowed_packet', 'log_bin', 'binlog_format')"
            )
        )
        # InnoDB refuses READ COMMITTED where statements themselves are replicated.
        by_statement = found.get("log_bin") == "ON" and found.get("binlog_format") == "STATEMENT"
        self.execute(
            b"SET SESSION TRANSACTION ISOLATION LEVEL "
            + (b"REPEATABLE READ" if by_statement else b"READ COMMITTED")
        )
        if read_only:
            self.execute(b"SET SESSION TRANSACTION READ ONLY")
        self._packet_bytes = int(found["max_allowed_packet"])
        room = max(self._packet_bytes - _PACKET_MARGIN_BYTES, _PACKET_MARGIN_BYTES)
        self.statement_bytes = min(room, _LARGEST_STATEMENT_BYTES)
        # The longest value that fits whatever is in it: a literal may take two bytes for each.
        self.value_bytes = max(0, self._packet_bytes - _PACKET_MARGIN_BYTES) // 2

    def _watch_socket(self) -> None:
        """Set the pace of TCP's keepalive; the system's, which the driver has, is hours."""
        connected = self._db._sock  # noqa: SLF001
        self._unasked = select.poll()  # a server that speaks unasked hangs up
        self._unasked.register(connected, select.POLLIN)
        for option, value in (
            (socket.TCP_KEEPIDLE, _PROBE_AFTER_SECONDS),
            (socket.TCP_KEEPINTVL, _PROBE_EVERY_SECONDS),
            (socket.TCP_KEEPCNT, _PROBES),
        ):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)

    def notice_cuts(self) -> None:
        """Take it for lost once the server's system has acknowledged nothing for CUT_SECONDS."""
        connected = self._db._sock  # noqa: SLF001
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(CUT_SECONDS * 1000))

    @contextmanager
    def patiently(self, seconds: float) -> Iterator[None]:
        """Allow the statements within so much more time than others."""
        self.be_patient(self.patience_seconds + seconds)
        try:
            yield
        finally:
            self.be_patient(self.patience_seconds)

    def be_patient(self, seconds: float) -> None:
        """Allow answers so much time from now on. The driver has no public way to say so."""
        self._db._read_timeout = seconds  # noqa: SLF001

    def run(self, statements: Sequence[bytes]) -> tuple[tuple[Any, ...], ...]:
        """Run statements in one packet, one after the other, up to the first that fails:
        `last_statement` is that one. Return the rows that the last one read."""
        packet = b"; ".join(statements)
        self.last_statement = statements[-1]
        # The server would not only refuse such a packet but hang up, and its locks go with that.
        if len(packet) >= self._packet_bytes:
            raise err.OperationalError(
                ER.NET_PACKET_TOO_LARGE,
                f"a statement has {len(packet)} bytes, and max_allowed_packet is "
                f"{self._packet_bytes}",
            )
        done = 0
        try:
            self._cursor.execute(packet)
            done += 1
            while self._cursor.nextset():
                done += 1
            rows: tuple[tuple[Any, ...], ...] = self._cursor.fetchall()
            return rows
        finally:
            self.last_statement = statements[min(done, len(statements) - 1)]

    def execute(self, statement: bytes) -> None:
        self.run([statement])

    def rows(self, statement: bytes) -> tuple[tuple[Any, ...], ...]:
        return self.run([statement])

    def check_open(self) -> None:
        """Raises what a statement would if the server has hung up: before that is sent."""
        if self._unasked.poll(0):
            raise err.OperationalError(CR.CR_SERVER_LOST, "Lost connection to server")

    def roll_back(self) -> None:
        """Roll back; `last_statement` stays the one that failed."""
        self._db.rollback()

    def named_rows(self, statement: bytes) -> list[dict[str, Any]]:
        """Run a statement whose columns differ between servers; return its rows by column name."""
        with self._db.cursor(DictCursor) as cursor:
            cursor.execute(statement)
            rows: list[dict[str, Any]] = list(cursor.fetchall())
        return rows

    def close(self) -> None:
        """Close the connection, whatever state it is in. Safe to repeat."""
        if self._db.open:
            try:
                self._db.close()
            except FAULTS:
                self._db._force_close()  # noqa: SLF001


# --- values as literals ---------------------------------------------------------------------

# What DATETIME can hold, and Python's datetime too.
EARLIEST_MS = -62_135_596_800_000  # 0001-01-01
LATEST_MS = 253_402_300_799_999  # 9999-12-31 23:59:59.999
# Fewer ids that follow one another are listed.
_SHORTEST_RANGE = 8
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  the session's time zone is UTC, and literals bear none


def escaped(value: bytes) -> bytes:
    return value.replace(b"\\", b"\\\\").replace(b"'", b"\\'")


def quote_bytes(value: bytes) -> bytes:
    """Quote a binary string, to which no character set is ever applied."""
    return b"_binary'" + escaped(value) + b"'"


def quote_text(value: str) -> bytes:
    """Quote a text. Raises UnicodeEncodeError for what is none (lone surrogates)."""
    return b"'" + escaped(value.encode()) + b"'"


def quote_name(*parts: str) -> bytes:
    """Quote the name of a database, or of a table in it."""
    return b".".join(b"`" + part.replace("`", "``").encode() + b"`" for part in parts)


@lru_cache(maxsize=1024)  # a batch names a few times again and again
def quote_time(time_ms: int) -> bytes:
    """Quote a time in UTC; what is beyond all that can be stored becomes its first or last."""
    time_ms = min(max(time_ms, EARLIEST_MS), LATEST_MS)
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    return b"'" + moment.isoformat(" ", "milliseconds").encode() + b"'"


@lru_cache(maxsize=1024)
def time_number(time_ms: int) -> bytes:
    """Write a time as a number, which a server takes a third of a microsecond less for. Only to be
    inserted: with a number, times compare as numbers."""
    text = quote_time(time_ms)
    if text < b"'1000":  # an earlier year could be taken for one of two digits
        return text
    return text.translate(None, b"'-: ")


def among(local_ids: Collection[int]) -> bytes:
    """Write the condition that `local_id` is one of these. Ids that follow one another, as those of
    most batches do, are a range: for a server that costs a tenth of what a list of them does."""
    ids = sorted(set(local_ids))
    if ids[-1] - ids[0] == len(ids) - 1:
        return b"local_id BETWEEN %d AND %d" % (ids[0], ids[-1])
    listed: list[int] = []
    ranges: list[bytes] = []
    first = 0
    for at in range(1, len(ids) + 1):
        if at < len(ids) and ids[at] == ids[at - 1] + 1:
            continue
        if at - first < _SHORTEST_RANGE:
            listed += ids[first:at]
        else:
            ranges.append(b"local_id BETWEEN %d AND %d" % (ids[first], ids[at - 1]))
        first = at
    if listed:
        ranges.append(b"local_id IN (" + ",".join(map(str, listed)).encode() + b")")
    return b"(" + b" OR ".join(ranges) + b")"


def pieces(listed: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    if len(listed) <= size:
        if listed:
            yield listed
        return
    for first in range(0, len(listed), size):
        yield listed[first : first + size]


# --- faults ---------------------------------------------------------------------------------

# All that PyMySQL raises: its own tree, what sockets raise, and, for packets or values that can't
# be read or written, struct.error, OverflowError, UnicodeError.
FAULTS = (err.MySQLError, OSError, MemoryError, OverflowError, UnicodeError, struct.error)

_ACCESS_DENIED, _NO_PRIVILEGE = 1045, 1044
DUPLICATE_KEY, DEADLOCK, UNKNOWN_CONNECTION = 1062, 1213, 1094
_LOCK_WAIT = 1205
_WITHIN_COMMIT = 1180
# 1053 shutdown, 1080 and 1152 aborted, 1927 killed, 2006 gone, 2013 lost, 2014 out of step,
# 2055 lost in the system, 4031 closed for idleness
_LOST = frozenset({0, 1053, 1080, 1152, 1158, 1159, 1160, 1161, 1927, 2006, 2013, 2014, 2055, 4031})
# 1008 and 1049 unknown database, 1051 and 1146 unknown table, 1054 unknown column, 1932 damaged
_GONE = frozenset({1008, 1049, 1051, 1054, 1146, 1932})
READ_ONLY = frozenset({1290, 1836})
# In whichever language: Unknown database 'a', Table 'a.b' doesn't exist.
_NAMED_DATABASE = re.compile(r"'([^'.]+)[.']")
_DISK_FULL, _TABLE_FULL = 1021, 1114
# A write, or a storage engine, that failed; the text says why.
_PERHAPS_FULL = frozenset({1026, 1030})
_NO_SPACE = re.compile(r"(?i)no space left|\b(errno|errcode|error):? 28\b")
_TIMED_OUT = frozenset({1028, 1317, 1969, 3024})

PACKET_CURE = "raise max_allowed_packet of the server above twice the largest body"
_CURES = {
    1021: "the server's disk is full; make room there",
    1040: "the server has no connection left; raise max_connections",
    1044: "grant the shard's user ALL on `plq\\_%`.* and `plm\\_%`.*",
    1045: "correct user and passwd of this shard in etc/shards.yaml",
    1095: "another account opened it: let all servers use one account for this shard, or grant this"
    " one CONNECTION ADMIN (MySQL: CONNECTION_ADMIN)",
    1114: "the server's tablespace or disk is full; make room there",
    1129: "the server blocks this host; run FLUSH HOSTS there",
    1130: "the server does not let this host in; create the user for it",
    1142: "grant the shard's user ALL on `plq\\_%`.* and `plm\\_%`.*",
    1153: PACKET_CURE,
    1205: "another connection has locked these tables or jobs; end that transaction or ALTER",
    1264: "PinLater's table holds less; change its columns to those of jobs.sql",
    1290: "the server is read-only; point this shard's master to the primary",
    1292: "PinLater's table holds less; change its columns to those of jobs.sql",
    1406: "PinLater's table holds less; change its columns to those of jobs.sql",
    1836: "the server is read-only; point this shard's master to the primary",
}


def code_of(fault: BaseException) -> int | None:
    """Return the server's or the driver's number of an error, or None."""
    if isinstance(fault, err.MySQLError) and fault.args and isinstance(fault.args[0], int):
        return fault.args[0]
    return None


def is_lost(fault: BaseException) -> bool:
    """Tell whether the connection is of no use any more, as far as `fault` tells."""
    return isinstance(fault, (OSError, struct.error)) or code_of(fault) in _LOST


def leaves_doubt(fault: BaseException, statement: bytes) -> bool:
    """Tell whether a transaction whose last `statement` has failed may be committed."""
    code = code_of(fault)
    if code is None or code in _LOST or code == _WITHIN_COMMIT:  # None: no answer of the server
        return True
    return statement == b"COMMIT" and code != _LOCK_WAIT


def is_gone(fault: BaseException) -> bool:
    """Tell whether tables that we know of are not there any more."""
    return code_of(fault) in _GONE


def gone_database(fault: BaseException) -> str:
    """Return the database that is not there any more, as the server names it; "" if it is another
    matter. Of a table that is gone: its database, which may be there still."""
    if code_of(fault) not in _GONE:
        return ""
    named = _NAMED_DATABASE.search(str(fault.args[1])) if len(fault.args) > 1 else None
    return named[1] if named else ""


def is_locked(fault: BaseException) -> bool:
    """Tell whether another connection holds a lock that the statement needs."""
    return code_of(fault) == _LOCK_WAIT


def is_timeout(fault: BaseException) -> bool:
    """Tell whether a statement was ended at its deadline, by the server or by our patience."""
    if code_of(fault) in _TIMED_OUT or isinstance(fault, TimeoutError):
        return True
    # The driver reports a read that timed out as a lost connection, with that in its text.
    return code_of(fault) in _LOST and "timed out" in str(fault)


def is_full(fault: BaseException) -> bool:
    """Tell whether the server has no room."""
    code = code_of(fault)
    if code in _PERHAPS_FULL:
        return _NO_SPACE.search(str(fault)) is not None
    return code in (_DISK_FULL, _TABLE_FULL)


def describe(fault: BaseException) -> str:
    """Describe a fault, with its cure where that is known."""
    code = code_of(fault)
    if code is None:
        return f"{fault} ({type(fault).__name__})"
    said = str(fault.args[1]) if len(fault.args) > 1 else type(fault).__name__
    cure = _CURES.get(code) or (_CURES[_DISK_FULL] if is_full(fault) else "")
    return f"{said} (error {code})" + (f"; {cure}" if cure else "")


def storage_error(fault: BaseException, server: str, *, undone: bool) -> StorageError:
    """Make the StorageError that stands for `fault`; `undone`: nothing changed, beyond doubt."""
    message = f"{server}: {describe(fault)}"
    if is_gone(fault):
        message += "; the tables were changed by somebody else"
    if undone and is_full(fault):
        return StorageFull(message)
    return StorageNotCommitted(message) if undone else StorageError(message)


def connect_error(fault: BaseException, server: str, user: str) -> StorageError:
    """Make the error that says why a connection failed, and how to mend it."""
    cause = getattr(fault, "original_exception", None) or fault
    if code_of(fault) == _ACCESS_DENIED:
        return StorageError(
            f"{server}: user {user!r} or its password is not accepted (error 1045); "
            f"{_CURES[_ACCESS_DENIED]}"
        )
    if isinstance(cause, socket.gaierror):
        return StorageError(
            f"{server}: the host is unknown ({cause.strerror}); correct master of this shard in "
            "etc/shards.yaml"
        )
    if isinstance(cause, ConnectionRefusedError):
        return StorageError(
            f"{server}: nothing listens there; start the server, or correct master of this shard "
            "in etc/shards.yaml"
        )
    if isinstance(cause, TimeoutError):
        return StorageError(
            f"{server}: no answer in time; see whether the server hangs or a firewall is between"
        )
    return StorageError(f"{server}: no connection: {describe(fault)}")
