"""Seeds of the simulation keep every promise, and broken variants of the service are caught."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from pinlaterd.shard.loop import ShardLoop
from pinlaterd.wire import envelope, router_end
from pinlaterd.wire.envelope import CallEntry
from pinlaterd.wire.router_end import Outcome, ShardLink, ShardReply
from tests.simulation.simulation import Simulation

SEEDS = 60
# How many seeds may pass before a broken variant is caught; a variant that needs more is hidden.
SEED_BUDGET = 60
# Each has found a fault that was mended since.
MENDED: list[int] = []


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Iterator[None]:
    """The simulated deployment's, without the logs of the faults that it is made to suffer."""
    monkeypatch.chdir(tmp_path)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_seeds_keep_every_promise(first):
    for seed in range(first, first + 20):
        assert (seed, Simulation(seed).run()) == (seed, [])


@pytest.mark.parametrize("seed", MENDED)
def test_what_was_found_is_mended(seed):
    assert Simulation(seed).run() == []


def test_a_seed_decides_everything():
    one, other = Simulation(7), Simulation(7)
    one.run()
    other.run()

    assert [str(record) for record in one.records] == [str(record) for record in other.records]


# --- the judge and the faults are strong enough ------------------------------------------------


def without_incarnations(monkeypatch) -> None:
    """A shard carries out what was sent to its predecessor."""
    take = ShardLoop._take

    def careless(self: ShardLoop, router: bytes, frame: bytes) -> None:
        if frame[0] == envelope.Kind.CALLS and self._incarnation:
            entries = envelope.unpack_calls(frame)
            frame = envelope.pack_calls(self._incarnation, entries)
        take(self, router, frame)

    monkeypatch.setattr(ShardLoop, "_take", careless)


def without_deadlines(monkeypatch) -> None:
    """A shard carries out what its caller has given up."""
    unpack = envelope.unpack_calls

    def timeless(frame: bytes) -> list[CallEntry]:
        return [entry._replace(deadline=float("inf")) for entry in unpack(frame)]

    monkeypatch.setattr(envelope, "unpack_calls", timeless)


def lost_is_refused(monkeypatch) -> None:
    """A router takes a call whose shard died for one that was not carried out."""
    monkeypatch.setattr(router_end, "_LOST", ShardReply(Outcome.REFUSED, b"has gone"))


def without_releases(monkeypatch) -> None:
    """Claims of answers that nobody gets are forgotten."""
    monkeypatch.setattr(ShardLink, "release", lambda self, reply: None)


def without_priorities(monkeypatch) -> None:
    """A shard hands out any priority, whatever the others hold."""
    unpack = envelope.unpack_calls

    def any_priority(frame: bytes) -> list[CallEntry]:
        return [entry._replace(lowest_priority=0) for entry in unpack(frame)]

    monkeypatch.setattr(envelope, "unpack_calls", any_priority)


def first_answer_is_enough(monkeypatch) -> None:
    """A router gives a short answer without having asked the other shards."""
    from pinlaterd.router import service

    def finish(self: Any, call: Any, shard: Any, reply: Any) -> Any:
        async def done() -> None:
            call.finish(shard, reply)

        return done()

    monkeypatch.setattr(service.Dequeuer, "go_on", finish)


VARIANTS: list[Callable[[Any], None]] = [
    without_incarnations,
    without_deadlines,
    lost_is_refused,
    without_releases,
    without_priorities,
    first_answer_is_enough,
]


@pytest.mark.parametrize("break_it", VARIANTS, ids=lambda variant: variant.__name__)
def test_a_broken_variant_is_caught(break_it, monkeypatch):
    break_it(monkeypatch)

    for seed in count():
        assert seed < SEED_BUDGET, "no seed has caught it"
        if Simulation(seed).run():
            return
