"""Rate limits in the coordinator's process: from what is configured and reported to what is sent.

    limits of queues.yaml, over the servers of the server set  ->  this server's part
                           or what the cluster's leader grants (coordinator/server_rates.py)
    this server's part, over its routers by the allocator      ->  grants

It has no timer: routers report or heartbeat at least once a second, and each time is a time to
look at what is due.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pinlaterd.clock import Clock
from pinlaterd.config.kinds import ROUTER
from pinlaterd.config.layout import (
    SERVER_SET_COPY,
    FileWatch,
    is_out_of_files,
    read_file,
    replace_file,
)
from pinlaterd.config.schema import Config, QueueSettings
from pinlaterd.coordinator.allocator import RateAllocator
from pinlaterd.stats import Stats
from pinlaterd.wire.control import HOLDINGS, ControlServer, Holding, RouterId

log = logging.getLogger(__name__)

_SERVER_ITSELF = RouterId("", 0, 0)
_MAX_BYTES = 1024 * 1024
_SERVER = re.compile(r"[A-Za-z0-9._-]{1,253}:[0-9]{1,5}|\[[0-9A-Fa-f:.]{2,45}\]:[0-9]{1,5}")


class RateControl:
    """The coordinator's part in rates. `allocator` hears of routers."""

    def __init__(
        self, config: Config, clock: Clock, stats: Stats, is_running: Callable[[int], bool]
    ) -> None:
        self._stats = stats
        server = config.server
        own = server.server_set_name or f"{server.advertised_host}:{server.port}"
        self._server_set: ServerSetFile | None = None  # None: this server has the rates alone
        self.unnoted = False  # whether what is held here has to be noted yet
        self.notes = 0  # how often it was
        self._note_failed = False
        self._surplus: dict[str, float] = {}
        if server.server_set_file and not server.cluster:
            self._server_set = ServerSetFile(Path(server.server_set_file), own)
        self._queues = config.queues
        noted = HOLDINGS.read()
        self.allocator = RateAllocator(
            clock,
            is_running,
            [holding for holding in noted if holding.router != _SERVER_ITSELF],
            ROUTER.programs(config),
            on_surplus=self._keep_surplus,
        )
        self._share: Mapping[str, float] | None = None  # this server's part in its cluster
        if server.cluster:
            shares = [holding.shares for holding in noted if holding.router == _SERVER_ITSELF]
            self._share = shares[0] if shares else {}
        self._limited: frozenset[str] = frozenset()  # those that have gauges
        self._set_limits()

    def configure(self, queues: Mapping[str, QueueSettings]) -> None:
        """Follow the queues' new settings."""
        self._queues = queues
        self._set_limits()

    @property
    def share(self) -> Mapping[str, float]:
        """This server's part in the cluster, jobs/s by queue."""
        return self._share or {}

    def follow(self, share: Mapping[str, float]) -> None:
        """Have routers spend `share` from now on."""
        if share != self._share:
            self._share, self.unnoted = dict(share), True
            self._set_limits()

    def take_surplus(self) -> Mapping[str, float]:
        """Take the tokens that nobody here wants, by queue."""
        surplus, self._surplus = self._surplus, {}
        return surplus

    def look(self) -> None:
        """Look whether the server set has changed. To be called a few times a second."""
        if self._server_set is not None and self._server_set.look():
            self._set_limits()

    def act(self, control: ControlServer) -> bool:
        """Send what follows from all that was heard; whether there was anything."""
        self._stats.gauge("server_set_problems", len(self.problems()))
        grants = self.allocator.due_grants()
        if self.allocator.note_due or self.unnoted:
            # Before any router may spend it: a coordinator that comes after us has to know.
            try:
                HOLDINGS.write(self._holdings())
                self.unnoted = self._note_failed = False
                self.notes += 1
            except OSError as error:
                # It will have to rely on what routers report.
                if not self._note_failed:
                    log.error("what routers hold can't be noted: %s", error)
                self.unnoted = self._note_failed = True
        for peer, grant in grants:
            control.send(peer, grant)
        return bool(grants)

    def problems(self) -> Sequence[str]:
        """Say what is wrong with the server set: where, what, and what would be right."""
        return () if self._server_set is None else self._server_set.problems

    def _set_limits(self) -> None:
        servers = 1 if self._server_set is None else len(self._server_set.servers)
        limits = limits_of(self._queues)
        if self._share is None:
            limits = {queue: limit / servers for queue, limit in limits.items()}
        else:
            limits = {queue: self._share.get(queue, 0.0) for queue in limits}
        self.allocator.set_limits(limits)
        for queue in self._limited - limits.keys():
            self._stats.drop_gauge(f"{queue}_rate_limit")
        for queue, limit in limits.items():
            self._stats.gauge(f"{queue}_rate_limit", limit)
        self._limited = frozenset(limits)

    def _holdings(self) -> Sequence[Holding]:
        own = () if self._share is None else (Holding(_SERVER_ITSELF, 0, self._share),)
        return [*self.allocator.holdings(), *own]

    def _keep_surplus(self, queue: str, tokens: float) -> None:
        if self._share is not None:
            self._surplus[queue] = self._surplus.get(queue, 0.0) + tokens


def limits_of(queues: Mapping[str, QueueSettings]) -> dict[str, float]:
    """Return the rates of all servers together, jobs/s by limited queue."""
    return {
        queue: settings.max_jobs_per_second
        for queue, settings in queues.items()
        if settings.max_jobs_per_second is not None
    }


# --- the server set -------------------------------------------------------------------------


class ServerSet(NamedTuple):
    """A server set file's content. With `problems` it must not be used."""

    servers: Sequence[str]
    problems: Sequence[str]


def read_server_set(text: str, name: str) -> ServerSet:
    """Read lines of HOST:PORT; a `#` begins a comment. `name`: the file's, for messages."""
    servers: dict[str, int] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        server = line.partition("#")[0].strip()
        if not server:
            continue
        port = server.rpartition(":")[2]
        if not _SERVER.fullmatch(server) or not 1 <= int(port) <= 65535:
            problems.append(
                f"{name}:{number}: {server[:80]!r} is no server; write HOST:PORT, a line each"
            )
        elif server in servers:
            problems.append(
                f"{name}:{number}: {server} stands in line {servers[server]} already; remove one"
            )
        else:
            servers[server] = number
    if not servers and not problems:
        problems.append(f"{name}: lists no server; write HOST:PORT, a line each")
    return ServerSet(tuple(servers), problems)


class ServerSetFile:
    """The servers that a file lists, which share the cluster's rates.

    The last good content is kept in run/, for a coordinator that starts while the file is bad.
    `servers`: HOST:PORT, each once, at least one; they stay while the file can't be read.
    `problems`: what is wrong with the file."""

    def __init__(self, path: Path, own: str, copy: Path = SERVER_SET_COPY) -> None:
        """`own`: this server, HOST:PORT, as the file should name it."""
        self._path = path
        self._own = own
        self._copy = copy
        self._watch = FileWatch([path], self._content)
        self.servers: Sequence[str] = self._last_good()
        self.problems: Sequence[str] = []
        self._take(*self._content())

    def look(self) -> bool:
        """Look whether the set has changed."""
        found = self._watch.look()
        return found is not None and self._take(*found)

    def _take(self, servers: Sequence[str], problems: Sequence[str]) -> bool:
        """Follow what was read, if it is good; whether that changes anything."""
        if problems:
            kept = f"still active: {', '.join(self.servers)}"
            problems = [f"{problem} ({kept})" for problem in problems]
        elif self._own not in servers:
            cure = "add it, or set server_set_name to what it is called there"
            problems = [f"{self._path}: does not list this server, {self._own}; {cure}"]
        for problem in problems:
            if problem not in self.problems:
                log.error("%s", problem)
        changed = bool(servers) and set(servers) != set(self.servers)
        if servers:
            self.servers = servers
            self._keep(servers)
        if changed:
            log.info("the server set is %s", ", ".join(servers))
        self.problems = problems
        return changed

    def _content(self) -> ServerSet:
        """Return the servers; none if there is anything wrong."""
        try:
            found = read_file(self._path, _MAX_BYTES + 1)
            if len(found) > _MAX_BYTES:
                return ServerSet((), [f"{self._path}: longer than {_MAX_BYTES} bytes"])
            servers, problems = read_server_set(found.decode(), str(self._path))
        except OSError as error:
            if is_out_of_files(error):
                raise
            return ServerSet((), [f"{self._path}: can't be read: {error.strerror}"])
        except UnicodeDecodeError:
            return ServerSet((), [f"{self._path}: is not valid UTF-8; write HOST:PORT lines"])
        return ServerSet(() if problems else servers, problems)

    def _last_good(self) -> Sequence[str]:
        try:
            servers, problems = read_server_set(self._copy.read_text(), str(self._copy))
        except (OSError, UnicodeDecodeError):
            return (self._own,)
        return (self._own,) if problems else servers

    def _keep(self, servers: Sequence[str]) -> None:
        try:
            replace_file(self._copy, "".join(f"{server}\n" for server in servers).encode())
        except OSError as error:
            log.warning("%s can't be written: %s", self._copy, error.strerror)
