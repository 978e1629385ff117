"""A shard's loop: one thread takes what has arrived, has it committed, and answers.

    wait -> receive all that is there (bounded in frames and bytes) -> one batch, one commit
    -> a slice of other work -> one message of answers to each router, with counts

It sleeps while there is nothing to do, at most a quarter of a second, or a whole one if no calls
have come for a while: then it pulses, so that routers know that it lives. It reports to the
coordinator once a second. Counts of ready jobs ride on the answers; a router that gets none is told
at once when a queue that had nothing ready has something, and otherwise with the next pulse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter

from pinlaterd.clock import Clock, until_full
from pinlaterd.config.schema import ServerSettings
from pinlaterd.engines.base import SINGLE, Term
from pinlaterd.lifecycle import StopSignal, count_dropped_lines
from pinlaterd.model import new_record
from pinlaterd.shard.service import ShardService
from pinlaterd.stats import Stats
from pinlaterd.wire.control import TAKES_JOBS, ControlClient, ProcessState, Snapshot, read_snapshot
from pinlaterd.wire.envelope import (
    MALFORMED,
    PULSE_SECONDS,
    PULSES_UNTIL_QUIET,
    QUIET_PULSE_SECONDS,
    RELEASES,
    CallEntry,
    Calls,
    Frame,
    Goodbye,
    GoodbyeAck,
    Hello,
    Pulse,
    ReadyCounts,
    Received,
    Refused,
    Replies,
    ShardEnd,
    Welcome,
    misunderstanding,
    pack,
    unpack,
)
from pinlaterd.wire.process import REPORT_SECONDS, newer_config

log = logging.getLogger(__name__)

# What one turn takes in. More would only wait in memory instead of in the sockets.
_MOST_FRAMES = 500
_MOST_BYTES = 4 << 20
_MOST_BACKLOG = 4_000
# All that a router sends of a call.
_as_sent = itemgetter(slice(CallEntry._fields.index("router")))
# Batches that a shard that stops still makes of what has arrived.
_MOST_LAST_TURNS = 1_000
# How long a shard that stops waits for routers to hear of it; a frozen one never does.
_GOODBYE_SECONDS = 1.0


class Updates:
    """The coordinator's updates, and the ownership of the shard that follows from them."""

    def __init__(
        self, control: ControlClient, service: ShardService, settings: ServerSettings
    ) -> None:
        self.term: Term | None = SINGLE  # by which to own the shard; None: that is for others
        self.members: frozenset[str] = frozenset()  # the cluster's member nodes
        self.endpoint = ""  # where to listen for other servers, if there are any
        self.control = control
        self._service = service
        self._settings = settings
        self._take(read_snapshot())

    @property
    def deposed(self) -> bool:
        """Whether the service owns the shard by another term than it should."""
        return self.term is not self._service.term

    def _take(self, snapshot: Snapshot | None) -> None:
        settings = self._settings
        if snapshot is not None:
            self._service.follow_keys(snapshot.keys)
        if not settings.server:
            return
        self.members = frozenset(() if snapshot is None else snapshot.members)
        shards = () if snapshot is None else snapshot.shards
        entry = next((found for found in shards if found.name == self._service.name), None)
        term = None
        if entry is not None:
            self.endpoint = f"tcp://{settings.peer_host}:{settings.shard_ports + entry.slot}"
            if entry.server == settings.server:
                term = Term(entry.server, entry.epoch, entry.planned)
        if term != self.term:
            self.term = term

    def follow(self) -> bool:
        """Take what has come, which shows us to a new coordinator, and have the service follow the
        active configuration. Whether that is another one now."""
        snapshot = self.control.receive()
        if snapshot is None:
            return False
        self._take(snapshot)
        is_changed = self._follow_config(snapshot)
        # A coordinator that has just begun knows nothing of us.
        self._service.report_permits()
        return is_changed

    def _follow_config(self, snapshot: Snapshot) -> bool:
        active = newer_config(self.control, snapshot)
        if active is not None:
            self._service.follow(active.config)
        return active is not None


class ShardLoop:
    """Runs a ShardService behind its sockets. `end` is bound, and the service owns its store."""

    def __init__(
        self,
        service: ShardService,
        end: ShardEnd,
        updates: Updates,
        stop: StopSignal,
        clock: Clock,
        stats: Stats,
        facts: Callable[[], Mapping[str, str]],
    ) -> None:
        """`facts`: asked for each report: the store may move to another server."""
        self._service = service
        self._end = end
        self._control = updates.control
        self._updates = updates
        self._stop = stop
        self._clock = clock
        self._stats = stats
        self._facts = facts
        self._incarnation = service.incarnation  # as routers know it; 0 while the store is closed
        self._routers: set[bytes] = set()
        # Routers to which a message could not be sent, and those of servers that were expelled.
        self._missing_out: set[bytes] = set()
        self._member_of: dict[bytes, str] = {}  # the member node of each router of another server
        self._refusals: set[str] = set()  # the reasons that were logged
        self._sent_degraded = False
        self._sent_ready: dict[str, bool] = {}  # by queue: whether routers know of ready jobs
        self._counts: dict[str, ReadyCounts] = {}  # since the last pulse
        self._next_pulse = 0.0
        self._unused_pulses = 0  # since a router has sent something
        self._next_report = 0.0
        self._searcher_fileno: int | None = None
        self._control_fileno = updates.control.fileno()

    def run(self) -> None:
        """Serve until told to stop, or the shard is to be owned by another term. Raises ShardOwned
        if another process has taken the store over."""
        self._end.watch(self._stop.fileno())
        self._end.watch(self._control_fileno)
        while not (self._stop.requested or self._updates.deposed):
            self._turn()
        self._finish()

    def _turn(self) -> None:
        service = self._service
        if service.searches.fileno != self._searcher_fileno:
            self._watch_searcher()
        readable = self._end.wait(self._wait_seconds)
        received: Sequence[Received] = ()
        if len(service.backlog) < _MOST_BACKLOG:
            received = self._end.receive(_MOST_FRAMES, _MOST_BYTES)
        if self._control_fileno in readable:
            self._hear()
            self._report_permits()  # that those are followed which were granted
        if received and self._unused_pulses:
            self._unused_pulses = 0
            self._next_pulse = min(self._next_pulse, self._clock.monotonic() + PULSE_SECONDS)
        for router, frame in received:
            self._take(router, frame)
        service.run_batch()
        service.run_slice(calls_wait=bool(received) or service.calls_wait)
        if self._searcher_fileno in readable:
            service.searches.receive()
        self._publish()
        if service.permits_due:
            self._report_permits()
        if not service.serving:
            self._withdraw()
            service.recover()
        if service.serving and service.incarnation != self._incarnation:
            self._welcome_all()
        if bool(service.degraded) != self._sent_degraded:
            self._next_pulse = self._next_report = 0.0
        if self._clock.monotonic() >= self._next_pulse:
            self._pulse()

    def _wait_seconds(self) -> float:
        until_pulse = self._next_pulse - self._clock.monotonic()
        return max(0.0, min(until_pulse, self._service.idle_seconds()))

    def _watch_searcher(self) -> None:
        fileno = self._service.searches.fileno
        if self._searcher_fileno is not None:
            self._end.forget(self._searcher_fileno)
        if fileno is not None:
            self._end.watch(fileno)
        self._searcher_fileno = fileno

    def _finish(self) -> None:
        """Answer what has arrived; what comes later is for a successor."""
        self._control.report(ProcessState.STOPPING, self._facts())
        service = self._service
        for router, frame in self._end.receive(_MOST_FRAMES, _MOST_BYTES):
            self._take(router, frame)
        for _ in range(_MOST_LAST_TURNS):
            service.run_batch()
            self._publish()
            if not service.calls_wait:
                break
        service.close()
        self._publish()
        self._leave()

    def _withdraw(self) -> None:
        """Have routers take the shard for down until its store is open again: so none waits for an
        answer while an attempt to open it takes its time."""
        if not self._incarnation:
            return
        self._service.run_batch()  # which refuses all that has arrived
        self._publish()
        self._say_goodbye()
        self._incarnation = 0
        self._counts = {}

    def _say_goodbye(self) -> None:
        """Tell routers that calls which arrive from here on are not carried out."""
        goodbye = pack(Goodbye(self._incarnation))
        for router in list(self._routers):
            self._send(router, goodbye)

    def _leave(self) -> None:
        """Stay until every router has heard: its ZeroMQ drops what it has not read when it finds
        the connection closed."""
        self._say_goodbye()
        self._watch_searcher()
        self._end.forget(self._stop.fileno())
        self._end.forget(self._control_fileno)
        until = self._clock.monotonic() + _GOODBYE_SECONDS

        def left() -> float:
            return until - self._clock.monotonic()

        while self._routers and left() > 0:
            self._end.wait(left)
            for router, frame in self._end.receive(_MOST_FRAMES, _MOST_BYTES):
                if isinstance(_read(frame), GoodbyeAck):
                    self._routers.discard(router)

    # --- what routers send ---------------------------------------------------------------------

    def _take(self, router: bytes, data: bytes) -> None:
        frame = _read(data)
        if isinstance(frame, Calls):
            if router in self._missing_out:
                self._welcome_again(router)
                return
            self._routers.add(router)
            if frame.incarnation != self._incarnation:
                # Meant for a predecessor: its router has given these calls up already.
                self._stats.count("shard_calls_of_predecessors")
                return
            entries = [new_record(CallEntry, (*_as_sent(call), router)) for call in frame.calls]
            self._service.backlog.extend(entries)
        elif isinstance(frame, Hello):
            if frame.server:
                self._member_of[router] = frame.member
            if (reason := misunderstanding(frame)) or not self._is_member(router):
                self._refuse(router, reason or self._expelled(router))
                return
            self._missing_out.discard(router)
            self._routers.add(router)
            self._greet(router, frame.queues)

    # --- routers of other servers ----------------------------------------------------------------

    def _is_member(self, router: bytes) -> bool:
        """Tell whether its server belongs to the cluster by now. One that has left for others may
        answer for all shards by an old view, and spend rates that were given to them."""
        member = self._member_of.get(router)
        return member is None or member in self._updates.members

    def _expelled(self, router: bytes) -> str:
        return f"its server ({self._member_of[router]}) is no member of the cluster"

    def _refuse(self, router: bytes, reason: str) -> None:
        if reason not in self._refusals:
            self._refusals.add(reason)
            log.warning("refuses a router: %s", reason)
        self._end.send(router, pack(Refused(reason)))

    def _expel(self) -> None:
        """Drop the routers of servers that are no members any more. Calls of theirs that have not
        been taken up are not carried out; to the routers they, and all in flight, are lost."""
        self._refusals.clear()
        gone = {router for router in self._routers if not self._is_member(router)}
        if not gone:
            return
        backlog = self._service.backlog
        kept = [call for call in backlog if call.router not in gone or call.op in RELEASES]
        backlog.clear()
        backlog.extend(kept)
        self._routers -= gone
        self._missing_out |= gone
        for router in gone:
            self._refuse(router, self._expelled(router))

    # --- what routers are told -----------------------------------------------------------------

    def _greet(self, router: bytes, queues: Iterable[str]) -> None:
        """Welcome a router, or, while the store is closed, leave that to when it is open."""
        if self._service.serving:
            self._service.create_queues(queues)
        if self._service.serving:
            self._welcome(router)

    def _welcome_again(self, router: bytes) -> None:
        """Welcome a router that missed a message, so that it fails its calls in flight."""
        if self._incarnation and self._is_member(router):
            self._missing_out.discard(router)
            self._routers.add(router)
            self._welcome(router)

    def _welcome(self, router: bytes) -> None:
        facts, now = self._service.facts(), self._clock.monotonic()
        self._send(router, pack(Welcome(self._incarnation, facts, now=now)))

    def _welcome_all(self) -> None:
        """Welcome all routers: what they sent to the incarnation before is lost to them."""
        self._incarnation = self._service.incarnation
        self._end.bind_again()
        for router in list(self._routers):
            self._welcome(router)
        self._next_pulse = 0.0  # a store that is open again may be degraded still

    def _publish(self) -> None:
        """Send all answers, with the counts of what they touched; others learn what is urgent."""
        service = self._service
        counts, replies = service.take_counts(), service.replies.take()
        if not (counts or replies) or not self._incarnation:
            return
        urgent = self._note(counts)
        for router, entries in replies.items():
            if not self._send(router, pack(Replies(self._incarnation, entries, counts))):
                service.undelivered(router, entries)
        if urgent:
            now = self._clock.monotonic()
            frame = pack(Pulse(self._incarnation, urgent, self._sent_degraded, now))
            for router in self._routers - replies.keys():
                self._send(router, frame)

    def _note(self, counts: Sequence[ReadyCounts]) -> list[ReadyCounts]:
        """Remember these for the next pulse; returns what cannot wait for it."""
        urgent = []
        for found in counts:
            queue, numbers = found
            self._counts[queue] = found
            ready = any(numbers)
            if not numbers:
                self._sent_ready.pop(queue, None)
                urgent.append(found)
            elif queue not in self._sent_ready or (ready and not self._sent_ready[queue]):
                urgent.append(found)
            if numbers:
                self._sent_ready[queue] = ready
        return urgent

    def _send(self, router: bytes, frame: bytes) -> bool:
        """Send a frame; return False if the router can't be reached, or does not read. Then it gets
        nothing more until it calls, or says hello on a new connection."""
        if self._end.send(router, frame):
            return True
        self._routers.discard(router)
        self._missing_out.add(router)
        self._stats.count("shard_routers_lost")
        return False

    # --- from time to time ---------------------------------------------------------------------

    def _pulse(self) -> None:
        now = self._clock.monotonic()
        self._unused_pulses += 1
        quiet = self._unused_pulses >= PULSES_UNTIL_QUIET
        self._next_pulse = now + (until_full(QUIET_PULSE_SECONDS, now) if quiet else PULSE_SECONDS)
        self._sent_degraded = bool(self._service.degraded)
        counts = list(self._counts.values())
        frame = pack(Pulse(self._incarnation, counts, self._sent_degraded, now))
        self._counts = {}
        if self._incarnation:
            for router in list(self._routers):
                self._send(router, frame)
        if now >= self._next_report:
            self._next_report = now + until_full(REPORT_SECONDS, now)
            self._report()

    def _report(self) -> None:
        service = self._service
        service.tick()
        count_dropped_lines(self._stats.count)
        service.searches.tick()
        if service.serving:
            state = ProcessState.SERVING
            warnings = {"health warning": service.warning, "clock warning": self._clock.warning}
            warnings[TAKES_JOBS] = "no" if service.refuses_jobs else ""
            warnings["held by max_in_progress"] = service.held_queues
        else:
            state, warnings = ProcessState.STARTING, {"store warning": service.store_error}
        self._control.report(state, {**self._facts(), **warnings})
        self._hear()

    def _report_permits(self) -> None:
        """Report until nothing is due: what is granted in answer is to be confirmed at once."""
        while self._service.permits_due:
            for report in self._service.permit_reports():
                self._control.tell(report)
            self._hear()

    def _hear(self) -> None:
        members = self._updates.members
        is_changed = self._updates.follow()
        question = self._control.take_question()
        if question is not None:
            self._control.tell(self._service.details(whole=question.whole))
        granted = self._control.take_permits()
        for grant in granted:
            self._service.grant(grant)
        if granted:
            self._publish()
        if members != self._updates.members:
            self._expel()
            is_changed = True
        if is_changed:
            # tell at once what is followed now, and what is held by then
            self._next_pulse = self._next_report = 0.0


def _read(frame: bytes) -> Frame | None:
    """Read a frame; None if no router of this version sends such."""
    try:
        return unpack(frame)
    except MALFORMED as error:
        log.error("a router sent a message that can't be read (%s); ignored", error)
        return None
