"""A bounded set of connections that threads take turns with.

The connection used last is handed out first, so that those a load peak opened grow old unused;
an idle connection that the server closed meanwhile is never handed out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pinlaterd.client.connection import Connection
from pinlaterd.errors import ConnectionFailed


class ConnectionPool:
    """Up to `max_connections` connections to one address; safe to use from many threads."""

    def __init__(self, host: str, port: int, *, max_connections: int) -> None:
        self.host = host
        self.port = port
        self._max_connections = max_connections
        self._free = threading.BoundedSemaphore(max_connections)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False

    @contextmanager
    def connection(self, *, deadline: float, fresh: bool = False) -> Iterator[Connection]:
        """Lend a connection; whoever fails with it must raise, so that it is closed.

        `fresh`: an idle one just turned out to be dead; trust none of them and open a new one.
        """
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise ConnectionFailed(
                f"all {self._max_connections} connections were in use until the time was up; "
                "give the Client more max_connections"
            )
        try:
            if fresh:
                self._close_idle()
            connection = self._take_idle()
            if connection is None:
                connection = Connection(self.host, self.port, deadline=deadline)
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            self._put_back(connection)
        finally:
            self._free.release()

    def close(self) -> None:
        """Close what is idle now, and what is lent once it comes back."""
        with self._lock:
            self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take_idle(self) -> Connection | None:
        while True:
            with self._lock:
                if self._closed:
                    raise ConnectionFailed("this Client was closed")
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not connection.is_stale():
                return connection
            connection.close()

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()
