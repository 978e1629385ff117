"""A service of its own: temporary folder, free ports, and the commands that operators use."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from pinlaterd.client import Client
from tests import deployment

ROOT = Path(__file__).parent.parent
MB = 1_000_000
_TITLE = "pinlaterd: "


class BenchmarkFailed(Exception):
    """The benchmark could not be carried out; the message says why."""


class Usage(NamedTuple):
    """What a process has used."""

    cpu_seconds: float
    rss_mb: float


Usages = Mapping[str, Usage]


class Deployment(deployment.Deployment):
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
        http: bool = False,
        web: bool = False,
    ) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="service-", dir=parent)))
        each = None if shard is None else {str(n): shard for n in range(1, shards + 1)}
        self.init(shards=each or shards, settings=settings or {}, queues=queues, http=http, web=web)

    def __enter__(self) -> Self:
        try:
            # A process of its own imports from where `patched` says, and writes that into the
            # definitions of the programs.
            self.command("up", str(self.folder))
        except BaseException as error:
            self.__exit__()
            if isinstance(error, AssertionError):  # the command failed
                raise BenchmarkFailed(str(error)) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()
        shutil.rmtree(self.folder)

    def client(self, source: str = "bench:client", *, timeout_seconds: float = 60.0) -> Client:
        return super().client(source, timeout_seconds=timeout_seconds)

    def usage(self) -> dict[str, Usage]:
        """CPU and memory of each process, supervisord's own included."""
        supervisord = psutil.Process(self.supervisord_pid())
        usages: dict[str, Usage] = {}
        for process in [supervisord, *supervisord.children(recursive=True)]:
            try:
                with process.oneshot():
                    name = _name_of(process)
                    times, memory = process.cpu_times(), process.memory_info()
            except psutil.NoSuchProcess:
                continue
            usage = Usage(times.user + times.system, memory.rss / MB)
            usages[name if name not in usages else f"{name} ({process.pid})"] = usage
        return usages

    def rss_mb(self) -> dict[str, float]:
        return rss_mb(self.usage())


def _name_of(process: psutil.Process) -> str:
    """`router` for a process titled `pinlaterd: router`, else the program's own name."""
    command = process.cmdline()
    title = command[0] if command else ""
    if title.startswith(_TITLE):
        return title.removeprefix(_TITLE).strip()
    return "supervisord" if any("supervisord" in word for word in command) else process.name()


def rss_mb(usages: Usages) -> dict[str, float]:
    return {name: usage.rss_mb for name, usage in usages.items()}


def cpu_seconds_between(before: Usages, after: Usages) -> dict[str, float]:
    """What each process used meanwhile; one that is new, all that it has used."""
    nothing = Usage(0.0, 0.0)
    return {
        name: usage.cpu_seconds - before.get(name, nothing).cpu_seconds
        for name, usage in after.items()
    }


@contextmanager
def scratch_folder(parent: Path | None) -> Iterator[Path]:
    """A folder for everything that a benchmark writes, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="pinlaterd-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def patched(folder: Path, module: str) -> Iterator[None]:
    """Have the processes of services call the module's `install` before anything else; `folder` is
    where they import from."""
    for package in ("pinlaterd", "benchmarks"):
        (folder / package).symlink_to(ROOT / package)
    (folder / "sitecustomize.py").write_text(f"from {module} import install\n\ninstall()\n")
    ours = {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    before = {variable: os.environ.get(variable) for variable in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value
