"""Servers change to another release and back, one after the other, under load."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.faults import AWAITED_SECONDS, owns_nothing
from tests.cluster.releases import next_release, release_of
from tests.cluster.run import Run
from tests.cluster.site import MOVABLE_SHARDS, SQLITE_SHARDS, Server, Site

pytestmark = [pytest.mark.service, pytest.mark.rounds, pytest.mark.timeout(900)]


@pytest.fixture
def other_release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The next one; with --before the one of that commit."""
    before = request.config.getoption("--before")
    return release_of(before, tmp_path) if before else next_release(tmp_path)


def test_an_upgrade_and_the_way_back_without_a_failed_call(
    site: Site, rounds: range, other_release: Path, note: Callable[[str, float], None]
):
    with Run(site) as run:
        for _ in rounds:
            for release in (other_release, None):
                for server in site.servers:
                    began = time.monotonic()
                    change(run, server, release)
                    longest = run.longest_call(began, shards=MOVABLE_SHARDS)
                    note("longest call while a server is upgraded", longest)
                    note("with the shard that waits for its server", run.longest_call(began))


def change(run: Run, server: Server, release: Path | None) -> None:
    site = run.site
    run.use(site.others(server))
    server.admin("server", "maintenance", server.name, "on", "--wait")
    assert owns_nothing(site, server)
    awaited_seconds = math.inf if site.all_move(server) else AWAITED_SECONDS
    places = [f"shard-{shard}" for shard in SQLITE_SHARDS]
    with run.fault("a shard waits for its server", places=places, over_seconds=awaited_seconds):
        server.down()
        server.release = release
        server.up()
        server.admin("server", "maintenance", server.name, "off")
        site.wait_until_serving()
    assert (str(release) in environment_of(server)) == (release is not None)
    run.use(site.servers)
    run.wait_until_served(time.monotonic())


def environment_of(server: Server) -> str:
    """That of its coordinator, which names the folder of its package."""
    return Path(f"/proc/{server.pid_of('coordinator')}/environ").read_text()
