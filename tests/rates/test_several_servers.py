"""The rate of a queue over the servers of a cluster: three, of which the first has the shard."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pinlaterd.client import Client
from pinlaterd.deployment.service import processes_of
from tests.cli.program import Program
from tests.conftest import WaitUntil
from tests.deployment import unused_port
from tests.rates.conftest import JOBS
from tests.rates.puller import Puller
from tests.rates.test_rates import (
    in_a_window_without_stalls,
    pass_seconds,
    tolerance,
    total,
    when_at_the_rate,
)
from tests.servers.zookeeper import Ensemble, new_cluster, shared_zookeeper

__all__ = ["shared_zookeeper"]

pytestmark = pytest.mark.service

Pull = Callable[..., Puller]
RATE = 20
QUIET_SECONDS = 2.0
PHASE_SECONDS = 4.0


class Server:
    """A server of a cluster, with one router."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = unused_port()
        self.admin = Program("admin", "--dir", folder)

    def status(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(self.admin("status --json").stdout)
        return found

    def pids(self, program: str) -> Sequence[int]:
        title = f"pinlaterd: {program}"
        return [one.pid for one in processes_of(self.folder) if title in one.cmdline()]

    def pid_of(self, program: str) -> int:
        [pid] = self.pids(program)
        return pid

    def all_is_well(self) -> bool:
        """Everywhere."""
        done = self.admin("status --json")  # says nothing while there is no coordinator
        return bool(done.stdout and json.loads(done.stdout)["healthy"])

    def kill_coordinator(self, wait_until: WaitUntil) -> None:
        wait_until(lambda: self.pids("coordinator"))
        os.kill(self.pid_of("coordinator"), signal.SIGKILL)

    def off(self) -> None:
        for process in processes_of(self.folder):
            process.kill()


@pytest.fixture(scope="module")
def servers(shared_zookeeper: Ensemble, wait_until: WaitUntil) -> Iterator[Sequence[Server]]:
    pinlaterd, cluster = Program("pinlaterd"), new_cluster()
    with tempfile.TemporaryDirectory(prefix="pl", dir="/tmp") as folder:
        made = [Server(Path(folder) / name) for name in "abc"]
        try:
            for server in made:
                name = f"jobs-{server.folder.name}"
                given = {"name": cluster, "server": name, "zookeeper": shared_zookeeper.hosts}
                given |= {"peer-host": "127.0.0.1", "port": str(server.port)}
                given |= {p: str(unused_port()) for p in ("stats-port", "peer-port", "shard-ports")}
                given["http-port"] = given["web-port"] = "0"
                options = [text for key, value in given.items() for text in (f"--{key}", value)]
                if server is made[0]:
                    pinlaterd.output("init", server.folder)
                    etc = server.folder / "etc"
                    (etc / "shards.yaml").write_text("shards: {1: {server: jobs-a}}\n")
                    rates = {"steady": RATE, "broken": RATE, "off": RATE}
                    queues = {queue: {"max_jobs_per_second": rate} for queue, rate in rates.items()}
                    (etc / "queues.yaml").write_text(json.dumps({"queues": queues}))
                    pinlaterd.output("cluster init", server.folder, *options)
                else:
                    key = made[0].folder / "etc" / "cluster.key"
                    pinlaterd.output("cluster join", server.folder, "--key", key, *options)
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda server: pinlaterd.output("up", server.folder), made))
            with Client(port=made[0].port, source="test") as client:
                for queue in rates:
                    client.create_queue(queue)
                    client.enqueue(queue, [b"job"] * JOBS)
            yield made
        finally:
            for server in made:
                server.off()


def test_the_rate_is_kept_as_demand_moves_from_server_to_server(
    servers: Sequence[Server], pull: Pull
):
    def look() -> None:
        pullers: list[Puller] = []

        def move_to(server: Server) -> None:
            before, now = pullers[:], [pull(server, "router", "steady") for _ in range(2)]
            for puller in before[-2:]:
                puller.stop()
            pullers.extend(now)

        try:
            move_to(servers[0])
            pass_seconds(QUIET_SECONDS)
            begin, _ = pass_seconds(0)
            for server in (servers[1], servers[2], servers[0]):
                move_to(server)
                _, end = pass_seconds(PHASE_SECONDS)
        finally:
            for puller in pullers:
                puller.stop()
        seconds = end - begin
        jobs = total(pullers, begin, end)
        assert jobs == pytest.approx(RATE * seconds, abs=tolerance(RATE, seconds))

    in_a_window_without_stalls(look)


def test_killed_coordinators_never_have_more_taken_than_the_rate(
    servers: Sequence[Server], pull: Pull, wait_until: WaitUntil
):
    pullers = [pull(server, "router", "broken") for server in servers]
    time.sleep(QUIET_SECONDS)
    begin = when_at_the_rate(pullers, RATE)
    for server in (servers[0], servers[1], servers[0]):  # the leader, and others
        server.kill_coordinator(wait_until)
        time.sleep(1)
    time.sleep(2)
    wait_until(servers[0].all_is_well)

    def look() -> None:
        recovered, end = pass_seconds(3)
        after = total(pullers, recovered, end)
        assert after == pytest.approx(RATE * (end - recovered), abs=tolerance(RATE, 3) + 2)

    in_a_window_without_stalls(look)  # nothing is lost for good
    end = time.monotonic()
    taken = total(pullers, begin, end)
    assert taken <= RATE * (end - begin) + tolerance(RATE, end - begin)


def test_the_share_of_a_server_that_is_off_goes_to_the_others(
    servers: Sequence[Server], pull: Pull, wait_until: WaitUntil
):
    pullers = [pull(server, "router", "off") for server in servers[:2]]
    time.sleep(QUIET_SECONDS)
    leaving = pull(servers[2], "router", "off")
    time.sleep(QUIET_SECONDS)
    begin = when_at_the_rate([*pullers, leaving], RATE)
    servers[2].off()
    leaving.stop()

    def look() -> None:
        since, end = pass_seconds(3)
        after = total(pullers, since, end)
        assert after == pytest.approx(RATE * (end - since), abs=tolerance(RATE, 3) + 2)

    wait_until(
        lambda: {s["name"]: s["state"] for s in servers[0].status()["servers"]}["jobs-c"] == "gone"
    )
    in_a_window_without_stalls(look)
    end = time.monotonic()
    taken = sum(puller.between(begin, end) for puller in pullers)
    assert taken <= RATE * (end - begin) + tolerance(RATE, end - begin)
