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
    return Durability(shown, "; ".join(_warnings(settings, is_replica=_is_replica(connection))))


def refuse_cluster(connection: Connection) -> None:
    """A script's keys have to be in one place."""
    if b"cluster_enabled:1" in _info(connection, "cluster"):
        raise StorageError(f"{connection.server} {CLUSTER_WORDS}")


def refuse_replica(connection: Connection) -> None:
    """Before anything fails half-way: whoever named it may know better in a moment."""
    if _is_replica(connection):
        raise StorageError(f"{connection.server} {REPLICA_WORDS}")


def _warnings(settings: dict[str, str], *, is_replica: bool) -> list[str]:
    found = []
    if is_replica:
        found.append("it is a replica: name its master as `master` in shards.yaml")
    if settings["appendonly"] == "no":
        lost = (
            "since its last snapshot" if settings["save"] else "of all time: nothing is persisted"
        )
        found.append(f"a restart of Redis loses the jobs {lost}; set appendonly yes")
    elif settings["appendfsync"] == "everysec":
        found.append(
            "a crash of its machine may lose the jobs of the last second; to keep them, set"
            " appendfsync always"
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
        answer: list[bytes] = connection.read("CONFIG GET", name)
    except StorageNotCommitted as error:
        if is_permission_denied(error.__cause__):
            return "?"
        raise
    return answer[1].decode() if len(answer) == 2 else "?"


def _is_replica(connection: Connection) -> bool:
    return b"role:slave" in _info(connection, "replication")


def _info(connection: Connection, section: str) -> bytes:
    """Nothing where it is refused to this user."""
    try:
        info: bytes = connection.read("INFO", section)
    except StorageNotCommitted as error:
        if is_permission_denied(error.__cause__):
            return b""
        raise
    return info
