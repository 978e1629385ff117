"""The Failover seam: how a replica becomes the master of the shards that its server copies.

Beside the engines' own contract, for the administration of shards, never for the job path. An
engine whose servers replicate has one; `engines.make_failover` finds it. It knows servers and
replication; shards.yaml, questions to people and the memory of how far one has come are its
caller's.

What the caller guarantees:
  - `shards` are all shards that the deployment has on the master: a server fails over as a whole;
  - steps run in their order; after a crash they run again from the first one, or from behind the
    last one that was done and is not `revocable`;
  - what steps note is kept before `put` returns, and read again after a crash.

What a Failover guarantees:
  - each step may be repeated, whatever a crash in it left behind, and says what that is;
  - until a step that is not `revocable` begins, `undo` puts everything back as it was;
  - unless loss was accepted, the replica becomes writable only when it was proven to have all that
    the master has acknowledged, and the master takes no writes any more;
  - foreign exceptions leave it as StorageError only.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from pinlaterd.config.schema import Address
from pinlaterd.errors import StorageError

PROOF_WORDS = (
    "replication is asynchronous: without its master a replica can't prove that it was sent all"
    " that was acknowledged"
)


class Closable(Protocol):
    def close(self) -> None: ...


S = TypeVar("S", bound=Closable)


def is_same_server(one: Address, other: Address) -> bool:
    """Tell whether two addresses name one server, as far as names can be resolved."""
    if one == other:
        return True
    same_host = not _addresses(one.host).isdisjoint(_addresses(other.host))
    return one.port == other.port and same_host


@dataclass(frozen=True)
class Account:
    """The account with which a server is administered, or asked by a replica; "" for none."""

    user: str = ""
    passwd: str = field(default="", repr=False)


class Pair(NamedTuple):
    """The master, and the replica that is to take its place."""

    master: Address
    replica: Address


@dataclass(frozen=True)
class Handover:
    """The goal and the limits of a failover, whichever servers it is between."""

    shards: Sequence[str]
    administrator: Account
    replication: Account  # as whom the old master asks the new one for what it has missed
    accept_loss: bool
    catch_up_seconds: float  # the longest that writes are stopped for while the replica catches up


class ServerFacts(NamedTuple):
    """One server as it was found. Positions are in the words of its kind; "" where unknown."""

    address: str
    failure: str = ""  # why it can't be asked; "" if it answers
    writable: bool | None = None
    replicates_from: str = ""  # HOST:PORT, "" if it replicates from nobody
    written: str = ""  # how far it has written, as a master
    received: str = ""  # how far it was sent what its master wrote, as a replica
    applied: str = ""  # how much of that it has carried out
    behind_seconds: float | None = None


class Examination(NamedTuple):
    """Both servers, and why one should hesitate.

    `obstacles`: why it can't be done, whatever is accepted. `risks`: how jobs whose enqueue was
    answered could be lost; with none of both, none can. `remarks`: what else to know."""

    master: ServerFacts
    replica: ServerFacts
    obstacles: Sequence[str]
    risks: Sequence[str]
    remarks: Sequence[str] = ()


class Step(NamedTuple):
    """One part of a failover. `run` returns what was done, for people; raises StorageError."""

    name: str  # how it is remembered
    words: str  # what it will do, for the plan
    run: Callable[[], str]
    revocable: bool = False  # whether `undo` can still put everything back


class Notes(Protocol):
    """The notes that one step leaves for later ones, kept over crashes."""

    def get(self, key: str) -> str:
        """Return the note, or "" if there is none."""

    def put(self, key: str, text: str) -> None:
        """Keep a note, on disk when this returns."""


class Failover(Protocol):
    """One failover. Blocking; to be closed, which gives nothing back that was changed."""

    def examine(self) -> Examination:
        """Look, and change nothing."""

    def steps(self) -> Sequence[Step]:
        """Yield the steps until the replica is the master and takes writes."""

    def last_steps(self) -> Sequence[Step]:
        """Yield the steps once shards.yaml names the new master: what becomes of the old one. What
        such a step can't do it returns as what is to be done by hand; it does not fail for that."""

    def successor(self) -> Address:
        """Return the server that is the master once the steps are done."""

    def undo(self) -> None:
        """Put everything back as it was, after a revocable step has failed or was interrupted."""

    def close(self) -> None:
        """Close the connections. Safe to repeat."""


class PairFailover(Failover, Generic[S]):
    """A failover between two servers, as far as it does not depend on their kind. Connections to
    them are made when they are first needed, and kept."""

    def __init__(self, pair: Pair, handover: Handover, notes: Notes) -> None:
        self._pair = pair
        self._handover = handover
        self._notes = notes
        self._unreachable = ""  # why the old master does not answer
        self._master: S | None = None
        self._replica: S | None = None

    def _connect(self, place: Address) -> S:
        """Raises StorageError."""
        raise NotImplementedError

    def close(self) -> None:
        for server in (self._master, self._replica):
            if server is not None:
                server.close()
        self._master = self._replica = None

    def successor(self) -> Address:
        return self._pair.replica

    def _old(self) -> S | None:
        """Connect to the old master; None, and why in `_unreachable`, if it does not answer."""
        if self._master is None and not self._unreachable:
            try:
                self._master = self._connect(self._pair.master)
            except StorageError as error:
                self._unreachable = error.message
        return self._master

    def _answering_old(self) -> S:
        old = self._old()
        if old is None:
            raise StorageError(self._unreachable)
        return old

    def _new(self) -> S:
        if self._replica is None:
            self._replica = self._connect(self._pair.replica)
        return self._replica

    def _go_on_without_master(self) -> None:
        """Raises StorageError unless loss was accepted."""
        if not self._handover.accept_loss:
            raise StorageError(f"{self._unreachable}; {PROOF_WORDS}")


def _addresses(host: str) -> frozenset[str]:
    with contextlib.suppress(OSError):
        return frozenset(str(found[4][0]) for found in socket.getaddrinfo(host, None))
    return frozenset()
