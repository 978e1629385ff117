"""The ZeroMQ context of a process."""

from __future__ import annotations

import zmq


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """One for each process; its one input/output thread serves any number of peers."""
    return zmq.Context()
