"""What a pool knows, whatever its connections are: which are idle, which are lent, who is well.

The connection used last is handed out first, so that those a load peak opened grow old unused; an
idle connection that the server closed meanwhile is never handed out. What becomes of a lent one
tells which servers are well.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from pinlaterd.client.addresses import Address, Servers
from pinlaterd.client.failures import ClientClosed
from pinlaterd.errors import ConnectionFailed, PinLaterError


class PooledConnection(Protocol):
    """A connection to `address`; none of its methods here waits for anything."""

    address: Address

    def is_stale(self) -> bool:
        """Whether the server closed it while it lay idle."""
        ...

    def close(self) -> None: ...


C = TypeVar("C", bound=PooledConnection)


class Ledger(Generic[C]):
    """The connections to one service's servers. Any number of threads may use it."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._servers = Servers(addresses, rng=random.Random())
        self._lock = threading.Lock()
        self._idle: defaultdict[Address, list[C]] = defaultdict(list)
        self._lent: set[C] = set()
        self._is_closed = False

    # --- servers --------------------------------------------------------------------------

    def order(self) -> list[Address]:
        """All servers, in the order in which a call should try them."""
        with self._lock:
            return self._servers.order()

    def begin_probe(self) -> Address | None:
        """A server to probe now, beside the calls; `end_probe` must follow."""
        with self._lock:
            return self._servers.begin_probe(now=time.monotonic())

    def end_probe(self, address: Address, *, is_back: bool) -> None:
        with self._lock:
            self._servers.end_probe(address, now=time.monotonic(), is_back=is_back)

    def failed(self, address: Address, error: ConnectionFailed) -> None:
        """A call failed there. Connections that lie idle are likely to be as dead."""
        if isinstance(error, ClientClosed):  # which says nothing of the server
            return
        with self._lock:
            self._servers.failed(address, now=time.monotonic())
            self._close_idle(address)

    # --- connections ----------------------------------------------------------------------

    def lend_idle(self, address: Address) -> C | None:
        """One that lies idle, for `lent`. Raises ClientClosed."""
        while True:
            with self._lock:
                if self._is_closed:
                    raise ClientClosed
                if not self._idle[address]:
                    return None
                connection = self._idle[address].pop()
                self._lent.add(connection)
            if not connection.is_stale():
                return connection
            self._discard(connection)

    def lend_new(self, connection: C) -> None:
        """One just opened, for `lent`."""
        with self._lock:
            self._lent.add(connection)

    @contextmanager
    def lent(self, connection: C, *, is_probe: bool = False) -> Iterator[None]:
        """One call on a connection that was lent.

        If it fails, the connection is closed: an answer may still be on its way. An error that the
        service has answered is no failure.
        """
        try:
            yield
        except PinLaterError:
            self._put_back(connection, is_probe=is_probe)
            raise
        except BaseException:
            self._discard(connection)
            raise
        self._put_back(connection, is_probe=is_probe)

    def close(self) -> None:
        """Close what is idle now, and what is lent once it comes back."""
        with self._lock:
            self._is_closed = True
            for address in list(self._idle):
                self._close_idle(address)

    def in_child(self, addresses: Sequence[Address]) -> Ledger[C]:
        """In a child just forked: a ledger of its own, with none of the parent's connections.

        They stay open in the parent: closing the child's copies tells the servers nothing. Of this
        ledger no lock is taken, for a thread that the child does not have may hold it.
        """
        successor: Ledger[C] = Ledger(addresses)
        successor._is_closed = self._is_closed
        idle = [connection for each in list(self._idle.values()) for connection in each]
        for connection in [*idle, *self._lent]:
            connection.close()
        return successor

    def _put_back(self, connection: C, *, is_probe: bool) -> None:
        with self._lock:
            if not is_probe:
                self._servers.answered(connection.address)
            self._lent.discard(connection)
            if not self._is_closed:
                self._idle[connection.address].append(connection)
                return
        connection.close()

    def _discard(self, connection: C) -> None:
        with self._lock:
            self._lent.discard(connection)
        connection.close()

    def _close_idle(self, address: Address) -> None:
        for connection in self._idle.pop(address, []):
            connection.close()
