"""Deliberately broken variants of the service: each breaks one promise, and has to be found.

The processes of a run import pinlaterd from a folder whose sitecustomize.py calls `apply`, so that
product code has no hook of any kind. A variant whose target is gone keeps its process from
starting.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """What breaks, the rules that have to find it, in which process, and what it takes."""

    breaks: Callable[[], None]
    rules: tuple[str, ...]
    role: str = "shard"
    faults: tuple[str, ...] = ("none",)
    seconds: float = 2.0
    drained: bool = False  # whether it shows only at the end
    engine: str = "sqlite"


def apply(names: str) -> None:
    """In a process that starts: break it by those of `names` (a,b) that concern it."""
    for name in names.split(","):
        variant = VARIANTS[name]
        if "pinlaterd" in sys.orig_argv and variant.role in sys.orig_argv:
            variant.breaks()


def _replace(owner: Any, name: str, value: object) -> None:
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    setattr(owner, name, value)


# --- the engine -----------------------------------------------------------------------------


def _no_claim_compare() -> None:
    """An ack, or checkpoint, under a claim that has ended acts on the job's new claim."""
    from pinlaterd.engines.sqlite import batch

    def of_any_claim(end: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *place_and_acks: end(
            *place_and_acks[:-1],
            [alike._replace(claim_descriptor=None) for alike in place_and_acks[-1]],
        )

    for name in ("_succeed", "_fail"):
        _replace(batch, name, of_any_claim(getattr(batch, name)))
    _replace(batch, "_is_claimers", lambda *_: True)


def _answer_without_commit() -> None:
    """One batch in twenty is answered and rolled back."""
    from pinlaterd.engines.sqlite.store import Store, Transaction

    commit = Store.commit
    numbers = itertools.count(1)

    @contextlib.contextmanager
    def forgetful(self: Any, now_ms: int) -> Iterator[Transaction]:
        if now_ms == 0 or next(numbers) % 20:
            with commit(self, now_ms) as tx:
                yield tx
            return
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield Transaction(self, now_ms)
        finally:
            self.db.execute("ROLLBACK")

    _replace(Store, "commit", forgetful)


def _ids_from_the_count() -> None:
    """A new job's id is one more than there are jobs: deletes make it another's."""
    from pinlaterd.engines.sqlite.store import Store

    def take_local_ids(self: Any, count: int) -> range:
        (jobs,) = self.db.execute("SELECT count(*) FROM jobs").fetchone()
        return range(jobs + 1, jobs + 1 + count)

    _replace(Store, "take_local_ids", take_local_ids)


def _attempts_kept() -> None:
    """A failed attempt costs none."""
    from pinlaterd.engines.sqlite import batch

    fail_attempts = batch.fail_attempts

    def fail(tx: Any, held: Any, taken: Any, attempts: Any) -> Any:
        requeued = fail_attempts(tx, held, taken, attempts)
        tx.db.executemany(
            "UPDATE jobs SET attempts_remaining = attempts_remaining + 1 WHERE local_id = ?",
            [(job.key.local_id,) for job in requeued],
        )
        return requeued

    _replace(batch, "fail_attempts", fail)


def _no_token_compare() -> None:
    """Redis' scripts write for any caller, not for the shard's owner alone, and an owner that was
    frozen takes its endpoint back."""
    import hashlib

    from pinlaterd.engines.redis import scripts
    from pinlaterd.shard.loop import ShardLoop

    for name, script in list(vars(scripts).items()):
        if isinstance(script, scripts.Script) and script.writes:
            text = script.text.replace(b"owner ~= token", b"false")
            assert text != script.text, f"{name} compares no token any more"
            sha = hashlib.sha1(text, usedforsecurity=False).hexdigest()
            _replace(scripts, name, script._replace(text=text, sha=sha))
    publish = ShardLoop._publish
    turns = [time.monotonic()]

    def publishing(self: Any) -> None:
        turns.append(time.monotonic())
        if turns[1] - turns.pop(0) > 5:
            self._end.bind_again()
        publish(self)

    _replace(ShardLoop, "_publish", publishing)


# --- the shard ------------------------------------------------------------------------------


def _early_time_out() -> None:
    """Claims end after a quarter of their time."""
    from dataclasses import replace

    from pinlaterd.config.schema import Config

    of_queue = Config.queue

    def queue(self: Any, name: str) -> Any:
        found = of_queue(self, name)
        seconds = found.job_claimed_timeout_seconds / 4
        return replace(found, job_claimed_timeout_seconds=seconds)

    _replace(Config, "queue", queue)


def _claims_never_end() -> None:
    from pinlaterd.shard.maintenance import Maintenance

    _replace(Maintenance, "_end_claims", lambda *_, **__: 0)


def _steps_followed_at_once() -> None:
    """A wall clock that jumps is followed, not held against elapsed time."""
    from pinlaterd import clock

    _replace(clock, "HOLD_SECONDS", 0.0)


def _gauges_adrift() -> None:
    """One job in three that succeeds is not counted."""
    from pinlaterd.engines.counts import Counts
    from pinlaterd.model import JobState

    add = Counts.add
    numbers = itertools.count(1)

    def forgetful(self: Any, changes: Any) -> None:
        kept = {
            key: jobs
            for key, jobs in changes.items()
            if key[-1] is not JobState.SUCCEEDED or jobs < 0 or next(numbers) % 3
        }
        add(self, kept)

    _replace(Counts, "add", forgetful)


def _latest_first() -> None:
    from pinlaterd.shard.ready import ReadyIndex

    take = ReadyIndex.take

    def reversed_take(self: Any, queue: str, *rest: Any) -> Any:
        lines = self._queues[queue]
        for line in lines:
            line.keys.reverse()
            line.payloads.reverse()
        try:
            return take(self, queue, *rest)
        finally:
            for line in lines:
                line.keys.reverse()
                line.payloads.reverse()

    _replace(ReadyIndex, "take", reversed_take)


def _forgotten_keys() -> None:
    """One job in fifty is in the store and not in the ready index."""
    from pinlaterd.shard.ready import ReadyIndex

    add = ReadyIndex.add
    numbers = itertools.count(1)

    def forgetful(
        self: Any, queue: str, priority: int, keys: Any, now_ms: int, payloads: Any = ()
    ) -> None:
        kept = [next(numbers) % 50 > 0 for _ in keys]
        keys, payloads = itertools.compress(keys, kept), itertools.compress(payloads, kept)
        add(self, queue, priority, list(keys), now_ms, list(payloads))

    _replace(ReadyIndex, "add", forgetful)


def _swapped_bodies() -> None:
    from pinlaterd.shard.ready import ReadyIndex

    take = ReadyIndex.take

    def swapped(self: Any, *arguments: Any) -> Any:
        return [taken._replace(payloads=taken.payloads[::-1]) for taken in take(self, *arguments)]

    _replace(ReadyIndex, "take", swapped)


def _one_claim_for_all() -> None:
    """Jobs of one dequeue share claim descriptors, where their priorities differ."""
    from pinlaterd.shard.state import ClaimDescriptors

    def take(self: Any, source: str, _jobs: int) -> tuple[str, int]:
        return f"{self._head}{source}:", 7

    _replace(ClaimDescriptors, "take", take)


def _refused_but_stored() -> None:
    """One enqueue in ten is committed, and answered with REFUSED."""
    from pinlaterd.shard.operations import Enqueue

    reply = Enqueue.reply
    numbers = itertools.count(1)

    def refusing(self: Any, *arguments: Any) -> Any:
        if next(numbers) % 10 == 0:
            self.state.replies.refuse(self.entry, "?")
            return True
        return reply(self, *arguments)

    _replace(Enqueue, "reply", refusing)


# --- the router -----------------------------------------------------------------------------


def _short_dequeue() -> None:
    """The answer is what the first shards gave."""
    from pinlaterd.router.dequeue import Gathering

    go_on = Gathering._go_on

    def satisfied(self: Any) -> None:
        self._full |= self.jobs > 0
        go_on(self)

    _replace(Gathering, "_go_on", satisfied)


def _unanswered_calls() -> None:
    """One call in two hundred is never answered."""
    from pinlaterd.rpc.connection import Connection

    answered = Connection.answered
    numbers = itertools.count(1)

    def forgetful(self: Any, answer: Any, message: bytes) -> bool:
        return True if next(numbers) % 200 == 0 else answered(self, answer, message)

    _replace(Connection, "answered", forgetful)


def _waits_for_the_silent() -> None:
    """While a shard is silent the router stands still for 3 s with one call in a hundred."""
    from pinlaterd.wire.link import ShardLink

    assess, call = ShardLink._assess, ShardLink.call
    numbers = itertools.count(1)
    silent: set[str] = set()

    def noting(self: Any) -> None:
        assess(self)
        (silent.discard if self.answering else silent.add)(self.name)

    def waiting(self: Any, *arguments: Any, **options: Any) -> int | None:
        if silent and next(numbers) % 100 == 0:
            time.sleep(3)
        return call(self, *arguments, **options)

    _replace(ShardLink, "_assess", noting)
    _replace(ShardLink, "call", waiting)


def _any_priority() -> None:
    """Each shard gives the best that it has, whatever the others hold."""
    from pinlaterd.router import dequeue
    from pinlaterd.router.dequeue import Gathering

    ask = Gathering._ask

    def ask_for_any(self: Any, portions: Any) -> None:
        level, self._level = self._level, 0
        ask(self, portions)
        self._level = level

    _replace(Gathering, "_ask", ask_for_any)
    _replace(dequeue, "ready_through", lambda counts, _: sum(counts))


def _sent_is_released() -> None:
    """A shard makes all jobs of a lost answer pending again, whatever of it may have left."""
    from pinlaterd.shard.operations import ReleaseClaims
    from pinlaterd.wire.envelope import Op

    begin = ReleaseClaims.__init__

    def release_all(self: Any, entry: Any, state: Any) -> None:
        begin(self, entry._replace(op=Op.RELEASE), state)

    _replace(ReleaseClaims, "__init__", release_all)


def _cuts_end_jobs() -> None:
    """Permits that are taken from a shard are another's, though their jobs still run there."""
    from pinlaterd.wire.control import HeldPermits

    _replace(HeldPermits, "held", property(lambda self: self.permits))


_EXPLAINED = "every job is explained"


def _keys_overlooked() -> None:
    """A shard does not find one key in twenty."""
    from pinlaterd.engines.sqlite.keys import KeyIndex

    find = KeyIndex.find
    numbers = itertools.count(1)
    _replace(KeyIndex, "find", lambda *given: find(*given) if next(numbers) % 20 else {})


VARIANTS = {
    "keys-overlooked": Variant(_keys_overlooked, ("keys are held once",)),
    "sent-is-released": Variant(_sent_is_released, ("at most once",), seconds=4),
    "cuts-end-jobs": Variant(_cuts_end_jobs, ("limits are kept",), role="coordinator", seconds=4),
    "no-claim-compare": Variant(_no_claim_compare, (_EXPLAINED,), seconds=8),
    "no-token-compare": Variant(
        _no_token_compare,
        ("owners never overlap",),
        faults=("second owner",),
        engine="redis",
    ),
    "answer-without-commit": Variant(_answer_without_commit, (_EXPLAINED,)),
    "ids-from-the-count": Variant(_ids_from_the_count, ("no errors without faults",), seconds=4),
    "attempts-kept": Variant(_attempts_kept, (_EXPLAINED,)),
    "early-time-out": Variant(_early_time_out, (_EXPLAINED,), seconds=6),
    "claims-never-end": Variant(_claims_never_end, ("claims end",), drained=True),
    "steps-followed-at-once": Variant(
        _steps_followed_at_once, (_EXPLAINED,), faults=("clock",), seconds=3
    ),
    "gauges-adrift": Variant(_gauges_adrift, ("depths equal rows",), drained=True),
    "latest-first": Variant(_latest_first, ("earliest first",)),
    "forgotten-keys": Variant(
        _forgotten_keys, ("no short dequeue", "ready index equals store"), drained=True
    ),
    "swapped-bodies": Variant(_swapped_bodies, ("a descriptor names one job for ever",)),
    "one-claim-for-all": Variant(_one_claim_for_all, ("claims are unique",)),
    "refused-but-stored": Variant(_refused_but_stored, ("one row a body",)),
    "unanswered-calls": Variant(_unanswered_calls, ("answers come in time",), role="router"),
    "waits-for-the-silent": Variant(
        _waits_for_the_silent,
        ("neighbours are not slowed",),
        role="router",
        faults=("stop shard",),
        seconds=3,
    ),
    "short-dequeue": Variant(_short_dequeue, ("no short dequeue",), role="router"),
    "any-priority": Variant(_any_priority, ("priorities in order",), role="router", seconds=8),
}
