"""What a Redis server says of replication: its part in it, how far it is, who follows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pinlaterd.engines.failover import Place
from pinlaterd.engines.redis.connection import Connection
from pinlaterd.errors import StorageError


class Link(NamedTuple):
    """A server's part in replication."""

    run_id: str
    replication_id: str  # of the history of writes that it has; the same along a chain of replicas
    offset: int  # bytes of that history
    source: Place | None  # None: it is a master
    is_connected: bool  # whether it follows its source, and has all of what that had at first
    silent_seconds: float | None  # since its source was last heard
    replicas: tuple[Place, ...]  # that are online, as it knows them
    failover_state: str


def read_link(connection: Connection) -> Link:
    """Raises StorageError, also for a server that does not say."""
    found = {**_info(connection, "replication"), **_info(connection, "server")}
    try:
        return _link(found)
    except (KeyError, ValueError) as error:
        raise StorageError(
            f"{connection.server} does not say how it replicates (INFO replication): {error}"
        ) from error


def _info(connection: Connection, section: str) -> Mapping[str, str]:
    answer: bytes = connection.read("INFO", section)
    lines = (line.partition(":") for line in answer.decode(errors="replace").splitlines())
    return {key: value for key, colon, value in lines if colon}


def _link(info: Mapping[str, str]) -> Link:
    is_replica = info["role"] == "slave"
    silent = int(info.get("master_last_io_seconds_ago", -1))
    return Link(
        run_id=info["run_id"],
        replication_id=info["master_replid"],
        offset=int(info["slave_repl_offset" if is_replica else "master_repl_offset"]),
        source=Place(info["master_host"], int(info["master_port"])) if is_replica else None,
        is_connected=is_replica
        and info["master_link_status"] == "up"
        and info["master_sync_in_progress"] == "0",
        silent_seconds=float(silent) if is_replica and silent >= 0 else None,
        replicas=tuple(_online(info)),
        failover_state=info.get("master_failover_state", "no-failover"),
    )


def _online(info: Mapping[str, str]) -> list[Place]:
    found = []
    for number in range(int(info.get("connected_slaves", 0))):
        facts = dict(
            part.split("=", 1) for part in info.get(f"slave{number}", "").split(",") if part
        )
        if facts.get("state") == "online":
            found.append(Place(facts["ip"], int(facts["port"])))
    return found
