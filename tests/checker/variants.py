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
    """What breaks, in which process, and what it takes to find it."""

    breaks: Callable[[], None]
    role: str = "shard"
    engine: str = "sqlite"
    faults: tuple[str, ...] = ("none",)
    seconds: float = 3.0
    large: bool = False  # whether a client is cut off within large answers


def apply(name: str) -> None:
    """In a process that starts: break it, if it is one that the variant concerns."""
    variant = VARIANTS[name]
    if "pinlaterd" in sys.orig_argv and variant.role in sys.orig_argv:
        variant.breaks()


def _replace(owner: Any, name: str, value: object) -> None:
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    setattr(owner, name, value)


# --- the engine -----------------------------------------------------------------------------


def _no_claim_compare() -> None:
    """An ack, or checkpoint, under a claim that has ended acts on the job's new claim."""
    from pinlaterd.engines.sqlite import attempts, batch

    for module in (attempts, batch):
        _replace(module, "is_held_under", lambda _held, _given: True)


def _answer_before_commit() -> None:
    """Of twenty batches one is committed, with those before it; all are answered."""
    from pinlaterd.engines.sqlite.store import _RESERVED_IDS, Store, Transaction

    numbers = itertools.count(1)

    @contextlib.contextmanager
    def commit(self: Any, now_ms: int) -> Iterator[Transaction]:
        tx = Transaction(self.db, now_ms)
        if not self.db.in_transaction:
            self.db.execute("BEGIN IMMEDIATE")
        yield tx
        if self._next_local_id > self._marked_local_id:
            self._marked_local_id = self._next_local_id + _RESERVED_IDS
            self._set_meta(tx, {"next_local_id": self._marked_local_id})
        self._write_depths(tx)
        if now_ms == 0 or next(numbers) % 20 == 0:
            self.db.execute("COMMIT")
        for (queue_id, priority, state), jobs in tx.depth_changes.items():
            self._change_depth(queue_id, (priority, state), jobs)

    _replace(Store, "commit", commit)


def _ids_from_the_count() -> None:
    """A new job's id is one more than there are jobs: deletes make it another's."""
    from pinlaterd.engines.sqlite.store import Store

    def take_local_ids(self: Any, count: int) -> range:
        (jobs,) = self.db.execute("SELECT count(*) FROM jobs").fetchone()
        return range(jobs + 1, jobs + 1 + count)

    _replace(Store, "take_local_ids", take_local_ids)


def _attempts_kept() -> None:
    """A failed attempt costs none."""
    from pinlaterd.engines.sqlite import attempts

    fail_attempts = attempts.fail_attempts

    def fail(tx: Any, queue_id: int, failed: Any) -> Any:
        requeued = fail_attempts(tx, queue_id, failed)
        tx.db.executemany(
            "UPDATE jobs SET attempts_remaining = attempts_remaining + 1 WHERE local_id = ?",
            [(job.key.local_id,) for job in requeued],
        )
        return requeued

    _replace(attempts, "fail_attempts", fail)


# --- the shard ------------------------------------------------------------------------------


def _no_deadline_drop() -> None:
    """A call is carried out however late it is."""
    from pinlaterd.shard.service import ShardService

    submit = ShardService.submit

    def late(self: Any, arrivals: Any) -> None:
        submit(
            self,
            [a._replace(entry=a.entry._replace(deadline=float("inf"))) for a in arrivals],
        )

    _replace(ShardService, "submit", late)


def _lost_release() -> None:
    """Claims that could not be delivered are not released."""
    from pinlaterd.shard.planning import Planner
    from pinlaterd.shard.works import ReleaseWork

    _replace(Planner, "release", lambda self, arrival: ReleaseWork(arrival, ()))


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


def _latest_first() -> None:
    from pinlaterd.shard.ready import ReadyIndex

    take = ReadyIndex.take

    def reversed_take(self: Any, queue: str, *rest: Any) -> Any:
        lines = self._queues[queue]
        for line in lines:
            line.keys.reverse()
        try:
            return take(self, queue, *rest)
        finally:
            for line in lines:
                line.keys.reverse()

    _replace(ReadyIndex, "take", reversed_take)


def _forgotten_keys() -> None:
    """One job in fifty is in the store and not in the ready index."""
    from pinlaterd.shard.ready import ReadyIndex

    add = ReadyIndex.add
    numbers = itertools.count(1)

    def forgetful(self: Any, queue: str, priority: int, keys: Any, now_ms: int) -> int:
        kept = [key for key in keys if next(numbers) % 50]
        return add(self, queue, priority, kept, now_ms)

    _replace(ReadyIndex, "add", forgetful)


def _swapped_bodies() -> None:
    from pinlaterd.shard.fresh import FreshPayloads

    take = FreshPayloads.take

    def swapped(self: Any, *arguments: Any) -> Any:
        taken = take(self, *arguments)
        return taken[::-1] if taken else taken

    _replace(FreshPayloads, "take", swapped)


def _one_claim_for_all() -> None:
    """The jobs of one dequeue share a claim descriptor."""
    from pinlaterd.shard.dequeues import ClaimDescriptors

    begin = ClaimDescriptors.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self.counter = itertools.repeat(7)

    _replace(ClaimDescriptors, "__init__", init)


def _refused_but_stored() -> None:
    """One enqueue in ten is committed, and answered with REFUSED."""
    from pinlaterd.shard import works

    conclude = works.EnqueueWork.conclude
    numbers = itertools.count(1)

    def refusing(self: Any, *arguments: Any) -> Any:
        entry = conclude(self, *arguments)
        return works.refused(self.arrival, "?") if next(numbers) % 10 == 0 else entry

    _replace(works.EnqueueWork, "conclude", refusing)


def _slow_answers() -> None:
    """Not broken by itself: gives a kill the time to fall between a commit and its answer."""
    from pinlaterd.shard.loop import ShardLoop

    publish = ShardLoop._publish

    def slow(self: Any) -> None:
        time.sleep(0.3)
        publish(self)

    _replace(ShardLoop, "_publish", slow)


# --- the router -----------------------------------------------------------------------------


def _repeated_enqueue() -> None:
    """An enqueue of unknown outcome is given to another shard."""
    if "shard" in sys.orig_argv:
        _slow_answers()
    else:
        from pinlaterd.wire import router_end

        _replace(router_end, "_LOST", router_end._DOWN)


def _short_dequeue() -> None:
    """The answer is what the first shards gave."""
    from pinlaterd.router.dequeue import _Gathering

    unconfirmed = _Gathering.unconfirmed

    def satisfied(self: Any, level: int) -> Any:
        return [] if self.jobs else unconfirmed(self, level)

    _replace(_Gathering, "unconfirmed", satisfied)


def _any_priority() -> None:
    """Each shard gives the best that it has, whatever the others hold."""
    from pinlaterd.router import routing
    from pinlaterd.router.dequeue import _Gathering

    ask = _Gathering.ask
    _replace(_Gathering, "ask", lambda self, portions, _: ask(self, portions, 0))
    _replace(routing, "ready_through", lambda counts, _: sum(counts))


VARIANTS = {
    "no-claim-compare": Variant(_no_claim_compare, seconds=8.0),
    "answer-before-commit": Variant(_answer_before_commit, faults=("kill shard",)),
    "ids-from-the-count": Variant(_ids_from_the_count),
    "attempts-kept": Variant(_attempts_kept),
    "no-deadline-drop": Variant(_no_deadline_drop, faults=("stop shard",), seconds=4),
    "lost-release": Variant(_lost_release, large=True),
    "early-time-out": Variant(_early_time_out, seconds=4),
    "latest-first": Variant(_latest_first),
    "forgotten-keys": Variant(_forgotten_keys),
    "swapped-bodies": Variant(_swapped_bodies),
    "one-claim-for-all": Variant(_one_claim_for_all),
    "refused-but-stored": Variant(_refused_but_stored),
    "repeated-enqueue": Variant(
        _repeated_enqueue, role="pinlaterd", faults=("kill shard",), seconds=10
    ),
    "short-dequeue": Variant(_short_dequeue, role="router"),
    "any-priority": Variant(_any_priority, role="router", seconds=8.0),
}
