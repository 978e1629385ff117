"""Which servers of the cluster are alive: what rates are divided by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Membership(Protocol):
    """The server set, as one of its members sees it."""

    @property
    def own(self) -> str:
        """This server, as the set names it: HOST:PORT."""
        ...

    def servers(self) -> Sequence[str]:
        """The live servers, this one included, each once. Never blocks; what was last known
        stays in force while the source can't be read."""
        ...


class Alone:
    """No server set: this server is the whole cluster."""

    def __init__(self, host: str, port: int) -> None:
        self._own = f"{host}:{port}"

    @property
    def own(self) -> str:
        return self._own

    def servers(self) -> Sequence[str]:
        return (self._own,)
