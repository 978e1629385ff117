"""Commands that make a deployment a server of a cluster, or end that; and what they write to
ZooKeeper about servers.

A deployment that has left keeps its files but etc/cluster.key, under another name: without it
nothing starts, and so never as a single machine on the shards of the cluster.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pinlaterd.config.edit import take_over
from pinlaterd.config.layout import (
    CLUSTER_KEY_FILE,
    ETC,
    LOCAL_FILE,
    SHARED_FILES,
    SUPERVISORD_FILE,
    read_file,
    replace_file,
)
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import Config
from pinlaterd.coordinator.placement import Assignment, Member
from pinlaterd.deployment import files
from pinlaterd.deployment.service import processes_of
from pinlaterd.errors import DeploymentError
from pinlaterd.wire.curve import ClusterKey

try:
    from pinlaterd.coordinator import shared_config
    from pinlaterd.coordinator.zookeeper import (
        FORMAT,
        NAME_CURE,
        Conflict,
        View,
        change_cluster,
        create_cluster,
        read_cluster,
    )
except ModuleNotFoundError as error:
    raise DeploymentError(
        f"{error}; a cluster needs `pip install 'pinlaterd[zookeeper]'`"
    ) from error

KEY = ETC / CLUSTER_KEY_FILE
_LEFT = ".left"  # appended to the key's name


def create(directory: Path, given: Mapping[str, object]) -> None:
    """Make the deployment the first server of a new cluster; `given`: what local.yaml is to say.

    Like all of these it changes nothing if it can't be done, and raises ConfigError or
    DeploymentError."""
    with files.at_work_in(directory), contextlib.ExitStack() as undo:
        local = ETC / LOCAL_FILE
        try:
            before = local.read_text(encoding="utf-8") if local.exists() else ""
        except UnicodeDecodeError as error:
            raise DeploymentError(f"{local} is not valid UTF-8; save it as UTF-8") from error
        if not KEY.exists():
            ClusterKey.generate(KEY)
            undo.callback(KEY.unlink)
        lines = (f"{name}: {json.dumps(value)}\n" for name, value in given.items())
        text = f"{before.rstrip()}\n{''.join(lines)}" if before else files.local_text(given)
        replace_file(local, text.encode(), durably=True)
        undo.callback(replace_file, local, before.encode()) if before else undo.callback(
            local.unlink
        )
        _fill_zookeeper(1)
        undo.pop_all()


def restore(directory: Path) -> None:
    """Fill a ZooKeeper that has lost its data."""
    with files.at_work_in(directory):
        # Greater than all that were accepted before, which this server may not have seen.
        _fill_zookeeper(max(time.time_ns() // 1_000_000, shared_config.read_base().number + 1))


def _fill_zookeeper(number: int) -> None:
    access = _Access.of(Path())
    texts = {
        name: (ETC / name).read_text(encoding="utf-8") if (ETC / name).exists() else ""
        for name in SHARED_FILES
    }
    shared = shared_config.SharedFiles(number, texts, access.server)
    nodes = {"config": shared.pack(), f"servers/{access.server}": b"{}", "format": FORMAT}
    try:
        create_cluster(*access.zookeeper, nodes)
    except Conflict as error:
        raise DeploymentError(
            f"ZooKeeper at {access.zookeeper[0]} has a cluster {access.zookeeper[1]} already; "
            "`pinlaterd cluster join` makes a deployment a server of it; if none of yours has made "
            f"it, {NAME_CURE} /pinlaterd/{access.zookeeper[1]}"
        ) from error
    shared_config.write_base(shared)


def join(directory: Path, key_file: Path, given: Mapping[str, str | int]) -> None:
    """Make a deployment of what the cluster's servers have in common."""
    files.check_depth(directory)
    hosts, name, server = (str(given[key]) for key in ("zookeeper", "cluster", "server"))
    digest = ClusterKey.load(key_file, name).digest
    key, left = directory / KEY, directory / f"{KEY}{_LEFT}"
    names = (*SHARED_FILES, LOCAL_FILE, CLUSTER_KEY_FILE)
    there = [str(path) for path in (directory / ETC / name for name in names) if path.exists()]
    if there and not left.exists():
        raise DeploymentError(f"{', '.join(there)}: there already; choose a new folder")
    view = read_cluster(hosts, name, digest)
    if server in view.servers or server in _members(view):
        raise DeploymentError(
            f"cluster {name} has a server {server} already; choose another name or, if that one is "
            f"gone for good, `pinlater-admin server remove {server}` on another server"
        )
    shared = shared_config.unpack(view.nodes["config"].data)
    texts = {
        **shared.files,
        LOCAL_FILE: files.local_text(given),
        SUPERVISORD_FILE: files.resources_text(SUPERVISORD_FILE),
    }
    with contextlib.ExitStack() as undo:
        files.make_folders(directory)
        for file, text in texts.items():
            path = directory / ETC / file
            if not path.exists():
                undo.callback(path.unlink, missing_ok=True)
            take_over(directory / ETC, file, b"", text.encode())
        replace_file(key, key_file.read_bytes(), durably=True)
        undo.callback(key.unlink)
        with files.at_work_in(directory):
            load_config(ETC)
            shared_config.write_base(shared)
        try:
            change_cluster(hosts, name, digest, f"servers/{server}", b"{}", None)
        except Conflict as error:
            raise DeploymentError(f"cluster {name} has got a server {server} just now") from error
        undo.pop_all()
    left.unlink(missing_ok=True)


def leave(directory: Path) -> str:
    """Leave the cluster; return where the key is kept."""
    if processes_of(directory):
        raise DeploymentError(f"{directory} runs; `pinlaterd down` first")
    remove(directory, _Access.of(directory).server)
    key = directory / KEY
    return str(key.rename(f"{key}{_LEFT}"))


# --- servers, as ZooKeeper has them -------------------------------------------------------------


class _Access(NamedTuple):
    server: str
    zookeeper: tuple[str, str, str]  # hosts, the cluster's name, credentials

    @classmethod
    def of(cls, directory: Path) -> _Access:
        server = load_config(directory / ETC).server
        if not server.cluster:
            raise DeploymentError(
                f"{directory} belongs to no cluster; `pinlaterd cluster init` makes one"
            )
        digest = ClusterKey.load(directory / KEY, server.cluster).digest
        return cls(server.server, (server.zookeeper, server.cluster, digest))


def _members(view: View) -> Collection[str]:
    """Return the servers that are alive."""
    return {msgspec.json.decode(data, type=Member).server for data in view.members.values()}


def _write_server(access: _Access, view: View, name: str, data: bytes | None) -> None:
    node = view.servers.get(name)
    if node is None and name not in _members(view):
        known = ", ".join(sorted({*view.servers, *_members(view)}))
        raise DeploymentError(f"there is no server {name}; there are: {known}")
    version = None if node is None else node.version
    try:
        change_cluster(*access.zookeeper, f"servers/{name}", data, version)
    except Conflict as error:
        raise DeploymentError(f"server {name} was changed by another command; try again") from error


def _shared_config(directory: Path, view: View) -> Config:
    shared = shared_config.unpack(view.nodes["config"].data)
    return load_config(directory / ETC, shared_config.accepted(shared, read_file))


def set_maintenance(directory: Path, name: str, *, on: bool) -> None:
    """Have a server own no shards that others can, or have it own some again."""
    access = _Access.of(directory)
    data = json.dumps({"maintenance": True} if on else {}).encode()
    _write_server(access, read_cluster(*access.zookeeper), name, data)


def shards_to_leave(directory: Path, name: str) -> Sequence[str]:
    """Return the shards that the server owns, and others can."""
    view = read_cluster(*_Access.of(directory).zookeeper)
    node = view.nodes.get("assignment")
    assigned = msgspec.json.decode(node.data, type=Assignment).shards if node is not None else {}
    shards = _shared_config(directory, view).shards
    pinned = {shard.name for shard in shards.values() if shard.server}
    return [shard for shard, to in assigned.items() if to.server == name and shard not in pinned]


def remove(directory: Path, name: str) -> None:
    """Remove a server that is gone for good."""
    access = _Access.of(directory)
    view = read_cluster(*access.zookeeper)
    if name in _members(view):
        raise DeploymentError(f"server {name} is alive; `pinlaterd down` there first")
    shards = _shared_config(directory, view).shards.values()
    pinned = [shard.name for shard in shards if shard.server == name]
    if pinned:
        raise DeploymentError(
            f"shards {', '.join(pinned)} are of server {name} only; remove them, or change `server`"
            " in etc/shards.yaml"
        )
    _write_server(access, view, name, None)
