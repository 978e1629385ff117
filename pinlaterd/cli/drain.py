"""`pinlater-admin shard drain`: a shard takes no new jobs, and gets rid of those that it has.

    dequeue-only, followed by all  ->  --move: scheduled jobs go to other shards
                                   ->  --wait: until nothing is pending or running

What a shard says it holds was counted after it followed, so that nothing can be added to it but
by its own jobs: those that become due, or fail and are to be retried later.

How scheduled jobs are moved, at least once, and in which order: docs/architecture.md. An enqueue of
unknown outcome is made again. A shard that is killed within an ack leaves its jobs claimed; the
next move ends those.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pinlaterd.cli import command, service_status
from pinlaterd.cli.shards import set_dequeue_only, shard
from pinlaterd.client import calls
from pinlaterd.client.calls import PreparedCall
from pinlaterd.config.layout import move_lock
from pinlaterd.errors import (
    ConnectionFailed,
    InvalidRequest,
    Overloaded,
    PinLaterError,
    QueueNotFound,
    RequestError,
)
from pinlaterd.model import (
    AckInfo,
    CallContext,
    Job,
    JobDescriptor,
    JobRecord,
    JobState,
    claim_source,
    key_of,
)
from pinlaterd.rpc import codec
from pinlaterd.status import shards_of
from pinlaterd.wire.control import read_snapshot
from pinlaterd.wire.envelope import Op, Status
from pinlaterd.wire.key_placement import KeyHomes, KeyPlacement
from pinlaterd.wire.shard_caller import ShardCaller, ShardCallers

T = TypeVar("T")

_POLL_SECONDS = 0.5
_REPORT_SECONDS = 2.0  # no figure is older
_RATE_SECONDS = 30.0
_MOST_KEPT_SHOWN = 10
# What is due so soon runs where it is: the ack on the source has to come before that.
_SOON_SECONDS = 10.0
_BATCH_JOBS = 100
# How often all shards are asked to take a batch before it stays where it is.
_ROUNDS = 3
_ROUND_SECONDS = 1.0
_ENQUEUE_SECONDS = 2.0
_CALL_SECONDS = 10.0
_PATIENCE_SECONDS = 30.0
_RETRY_SECONDS = 0.1
_PAGE_JOBS = 1_000
_CONTEXT = CallContext("pinlater-admin drain")


@shard.command()
@click.argument("name")
@click.option("--wait", is_flag=True, help="Return once nothing is pending or running there.")
@click.option(
    "--move", is_flag=True, help="Move jobs that are scheduled for later to other shards."
)
@command.yes_option
@command.files_options
def drain(*, name: str, wait: bool, move: bool, yes: bool) -> None:
    """Have shard NAME take no new jobs, so that it becomes empty.

    Once this returns, no job is enqueued there any more. Jobs that are scheduled for later do not
    hold up --wait: --move enqueues them on other shards with the attempts that they
    have left; what is due within 10 s runs where it is. Their old descriptors tell the
    new ones as long as succeeded jobs are kept; keys go along. No job is lost if a --move is cut
    short, but some may be in both places then.

    Examples:
      pinlater-admin shard drain 3 --wait
      pinlater-admin shard drain 3 --wait --move --yes && pinlater-admin shard remove 3
    """
    if move:
        command.confirm(
            f"Give the scheduled jobs of shard {name} new descriptors, elsewhere?", yes=yes
        )
    acts = set_dequeue_only(name, on=True, yes=yes)
    command.enter()  # the paths of sockets have to be short
    with ShardCallers() as callers, _Bar(f"draining shard {name}") as bar:
        work = _Drain(name, callers, bar, moves=move)
        jobs = work.run(wait=wait)
        latest_ms = work.latest_ms() if jobs is not None and jobs["scheduled"] else None
    facts = {
        "shard": name,
        "dequeue_only": True,
        "acts": acts,
        "jobs": jobs,
        "latest_run_after_ms": latest_ms,
        "moved": work.move.moved,
        "kept": [kept._asdict() for kept in work.move.kept],
    }
    command.show(facts, "\n".join(_report(name, work.move, jobs, latest_ms)))


def _report(
    name: str, move: Move, jobs: Mapping[str, int] | None, latest_ms: int | None
) -> Iterator[str]:
    if move.moved:
        yield f"{move.moved:,} scheduled jobs were moved to other shards"
    for kept in move.kept[:_MOST_KEPT_SHOWN]:
        yield f"  not moved: {kept.descriptor}: {command.printable(kept.reason)}"
    if len(move.kept) > _MOST_KEPT_SHOWN:
        yield f"  … and {len(move.kept) - _MOST_KEPT_SHOWN:,} more"
    if jobs is None:
        yield f"shard {name} does not serve, or counts its jobs: what it holds is not known"
        return
    yield f"shard {name} holds {jobs['pending']:,} pending and {jobs['in_progress']:,} running jobs"
    if jobs["scheduled"]:
        latest = "" if latest_ms is None else f", the last for {command.shown_time(latest_ms)}"
        yield (
            f"and {jobs['scheduled']:,} scheduled for later{latest}: wait for them, or have them "
            f"moved: `pinlater-admin shard drain {name} --wait --move`"
        )
    elif not (jobs["pending"] or jobs["in_progress"]):
        yield f"`pinlater-admin shard remove {name}` takes it out of the service"


class _Bar(Progress):
    """A progress bar, shown only on a terminal."""

    def __init__(self, what: str) -> None:
        console = Console(stderr=True)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} jobs"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=_RATE_SECONDS,
            disable=not console.is_terminal,
        )
        self._what = what
        self._task = self.add_task(what, total=0, rate="")

    def left(self, jobs: int) -> None:
        """Note that so many are to go. If they are more than before, the whole is more, too."""
        task = self.tasks[0]
        total = max(task.total or 0, task.completed + jobs)
        speed = f"{task.speed:,.0f}/s" if task.speed else ""
        self.update(
            self._task, description=self._what, total=total, completed=total - jobs, rate=speed
        )

    def did(self, jobs: int) -> None:
        self.advance(self._task, jobs)

    def say(self, text: str) -> None:
        self.update(self._task, description=text)


class _Drain:
    """One shard on its way to being empty."""

    def __init__(self, name: str, callers: ShardCallers, bar: _Bar, *, moves: bool) -> None:
        self._name = name
        self._callers = callers
        self._source = ShardCalls(callers[name])
        self._bar = bar
        self._moves = moves
        self.move = Move(self._source, self._takers, bar.did)

    def run(self, *, wait: bool) -> Mapping[str, int] | None:
        """Drain the shard; return the counts of jobs it holds in the end, None if unknown."""
        found = self._look()
        if self._moves:
            self._move()
            time.sleep(_REPORT_SECONDS)
            found = self._look()
        while wait and not self._is_empty(found):
            time.sleep(_POLL_SECONDS)
            found = self._look()
            if found is not None and self._can_move(found):
                self._move()
        return found

    def _is_empty(self, jobs: Mapping[str, int] | None) -> bool:
        """Return whether no job is left that is to go."""
        return jobs is not None and not (
            jobs["pending"] or jobs["in_progress"] or self._can_move(jobs)
        )

    def _can_move(self, jobs: Mapping[str, int]) -> bool:
        return self._moves and jobs["scheduled"] > len(self.move.kept)

    def _look(self) -> Mapping[str, int] | None:
        found = service_status.find_shard(self._name)
        if found is None:
            command.fail(f"shard {self._name} is not part of the service any more")
        jobs: Mapping[str, int] | None = found["jobs"] if found["state"] == "serving" else None
        if jobs is None:
            doing = "counting its jobs" if found["state"] == "serving" else found["state"]
            self._bar.say(f"shard {self._name} is {doing}")
        else:
            scheduled = jobs["scheduled"] if self._moves else 0
            self._bar.left(jobs["pending"] + jobs["in_progress"] + scheduled)
        return jobs

    def _move(self) -> None:
        busy = f"another command moves the jobs of shard {self._name}; wait until it has ended"
        with command.sole(move_lock(self._name), busy):
            self.move.run()

    def _takers(self) -> list[ShardCalls]:
        return [
            ShardCalls(self._callers[shard["name"]])
            for shard in shards_of(service_status.take_sample())
            if shard["name"] != self._name
            and shard["state"] == "serving"
            and not (shard["dequeue_only"] or shard["degraded"])
        ]

    def latest_ms(self) -> int | None:
        """Return the latest run-after of a scheduled job."""
        found: list[JobRecord] = []
        for queue in self._source.queues():
            with contextlib.suppress(QueueNotFound):  # deleted meanwhile
                found += islice(self._source.scan(queue, JobState.PENDING, future=True), 1)
        return max((record.run_after_ms for record in found), default=None)


# --- moves ------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """A job that no other shard takes, and why."""

    descriptor: str
    reason: str


class Move:
    """A move of the scheduled jobs of `source` to the shards of `takers()`. `on_moved(count)` is
    called as jobs are moved. `kept`: left by the last run; `moved`: by all."""

    def __init__(
        self,
        source: ShardCalls,
        takers: Callable[[], Sequence[ShardCalls]],
        on_moved: Callable[[int], None],
    ) -> None:
        self._source = source
        self._takers = takers
        self._on_moved = on_moved
        self.moved = 0
        self.kept: list[Kept] = []

    def run(self) -> None:
        """Move all jobs that are scheduled by now.

        Raises ConnectionFailed, PinLaterError: then some are moved, and a repeat goes on."""
        self.kept = []
        for queue in self._source.queues():
            found = self._source.scan(queue, JobState.PENDING, future=True)
            with contextlib.suppress(QueueNotFound):  # deleted meanwhile, with its jobs
                self._end_claimed(queue)
                for batch in _batches(found):
                    self._move(queue, [record.descriptor for record in batch])

    def _end_claimed(self, queue: str) -> None:
        """End jobs that an earlier ack has only claimed: their copies were stored before."""
        claimed = (
            AckInfo(record.descriptor, "moved")
            for future in (True, False)  # in this order, one that comes due meanwhile is met
            for record in self._source.scan(queue, JobState.IN_PROGRESS, future=future)
            if claim_source(record.claim_descriptor or "") == _CONTEXT.source
        )
        for batch in _batches(claimed):
            self._source.ack_scheduled(queue, batch)

    def _move(self, queue: str, descriptors: Sequence[str]) -> None:
        try:
            found = self._source.look_up(descriptors)
        except InvalidRequest as error:  # their bodies are too much for one answer
            self._keep_or_halve(queue, descriptors, str(error))
            return
        scheduled: defaultdict[str, list[JobRecord]] = defaultdict(list)
        snapshot = read_snapshot()
        homes = KeyHomes(KeyPlacement() if snapshot is None else snapshot.keys)
        soon_ms = (time.time() + _SOON_SECONDS) * 1000
        for record in found.values():
            if record.state is JobState.PENDING and record.run_after_ms > soon_ms:
                key = key_of(queue, record.options)
                scheduled[homes.of(key).responsible if key else ""].append(record)
        for home, records in scheduled.items():
            self._move_records(queue, records, home, homes.placement.number if home else 0)

    def _move_records(
        self, queue: str, records: Sequence[JobRecord], home: str, placement: int
    ) -> None:
        """Move jobs to any shard, or to the `home` of their keys under a placement. There the copy
        is found once the job that it replaces has gone; until then that job still holds its key."""
        stored, reason = self._store(queue, [_copy(record) for record in records], home, placement)
        if not stored:
            left = [record.descriptor for record in records]
            self._keep_or_halve(queue, left, reason or "no other shard takes jobs now")
            return
        now_ms = time.time() * 1000
        self._source.ack_scheduled(
            queue,
            [
                AckInfo(record.descriptor, f"moved to {new}")
                for record, new in zip(records, stored, strict=True)
                # One that is due by now may have run there, and wait for its next run.
                if record.run_after_ms > now_ms
            ],
        )
        self.moved += len(records)
        self._on_moved(len(records))

    def _store(self, queue: str, jobs: Sequence[Job], home: str, placement: int) -> Enqueued:
        """Store all of them on one shard, or none."""
        reason = ""
        for _ in range(_ROUNDS):
            takers = [taker for taker in self._takers() if home in ("", taker.name)]
            for taker in random.sample(takers, len(takers)):
                result = taker.enqueue(queue, jobs, placement)
                if result.descriptors:
                    return result
                reason = result.reason or reason
            time.sleep(_ROUND_SECONDS)
        return Enqueued(reason=reason)

    def _keep_or_halve(self, queue: str, descriptors: Sequence[str], reason: str) -> None:
        """Divide what can't go together: those that can go alone, go."""
        if len(descriptors) > 1 and self._takers():
            middle = len(descriptors) // 2
            self._move(queue, descriptors[:middle])
            self._move(queue, descriptors[middle:])
        else:
            self.kept += [Kept(descriptor, reason) for descriptor in descriptors]


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, _BATCH_JOBS)):
        yield batch


def _copy(record: JobRecord) -> Job:
    """Make the job as it goes on elsewhere: with the attempts left, and where it comes from."""
    assert record.body is not None
    place = JobDescriptor.parse(record.descriptor)
    assert place is not None
    left, allowed = max(1, record.attempts_remaining), record.attempts_allowed
    attempts = f" ({left} of {allowed} attempts left)" if left != allowed else ""
    before = f"; {record.custom_status}" if record.custom_status else ""
    origin = f"moved from {record.descriptor}{attempts}"
    status = origin + before
    return Job(record.body, place.priority, record.run_after_ms, left, status, record.options)


# --- what is asked of a shard -----------------------------------------------------------------


class Enqueued(NamedTuple):
    """`descriptors` of the jobs, in their order; none if nothing is known to be stored, with
    `reason` if something is wrong with the jobs."""

    descriptors: Sequence[str] = ()
    reason: str = ""


class ShardCalls:
    """One shard. All but `enqueue` may be repeated, and are until the shard answers, for a while:
    it may be restarting. Then they raise ConnectionFailed; PinLaterError for what it refuses."""

    def __init__(self, caller: ShardCaller) -> None:
        self.name = caller.name
        self._caller = caller

    def queues(self) -> Sequence[str]:
        names = self._ask(calls.queue_names())
        return sorted(names)

    def scan(self, queue: str, state: JobState, *, future: bool) -> Iterator[JobRecord]:
        call = calls.scan(queue, state, future=future, page_size=_PAGE_JOBS)
        for page in calls.pages(self._ask, call):
            yield from page.jobs

    def look_up(self, descriptors: Sequence[str]) -> Mapping[str, JobRecord]:
        """Look jobs up, with bodies. Raises InvalidRequest if these are too many for one answer."""
        return self._ask(calls.lookup(descriptors, include_body=True))

    def ack_scheduled(self, queue: str, acks: Sequence[AckInfo]) -> None:
        """End jobs as succeeded. Those that are due by now, or have ended, stay as they are."""
        self._ask(calls.ack(queue, succeeded=acks), Op.ACK_SCHEDULED)

    def enqueue(self, queue: str, jobs: Sequence[Job], placement: int = 0) -> Enqueued:
        """Enqueue all jobs, or none; `placement`: by which their keys belong here. Never repeat it:
        those without keys could be stored twice."""
        call = calls.enqueue(queue, jobs)
        try:
            stored = self._ask_once(call, seconds=_ENQUEUE_SECONDS, placement=placement)
            return Enqueued(stored)
        except (QueueNotFound, Overloaded):  # a shard that has just joined, or is busy
            return Enqueued()
        except RequestError as error:
            return Enqueued(reason=str(error))
        except (PinLaterError, ConnectionFailed):
            return Enqueued()

    def _ask(self, call: PreparedCall[T], op: Op = Op.CALL) -> T:
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return self._ask_once(call, seconds=_CALL_SECONDS, op=op)
            except RequestError:
                raise
            # Its store is being opened again, say, or locked for a while.
            except (PinLaterError, ConnectionFailed):
                if time.monotonic() >= until:
                    raise
            time.sleep(_RETRY_SECONDS)

    def _ask_once(
        self, call: PreparedCall[T], *, seconds: float, op: Op = Op.CALL, placement: int = 0
    ) -> T:
        message = call.encode(0, _CONTEXT)
        reply = self._caller.call(message, seconds=seconds, op=op, placement=placement)
        if reply.status not in (Status.DONE, Status.FAILED):
            raise ConnectionFailed(
                f"shard {self._caller.name} does not answer; nothing is lost: when it serves "
                "again, repeat the command"
            )
        return call.result(codec.decode_reply(call.method, reply.payload))
