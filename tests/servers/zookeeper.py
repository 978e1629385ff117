"""Private ZooKeepers for tests: one, or an ensemble of three, each in a folder and at an address of
its own (127.0.0.2 and up), ended by its pid. They can be frozen, killed and started again.

Several tests may share an ensemble: each takes a cluster's name of its own.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.conftest import POLL_SECONDS, ProgramPath
from tests.deployment import unused_port

JARS = Path("/usr/share/java")
DEBIAN_PACKAGE = "zookeeper"
TICK_MS = 1000
_START_SECONDS = 60.0
_END_SECONDS = 60.0
_ANSWER_SECONDS = 1.0

_names = itertools.count(1)


class ZooKeeper:
    """One server."""

    def __init__(
        self, java: str, folder: Path, host: str, number: int = 0, ports: Sequence[int] = ()
    ) -> None:
        """`ports`: for clients and the two for other servers, if not any that are free."""
        self.folder = folder
        self.host = host
        self.port, *of_peers = ports or [unused_port() for _ in range(3)]
        self.number = number
        self.peer = f"server.{number}={host}:{of_peers[0]}:{of_peers[1]}"
        self._java = java
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def configure(self, settings: Sequence[str]) -> None:
        """`settings`: more lines of its configuration, as those of all servers."""
        data = self.folder / "data"
        data.mkdir(parents=True)
        (data / "myid").write_text(str(self.number))
        lines = (
            *(f"tickTime={TICK_MS}", "initLimit=10", "syncLimit=2", "maxClientCnxns=0"),
            *(f"dataDir={data}", f"clientPortAddress={self.host}", f"clientPort={self.port}"),
            *("admin.enableServer=false", "4lw.commands.whitelist=srvr", *settings),
        )
        (self.folder / "zoo.cfg").write_text("".join(f"{line}\n" for line in lines))

    def start(self) -> None:
        """Does not wait until it serves: alone, one of an ensemble can't."""
        with (self.folder / "server.log").open("ab") as log:
            self._process = self._launch(
                [
                    self._java,
                    *("-Xms24m", "-Xmx64m", "-Xss512k", "-XX:+UseSerialGC"),
                    *("-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xshare:auto"),
                    # What is killed here loses nothing that it has written.
                    *("-Dzookeeper.forceSync=no", "-Dzookeeper.preAllocSize=64"),
                    *("-cp", f"{JARS}/zookeeper.jar:{JARS}/slf4j-simple.jar"),
                    "org.apache.zookeeper.server.quorum.QuorumPeerMain",
                    str(self.folder / "zoo.cfg"),
                ],
                log,
            )

    def _launch(self, command: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self.folder,
        )

    def mode(self) -> str:
        """standalone, leader or follower; "" while it does not serve."""
        return self._answer().partition("Mode: ")[2].partition("\n")[0]

    def _answer(self) -> str:
        """To the question how it is; "" if there is none."""
        try:
            with socket.create_connection((self.host, self.port), _ANSWER_SECONDS) as asked:
                asked.settimeout(_ANSWER_SECONDS)
                asked.sendall(b"srvr")
                return b"".join(iter(lambda: asked.recv(4096), b"")).decode()
        except OSError:
            return ""

    def wait(self) -> None:
        """Until it serves."""
        deadline = time.monotonic() + _START_SECONDS
        while not self.mode():
            assert self._process is not None
            assert self._process.poll() is None, f"ZooKeeper ended: {self.log()}"
            assert time.monotonic() < deadline, f"ZooKeeper does not serve: {self.log()}"
            time.sleep(5 * POLL_SECONDS)

    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-4000:]

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9. Safe to repeat."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_END_SECONDS)

    def lose_data(self) -> None:
        """While it is down."""
        assert self._process is None
        shutil.rmtree(self.folder / "data/version-2")

    @property
    def runs(self) -> bool:
        return self._process is not None


class Ensemble:
    """ZooKeepers that serve together."""

    def __init__(self, java: str, folder: Path, servers: int, *settings: str) -> None:
        hosts = [f"127.0.0.{number + 1}" for number in range(1, servers + 1)]
        self.servers = [
            ZooKeeper(java, folder / str(number), host, number)
            for number, host in enumerate(hosts, 1)
        ]
        peers = [server.peer for server in self.servers] if servers > 1 else []
        for server in self.servers:
            server.configure([*peers, *settings])

    @property
    def hosts(self) -> str:
        """As clients are told."""
        return ",".join(server.address for server in self.servers)

    def start(self) -> None:
        """All that are down; thaws those that are frozen. Until all serve."""
        for server in self.servers:
            if server.runs:
                server.thaw()
            else:
                server.start()
        for server in self.servers:
            server.wait()

    def leader(self) -> ZooKeeper:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            for server in self.servers:
                if server.runs and server.mode() in {"leader", "standalone"}:
                    return server
            time.sleep(POLL_SECONDS)
        raise AssertionError("no ZooKeeper leads")

    def followers(self) -> Sequence[ZooKeeper]:
        leader = self.leader()
        return [server for server in self.servers if server is not leader]

    def serving(self, address: tuple[str, int]) -> ZooKeeper:
        """The one that listens there."""
        return next(s for s in self.servers if (s.host, s.port) == address)

    def stop(self) -> None:
        for server in self.servers:
            server.kill()


def new_cluster() -> str:
    """A name that no other test of this process uses."""
    return f"c{next(_names)}"


def java_path(program_path: ProgramPath) -> str:
    if not (JARS / "zookeeper.jar").exists() or not (JARS / "slf4j-simple.jar").exists():
        pytest.skip(f"ZooKeeper is missing; on Debian: apt-get install {DEBIAN_PACKAGE}")
    return program_path("java", debian_package="default-jre-headless")


@pytest.fixture(scope="session")
def shared_zookeeper(
    program_path: ProgramPath, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ensemble]:
    """One server that the tests of a process share."""
    alone = Ensemble(java_path(program_path), tmp_path_factory.mktemp("zookeeper"), 1)
    alone.start()
    yield alone
    alone.stop()


@pytest.fixture(scope="session")
def shared_ensemble(
    program_path: ProgramPath, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ensemble]:
    three = Ensemble(java_path(program_path), tmp_path_factory.mktemp("zookeepers"), 3)
    three.start()
    yield three
    three.stop()


@pytest.fixture
def zookeeper(shared_zookeeper: Ensemble) -> Iterator[Ensemble]:
    """One server, which the test may stop."""
    yield shared_zookeeper
    shared_zookeeper.start()


@pytest.fixture
def ensemble(shared_ensemble: Ensemble) -> Iterator[Ensemble]:
    """Three servers, all of which serve; the test may freeze and kill some."""
    yield shared_ensemble
    shared_ensemble.start()
