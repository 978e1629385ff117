"""One configuration for all servers of a cluster, whoever edits it, and whatever comes between."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.layout import SHARED_FILES
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import Config
from pinlaterd.coordinator import shared_config
from pinlaterd.coordinator.reload import HeldJobs
from pinlaterd.coordinator.shared_config import (
    SharedConfig,
    SharedFiles,
    unpack,
    write_base,
)
from pinlaterd.coordinator.zookeeper import Conflict, Node, NotConnected, View

LOCAL = "cluster: prod\nserver: {}\nzookeeper: z1:2181\npeer_host: 10.0.0.1\n"
SHARD = "{{engine: redis, master: {{host: h, port: {}}}}}"
TEXTS = {
    "pinlaterd.yaml": "",
    "shards.yaml": f"shards:\n  1: {SHARD.format(1)}\n  2: {SHARD.format(2)}\n",
    "queues.yaml": "queues: {}\n",
}


class ZooKeeper:
    """Its nodes. Each server sees them when it is told to."""

    def __init__(self) -> None:
        first = SharedFiles(1, TEXTS, "jobs-1", decided=True)
        self.nodes = {"config": Node(first.pack(), 0)}
        self.accepted = [first]
        self.unanswered = 0  # so many writes are carried out, and not answered

    def write(self, data: bytes, version: int) -> None:
        if self.nodes["config"].version != version:
            raise Conflict
        self.nodes["config"] = Node(data, version + 1)
        self.accepted.append(unpack(data))
        if self.unanswered:
            self.unanswered -= 1
            raise NotConnected

    @property
    def latest(self) -> SharedFiles:
        return self.accepted[-1]


class Server:
    """A coordinator's part, in a folder of its own."""

    def __init__(self, name: str, folder: Path, zookeeper: ZooKeeper, *, leads: bool) -> None:
        self.name, self.folder, self.zookeeper, self.leads = name, folder, zookeeper, leads
        self.etc = folder / "etc"
        self.connected = True
        self.holds: dict[str, HeldJobs] = {}
        for part in ("etc", "run"):
            (folder / part).mkdir(parents=True)
        (self.etc / "local.yaml").write_text(LOCAL.format(name))
        (self.etc / "cluster.key").touch(mode=0o600)
        for file, text in TEXTS.items():
            (self.etc / file).write_text(text)
        os.chdir(folder)
        write_base(zookeeper.accepted[0])
        self.active = ActiveConfig(1, load_config(self.etc))
        self.start()

    def start(self) -> None:
        """A new coordinator."""
        os.chdir(self.folder)
        self.shared = SharedConfig(
            self.etc, self.active, self._activate, self.name, self._write, self._ask
        )

    def _activate(self, config: Config) -> ActiveConfig:
        self.active = ActiveConfig(self.active.version + 1, config)
        return self.active

    async def _write(self, data: bytes, version: int, as_leader: bool) -> None:
        if not self.connected:
            raise NotConnected
        if as_leader and not self.leads:
            raise Conflict
        self.zookeeper.write(data, version)

    async def _ask(self, shards: object) -> Mapping[str, HeldJobs]:
        return self.holds

    def see(self) -> None:
        members = {"m-1": b"", "m-2": b""}
        own = "m-1" if self.leads else "m-2"
        nodes = self.zookeeper.nodes if self.connected else {}
        if self.connected:
            self.shared.see(View(members, {}, dict(nodes), own, connected=True))
        else:
            self.shared.see(View(connected=False))

    def step(self) -> None:
        os.chdir(self.folder)
        asyncio.run(self.shared.step())

    def settle(self) -> None:
        for _ in range(8):
            self.see()
            self.step()

    def write(self, name: str, text: str) -> None:
        beside = self.etc / f".{name}.swp"
        beside.write_text(text)
        beside.replace(self.etc / name)

    def text(self, name: str) -> str:
        """What the file holds; "" if there is none, as of users.yaml."""
        path = self.etc / name
        return path.read_text() if path.exists() else ""

    def kept(self) -> list[str]:
        return [path.read_text() for path in sorted(self.etc.glob("*.yours-*"))]


@pytest.fixture
def zookeeper():
    return ZooKeeper()


@pytest.fixture
def servers(tmp_path, zookeeper, monkeypatch):
    monkeypatch.chdir(tmp_path)  # and back, afterwards
    made = [Server(f"jobs-{n}", tmp_path / str(n), zookeeper, leads=n == 1) for n in (1, 2, 3)]
    for server in made:
        server.settle()
    return made


def settle(servers):
    for _ in range(3):
        for server in servers:
            server.settle()


def limit(queue, rate):
    return f"queues: {{{queue}: {{max_jobs_per_second: {rate}}}}}\n"


def rate(server, queue="mail"):
    return server.active.config.queue(queue).max_jobs_per_second


def test_an_edit_on_any_server_acts_on_all(servers, zookeeper):
    servers[2].write("queues.yaml", limit("mail", 5))
    settle(servers)

    assert [rate(server) for server in servers] == [5, 5, 5]
    assert {server.text("queues.yaml") for server in servers} == {limit("mail", 5)}
    assert [(one.number, one.by) for one in zookeeper.accepted] == [(1, "jobs-1"), (2, "jobs-3")]
    assert all(server.shared.converged and not server.shared.problems for server in servers)


def test_what_is_not_valid_is_not_proposed_and_others_still_act(servers, zookeeper):
    servers[0].write("queues.yaml", "queues: {mail: {max_jobs_per_second: -1}}")
    servers[1].write("pinlaterd.yaml", "max_queues: 5\n")
    settle(servers)

    assert [one.number for one in zookeeper.accepted] == [1, 2]
    assert servers[0].active.config.server.max_queues == 5
    assert "queues.mail.max_jobs_per_second: -1 is out of range" in servers[0].shared.problems[0]
    assert servers[0].shared.converged, "commands are told what is wrong"

    servers[0].write("queues.yaml", limit("mail", 1))
    settle(servers)
    assert rate(servers[2]) == 1
    assert not servers[0].shared.problems


def test_of_two_edits_of_one_file_the_second_is_kept_beside(servers):
    servers[0].write("queues.yaml", limit("mail", 1))
    servers[1].write("queues.yaml", limit("mail", 2))
    settle(servers)

    assert [rate(server) for server in servers] == [1, 1, 1]
    assert [server.kept() for server in servers] == [[], [limit("mail", 2)], []]
    [warning] = servers[1].shared.warnings
    assert "queues.yaml: jobs-1 changed it first, in configuration 2; your edit is in" in warning
    assert not servers[1].shared.problems
    assert servers[1].shared.converged

    servers[1].write("queues.yaml", limit("mail", 2))
    settle(servers)
    assert [rate(server) for server in servers] == [2, 2, 2]
    assert servers[1].kept() == [limit("mail", 2)], "only its author deletes it"

    servers[1].start()
    servers[1].settle()
    [warning] = servers[1].shared.warnings
    assert "an edit that came second; make it again, and delete that file" in warning
    next(servers[1].etc.glob("*.yours-*")).unlink()
    servers[1].settle()
    assert not servers[1].shared.warnings


def test_edits_of_different_files_go_together(servers, zookeeper):
    servers[0].write("queues.yaml", limit("mail", 1))
    servers[1].write("pinlaterd.yaml", "max_queues: 5\n")
    settle(servers)

    for server in servers:
        assert rate(server) == 1
        assert server.active.config.server.max_queues == 5
        assert not server.kept()
    assert [one.number for one in zookeeper.accepted] == [1, 2, 3]


def test_an_edit_waits_for_zookeeper(servers, zookeeper):
    servers[1].connected = False
    servers[1].write("queues.yaml", limit("mail", 3))
    servers[1].settle()

    assert rate(servers[1]) is None
    assert not servers[1].shared.converged
    assert "an edit waits, as ZooKeeper can't be reached" in servers[1].shared.problems[0]

    servers[1].connected = True
    settle(servers)
    assert [rate(server) for server in servers] == [3, 3, 3]
    assert not servers[1].shared.problems


def test_an_edit_while_no_coordinator_ran_is_of_the_configuration_before(servers):
    stopped, *others = servers
    stopped.write("queues.yaml", limit("mail", 4))
    stopped.start()
    stopped.settle()
    settle(others)
    assert [rate(server) for server in servers] == [4, 4, 4]

    stopped.write("queues.yaml", limit("mail", 5))
    others[0].write("queues.yaml", limit("mail", 6))
    settle(others)
    stopped.start()
    settle(servers)

    assert [rate(server) for server in servers] == [6, 6, 6]
    assert stopped.kept() == [limit("mail", 5)]


def test_a_write_without_an_answer_is_recognized(servers, zookeeper):
    zookeeper.unanswered = 1
    servers[1].write("queues.yaml", limit("mail", 7))
    settle(servers)

    assert [rate(server) for server in servers] == [7, 7, 7]
    assert len(zookeeper.accepted) == 2
    assert not any(server.kept() or server.shared.problems for server in servers)


def test_a_server_that_can_not_use_it_keeps_the_last_and_says_so(servers, monkeypatch):
    monkeypatch.setenv("SECRET", "s")
    servers[0].write(
        "shards.yaml", TEXTS["shards.yaml"].replace("port: 2}", "port: 2}, passwd_env: SECRET")
    )
    servers[0].settle()
    monkeypatch.delenv("SECRET")
    servers[1].settle()

    assert servers[0].active.config.shards["2"].passwd == "s"
    assert servers[1].active.config.shards["2"].passwd == ""
    [problem] = servers[1].shared.problems
    assert problem.startswith("configuration 2: ")
    assert "the environment has no SECRET" in problem
    assert servers[1].text("shards.yaml") == servers[0].text("shards.yaml")

    monkeypatch.setenv("SECRET", "s")
    servers[1].start()
    servers[1].settle()
    assert servers[1].active.config.shards["2"].passwd == "s"


def test_numbers_never_go_back(servers, zookeeper):
    before = dict(zookeeper.nodes)
    servers[0].write("queues.yaml", limit("mail", 8))
    settle(servers)
    zookeeper.nodes = before
    settle(servers)

    assert [rate(server) for server in servers] == [8, 8, 8]
    assert "ZooKeeper has configuration 1, and 2 was accepted" in servers[1].shared.problems[0]
    assert not servers[1].shared.converged

    restored = SharedFiles(1000, {**TEXTS, "queues.yaml": limit("mail", 9)}, "jobs-1")
    zookeeper.nodes = {"config": Node(restored.pack(), 0)}
    settle(servers)
    assert [rate(server) for server in servers] == [9, 9, 9]


def test_what_zookeeper_can_not_take_is_refused(servers, zookeeper):
    noise = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=1_900_000))
    servers[0].write("queues.yaml", f"queues: {{}}\n# {noise}\n")
    servers[0].settle()

    assert len(zookeeper.accepted) == 1
    assert (
        "bytes when packed; ZooKeeper takes 921,600: shorten them" in servers[0].shared.problems[0]
    )
    assert servers[0].shared.converged


def test_an_edit_of_local_yaml_is_never_sent(servers, zookeeper):
    servers[1].write("local.yaml", LOCAL.format("jobs-2") + "weight: 3\n")
    settle(servers)

    assert servers[1].active.config.server.weight == 3
    assert servers[0].active.config.server.weight == 1
    assert len(zookeeper.accepted) == 1
    assert servers[1].shared.converged


def test_without_run_the_files_of_zookeeper_go_before(servers):
    (servers[1].folder / "run" / "shared_config.json").unlink()
    servers[1].write("queues.yaml", limit("mail", 1))
    servers[1].start()
    servers[1].step()
    servers[1].step()
    servers[1].step()
    assert rate(servers[1]) is None, "nobody has accepted it"

    settle(servers)
    assert servers[1].text("queues.yaml") == TEXTS["queues.yaml"]
    assert servers[1].kept() == [limit("mail", 1)]


# --- the removal of a shard ---------------------------------------------------------------------

ONE_SHARD = "".join(TEXTS["shards.yaml"].splitlines(keepends=True)[:2])


def shards(servers):
    return [
        {name: one.dequeue_only for name, one in server.active.config.shards.items()}
        for server in servers
    ]


def holding(server, *, pending=0):
    """What the shard says, which follows what is active on `server`."""
    return server.shared.holding(HeldJobs(server.active.version, pending, 0))


def test_a_shard_is_removed_once_its_owner_follows_and_holds_nothing(servers, zookeeper):
    leader, owner, _ = servers
    leader.holds = {"2": holding(owner)}
    servers[2].write("shards.yaml", ONE_SHARD)
    settle(servers)

    assert shards(servers) == [{"1": False, "2": True}] * 3
    assert not owner.shared.converged

    leader.holds = {"2": holding(owner)._replace(config_version=1)}
    settle(servers)
    assert shards(servers) == [{"1": False, "2": True}] * 3, "it may have got a job since"

    leader.holds = {"2": holding(owner)}
    settle(servers)
    assert shards(servers) == [{"1": False}] * 3
    assert all(server.shared.converged for server in servers)
    assert zookeeper.latest.kept == {}


@pytest.mark.parametrize("holds", [HeldJobs(9, 3, 0), None])
def test_a_removal_that_is_refused_is_told_on_all_servers(servers, holds):
    servers[0].holds = {} if holds is None else {"2": holds}
    servers[1].write("shards.yaml", ONE_SHARD)
    settle(servers)

    assert shards(servers) == [{"1": False, "2": False}] * 3
    text = "it does not serve" if holds is None else "3 jobs are pending"
    for server in servers:
        assert text in server.shared.refusals["2"]
        assert server.shared.converged

    servers[1].write("shards.yaml", ONE_SHARD + "abandon: [2]\n")
    settle(servers)
    assert shards(servers) == [{"1": False}] * 3
    assert not servers[0].shared.refusals


def test_a_server_that_was_away_lets_a_removed_shard_go(servers, zookeeper):
    servers[0].holds = {"2": HeldJobs(9, 0, 0)}
    servers[1].write("shards.yaml", ONE_SHARD)
    settle(servers[:2])
    servers[1].write("queues.yaml", limit("mail", 1))
    settle(servers[:2])
    assert zookeeper.latest.decided

    servers[2].settle()
    assert shards(servers) == [{"1": False}] * 3


def test_a_server_that_has_just_joined_decides_nothing_about_shards_that_it_never_had(
    servers, zookeeper, tmp_path
):
    servers[0].holds = {"2": HeldJobs(9, 3, 0)}
    servers[1].write("shards.yaml", ONE_SHARD)
    settle(servers)
    servers[0].leads = False
    servers[1].write("shards.yaml", ONE_SHARD + "# again\n")
    settle(servers)
    assert not zookeeper.latest.decided

    new = Server("jobs-4", tmp_path / "4", zookeeper, leads=True)
    for name, text in zookeeper.latest.files.items():
        new.write(name, text)
    write_base(zookeeper.latest)
    new.active = ActiveConfig(1, load_config(new.etc))
    new.start()
    new.settle()

    assert shards([new]) == [{"1": False, "2": False}]
    assert "2" in zookeeper.latest.kept


def test_what_is_decided_and_not_done_yet_has_not_converged(servers):
    servers[0].holds = {"2": HeldJobs(9, 3, 0)}
    servers[1].write("shards.yaml", ONE_SHARD)
    servers[1].settle()
    settle([servers[0]])

    servers[1].see()
    assert not servers[1].shared.converged
    servers[1].step()
    assert servers[1].shared.converged
    assert servers[1].shared.refusals


def test_a_removal_waits_for_a_leader_and_all_else_acts(servers):
    for server in servers:
        server.leads = False
    servers[0].holds = {"2": HeldJobs(9, 0, 0)}
    servers[1].write("shards.yaml", ONE_SHARD)
    servers[1].write("queues.yaml", limit("mail", 1))
    settle(servers)

    assert shards(servers) == [{"1": False, "2": False}] * 3
    assert [rate(server) for server in servers] == [1, 1, 1]
    assert not servers[1].shared.converged

    servers[2].leads = True
    servers[2].holds = {"2": HeldJobs(9, 0, 0)}
    settle(servers)
    assert shards(servers) == [{"1": False}] * 3


def test_a_leader_that_has_not_seen_the_latest_decides_nothing(servers, zookeeper):
    late = servers[2]
    servers[0].holds = {"2": HeldJobs(9, 1, 0)}
    servers[1].write("shards.yaml", ONE_SHARD)
    settle(servers)
    before = zookeeper.nodes["config"]
    servers[1].write("queues.yaml", limit("mail", 1))
    settle(servers[:2])
    latest = zookeeper.latest

    late.leads = True
    late.holds = {"2": HeldJobs(9, 0, 0)}
    late.shared.see(View({"m-1": b""}, {}, {"config": before}, "m-1", connected=True))
    late.step()
    assert zookeeper.latest is latest


def test_a_shard_that_was_named_again_has_to_say_again_that_it_is_empty(servers, zookeeper):
    leader, owner, _ = servers
    leader.holds = {"2": holding(owner)}
    owner.write("shards.yaml", ONE_SHARD)
    settle(servers)
    assert shards([owner]) == [{"1": False, "2": True}]

    leader.leads = False  # for a while none decides
    leader.holds = {"2": holding(owner)}
    for text in (TEXTS["shards.yaml"], ONE_SHARD):
        owner.write("shards.yaml", text)
        settle(servers)
    assert shards([owner]) == [{"1": False, "2": False}]
    leader.leads = True
    settle(servers)
    assert shards(servers) == [{"1": False, "2": True}] * 3

    leader.holds = {"2": holding(owner)}
    settle(servers)
    assert shards(servers) == [{"1": False}] * 3


def test_a_decision_counts_only_if_no_other_came_between(servers, zookeeper, monkeypatch):
    leader, other, _ = servers

    other.write("shards.yaml", ONE_SHARD)
    other.settle()
    asked = []

    async def ask(_shards):
        asked.append(True)
        other.leads = True
        other.holds = {"2": HeldJobs(9, 5, 0)}
        other.see()
        os.chdir(other.folder)
        await other.shared.step()
        os.chdir(leader.folder)
        leader.see()
        return {"2": HeldJobs(9, 0, 0)}

    monkeypatch.setattr(leader.shared, "_ask", ask)
    while not asked:
        leader.see()
        leader.step()

    assert "5 jobs are pending" in zookeeper.latest.refused["2"]


def test_refusals_are_not_written_with_every_count(servers, zookeeper):
    servers[1].write("shards.yaml", ONE_SHARD)
    for count in range(100):
        servers[0].holds = {"2": HeldJobs(9, count + 1, 0)}
        settle(servers[:2])

    assert zookeeper.nodes["config"].version < 100 * 24 / 40 + 3


def test_passwords_of_a_kept_shard_are_not_sent(servers, zookeeper, monkeypatch):
    secret = TEXTS["shards.yaml"].replace("port: 2}", "port: 2}, passwd_file: secret")
    for server in servers:
        (server.folder / "secret").write_text("hunter2")
    servers[0].write("shards.yaml", secret)
    settle(servers)
    servers[0].write("shards.yaml", ONE_SHARD)
    servers[0].holds = {"2": HeldJobs(9, 1, 0)}
    settle(servers)

    assert servers[1].active.config.shards["2"].passwd == "hunter2"
    assert zookeeper.latest.kept["2"].before.passwd == ""


# --- all at once --------------------------------------------------------------------------------

EDITS = 100


class Killed(Exception):
    """The coordinator's process ends here."""


class Chance:
    """Three servers that act in any order, are killed between any two writes, lose ZooKeeper."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.zookeeper = ZooKeeper()
        self.servers = [
            Server(f"jobs-{n}", folder / str(n), self.zookeeper, leads=n == 1) for n in (1, 2, 3)
        ]
        self.written: set[str] = set()
        self.replaced: set[str] = set()  # by their authors
        self.writes_left = 0  # before a process is killed; 0: it is not

    def killable(self, write):
        def maybe(*arguments):
            self.writes_left -= 1
            if not self.writes_left:
                raise Killed
            return write(*arguments)

        return maybe

    def act(self, server):
        act = self.random.random()
        if act < 0.2:
            self.edit(server)
        elif act < 0.5:
            server.see()
        elif act < 0.92:
            try:
                server.step()
            except Killed:
                server.start()
        elif act < 0.95:
            server.connected = not server.connected
        elif act < 0.98:
            self.zookeeper.unanswered = 1
        else:
            self.writes_left = self.random.randint(1, 5)

    def loads(self, *arguments):
        """Whatever is read, others act meanwhile."""
        if self.random.random() < 0.5:
            self.random.choice(self.servers).see()
        return load_config(*arguments)

    def edit(self, server):
        number = len(self.written) + 1
        name, text = "queues.yaml", limit("q", number)
        if self.random.random() < 0.5:
            name, text = "pinlaterd.yaml", f"max_queues: {number}\n"
        self.replaced.add(server.text(name))
        self.written.add(text)
        server.write(name, text)

    def settle(self):
        self.zookeeper.unanswered = 0
        for server in self.servers:
            server.connected = True
        settle(self.servers)
        settle(self.servers)


@pytest.mark.parametrize("seed", range(20))
def test_of_a_hundred_concurrent_edits_none_is_lost_unsaid(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chance = Chance(seed, tmp_path)
    numbers: dict[str, list[int]] = {server.name: [] for server in chance.servers}
    with monkeypatch.context() as patch:
        for name in ("take_over", "write_base"):
            patch.setattr(shared_config, name, chance.killable(getattr(shared_config, name)))
        patch.setattr(shared_config, "load_config", chance.loads)
        while len(chance.written) < EDITS:
            server = chance.random.choice(chance.servers)
            chance.act(server)
            numbers[server.name].append(server.shared.followed(server.active.version))
    chance.settle()

    accepted = chance.zookeeper.accepted
    assert [one.number for one in accepted] == list(range(1, len(accepted) + 1))
    for server in chance.servers:
        seen = [number for number in numbers[server.name] if number]
        assert seen == sorted(seen)
        assert server.shared.converged
        assert {name: server.text(name) for name in SHARED_FILES} == accepted[-1].files
    were_accepted = {text for one in accepted for text in one.files.values()}
    kept = {text for server in chance.servers for text in server.kept()}
    assert chance.written <= were_accepted | kept | chance.replaced
    assert len(were_accepted) > 10
