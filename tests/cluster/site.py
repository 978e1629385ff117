"""A cluster on machines: three servers, three ZooKeepers, MariaDB and Redis, and clients."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from pinlaterd.config.password import hash_password
from pinlaterd.config.schema import queue_of_type
from pinlaterd.deployment.files import write_deployment
from tests.checker.clients import CLAIM_SECONDS
from tests.checker.shim import control_shim, load_shim
from tests.checker.site import PASSWORD
from tests.cluster.load import PROBE, PROBE_CLAIM_SECONDS
from tests.cluster.machines import Machine, Network
from tests.cluster.stores import (
    MARIADB_PORT,
    REDIS_PORT,
    ClusterMariaDB,
    ClusterRedis,
    ClusterZooKeeper,
    LogReader,
    Writers,
    note_mysql_writers,
    note_redis_writers,
)
from tests.servers.mariadb import PASSWD, USER

SERVERS = ("jobs-1", "jobs-2", "jobs-3")
CLUSTER = "test"
THRIFT_PORT, STATS_PORT = 9010, 9999
MYSQL_SHARDS, REDIS_SHARDS, SQLITE_SHARDS = ("1", "2"), ("3", "4"), ("5",)
SHARDS = (*MYSQL_SHARDS, *REDIS_SHARDS, *SQLITE_SHARDS)
# Of Rickover's, whose jobs a downstream gets; and for how long their claims hold.
JOB_TYPE = "charge-card"
PUSHED_CLAIM_SECONDS = {queue_of_type(JOB_TYPE): 5.0}
# Jobs a second of queues that have a limit.
RATES = {"rate_half": 0.5, "rate_10": 10.0, "rate_200": 200.0}
MOVABLE_SHARDS = (*MYSQL_SHARDS, *REDIS_SHARDS)
START_SECONDS = 120.0
_POLL_SECONDS = 0.1
_ASSIGNED = re.compile(r"Assigned\(.*epoch=(\d+), .*next='', planned=(True|False)\)")


class Server:
    """One machine of the service, and its deployment's folder."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.name = machine.name
        self.machine = machine
        self.folder = folder
        self.release: Path | None = None  # whose package it runs, if not this one's
        self.environment: Mapping[str, str] = {}  # more, of its processes

    def command(self, *arguments: str) -> str:
        """`pinlaterd ARGUMENTS`; AssertionError if it fails."""
        return self._run("pinlaterd", *arguments)

    def admin(self, *arguments: str) -> str:
        """`pinlater-admin ARGUMENTS`; AssertionError if it fails."""
        return self._run("pinlaterd.cli.admin", *arguments, "--dir", str(self.folder))

    def _run(self, module: str, *arguments: str) -> str:
        command = (sys.executable, "-P", "-m", module, *arguments)
        place = {} if self.release is None else {"PYTHONPATH": str(self.release)}
        return self.machine.run(*command, environment={**self.environment, **place})

    def up(self) -> None:
        self.command("up", str(self.folder))

    def down(self) -> None:
        self.command("down", str(self.folder))

    def page(self, path: str) -> Mapping[str, Any]:
        """A page of the coordinator, as /status.json."""
        url = f"http://127.0.0.1:{STATS_PORT}{path}"
        found: Mapping[str, Any] = json.loads(
            self.machine.run("curl", "--silent", "--fail", "--max-time", "5", url)
        )
        return found

    def kill(self, program: str) -> int:
        """kill -9; returns the pid that was."""
        pid = self.pid_of(program)
        os.kill(pid, signal.SIGKILL)
        return pid

    def pid_of(self, program: str) -> int:
        """By our numbers."""
        for pid in self.machine.pids():
            try:
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # ended meanwhile
            if title.strip() == f"pinlaterd: {program}":
                return pid
        raise LookupError(f"{program} does not run on {self.name}")

    def log_tail(self, lines: int = 8) -> str:
        logs = sorted((self.folder / "run/log").glob("*.log"))
        tails = ("\n".join(path.read_text(errors="replace").splitlines()[-lines:]) for path in logs)
        return f"\n--- {self.name}\n" + "\n".join(tails)


class Site:
    """Everything that runs; it ends with the network."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        java: str,
        *,
        clocks_step: bool = False,
    ) -> None:
        """`clocks_step`: servers' wall clocks can be changed, by `control_shim(server.folder)`."""
        self.network = network
        self.folder = folder
        self.clients = network.machine("clients")  # whose clock is ours
        self.store = network.machine("store", days_up=400)
        self.zookeepers = [
            ClusterZooKeeper(java, network.machine(f"z{n}", days_up=n), folder / f"z{n}", n)
            for n in (1, 2, 3)
        ]
        self.servers = [
            Server(network.machine(name, days_up=40 * (3 - n)), folder / name[-1])
            for n, name in enumerate(SERVERS)
        ]
        if clocks_step:
            for server in self.servers:
                server.folder.mkdir(parents=True)
                server.environment = load_shim(server.folder)
                control_shim(server.folder)
        self.redis = ClusterRedis(self.store, folder / "r")
        self.shards = SHARDS
        self.python = sys.executable
        self.writers = Writers()
        self._mysql_log = LogReader(folder / "db/general.log")
        self._redis_log = LogReader(folder / "r/monitor.log")

    def start(self) -> None:
        with ThreadPoolExecutor() as threads:
            mariadb = threads.submit(ClusterMariaDB, self.store, self.folder / "db")
            list(threads.map(lambda part: part(), (self.redis.start, self.start_zookeepers)))
            self.mariadb = mariadb.result()
            self._make_cluster()
            list(threads.map(lambda server: server.up(), self.servers))
        self.wait_until_serving()

    def start_zookeepers(self) -> None:
        for zookeeper in self.zookeepers:
            zookeeper.configure([each.peer for each in self.zookeepers])
            zookeeper.start()
        wait_until(lambda: all(zookeeper.mode() for zookeeper in self.zookeepers))

    @property
    def zookeeper_hosts(self) -> str:
        return ",".join(zookeeper.address for zookeeper in self.zookeepers)

    def _make_cluster(self) -> None:
        first, *others = self.servers
        ports = {"port": THRIFT_PORT, "stats_port": STATS_PORT, "http_port": 0}
        ports["web_port"] = 0
        write_deployment(first.folder, "sqlite", 1, ports)
        etc = first.folder / "etc"
        (etc / "shards.yaml").write_text(json.dumps({"shards": self._shards()}))
        settings = etc / "pinlaterd.yaml"
        with settings.open("a") as file:
            file.writelines(f"{key}: {value}\n" for key, value in self._settings().items())
        claim_seconds = {**CLAIM_SECONDS, PROBE: PROBE_CLAIM_SECONDS, **PUSHED_CLAIM_SECONDS}
        queues = {
            queue: {"job_claimed_timeout_seconds": seconds}
            for queue, seconds in claim_seconds.items()
        } | {queue: {"max_jobs_per_second": rate} for queue, rate in RATES.items()}
        (etc / "queues.yaml").write_text(json.dumps({"queues": queues}))
        first.command("cluster", "init", str(first.folder), *self._options(first))
        for other in others:
            key = ("--key", str(etc / "cluster.key"))
            other.command("cluster", "join", str(other.folder), *key, *self._options(other))

    def _options(self, server: Server) -> Sequence[str]:
        return [
            *("--name", CLUSTER, "--server", server.name),
            *("--zookeeper", self.zookeeper_hosts, "--peer-host", server.machine.address),
        ]

    def _shards(self) -> Mapping[str, object]:
        def at(engine: str, port: int, **more: object) -> object:
            return {"engine": engine, "master": {"host": self.store.address, "port": port}, **more}

        return {
            **{s: at("mysql", MARIADB_PORT, user=USER, passwd=PASSWD) for s in MYSQL_SHARDS},
            **{s: at("redis", REDIS_PORT) for s in REDIS_SHARDS},
            **{s: {"engine": "sqlite", "server": SERVERS[0]} for s in SQLITE_SHARDS},
        }

    @staticmethod
    def _settings() -> Mapping[str, object]:
        return {
            "host": "0.0.0.0",
            "admin_password_hash": f'"{hash_password(PASSWORD)}"',
            "monitor_interval_seconds": 0.5,
            "health_slow_ms": 60_000,
        }

    # --- who does what ----------------------------------------------------------------------

    def owners(self, *, of: Sequence[Server] = ()) -> Mapping[str, Server]:
        """By shard, as a server (one of these) says that runs."""
        by_name = {server.name: server for server in self.servers}
        return {shard["name"]: by_name[shard["server"]] for shard in self._status(of)["shards"]}

    def leader(self) -> Server:
        leads = [server["name"] for server in self._status()["servers"] if server["leads"]]
        return next(server for server in self.servers if [server.name] == leads)

    def all_move(self, server: Server) -> bool:
        """Return whether others can own all that it owns; SQLite shards wait until it is back."""
        owners = self.owners()
        return server not in [owners[shard] for shard in SQLITE_SHARDS]

    def follower(self, *, all_move: bool = False) -> Server:
        """One that does not lead."""
        leader, owners = self.leader(), self.owners().values()
        followers = [server for server in self.servers if server is not leader]
        if all_move:
            followers = [server for server in followers if self.all_move(server)]
        return max(followers, key=lambda server: list(owners).count(server))

    def give_shards(self, server: Server) -> None:
        """See that it owns a shard of each kind of store, by planned moves."""
        owners = self.owners()
        if any(server not in [owners[shard] for shard in s] for s in (MYSQL_SHARDS, REDIS_SHARDS)):
            self.gather_shards(server)

    def gather_shards(self, server: Server) -> None:
        """Have it own all that can move."""
        for other in self.others(server):
            server.admin("server", "maintenance", other.name, "on", "--wait")
        owners = self.owners()
        assert {owners[shard] for shard in MOVABLE_SHARDS} == {server}
        for other in self.others(server):
            server.admin("server", "maintenance", other.name, "off")

    def take_overs(self, since: float) -> Sequence[str]:
        """Moves of shards that no owner took part in. A shard may be moved in order at any time: to
        where there is less to do."""
        return self._assigned(since, planned=False)

    def planned_moves(self, since: float) -> Sequence[str]:
        """Those in order."""
        return self._assigned(since, planned=True)

    def _assigned(self, since: float, *, planned: bool) -> Sequence[str]:
        """As the leaders' logs tell."""
        since_ms = (time.time() - time.monotonic() + since) * 1000
        found = {
            line.partition("shard-")[2]
            for server in self.servers
            for line in (server.folder / "run/log/coordinator.log").read_text().splitlines()
            if (given := _ASSIGNED.search(line)) is not None
            and int(given[1]) >= since_ms
            and (given[2] == "True") == planned
        }
        return sorted(found)

    def others(self, *victims: Server) -> Sequence[Server]:
        return [server for server in self.servers if server not in victims]

    def _status(self, of: Sequence[Server] = ()) -> Mapping[str, Any]:
        for server in of or self.servers:
            if server.machine.is_on:
                with suppress(AssertionError):
                    return server.page("/status.json")
        raise LookupError("no server says how it is")

    def zookeeper_leader(self) -> ClusterZooKeeper:
        return next(zookeeper for zookeeper in self.zookeepers if zookeeper.mode() == "leader")

    # --- after a fault ----------------------------------------------------------------------

    def restore(self) -> None:
        """All is on, connected and serves."""
        for machine in self.network.machines.values():
            if machine.is_on:
                machine.thaw()
        self.network.heal()
        for server in self.servers:
            if server.release is not None and server.machine.is_on:
                server.machine.off()
            server.release = None
        for zookeeper in self.zookeepers:
            if not zookeeper.machine.is_on:
                zookeeper.machine.on()
                zookeeper.start()
        for server in self.servers:
            if not server.machine.is_on:
                server.machine.on()
                server.up()
        wait_until(lambda: all(zookeeper.mode() for zookeeper in self.zookeepers))
        self.wait_until_serving()

    def data_folders(self) -> Iterator[Path]:
        """With the files of SQLite."""
        for server in self.servers:
            yield server.folder / "data"

    def returned_writers(self) -> Sequence[str]:
        """Owners that wrote to a shard's store once a later one had, since this was asked last."""
        note_mysql_writers(self._mysql_log, self.writers)
        note_redis_writers(self._redis_log, self.writers)
        found, self.writers.returned = self.writers.returned, []
        return found

    def wait_until_serving(self) -> None:
        wait_until(lambda: all(server.page("/status.json")["healthy"] for server in self.servers))


def wait_until(condition: Any, *, seconds: float = START_SECONDS) -> float:
    """Returns how long it took."""
    began = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - began
            error = None
        except (AssertionError, LookupError) as found:
            error = found
        assert time.monotonic() < began + seconds, f"not within {seconds:g} s: {error}"
        time.sleep(_POLL_SECONDS)
