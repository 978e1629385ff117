"""Puts to beanstalkd, to compare enqueues with: over one connection, and over several.

    .venv/bin/python -m benchmarks.beanstalkd [--seconds 5]

Starts a beanstalkd of its own, with its log in a temporary folder, and ends it: once flushing as
by default (every 50 ms), once before each answer, as pinlaterd does on SQLite. Each connection has
one put in flight.
"""

from __future__ import annotations

import argparse
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import frames
from tests.deployment import unused_port

CONNECTIONS = (1, 16, 64)
FLUSHES = {"every 50 ms": "50", "before each answer": "0"}
PUT = b"put 0 0 60 %d\r\n%b\r\n" % (frames.BODY_BYTES, frames.body())
START_SECONDS, WARM_UP_SECONDS = 10.0, 1.0


@contextmanager
def serving(flush_ms: str) -> Iterator[int]:
    """Start a beanstalkd with an empty log; yield its port."""
    port = unused_port()
    with tempfile.TemporaryDirectory(prefix="beanstalkd-") as folder:
        command = ["beanstalkd", "-l", "127.0.0.1", "-p", str(port), "-b", folder, "-f", flush_ms]
        server = subprocess.Popen(command)
        try:
            yield port
        finally:
            server.kill()
            server.wait()


def connected(port: int) -> socket.socket:
    """Connect as soon as the server listens."""
    give_up = time.monotonic() + START_SECONDS
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=10.0)
        except ConnectionRefusedError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.01)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def puts_per_second(port: int, connections: int, seconds: float) -> float:
    """Put jobs over all connections for so long, after a warm-up."""
    waiting = {one.fileno(): one for one in (connected(port) for _ in range(connections))}
    poll = select.epoll()
    for fd, one in waiting.items():
        poll.register(fd, select.EPOLLIN)
        one.sendall(PUT)
    began, puts = time.monotonic() + WARM_UP_SECONDS, 0
    while (now := time.monotonic()) < began + seconds:
        for fd, _ in poll.poll():
            reply = waiting[fd].recv(100)
            if not (reply.startswith(b"INSERTED ") and reply.endswith(b"\r\n")):
                raise RuntimeError(f"beanstalkd answered {reply!r}")
            puts += now >= began
            waiting[fd].sendall(PUT)
    poll.close()
    seconds = time.monotonic() - began
    for one in waiting.values():
        one.recv(100)  # of the put in flight
        one.close()
    return puts / seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    if shutil.which("beanstalkd") is None:
        print("beanstalkd is missing; on Debian: apt-get install beanstalkd", file=sys.stderr)
        return 1
    print("flushed             connections  puts/s")
    for name, flush_ms in FLUSHES.items():
        with serving(flush_ms) as port:
            for connections in CONNECTIONS:
                found = puts_per_second(port, connections, options.seconds)
                print(f"{name:18}  {connections:11}  {found:,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
