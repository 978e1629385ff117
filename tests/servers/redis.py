"""A private Redis server: in a folder of its own, on a port of its own, ended by its pid.

It can be killed and started again on what it has kept. The shard that an engine is given has a name
of its own, so that tests may share a server.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pinlaterd.engines.redis.connection import Server
from pinlaterd.engines.redis.engine import RedisEngine
from pinlaterd.engines.redis.servers import Locator
from tests.conftest import POLL_SECONDS, FreePort, ProgramPath

HOST = "127.0.0.1"
PRIORITY_LEVELS = 3
# Short, so that what waits for the end of a frozen owner's lease is soon done.
LEASE_SECONDS = 6.0
ANSWER_SECONDS = 10.0  # longer than a busy machine takes for a script
_START_SECONDS = 60.0
_END_SECONDS = 60.0

_numbers = itertools.count(1)


class RedisServer:
    """redis-server with an append-only file; `settings` are arguments of its command line."""

    def __init__(self, program: str, folder: Path, port: int, *settings: str) -> None:
        self.folder = folder
        self.port = port
        self._command = [
            program,
            *("--port", str(port), "--bind", HOST, "--dir", str(folder)),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "everysec"),
            *("--logfile", str(folder / "redis.log"), *settings),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def start(self, *more_settings: str) -> None:
        """Until it answers, be it that it is loading."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process = self._launch([*self._command, *more_settings])
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            assert self._process.poll() is None, f"redis-server ended: {self.log()}"
            assert time.monotonic() < deadline, f"redis-server does not answer: {self.log()}"
            time.sleep(POLL_SECONDS)

    def _launch(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                client.ping()
        except (redis.AuthenticationError, redis.BusyLoadingError):
            return True
        except redis.ConnectionError:
            return False
        return True

    def stop(self) -> None:
        """In order, if it can; safe to repeat."""
        if self._process is not None:
            self.thaw()
            self._process.terminate()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        path = self.folder / "redis.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def client(self) -> redis.Redis:
        """Somebody with redis-cli, who knows nothing of owners."""
        return redis.Redis(
            host=HOST,
            port=self.port,
            socket_timeout=_START_SECONDS,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )

    @property
    def address(self) -> Server:
        return Server(HOST, self.port)


def new_shard() -> str:
    """The name of a shard that no other test of this process uses."""
    return f"t{next(_numbers)}"


def redis_engine(
    server: Locator, shard: str, *, lean: bool = False, lease_seconds: float = LEASE_SECONDS
) -> RedisEngine:
    return RedisEngine(
        shard,
        server,
        priority_levels=PRIORITY_LEVELS,
        lease_seconds=lease_seconds,
        answer_seconds=ANSWER_SECONDS,
        lean=lean,
    )


@pytest.fixture(scope="session")
def redis_program(program_path: ProgramPath) -> str:
    return program_path("redis-server", debian_package="redis-server")


@pytest.fixture(scope="session")
def redis_server(
    redis_program: str, free_port: FreePort, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    """One that the tests of a process share, each with shards of its own."""
    server = RedisServer(redis_program, tmp_path_factory.mktemp("redis"), free_port())
    server.start()
    yield server
    server.stop()
