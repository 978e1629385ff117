"""The quickstart on a cluster: three servers on one set of shards, on this machine.

Each server is a folder with loopback addresses of its own; three ZooKeepers, a MariaDB and a Redis
run beside them, under a supervisord of their own. The quickstart's jobs go through all three
servers. Half-way one server is killed whole, and it shows how long each of its shards was away.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import quickstart_store
from quickstart_store import Store

from pinlaterd.config.layout import ETC, SHARDS_FILE

CLUSTER = "quickstart"
SHARDS_AN_ENGINE = 3
THRIFT_PORT, STATS_PORT, ZOOKEEPER_PORT = 9010, 9999, 2181
LOCAL_FILE = "local.yaml"
KEY_FILE = "cluster.key"
_JARS = "/usr/share/java/zookeeper.jar:/usr/share/java/slf4j-simple.jar"
_START_SECONDS = 60.0
_TAKE_OVER_SECONDS = 90.0
_BALANCE_SECONDS = 120.0
_POLL_SECONDS = 0.02


class Failed(Exception):
    """The message is for whoever runs this."""


class Server(NamedTuple):
    """One server of the cluster, which is one folder here."""

    name: str
    folder: Path
    host: str

    def pinlaterd(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "pinlaterd", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(
                f"pinlaterd {shlex.join(arguments)}: {(done.stderr or done.stdout).strip()}"
            )
        return done.stdout

    def processes(self) -> Sequence[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(self.folder):
                    found.append(process)
        return found

    def kill(self) -> int:
        """Every process at once, as if the machine were off; returns how many."""
        processes = self.processes()
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.suspend()  # so that supervisord starts none of them again
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=_START_SECONDS)
        return len(processes)


# --- what the servers share -----------------------------------------------------------------------


def hosts_of(directory: Path, first: int) -> Sequence[str]:
    """Three addresses of loopback, which is 127.0.0.0/8: others for each directory."""
    digest = hashlib.sha256(str(directory).encode()).digest()
    return [
        f"127.{64 + digest[0] % 128}.{digest[1]}.{number}" for number in range(first, first + 3)
    ]


def start_stores(folder: Path, zookeepers: Sequence[str]) -> Sequence[Store]:
    """MariaDB, Redis and three ZooKeepers under a supervisord in `folder`."""
    conf = folder / "etc" / "supervisord.conf"
    if not conf.exists():
        for part in ("etc", "data", "run/log"):
            (folder / part).mkdir(parents=True, mode=0o700)
        conf.write_text(
            "[supervisord]\nlogfile = %(here)s/../run/log/supervisord.log\n"
            "pidfile = %(here)s/../run/supervisord.pid\n"
            "[unix_http_server]\nfile = %(here)s/../run/supervisor.sock\n"
            "[supervisorctl]\nserverurl = unix://%(here)s/../run/supervisor.sock\n"
            "[rpcinterface:supervisor]\n"
            "supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface\n",
            encoding="utf-8",
        )
        for number in range(1, len(zookeepers) + 1):
            _add_zookeeper(folder, conf, number, zookeepers)
        stores = [
            quickstart_store.add_private_store(folder, each, each) for each in ("mysql", "redis")
        ]
        text = "".join(f"{store.engine} {store.port}\n" for store in stores)
        (folder / "etc" / "stores").write_text(text, encoding="utf-8")
    if not (folder / "run/supervisor.sock").exists():
        subprocess.run(
            [sys.executable, "-m", "supervisor.supervisord", "-c", str(conf)],
            check=True,
            capture_output=True,
            cwd=folder,
        )
    lines = (folder / "etc" / "stores").read_text(encoding="utf-8").split("\n")
    found = []
    for engine, port in (line.split() for line in lines if line):
        user = quickstart_store.USER if engine == "mysql" else ""
        password = folder / quickstart_store.password_file(engine)
        found.append(Store(engine, "127.0.0.1", int(port), user, f"passwd_file: {password}"))
    wait_for_ports(
        [*(("127.0.0.1", store.port) for store in found)]
        + [(host, ZOOKEEPER_PORT) for host in zookeepers]
    )
    return found


def _add_zookeeper(folder: Path, conf: Path, number: int, hosts: Sequence[str]) -> None:
    if not Path(_JARS.partition(":")[0]).exists():
        raise quickstart_store.StoreMissing(
            "ZooKeeper is not installed; on Debian: apt-get install --no-install-recommends "
            "zookeeper"
        )
    data = folder / "data" / f"zookeeper-{number}"
    data.mkdir()
    (data / "myid").write_text(str(number))
    lines = [
        *("tickTime=1000", "initLimit=10", "syncLimit=2", f"dataDir={data}"),
        *(f"clientPortAddress={hosts[number - 1]}", f"clientPort={ZOOKEEPER_PORT}"),
        *("admin.enableServer=false", "maxClientCnxns=0"),
        *(f"server.{n}={each}:2888:3888" for n, each in enumerate(hosts, 1)),
    ]
    settings = folder / "etc" / f"zookeeper-{number}.cfg"
    settings.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = ["java", "-Xmx64m", "-XX:+UseSerialGC", "-cp", _JARS]
    command += ["org.apache.zookeeper.server.quorum.QuorumPeerMain", str(settings)]
    with conf.open("a", encoding="utf-8") as file:
        file.write(
            f"[program:zookeeper-{number}]\ncommand = "
            f"{shlex.join(command).replace('%', '%%')}\nautorestart = true\n"
            f"stdout_logfile = %(here)s/../run/log/zookeeper-{number}.log\nredirect_stderr = true\n"
        )


def wait_for_ports(ports: Sequence[tuple[str, int]]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    for address in ports:
        while True:
            try:
                socket.create_connection(address, 1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise Failed(f"nothing listens on {address[0]}:{address[1]}") from None
                time.sleep(_POLL_SECONDS)


# --- the servers ----------------------------------------------------------------------------------


def prepare(directory: Path) -> Sequence[Server]:
    """Three servers, of which the first has made the cluster."""
    zookeepers = hosts_of(directory, 11)
    stores = start_stores(directory / "stores", zookeepers)
    servers = [
        Server(f"jobs-{number}", directory / f"jobs-{number}", host)
        for number, host in enumerate(hosts_of(directory, 1), 1)
    ]
    zookeeper = ",".join(f"{host}:{ZOOKEEPER_PORT}" for host in zookeepers)
    first = servers[0]
    for server in servers:
        if (server.folder / ETC / LOCAL_FILE).exists():
            continue
        common = ["--name", CLUSTER, "--server", server.name, "--zookeeper", zookeeper]
        common += ["--peer-host", server.host]
        if server is first:
            server.pinlaterd("init", str(server.folder))
            text = shards_text(stores)
            (server.folder / ETC / SHARDS_FILE).write_text(text, encoding="utf-8")
            server.pinlaterd("cluster", "init", str(server.folder), *common)
        else:
            key = ["--key", str(first.folder / ETC / KEY_FILE)]
            server.pinlaterd("cluster", "join", str(server.folder), *common, *key)
        with (server.folder / ETC / LOCAL_FILE).open("a", encoding="utf-8") as file:
            for setting in ("host", "stats_host", "http_host", "web_host", "advertised_host"):
                file.write(f"{setting}: {server.host}\n")
    for server in servers:
        print(f"Waiting for server {server.name} ... ", end="", flush=True)
        server.pinlaterd("up", str(server.folder))
        print("done")
    return servers


def shards_text(stores: Sequence[Store]) -> str:
    """Shards 1, 2, 3 in the first store, 4, 5, 6 in the second."""
    texts = [
        quickstart_store.shards_text(store, SHARDS_AN_ENGINE, 1 + n * SHARDS_AN_ENGINE)
        for n, store in enumerate(stores)
    ]
    return texts[0] + texts[1].partition("shards:\n")[2]


# --- the loss of a server -------------------------------------------------------------------------


@contextlib.contextmanager
def loss_of(victim: Server, servers: Sequence[Server]) -> Iterator[None]:
    """Kill a server whole, and tell how long its shards were away for the others."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        observer = next(server for server in servers if server is not victim)
        told = pool.submit(_kill_and_watch, victim, observer)
        yield
        processes, seconds = told.result()
    print(f"Server {victim.name} was killed, with its {processes} processes, amid the work")
    for shard, (server, away) in sorted(seconds.items()):
        print(f"  shard {shard}: served by {server} after {away:.1f} s")


def _kill_and_watch(
    victim: Server, observer: Server
) -> tuple[int, Mapping[str, tuple[str, float]]]:
    """How many processes it had; and for each shard that it owned, who serves it now, and after how
    many seconds."""
    lost = {shard for shard, server in owners(observer).items() if server == victim.name}
    began = time.monotonic()
    processes = victim.kill()
    seconds: dict[str, tuple[str, float]] = {}
    while lost - seconds.keys():
        away = time.monotonic() - began
        if away > _TAKE_OVER_SECONDS:
            missing = ", ".join(sorted(lost - seconds.keys()))
            raise Failed(f"shards {missing} are not served after {away:.0f} s")
        for shard, server in owners(observer).items():
            if shard in lost and server not in ("", victim.name):
                seconds.setdefault(shard, (server, away))
        time.sleep(_POLL_SECONDS)
    return processes, seconds


def most_loaded(servers: Sequence[Server]) -> Server:
    """Return the server that owns the most shards, once none owns more than half of them, since one
    that joined late has to wait for its part; or after `_BALANCE_SECONDS`."""
    deadline = time.monotonic() + _BALANCE_SECONDS
    while True:
        names = list(owners(servers[0]).values())
        owned = [names.count(server.name) for server in servers]
        balanced = "" not in names and 2 * max(owned) <= len(names)
        if balanced or time.monotonic() > deadline:
            return servers[owned.index(max(owned))]
        time.sleep(_POLL_SECONDS)


def owners(server: Server) -> Mapping[str, str]:
    """The server that serves each shard, as `server` knows it; "" for those that none serves."""
    url = f"http://{server.host}:{STATS_PORT}/status.json"
    with urllib.request.urlopen(url, timeout=10) as response:
        status = json.load(response)
    return {s["name"]: s["server"] if s["state"] == "serving" else "" for s in status["shards"]}


def bring_back(server: Server) -> None:
    server.pinlaterd("up", str(server.folder))
    print(f"Server {server.name} is back")


def show_the_way(directory: Path, servers: Sequence[Server], programs: Path) -> None:
    stores = shlex.quote(str(directory / "stores" / "etc" / "supervisord.conf"))
    run = shlex.quote(str(programs))
    folders = [shlex.quote(str(server.folder)) for server in servers]
    hosts = ", ".join(server.host for server in servers)
    downs = "\n".join(f"  {run}/pinlaterd down {folder}" for folder in folders)
    print(
        f"""
The service goes on running, on port {THRIFT_PORT} of {hosts}. Look around:
  {run}/pinlater-admin --dir {folders[0]} status
  {run}/pinlater-admin --dir {folders[0]} server list
Stop it:
{downs}
  {run}/supervisorctl -c {stores} shutdown"""
    )
