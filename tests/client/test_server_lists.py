"""Clients that follow a list of servers: a file, or a server set of a real ZooKeeper."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from click.testing import CliRunner
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl

from pinlaterd.cli.pinlater import cli as pinlater
from pinlaterd.client import AddressInvalid, Client, ConnectionFailed, JobState, Worker
from pinlaterd.client.addresses import FileList
from pinlaterd.config.layout import ZOOKEEPER_SESSION
from pinlaterd.config.schema import Address
from pinlaterd.coordinator.zookeeper import endpoint_of
from tests.cli.program import Program
from tests.client.scripted_server import ScriptedServer
from tests.client.test_fork import in_child
from tests.client.working import handlers_of, have_ended, running
from tests.conftest import WaitUntil
from tests.deployment import MOST_PATIENT, Deployment, unused_port
from tests.servers.zookeeper import Ensemble, new_cluster, shared_zookeeper, zookeeper

__all__ = ["shared_zookeeper", "zookeeper"]

LISTS = ["file", "zookeeper"]


class File:
    """A list in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = f"file:{path}"

    def set(self, *ports: int) -> None:
        lines = "".join(f"127.0.0.1:{port}  # one\n" for port in ports)
        self.path.write_text(f"# all of them\n\n{lines}")

    def spoil(self) -> None:
        self.path.write_text("127.0.0.1:1\n127.0.0.1:none\n")

    def end(self) -> None: ...


class ServerSet:
    """A list in ZooKeeper, as Finagle and pinlaterd write it."""

    def __init__(self, at: Ensemble) -> None:
        self.path = f"/discovery/{new_cluster()}/prod"
        self.name = f"zk://{at.hosts}{self.path}"
        self.client = KazooClient(at.hosts, timeout=20.0)  # its nodes outlast a machine that stalls
        self.client.start(timeout=60)
        self._nodes: dict[int, str] = {}

    def add(self, data: bytes, name: str = "member_", **options: Any) -> str:
        return str(
            self.client.create(
                f"{self.path}/{name}", data, ephemeral=True, sequence=True, makepath=True, **options
            )
        )

    def set(self, *ports: int) -> None:
        going = self.client.transaction()  # at once: one that stays for longest would be followed
        for port in self._nodes.keys() - set(ports):
            going.delete(self._nodes.pop(port))
        going.commit()
        for port in set(ports) - self._nodes.keys():
            self._nodes[port] = self.add(endpoint_of("127.0.0.1", port))

    def spoil(self) -> None:
        self.set()
        self.add(b"\xff")
        self.add(b"[]")
        self.add(b'{"serviceEndpoint": {"host": "127.0.0.1"}, "status": "ALIVE"}')
        self.add(b'{"serviceEndpoint": {"host": "127.0.0.1", "port": "9"}, "status": "ALIVE"}')
        self.add(endpoint_of("127.0.0.1", 1).replace(b"ALIVE", b"DEAD"))
        self.add(endpoint_of("127.0.0.1", 1), name="other_")

    def end(self) -> None:
        self.client.stop()
        self.client.close()


@pytest.fixture(params=LISTS)
def listed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[File | ServerSet]:
    if request.param == "file":
        made: File | ServerSet = File(tmp_path / "servers")
    else:
        made = ServerSet(request.getfixturevalue("zookeeper"))
    yield made
    made.end()


@pytest.fixture
def three(start_server: Callable[..., ScriptedServer]) -> list[ScriptedServer]:
    servers = [start_server() for _ in range(3)]
    for server in servers:
        server.reply = lambda _: 5
    return servers


def count(client: Any) -> int:
    return int(client.count("mail", JobState.PENDING))


def asked(client: Any, servers: list[ScriptedServer]) -> list[bool]:
    """Which get any of a few calls."""
    before = [len(server.calls) for server in servers]
    for _ in range(6):
        assert count(client) == 5
    return [len(server.calls) > old for server, old in zip(servers, before, strict=True)]


def test_calls_follow_the_list(listed, three, connect, wait_until: WaitUntil) -> None:
    first, second, third = (server.port for server in three)
    listed.set(first, second)
    with connect(listed.name) as client:
        assert client.address == listed.name
        assert asked(client, three) == [True, True, False]
        listed.set(second, third)
        wait_until(lambda: asked(client, three) == [False, True, True])
        three[0].close()
        assert asked(client, three) == [False, True, True]
        listed.set(second)
        wait_until(lambda: asked(client, three) == [False, True, False])


def test_a_list_that_is_empty_or_wrong_changes_nothing(
    listed, three, connect, wait_until: WaitUntil
) -> None:
    first, second, _ = (server.port for server in three)
    listed.set(first, second)
    with connect(listed.name) as client:
        assert asked(client, three) == [True, True, False]
        for worse in (listed.set, listed.spoil):
            worse()
            until = time.monotonic() + 1.5  # beyond the time in which a change is followed
            while time.monotonic() < until:
                assert asked(client, three) == [True, True, False]
        listed.set(second)
        wait_until(lambda: asked(client, three) == [False, True, False])


def test_a_call_under_way_where_a_server_left_ends_as_ever(
    listed, three, connect, wait_until: WaitUntil
) -> None:
    leaving, staying, _ = three
    is_held, release = Event(), Event()

    def hold_the_first(_call: object) -> int:
        if is_held.is_set():
            return 5
        is_held.set()
        assert release.wait(60)
        return 7

    leaving.reply = hold_the_first
    listed.set(leaving.port)
    results: list[int] = []
    with connect(listed.name) as client:
        caller = Thread(target=lambda: results.append(count(client)))
        caller.start()
        assert is_held.wait(60)
        listed.set(staying.port)
        wait_until(lambda: asked(client, three) == [False, True, False])
        release.set()
        caller.join(60)
        assert results == [7]
        assert asked(client, three) == [False, True, False]
        wait_until(lambda: all(connection.fileno() < 0 for connection in leaving._open))


def test_a_first_look_that_finds_nothing_is_an_error(listed, three, connect) -> None:
    with connect(listed.name, timeout_seconds=300) as client:
        for attempt in (lambda: None, listed.spoil):
            attempt()
            began = time.monotonic()
            with pytest.raises(ConnectionFailed, match="no server is known from") as caught:
                count(client)
            assert time.monotonic() - began < 60
            assert listed.name in str(caught.value)
        listed.set(three[0].port)
        deadline = time.monotonic() + 60
        while True:
            try:
                assert count(client) == 5
                break
            except ConnectionFailed:
                assert time.monotonic() < deadline


def test_a_forked_child_and_a_pickled_copy_follow_it_too(listed, three, wait_until) -> None:
    first, second, _ = (server.port for server in three)
    listed.set(first)
    with Client(listed.name) as client, pickle.loads(pickle.dumps(client)) as copy:
        assert asked(copy, three) == [True, False, False]
        assert asked(client, three) == [True, False, False]
        assert in_child(lambda: count(client)) == "5"
        listed.set(second)
        wait_until(lambda: asked(copy, three) == [False, True, False])
        wait_until(lambda: asked(client, three) == [False, True, False])
        assert in_child(lambda: count(client)) == "5"
        assert copy.address == listed.name


# --- what only the one can be -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "can't be read: No such file or directory"),
        ("a pipe", "can't be read: Not a regular file"),
        ("# none\n", "no server is named"),
        ("a:1\nb:none\n", "port 'none' is not a number"),
        ("a:1, b:2\n", "'a:1, b:2' is no server"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, text, problem) -> None:
    path = tmp_path / "servers"
    if text == "a pipe":
        os.mkfifo(path)
    elif text is not None:
        path.write_text(text)
    listed = FileList(f"file:{path}", 9010)
    listed.refresh()
    assert problem in listed.problem
    path.unlink(missing_ok=True)
    path.write_text("a:1\nb\n")
    listed.refresh()
    assert listed.addresses == (Address("a", 1), Address("b", 9010))


def test_problems_of_a_server_set_are_told(zookeeper, connect) -> None:
    secret = ServerSet(zookeeper)
    acl = [make_digest_acl("a", "b", all=True)]
    secret.client.ensure_path(secret.path.rpartition("/")[0])
    secret.client.create(secret.path, b"", acl)
    for name, problem in (
        (secret.name, f"not everyone may read {secret.path}"),
        (f"{secret.name}/none", f"there is no {secret.path}/none"),
    ):
        with (
            connect(name, timeout_seconds=60) as client,
            pytest.raises(ConnectionFailed, match=problem),
        ):
            count(client)
    secret.end()


def test_while_zookeeper_is_away_a_first_call_takes_its_time(zookeeper, connect) -> None:
    zookeeper.stop()
    name = f"zk://{zookeeper.hosts}/set"
    problem = f"ZooKeeper at {zookeeper.hosts} does not answer"
    with (
        connect(name, timeout_seconds=0.5) as client,
        pytest.raises(ConnectionFailed, match=problem),
    ):
        count(client)


def test_what_is_known_is_used_while_zookeeper_is_away(
    zookeeper, three, connect, wait_until: WaitUntil
) -> None:
    listed = ServerSet(zookeeper)
    listed.set(three[0].port)
    with connect(listed.name) as client:
        assert asked(client, three) == [True, False, False]
        zookeeper.stop()
        assert asked(client, three) == [True, False, False]
        zookeeper.start()
        listed.end()
        again = ServerSet(zookeeper)
        again.path = listed.path
        again.set(three[1].port)
        wait_until(lambda: asked(client, three)[1])
        again.end()


@pytest.mark.parametrize(
    "name", ["zk://", "zk://a:1", "zk://a:1/", "zk:a:1/b", "zk:///b", "zk://a:b/c"]
)
def test_names_that_are_none(name) -> None:
    with pytest.raises(AddressInvalid, match="write zk://HOST:PORT,HOST:PORT/PATH"):
        Client(name)


def test_without_kazoo_an_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "pinlaterd.client.zookeeper", raising=False)
    monkeypatch.setitem(sys.modules, "kazoo.client", None)
    with pytest.raises(AddressInvalid, match=r"pip install pinlaterd\[zookeeper\]"):
        Client("zk://a:1/b")
    done = CliRunner().invoke(pinlater, ["get-queue-names", "--host", "zk://a:1/b"])
    assert "pip install pinlaterd[zookeeper]" in done.output


# --- a cluster ---------------------------------------------------------------------------------


@pytest.mark.service
def test_a_server_of_a_cluster_is_found_while_it_serves(
    zookeeper, tmp_path, wait_until: WaitUntil
) -> None:
    listed = ServerSet(zookeeper)
    server = Deployment(tmp_path / "d")
    server.init(
        shards={"1": {"server": "jobs-1"}},
        settings={"server_set_path": listed.path, "advertised_host": "127.0.0.1", **MOST_PATIENT},
    )
    named = {"name": new_cluster(), "server": "jobs-1", "zookeeper": zookeeper.hosts}
    ports = {"peer-port": unused_port(), "shard-ports": unused_port(), "peer-host": "127.0.0.1"}
    options = [f"--{key}={value}" for key, value in {**named, **ports}.items()]
    server.command("cluster", "init", str(server.folder), *options)

    def members() -> list[str]:
        return list(listed.client.get_children(listed.path))

    with server.running(), Client(listed.name) as client:
        wait_until(lambda: listed.client.exists(listed.path))
        wait_until(members)
        client.create_queue("mail")
        assert "mail" in client.queue_names()

        session = (server.folder / ZOOKEEPER_SESSION).read_bytes()
        seen = [members()]
        killed = server.kill("coordinator")

        def is_back() -> bool:
            seen.append(members())
            return server.pids().get("coordinator", killed) != killed and server.is_serving()

        wait_until(is_back)
        if (server.folder / ZOOKEEPER_SESSION).read_bytes() == session:  # it was in time
            assert all(members == seen[0] for members in seen)
        wait_until(members)

        server.admin("server", "maintenance", "jobs-1", "on")
        wait_until(lambda: not members())
        assert "mail" in client.queue_names()  # of the last server that was known
        server.admin("server", "maintenance", "jobs-1", "off")
        wait_until(members)
        server.down()
        assert not members()
    listed.end()


# --- the real service -------------------------------------------------------------------------


@pytest.mark.service
def test_workers_and_the_command_line_find_the_service(
    listed, service, client, queue, wait_until: WaitUntil
) -> None:
    listed.set(service.port)
    descriptors = client.enqueue(queue, [b"a", b"b"])
    worker_client = Client(listed.name)
    worker = Worker(worker_client, handlers_of(queue, lambda job: None), max_wait_ms=100)
    with worker_client, running(worker):
        wait_until(lambda: have_ended(client, descriptors), seconds=60)
    shown = Program("pinlater", "--host", listed.name)("get-queue-names")
    assert queue in shown.stdout
