"""A key is stored once, however late routers and shards follow placements: the real parts of the
protocol (key_placement), in random walks in which each step is taken when the test says so.

Each rule that is left out has to be missed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from pinlaterd.config.schema import (
    Config,
    JobType,
    ServerSettings,
    ShardSettings,
    default_queue_settings,
)
from pinlaterd.engines.base import StorageEngine
from pinlaterd.errors import PinLaterError
from pinlaterd.model import (
    CallContext,
    EnqueueRequest,
    EnqueueWithOptionsResult,
    Job,
    JobOptions,
    Method,
    QueueKey,
)
from pinlaterd.router import shards as router_shards
from pinlaterd.router.call import Call, Shared
from pinlaterd.router.enqueue import EnqueueByKey
from pinlaterd.router.rate_limits import RateLimits
from pinlaterd.router.shards import ShardSet
from pinlaterd.rpc import codec
from pinlaterd.rpc.connection import Connection
from pinlaterd.shard.service import ShardService
from pinlaterd.shard.state import ShardState
from pinlaterd.stats import Stats
from pinlaterd.wire.envelope import CallEntry, ReplyEntry, ShardCall, Status
from pinlaterd.wire.key_placement import Home, KeyHomes, KeyPlacement
from tests.clocks import FakeClock
from tests.router.test_service import Client
from tests.simulation.store import Disk, Fault, ModelStore

QUEUE = "mail"
# As in the model of the protocol: + takes new jobs, ~ is dequeue-only, a shard that is not named is
# not there. With one that is removed its jobs go.
HISTORIES = (
    "A+ B+, A+ B+ C+",
    "A+ B+, A~ B+, A+ B+",
    "A+ B+, A~ B+, A~ B~ C+, A+ B+ C+",
    "A+ B+, A~ B+, B+",
    "A+ B+, A+ B+ C+, A+ B+ C~, A+ B+",
    "A+ B+, A~ B+, B+, A+ B+",
)
WALKS, BROKEN_WALKS, STEPS = 600, 6_000, 60
PROCESS: Any = SimpleNamespace(
    alive=True, block=lambda _: None, world=SimpleNamespace(rng=Random(0))
)


class Sent(NamedTuple):
    """A call on its way to a shard."""

    shard: str
    call: ShardCall
    reply: asyncio.Future[ReplyEntry]


class Shard:
    """A shard on one store; `restart` makes another process of it."""

    def __init__(self, name: str, clock: FakeClock, placement: KeyPlacement) -> None:
        self._clock = clock
        self._config = Config(ServerSettings(), {name: ShardSettings(name)}, {})
        self.name = name
        self.follows = placement
        self.disk = Disk(lambda: Fault.NONE, lambda: 0.0, {QUEUE: {}})
        self.restart(placement)

    def restart(self, placement: KeyPlacement) -> None:
        self.disk.owner = None  # which was killed
        store = cast("StorageEngine", ModelStore(self.disk, lambda: PROCESS))
        self.service = ShardService(self.name, store, self._config, self._clock, Stats())
        self.follow(placement)
        self.service.open()

    def follow(self, placement: KeyPlacement) -> None:
        self.follows = placement
        self.service.follow_keys(placement)

    def holds(self, key: str) -> bool:
        rows = self.disk.jobs[QUEUE].values()
        return any(row.options and row.options.key == key for row in rows)

    def carry_out(self, call: ShardCall) -> ReplyEntry:
        entry = CallEntry(1, call.deadline, call.message, call.op, whole=call.whole)
        self.service.backlog.append(entry._replace(placement=call.placement))
        self.service.run_batch()
        [[reply]] = self.service.replies.take().values()
        return reply


class Link:
    """A router's way to a shard: what is asked waits until the walk lets it arrive."""

    def __init__(self, name: str, sent: list[Sent]) -> None:
        self.name = name
        self.healthy = True
        self._sent = sent

    def ask(self, call: ShardCall) -> asyncio.Future[ReplyEntry]:
        sent = Sent(self.name, call, asyncio.get_running_loop().create_future())
        self._sent.append(sent)
        return sent.reply


class Router:
    """Enqueues one job with a key, again and again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.follows = world.placements[0]
        self.shards = ShardSet(cast("Any", None), world.clock.monotonic, lambda _: None)
        self._shared = Shared(
            self.shards, RateLimits(world.clock), world.clock, Stats(), Random(1), ServerSettings()
        )
        self.task: asyncio.Task[None] | None = None
        self.client: Client | None = None

    def follow(self, placement: KeyPlacement) -> None:
        self.follows = placement
        self.shards.homes = KeyHomes(placement)
        links = {name: Link(name, self._world.sent) for name in placement.shards}
        self.shards.by_name = cast("Any", links)

    def begin(self) -> None:
        request = EnqueueRequest(QUEUE, [Job(b"x", options=JobOptions(self._world.key))])
        message = codec.encode_call(Method.ENQUEUE, 7, CallContext("web:h1"), request)
        self.client = Client()
        call = Call(
            message, codec.peek(message), cast("Connection", self.client), 0, 1e12, lambda *_: None
        )
        self.task = asyncio.ensure_future(EnqueueByKey(call, self._shared).run())

    def give_up(self) -> None:
        """Its requests go on."""
        assert self.task is not None
        self.task.cancel()
        self.task = None

    def finish(self) -> None:
        """Note the answer, if it is there."""
        if self.task is None or not self.task.done():
            return
        task, self.task = self.task, None
        assert self.client is not None
        if task.exception() is None:
            result = codec.decode_reply(Method.ENQUEUE, self.client.message.result())
            assert isinstance(result, EnqueueWithOptionsResult)
            self._world.news += not result.existed[0]
        else:
            assert isinstance(task.exception(), PinLaterError)


class World:
    """Two routers and the shards, under placements of which the later ones are yet to come."""

    def __init__(self, seed: int, histories: Sequence[str]) -> None:
        self.rng = rng = Random(seed)
        self.clock = FakeClock()
        self.key = f"k{rng.randrange(1000)}"
        self.placements = [KeyPlacement()]
        for text in rng.choice(histories).split(", "):
            shards = {part[0]: part[1] == "+" for part in text.split()}
            self.placements.append(self.placements[-1].followed_by(shards, 1))
        del self.placements[0]
        self.now = 0
        self.shards = {name: self._shard(name) for name in self.placements[0].shards}
        self.sent: list[Sent] = []
        self.news = self.lost = 0
        self.routers = [Router(self), Router(self)]
        for router in self.routers:
            router.follow(self.placements[0])

    def _shard(self, name: str) -> Shard:
        return Shard(name, self.clock, self.placements[self.now])

    def next_after(self, placement: KeyPlacement) -> KeyPlacement:
        return self.placements[min(self.placements.index(placement) + 1, self.now)]

    def advance(self) -> None:
        """The next placement is published; with shards that are removed their jobs go."""
        if self.now + 1 == len(self.placements):
            return
        self.now += 1
        present = self.placements[self.now].shards
        for name in self.shards.keys() - present.keys():
            self.lost += self.shards.pop(name).holds(self.key)
        for name in present.keys() - self.shards.keys():
            self.shards[name] = self._shard(name)

    def deliver(self) -> None:
        """One of the calls on their way arrives, in whatever order, or is lost."""
        if not self.sent:
            return
        sent = self.sent.pop(self.rng.randrange(len(self.sent)))
        shard = self.shards.get(sent.shard)
        reply = ReplyEntry(0, Status.LOST)
        if shard is not None and self.rng.random() < 0.95:
            reply = shard.carry_out(sent.call)
        if not sent.reply.cancelled():
            sent.reply.set_result(reply)

    def step(self) -> None:
        rng = self.rng
        shard, router = rng.choice([*self.shards.values()]), rng.choice(self.routers)
        steps: Sequence[tuple[float, Callable[[], None]]] = (
            (0.06, self.advance),
            (0.12, lambda: shard.follow(self.next_after(shard.follows))),
            (0.04, lambda: shard.restart(self._before(shard.follows))),
            (0.12, lambda: router.follow(self.next_after(router.follows))),
            (0.20, lambda: router.begin() if router.task is None else None),
            (0.04, lambda: router.give_up() if router.task else None),
            (0.42, self.deliver),
        )
        rng.choices([each for _, each in steps], [weight for weight, _ in steps])[0]()

    def _before(self, placement: KeyPlacement) -> KeyPlacement:
        """Return a placement before one, of which a restarted process may have the snapshot."""
        return self.placements[self.rng.randrange(self.placements.index(placement) + 1)]

    @property
    def wrong(self) -> str:
        if sum(shard.holds(self.key) for shard in self.shards.values()) > 1:
            return "two shards hold the key"
        return "two answers say that it was new" if self.news > 1 + self.lost else ""


async def walk(seed: int, histories: Sequence[str]) -> str:
    """Return what went wrong on a random walk, "" if nothing did."""
    world = World(seed, histories)
    for _ in range(STEPS):
        world.step()
        for _ in range(4):
            await asyncio.sleep(0)
        for router in world.routers:
            router.finish()
        if world.wrong:
            break
    for router in world.routers:
        if router.task is not None:
            router.give_up()
    await asyncio.sleep(0)
    return world.wrong


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_shards, "_KEYS_AGAIN_SECONDS", 0)


def first_wrong(walks: int, histories: Sequence[str] = HISTORIES) -> str:
    """Walk until something goes wrong; return what, and the seed."""

    async def walk_all() -> str:
        for seed in range(walks):
            if wrong := await walk(seed, histories):
                return f"{wrong} (seed {seed})"
        return ""

    return asyncio.run(walk_all())


def test_two_shards_never_hold_a_key() -> None:
    assert first_wrong(WALKS) == ""


def test_former_shards_are_asked_for_as_long_as_jobs_with_keys_may_be_kept() -> None:
    job_type = JobType("t", "t", datetime.now(UTC), archive_hours=24 * 365 * 10)
    settings = default_queue_settings(ServerSettings(), job_type)
    kept_ms = Config(queues={"t": settings}).keys_kept_ms()
    assert 3_600_000 * 24 * (365 * 10 + 366) == kept_ms > Config().keys_kept_ms()
    shards = {"A": True, "B": True}
    keys = [QueueKey(QUEUE, f"k{number}") for number in range(50)]

    def asked(placement: KeyPlacement) -> bool:
        return any(KeyHomes(placement).of(key).former for key in keys)

    first = KeyPlacement().followed_by({"A": True}, 1, kept_ms)
    second = first.followed_by(shards, 5000, kept_ms)
    assert second.followed_by(shards, 4999 + int(kept_ms), kept_ms) is second
    assert asked(second)

    third = second.followed_by(shards, 5000 + int(kept_ms), kept_ms)
    assert not asked(third)
    assert third.number > second.number
    assert third.shards == second.shards, "with the fences with which they came"


def _no_former(homes: KeyHomes, key: QueueKey) -> Home:
    return _right_home(homes, key)._replace(former=())


def _last_former(homes: KeyHomes, key: QueueKey) -> Home:
    home = _right_home(homes, key)
    return home._replace(former=tuple(deque(home.former, 1)))


def _any_later(state: ShardState, placement: int) -> bool:
    return 0 < placement <= state.keys_under


def _no_first_fence(before: KeyPlacement, shards: dict[str, bool], now_ms: int) -> KeyPlacement:
    found = _right_placement(before, shards, now_ms)
    came = dict.fromkeys(found.shards, 0)
    return KeyPlacement(found.number, came, found.enqueueable, found.earlier)


_right_home, _right_placement = KeyHomes.of, KeyPlacement.followed_by


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        pytest.param(KeyHomes, "of", _no_former, id="no former shard is asked"),
        pytest.param(KeyHomes, "of", _last_former, id="one former shard is asked"),
        pytest.param(ModelStore, "raise_fence", lambda *_: None, id="no fence is stored"),
        pytest.param(
            ShardState, "takes_keys", _any_later, id="shards take keys under earlier ones"
        ),
        pytest.param(KeyPlacement, "followed_by", _no_first_fence, id="no fence on coming back"),
    ],
)
def test_each_rule_is_missed(monkeypatch: pytest.MonkeyPatch, owner, name, broken) -> None:
    monkeypatch.setattr(owner, name, broken)

    # Only a shard that comes back can have taken keys before.
    histories = HISTORIES[-1:] if broken is _no_first_fence else HISTORIES

    assert first_wrong(BROKEN_WALKS, histories) != ""
