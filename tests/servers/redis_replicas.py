"""Private Redis servers that replicate: a master and a replica, alone or watched by Sentinels.

A Sentinel is redis-server in another mode, with a file of its own that it rewrites.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import FreePort, WaitUntil
from tests.servers.redis import HOST, RedisServer, redis_program

__all__ = ["redis_program"]

SERVICE = "jobs"
DOWN_AFTER_MS = 5000  # else a master that a busy machine holds up is replaced
_QUORUM = 2


class RedisPair:
    """`master` and `replica` are these only until a failover."""

    def __init__(self, program: str, folder: Path, free_port: FreePort) -> None:
        self.master = RedisServer(program, folder / "m", free_port(), *_AT_ONCE)
        replicaof = ("--replicaof", HOST, str(self.master.port))
        self.replica = RedisServer(program, folder / "r", free_port(), *_AT_ONCE, *replicaof)
        self.master.start()
        self.replica.start()

    def wait_until_in_step(self, wait_until: WaitUntil) -> None:
        """The replica has all that the master has, and the master says that it is there."""

        def in_step() -> bool:
            at_master, at_replica = replication(self.master), replication(self.replica)
            listed = at_master.get("slave0")
            return (
                isinstance(listed, dict)
                and listed["state"] == "online"
                and at_replica.get("master_link_status") == "up"
                and at_replica["slave_repl_offset"] == at_master["master_repl_offset"]
            )

        wait_until(in_step)

    def stop(self) -> None:
        """Without waiting for each other, as they do when they end in order."""
        self.master.kill()
        self.replica.kill()


# A replica is served at once, not after waiting for others.
_AT_ONCE = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")


def replication(server: RedisServer) -> dict[str, object]:
    """INFO replication."""
    with server.client() as client:
        found: dict[str, object] = client.info("replication")
        return found


class Watched:
    """A pair of servers, and three Sentinels that know them and each other."""

    def __init__(self, program: str, folder: Path, free_port: FreePort) -> None:
        self.pair = RedisPair(program, folder, free_port)
        self.sentinels = [
            _sentinel(program, folder / f"s{number}", free_port(), self.pair.master.port)
            for number in range(3)
        ]

    @property
    def shard_yaml(self) -> str:
        """The settings of a shard there, in one line."""
        places = ", ".join(f"{{host: {HOST}, port: {one.port}}}" for one in self.sentinels)
        return f"{{service: {SERVICE}, addresses: [{places}]}}"

    def wait_until_watched(self, wait_until: WaitUntil) -> None:
        """They know the replica and each other, so that they could fail over."""
        wait_until(lambda: all(self._is_ready(sentinel) for sentinel in self.sentinels))

    def _is_ready(self, sentinel: RedisServer) -> bool:
        with sentinel.client() as client:
            facts = client.sentinel_master(SERVICE)
            replicas = client.sentinel_slaves(SERVICE)
        return (
            facts["num-other-sentinels"] == len(self.sentinels) - 1
            and len(replicas) == 1
            and replicas[0]["master-link-status"] == "ok"
            and not replicas[0]["is_disconnected"]
        )

    def named_master(self) -> int:
        """The port of the master, as the first Sentinel says."""
        with self.sentinels[0].client() as client:
            [_, port] = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return int(port)

    def has_all(self, master: RedisServer) -> bool:
        """Whether the other server has all that `master` has."""
        other = self.pair.replica if master is self.pair.master else self.pair.master
        return (
            replication(other).get("slave_repl_offset") == replication(master)["master_repl_offset"]
        )

    def server_at(self, port: int) -> RedisServer:
        [server] = [one for one in (self.pair.master, self.pair.replica) if one.port == port]
        return server

    def stop(self) -> None:
        for sentinel in self.sentinels:
            sentinel.stop()
        self.pair.stop()


def _sentinel(program: str, folder: Path, port: int, master_port: int) -> RedisServer:
    folder.mkdir(parents=True)
    (folder / "sentinel.conf").write_text(
        f"sentinel monitor {SERVICE} {HOST} {master_port} {_QUORUM}\n"
        f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
        f"sentinel failover-timeout {SERVICE} 3000\n"
    )
    return _Sentinel(program, folder, port)


class _Sentinel(RedisServer):
    def __init__(self, program: str, folder: Path, port: int) -> None:
        super().__init__(program, folder, port)
        self._command = [
            *(program, str(folder / "sentinel.conf"), "--sentinel"),
            *("--port", str(port), "--bind", HOST, "--dir", str(folder)),
            *("--logfile", str(folder / "redis.log")),
        ]
        self.start()


@pytest.fixture
def redis_pair(
    redis_program: str, free_port: FreePort, tmp_path: Path, wait_until: WaitUntil
) -> Iterator[RedisPair]:
    pair = RedisPair(redis_program, tmp_path / "pair", free_port)
    pair.wait_until_in_step(wait_until)
    yield pair
    pair.stop()


@pytest.fixture
def watched(
    redis_program: str, free_port: FreePort, tmp_path: Path, wait_until: WaitUntil
) -> Iterator[Watched]:
    found = Watched(redis_program, tmp_path / "watched", free_port)
    found.wait_until_watched(wait_until)
    yield found
    found.stop()
