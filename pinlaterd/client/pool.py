"""A bounded set of connections to a service's servers, that threads take turns with.

A server that failed is probed in a thread of its own, which a call starts when that is due, and
which ends with the probe. A child that is forked owns none of its parent's connections: they are
closed in it, unused.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TypeVar

from pinlaterd.client.addresses import Address
from pinlaterd.client.caller import Caller, CallUnderWay
from pinlaterd.client.calls import PreparedCall
from pinlaterd.client.connection import Connection
from pinlaterd.client.failures import too_few_connections
from pinlaterd.client.ledger import Ledger
from pinlaterd.client.names import Names
from pinlaterd.errors import ConnectionFailed, PinLaterError

T = TypeVar("T")


class ConnectionPool:
    """Makes calls, up to `max_connections` at a time; safe to use from many threads."""

    def __init__(
        self,
        addresses: Sequence[Address],
        caller: Caller,
        *,
        max_connections: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.addresses = tuple(addresses)
        self._caller = caller
        self._max_connections = max_connections
        self._tls = tls
        self._ledger: Ledger[Connection] = Ledger(self.addresses)
        self._free = threading.BoundedSemaphore(max_connections)
        self._names = Names()
        _pools.add(self)

    def run(self, prepared: PreparedCall[T]) -> T:
        """Make a call, to one server after the other until one answers, and return its result."""
        ledger, free = self._ledger, self._free  # after a fork in between, the child has others
        self._probe_if_due(ledger)
        call = self._caller.begin(prepared, ledger.order())
        if not free.acquire(timeout=max(0.0, call.deadline - time.monotonic())):
            raise too_few_connections(self._max_connections)
        try:
            for server in call.servers():
                try:
                    return self._send(call, server, ledger)
                except ConnectionFailed as error:
                    ledger.failed(server, error)
                    call.failed(server, error)
            raise call.error()
        finally:
            free.release()

    def close(self) -> None:
        """Close what is idle now, and what is lent once it comes back."""
        self._ledger.close()

    def forget_the_parents(self) -> None:
        """In a child just forked: connections, and whatever threads wait for, are made anew."""
        self._ledger = self._ledger.in_child(self.addresses)
        self._free = threading.BoundedSemaphore(self._max_connections)
        self._names = Names()

    def _send(
        self,
        call: CallUnderWay[T],
        server: Address,
        ledger: Ledger[Connection],
        *,
        is_probe: bool = False,
    ) -> T:
        connection = ledger.lend_idle(server)
        if connection is None:
            deadline = call.connect_deadline()
            connection = Connection(server, self._names, deadline=deadline, tls=self._tls)
            ledger.lend_new(connection)
        with ledger.lent(connection, is_probe=is_probe):
            answer = connection.call(call.message, deadline=call.deadline)
            return call.result(server, answer)

    # --- servers that failed --------------------------------------------------------------

    def _probe_if_due(self, ledger: Ledger[Connection]) -> None:
        server = ledger.begin_probe()
        if server is None:
            return
        probe = threading.Thread(
            target=self._probe, args=(server, ledger), name=f"probe-{server}", daemon=True
        )
        try:
            probe.start()
        except RuntimeError:  # no more threads: the call does not suffer, and the next one looks
            ledger.end_probe(server, is_back=False)

    def _probe(self, server: Address, ledger: Ledger[Connection]) -> None:
        """Find out whether a server is back. It takes no place of those who call."""
        is_back = False
        try:
            self._send(self._caller.begin_probe(server), server, ledger, is_probe=True)
            is_back = True
        except PinLaterError:
            is_back = True  # it is there, and says what ails it
        except ConnectionFailed:
            pass  # it is left alone for longer
        finally:
            ledger.end_probe(server, is_back=is_back)


_pools: weakref.WeakSet[ConnectionPool] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for pool in _pools:
        pool.forget_the_parents()


os.register_at_fork(after_in_child=_after_fork_in_child)
