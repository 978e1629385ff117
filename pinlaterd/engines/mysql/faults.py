"""Where PyMySQL's and the operating system's exceptions become pinlaterd's own: nowhere else.

in a transaction  StorageNotCommitted: it is rolled back, by us or by the server
during a COMMIT   what is found out then; StorageError if nothing is
anything else     StorageError where something may have been changed

The store has to be reopened after a lost connection, for the lock that made us owner went with it;
where tables are gone, for the engine then finds what is there; and where a server has become
read-only, for the address may lead to another one by now.
"""

from __future__ import annotations

import re
import socket
import struct

from pymysql import err

from pinlaterd.errors import StorageError, StorageFull, StorageNotCommitted

# All that PyMySQL raises: its own tree, what sockets raise, and, for packets or values that can't
# be read or written, struct.error, OverflowError, UnicodeError.
FAULTS = (err.MySQLError, OSError, MemoryError, OverflowError, UnicodeError, struct.error)

_ACCESS_DENIED, _NO_PRIVILEGE = 1045, 1044
DUPLICATE_KEY, DEADLOCK = 1062, 1213
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
    """The server's or the driver's number of an error; None: it has none."""
    if isinstance(fault, err.MySQLError) and fault.args and isinstance(fault.args[0], int):
        return fault.args[0]
    return None


def is_lost(fault: BaseException) -> bool:
    """Whether the connection is of no use any more, as far as `fault` tells."""
    return isinstance(fault, (OSError, struct.error)) or code_of(fault) in _LOST


def leaves_doubt(fault: BaseException, statement: bytes) -> bool:
    """Whether a transaction may have been committed though `statement`, its last, has failed."""
    code = code_of(fault)
    if code is None or code in _LOST or code == _WITHIN_COMMIT:  # None: no answer of the server
        return True
    return statement == b"COMMIT" and code != _LOCK_WAIT


def is_gone(fault: BaseException) -> bool:
    """Whether tables that we know of are not there any more."""
    return code_of(fault) in _GONE


def gone_database(fault: BaseException) -> str:
    """The database that is not there any more, as the server names it; "" if it is another matter.
    Of a table that is gone: its database, which may be there still."""
    if code_of(fault) not in _GONE:
        return ""
    named = _NAMED_DATABASE.search(str(fault.args[1])) if len(fault.args) > 1 else None
    return named[1] if named else ""


def is_locked(fault: BaseException) -> bool:
    """Whether another connection holds a lock that the statement needs."""
    return code_of(fault) == _LOCK_WAIT


def is_timeout(fault: BaseException) -> bool:
    """Whether a statement was ended at its deadline, by the server or by our patience."""
    if code_of(fault) in _TIMED_OUT or isinstance(fault, TimeoutError):
        return True
    # The driver reports a read that timed out as a lost connection, with that in its text.
    return code_of(fault) in _LOST and "timed out" in str(fault)


def is_full(fault: BaseException) -> bool:
    """Whether the server has no room."""
    code = code_of(fault)
    if code in _PERHAPS_FULL:
        return _NO_SPACE.search(str(fault)) is not None
    return code in (_DISK_FULL, _TABLE_FULL)


def describe(fault: BaseException) -> str:
    """What is wrong, and how to mend it where that is known."""
    code = code_of(fault)
    if code is None:
        return f"{fault} ({type(fault).__name__})"
    said = str(fault.args[1]) if len(fault.args) > 1 else type(fault).__name__
    cure = _CURES.get(code) or (_CURES[_DISK_FULL] if is_full(fault) else "")
    return f"{said} (error {code})" + (f"; {cure}" if cure else "")


def storage_error(fault: BaseException, server: str, *, undone: bool) -> StorageError:
    """The StorageError that stands for `fault`; `undone`: nothing changed, beyond doubt."""
    message = f"{server}: {describe(fault)}"
    if is_gone(fault):
        message += "; the tables were changed by somebody else"
    if undone and is_full(fault):
        return StorageFull(message)
    return StorageNotCommitted(message) if undone else StorageError(message)


def connect_error(fault: BaseException, server: str, user: str) -> StorageError:
    """Why there is no connection, and how to mend it."""
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
