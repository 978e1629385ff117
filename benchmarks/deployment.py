"""A service of its own: temporary folder, free ports, and the commands that operators use."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Self
from urllib.request import urlopen

import psutil
import yaml

from benchmarks import usage
from pinlaterd.client import Client, ConnectionFailed, PinLaterError
from pinlaterd.config import layout

PINLATERD = (sys.executable, "-m", "pinlaterd")
READY_SECONDS = 30.0


class BenchmarkFailed(Exception):
    """The benchmark could not be carried out; the message says why."""


class Deployment:
    """A running service of so many shards, under supervisord; ends with the `with`.

    `shard`: the settings of each in shards.yaml; by default it is SQLite's."""

    def __init__(
        self,
        parent: Path,
        *,
        shards: int,
        shard: Mapping[str, object] | None = None,
        settings: Mapping[str, object] | None = None,
        queues: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="service-", dir=parent))
        self.port, self.stats_port, web_port = free_ports(3)
        run(
            *PINLATERD, "init", str(self.folder), "--shards", str(shards), "--port", str(self.port),
            "--stats-port", str(self.stats_port), "--web-port", str(web_port),
        )  # fmt: skip
        self.etc = self.folder / layout.ETC
        _update_yaml(self.etc / layout.SERVER_FILE, settings or {})
        if shard is not None:
            named = {str(number): deepcopy(shard) for number in range(1, shards + 1)}
            _update_yaml(self.etc / layout.SHARDS_FILE, {"shards": named})
        _update_yaml(self.etc / layout.QUEUES_FILE, {"queues": queues} if queues else {})

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> None:
        run(*PINLATERD, "up", str(self.folder))

    def _stop(self) -> None:
        run(*PINLATERD, "down", str(self.folder))
        shutil.rmtree(self.folder)

    def usage(self) -> dict[str, usage.Usage]:
        """CPU and memory of each process, supervisord's own included."""
        pid = int((self.folder / layout.SUPERVISOR_PID_FILE).read_text())
        return usage.measure(psutil.Process(pid))

    def client(self) -> Client:
        return Client(port=self.port, source="bench:client", timeout_seconds=60.0)


class EchoDeployment(Deployment):
    """The same processes, with shards that store nothing, started without supervisord."""

    _processes: tuple[subprocess.Popen[bytes], ...] = ()

    def _start(self) -> None:
        layout_paths = [self.folder / layout.RUN, self.folder / layout.DATA]
        for path in layout_paths:
            path.mkdir(mode=0o700, exist_ok=True)
        shards = yaml.safe_load((self.etc / layout.SHARDS_FILE).read_text())["shards"]
        commands = [
            (*PINLATERD, "coordinator"),
            (*PINLATERD, "router"),
            *((sys.executable, "-m", "benchmarks.echo_shard", str(name)) for name in shards),
        ]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        with (self.folder / "echo.log").open("wb") as log:
            self._processes = tuple(
                subprocess.Popen(
                    [*command, "--config", str(self.etc)],
                    cwd=self.folder,
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
                for command in commands
            )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                urlopen(f"http://127.0.0.1:{self.stats_port}/health").close()
                with self.client() as client:
                    client.create_queue("ready")
                    client.enqueue("ready", [b""])
                    return
            except (PinLaterError, ConnectionFailed, OSError) as error:  # not there yet
                if time.monotonic() > deadline:
                    log = (self.folder / "echo.log").read_text()
                    raise BenchmarkFailed(
                        f"the echo service is not ready: {error}\n{log}"
                    ) from error
                time.sleep(0.05)

    def _stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(READY_SECONDS)
        shutil.rmtree(self.folder)

    def usage(self) -> dict[str, usage.Usage]:
        usages: dict[str, usage.Usage] = {}
        for process in self._processes:
            usages |= usage.measure(psutil.Process(process.pid))
        return usages


@contextmanager
def scratch_folder(parent: Path | None) -> Iterator[Path]:
    """A folder for everything that a benchmark writes, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="pinlaterd-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def run(*command: str) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise BenchmarkFailed(f"exit code {done.returncode} of: {' '.join(command)}\n{done.stdout}")


def _update_yaml(path: Path, values: Mapping[str, object]) -> None:
    if not values:
        return
    settings = (yaml.safe_load(path.read_text()) if path.exists() else None) or {}
    path.write_text(yaml.safe_dump({**settings, **values}))
