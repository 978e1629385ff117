"""A command's calls to shards, of its own server and of others, over real sockets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pinlaterd.config.active import activate
from pinlaterd.config.layout import CLUSTER_KEY_FILE, ETC, RUN, shard_endpoint
from pinlaterd.config.schema import Config, ServerSettings
from pinlaterd.errors import ConfigError
from pinlaterd.wire.control import ShardEntry, Snapshot, write_snapshot
from pinlaterd.wire.envelope import Status
from pinlaterd.wire.shard_caller import ShardCallers
from tests.conftest import FreePort
from tests.wire.played import KEY, other_time

ROOT = Path(__file__).parents[2]
SECONDS = 60.0
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a process that plays a shard."""
    monkeypatch.chdir(tmp_path)
    ETC.mkdir()
    RUN.mkdir()
    with ExitStack() as stack:

        def started(endpoint: str, *before: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [*before, sys.executable, "-m", "tests.wire.played", endpoint],
                stdout=subprocess.PIPE,
                text=True,
                env={"PYTHONPATH": str(ROOT)},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        yield started


@pytest.fixture
def in_cluster(start: Start) -> None:
    key = ETC / CLUSTER_KEY_FILE
    key.write_text(KEY.secret.hex())
    key.chmod(0o600)
    activate(Config(ServerSettings(cluster="prod", server="a", peer_host="127.0.0.1"), {}, {}))


def owner_is(server: str, endpoint: str) -> None:
    entry = ShardEntry("1", False, server, epoch=1, endpoint=endpoint)
    write_snapshot(Snapshot(1, (entry,), 0, server="a", member="m-1", members=("m-1",)))


def test_on_a_single_machine(start: Start):
    start(shard_endpoint("1"))
    with ShardCallers() as callers:
        assert callers["1"].call(b"a", seconds=SECONDS).status is Status.DONE


@pytest.mark.usefixtures("in_cluster")
def test_a_shard_of_another_server_gets_the_deadline_that_is_meant(
    start: Start, free_port: FreePort
):
    there = f"tcp://127.0.0.1:{free_port()}"
    start(there, *other_time())
    owner_is("b", there)
    with ShardCallers() as callers:
        for _ in range(3):
            reply = callers["1"].call(b"a", seconds=SECONDS)
            assert reply.status is Status.DONE
            assert SECONDS / 2 < float(reply.payload) <= SECONDS


@pytest.mark.usefixtures("in_cluster")
def test_a_shard_is_followed_to_where_it_moves(start: Start, free_port: FreePort):
    there, third = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    here = start(shard_endpoint("1"))
    owner_is("a", third)
    with ShardCallers() as callers:
        assert callers["1"].call(b"a", seconds=SECONDS).status is Status.DONE
        here.kill()
        here.wait()
        start(there)
        owner_is("b", there)
        while callers["1"].call(b"a", seconds=SECONDS).status is not Status.DONE:
            pass  # LOST, if the end of the connection is noticed with the call


@pytest.mark.usefixtures("in_cluster")
def test_a_shard_without_an_owner_is_down(start: Start):
    owner_is("", "")
    with ShardCallers() as callers:
        assert callers["1"].call(b"a", seconds=0.5).status is Status.REFUSED


@pytest.mark.usefixtures("in_cluster")
def test_a_key_that_is_missing_is_named(start: Start):
    (ETC / CLUSTER_KEY_FILE).unlink()
    owner_is("b", "tcp://127.0.0.1:1")
    with ShardCallers() as callers, pytest.raises(ConfigError, match=r"etc/cluster\.key: "):
        callers["1"]
