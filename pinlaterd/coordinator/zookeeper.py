"""A coordinator's session with ZooKeeper, and the nodes that a cluster has there.

    /pinlaterd/NAME/members/m-0000000017    ephemeral: a coordinator that lives; the oldest leads
                    servers/jobs-1          a server that belongs to it, alive or not
                    config, assignment, format

A coordinator that was killed takes its session up again, and with it its member node: to others it
has never been away. Only holders of the cluster's key can read or write any of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kazoo.client import KazooClient
from kazoo.exceptions import (
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    RolledBackError,
    RuntimeInconsistency,
)
from kazoo.security import make_acl, make_digest_acl

from pinlaterd import __version__
from pinlaterd.client.zookeeper import KAZOO_LOG, REREAD_SECONDS, SET_MEMBER, Unanswered, Watcher
from pinlaterd.config.layout import replace_file
from pinlaterd.errors import DeploymentError
from pinlaterd.lifecycle import process_place

log = logging.getLogger(__name__)

SESSION_SECONDS = 4.0
START_SECONDS = 3 * SESSION_SECONDS
MOST_DATA_BYTES = 900 * 1024  # ZooKeeper closes a connection that brings a megabyte
FORMAT = b"1"  # of what the nodes hold; raised once every server can read the next one
_ROOT = "/pinlaterd"
NAME_CURE = "take another name, or have ZooKeeper's administrator delete"  # and the node


class Conflict(Exception):
    """Nothing was written: the node has another version, or this server leads no more."""


class NotConnected(Exception):
    """ZooKeeper could not be asked, or has not answered: the write may have been carried out, which
    the next View tells."""


class Node(NamedTuple):
    """`created_ms`: a node that is made again, after a loss of all data, begins with version 0."""

    data: bytes
    version: int
    created_ms: int = 0
    session: int = 0  # that it ends with


class View(NamedTuple):
    """The content of ZooKeeper when it was read last; while it is not `connected`, or with a
    `problem` (why this server can't be a member, and the cure), what it held before."""

    members: Mapping[str, bytes] = {}  # by node's name, the oldest first
    servers: Mapping[str, Node] = {}
    nodes: Mapping[str, Node] = {}  # config, … as far as there are any
    own: str = ""  # our member node, while there is one
    connected: bool = False
    problem: str = ""

    @property
    def leads(self) -> bool:
        """Whether our member node is the oldest; whether it still is, a write finds out."""
        return self.own != "" and self.own == next(iter(self.members), "")


class Session(Watcher):
    """To be used in the event loop, where `on_view` gets each View that differs from the last."""

    def __init__(
        self,
        hosts: str,
        cluster: str,
        digest: str,
        state_file: Path,
        on_view: Callable[[View], None],
        loop: asyncio.AbstractEventLoop,
        *,
        server_set: str = "",
        reread_seconds: float = REREAD_SECONDS,
    ) -> None:
        """`digest`: ClusterKey.digest. `state_file`: where the session is kept for a coordinator
        that comes after this one. `server_set`: the path of `announce`; none: nowhere."""
        super().__init__(
            hosts,
            session_seconds=SESSION_SECONDS,
            reread_seconds=reread_seconds,
            auth=[("digest", digest)],
            session=_kept_session(state_file),
        )
        self.view = View()
        self.server_set_problem = ""  # why this server can't be found there, and the cure
        self._cluster = cluster
        self._root = f"{_ROOT}/{cluster}"
        self._digest = digest
        self._state_file = state_file
        self._on_view = on_view
        self._loop = loop
        self._member_data, self._is_described = b"", False
        self._server_set = server_set
        self._endpoint: bytes | None = None
        self._announces = False
        self._kept: tuple[int, bytes] | None = None
        self._namesake_since: float | None = None

    # --- in the event loop ----------------------------------------------------------------

    def start(self, member_data: bytes) -> None:
        """Become a member. `member_data`: JSON with this server's name as `server`."""
        self._member_data = member_data
        self.begin()

    def describe(self, member_data: bytes) -> None:
        """Set what our member node is to hold, in this session and later ones. Until this is
        called, a node that an earlier coordinator has left in this session stays as it is."""
        if not self._is_described or member_data != self._member_data:
            self._member_data, self._is_described = member_data, True
            self.poke()

    def announce(self, endpoint: bytes | None) -> None:
        """Have clients find this server (`endpoint_of`) in the server set; None: not any more.
        Before the first call the coordinator before this one is still believed."""
        if self._server_set and (not self._announces or endpoint != self._endpoint):
            self._endpoint, self._announces = endpoint, True
            self.poke()

    async def write(
        self, path: str, data: bytes | None, version: int | None, *, as_leader: bool
    ) -> int:
        """Set the node `path` (`config`, `servers/jobs-1`), which has this version, and return its
        next one. No version: create it. No data: delete it. `as_leader`: only if we lead. Raises
        Conflict, NotConnected."""
        assert data is None or len(data) <= MOST_DATA_BYTES
        if as_leader and not self.view.leads:
            raise Conflict(f"{path}: this server does not lead")
        client, member = self._client, self.view.own if as_leader else ""
        if client is None or not client.connected or self._is_ending:
            raise NotConnected(f"{path}: ZooKeeper can't be asked")
        write = (path, data, version)
        try:
            return await asyncio.to_thread(_write, client, self._root, self._digest, write, member)
        except Unanswered as error:
            raise NotConnected(f"{path}: {error!r}") from error

    def stop(self, *, leave: bool) -> None:
        """End the session if this server is to `leave`, and wait until ZooKeeper knows, if it can
        be asked: for threads. Else others take us for alive until its time-out."""
        self.end(close_session=leave)
        if leave:
            self.join()
            self._state_file.unlink(missing_ok=True)

    # --- in the thread --------------------------------------------------------------------

    def look(self, client: KazooClient) -> bool:
        session = client.client_id
        if session is None:
            return False
        if session != self._kept:
            # A ZooKeeper that lags is found out only by a client that has seen more.
            self.ask(client.sync_async(self._root))
            self._keep(session)
        try:
            view = self._read(client, session[0])
        except (NoNodeError, NoAuthError) as error:
            view = self._refused(_problem(error, self.hosts, self._cluster))
        if client.client_id != session:  # some of it may have been read in the next one
            return False
        self._tell(view)
        if self._announces:
            self._keep_announced(client, session[0], self._endpoint if view.own else None)
        return view.own != ""

    def away(self) -> None:
        self._tell(self.view._replace(connected=False))

    def _refused(self, problem: str) -> View:
        return self.view._replace(own="", connected=False, problem=problem)

    def _read(self, client: KazooClient, session: int) -> View:
        if self.ask(client.get_async(f"{self._root}/format", self.poke))[0] != FORMAT:
            return self._refused(
                f"the nodes of cluster {self._cluster} have a format that release {__version__} "
                "can't read; install that of the other servers"
            )
        folder, name = f"{self._root}/members", _server_in(self._member_data)
        members = _read_folder(client, folder, self.poke)
        mine = [node for node, found in members.items() if found.session == session]
        others = {node: found for node, found in members.items() if found.session != session}
        namesake = next((n for n, found in others.items() if _server_in(found.data) == name), "")
        if namesake and not (mine and mine[0] < namesake):
            for surplus in mine:
                self.ask(client.delete_async(f"{folder}/{surplus}"))
            now = time.monotonic()
            self._namesake_since = self._namesake_since or now
            if now - self._namesake_since > 2 * self.negotiated_seconds:
                return self._refused(
                    f"another server of cluster {self._cluster} is called {name}, too, and lives; "
                    "stop it, or give this one another name (`server` in etc/local.yaml)"
                )
            # It may be ourselves, in a session that is about to end.
            return _view(client, self._root, members, self.poke)
        self._namesake_since = None
        if not mine:
            self._make(client, f"{folder}/m-", self._member_data, _acl(self._digest))
        elif len(mine) > 1:  # an answer was lost
            self.ask(client.delete_async(f"{folder}/{mine[1]}"))
        elif self._is_described and members[mine[0]].data != self._member_data:
            self.ask(client.set_async(f"{folder}/{mine[0]}", self._member_data))
        else:
            return _view(client, self._root, members, self.poke)._replace(own=mine[0])
        return self._read(client, session)

    def _make(self, client: KazooClient, path: str, data: bytes, acl: list[Any]) -> None:
        """Make a node that is numbered, and ends with the session."""
        self.ask(client.create_async(path, data, acl, ephemeral=True, sequence=True))

    def _keep_announced(self, client: KazooClient, session: int, endpoint: bytes | None) -> None:
        """Keep one node of this session, with this endpoint; or none."""
        path, problem = self._server_set, ""
        acl = [*_acl(self._digest), make_acl("world", "anyone", read=True)]
        try:
            if endpoint is not None and self.ask(client.exists_async(path)) is None:
                # On its way there others may have sets beside it.
                anyone = make_acl("world", "anyone", create=True)
                parent = path.rpartition("/")[0] or "/"
                self.ask(client.ensure_path_async(parent, [*acl, anyone]))
                with contextlib.suppress(NodeExistsError):
                    self.ask(client.create_async(path, b"", acl))
            found = _read_folder(client, path, self.poke)
            mine = {name: one.data for name, one in found.items() if one.session == session}
            right = [name for name, data in mine.items() if data == endpoint][:1]
            if endpoint is not None and not right:
                self._make(client, f"{path}/{SET_MEMBER}", endpoint, acl)
            for name in mine.keys() - set(right):
                self.ask(client.delete_async(f"{path}/{name}"))
        except NoNodeError:
            pass  # nothing is announced there
        except NoAuthError:
            problem = (
                f"server_set_path: {path} in ZooKeeper belongs to others; choose another path, or "
                "have ZooKeeper's administrator delete that"
            )
        except Unanswered as error:  # what matters more was done
            problem = f"server_set_path: {path} in ZooKeeper can't be used: {error!r}"
        self.server_set_problem = problem

    def _tell(self, view: View) -> None:
        before, self.view = self.view, view
        if view == before:
            return
        is_told = (before.connected, before.problem) == (False, view.problem)
        if not (view.connected or is_told or self._is_ending):
            log.warning("%s", view.problem or f"ZooKeeper at {self.hosts} is out of reach")
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._on_view, view)

    def _keep(self, session: tuple[int, bytes]) -> None:
        if self._is_ending:
            return
        self._kept = session
        log.info("ZooKeeper: session %#x", session[0])
        kept = {"place": process_place(), "id": session[0], "password": session[1].hex()}
        try:
            replace_file(self._state_file, json.dumps(kept).encode())
        except OSError as error:
            log.error("the session with ZooKeeper can't be kept: %s", error)


def _kept_session(state_file: Path) -> tuple[int, bytes] | None:
    """Read the session of an earlier process of this deployment; None if there is none, or if it is
    of another machine, of whose folder this one is a copy."""
    try:
        kept = json.loads(state_file.read_bytes())
        if kept["place"] == process_place():
            return int(kept["id"]), bytes.fromhex(kept["password"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


# --- a cluster's nodes ------------------------------------------------------------------------


def _read_folder(client: KazooClient, path: str, watch: Any = None) -> Mapping[str, Node]:
    """Read the nodes there, by name; those that are numbered have names of one length."""
    names = Watcher.ask(client.get_children_async(path, watch))
    calls = {name: client.get_async(f"{path}/{name}", watch) for name in sorted(names)}
    found = {}
    for name, call in calls.items():
        with contextlib.suppress(NoNodeError):  # gone since: the folder's watch tells
            data, stat = Watcher.ask(call)
            found[name] = Node(data, stat.version, stat.ctime, stat.ephemeralOwner)
    return found


def _view(client: KazooClient, root: str, members: Mapping[str, Node], watch: Any = None) -> View:
    servers = _read_folder(client, f"{root}/servers", watch)
    nodes = _read_folder(client, root, watch)
    others = {name: node for name, node in nodes.items() if name not in {"members", "servers"}}
    member_data = {name: node.data for name, node in members.items()}
    return View(member_data, servers, others, connected=True)


def _write(
    client: KazooClient,
    root: str,
    digest: str,
    write: tuple[str, bytes | None, int | None],
    member: str = "",
) -> int:
    """Write only while the node of `member` is there, which as long as it is has the same place
    among all. Raises Conflict."""
    name, data, version = write
    path = f"{root}/{name}"
    transaction = client.transaction()
    if member:
        transaction.check(f"{root}/members/{member}", -1)
    if data is None:
        transaction.delete(path, -1 if version is None else version)
    elif version is None:
        transaction.create(path, data, _acl(digest))
    else:
        transaction.set_data(path, data, version)
    return _commit(transaction, name)


def _commit(transaction: Any, name: str) -> int:
    """Commit; return the version that the last one has now. Raises Conflict."""
    results = Watcher.ask(transaction.commit_async())
    for result in results:  # what fails has its error, all others one of these two
        if isinstance(result, Exception):
            if isinstance(result, NoAuthError):
                raise result
            if not isinstance(result, RolledBackError | RuntimeInconsistency):
                raise Conflict(f"{name}: {type(result).__name__}")
    return int(getattr(results[-1], "version", 0))


def _acl(digest: str) -> list[Any]:
    return [make_digest_acl(*digest.split(":", 1), all=True)]


def _server_in(member_data: bytes) -> object:
    try:
        return json.loads(member_data)["server"]
    except (ValueError, KeyError, TypeError):
        return None


def _problem(error: Exception, hosts: str, cluster: str) -> str:
    where = f"ZooKeeper at {hosts}"
    if isinstance(error, NoNodeError):
        return (
            f"{where} has no cluster {cluster}; make it with `pinlaterd cluster init`, or if its "
            "data was lost with `pinlaterd cluster init --restore`"
        )
    if isinstance(error, NoAuthError):
        return (
            f"{where}: cluster {cluster} was made with another key than etc/cluster.key; copy that "
            f"of one of its servers; if none of yours has made it, {NAME_CURE} {_ROOT}/{cluster}"
        )
    return f"{where} does not answer: {error!r}"


# --- the server set ---------------------------------------------------------------------------


def endpoint_of(host: str, port: int, stats_port: int | None = None) -> bytes:
    """Encode the address of a server as Finagle reads it."""
    stats = {} if stats_port is None else {"stats": {"host": host, "port": stats_port}}
    endpoint = {"host": host, "port": port}
    member = {"serviceEndpoint": endpoint, "additionalEndpoints": stats, "status": "ALIVE"}
    return json.dumps({**member, "shard": 0}).encode()


# --- for commands, which wait -----------------------------------------------------------------


def create_cluster(hosts: str, cluster: str, digest: str, nodes: Mapping[str, bytes]) -> None:
    """Make a cluster, with these nodes (`config`, `servers/jobs-1`), all at once. Raises Conflict
    if there is one of this name; DeploymentError if ZooKeeper can't be asked."""
    root = f"{_ROOT}/{cluster}"
    with _connection(hosts, cluster, digest) as client:
        with contextlib.suppress(NodeExistsError):
            # Clusters with other keys may be made beside it.
            anyone = make_acl("world", "anyone", create=True)
            client.create(_ROOT, b"", [*_acl(digest), anyone])
        transaction = client.transaction()
        for path in (root, f"{root}/members", f"{root}/servers"):
            transaction.create(path, b"", _acl(digest))
        for name, data in nodes.items():
            transaction.create(f"{root}/{name}", data, _acl(digest))
        try:
            _commit(transaction, cluster)
        except NoAuthError as error:
            what = "belongs to others; have ZooKeeper's administrator delete that node"
            raise DeploymentError(f"ZooKeeper at {hosts}: {_ROOT} {what}") from error


def read_cluster(hosts: str, cluster: str, digest: str) -> View:
    """Raises DeploymentError: no such cluster, another key, ZooKeeper can't be asked."""
    root = f"{_ROOT}/{cluster}"
    with _connection(hosts, cluster, digest) as client:
        client.sync(root)
        return _view(client, root, _read_folder(client, f"{root}/members"))


def change_cluster(
    hosts: str, cluster: str, digest: str, path: str, data: bytes | None, version: int | None
) -> int:
    """Write as Session.write does. Raises Conflict, and DeploymentError like read_cluster."""
    with _connection(hosts, cluster, digest) as client:
        return _write(client, f"{_ROOT}/{cluster}", digest, (path, data, version))


@contextlib.contextmanager
def _connection(hosts: str, cluster: str, digest: str) -> Iterator[KazooClient]:
    auth = [("digest", digest)]
    client = KazooClient(hosts, timeout=SESSION_SECONDS, auth_data=auth, logger=KAZOO_LOG)
    try:
        client.start(START_SECONDS)
        yield client
    except Unanswered as error:
        raise DeploymentError(_problem(error, hosts, cluster)) from error
    finally:
        client.stop()
        client.close()
