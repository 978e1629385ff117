"""The Redis servers of a shard, and what a server reports: its kind, how well it keeps what it
acknowledged, and its part in replication.

Sentinels agree on a master by majority, and number their agreements (the configuration's epoch).
One that was cut off may name a former master, so all are asked, and the latest agreement counts.
What they say is a hint, still: who connects sees to it that the server is a master.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pinlaterd.config.schema import Address, SentinelSettings
from pinlaterd.engines.base import Durability
from pinlaterd.engines.redis.connection import (
    CLUSTER_WORDS,
    REPLICA_WORDS,
    RedisClient,
    Server,
    is_permission_denied,
)
from pinlaterd.errors import StorageError, StorageNotCommitted

_SENTINEL_ANSWER_SECONDS = 2.0
_SENTINEL_CONNECT_SECONDS = 1.0
_SETTINGS = ("appendonly", "appendfsync", "save", "maxmemory-policy")


# --- where a server is --------------------------------------------------------------------------


class Locator(Protocol):
    """Finds the server that holds a shard at present. Server is one that never moves."""

    def find(self) -> Server:
        """Raises StorageError where nobody knows."""


class Agreement(NamedTuple):
    """The master that one Sentinel names. Compared by epoch."""

    epoch: int
    host: str
    port: int


@dataclass(frozen=True)
class Sentinels:
    """A master that Sentinels watch over under the name `service`."""

    service: str
    sentinels: tuple[Server, ...]
    account: Server  # who to be at the master; its address is of no account

    def __str__(self) -> str:
        return f"Sentinels of {self.service!r}"

    def find(self) -> Server:
        agreements, problems = [], []
        for sentinel in self.sentinels:
            try:
                agreements.append(self._ask(sentinel))
            except StorageError as error:
                problems.append(error.message)
        if not agreements:
            raise StorageError(f"no Sentinel knows the master: {'; '.join(problems)}")
        latest = max(agreements)
        return Server(latest.host, latest.port, self.account.user, self.account.passwd)

    def fail_over(self) -> str:
        """Have one of them begin; returns which. Raises StorageError, with what each said."""
        problems = []
        for sentinel in self.sentinels:
            try:
                with _connected(sentinel) as connection:
                    connection.administer("SENTINEL", "FAILOVER", self.service)
                return str(sentinel)
            except StorageError as error:
                problems.append(error.message)
        raise StorageError(f"no Sentinel began a failover: {'; '.join(problems)}")

    def _ask(self, sentinel: Server) -> Agreement:
        with _connected(sentinel) as connection:
            flat = connection.read("SENTINEL", "MASTER", self.service)
            place = connection.read("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        facts = dict(zip(flat[::2], flat[1::2], strict=True))
        # The second answer is ahead of the first one while this Sentinel itself fails over.
        return Agreement(int(facts[b"config-epoch"]), place[0].decode(), int(place[1]))


def _connected(sentinel: Server) -> closing[RedisClient]:
    return closing(
        RedisClient(sentinel, _SENTINEL_ANSWER_SECONDS, connect_seconds=_SENTINEL_CONNECT_SECONDS)
    )


def sentinels_of(settings: SentinelSettings, user: str, passwd: str) -> Sentinels:
    """Make the locator by Sentinels. `user`, `passwd`: at the master, not at the Sentinels."""
    return Sentinels(
        settings.service,
        tuple(Server(*place, settings.user, settings.passwd) for place in settings.addresses),
        Server("", 0, user, passwd),
    )


# --- what a server says of itself ---------------------------------------------------------------


def read_durability(connection: RedisClient) -> Durability:
    settings = {name: _setting(connection, name) for name in _SETTINGS}
    shown = ", ".join(
        f"{name} {settings[name] or repr('')}" for name in ("appendonly", "appendfsync", "save")
    )
    return Durability(shown, "; ".join(_warnings(settings)))


def refuse_cluster(connection: RedisClient) -> None:
    """Refuse a server of a Redis Cluster, since a script's keys have to be in one place."""
    if _told(connection, "cluster").get("cluster_enabled") == "1":
        raise StorageError(f"{connection.server} {CLUSTER_WORDS}")


def evicts(connection: RedisClient) -> bool:
    """Tell whether jobs may vanish while their ids stay: each has to be looked at to be counted."""
    return _told(connection, "memory").get("maxmemory_policy") != "noeviction"


def refuse_replica(connection: RedisClient) -> None:
    """Refuse a replica, also one that takes writes: its master's would replace them."""
    if _told(connection, "replication").get("role") == "slave":
        raise StorageError(f"{connection.server} {REPLICA_WORDS}")


def _warnings(settings: dict[str, str]) -> list[str]:
    found = []
    if settings["appendonly"] == "no":
        lost = (
            "since its last snapshot" if settings["save"] else "of all time: nothing is persisted"
        )
        found.append(f"a restart of Redis loses the jobs {lost}; set appendonly yes")
    elif settings["appendfsync"] == "everysec":
        found.append(
            "appendfsync everysec: a crash of its machine, though not of Redis alone, loses the"
            " jobs of the last second; appendfsync always keeps them"
        )
    elif settings["appendfsync"] == "no":
        found.append(
            "a crash of its machine may lose the jobs of the last half minute; set appendfsync"
            " always, or everysec"
        )
    if "?" in settings.values():
        found.append("its settings can't be read (CONFIG GET is refused): see to them by hand")
    policy = settings["maxmemory-policy"]
    if policy not in ("noeviction", "?"):
        found.append(f"maxmemory-policy {policy} may evict jobs; set maxmemory-policy noeviction")
    return found


def _setting(connection: RedisClient, name: str) -> str:
    """Read a setting; '?' where nobody may know it: some hosted servers refuse CONFIG."""
    try:
        answer: list[bytes] = connection.read("CONFIG", "GET", name)
    except StorageNotCommitted as error:
        if is_permission_denied(error.__cause__):
            return "?"
        raise
    return answer[1].decode() if len(answer) == 2 else "?"


def _told(connection: RedisClient, section: str) -> Mapping[str, str]:
    """Read a section of INFO; it is empty where it is refused to this user."""
    try:
        return _info(connection, section)
    except StorageNotCommitted as error:
        if is_permission_denied(error.__cause__):
            return {}
        raise


def _info(connection: RedisClient, section: str) -> Mapping[str, str]:
    answer: bytes = connection.read("INFO", section)
    lines = (line.partition(":") for line in answer.decode(errors="replace").splitlines())
    return {key: value for key, colon, value in lines if colon}


# --- replication -----------------------------------------------------------------------------


class Link(NamedTuple):
    """A server's part in replication."""

    run_id: str
    replication_id: str  # of the history of writes that it has; the same along a chain of replicas
    offset: int  # bytes of that history
    source: Address | None  # None: it is a master
    is_connected: bool  # whether it follows its source, and has all of what that had at first
    silent_seconds: float | None  # since its source was last heard
    replicas: tuple[Address, ...]  # that are online, as it knows them
    failover_state: str


def read_link(connection: RedisClient) -> Link:
    """Raises StorageError, also for a server that does not say."""
    try:
        return _link({**_info(connection, "replication"), **_info(connection, "server")})
    except (KeyError, ValueError) as error:
        raise StorageError(
            f"{connection.server} does not say how it replicates (INFO replication): {error}"
        ) from error


def _link(info: Mapping[str, str]) -> Link:
    is_replica = info["role"] == "slave"
    silent = int(info.get("master_last_io_seconds_ago", -1))
    return Link(
        run_id=info["run_id"],
        replication_id=info["master_replid"],
        offset=int(info["slave_repl_offset" if is_replica else "master_repl_offset"]),
        source=Address(info["master_host"], int(info["master_port"])) if is_replica else None,
        is_connected=is_replica
        and info["master_link_status"] == "up"
        and info["master_sync_in_progress"] == "0",
        silent_seconds=float(silent) if is_replica and silent >= 0 else None,
        replicas=tuple(_online(info)),
        failover_state=info.get("master_failover_state", "no-failover"),
    )


def _online(info: Mapping[str, str]) -> Iterator[Address]:
    for number in range(int(info.get("connected_slaves", 0))):
        text = info.get(f"slave{number}", "")
        facts = dict(part.split("=", 1) for part in text.split(",") if part)
        if facts.get("state") == "online":
            yield Address(facts["ip"], int(facts["port"]))
