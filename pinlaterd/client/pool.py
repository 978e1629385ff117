"""A bounded set of connections to a service's servers, that threads take turns with.

The connection used last is handed out first, so that those a load peak opened grow old unused;
an idle connection that the server closed meanwhile is never handed out. What becomes of a lent
connection tells which servers are well.

A child that is forked owns none of its parent's connections: they are closed in it, unused.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ssl import SSLContext

from pinlaterd.client.addresses import Address, Servers
from pinlaterd.client.connection import Connection
from pinlaterd.client.failures import NotSent, too_few_connections
from pinlaterd.errors import ConnectionFailed, OutcomeUnknown, PinLaterError


class ConnectionPool:
    """Up to `max_connections` connections lent at a time; safe to use from many threads."""

    def __init__(
        self, addresses: Sequence[Address], *, max_connections: int, tls: SSLContext | None
    ) -> None:
        self.addresses = tuple(addresses)
        self._max_connections = max_connections
        self._tls = tls
        self._closed = False
        self._begin()
        _pools.add(self)

    def order(self) -> list[Address]:
        """All addresses, in the order in which a call should try them."""
        with self._lock:
            return self._servers.order(now=time.monotonic())

    @contextmanager
    def connection(
        self, address: Address, *, deadline: float, connect_seconds: float
    ) -> Iterator[Connection]:
        """Lend a connection. Whoever fails with it must raise, so that it is closed; an error that
        the service has answered is none of the connection's.

        `connect_seconds` bounds connecting, but not the wait for another thread's connection.
        """
        free = self._free  # after a fork in between, the child has another one
        if not free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise too_few_connections(self._max_connections)
        try:
            connect_deadline = min(deadline, time.monotonic() + connect_seconds)
            connection = self._take(address, connect_deadline)
            try:
                yield connection
            except PinLaterError:
                self._put_back(connection)
                raise
            except BaseException:
                self._discard(connection)
                raise
            self._put_back(connection)
        except (NotSent, OutcomeUnknown):
            self._failed(address)
            raise
        finally:
            free.release()

    def close(self) -> None:
        """Close what is idle now, and what is lent once it comes back."""
        with self._lock:
            self._closed = True
        for address in self.addresses:
            self._close_idle(address)

    def forget_the_parents(self) -> None:
        """In a child just forked: its only thread closes its copies of the parent's sockets.

        The parent's connections stay open: closing a copy tells the server nothing. Locks are
        made anew, for a thread that the child does not have may have held them.
        """
        idle = [connection for each in self._idle.values() for connection in each]
        lent = list(self._lent)
        self._begin()
        for connection in idle + lent:
            connection.close()

    def _begin(self) -> None:
        self._servers = Servers(self.addresses, rng=random.Random())
        self._free = threading.BoundedSemaphore(self._max_connections)
        self._lock = threading.Lock()
        self._idle: defaultdict[Address, list[Connection]] = defaultdict(list)
        self._lent: set[Connection] = set()

    def _take(self, address: Address, connect_deadline: float) -> Connection:
        connection = self._take_idle(address)
        if connection is None:
            connection = Connection(address, deadline=connect_deadline, tls=self._tls)
        with self._lock:
            self._lent.add(connection)
        return connection

    def _take_idle(self, address: Address) -> Connection | None:
        while True:
            with self._lock:
                if self._closed:
                    raise ConnectionFailed("this Client was closed")
                if not self._idle[address]:
                    return None
                connection = self._idle[address].pop()
            if not connection.is_stale():
                return connection
            connection.close()

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            self._servers.answered(connection.address)
            is_ours = connection in self._lent
            self._lent.discard(connection)
            if is_ours and not self._closed:
                self._idle[connection.address].append(connection)
                return
        connection.close()

    def _discard(self, connection: Connection) -> None:
        with self._lock:
            self._lent.discard(connection)
        connection.close()

    def _failed(self, address: Address) -> None:
        with self._lock:
            self._servers.failed(address, now=time.monotonic())
        self._close_idle(address)  # they are likely to be as dead

    def _close_idle(self, address: Address) -> None:
        with self._lock:
            idle = self._idle.pop(address, [])
        for connection in idle:
            connection.close()


_pools: weakref.WeakSet[ConnectionPool] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for pool in _pools:
        pool.forget_the_parents()


os.register_at_fork(after_in_child=_after_fork_in_child)
