"""Which servers share the cluster's rates: none but this one, or those that a file lists.

Another source (ZooKeeper, say) is another class here, and a setting that chooses it. It relies on
the file system, and looks at it only when asked.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from pinlaterd.config.layout import SERVER_SET_COPY

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.4
_MAX_BYTES = 1024 * 1024
_SERVER = re.compile(r"[A-Za-z0-9._-]{1,253}:[0-9]{1,5}|\[[0-9A-Fa-f:.]{2,45}\]:[0-9]{1,5}")


class Membership(Protocol):
    """The server set, as one of its members sees it."""

    def servers(self) -> Sequence[str]:
        """The servers in it, HOST:PORT, each once; at least one. What was last known stays in
        force while the source can't be read."""
        ...

    def look(self) -> bool:
        """See whether the set has changed. Cheap, never blocks; to be called once a second or
        more often."""
        ...

    def problems(self) -> Sequence[str]:
        """What is wrong with the source: where, what, and what would be right."""
        ...


class Alone:
    """No server set: this server is the whole cluster."""

    def __init__(self, own: str) -> None:
        self._own = own

    def servers(self) -> Sequence[str]:
        return (self._own,)

    def look(self) -> bool:
        return False

    def problems(self) -> Sequence[str]:
        return ()


class ServerSet(NamedTuple):
    """A server set file's content. With `problems` it must not be used."""

    servers: Sequence[str]
    problems: Sequence[str]


def read_server_set(text: str, name: str) -> ServerSet:
    """Lines of HOST:PORT; what follows a `#` is a comment. `name`: the file's, for messages."""
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
    """The servers that a file lists. Whoever writes it need not replace it at once: a content
    counts only when the file is the same at two looks in a row.

    The last good content is kept in run/, for a coordinator that starts while the file is bad."""

    def __init__(
        self,
        path: Path,
        own: str,
        monotonic: Callable[[], float],
        copy: Path = SERVER_SET_COPY,
    ) -> None:
        """`own`: this server, HOST:PORT, as the file should name it."""
        self._path = path
        self._own = own
        self._monotonic = monotonic
        self._copy = copy
        self._looked_at = monotonic()
        self._seen: object = self._signature()
        self._read: object = self._seen
        self._servers: Sequence[str] = self._last_good()
        self._problems: Sequence[str] = []
        self._take(*self._content())

    def servers(self) -> Sequence[str]:
        return self._servers

    def problems(self) -> Sequence[str]:
        return self._problems

    def look(self) -> bool:
        now = self._monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = now
        before, self._seen = self._seen, self._signature()
        if self._seen != before or self._seen == self._read:
            return False
        self._read = self._seen
        return self._take(*self._content())

    def _take(self, servers: Sequence[str], problems: Sequence[str]) -> bool:
        """Put what was read in force, if it is good; whether that changes anything."""
        if problems:
            kept = f"still in force: {', '.join(self._servers)}"
            problems = [f"{problem} ({kept})" for problem in problems]
        elif self._own not in servers:
            cure = "add it, or set server_set_name to what it is called there"
            problems = [f"{self._path}: does not list this server, {self._own}; {cure}"]
        for problem in problems:
            log.error("%s", problem)
        changed = bool(servers) and set(servers) != set(self._servers)
        if servers:
            self._servers = servers
            self._keep(servers)
        if changed:
            log.info("the server set is %s", ", ".join(servers))
        self._problems = problems
        return changed

    def _content(self) -> ServerSet:
        """No servers if there is anything wrong."""
        try:
            with self._path.open("rb") as file:
                found = file.read(_MAX_BYTES + 1)
            if len(found) > _MAX_BYTES:
                return ServerSet((), [f"{self._path}: longer than {_MAX_BYTES} bytes"])
            servers, problems = read_server_set(found.decode(), str(self._path))
        except OSError as error:
            return ServerSet((), [f"{self._path}: can't be read: {error.strerror}"])
        except UnicodeDecodeError:
            return ServerSet((), [f"{self._path}: is not valid UTF-8; write HOST:PORT lines"])
        return ServerSet(() if problems else servers, problems)

    def _signature(self) -> object:
        try:
            found = self._path.stat()
        except OSError as error:
            return error.errno
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def _last_good(self) -> Sequence[str]:
        try:
            servers, problems = read_server_set(self._copy.read_text(), str(self._copy))
        except (OSError, UnicodeDecodeError):
            return (self._own,)
        return (self._own,) if problems else servers

    def _keep(self, servers: Sequence[str]) -> None:
        temporary = self._copy.with_name(f"{self._copy.name}.new")
        try:
            temporary.write_text("".join(f"{server}\n" for server in servers))
            temporary.replace(self._copy)
        except OSError as error:
            log.warning("%s can't be written: %s", self._copy, error.strerror)
