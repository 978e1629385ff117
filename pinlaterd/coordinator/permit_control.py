"""Permits in a coordinator's process: from what is configured and reported to what is sent.

On a single machine the coordinator divides the limits itself, and notes what shards may hold in
run/permits.json before any of them may use it, for a coordinator that comes after it.

In a cluster the leader's coordinator does so for the shards of all servers. The others pass on
what their shards report, all of it once a second, and what the leader grants. A leader that begins
knows nothing, whatever was noted: all shards have to report to it before it grants more. Its grants
have greater numbers than those of all leaders before, which shards ignore once they have followed
one of its own: only then a report counts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pinlaterd.clock import Clock
from pinlaterd.config import layout
from pinlaterd.config.schema import Config
from pinlaterd.coordinator.permits import NotedPermits, PermitAllocator
from pinlaterd.coordinator.server_rates import member_number
from pinlaterd.model import JobState
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ControlServer, NoteFile, PermitGrant, PermitReport

if TYPE_CHECKING:
    from pinlaterd.coordinator.peers import Peers

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 10.0  # after which a shard that does not report is a problem
_RELAY_SECONDS = 0.9  # after which all that a shard reported is passed on again
# Numbers of a leader's grants: its member node's number, and behind it these bits.
_GRANT_BITS = 32
_REMOTE = b"peer "  # in front of the connections of other servers' coordinators
_NOTES = NoteFile(layout.PERMITS_FILE, msgspec.json.Decoder(tuple[str, list[NotedPermits]]))


class _Reported(NamedTuple):
    """The whole report of a shard's owner here, and the time when it was passed on."""

    peer: bytes
    report: PermitReport
    relayed_at: float


class PermitControl:
    """The permits of this server's shards; in a cluster, where it leads, of all shards."""

    def __init__(
        self, config: Config, clock: Clock, is_running: Callable[[int], bool], stats: Stats
    ) -> None:
        self._config = config
        self._stats = stats
        self._shown: set[str] = set()  # gauges
        self._clock = clock
        self._is_running = is_running
        self._note_failed = False
        self._unknown_since = clock.monotonic()
        self._in_cluster = bool(config.server.cluster)
        self._view = ("", "")  # the member nodes of the leader and of this server
        self._peers: Peers | None = None
        self._reported: dict[tuple[str, JobState], _Reported] = {}  # by shard; in a cluster
        self._granted: list[tuple[bytes, PermitGrant]] = []  # by the leader, not passed on yet
        self._allocators: Mapping[JobState, PermitAllocator] = {}  # empty: another server leads
        if not self._in_cluster:
            self._lead(_NOTES.read(), clock.now_ms())

    def _lead(self, noted: Collection[NotedPermits], number: int) -> None:
        self._allocators = {
            state: PermitAllocator(self._clock, self._is_running, noted, number, state)
            for state in (JobState.IN_PROGRESS, JobState.PENDING)
        }
        self.configure(self._config)

    def configure(self, config: Config) -> None:
        """Divide the limits of `config` over its shards."""
        self._config = config
        for state, allocator in self._allocators.items():
            allocator.configure(config.limits_of(state), config.shards)
        self._show()

    def _show(self) -> None:
        """Put the limits into the statistics; in a cluster its leader does."""
        limits = {
            f"{queue}_{state.name.lower()}_limit": limit
            for state in self._allocators
            for queue, limit in self._config.limits_of(state).items()
        }
        for name in self._shown - limits.keys():
            self._stats.drop_gauge(name)
        for name, limit in limits.items():
            self._stats.gauge(name, limit)
        self._shown = {*limits}

    # --- shards of this server -----------------------------------------------------------------

    def heard(self, peer: bytes, report: PermitReport) -> None:
        """Take what a shard here reports."""
        if self._in_cluster:
            place = report.shard, report.state
            before = self._reported.get(place)
            whole = report
            if before is not None and before.peer == peer:
                queues = {**before.report.queues, **report.queues}
                whole = msgspec.structs.replace(report, queues=queues)
            at = -math.inf if before is None else before.relayed_at
            self._reported[place] = _Reported(peer, whole, at)
        if self._allocators:
            self._allocators[report.state].heard(peer, report)
        else:
            self._relay(report)

    def heartbeat(self, peer: bytes) -> None:
        """Note that a process here lives that has nothing to say of permits."""
        now = self._clock.monotonic()
        for allocator in self._allocators.values():
            allocator.heartbeat(peer)
        for place, reported in self._reported.items():
            is_due = reported.peer == peer and now - reported.relayed_at >= _RELAY_SECONDS
            if is_due and not self._allocators:
                self._reported[place] = reported._replace(relayed_at=now)
                self._relay(reported.report)

    def _relay(self, report: PermitReport) -> None:
        leader, own = self._view
        if self._peers is not None and own:
            self._peers.tell(leader, msgspec.structs.replace(report, pid=0))

    # --- other servers -------------------------------------------------------------------------

    def follow(self, leader: str, own: str, peers: Peers) -> None:
        """Follow who leads the cluster, by member nodes."""
        if (leader, own) == self._view:
            return
        self._view, self._peers, self._allocators = (leader, own), peers, {}
        if own and leader == own:
            self._lead((), member_number(own) << _GRANT_BITS)
        self._show()
        for reported in list(self._reported.values()):
            self.heard(reported.peer, reported.report)

    def heard_elsewhere(self, peer: bytes, report: PermitReport) -> None:
        """Take what a shard of another server reports."""
        if self._allocators:
            self._allocators[report.state].heard(_REMOTE + peer, report)

    def heard_grant(self, sender: str, grant: PermitGrant) -> None:
        """Take a grant of the coordinator of the member node `sender`."""
        reported = self._reported.get((grant.shard, grant.state))
        if sender == self._view[0] and reported is not None:
            self._granted.append((reported.peer, grant))

    # --- what follows from it ------------------------------------------------------------------

    def act(self, control: ControlServer) -> bool:
        """Send what follows from all that was heard; return whether there was anything."""
        grants, self._granted = self._granted, []
        for allocator in self._allocators.values():
            grants += allocator.due_grants()
        if not self._in_cluster and any(one.note_due for one in self._allocators.values()):
            self._note()
        for peer, grant in grants:
            if not peer.startswith(_REMOTE):
                control.send(peer, grant)
            elif self._peers is not None:
                self._peers.reply(peer.removeprefix(_REMOTE), grant)
        return bool(grants)

    def _note(self) -> None:
        try:
            _NOTES.write([n for one in self._allocators.values() for n in one.holdings()])
            self._note_failed = False
        except OSError as error:
            # A coordinator that comes after us has to rely on what shards report.
            if not self._note_failed:
                log.error("what shards may hold can't be noted: %s", error)
            self._note_failed = True

    @property
    def next_look(self) -> float:
        """When something is due, if nothing is heard before, in monotonic seconds."""
        return min([one.next_look for one in self._allocators.values()], default=math.inf)

    def problems(self) -> Sequence[str]:
        """List for `status` what keeps jobs from being begun."""
        unknown = sorted({s for one in self._allocators.values() for s in one.unknown()})
        now = self._clock.monotonic()
        if not unknown:
            self._unknown_since = now
        if now - self._unknown_since < _PATIENCE_SECONDS:
            return ()
        names = ", ".join(unknown)
        what = f"limits: how many jobs shard {names} holds is not known"
        return [f"{what}; until it serves, no shard gets more of queues that have them"]
