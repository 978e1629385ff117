"""Where a shard's Redis master is: at an address of its own, or where Sentinels say.

Sentinels agree on a master by majority, and number their agreements (the configuration's epoch).
One that was cut off may name a former master, so all are asked, and the latest agreement counts.
What they say is a hint, still: who connects sees to it that the server is a master.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pinlaterd.config.schema import SentinelSettings
from pinlaterd.engines.redis.connection import Connection, Server
from pinlaterd.errors import StorageError

_ANSWER_SECONDS = 2.0
_CONNECT_SECONDS = 1.0


class Locator(Protocol):
    """Finds the server that holds a shard at present. Server is one that never moves."""

    def find(self) -> Server:
        """Raises StorageError where nobody knows."""
        ...


class Agreement(NamedTuple):
    """What one Sentinel says. Compared by epoch."""

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


def _connected(sentinel: Server) -> closing[Connection]:
    return closing(Connection(sentinel, _ANSWER_SECONDS, connect_seconds=_CONNECT_SECONDS))


def sentinels_of(settings: SentinelSettings, user: str, passwd: str) -> Sentinels:
    """`user`, `passwd`: at the master, not at the Sentinels."""
    return Sentinels(
        settings.service,
        tuple(Server(*place, settings.user, settings.passwd) for place in settings.addresses),
        Server("", 0, user, passwd),
    )
