"""The control channel: what processes tell the coordinator, and what it tells them.

    process (DEALER) -> coordinator (ROUTER)    a Report, once a second and after each Snapshot;
                                                when nothing changed, a Heartbeat
    router -> coordinator                       a RateReport: what it holds, and what is wanted
                                                a Mend: how many jobs a call has changed
    shard -> coordinator                        a PermitReport: permits for jobs of limited queues
    coordinator -> process                      the Snapshot, to each newcomer, and to all on change
    coordinator -> router                       a RateGrant: its share of each limited queue
    coordinator -> shard                        a PermitGrant, after its reports
    coordinator -> process                      a DetailsQuestion, answered with Details, while
                                                somebody looks at the dashboard

In a cluster, coordinators talk to each other in the same way, over TCP with CURVE:

    server -> leader                            a ServerReport, for a router's RateReport
    leader -> server                            a ServerGrant
    coordinator -> any other                    a Question, which is answered

A report carries only the figures that changed since the one before. A process that gets a Snapshot
sends all of its figures next: so a restarted coordinator, which answers heartbeats of processes it
does not know with the Snapshot, soon knows everything again. All messages are JSON.

Grants are numbered upward, over restarts of the coordinator too; a router ignores one that is
not greater than the last, and confirms each by a report that bears its number. The coordinator
keeps what each router may hold in run/rates.json: for a coordinator that is restarted, and for a
router that starts while there is none.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
import zmq

from pinlaterd.config import layout
from pinlaterd.lifecycle import process_place
from pinlaterd.model import JobState
from pinlaterd.stats import Changes, Stats, StatsSnapshot
from pinlaterd.wire.curve import ClusterKey
from pinlaterd.wire.envelope import READABLE
from pinlaterd.wire.key_placement import KeyPlacement

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MESSAGES_IN_TRANSIT = 100  # for each process; a process that can't send just tries again
_LINGER_MS = 200  # for the last report of a process that ends
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 1000

Rates = Mapping[str, Annotated[float, msgspec.Meta(ge=0)]]  # by queue


TAKES_JOBS = "takes jobs"  # a fact of shards: "no" while the store refuses them
UNHEALTHY_SHARDS = "unhealthy shards"  # a fact of routers: names, with a comma and a space between


class MalformedMessage(Exception):
    """Bytes that no process of this version sends."""


class ProcessState(StrEnum):
    """The state that a process reports."""

    STARTING = "starting"
    STANDBY = "standby"  # another process owns the shard's store
    SERVING = "serving"
    STOPPING = "stopping"


class RouterId(NamedTuple):
    """One router process: its name under supervisord, and which of that name."""

    process: str
    pid: int
    started_at_ms: int


class ShardEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A shard; in a cluster also its owner's server, epoch and address, and who is to follow."""

    name: str
    dequeue_only: bool
    server: str = ""
    epoch: int = 0
    endpoint: str = ""  # of ZeroMQ, for other servers
    next: str = ""  # a server that prepares to become the owner
    planned: bool = False  # whether the owner before lived when this one was chosen
    slot: int = 0  # its port, behind a server's first port for shards
    joining: bool = False  # routers do not know it yet: it has not served


class _Message(msgspec.Struct, tag=True): ...


class Heartbeat(_Message):
    """The process lives, and nothing that it reported has changed."""


class Report(_Message):
    """The report of a process. `stats`: all figures if `full`, else those that changed."""

    process: str  # as supervisord names it: router, shard-1, …
    kind: str  # router, shard
    pid: int
    started_at_ms: int
    state: ProcessState
    facts: Mapping[str, str]
    stats: StatsSnapshot
    full: bool = True
    config_version: int = 0  # of the configuration that it follows
    dropped: tuple[str, ...] = ()  # names of figures that went, before `stats` came
    snapshot_version: int = 0  # of the last that came, which it follows; 0: none has come yet

    @property
    def changes(self) -> Changes:
        return Changes(self.stats, self.dropped)


class RateReport(_Message):
    """The rates that a router spends and wants. `grant`: the last that it follows, 0: none yet."""

    router: RouterId
    grant: int
    shares: Rates  # jobs/s that it may spend, by limited queue
    demands: Rates  # jobs/s that its clients take or would; those that are 0 left out
    returned: Rates  # tokens that it gave up because `grant` cut its shares


class Snapshot(_Message):
    """The state on which all processes have to agree. A later one has a greater version."""

    version: int
    shards: tuple[ShardEntry, ...]
    generated_at_ms: int
    config_version: int = 0  # what run/config.json holds by now; a later one may be there
    server: str = ""  # this server's name in its cluster; empty: there is no other
    member: str = ""  # its member node
    members: tuple[str, ...] = ()  # the member nodes that live
    keys: KeyPlacement = KeyPlacement()

    def endpoint_of(self, entry: ShardEntry) -> str:
        """Return the address of the shard's owner for processes of this server, or ""."""
        return layout.shard_endpoint(entry.name) if entry.server == self.server else entry.endpoint


class RateGrant(_Message):
    """The rates that a router may spend from now on; queues not in `shares` have no limit."""

    number: int
    shares: Rates  # jobs/s
    credits: Rates  # tokens that others gave up for it, once


class HeldPermits(NamedTuple):
    """The permits for jobs of one queue in one state (`max_in_progress`, `max_pending`), as a shard
    has them."""

    grant: int  # the last that is followed; 0: none yet
    permits: int
    used: int  # jobs in the state; more than permits after these were cut
    ready: int  # jobs that are to get into it

    @property
    def waits(self) -> bool:
        """Whether jobs wait for which there is no permit."""
        return self.ready > max(0, self.permits - self.used)

    @property
    def held(self) -> int:
        """The jobs that may be in the state until the shard reports again."""
        return max(self.permits, self.used)


class GrantedPermits(NamedTuple):
    """The permits that a shard has for jobs of one queue from now on. `contested`: jobs wait for
    permits: for IN_PROGRESS, what the shard does not need is to be handed back; for PENDING, there
    is no room for them anywhere."""

    number: int
    permits: int
    contested: bool


class PermitReport(_Message):
    """The permits of a shard that have changed, as the owner of its store reports them."""

    shard: str
    pid: int  # of its process; 0: on another server
    incarnation: int  # of the ownership
    state: JobState
    queues: Mapping[str, HeldPermits]


class PermitGrant(_Message):
    """The permits that a shard has for jobs of these queues; another ownership of its store than
    the one whose report they follow from must not have them."""

    shard: str
    incarnation: int
    state: JobState
    queues: Mapping[str, GrantedPermits]


class SourceCalls(NamedTuple):
    """The last calls of a source for a queue, as a router saw them: seconds ago; None: never."""

    queue: str
    source: str
    dequeue_seconds: float | None
    ack_seconds: float | None


class SourceWork(NamedTuple):
    """The work of a source for a queue on a shard, since that began to count or lately."""

    queue: str
    source: str
    jobs: int  # that it was handed
    failed: int  # attempts


class FailureCount(NamedTuple):
    """Attempts of a queue that failed alike, since a shard began to count them."""

    queue: str
    signature: str
    attempts: int
    first_ms: int
    last_ms: int
    by_minute: Sequence[int]  # of the last hour, the oldest first


class DetailsQuestion(_Message):
    """A question of the coordinator for what a process knows of callers and failures."""

    whole: bool = False  # all of it, and not only what a frame shows


class Details(_Message):
    """The callers that a router knows, or the failures that a shard knows."""

    whole: bool = False  # whether it is everything
    seconds: float = 0  # for how long a router has known; 0: it is none
    unasked: Mapping[str, float] = {}  # seconds since somebody asked for jobs of a queue
    failures: Mapping[str, Mapping[str, int]] = {}  # of the last minute, by queue and signature
    failed_in_hour: Mapping[str, int] = {}  # attempts, by queue
    calls: Sequence[SourceCalls] = ()
    work: Sequence[SourceWork] = ()
    recent_work: Sequence[SourceWork] = ()  # of the last minutes
    failure_counts: Sequence[FailureCount] = ()


class Mend(_Message):
    """Jobs of a queue that calls have changed: `retryFailedJobs` or `deleteJobs`, how many."""

    queue: str
    method: str
    jobs: int


class ServerReport(_Message):
    """The rates that a server reports to the cluster's leader. Its routers count as one, whose pid
    is the number of its member node."""

    term: str  # of the leader's that it follows; empty: of none yet
    report: RateReport
    held: Rates  # jobs/s that its routers may be spending, where that is more than its share
    admitted: tuple[str, ...]  # member nodes whose routers a shard here may still serve


class ServerGrant(_Message):
    """The rates that a server's routers may spend; without a grant: that reports have to name
    `term`, which a leader chooses when it begins to lead. Grants of an earlier term are ignored."""

    term: str
    member: str  # the member node that it is for
    grant: RateGrant | None = None


class StatusQuestion(_Message):
    """A question for the status of a server, as in its /status.json."""

    statistics: bool = False  # the figures by process, too


class FrameQuestion(_Message):
    """A question for what has happened on a server in the last seconds."""


class HoldingQuestion(_Message):
    """A question for the jobs that a shard there still holds."""

    shard: str


class HistoryQuestion(_Message):
    """A question for the history of a queue, shard or process (`kind`) since a time, by points of
    so many milliseconds where it has them, else by longer ones."""

    kind: str
    name: str
    since_ms: int
    step_ms: int


class OutlinesQuestion(_Message):
    """A question for a series of all queues over the last hour, by so many points."""

    series: str
    points: int


class EventsQuestion(_Message):
    """A question for the marks since a time."""

    since_ms: int


PeerQuestion = (
    StatusQuestion
    | HoldingQuestion
    | FrameQuestion
    | HistoryQuestion
    | OutlinesQuestion
    | EventsQuestion
    | DetailsQuestion
)


class Question(_Message):
    number: int
    about: PeerQuestion


class PeerAnswer(_Message):
    """`body`: JSON."""

    number: int  # of the question
    body: msgspec.Raw


Message = (
    Heartbeat
    | Report
    | RateReport
    | Snapshot
    | RateGrant
    | PermitReport
    | PermitGrant
    | DetailsQuestion
    | Details
    | Mend
    | ServerReport
    | ServerGrant
    | Question
    | PeerAnswer
)

pack: Callable[[Message], bytes] = msgspec.json.Encoder().encode
_unpack: Callable[[bytes], Message] = msgspec.json.Decoder(Message).decode
_HEARTBEAT = pack(Heartbeat())


def unpack(message: bytes) -> Message:
    """Raises MalformedMessage."""
    try:
        return _unpack(message)
    except ValueError as error:
        raise MalformedMessage(str(error)) from error


# --- files ----------------------------------------------------------------------------------


def write_snapshot(snapshot: Snapshot, path: Path = layout.SNAPSHOT_FILE) -> None:
    layout.replace_file(path, pack(snapshot))


def read_snapshot(path: Path = layout.SNAPSHOT_FILE) -> Snapshot | None:
    """Read the last snapshot, for a process that starts while there is no coordinator; None if
    there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Snapshot)
    except (OSError, ValueError):
        return None


class Holding(NamedTuple):
    """The most that a router may be spending (jobs/s by queue), as of the grant `number`; without
    a name: this server's share in its cluster."""

    router: RouterId
    number: int
    shares: Rates


class NoteFile(Generic[T]):
    """A file in which the coordinator notes what processes hold."""

    def __init__(self, path: Path, decoder: msgspec.json.Decoder[tuple[str, list[T]]]) -> None:
        self._path = path
        self._decoder = decoder  # of the place where they were noted, and of the notes

    def write(self, notes: Sequence[T]) -> None:
        layout.replace_file(self._path, msgspec.json.encode((process_place(), notes)))

    def read(self) -> Sequence[T]:
        """Return what was noted; nothing if there is no file that can be read, or it is from before
        the machine or the container was started: all that held anything have ended, and their pids
        are others' by now."""
        try:
            place, notes = self._decoder.decode(self._path.read_bytes())
        except (OSError, ValueError):
            return []
        return notes if place == process_place() else []


HOLDINGS = NoteFile(layout.RATES_FILE, msgspec.json.Decoder(tuple[str, list[Holding]]))


# --- both ends ------------------------------------------------------------------------------


def _new_socket(kind: int, context: zmq.Context[Any] | None) -> zmq.Socket[bytes]:
    """Raises OSError if no more files can be opened."""
    try:
        found: zmq.Socket[bytes] = (context or zmq.Context.instance()).socket(kind)
    except zmq.ZMQError as error:
        raise OSError(error.errno, str(error)) from error
    return found


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & READABLE)


_Reported = tuple[ProcessState, dict[str, str], int]  # the last: the configuration that is followed


class PeerClient:
    """An end that connects to a coordinator. Never blocks, and never fails because that is away.

    The owner calls `receive` when `fileno()` is readable and after each message that it sends: the
    descriptor is edge-triggered."""

    def __init__(
        self,
        endpoint: str,
        *,
        context: zmq.Context[Any] | None = None,
        key: ClusterKey | None = None,
    ) -> None:
        """`key`: of the cluster, for another server's coordinator. Raises OSError if there can be
        no further socket."""
        self._socket = _new_socket(zmq.DEALER, context)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, _MESSAGES_IN_TRANSIT)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        # nothing piles up for a coordinator that is away: what it needs is the latest
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        if key is not None:
            key.call(self._socket)
        self._socket.connect(endpoint)

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def send(self, message: bytes) -> bool:
        """Send a message; False if nobody is there to take it: it is lost."""
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def messages(self) -> Iterator[Message]:
        """Yield the messages that have arrived."""
        while _is_readable(self._socket):
            try:
                message = unpack(self._socket.recv(zmq.NOBLOCK))
            except MalformedMessage:
                log.error("what a coordinator says can't be read; going on as before")
            else:
                yield message

    def close(self) -> None:
        self._socket.close()


class ControlClient(PeerClient):
    """A process's end. The owner calls `report` once a second and when its state changes."""

    def __init__(
        self,
        process: str,
        kind: str,
        stats: Stats,
        started_at_ms: int,
        *,
        endpoint: str = layout.COORDINATOR_ENDPOINT,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        super().__init__(endpoint, context=context)
        self.process = process
        self.config_version = 0  # what the owner follows, for the next report
        self._snapshot_version = 0
        self._about = (process, kind, os.getpid(), started_at_ms)
        self._stats = stats
        # As the coordinator knows it; None: all is reported next, all figures included.
        self._reported: _Reported | None = None
        self._grants: list[RateGrant] = []  # received, not taken yet
        self._permits: list[PermitGrant] = []  # likewise
        self._question: DetailsQuestion | None = None

    def report(self, state: ProcessState, facts: Mapping[str, str]) -> None:
        """Report what has changed since the last report, or only that the process lives."""
        current = (state, dict(facts), self.config_version)
        changes, full = self._stats.take_changes(), self._reported is None
        if full:
            changes = Changes(self._stats.snapshot())
        message = _HEARTBEAT
        if full or changes or current != self._reported:
            report = Report(*self._about, state, facts, changes.now, full, self.config_version)
            report.dropped, report.snapshot_version = changes.dropped, self._snapshot_version
            message = pack(report)
        self._reported = current if self.send(message) else None

    def receive(self) -> Snapshot | None:
        """Return the latest snapshot that has come, if any."""
        latest: Snapshot | None = None
        for message in self.messages():
            if isinstance(message, RateGrant):
                self._grants.append(message)
            elif isinstance(message, PermitGrant):
                self._permits.append(message)
            elif isinstance(message, DetailsQuestion):
                self._question = message
            elif isinstance(message, Snapshot):
                latest = message
                self._snapshot_version = message.version
                self._reported = None
        return latest

    def take_grants(self) -> list[RateGrant]:
        """Take the grants that `receive` met on its way, in their order."""
        grants, self._grants = self._grants, []
        return grants

    def take_permits(self) -> list[PermitGrant]:
        """Take the grants of permits that `receive` met on its way, in their order."""
        grants, self._permits = self._permits, []
        return grants

    def take_question(self) -> DetailsQuestion | None:
        """Take the question that `receive` met on its way."""
        question, self._question = self._question, None
        return question

    def tell(self, message: Details | Mend | PermitReport | RateReport) -> None:
        """Send a message, which is lost if the coordinator is away: permits and rates are reported
        again after the next Snapshot."""
        self.send(pack(message))


class ControlServer:
    """The coordinator's end. `fileno()` is edge-triggered: `receive` until it returns nothing,
    also after each `send`."""

    def __init__(
        self,
        *,
        endpoint: str = layout.COORDINATOR_ENDPOINT,
        context: zmq.Context[Any] | None = None,
        key: ClusterKey | None = None,
    ) -> None:
        """`key`: of the cluster, for coordinators of other servers. Raises OSError if an address of
        theirs can't be had."""
        self._socket = _new_socket(zmq.ROUTER, context)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _MESSAGES_IN_TRANSIT)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        if key is None:
            self._socket.bind(endpoint)
            return
        try:
            key.listen(self._socket, endpoint)
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self) -> tuple[bytes, bytes] | None:
        """Return a peer and its message, for `unpack`; None if there is none."""
        # To ask costs less than the exception of a receive in vain, with which each look ends.
        if not _is_readable(self._socket):
            return None
        frames: Sequence[bytes] = self._socket.recv_multipart(zmq.NOBLOCK)
        return (frames[0], frames[1]) if len(frames) == 2 else (frames[0], b"")

    def send(self, peer: bytes, message: Message) -> None:
        """Send a message, but not to peers that have gone or do not read: a grant that is not
        confirmed in time has to be followed by another."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart((peer, pack(message)), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
