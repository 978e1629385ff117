"""What a Redis server says of itself: its kind, and how well it keeps what it acknowledged."""

from __future__ import annotations

from pinlaterd.engines.base import Durability
from pinlaterd.engines.redis.connection import Connection
from pinlaterd.engines.redis.faults import CLUSTER_WORDS, REPLICA_WORDS, is_permission_denied
from pinlaterd.errors import StorageError, StorageNotCommitted

_SETTINGS = ("appendonly", "appendfsync", "save", "maxmemory-policy")


def read_durability(connection: Connection) -> Durability:
    settings = {name: _setting(connection, name) for name in _SETTINGS}
    shown = ", ".join(
        f"{name} {settings[name] or repr('')}" for name in ("appendonly", "appendfsync", "save")
    )
    return Durability(shown, "; ".join(_warnings(settings)))


def refuse_cluster(connection: Connection) -> None:
    """A script's keys have to be in one place."""
    if b"cluster_enabled:1" in _info(connection, "cluster"):
        raise StorageError(f"{connection.server} {CLUSTER_WORDS}")


def evicts(connection: Connection) -> bool:
    """Whether jobs may vanish while their ids stay: to be counted, each has to be looked at."""
    return b"maxmemory_policy:noeviction" not in _info(connection, "memory")


def refuse_replica(connection: Connection) -> None:
    """Also one that takes writes: its master's would replace them."""
    if b"role:slave" in _info(connection, "replication"):
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


def _setting(connection: Connection, name: str) -> str:
    """'?' where nobody may know it: some hosted servers refuse CONFIG."""
    try:
        answer: list[bytes] = connection.read("CONFIG", "GET", name)
    except StorageNotCommitted as error:
        if is_permission_denied(error.__cause__):
            return "?"
        raise
    return answer[1].decode() if len(answer) == 2 else "?"


def _info(connection: Connection, section: str) -> bytes:
    """Nothing where it is refused to this user."""
    try:
        info: bytes = connection.read("INFO", section)
    except StorageNotCommitted as error:
        if is_permission_denied(error.__cause__):
            return b""
        raise
    return info
