"""ZooKeeper fails, or what speaks to it: what is served goes on, and all agree again afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from tests.cluster.faults import SESSION_SECONDS
from tests.cluster.run import Run
from tests.cluster.site import Server, Site, wait_until

pytestmark = [pytest.mark.service, pytest.mark.rounds, pytest.mark.timeout(900)]

FLAPS = 8
FLAP_SECONDS = 1.0
EDITS_A_SERVER = 8


def test_a_link_to_zookeeper_flaps_and_nothing_moves(site: Site, rounds: range):
    with Run(site) as run:
        for _ in rounds:
            victim = run.follower()
            began = time.monotonic()
            for _ in range(FLAPS):
                for zookeeper in site.zookeepers:
                    site.network.cut(victim.machine, zookeeper.machine)
                time.sleep(FLAP_SECONDS)
                site.network.heal()
                time.sleep(FLAP_SECONDS)
            run.wait_until_served(time.monotonic())
            site.wait_until_serving()
            assert site.take_overs(began) == []


def test_each_process_is_killed_while_zookeeper_is_away(
    site: Site, note: Callable[[str, float], None]
):
    """What is started again takes up what it did before."""
    with Run(site) as run:
        started, owners = time.monotonic(), site.owners()
        for zookeeper in site.zookeepers:
            zookeeper.machine.off()
        time.sleep(SESSION_SECONDS)
        for server in site.servers:
            shards = [f"shard-{shard}" for shard in site.shards if owners[shard] is server]
            for program in ("coordinator", "router", *shards):
                with run.fault(f"{program} of {server.name} killed") as began:
                    server.kill(program)
                    note("a process killed without ZooKeeper", run.wait_until_served(began))
        with run.fault("ZooKeeper comes back"):
            site.restore()
        run.wait_until_served(time.monotonic())
        time.sleep(2 * SESSION_SECONDS)
        assert site.take_overs(started) == []


def test_zookeeper_loses_everything(site: Site):
    with Run(site) as run, run.fault("ZooKeeper is empty"):
        for zookeeper in site.zookeepers:
            zookeeper.machine.off()
        for zookeeper in site.zookeepers:
            zookeeper.kill()
            zookeeper.lose_data()
            zookeeper.machine.on()
            zookeeper.start()
        wait_until(lambda: all(zookeeper.mode() for zookeeper in site.zookeepers))
        time.sleep(2 * SESSION_SECONDS)
        run.wait_until_served(time.monotonic())  # all goes on
        first = site.servers[0]
        first.command("cluster", "init", str(first.folder), "--restore")
        site.wait_until_serving()
        run.wait_until_served(time.monotonic())


def test_edits_on_all_servers_at_once_are_all_kept(site: Site):
    def edit(server: Server) -> None:
        for number in range(1, EDITS_A_SERVER + 1):
            server.admin("queue", "limit", _edited(server, number), str(number))

    with ThreadPoolExecutor(len(site.servers)) as threads:
        list(threads.map(edit, site.servers))
    wanted = {
        _edited(server, number): number
        for server in site.servers
        for number in range(1, EDITS_A_SERVER + 1)
    }

    def agreed() -> bool:
        texts = {(server.folder / "etc/queues.yaml").read_text() for server in site.servers}
        return len(texts) == 1

    wait_until(agreed)
    queues = yaml.safe_load((site.servers[0].folder / "etc/queues.yaml").read_text())["queues"]
    found = {name: of["max_jobs_per_second"] for name, of in queues.items() if name in wanted}
    assert found == wanted
    wait_until(lambda: _same_in_force(site))


def _edited(server: Server, number: int) -> str:
    return f"edited_{server.name[-1]}_{number}"


def _same_in_force(site: Site) -> bool:
    """No server has a problem with it, nor waits for anything."""
    return all(
        not server.page("/status.json")["config_problems"]
        and server.page("/status.json")["healthy"]
        for server in site.servers
    )
