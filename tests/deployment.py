"""A real deployment for tests: every process under supervisord, in a folder of the test's own.

Operators' commands are run as such where their output matters; making it, `up` and `down` are
called here, which saves the start of a process each time. Processes are told from others' by their
current folder, which is the deployment's, so that whatever is left over is found.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import psutil

from pinlaterd.client import ClaimedJob, Client, ConnectionFailed, JobState, PinLaterError
from pinlaterd.coordinator.programs import ProgramInfo, Supervisord, SupervisorError
from pinlaterd.deployment import service
from pinlaterd.deployment.files import write_deployment

COMMAND_SECONDS = 180.0
POLL_SECONDS = 0.05
CALL_SECONDS = 60.0
CLAIMED_WITHIN_SECONDS = 120.0
# A store that a busy machine holds up for a second does not ail by that: a dequeue right after an
# enqueue would pass it over.
PATIENT = {"health_slow_ms": 60_000}
# The same, and calls that are late are answered all the same.
MOST_PATIENT = {**PATIENT, "request_timeout_ms": 30_000}
# A queue on which calls that need all shards are tried out.
_PROBE = "probe"

_ROOT = Path(__file__).parent.parent
# Each process that runs tests has ports of its own, and gives none again that may not be bound yet.
_WORKERS = min(24, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
_PORTS = range(10_000 + 8 * _WORKER, 32_000, 8 * _WORKERS)
_given: deque[int] = deque(maxlen=100)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process that hangs instead of dying. Another fault may end it meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def serving(folder: Path, **given: Any) -> Iterator[Deployment]:
    """A deployment in `folder` that runs; `given`: as for `init`."""
    deployment = Deployment(folder)
    deployment.init(**given)
    with deployment.running():
        yield deployment


class Deployment:
    """One deployment's folder and processes. `destroy` leaves no process, whatever happened."""

    def __init__(self, folder: Path, *, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: of every process, beside what they inherit."""
        self.folder = folder.resolve()
        self.port = unused_port()
        self.stats_port = unused_port()
        self.http_port = self.web_port = 0  # none
        self._environment = environment or {}

    # --- commands -------------------------------------------------------------------------

    def init(
        self,
        *,
        shards: int | Mapping[str, object] = 1,
        settings: Mapping[str, object] = MappingProxyType({}),
        queues: Mapping[str, object] | None = None,
        http: bool = False,
        web: bool = False,
    ) -> None:
        """Write it, with the HTTP interface if `http`, the dashboard if `web`. `shards`: how many
        of SQLite, or what shards.yaml says of each. `settings`: those of pinlaterd.yaml that differ
        from the defaults.
        """
        self.http_port = unused_port() if http else 0
        self.web_port = unused_port() if web else 0
        ports = {"port": self.port, "stats_port": self.stats_port}
        ports |= {"http_port": self.http_port, "web_port": self.web_port}
        count = shards if isinstance(shards, int) else len(shards)
        write_deployment(self.folder, "sqlite", count, ports)
        with (self.folder / "etc/pinlaterd.yaml").open("a", encoding="utf-8") as file:
            file.writelines(f"{key}: {value}\n" for key, value in settings.items())
        if isinstance(shards, Mapping):
            self.write("shards", shards)
        if queues is not None:
            self.write("queues", queues)

    def write(self, name: str, content: Mapping[str, object]) -> None:
        """A new etc/NAME.yaml takes the old one's place."""
        path = self.folder / f"etc/{name}.yaml"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({name: content}))
        new.replace(path)

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Leaves no process."""
        try:
            self.up()
            yield self
        finally:
            self.destroy()

    def up(self) -> None:
        """Not for several threads at once: the current folder is the deployment's meanwhile."""
        if self._environment:
            self.command("up", str(self.folder))
        else:
            service.up(self.folder, tell=lambda _: None)

    def down(self) -> None:
        service.down(self.folder, tell=lambda _: None)

    def command(self, *arguments: str) -> str:
        """Run `pinlaterd ARGUMENTS` and return what it says; AssertionError if it fails."""
        return self._run([sys.executable, "-P", "-m", "pinlaterd", *arguments])

    def admin(self, *arguments: str, stdin: str = "") -> str:
        """Run `pinlater-admin ARGUMENTS` and return what it says; AssertionError if it fails."""
        return self._run(self._admin_command(*arguments), stdin=stdin)

    def start_admin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """The same, not waited for."""
        return subprocess.Popen(
            self._admin_command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def _admin_command(self, *arguments: str) -> list[str]:
        command = [sys.executable, "-P", "-m", "pinlaterd.cli.admin", *arguments]
        return [*command, "--dir", str(self.folder)]

    def supervisorctl(self, *arguments: str) -> str:
        conf = str(self.folder / "etc/supervisord.conf")
        return self._run([sys.executable, "-m", "supervisor.supervisorctl", "-c", conf, *arguments])

    def start_process(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A process of the deployment that supervisord knows nothing of."""
        return subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "pinlaterd"),
                *(*arguments, "--config", str(self.folder / "etc")),
            ],
            cwd=_ROOT,
            env={**os.environ, **self._environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _run(self, command: list[str], *, stdin: str = "") -> str:
        done = subprocess.run(
            command,
            cwd=_ROOT,
            env={**os.environ, **self._environment},
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
        )
        said = f"{' '.join(command)} ended with {done.returncode}: {done.stdout}"
        assert done.returncode == 0, said
        return done.stdout

    def destroy(self) -> None:
        """Kill everything: supervisord would stop one program after the other, in seconds."""
        self.kill_all()

    # --- processes ------------------------------------------------------------------------

    def kill_all(self) -> None:
        """End every process; supervisord may start some again meanwhile."""
        while found := self.processes():
            _kill(found)
            time.sleep(POLL_SECONDS)

    def kill_programs(self) -> None:
        """End supervisord's children at once, and theirs: searchers. It starts them again."""
        _kill(psutil.Process(self.supervisord_pid()).children(recursive=True))

    def processes(self) -> list[psutil.Process]:
        """All that run in the deployment's folder, and in those below it: a private store."""
        found, folders = [], f"{self.folder}/"
        for process in psutil.process_iter():
            try:
                is_here = f"{process.cwd()}/".startswith(folders)
                if is_here and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue  # ended meanwhile, or another user's
        return found

    def programs(self) -> Mapping[str, ProgramInfo]:
        """What supervisord says of its programs; none if it does not answer."""
        before = Path.cwd()
        os.chdir(self.folder)  # a Unix socket's path must be short
        try:
            return {info.name: info for info in Supervisord().programs()}
        except SupervisorError:
            return {}
        finally:
            os.chdir(before)

    def pids(self) -> dict[str, int]:
        """The pid of every program that runs."""
        return {name: info.pid for name, info in self.programs().items() if info.pid}

    def pid_of(self, program: str) -> int:
        return self.pids()[program]

    def supervisord_pid(self) -> int:
        return int((self.folder / "run/supervisord.pid").read_text())

    def kill(self, program: str) -> int:
        """kill -9; returns the pid that was."""
        pid = self.pid_of(program)
        os.kill(pid, signal.SIGKILL)
        return pid

    # --- health ---------------------------------------------------------------------------

    def client(self, source: str = "test", *, timeout_seconds: float = CALL_SECONDS) -> Client:
        return Client(port=self.port, source=source, timeout_seconds=timeout_seconds)

    def status(self) -> Mapping[str, Any]:
        """What the coordinator says: /status.json."""
        return self._page("/status.json")

    def processes_called(self, program: str) -> Mapping[int, Mapping[str, Any]]:
        """What the coordinator says of each, by pid: there may be a standby."""
        found = self.status()["processes"]
        return {process["pid"]: process for process in found if process["name"] == program}

    def states_of(self, program: str) -> Mapping[int, str]:
        """The states of its processes, by pid."""
        return {pid: process["state"] for pid, process in self.processes_called(program).items()}

    def stats(self) -> Mapping[str, Any]:
        """All figures: /stats.json."""
        return self._page("/stats.json")

    def _page(self, path: str) -> Mapping[str, Any]:
        url = f"http://127.0.0.1:{self.stats_port}{path}"
        with urllib.request.urlopen(url, timeout=CALL_SECONDS) as answer:
            found: Mapping[str, Any] = json.load(answer)
        return found

    def is_serving(self) -> bool:
        """Every shard answers a call that needs them all, and the coordinator finds all well."""
        try:
            with self.client() as client:
                client.create_queue(_PROBE)
                client.count(_PROBE, JobState.FAILED)
            return bool(self.status()["healthy"])
        except (PinLaterError, ConnectionFailed, OSError):
            return False

    def wait_until_serving(
        self, *, seconds: float = 120.0, meanwhile: Callable[[], object] = lambda: None
    ) -> float:
        """How long it took, in seconds; AssertionError if it took too long. `meanwhile` is called
        while it does not serve."""
        began = time.monotonic()
        while not self.is_serving():
            waited = time.monotonic() - began
            assert waited < seconds, f"not serving again within {seconds:g} s: {self.log_tails()}"
            meanwhile()
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def log_tails(self, lines: int = 5) -> str:
        """The last lines of every log, for messages."""
        logs = sorted((self.folder / "run/log").glob("*.log"))
        tails = ("\n".join(path.read_text(errors="replace").splitlines()[-lines:]) for path in logs)
        return "\n" + "\n".join(tails)


def claim(client: Client, queue: str, jobs: int = 1) -> list[ClaimedJob]:
    """Claim so many jobs: an answer leaves out what a shard that is held up for a moment has."""
    claimed: list[ClaimedJob] = []
    deadline = time.monotonic() + CLAIMED_WITHIN_SECONDS
    while len(claimed) < jobs:
        assert time.monotonic() < deadline, f"{len(claimed)} of {jobs} jobs of {queue} came"
        claimed += client.dequeue(queue, limit=jobs - len(claimed), max_wait_ms=30_000)
    return claimed


def unused_port() -> int:
    """Return a port below those that the system gives to outgoing connections: one of those could
    take it while a killed router is away. No other call returns one of the next seven, which the
    shards of a cluster have, or HTTP by default."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.append(port)
        return port


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended with another
            process.kill()
