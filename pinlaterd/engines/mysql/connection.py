"""One connection to a server, with a session in which statements mean what they say.

Everything that a statement's meaning depends on is pinned, whatever the server's defaults: UTC,
utf8mb4, strict and backslash-escaping sql_mode, READ COMMITTED. Everything has a time limit. A
connection that is lost stays lost: no reconnecting here, for what it held is lost with it.
"""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pymysql
from pymysql import err
from pymysql.constants import CLIENT, CR, ER
from pymysql.cursors import DictCursor

from pinlaterd.engines.mysql.faults import FAULTS, connect_error

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


class Server(NamedTuple):
    """Where a shard's master is, and as whom."""

    host: str
    port: int
    user: str
    passwd: str

    def __str__(self) -> str:
        return f"mysql {self.host}:{self.port}"


class Connection:
    """To be used by one thread. The driver's exceptions leave it as they are (faults.py)."""

    def __init__(
        self,
        server: Server,
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
                user=server.user,
                password=server.passwd,
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
        """The driver asks for TCP's keepalive, but at the system's pace: after hours."""
        connected = self._db._sock  # noqa: SLF001
        self._unasked = select.poll()  # a server that speaks unasked hangs up
        self._unasked.register(connected, select.POLLIN)
        for option, value in (
            (socket.TCP_KEEPIDLE, _PROBE_AFTER_SECONDS),
            (socket.TCP_KEEPINTVL, _PROBE_EVERY_SECONDS),
            (socket.TCP_KEEPCNT, _PROBES),
        ):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)

    @contextmanager
    def patiently(self, seconds: float) -> Iterator[None]:
        """Around what may take so much longer than other statements."""
        self.be_patient(self.patience_seconds + seconds)
        try:
            yield
        finally:
            self.be_patient(self.patience_seconds)

    def be_patient(self, seconds: float) -> None:
        """From now on an answer may take so long. The driver has no public way to say so."""
        self._db._read_timeout = seconds  # noqa: SLF001

    def run(self, statements: Sequence[bytes]) -> tuple[tuple[Any, ...], ...]:
        """In one packet, one after the other, up to the first that fails: `last_statement` is that
        one. Returns the rows that the last one read."""
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
        """`last_statement` stays: it is the one that failed."""
        self._db.rollback()

    def named_rows(self, statement: bytes) -> list[dict[str, Any]]:
        """Of statements whose columns differ from server to server."""
        with self._db.cursor(DictCursor) as cursor:
            cursor.execute(statement)
            rows: list[dict[str, Any]] = list(cursor.fetchall())
        return rows

    def close(self) -> None:
        """Safe to repeat, and whatever state it is in."""
        if self._db.open:
            try:
                self._db.close()
            except FAULTS:
                self._db._force_close()  # noqa: SLF001
