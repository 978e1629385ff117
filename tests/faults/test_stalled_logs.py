"""A supervisord that does not read what its processes log: stopped, or its disk hangs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest
import zmq

from tests.deployment import Deployment, frozen
from tests.faults.load import shards_of

pytestmark = pytest.mark.service

ANSWERED_SECONDS = 60.0
PROGRAMS = ("router", "coordinator", "shard-1", "shard-2", "shard-3")


def test_it_stops_no_process_and_the_log_says_what_was_dropped(
    deployment: Deployment, queue: str, wait_until: Callable[..., None]
):
    pids = deployment.pids()
    with deployment.client() as client:
        with frozen(deployment.supervisord_pid()):
            for program in PROGRAMS:
                fill_stderr(pids[program])
            make_all_log(deployment)

            stored: list[str] = []
            while shards_of(stored) != {"1", "2", "3"}:
                stored += client.enqueue(queue, [b"x"])
            wait_until(lambda: all(dropped(deployment, program) for program in PROGRAMS))
            wait_until(lambda: deployment.status()["healthy"])

        for program in PROGRAMS:
            wait_until(lambda program=program: "log lines were dropped" in log(deployment, program))


def fill_stderr(pid: int) -> None:
    """As lines do that nobody reads: not a byte more fits into the process's pipe."""
    pipe = os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    try:
        for piece in (b"filler\n" * 585, b"\n"):
            while True:
                try:
                    os.write(pipe, piece)
                except BlockingIOError:
                    break
    finally:
        os.close(pipe)


def make_all_log(deployment: Deployment) -> None:
    """Send each process what it logs and ignores."""
    with socket.create_connection(("127.0.0.1", deployment.port), ANSWERED_SECONDS) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        connection.recv(1024)
    context = zmq.Context()
    try:
        for name in ("coordinator", "shard-1", "shard-2", "shard-3"):
            peer = context.socket(zmq.DEALER)
            peer.connect(f"ipc://{deployment.folder}/run/{name}.ipc")
            peer.send(b"\xff no message")
    finally:
        context.destroy(linger=5000)


def dropped(deployment: Deployment, program: str) -> int:
    counters = deployment.stats()["processes"][program]["counters"]
    return int(counters.get("log_lines_dropped", 0))


def log(deployment: Deployment, program: str) -> str:
    return (deployment.folder / f"run/log/{program}.log").read_text()
