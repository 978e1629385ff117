"""`pinlaterd cluster …` and `pinlater-admin server …`, on a ZooKeeper."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pinlaterd.config.load import load_config
from pinlaterd.coordinator.placement import Member
from pinlaterd.coordinator.shared_config import SharedFiles, unpack
from pinlaterd.coordinator.zookeeper import change_cluster, read_cluster
from pinlaterd.wire.curve import ClusterKey
from tests.cli.program import Program
from tests.servers.zookeeper import new_cluster, shared_zookeeper, zookeeper

__all__ = ["shared_zookeeper", "zookeeper"]

SHARDS = "shards:\n  1: {engine: redis, master: {host: h, port: 1}}\n"


class Site:
    """Deployments of a cluster, which don't run."""

    def __init__(self, folder: Path, hosts: str) -> None:
        self.folder = folder
        self.hosts = hosts
        self.cluster = new_cluster()
        self.run = Program("pinlaterd")

    def options(self, named: str, **changed: str) -> list[str]:
        given = {"name": self.cluster, "server": named, "zookeeper": self.hosts, **changed}
        given = {"peer-host": "127.0.0.1", "http-port": "0", "web-port": "0", **given}
        return [text for key, value in given.items() for text in (f"--{key}", value)]

    def deployment(self, name: str, shards: str = SHARDS) -> Path:
        made = self.folder / name
        assert self.run("init", made).returncode == 0
        (made / "etc" / "shards.yaml").write_text(shards)
        return made

    def init(self, name: str = "jobs-1", *more: str) -> Path:
        made = self.deployment(name)
        done = self.run("cluster", "init", made, *self.options(name), *more)
        assert done.returncode == 0, done.stderr
        return made

    def join(self, named: str, first: Path, **changed: str):
        key = first / "etc" / "cluster.key"
        options = self.options(named, **changed)
        return self.run("cluster", "join", self.folder / named, "--key", key, *options)

    def admin(self, folder: Path, *arguments: str):
        return Program("admin")("server", *arguments, "--dir", folder)

    def digest(self, folder: Path) -> str:
        return ClusterKey.load(folder / "etc" / "cluster.key", self.cluster).digest

    def view(self, folder: Path):
        return read_cluster(self.hosts, self.cluster, self.digest(folder))

    def change(self, folder: Path, path: str, data: bytes | None, version: int | None = None):
        change_cluster(self.hosts, self.cluster, self.digest(folder), path, data, version)

    def live(self, folder: Path, server: str) -> None:
        """As if a coordinator of it ran."""
        member = Member(server, "h", "h:9012", 9100, "h:9010", "1")
        self.change(folder, "members/m-0000000001", json.dumps(_facts(member)).encode())


def _facts(member: Member) -> dict[str, object]:
    return {name: getattr(member, name) for name in ("server", "host", "peer")} | {
        "shard_ports": 9100,
        "thrift": "h:9010",
        "version": "1",
    }


@pytest.fixture
def site(tmp_path, zookeeper):
    return Site(tmp_path, zookeeper.hosts)


def files(folder):
    return {path.name: path.read_text() for path in (folder / "etc").iterdir()}


def test_the_first_server_of_a_cluster(site):
    first = site.init("jobs-1", "--port", "9020")

    server = load_config(first / "etc").server
    assert (server.cluster, server.server) == (site.cluster, "jobs-1")
    assert (server.zookeeper, server.peer_host, server.port) == (site.hosts, "127.0.0.1", 9020)
    assert (first / "etc" / "cluster.key").stat().st_mode & 0o777 == 0o600
    view = site.view(first)
    assert set(view.servers) == {"jobs-1"}
    shared = unpack(view.nodes["config"].data)
    assert (shared.number, shared.by) == (1, "jobs-1")
    assert shared.files["shards.yaml"] == SHARDS
    shared_names = {"pinlaterd", "shards", "queues", "users", "job_types"}
    assert set(shared.files) == {f"{name}.yaml" for name in shared_names}


def test_a_file_that_is_no_utf_8_is_named(site):
    alone = site.deployment("alone")
    (alone / "etc" / "local.yaml").write_bytes(b"port: \xff\n")

    done = site.run("cluster", "init", alone, *site.options("jobs-1"))

    assert done.returncode == 1
    assert "local.yaml is not valid UTF-8; save it as UTF-8" in done.stderr


def test_what_can_not_be_one_is_left_as_it_was(site):
    alone = site.deployment("alone", "shards: {1: {}}")
    (alone / "etc" / "local.yaml").write_text("port: 9020\n")
    before = files(alone)

    done = site.run("cluster", "init", alone, *site.options("jobs-1"))

    assert done.returncode == 1
    assert "shards.1.server: missing; its file is on one server: name that" in done.stderr
    assert files(alone) == before

    (alone / "etc" / "shards.yaml").write_text("shards: {1: {server: jobs-1}}")
    done = site.run("cluster", "init", alone, *site.options("jobs-1"))
    assert done.returncode == 0, done.stderr
    assert load_config(alone / "etc").server.port == 9020


def test_a_second_cluster_of_a_name_is_refused(site):
    site.init("jobs-1")
    other = site.deployment("other")
    before = files(other)

    done = site.run("cluster", "init", other, *site.options("jobs-2"))

    assert done.returncode == 1
    assert f"has a cluster {site.cluster} already; `pinlaterd cluster join`" in done.stderr
    assert files(other) == before


def test_options_that_are_missing(site):
    made = site.deployment("d")

    assert (
        "missing --name, --zookeeper" in site.run("cluster", "init", made, "--server", "a").stderr
    )
    done = site.run("cluster", "init", made, "--restore", "--server", "a")
    assert "--restore takes no other options" in done.stderr
    done = site.run("cluster", "init", made, *site.options("jobs-1")[2:])
    assert "this machine's address is not known; give --peer-host" in done.stderr
    assert done.returncode == 2


def test_further_servers_get_what_all_have_in_common(site):
    first = site.init()

    done = site.join("jobs-2", first)

    assert done.returncode == 0, done.stderr
    second = site.folder / "jobs-2"
    assert f"`pinlaterd up {second}`" in done.stdout
    mine, theirs = files(first), files(second)
    assert mine.pop("local.yaml") != theirs.pop("local.yaml")
    assert mine == theirs
    config = load_config(second / "etc")
    assert config.server.server == "jobs-2"
    assert set(site.view(first).servers) == {"jobs-1", "jobs-2"}
    assert {path.stat().st_mode & 0o777 for path in (second / "etc").iterdir()} == {0o600}


def test_who_can_not_join(site, tmp_path):
    first = site.init()

    again = site.join("jobs-1", first)
    assert "jobs-1/etc/pinlaterd.yaml" in again.stderr
    assert "there already; choose a new folder" in again.stderr

    taken = site.join("jobs-2", first, server="jobs-1")
    assert f"cluster {site.cluster} has a server jobs-1 already; choose another" in taken.stderr
    unknown = site.join("jobs-2", first, name="elsewhere")
    assert "has no cluster elsewhere" in unknown.stderr
    ClusterKey.generate(tmp_path / "other.key")
    options = site.options("jobs-2")
    wrong = site.run(
        "cluster", "join", tmp_path / "jobs-2", "--key", tmp_path / "other.key", *options
    )
    assert "was made with another key" in wrong.stderr
    broken = site.join("jobs-2", first, **{"peer-port": "9010"})
    assert "9010 is the port, too" in broken.stderr

    assert {done.returncode for done in (again, taken, unknown, wrong, broken)} == {1}
    left = [path.name for path in (tmp_path / "jobs-2").rglob("*") if path.is_file()]
    assert [name for name in left if name != "command.lock"] == []
    assert set(site.view(first).servers) == {"jobs-1"}


def test_a_server_leaves_and_joins_again(site):
    first = site.init()
    assert site.join("jobs-2", first).returncode == 0
    second = site.folder / "jobs-2"

    done = site.run("cluster", "leave", second)

    assert done.returncode == 0, done.stderr
    assert set(site.view(first).servers) == {"jobs-1"}
    up = site.run("up", second)
    assert up.returncode == 1
    assert "etc/cluster.key is missing" in up.stderr

    changed = SHARDS + "  2: {engine: redis, master: {host: h, port: 2}}\n"
    shared = SharedFiles(2, {"shards.yaml": changed}, "jobs-1")
    site.change(first, "config", shared.pack(), site.view(first).nodes["config"].version)
    again = site.join("jobs-2", first)

    assert again.returncode == 0, again.stderr
    assert (second / "etc" / "shards.yaml").read_text() == changed
    assert not (second / "etc" / "cluster.key.left").exists()
    [kept] = (second / "etc").glob("shards.yaml.yours-*")
    assert kept.read_text() == SHARDS


def test_a_server_that_shards_need_does_not_leave(site):
    first = site.init()
    pinned = SharedFiles(2, {"shards.yaml": "shards: {1: {server: jobs-1}}"}, "jobs-1")
    site.change(first, "config", pinned.pack(), 0)

    done = site.run("cluster", "leave", first)

    assert done.returncode == 1
    assert "shards 1 are of server jobs-1 only; remove them, or change `server`" in done.stderr
    assert (first / "etc" / "cluster.key").exists()


def test_a_server_that_is_alive_does_not_leave_and_is_not_removed(site):
    first = site.init()
    site.live(first, "jobs-1")

    for done in (
        site.run("cluster", "leave", first),
        site.admin(first, "remove", "jobs-1", "--yes"),
    ):
        assert done.returncode == 1
        assert "server jobs-1 is alive; `pinlaterd down` there first" in done.stderr


def test_a_deployment_of_its_own_has_no_cluster_to_leave(site):
    done = site.run("cluster", "leave", site.deployment("alone"))

    assert done.returncode == 1
    assert "belongs to no cluster; `pinlaterd cluster init` makes one" in done.stderr


def test_a_zookeeper_that_lost_its_data_is_filled_again(site):
    first = site.init()
    done = site.run("cluster", "init", first, "--restore")
    assert done.returncode == 1
    assert "already" in done.stderr

    lost = new_cluster()  # what it would look like: this cluster's nodes are not there
    local = first / "etc" / "local.yaml"
    local.write_text(local.read_text().replace(f'"{site.cluster}"', f'"{lost}"'))
    done = site.run("cluster", "init", first, "--restore")

    assert done.returncode == 0, done.stderr
    site.cluster = lost
    shared = unpack(site.view(first).nodes["config"].data)
    assert shared.number > 1_000_000, "above all that any server may have seen"
    assert shared.files["shards.yaml"] == SHARDS


def test_maintenance(site, wait_until):
    first = site.init()
    assert site.join("jobs-2", first).returncode == 0

    done = site.admin(first, "maintenance", "jobs-2", "on", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "server": "jobs-2",
        "maintenance": True,
        "shards_to_leave": [],
    }
    assert json.loads(site.view(first).servers["jobs-2"].data) == {"maintenance": True}

    assigned = {"shards": {"1": {"server": "jobs-2", "epoch": 1, "endpoint": "", "slot": 0}}}
    site.change(first, "assignment", json.dumps(assigned).encode())
    done = site.admin(first, "maintenance", "jobs-2", "on")
    assert "maintenance is on, and still owns shards 1" in done.stdout

    assert (
        "--wait goes with on" in site.admin(first, "maintenance", "jobs-2", "off", "--wait").stderr
    )
    with ThreadPoolExecutor() as pool:
        before = site.view(first).servers["jobs-2"].version
        run = pool.submit(site.admin, first, "maintenance", "jobs-2", "on", "--wait")
        wait_until(lambda: site.view(first).servers["jobs-2"].version > before)
        assert not run.done()
        assigned["shards"]["1"]["server"] = "jobs-1"
        version = site.view(first).nodes["assignment"].version
        site.change(first, "assignment", json.dumps(assigned).encode(), version)
        done = run.result()
    assert done.returncode == 0, done.stderr
    assert "server jobs-2: maintenance is on\n" in done.stdout

    assert site.admin(first, "maintenance", "jobs-2", "off").returncode == 0
    assert json.loads(site.view(first).servers["jobs-2"].data) == {}


def test_a_server_that_is_gone_is_removed(site):
    first = site.init()
    assert site.join("jobs-2", first).returncode == 0

    done = site.admin(first, "remove", "jobs-2", "--yes")
    assert done.returncode == 0, done.stderr
    assert set(site.view(first).servers) == {"jobs-1"}

    again = site.admin(first, "remove", "jobs-2", "--yes")
    assert again.returncode == 1
    assert "there is no server jobs-2; there are: jobs-1" in again.stderr


def test_without_zookeeper_each_says_so(site, tmp_path):
    first = site.init()
    local = first / "etc" / "local.yaml"
    local.write_text(local.read_text().replace(site.hosts, "127.0.0.1:1"))

    done = site.admin(first, "maintenance", "jobs-1", "on")

    assert done.returncode == 1
    assert "ZooKeeper at 127.0.0.1:1 does not answer" in done.stderr


def test_without_kazoo_they_say_what_to_install(site, tmp_path):
    (tmp_path / "kazoo.py").write_text("raise ModuleNotFoundError(\"No module named 'kazoo'\")")
    made = site.deployment("d")

    done = site.run("cluster", "init", made, *site.options("a"), PYTHONPATH=str(tmp_path))

    assert done.returncode == 1
    assert "No module named 'kazoo'; a cluster needs `pip install 'pinlaterd[zookeeper]'`" in (
        done.stderr
    )
