"""Versions of the service that break a promise each, to prove that the simulation finds it.

A variant replaces a part of the product in this process for good: each takes a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from pinlaterd.router.rate_limits import LimitedQueue
from pinlaterd.router.service import RouterService
from pinlaterd.shard import loop
from pinlaterd.shard.loop import ShardLoop
from pinlaterd.wire import link
from pinlaterd.wire.envelope import CallEntry, Calls, Frame, ReplyEntry, Status, pack, unpack
from pinlaterd.wire.link import ShardLink
from tests.simulation.network import Network


def no_incarnation_check() -> None:
    """A shard carries out what was sent to its predecessor. Messages are slow, so that many are
    under way when a store is opened again."""
    take = ShardLoop._take

    def careless(self: ShardLoop, router: bytes, data: bytes) -> None:
        frame = unpack(data)
        if isinstance(frame, Calls) and self._incarnation:
            data = pack(Calls(self._incarnation, frame.calls))
        take(self, router, data)

    ShardLoop._take = careless  # type: ignore[method-assign]
    Network.delay = (  # type: ignore[method-assign]
        lambda self: self.world.rng.random() * max(0.1, self.slowest_seconds)
    )


def _change_calls(change: Callable[[CallEntry], CallEntry]) -> None:
    def changed(frame: bytes) -> Frame:
        heard = unpack(frame)
        if isinstance(heard, Calls):
            return Calls(heard.incarnation, [change(entry) for entry in heard.calls])
        return heard

    loop.unpack = changed  # type: ignore[attr-defined]


def no_deadlines() -> None:
    """A shard carries out what its caller has given up."""
    _change_calls(lambda entry: entry._replace(deadline=float("inf")))


def no_priorities() -> None:
    """A shard hands out any priority, whatever the others hold."""
    _change_calls(lambda entry: entry._replace(lowest_priority=0))


def lost_is_refused() -> None:
    """A router takes a call whose shard died for one that was not carried out."""
    link._LOST = ReplyEntry(0, Status.REFUSED, b"has gone")


def no_releases() -> None:
    """Claims of answers that nobody gets are forgotten."""
    ShardLink.release = lambda *_: None  # type: ignore[method-assign]


def first_answer_is_enough() -> None:
    """A router gives a short answer without having asked the other shards."""

    RouterService._may_be_more = (  # type: ignore[method-assign]
        lambda self, call, shard, reply: False
    )


def no_rates() -> None:
    """Tokens are not counted."""
    LimitedQueue.take = lambda self, wanted: wanted  # type: ignore[method-assign]


VARIANTS: dict[str, Callable[[], None]] = {
    variant.__name__.replace("_", "-"): variant
    for variant in (
        no_incarnation_check,
        no_deadlines,
        no_priorities,
        lost_is_refused,
        no_releases,
        first_answer_is_enough,
        no_rates,
    )
}
