"""ZooKeeper as it is used here: a thread looks at what is there whenever it may have changed.

kazoo forgets watches when a connection ends, hangs calls that are made while there is none, and
may miss what happened in between. So watches and connections only say that it is time to look;
looking reads everything again, and is repeated now and then without a reason.

Imported only where a cluster or an address `zk://...` is used: kazoo need not be installed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

try:
    from kazoo.client import KazooClient, KazooState
    from kazoo.exceptions import KazooException, NoAuthError, NoNodeError
    from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
    from kazoo.hosts import collect_hosts
except ImportError as error:
    raise ImportError(
        "ZooKeeper needs the package kazoo; run `pip install pinlaterd[zookeeper]`"
    ) from error

from pinlaterd.client.addresses import AddressInvalid, ServerList
from pinlaterd.config.schema import Address

log = logging.getLogger(__name__)
# At DEBUG it would tell credentials; at WARNING, each attempt to connect during an outage.
KAZOO_LOG = logging.getLogger(f"{__name__}.kazoo")
KAZOO_LOG.setLevel(logging.ERROR)

REREAD_SECONDS = 10.0
SET_MEMBER = "member_"  # of a server set's nodes those of such names count, for Finagle, too
_CALL_SECONDS = 5.0
_CLIENTS_SESSION_SECONDS = 10.0
_CONNECT_SECONDS = 0.5
_RETRY_SECONDS = 1.0
# Then a client that has seen nothing: ZooKeepers that lost data refuse one that has (kazoo#42).
_GIVE_UP_SECONDS = 30.0

# What calls of kazoo's raise while ZooKeeper can't be asked, but also what it answers.
Unanswered = (KazooException, KazooTimeoutError)


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo is not annotated
    """kazoo's threads, and shorter time limits: for one host that is off or hangs kazoo allows the
    whole session's time-out, or a large part of it, and so loses the session."""

    def __init__(self, answer_seconds: float) -> None:
        super().__init__()
        self._answer_seconds = answer_seconds
        self._threads: list[threading.Thread] = []
        self.write_seconds = 0.0

    def spawn(self, func: Callable[..., Any], *arguments: Any, **options: Any) -> threading.Thread:
        thread: threading.Thread = super().spawn(func, *arguments, **options)
        self._threads.append(thread)
        return thread

    @property
    def has_ended(self) -> bool:
        """Whether a thread has: the connection's does after _GIVE_UP_SECONDS without any."""
        return not all(thread.is_alive() for thread in self._threads)

    def create_connection(self, *arguments: Any, timeout: float, **options: Any) -> Any:
        limit = min(timeout, _CONNECT_SECONDS)
        return super().create_connection(*arguments, timeout=limit, **options)

    def select(self, reading: Any, writing: Any, errors: Any, timeout: float) -> Any:
        if writing:
            self.write_seconds = timeout
        if len(reading) < 2:  # the socket alone, for an answer; with another it waits for anything
            timeout = min(timeout, self._answer_seconds)
        # kazoo makes and closes an epoll for each of these, several for a ping or an answer.
        poll = select.poll()
        for end in reading:
            poll.register(end, select.POLLIN)
        for end in writing:
            poll.register(end, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(timeout * 1000)}
        of_ready = ([end for end in ends if end.fileno() in ready] for ends in (reading, writing))
        return (*of_ready, [])


class Watcher(ABC):
    """A thread that owns a KazooClient. It calls `look` after each `poke`, which kazoo is given as
    a watch, at each connection, and every `reread_seconds`; or `away`, while there is none."""

    def __init__(
        self,
        hosts: str,
        *,
        session_seconds: float,
        reread_seconds: float = REREAD_SECONDS,
        auth: Sequence[tuple[str, str]] = (),
        session: tuple[int, bytes] | None = None,
    ) -> None:
        """`hosts`: HOST:PORT, with commas in between. `session`: id and password of one to go on
        with. Nothing is connected before `begin`. Raises ValueError for no hosts."""
        collect_hosts(hosts)
        self.hosts = hosts
        self._session_seconds = session_seconds
        self._reread_seconds = reread_seconds
        self._auth = auth
        self._session = session
        self._client: KazooClient | None = None
        self._handler = _Handler(session_seconds / 4)
        self._pokes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_ending = self._closes_session = False
        self._thread = threading.Thread(target=self._run, name="zookeeper", daemon=True)

    @abstractmethod
    def look(self, client: KazooClient) -> bool:
        """Read everything. Whether all is well: else it looks again in a second. May raise what is
        in Unanswered, which is as `away`."""

    @abstractmethod
    def away(self) -> None:
        """Note that ZooKeeper can't be asked."""

    def begin(self) -> None:
        self._thread.start()

    def poke(self, _event: object = None) -> None:
        """Have it look soon. From any thread."""
        self._pokes.put(None)

    def end(self, *, close_session: bool) -> None:
        """End without waiting. A session that is not closed goes on until the process ends, and
        then for its time-out."""
        self._closes_session = close_session
        self._is_ending = True
        self.poke()

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join(_CALL_SECONDS)

    @property
    def negotiated_seconds(self) -> float:
        """The session's time-out as granted; 0 until then. kazoo does not tell (kazoo#769), but has
        this part of it as its limit for writes."""
        return self._handler.write_seconds * len(self._client.hosts) if self._client else 0.0

    @staticmethod
    def ask(call: Any) -> Any:
        """Return the result of what a method `..._async` of kazoo's has begun."""
        return call.get(timeout=_CALL_SECONDS)

    def _run(self) -> None:
        patience = 0.0
        while not self._is_ending:
            with contextlib.suppress(queue.Empty):
                self._pokes.get(timeout=patience)
                while True:  # several are one
                    self._pokes.get_nowait()
            patience = self._reread_seconds if self._looks_well() else _RETRY_SECONDS
        self.away()
        if self._closes_session and self._client is not None:
            with contextlib.suppress(*Unanswered):
                self._client.stop()
                self._client.close()

    def _looks_well(self) -> bool:
        try:
            if self._client is None or self._handler.has_ended:
                self._connect()
            assert self._client is not None
            if self._client.state == KazooState.CONNECTED:
                self._session = self._client.client_id or self._session
                return self.look(self._client)
        except Unanswered as error:
            log.info("ZooKeeper at %s has not answered: %r", self.hosts, error)
        except Exception:
            log.exception("looking at ZooKeeper failed")
        self.away()
        return False

    def _connect(self) -> None:
        if self._client is not None:
            self._handler.stop()
            self._client.close()
        self._handler = _Handler(self._session_seconds / 4)
        self._client = KazooClient(
            self.hosts,
            timeout=self._session_seconds,
            client_id=self._session,
            handler=self._handler,
            auth_data=self._auth,
            connection_retry={
                "max_tries": -1,
                "max_delay": _RETRY_SECONDS,
                "deadline": _GIVE_UP_SECONDS,
            },
            logger=KAZOO_LOG,
        )
        self._client.add_listener(self.poke)
        try:
            self._client.start_async()
        except (OSError, RuntimeError):  # no more files, or no more threads
            self._handler.stop()
            self._client = None
            raise


class ZooKeeperList(Watcher, ServerList):
    """A server set: nodes whose JSON, as Finagle's, names an address each."""

    def __init__(self, name: str) -> None:
        ServerList.__init__(self, name)
        hosts, _, path = name.removeprefix("zk://").partition("/")
        try:
            super().__init__(hosts, session_seconds=_CLIENTS_SESSION_SECONDS)
        except ValueError:
            path = ""
        if not all(path.split("/")) or not name.startswith("zk://"):
            raise AddressInvalid(f"{name!r}: write zk://HOST:PORT,HOST:PORT/PATH")
        self._path = f"/{path}"
        self.problem = f"ZooKeeper at {hosts} does not answer"

    def refresh(self) -> None:
        if self._thread.ident is None:
            self.begin()

    def close(self) -> None:
        self.end(close_session=True)

    def look(self, client: KazooClient) -> bool:
        found: Sequence[Address] = ()
        problem = "none is announced there"
        try:
            names = self.ask(client.get_children_async(self._path, self.poke))
            members = sorted(name for name in names if name.startswith(SET_MEMBER))
            calls = [client.get_async(f"{self._path}/{name}", self.poke) for name in members]
            found = tuple(dict.fromkeys(filter(None, map(self._address, calls))))
        except NoNodeError:
            problem = f"there is no {self._path}"
        except NoAuthError:
            problem = f"not everyone may read {self._path}"
        self._take(found, problem)
        return bool(found)

    def away(self) -> None:
        """Keep what was read before, while ZooKeeper is unavailable."""

    def _address(self, call: Any) -> Address | None:
        try:
            member = json.loads(self.ask(call)[0])
            host, port = (member["serviceEndpoint"][key] for key in ("host", "port"))
        except (NoNodeError, ValueError, KeyError, TypeError):  # it went, or is something else
            return None
        if member.get("status") != "ALIVE" or not isinstance(host, str) or type(port) is not int:
            return None
        return Address(host, port)
