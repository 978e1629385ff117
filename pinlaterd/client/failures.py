"""What goes wrong between a client and a server, in words, and by what it leaves known.

ConnectionFailed      nothing was done
  NotSent             the call did not leave whole: another connection may serve
    CannotConnect     there was no connection
  OutcomeUnknown      it left whole, and no answer to it came
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence

from pinlaterd.client.addresses import Address
from pinlaterd.errors import ConnectionFailed, OutcomeUnknown


class NotSent(ConnectionFailed):
    """The connection broke before the message had left whole: another one may serve."""


class CannotConnect(NotSent):
    """No connection came about."""


class ClientClosed(ConnectionFailed):
    """No call is made any more."""

    def __init__(self) -> None:
        super().__init__("this client was closed")


def name_not_found(address: Address, error: OSError) -> CannotConnect:
    """It is not known what the server's name stands for."""
    reason = "DNS has not answered in time" if isinstance(error, TimeoutError) else _reason(error)
    return CannotConnect(f"cannot connect to pinlaterd at {address}: {reason}")


def cannot_connect(address: Address, errors: Sequence[OSError]) -> CannotConnect:
    """`errors` are those of all the endpoints that the server's name stands for."""
    reasons = ", ".join(dict.fromkeys(map(_reason, errors)))
    return CannotConnect(f"cannot connect to pinlaterd at {address}: {reasons}")


def not_sent(address: Address, error: OSError | EOFError) -> NotSent:
    return NotSent(
        f"the connection to pinlaterd at {address} broke before the call was sent: {_reason(error)}"
    )


def no_answer(address: Address, error: OSError | EOFError) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"no answer from pinlaterd at {address}: {_reason(error)}; "
        "the call may have been carried out"
    )


def too_few_connections(max_connections: int) -> ConnectionFailed:
    return ConnectionFailed(
        f"all {max_connections} connections were in use until the time was up; "
        "give the client more max_connections"
    )


def _reason(error: OSError | EOFError) -> str:
    """The error in words: the operating system's, whatever asyncio made of it, or TLS's."""
    if isinstance(error, EOFError):
        return "connection closed"
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or str(error.strerror)).replace('_', ' ').lower()}"
    if isinstance(error, socket.gaierror):  # its numbers are not the operating system's
        return str(error.strerror).lower()
    text = os.strerror(error.errno) if error.errno else str(error)
    return text[:1].lower() + text[1:]
