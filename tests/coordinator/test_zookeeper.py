"""A coordinator's session with real ZooKeepers: members, leaders, writes, and what ends them."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError, NoNodeError
from kazoo.security import make_acl, make_digest_acl

from pinlaterd.client import zookeeper as watching
from pinlaterd.config.schema import ServerSettings
from pinlaterd.coordinator import cluster as cluster_module
from pinlaterd.coordinator import zookeeper as coordinators
from pinlaterd.coordinator.placement import Assigned, Assignment
from pinlaterd.coordinator.zookeeper import (
    Conflict,
    Node,
    NotConnected,
    Session,
    View,
    change_cluster,
    create_cluster,
    endpoint_of,
    read_cluster,
)
from pinlaterd.errors import DeploymentError
from pinlaterd.wire.curve import ClusterKey
from tests.client.conftest import black_hole
from tests.conftest import WaitUntil
from tests.servers.zookeeper import (
    Ensemble,
    ensemble,
    java_path,
    new_cluster,
    shared_ensemble,
    shared_zookeeper,
    zookeeper,
)

__all__ = ["black_hole", "ensemble", "shared_ensemble", "shared_zookeeper", "zookeeper"]

KEY = "pinlaterd:0123456789abcdef"
OTHER_KEY = "pinlaterd:fedcba9876543210"
NODES = {"config": b"settings", "format": b"1", "servers/a": b"{}"}
SESSION_SECONDS = 8.0


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen sessions, since a busy machine may be late by as much as a usual one lasts."""
    monkeypatch.setattr(coordinators, "SESSION_SECONDS", SESSION_SECONDS)
    monkeypatch.setattr(coordinators, "START_SECONDS", 60.0)


def described(server: str, **more: object) -> bytes:
    return json.dumps({"server": server, **more}).encode()


class Member:
    """A Session on an event loop of its own, in a thread."""

    def __init__(
        self, hosts: str, cluster: str, folder: Path, *, key: str = KEY, **options: Any
    ) -> None:
        self.state_file = folder / "session"
        self.views: list[View] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.session = self.do(self._make(hosts, cluster, key, options))

    async def _make(self, hosts: str, cluster: str, key: str, options: dict[str, Any]) -> Session:
        return Session(
            hosts, cluster, key, self.state_file, self.views.append, self.loop, **options
        )

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def start(self, data: bytes) -> None:
        """Returns once it is a member, or it is known why it can't be."""
        self.session.start(data)
        deadline = time.monotonic() + 60
        while not (self.view.own or self.view.problem):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def write(
        self, path: str, data: bytes | None, version: int | None, *, as_leader: bool = False
    ) -> int:
        return int(self.do(self.session.write(path, data, version, as_leader=as_leader)))

    @property
    def view(self) -> View:
        view: View = self.session.view
        return view

    def end(self) -> None:
        self.session.stop(leave=True)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


@pytest.fixture
def cluster(zookeeper: Ensemble) -> str:
    name = new_cluster()
    create_cluster(zookeeper.hosts, name, KEY, NODES)
    return name


@pytest.fixture
def new_member(tmp_path: Path) -> Iterator[Callable[..., Member]]:
    """Makes one; `at`: the ensemble. Its `server` has a folder, which another may take over."""
    made: list[Member] = []

    def make(at: Ensemble, cluster: str, server: str, **options: Any) -> Member:
        folder = tmp_path / server
        folder.mkdir(exist_ok=True)
        hosts = ",".join([*options.pop("hosts", ()), at.hosts])
        made.append(Member(hosts, cluster, folder, **options))
        return made[-1]

    yield make
    for member in made:
        member.end()


def names(view: View) -> list[str]:
    return [json.loads(data)["server"] for data in view.members.values()]


def held(nodes: Mapping[str, Node]) -> dict[str, tuple[bytes, int]]:
    return {name: node[:2] for name, node in nodes.items()}


def expire(at: Ensemble, member: Member) -> None:
    """End its session, as ZooKeeper does when it has not heard of it."""
    client = KazooClient(at.hosts, client_id=member.session._session)
    client.start()
    client.stop()
    client.close()


# --- the session as it should be --------------------------------------------------------------


def test_members_see_each_other_and_the_oldest_leads(
    zookeeper, cluster, new_member, wait_until: WaitUntil
) -> None:
    first, second = (new_member(zookeeper, cluster, server) for server in "ab")
    first.start(described("a"))
    second.start(described("b"))
    wait_until(lambda: len(first.view.members) == len(second.view.members) == 2)
    assert names(first.view) == names(second.view) == ["a", "b"]
    assert first.view.leads
    assert not second.view.leads
    assert held(first.view.nodes)["config"] == (b"settings", 0)
    assert held(first.view.servers) == {"a": (b"{}", 0)}
    assert first.session.negotiated_seconds == SESSION_SECONDS

    first.session.stop(leave=True)  # else its session would end later
    assert names(read_cluster(zookeeper.hosts, cluster, KEY)) == ["b"]
    wait_until(lambda: second.view.leads)
    assert names(second.view) == ["b"]


def test_what_a_member_says_of_itself_follows(
    zookeeper, cluster, new_member, wait_until: WaitUntil
) -> None:
    first, second = (new_member(zookeeper, cluster, server) for server in "ab")
    first.start(described("a"))
    second.start(described("b"))
    first.session.describe(described("a", shards={"1": "serving"}))
    wait_until(lambda: all('"shards"' in str(m.views[-1].members) for m in (first, second)))
    before = len(first.views)
    first.session.poke()
    first.session.describe(described("a", shards={"1": "serving"}))  # nothing new
    first.write("assignment", b"1", None)
    wait_until(lambda: "assignment" in first.views[-1].nodes)
    assert len(first.views) == before + 1


def test_the_key_alone_opens_it(zookeeper, cluster, new_member) -> None:
    member = new_member(zookeeper, cluster, "a")
    member.start(described("a"))
    stranger = KazooClient(zookeeper.hosts)
    stranger.start()
    try:
        root = f"/pinlaterd/{cluster}"
        for path in ("", "/config", "/members", f"/members/{member.view.own}", "/servers/a"):
            with pytest.raises(NoAuthError):
                stranger.get(root + path)
        with pytest.raises(NoAuthError):
            stranger.create(f"{root}/members/m-", b"", ephemeral=True, sequence=True)
        with pytest.raises(NoAuthError):
            stranger.delete(f"{root}/config")
    finally:
        stranger.stop()
    assert stat.S_IMODE(member.state_file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("key", "exists", "problem"),
    [
        (OTHER_KEY, True, "was made with another key than etc/cluster.key"),
        (KEY, False, "has no cluster .*; make it with `pinlaterd cluster init`"),
    ],
)
def test_start_says_why_it_cannot(zookeeper, cluster, new_member, key, exists, problem) -> None:
    member = new_member(zookeeper, cluster if exists else "none", "a", key=key)
    member.start(described("a"))
    assert re.search(problem, member.view.problem)
    assert not member.view.connected
    assert not member.view.nodes


def test_a_release_that_can_not_read_the_nodes_is_no_member(
    zookeeper, new_member, wait_until: WaitUntil
) -> None:
    create_cluster(zookeeper.hosts, "next", KEY, {**NODES, "format": b"2"})
    member = new_member(zookeeper, "next", "a")
    member.start(described("a"))
    assert "format that release" in member.view.problem
    assert not member.view.members

    change_cluster(zookeeper.hosts, "next", KEY, "format", b"1", 0)
    wait_until(lambda: member.view.own and not member.view.problem)


def test_a_second_server_of_one_name_is_refused(
    zookeeper, cluster, new_member, wait_until: WaitUntil
) -> None:
    first = new_member(zookeeper, cluster, "a")
    first.start(described("a"))
    second = new_member(zookeeper, cluster, "other")
    second.start(described("a"))
    assert re.search("another server of cluster .* is called a, too", second.view.problem)
    assert list(first.view.members) == [first.view.own]

    first.session.stop(leave=True)
    wait_until(lambda: second.view.own)
    assert not second.view.problem


def test_the_time_out_that_zookeeper_grants_is_known(
    new_member, program_path, tmp_path, wait_until: WaitUntil
) -> None:
    slow = Ensemble(java_path(program_path), tmp_path / "z", 1, "minSessionTimeout=12000")
    try:
        slow.start()
        create_cluster(slow.hosts, "slow", KEY, NODES)
        member = new_member(slow, "slow", "a")
        member.start(described("a"))
        assert member.session.negotiated_seconds == 12.0
        member.end()
    finally:
        slow.stop()


# --- writes -----------------------------------------------------------------------------------


def test_writes_are_by_version(zookeeper, cluster, new_member, wait_until: WaitUntil) -> None:
    member = new_member(zookeeper, cluster, "a")
    member.start(described("a"))
    assert member.write("assignment", b"1", None) == 0
    assert member.write("assignment", b"2", 0) == 1
    with pytest.raises(Conflict):
        member.write("assignment", b"3", 0)
    with pytest.raises(Conflict):
        member.write("assignment", b"3", None)
    with pytest.raises(Conflict):
        member.write("servers/none", b"3", 0)
    wait_until(lambda: held(member.view.nodes).get("assignment") == (b"2", 1))
    member.write("servers/b", b"new", None)
    member.write("servers/a", None, 0)
    wait_until(lambda: held(member.view.servers) == {"b": (b"new", 0)})


def test_only_the_leader_writes_as_such(zookeeper, cluster, new_member) -> None:
    first, second = (new_member(zookeeper, cluster, server) for server in "ab")
    first.start(described("a"))
    second.start(described("b"))
    first.write("assignment", b"1", None, as_leader=True)
    with pytest.raises(Conflict, match="does not lead"):
        second.write("assignment", b"2", 0, as_leader=True)


def test_a_deposed_leader_s_write_fails(
    zookeeper, cluster, new_member, wait_until: WaitUntil, monkeypatch
) -> None:
    """Its node is gone, and it has not looked since; the version would still do."""
    first, second = (new_member(zookeeper, cluster, server) for server in "ab")
    first.start(described("a"))
    second.start(described("b"))
    first.write("assignment", b"1", None, as_leader=True)
    wait_until(lambda: "assignment" in first.view.nodes)
    own = f"/pinlaterd/{cluster}/members/{first.view.own}"

    def after_its_end(client: KazooClient, *arguments: Any) -> int:
        client.delete(own)
        return write(client, *arguments)

    write = coordinators._write
    monkeypatch.setattr(coordinators, "_write", after_its_end)
    with pytest.raises(Conflict, match="NoNode"):
        first.write("assignment", b"2", 0, as_leader=True)
    monkeypatch.undo()
    wait_until(lambda: second.view.leads)
    assert held(second.view.nodes)["assignment"] == (b"1", 0)
    assert second.write("assignment", b"3", 0, as_leader=True) == 1


# --- sessions that end, and that don't --------------------------------------------------------

COORDINATOR = """
import asyncio, sys
from pathlib import Path
from pinlaterd.coordinator import zookeeper
from pinlaterd.coordinator.zookeeper import Session

zookeeper.SESSION_SECONDS = 15.0  # longer than a busy machine takes to start the next one

async def main(hosts, cluster, digest, state_file, data):
    def tell(view):
        if view.own:
            print(view.own, flush=True)
    loop = asyncio.get_running_loop()
    session = Session(hosts, cluster, digest, Path(state_file), tell, loop)
    session.start(data.encode())
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_killed_coordinator_takes_its_session_up_again(
    zookeeper, cluster, new_member, tmp_path, wait_until: WaitUntil
) -> None:
    observer = new_member(zookeeper, cluster, "observer")
    observer.start(described("observer"))
    state_file = tmp_path / "state"
    first = described("a", shards={"1": {"state": "serving", "epoch": 7}})
    owned = []
    for data in (first, described("a"), described("a")):
        arguments = [zookeeper.hosts, cluster, KEY, str(state_file), data.decode()]
        process = subprocess.Popen(
            [sys.executable, "-c", COORDINATOR, *arguments], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            owned.append(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert owned[0].startswith("m-")
    assert len(set(owned)) == 1
    # What it said of its processes holds until one that comes after knows them.
    wait_until(lambda: observer.view.members.get(owned[0].strip()) == first)
    wait_until(lambda: names(observer.view) == ["observer"])  # nobody came back
    wait_until(lambda: len(observer.views) >= 2)
    assert max(len(view.members) for view in observer.views) == 2
    assert [len(view.members) for view in observer.views][-2:] == [2, 1]  # never away meanwhile


def test_a_session_of_another_machine_is_not_taken_up(
    zookeeper, cluster, new_member, tmp_path
) -> None:
    first = new_member(zookeeper, cluster, "a")
    first.start(described("a"))
    copied = json.loads(first.state_file.read_bytes()) | {"place": "elsewhere"}
    (tmp_path / "b").mkdir()
    (tmp_path / "b/session").write_text(json.dumps(copied))
    second = new_member(zookeeper, cluster, "b")
    second.start(described("b"))
    assert names(second.view) == ["a", "b"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"place": 1, "id": []}'])
def test_a_state_file_that_says_nothing(zookeeper, cluster, new_member, tmp_path, content) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/session").write_bytes(content)
    member = new_member(zookeeper, cluster, "a")
    member.start(described("a"))
    assert member.view.own


def test_a_lost_session_is_followed_by_a_new_one(
    zookeeper, cluster, new_member, wait_until: WaitUntil
) -> None:
    first, second = (new_member(zookeeper, cluster, server) for server in "ab")
    first.start(described("a"))
    second.start(described("b"))
    first.session.describe(described("a", new=True))
    before, kept = first.view.own, first.state_file.read_bytes()
    expire(zookeeper, first)
    wait_until(lambda: first.view.own not in {"", before})
    wait_until(lambda: names(second.view) == ["b", "a"])
    assert second.view.leads
    assert json.loads(second.view.members[first.view.own]) == {"server": "a", "new": True}
    assert first.state_file.read_bytes() != kept


def test_the_node_of_an_old_session_is_not_taken_for_ours(
    zookeeper, cluster, new_member, tmp_path, wait_until: WaitUntil
) -> None:
    """It has our name and lives on for a while; nobody is behind it."""
    gone = KazooClient(zookeeper.hosts, timeout=4, auth_data=[("digest", KEY)])
    gone.start()
    old = gone.create(
        f"/pinlaterd/{cluster}/members/m-", described("a"), ephemeral=True, sequence=True
    )
    member = new_member(zookeeper, cluster, "a")
    member.session.start(described("a"))
    wait_until(lambda: member.view.connected)
    assert not member.view.own
    gone.stop()
    wait_until(lambda: member.view.own)
    assert member.view.own != old.rpartition("/")[2]
    assert names(member.view) == ["a"]


# --- the server set ---------------------------------------------------------------------------


@pytest.fixture
def anyone(zookeeper: Ensemble) -> Iterator[KazooClient]:
    """A client without any key."""
    client = KazooClient(zookeeper.hosts)
    client.start()
    yield client
    client.stop()
    client.close()


def announced(client: KazooClient, path: str) -> list[tuple[str, dict[str, Any]]]:
    if client.exists(path) is None:
        return []
    names = sorted(client.get_children(path))
    try:
        return [(name, json.loads(client.get(f"{path}/{name}")[0])) for name in names]
    except NoNodeError:  # one went meanwhile
        return announced(client, path)


def test_a_server_that_serves_is_in_the_server_set(
    zookeeper, cluster, new_member, anyone, wait_until: WaitUntil
) -> None:
    path = f"/discovery/{cluster}/prod"
    first, second = (new_member(zookeeper, cluster, name, server_set=path) for name in "ab")
    first.start(described("a"))
    second.start(described("b"))
    assert announced(anyone, path) == []
    first.session.announce(endpoint_of("jobs-1", 9010, 9999))
    second.session.announce(endpoint_of("jobs-2", 9010))
    wait_until(lambda: len(announced(anyone, path)) == 2)
    found = announced(anyone, path)
    assert all(re.fullmatch("member_[0-9]{10}", name) for name, _ in found)
    assert next(data for _, data in found if data["serviceEndpoint"]["host"] == "jobs-1") == {
        "serviceEndpoint": {"host": "jobs-1", "port": 9010},
        "additionalEndpoints": {"stats": {"host": "jobs-1", "port": 9999}},
        "status": "ALIVE",
        "shard": 0,
    }
    with pytest.raises(NoAuthError):
        anyone.create(f"{path}/member_", b"", ephemeral=True, sequence=True)
    with pytest.raises(NoAuthError):
        anyone.delete(f"{path}/{found[0][0]}")
    anyone.create(f"/discovery/{cluster}/beside", b"")  # another's set

    first.session.announce(None)
    wait_until(lambda: len(announced(anyone, path)) == 1)
    second.session.announce(endpoint_of("jobs-2", 9011))
    wait_until(lambda: [d["serviceEndpoint"]["port"] for _, d in announced(anyone, path)] == [9011])
    before = announced(anyone, path)
    expire(zookeeper, second)
    wait_until(lambda: announced(anyone, path) not in ([], before))
    assert [data for _, data in announced(anyone, path)] == [data for _, data in before]
    second.session.stop(leave=True)
    wait_until(lambda: announced(anyone, path) == [])


def test_a_server_set_of_others(
    zookeeper, cluster, new_member, anyone, wait_until: WaitUntil
) -> None:
    """One that all may use is used; of one that they may not, the cluster does not suffer."""
    anyone.ensure_path(f"/{cluster}/open")
    theirs = make_digest_acl("they", "secret", all=True)
    anyone.create(f"/{cluster}/closed", b"", [theirs, make_acl("world", "anyone", read=True)])
    welcome = new_member(zookeeper, cluster, "a", server_set=f"/{cluster}/open")
    refused = new_member(zookeeper, cluster, "b", server_set=f"/{cluster}/closed")
    for member, server in ((welcome, "a"), (refused, "b")):
        member.start(described(server))
        member.session.announce(endpoint_of(server, 9010))
    wait_until(lambda: len(announced(anyone, f"/{cluster}/open")) == 1)
    wait_until(lambda: "belongs to others" in refused.session.server_set_problem)
    assert not welcome.session.server_set_problem
    refused.write("assignment", b"1", None)
    wait_until(lambda: refused.view.nodes.get("assignment"))


# --- watches ----------------------------------------------------------------------------------


def test_a_missed_watch_is_made_up_for(
    zookeeper, cluster, new_member, wait_until: WaitUntil, monkeypatch
) -> None:
    deaf = new_member(zookeeper, cluster, "a", reread_seconds=1.0)
    monkeypatch.setattr(deaf.session, "poke", lambda event=None: None)
    deaf.start(described("a"))
    change_cluster(zookeeper.hosts, cluster, KEY, "config", b"new", 0)
    wait_until(lambda: held(deaf.view.nodes)["config"] == (b"new", 1))


# --- ZooKeepers that fail ---------------------------------------------------------------------


@pytest.fixture
def members(ensemble, new_member) -> list[Member]:
    name = new_cluster()
    create_cluster(ensemble.hosts, name, KEY, NODES)
    made = [new_member(ensemble, name, server) for server in "abc"]
    for member, server in zip(made, "abc", strict=True):
        member.start(described(server))
    return made


def agree(members: list[Member]) -> bool:
    """All see all, in one order, and each has a node that the others see."""
    views = [member.view for member in members]
    return (
        all(view.connected for view in views)
        and len({tuple(view.members) for view in views}) == 1
        and {view.own for view in views} == set(views[0].members)
    )


@pytest.mark.parametrize("fault", ["freeze", "kill"])
@pytest.mark.parametrize("role", ["leader", "follower"])
def test_one_zookeeper_of_three_fails(ensemble, members, wait_until, fault, role) -> None:
    victim = ensemble.leader() if role == "leader" else ensemble.followers()[0]
    before = members[0].view.nodes["config"].version
    writer = next(member for member in members if member.view.leads)
    getattr(victim, fault)()
    deadline = time.monotonic() + 60
    while True:
        try:
            writer.write("config", b"during", before)
            break
        except NotConnected:
            assert time.monotonic() < deadline
        except Conflict:  # one before was carried out, or another leads
            break
    wait_until(lambda: agree(members))
    wait_until(lambda: all(m.view.nodes["config"].data == b"during" for m in members))
    ensemble.start()
    wait_until(lambda: agree(members))


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_a_majority_fails_and_returns(ensemble, members, wait_until: WaitUntil, fault) -> None:
    """Nothing is known, so nothing changes, however long that lasts; no session ends by it."""
    own = [member.view.own for member in members]
    nodes = members[0].view.nodes
    for victim in ensemble.followers():
        getattr(victim, fault)()
    wait_until(lambda: not any(member.view.connected for member in members))
    with pytest.raises(NotConnected):
        members[0].write("config", b"new", 0)
    assert [member.view.own for member in members] == own
    assert members[0].view.nodes == nodes
    began = time.monotonic()
    ensemble.start()
    wait_until(lambda: agree(members))
    if time.monotonic() - began < members[0].session.negotiated_seconds:
        assert [member.view.own for member in members] == own

    def writes_again() -> bool:
        try:
            members[0].write("config", b"newer", members[0].view.nodes["config"].version)
        except (Conflict, NotConnected):  # what was not answered may have been carried out since
            return False
        return True

    wait_until(writes_again)


def test_a_new_client_when_zookeeper_was_away_for_long(
    zookeeper, cluster, new_member, wait_until: WaitUntil, monkeypatch
) -> None:
    """ZooKeeper returns without its data: it would refuse a client that has seen more."""
    monkeypatch.setattr(watching, "_GIVE_UP_SECONDS", 2.0)
    member = new_member(zookeeper, cluster, "a")
    member.start(described("a"))
    for number in range(20):  # so that what was seen is beyond what there will be
        member.write("config", b"x", number)
    wait_until(lambda: held(member.view.nodes)["config"] == (b"x", 20))
    created_ms = member.view.nodes["config"].created_ms
    client = member.session._client
    zookeeper.stop()
    zookeeper.servers[0].lose_data()
    zookeeper.start()
    wait_until(lambda: "has no cluster" in member.view.problem)
    assert member.session._client is not client
    assert member.view.nodes["config"].data == b"x"  # still what it was
    create_cluster(zookeeper.hosts, cluster, KEY, {**NODES, "config": b"restored"})
    wait_until(lambda: member.view.own and not member.view.problem)
    assert held(member.view.nodes)["config"] == (b"restored", 0)
    assert member.view.nodes["config"].created_ms > created_ms


def test_the_log_tells_once_that_zookeeper_is_away(
    zookeeper, cluster, new_member, wait_until: WaitUntil, caplog
) -> None:
    member = new_member(zookeeper, cluster, "a")
    member.start(described("a"))
    zookeeper.stop()
    wait_until(lambda: not member.view.connected)
    zookeeper.start()
    wait_until(lambda: member.view.connected)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text for text in told if "ZooKeeper" in text] == [
        f"ZooKeeper at {zookeeper.hosts} is out of reach"
    ]
    assert KEY not in caplog.text


def test_a_member_that_starts_while_zookeeper_is_away(
    zookeeper, cluster, new_member, wait_until: WaitUntil
) -> None:
    zookeeper.stop()
    member = new_member(zookeeper, cluster, "a")
    member.session.start(described("a"))
    with pytest.raises(NotConnected):
        member.write("config", b"new", 0)
    assert member.view == View()
    zookeeper.start()
    wait_until(lambda: member.view.own)


def test_nothing_imports_kazoo_on_a_single_machine() -> None:
    check = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(f'pinlaterd.{name}')\n"
        "assert 'kazoo' not in sys.modules"
    )
    processes = ("cli.pinlaterd", "cli.admin", "cli.pinlater", "client", "deployment.service")
    mains = ("coordinator.main", "router.main", "shard.process")
    subprocess.run([sys.executable, "-c", check, *processes, *mains], check=True)


class NoSession:
    """A Cluster's, which says nothing."""

    server_set_problem = ""
    negotiated_seconds = 4.0

    def __init__(self, *_: object, **__: object) -> None: ...


def test_an_assignment_that_is_made_again_after_a_loss_is_followed(monkeypatch, clock) -> None:
    """Its version is smaller than that of the one before; else a smaller one is an old one."""
    monkeypatch.setattr(cluster_module, "Session", NoSession)
    monkeypatch.setattr(ClusterKey, "load", lambda *_: ClusterKey(b"k" * 32, "c"))

    async def follow() -> list[str]:
        follower = cluster_module.Cluster(ServerSettings(server="a"), None, clock, print)
        followed = []
        for server, version, created_ms in (("a", 5, 1), ("b", 4, 1), ("c", 0, 2), ("b", 6, 2)):
            data = msgspec.json.encode(Assignment({"1": Assigned(server, 1, "tcp://h:1", 0)}))
            follower.follow(View(nodes={"assignment": Node(data, version, created_ms)}))
            followed.append(follower.assigned["1"].server)
        return followed

    assert asyncio.run(follow()) == ["a", "a", "c", "b"]


def test_hosts_that_are_off_cost_half_a_second_each(
    zookeeper, cluster, new_member, black_hole
) -> None:
    """kazoo itself waits for the session's time-out for each."""
    for server in "ab":
        member = new_member(zookeeper, cluster, server, hosts=[black_hole] * 8)
        began = time.monotonic()
        member.start(described(server))
        assert time.monotonic() - began < 20


def test_attempts_to_connect_are_never_far_apart(
    zookeeper, cluster, new_member, wait_until: WaitUntil
) -> None:
    """Else, after an outage, all sessions would end before they are taken up again."""
    member = new_member(zookeeper, cluster, "a")
    member.start(described("a"))
    attempts: list[float] = []
    connect = member.session._handler.create_connection

    def counted(*arguments: Any, **options: Any) -> Any:
        attempts.append(time.monotonic())
        return connect(*arguments, **options)

    member.session._handler.create_connection = counted
    zookeeper.stop()
    wait_until(lambda: len(attempts) >= 8)
    pauses = [late - early for early, late in itertools.pairwise(attempts)]
    assert pauses[-1] < 10  # kazoo itself: 13 s


# --- commands ---------------------------------------------------------------------------------


def test_commands_make_read_and_change_a_cluster(zookeeper) -> None:
    hosts, name = zookeeper.hosts, new_cluster()
    with pytest.raises(DeploymentError, match="has no cluster"):
        read_cluster(hosts, name, KEY)
    create_cluster(hosts, name, KEY, NODES)
    with pytest.raises(Conflict):
        create_cluster(hosts, name, KEY, NODES)
    with pytest.raises(DeploymentError, match="another key"):
        read_cluster(hosts, name, OTHER_KEY)
    create_cluster(hosts, f"{name}2", OTHER_KEY, {})  # beside it
    assert change_cluster(hosts, name, KEY, "servers/b", b"{}", None) == 0
    change_cluster(hosts, name, KEY, "servers/a", None, None)
    with pytest.raises(Conflict):
        change_cluster(hosts, name, KEY, "config", b"", 5)
    with pytest.raises(DeploymentError, match="another key"):
        change_cluster(hosts, name, OTHER_KEY, "config", b"", 0)
    view = read_cluster(hosts, name, KEY)
    assert held(view.servers) == {"b": (b"{}", 0)}
    assert held(view.nodes) == {"config": (b"settings", 0), "format": (b"1", 0)}
    assert not view.members


def test_a_name_that_was_taken_in_advance_has_a_cure(zookeeper, anyone, monkeypatch) -> None:
    name, hosts = new_cluster(), zookeeper.hosts
    theirs = [make_digest_acl("they", "secret", all=True)]
    anyone.create(f"/pinlaterd/{name}")
    anyone.create(f"/pinlaterd/{name}/members", b"", theirs)
    with pytest.raises(Conflict):
        create_cluster(hosts, name, KEY, NODES)
    with pytest.raises(DeploymentError, match=f"another name, or .* delete /pinlaterd/{name}"):
        read_cluster(hosts, name, KEY)
    monkeypatch.setattr("pinlaterd.coordinator.zookeeper._ROOT", f"/{name}")
    anyone.create(f"/{name}", b"", theirs)
    with pytest.raises(DeploymentError, match=f": /{name} belongs to others; have .* delete that"):
        create_cluster(hosts, name, KEY, NODES)


def test_commands_say_that_zookeeper_is_away(zookeeper, monkeypatch) -> None:
    monkeypatch.setattr("pinlaterd.coordinator.zookeeper.START_SECONDS", 0.5)
    zookeeper.stop()
    with pytest.raises(DeploymentError, match=r"ZooKeeper at .* does not answer"):
        read_cluster(zookeeper.hosts, "any", KEY)
