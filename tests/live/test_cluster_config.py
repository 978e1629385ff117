"""The configuration of a cluster: edits by hand and by commands, on servers that run."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pinlaterd.client import Client, Job, JobOptions
from pinlaterd.config.load import load_config
from pinlaterd.deployment.service import processes_of
from tests.cli.program import Program
from tests.conftest import WaitUntil
from tests.deployment import frozen, unused_port
from tests.http.conftest import HttpClient
from tests.rates.limited_workers import LimitedWorkers
from tests.servers.zookeeper import Ensemble, new_cluster, shared_zookeeper
from tests.web.conftest import Visitor
from tests.web.test_mend import fields_of

__all__ = ["shared_zookeeper"]

SHARDS = "".join(
    (
        "shards:\n",
        *(f"  {n}: {{server: jobs-{server}}}\n" for n, server in enumerate((1, 2, 1, 2), 1)),
    )
)
PINLATERD = Program("pinlaterd")
SETTINGS = "shard_restart_grace_ms: 10000\nrequest_timeout_ms: 60000\nweb_writes: true\n"


class Server:
    """A server of a cluster; `DIR/etc` is its `etc`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.etc = folder / "etc"
        self.admin = Program("admin", "--dir", folder)

    def status(self) -> Mapping[str, Any]:
        """What this server says of itself."""
        found: Mapping[str, Any] = json.loads(PINLATERD("status", self.folder, "--json").stdout)
        return found

    @property
    def is_healthy(self) -> bool:
        return PINLATERD("status", self.folder).returncode == 0

    def warnings(self) -> list[str]:
        """Those about edits."""
        return [text for text in self.status()["warnings"] if "your edit" in text]

    def sees(self, names: Sequence[str]) -> bool:
        """Whether just these servers are alive."""
        listed = json.loads(self.admin("server list --json").stdout)
        return [server["name"] for server in listed if server["state"] == "alive"] == names

    def owned(self) -> Mapping[str, Sequence[str]]:
        """The shards of each server."""
        listed = json.loads(self.admin("server list --json").stdout)
        return {server["name"]: server["shards"] for server in listed}

    def read(self, name: str) -> str:
        return (self.etc / name).read_text()

    def pid(self, program: str) -> int:
        found = self.status()["processes"]
        return next(int(one["pid"]) for one in found if one["name"] == program)

    def write(self, name: str, text: str) -> None:
        beside = self.etc / f".{name}.swp"
        beside.write_text(text)
        beside.replace(self.etc / name)


@pytest.fixture(scope="module")
def servers(shared_zookeeper: Ensemble) -> Iterator[tuple[Server, Server]]:
    """Two, which serve two shards each."""
    pinlaterd, cluster = Program("pinlaterd"), new_cluster()
    with tempfile.TemporaryDirectory(prefix="pl", dir="/tmp") as folder:
        first, second = (Server(Path(folder) / name) for name in ("a", "b"))

        def options(name: str) -> list[str]:
            given = {"name": cluster, "server": name, "zookeeper": shared_zookeeper.hosts}
            given["peer-host"] = "127.0.0.1"
            ports = ("port", "stats-port", "peer-port", "shard-ports", "http-port", "web-port")
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


def test_status_and_top_are_of_all_servers_from_any(
    servers: tuple[Server, Server], wait_until: WaitUntil
):
    expected = {
        *("jobs-1/shard-1", "jobs-1/shard-3", "jobs-2/shard-2", "jobs-2/shard-4"),
        *(f"jobs-{n}/{kind}" for n in (1, 2) for kind in ("coordinator", "router", "http", "web")),
    }
    owners = {str(n): ("serving", f"jobs-{2 - n % 2}") for n in range(1, 5)}

    def shows_all(one: Server, command: str) -> bool:
        found = json.loads(one.admin(command, "--json").stdout)
        shards = {shard["name"]: (shard["state"], shard["server"]) for shard in found["shards"]}
        is_counted = command != "top" or None not in [shard["jobs"] for shard in found["shards"]]
        names = {process["name"] for process in found["processes"]}
        return found["healthy"] and (names, shards) == (expected, owners) and is_counted

    for one in servers:
        for command in ("status", "top"):
            wait_until(partial(shows_all, one, command))


def test_commands_on_all_servers_at_once(servers: tuple[Server, Server]):
    first, second = servers

    second.admin.output("queue limit mail 7")
    assert first.read("queues.yaml") == second.read("queues.yaml")
    assert "max_jobs_per_second: 7" in first.read("queues.yaml")
    assert first.status()["config_number"] == second.status()["config_number"]

    with ThreadPoolExecutor() as pool:
        commands = [("queue limit", f"q{n}", str(n + 1)) for n in range(6)]
        runs = [pool.submit(servers[n % 2].admin, *command) for n, command in enumerate(commands)]
        done = [run.result() for run in runs]
    assert [one.returncode for one in done] == [0] * 6, [one.stderr for one in done]
    text = first.read("queues.yaml")
    assert all(f"q{n}:" in text for n in range(6)), text
    assert second.read("queues.yaml") == text
    assert not [*first.etc.glob("*.yours-*"), *second.etc.glob("*.yours-*")]


def test_a_limit_holds_over_the_shards_of_all_servers(
    servers: tuple[Server, Server], wait_until: WaitUntil
):
    """Also after the leader's coordinator, and with it what it knew, is gone."""
    first, second = servers
    before = first.read("queues.yaml")
    first.write("queues.yaml", "queues: {few: {max_in_progress: 3}}\n")
    ports = [load_config(one.etc).server.port for one in servers]
    with Client(port=ports[0]) as client, LimitedWorkers(ports, "few") as workers:
        client.create_queue("few")
        wait_until(lambda: "few" in second.read("queues.yaml"))
        client.enqueue("few", [b"job"] * 40)
        wait_until(lambda: workers.done >= 40)
        workers.most = 0  # from here on the limit is followed everywhere
        coordinators = [one.pid("coordinator") for one in servers]
        for pid in coordinators:
            os.kill(pid, signal.SIGKILL)
        client.enqueue("few", [b"job"] * 100)
        wait_until(lambda: workers.done >= 140)
    first.write("queues.yaml", before)
    wait_until(lambda: all(server.is_healthy for server in servers))

    assert 0 < workers.most <= 3


def test_of_two_edits_of_one_file_the_second_is_kept(
    servers: tuple[Server, Server], wait_until: WaitUntil
):
    first, second = servers
    first.write("queues.yaml", "queues: {a: {max_jobs_per_second: 1}}\n")
    second.write("queues.yaml", "queues: {a: {max_jobs_per_second: 2}}\n")

    wait_until(lambda: any(one.warnings() for one in servers))

    loser, winner = sorted(servers, key=lambda one: not one.warnings())
    [warning] = loser.warnings()
    assert "queues.yaml: jobs-" in warning
    assert "changed it first, in configuration" in warning
    [kept] = loser.etc.glob("queues.yaml.yours-*")
    assert kept.read_text() != loser.read("queues.yaml") == winner.read("queues.yaml")
    kept.unlink()


def limit_over_http(server: Server, queue: str) -> None:
    api = HttpClient(load_config(server.etc).server.http_port)
    limits = {"max_jobs_per_second": 7}
    answer = api.put(f"/v2/queues/{queue}", {"limits": limits})
    assert (answer.status, answer.body["limits"]["max_jobs_per_second"]) == (201, 7)


def limit_on_the_dashboard(server: Server, queue: str) -> None:
    visitor = Visitor(load_config(server.etc).server.web_port)
    form = fields_of(visitor.get(f"/mend?action=limit&queue={queue}"))
    assert "done" in visitor.follow(visitor.post("/mend", {**form, "value": 7})).text


@pytest.mark.parametrize("limit", [limit_over_http, limit_on_the_dashboard])
def test_an_edit_that_comes_second_is_made_again(
    servers: tuple[Server, Server],
    wait_until: WaitUntil,
    limit: Callable[[Server, str], None],
):
    first, second = servers
    queues = [f"{limit.__name__}_{place}" for place in ("first", "second")]
    with ThreadPoolExecutor() as pool:
        with frozen(second.pid("coordinator")):
            edit = pool.submit(limit, second, queues[1])
            wait_until(lambda: queues[1] in second.read("queues.yaml"))
            limit(first, queues[0])
        edit.result()

    assert all(queue in second.read("queues.yaml") for queue in queues)
    assert not [*second.etc.glob("*.yours-*")]
    wait_until(lambda: first.read("queues.yaml") == second.read("queues.yaml"))


def test_keys_are_held_over_all_servers(servers: tuple[Server, Server], wait_until: WaitUntil):
    first, second = servers
    ports = [load_config(one.etc).server.port for one in servers]
    with Client("127.0.0.1", ports[0]) as one, Client("127.0.0.1", ports[1]) as other:
        one.create_queue("keyed")
        jobs = [Job(b"x", options=JobOptions(f"k{number}")) for number in range(40)]
        stored = one.enqueue_keyed("keyed", jobs)
        descriptors = [job.descriptor for job in stored]

        def again() -> None:
            """Through either server all jobs exist."""
            for client in (one, other):
                found = client.enqueue_keyed("keyed", jobs)
                assert [job.descriptor for job in found] == descriptors
                assert all(job.existed for job in found)
                assert len(client.lookup_keys("keyed", [f"k{n}" for n in range(40)])) == 40

        assert not any(job.existed for job in stored)
        again()
        first.admin.output("shard dequeue-only 1 on --yes")
        again()
        new = [Job(b"y", options=JobOptions(f"new{number}")) for number in range(20)]
        added = other.enqueue_keyed("keyed", new)
        second.admin.output("shard dequeue-only 1 off")
        again()
        assert one.enqueue_keyed("keyed", new) == [job._replace(existed=True) for job in added]
        assert {job.descriptor.split(":")[1] for job in added} <= {"s2", "s3", "s4"}
        running = [process for server in servers for process in processes_of(server.folder)]
        coordinators = [
            process for process in running if "coordinator" in " ".join(process.cmdline())
        ]
        for process in coordinators:
            process.kill()
        assert len(coordinators) == 2
        again()
        left = len(jobs) + len(new)
        while left:  # others remove shards, which must hold no jobs
            ended = one.dequeue("keyed", limit=left, max_wait_ms=1000)
            one.ack("keyed", succeeded=ended)
            left -= len(ended)
    wait_until(lambda: all(server.is_healthy for server in servers))


def test_a_shard_is_removed_wherever_it_is_owned(servers: tuple[Server, Server]):
    for server, shard in ((servers[0], "3"), (servers[0], "4")):
        server.admin.output(f"shard remove {shard} --yes")
        for one in servers:
            assert f"{shard}:" not in one.read("shards.yaml")
            assert shard not in [found["name"] for found in one.status()["shards"]]


def test_a_zookeeper_that_lost_its_data_is_filled_again(
    servers: tuple[Server, Server], shared_zookeeper: Ensemble, wait_until: WaitUntil
):
    first, second = servers
    second.admin.output("queue limit before 1")
    before = first.status()["config_number"]
    [server] = shared_zookeeper.servers
    server.kill()
    server.lose_data()
    shared_zookeeper.start()

    Program("pinlaterd").output("cluster init", first.folder, "--restore")

    for one in servers:
        wait_until(partial(one.sees, ["jobs-1", "jobs-2"]), seconds=60)
    second.admin.output("queue limit after 1")
    assert first.read("queues.yaml") == second.read("queues.yaml")
    assert "before:" in first.read("queues.yaml")
    assert first.status()["config_number"] > before


def test_a_server_leaves(servers: tuple[Server, Server], wait_until: WaitUntil):
    first, second = servers
    pinlaterd = Program("pinlaterd")
    for shard in ("2", "4"):
        first.admin.output(f"shard remove {shard} --yes")
    wait_until(lambda: first.owned().get("jobs-2") == [])

    assert "pinlaterd down" in pinlaterd.error("cluster leave", second.folder)
    pinlaterd.output("down", second.folder)
    text = "queues: {b: {max_jobs_per_second: 3}}\n"
    second.write("queues.yaml", text)
    pinlaterd.output("up", second.folder)
    wait_until(lambda: first.read("queues.yaml") == text)
    pinlaterd.output("down", second.folder)
    pinlaterd.output("cluster leave", second.folder)

    wait_until(lambda: "jobs-2" not in first.owned())
    assert "cluster.key is missing" in pinlaterd.error("up", second.folder)
