"""What a run is made on: a deployment of two shards, their server, and a proxy before each.

    clients -> proxy -> router -> shards -> proxy -> MariaDB or Redis

Every process starts with a library loaded (shim.c) through which flushes to disk fail and the wall
clock steps. The deployment's processes import pinlaterd from a folder of the run, through which a
broken variant gets into them: product code knows nothing of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import psutil

import pinlaterd
from pinlaterd.config.password import hash_password
from pinlaterd.model import JobState
from tests.checker import rows
from tests.checker.calls import Target
from tests.checker.clients import CLAIM_SECONDS, IN_PROGRESS_LIMITS
from tests.checker.history import Record, Settings
from tests.checker.shim import control_shim, load_shim
from tests.deployment import Deployment, unused_port
from tests.faults.stores.store import shard_settings
from tests.servers.mariadb import MariaDB
from tests.servers.mariadb_pair import MariaDBPair, fresh, servers_at
from tests.servers.proxy import Proxy
from tests.servers.redis import HOST, RedisServer
from tests.servers.redis_replicas import RedisPair

ENGINES = ("sqlite", "mysql", "redis", "redis-always")
REPLICATED = ("mysql", "redis")
SHARDS = ("1", "2")
PASSWORD = "open sesame"
# A loaded machine takes 4 s to start a process, and calls have to outlast a planned restart:
# scans wait for the shard, and then for its searcher.
_REQUEST_SECONDS = 8.0
# Shorter than the faults by which a variant shows, and than its runs.
_VARIANT_REQUEST_SECONDS = 3.0
_VARIANT_RECOVERY_SECONDS = 2.0
LEASE_SECONDS = 3
RECOVERY_SECONDS = 10.0
SPLIT_JOBS = 100
_DISK_BYTES = 160 << 20
_START_SECONDS = 90.0
_GAUGE_SECONDS = 10.0
_TITLE = "pinlaterd: "
_ROOT = Path(__file__).parent.parent.parent


class Site:
    """Everything that runs; `close` ends it."""

    def __init__(
        self, folder: Path, engine: str, variant: str = "", *, replicated: bool = False
    ) -> None:
        """`replicated`: the server has a replica, and no proxy, whose address replication would not
        know."""
        self.folder = folder
        self.engine = engine
        self.request_seconds = _VARIANT_REQUEST_SECONDS if variant else _REQUEST_SECONDS
        self.recovery_seconds = _VARIANT_RECOVERY_SECONDS if variant else RECOVERY_SECONDS
        self.server: MariaDB | RedisServer | None = None
        self.replica: MariaDB | RedisServer | None = None
        self.store_proxy: Proxy | None = None
        self.has_small_disk = False
        self._ends = ExitStack()
        self._reviving = threading.Lock()
        self._starter = ThreadPoolExecutor(1)
        self._ends.callback(self._starter.shutdown)
        folder.mkdir(parents=True, exist_ok=True)
        self.control()
        self._environment = {
            **load_shim(folder),
            "PYTHONPATH": str(self._import_root(variant)),
        }
        self.deployment = Deployment(folder / "d", environment=self._environment)
        try:
            self._start(replicated=replicated)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._ends.close()

    def target(self) -> Target:
        # A little more than the server takes at most, so that it is the server that gives up.
        return Target(self.client_proxy.port, self.request_seconds + 3)

    def direct_target(self) -> Target:
        """Past the proxy, which would take in what the client does not read."""
        return replace(self.target(), port=self.deployment.port, receive_bytes=4096)

    def judge_settings(self) -> Settings:
        return Settings(
            request_seconds=self.request_seconds,
            claim_seconds=max(CLAIM_SECONDS.values()),
            queue_claim_seconds=CLAIM_SECONDS,
            in_progress_limits=IN_PROGRESS_LIMITS,
            recovery_seconds=self.recovery_seconds,
            grace_seconds=2.5,
            # A machine that stands still for a second holds up calls of healthy shards, too.
            margin_seconds=1.0,
            release_seconds=4.0,
        )

    def revive_server(self) -> None:
        """Start it again if it has ended; while flushes fail it may end once more."""
        deadline = time.monotonic() + _START_SECONDS
        with self._reviving:
            while self.server is not None and not self.server_runs():
                try:
                    self.start_server_again()
                except AssertionError:
                    if time.monotonic() > deadline:
                        raise

    @contextmanager
    def server_killed(self) -> Iterator[None]:
        """Meanwhile it is not started again."""
        assert self.server is not None
        with self._reviving:
            if self.server_runs():
                self.server.kill()
            yield

    def start_server_again(self) -> None:
        # A server ends with the very thread that has started it.
        self._starter.submit(self._start_stopped_server).result()

    def _start_stopped_server(self) -> None:
        assert self.server is not None
        with _changed_environment(self._environment):
            self.server.start()

    def server_runs(self) -> bool:
        server = self.server
        assert server is not None
        if isinstance(server, MariaDB):
            if server.has_ended:
                server.kill()  # forgets it
            return server.runs
        return not server.has_ended

    def swap_servers(self) -> None:
        """After a failover."""
        self.server, self.replica = self.replica, self.server

    def control(self, *, flush_error: int = 0, clock_seconds: int = 0) -> None:
        """How flushes fail, and by how much the wall clock is ahead, in every process."""
        control_shim(self.folder, flush_error=flush_error, clock_seconds=clock_seconds)

    def pid_of(self, program: str) -> int:
        """Also while supervisord does not answer. A program that is being started is waited for."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if (process := self.running().get(program)) is not None:
                return process.pid
            time.sleep(0.05)
        raise LookupError(f"{program} does not run")

    def running(self) -> dict[str, psutil.Process]:
        """The processes of the service and of its store, by program."""
        found: dict[str, psutil.Process] = {}
        for process in self.deployment.processes():
            with suppress(psutil.Error):
                title = " ".join(process.cmdline()).strip()
                if title.startswith(_TITLE):
                    found[title.removeprefix(_TITLE)] = process
        with suppress(psutil.Error, OSError, ValueError):
            found["supervisord"] = psutil.Process(self.deployment.supervisord_pid())
        with suppress(psutil.Error):
            if self.server is not None and self.server_runs():
                found["server"] = psutil.Process(self.server.pid)
        return found

    def gauges(self, queues: Iterable[str]) -> Iterator[Record]:
        """The depths of the queues that are at rest: nothing of them is in progress."""
        deadline = time.monotonic() + _GAUGE_SECONDS
        before: dict[str, dict[str, float]] = {}
        while True:
            time.sleep(1.5)  # longer than a process takes to report
            found = self.deployment.stats()["gauges"]
            depths = {
                queue: {
                    state.name: found.get(f"{queue}_{state.name.lower()}", 0) for state in JobState
                }
                for queue in queues
            }
            if depths == before or time.monotonic() > deadline:
                break
            before = depths
        now = time.monotonic()
        for queue, depth in depths.items():
            if not depth[JobState.IN_PROGRESS.name] and depth == before.get(queue):
                yield Record(now, now, "coordinator", "depths", {"queue": queue}, result=depth)

    def stored(self) -> Iterator[Record]:
        """All rows, from the stores themselves. The service must have ended."""
        self.revive_server()
        if self.engine == "sqlite":
            found = rows.of_sqlite(self.deployment.folder / "data")
        elif isinstance(self.server, MariaDB):
            found = rows.of_mysql(self.server, SHARDS)
        else:
            assert self.server is not None
            found = rows.of_redis(self.server, SHARDS)
        yield from found

    # --- the parts --------------------------------------------------------------------------

    def _start(self, *, replicated: bool) -> None:
        if replicated:
            self._start_pair()
        else:
            self._start_server()
        settings = {
            "admin_password_hash": f'"{hash_password(PASSWORD)}"',
            "request_timeout_ms": int(self.request_seconds * 1000),
            "shard_restart_grace_ms": int(self.request_seconds * 1000),
            "monitor_interval_seconds": 0.5,
            "owner_lease_seconds": LEASE_SECONDS,
            "enqueue_split_jobs": SPLIT_JOBS,
        }
        self.deployment.init(shards=len(SHARDS), settings=settings, queues=queue_settings())
        self._mount_small_disk()
        if self.server is not None:
            shard = self._shard_settings()
            self.deployment.write("shards", dict.fromkeys(SHARDS, shard))
        self._ends.callback(self.deployment.kill_all)
        self.deployment.up()
        self.client_proxy = Proxy(self.deployment.port)
        self._ends.callback(self.client_proxy.close)

    def _start_server(self) -> None:
        if self.engine == "sqlite":
            return
        with _changed_environment(self._environment):
            if self.engine == "mysql":
                self.server = MariaDB(self.folder / "db", unused_port())
            else:
                fsync = "always" if self.engine == "redis-always" else "everysec"
                self.server = RedisServer(
                    _redis_program(), self.folder / "r", unused_port(), "--appendfsync", fsync
                )
                self.server.start()
        self._ends.callback(self.server.stop)
        self.store_proxy = Proxy(self.server.port)
        self._ends.callback(self.store_proxy.close)

    def _start_pair(self) -> None:
        with _changed_environment(self._environment):
            if self.engine == "mysql":
                of_mysql = MariaDBPair(*servers_at(self.folder / "db", unused_port))
                self._ends.callback(of_mysql.stop)
                fresh(of_mysql, wait_until, gtid=True)
                self.server, self.replica = of_mysql.primary, of_mysql.replica
            else:
                of_redis = RedisPair(_redis_program(), self.folder / "r", unused_port)
                self._ends.callback(of_redis.stop)
                of_redis.wait_until_in_step(wait_until)
                self.server, self.replica = of_redis.master, of_redis.replica

    def _shard_settings(self) -> dict[str, object]:
        assert self.server is not None
        port = self.server.port if self.store_proxy is None else self.store_proxy.port
        settings = dict(shard_settings("mysql" if self.engine == "mysql" else "redis", port))
        if self.replica is not None:
            settings["slave"] = {"host": HOST, "port": self.replica.port}
        return settings

    def _mount_small_disk(self) -> None:
        """Where root may mount it; elsewhere the disk does not get full."""
        if self.engine != "sqlite":
            return
        data = self.deployment.folder / "data"
        data.mkdir(exist_ok=True)
        options = f"size={_DISK_BYTES},mode=700"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(data)]
        mounted = subprocess.run(command, capture_output=True, check=False)
        self.has_small_disk = mounted.returncode == 0
        if self.has_small_disk:
            self._ends.callback(subprocess.run, ["umount", "--lazy", str(data)], check=True)

    def _import_root(self, variant: str) -> Path:
        """A folder to import pinlaterd from, beside a start-up hook that applies the variant."""
        root = self.folder / "root"
        root.mkdir()
        (root / "pinlaterd").symlink_to(Path(pinlaterd.__file__).parent)
        if variant:
            (root / "sitecustomize.py").write_text(
                f"import sys\nsys.path.append({str(_ROOT)!r})\n"
                f"from tests.checker import variants\nvariants.apply({variant!r})\n"
            )
        return root


def queue_settings() -> dict[str, dict[str, object]]:
    """Return the settings of the queues that clients use, as in etc/queues.yaml."""
    found: dict[str, dict[str, object]] = {
        queue: {"job_claimed_timeout_seconds": seconds} for queue, seconds in CLAIM_SECONDS.items()
    }
    for queue, limit in IN_PROGRESS_LIMITS.items():
        found[queue]["max_in_progress"] = limit
    return found


def _redis_program() -> str:
    program = shutil.which("redis-server")
    assert program is not None, "redis-server is missing: apt-get install redis-server"
    return program


def wait_until(condition: Callable[[], object], *, seconds: float = _START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(0.02)


@contextmanager
def _changed_environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def history_head(site: Site, wall_offset: float | None) -> Record:
    settings = replace(site.judge_settings(), wall_offset=wall_offset)
    return Record(0.0, 0.0, "checker", "settings", asdict(settings))
