"""The configuration of a cluster: edits by hand and by commands, on servers that run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pinlaterd.deployment.service import processes_of
from tests.cli.program import Program
from tests.conftest import WaitUntil
from tests.deployment import unused_port
from tests.servers.zookeeper import Ensemble, new_cluster, shared_zookeeper, zookeeper

__all__ = ["shared_zookeeper", "zookeeper"]

SHARDS = "".join(
    (
        "shards:\n",
        *(f"  {n}: {{server: jobs-{server}}}\n" for n, server in enumerate((1, 2, 1, 2), 1)),
    )
)
SETTINGS = "shard_restart_grace_ms: 10000\n"


class Server:
    """A server of a cluster; `DIR/etc` is its `etc`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.etc = folder / "etc"
        self.admin = Program("admin", "--dir", folder)

    def status(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(self.admin("status --json").stdout)
        return found

    def warnings(self) -> list[str]:
        """Those about edits."""
        return [text for text in self.status()["warnings"] if "your edit" in text]

    def owned(self) -> Mapping[str, Sequence[str]]:
        """The shards of each server."""
        listed = json.loads(self.admin("server list --json").stdout)
        return {server["name"]: server["shards"] for server in listed}

    def read(self, name: str) -> str:
        return (self.etc / name).read_text()

    def write(self, name: str, text: str) -> None:
        beside = self.etc / f".{name}.swp"
        beside.write_text(text)
        beside.replace(self.etc / name)


@pytest.fixture
def servers(zookeeper: Ensemble) -> Iterator[tuple[Server, Server]]:
    """Two, which serve two shards each."""
    pinlaterd, cluster = Program("pinlaterd"), new_cluster()
    with tempfile.TemporaryDirectory(prefix="pl", dir="/tmp") as folder:
        first, second = (Server(Path(folder) / name) for name in ("a", "b"))

        def options(name: str) -> list[str]:
            given = {"name": cluster, "server": name, "zookeeper": zookeeper.hosts}
            given["peer-host"] = "127.0.0.1"
            ports = ("port", "stats-port", "peer-port", "shard-ports")
            given |= {port: str(unused_port()) for port in ports}
            return [text for key, value in given.items() for text in (f"--{key}", value)]

        try:
            pinlaterd.output("init", first.folder)
            first.write("shards.yaml", SHARDS)
            first.write("pinlaterd.yaml", SETTINGS)
            pinlaterd.output("cluster init", first.folder, *options("jobs-1"))
            key = first.etc / "cluster.key"
            pinlaterd.output("cluster join", second.folder, "--key", key, *options("jobs-2"))
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda one: pinlaterd.output("up", one.folder), (first, second)))
            yield first, second
        finally:
            for one in (first, second):
                for process in processes_of(one.folder):
                    process.kill()


def test_one_configuration_for_all(servers: tuple[Server, Server], wait_until: WaitUntil):
    first, second = servers

    second.admin.output("queue limit mail 7")
    assert first.read("queues.yaml") == second.read("queues.yaml")
    assert "max_jobs_per_second: 7" in first.read("queues.yaml")
    assert {one.status()["config_number"][0] for one in servers} == {2}

    with ThreadPoolExecutor() as pool:
        commands = [("queue limit", f"q{n}", str(n + 1)) for n in range(6)]
        runs = [pool.submit(servers[n % 2].admin, *command) for n, command in enumerate(commands)]
        done = [run.result() for run in runs]
    assert [one.returncode for one in done] == [0] * 6, [one.stderr for one in done]
    text = first.read("queues.yaml")
    assert all(f"q{n}:" in text for n in range(6)), text
    assert second.read("queues.yaml") == text
    assert not [*first.etc.glob("*.yours-*"), *second.etc.glob("*.yours-*")]

    first.write("queues.yaml", "queues: {a: {max_jobs_per_second: 1}}\n")
    second.write("queues.yaml", "queues: {a: {max_jobs_per_second: 2}}\n")
    wait_until(lambda: any(one.warnings() for one in servers), seconds=30)
    loser, winner = sorted(servers, key=lambda one: not one.warnings())
    [warning] = loser.warnings()
    assert "queues.yaml: jobs-" in warning
    assert "changed it first, in configuration" in warning
    [kept] = loser.etc.glob("queues.yaml.yours-*")
    assert kept.read_text() != loser.read("queues.yaml") == winner.read("queues.yaml")

    for server, shard in ((loser, "3"), (winner, "4"), (loser, "2")):
        removed = server.admin(f"shard remove {shard} --yes")
        assert removed.returncode == 0, removed.stderr
        for one in servers:
            assert f"{shard}:" not in one.read("shards.yaml")
            assert shard not in [found["name"] for found in one.status()["shards"]]

    wait_until(lambda: first.owned() == {"jobs-1": ["1"], "jobs-2": []}, seconds=30)
    pinlaterd = Program("pinlaterd")
    assert "pinlaterd down" in pinlaterd.error("cluster leave", second.folder)
    pinlaterd.output("down", second.folder)
    text = "queues: {b: {max_jobs_per_second: 3}}\n"
    second.write("queues.yaml", text)
    pinlaterd.output("up", second.folder)
    wait_until(lambda: first.read("queues.yaml") == text, seconds=30)
    pinlaterd.output("down", second.folder)
    pinlaterd.output("cluster leave", second.folder)
    wait_until(lambda: first.owned() == {"jobs-1": ["1"]}, seconds=30)
    assert "cluster.key is missing" in pinlaterd.error("up", second.folder)
