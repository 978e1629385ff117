"""Operations: retries and deletes of many jobs, done in batches while people watch.

An operation finds its jobs by scans, and changes a batch at a time by descriptors, those only that
ended before its cut-off. So a batch may be sent again: no job is changed twice. Of a queue one
operation works at a time. Each has a record in data/operations, which is fsynced before and after
every batch. One that was under way when the process ended is `interrupted`, and goes on when it is
told to. A try stops behind its first jobs and asks. A restore enqueues each job once at most: what
may have been enqueued is not sent again, as a job that has run and is gone leaves no trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pinlaterd.client import calls
from pinlaterd.client.calls import PreparedCall
from pinlaterd.clock import Clock
from pinlaterd.config.layout import replace_file
from pinlaterd.errors import (
    ConnectionFailed,
    EnqueuedInPart,
    InvalidRequest,
    OutcomeUnknown,
    PinLaterError,
    ShardConnectionFailed,
)
from pinlaterd.model import (
    ALL_PRIORITIES,
    Job,
    JobChoice,
    JobRecord,
    JobState,
    LookupRequest,
    QueueKey,
    ScanResult,
    key_of,
)
from pinlaterd.router_client import RouterClient
from pinlaterd.web.audit import AuditLog
from pinlaterd.web.trash import Trash, TrashFull

log = logging.getLogger(__name__)

FIRST_JOBS = 10  # of a try
RESTORE = "restore"  # an operation that enqueues again what a delete has deleted
_BATCH_JOBS = 500
_RESTORED_JOBS = 100  # at a time: so many, at most, are left out where the process ended meanwhile
_SETTLE_SECONDS = 2.0  # after which it is tried again
_KEPT = 500  # operations whose records are kept
_FULL = "the trash is full: what is deleted from here on can't be restored"
_ENDED = "the dashboard was ended"


class Phase(StrEnum):
    """The phases of an operation."""

    RUNNING = "running"
    ASKING = "asking"  # whether to go on behind the first jobs, or without the trash
    INTERRUPTED = "interrupted"  # its process ended, or the service failed
    STOPPED = "stopped"
    DONE = "done"


ENDED = (Phase.DONE, Phase.STOPPED, Phase.INTERRUPTED)


class Selection(msgspec.Struct, frozen=True):
    """The jobs that an operation is for. The cut-off is the end of `choice` for jobs that have
    ended, `unchanged_since_ms` for others: jobs that were enqueued, claimed or renewed later stay.
    """

    queue: str
    state: str
    choice: JobChoice = JobChoice()
    body_regex: str | None = None
    unchanged_since_ms: int | None = None
    priority: int | None = None

    def may_have(self, job: JobRecord) -> bool:
        """Tell whether a job may be one that a selection by descriptors is for, by its state and
        its last change."""
        since_ms = self.unchanged_since_ms
        is_unchanged = since_ms is None or job.updated_at_ms < since_ms
        return job.state is self.job_state and is_unchanged

    @property
    def job_state(self) -> JobState:
        return JobState[self.state.upper()]

    @property
    def has_ended(self) -> bool:
        """Tell whether its jobs are scanned by their ends."""
        return self.job_state in (JobState.FAILED, JobState.SUCCEEDED)

    @property
    def has_order(self) -> bool:
        """Tell whether the shards change some of its jobs in an order: where nothing chooses them
        but their state and priority."""
        is_chosen = self.choice or self.body_regex is not None
        return not is_chosen and self.unchanged_since_ms is None


class Operation(msgspec.Struct):
    """An operation as its record has it."""

    what: str  # retry, delete or RESTORE
    who: str
    nonce: str  # of the form that has begun it
    selection: Selection
    number: int = 0
    attempts: int = 1
    per_second: float = 0.0  # 0: all at once
    reason: str = ""
    expected: int = 0  # jobs, as the preview counted them
    is_bound: bool = False  # whether there may be more
    phase: Phase = Phase.RUNNING
    note: str = ""  # why it is in that phase
    place: str = ""  # where its scan goes on
    done: int = 0
    missed: int = 0  # jobs that had changed meanwhile; of a restore, whose keys others hold
    unsure: int = 0  # jobs of a batch whose outcome is not known
    first_jobs: int = 0  # to stop behind; 0: at none
    most: int = 0  # to change; 0: all
    tried: list[str] = []
    without_trash: bool = False
    spread_from_ms: int = 0
    source: int = 0  # the delete that it restores
    sent: list[QueueKey] = []  # keys of the jobs of its batch that may be stored
    expired: int = 0  # jobs that it restores no more
    doubtful: int = 0  # that may have been stored, and have run

    def is_stopped(self) -> bool:
        """Return whether it has been told to end."""
        return self.phase is Phase.STOPPED

    @property
    def seen(self) -> int:
        """Return how many of its jobs it is done with."""
        return self.done + self.missed + self.expired + self.doubtful

    @property
    def outcome(self) -> str:
        """Say how it has ended, or stands."""
        verb = {"retry": "retried", "delete": "deleted"}.get(self.what, "enqueued again")
        parts, missed = [f"{self.done:,} {verb}"], "had changed meanwhile"
        if self.what == RESTORE:
            missed = "not, as other jobs hold their keys"
        counts = {
            missed: self.missed,
            "not, as they have expired": self.expired,
            "not, as they may have run: it was interrupted while it sent them": self.doubtful,
            "unknown": self.unsure,
        }
        if self.what == RESTORE and self.phase is Phase.DONE:
            counts["not, as the trash does not have them"] = self.expected - self.seen
        parts += [f"{count:,} {words}" for words, count in counts.items() if count > 0]
        text = f"{self.phase}: {', '.join(parts)}"
        return f"{text}; {self.note}" if self.note else text


class Operations:
    """The operations of one deployment, for one event loop."""

    def __init__(self, client: RouterClient, data: Path, audit: AuditLog, clock: Clock) -> None:
        self._client = client
        self._audit = audit
        self._clock = clock
        self._folder = data / "operations"
        self.trash = Trash(data / "trash", clock)
        self._known = _load(self._folder)
        audit.add_known({known.nonce: number for number, known in sorted(self._known.items())})
        self._tasks: dict[asyncio.Task[None], int] = {}  # the number of its operation, each
        self._queues: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        # The queues of deletes that may not have noted which jobs of their last batch are left.
        self._unsettled = {
            number: operation.selection.queue
            for number, operation in self._known.items()
            if operation.what == "delete"
        }
        self._settling: dict[str, asyncio.Task[None]] = {}  # by queue

    def get(self, number: int) -> Operation | None:
        """Return an operation, if it is known."""
        return self._known.get(number)

    async def begin(self, operation: Operation) -> Operation:
        """Begin an operation, which gets its number. Raises OSError, with nothing begun."""
        # Known by its nonce before anything is waited for: a double click comes meanwhile.
        number = self._audit.next_number(operation.nonce)
        operation.number, self._known[number] = number, operation
        shown = ("attempts", "per_second", "reason", "source", "expected", "nonce")
        facts = {name: value for name in shown if (value := getattr(operation, name))}
        facts |= {"queue": operation.selection.queue, "selection": operation.selection}
        try:
            await asyncio.to_thread(self._audit.begin, number, operation.who, operation.what, facts)
            await self._store(operation)
        except OSError:
            del self._known[number]
            self._audit.forget(operation.nonce)
            raise
        self._start(operation)
        return operation

    def go_on(self, operation: Operation) -> None:
        """Have an operation go on that asks, was stopped or interrupted."""
        if operation.phase not in (Phase.DONE, Phase.RUNNING):
            operation.without_trash = operation.without_trash or operation.note == _FULL
            operation.first_jobs = 0
            operation.phase, operation.note = Phase.RUNNING, ""
            self._start(operation)

    async def steer(self, operation: Operation, what: str, who: str) -> None:
        """Have an operation go on or stop, by somebody who may not have begun it. Raises OSError,
        with nothing done."""
        await asyncio.to_thread(self._audit.end, operation.number, f"{what} by {who}")
        if what == "go_on":
            self.go_on(operation)
        else:
            self.stop(operation)

    async def restore(self, deleted: Operation, who: str) -> Operation:
        """Begin to enqueue again what an operation has deleted. Raises OSError."""
        again = Operation(RESTORE, who, nonce_of_restore(deleted.number), deleted.selection)
        again.source, again.expected = deleted.number, deleted.done
        return await self.begin(again)

    def known(self) -> Sequence[Operation]:
        """Return all operations that are remembered, the latest first."""
        return [self._known[number] for number in sorted(self._known, reverse=True)]

    def is_restored(self, operation: Operation) -> bool:
        """Return whether what an operation has deleted was enqueued again, which happens once.
        Raises OSError."""
        return self._audit.number_of(nonce_of_restore(operation.number)) is not None

    def can_restore(self, operation: Operation | None) -> bool:
        """Return whether an operation is a delete that has ended, and has jobs in the trash which
        were not enqueued again. Raises OSError."""
        if operation is None or operation.what != "delete" or operation.phase not in ENDED:
            return False
        return self.trash.holds(operation.number) and not self.is_restored(operation)

    def settle(self) -> None:
        """Have deletes whose last batch was cut short, here or in the process before this one, note
        which of its jobs are left: as soon as can be, since these may run and be removed."""
        for queue in set(self._unsettled.values()) - self._settling.keys():
            task = asyncio.create_task(self._settle_until_done(queue), name=f"settle {queue}")
            self._settling[queue] = task

    def stop(self, operation: Operation) -> None:
        """Have an operation end behind the batch that is under way."""
        if operation.phase is not Phase.DONE:
            is_running = operation.phase is Phase.RUNNING
            operation.phase, operation.note = Phase.STOPPED, ""
            if not is_running:
                self._start(operation)

    def _start(self, operation: Operation) -> None:
        task = asyncio.create_task(self._run(operation), name=f"operation {operation.number}")
        self._tasks[task] = operation.number
        task.add_done_callback(self._tasks.pop)
        working = set(self._tasks.values())
        for number in sorted(self._known)[:-_KEPT]:
            known = self._known[number]
            has_ended = known.phase in (Phase.DONE, Phase.STOPPED) and number not in working
            # A restore is known as long as what it restores: else that could be restored again.
            if has_ended and not any(map(self.trash.holds, (number, known.source))):
                del self._known[number]
                _file(self._folder, number).unlink(missing_ok=True)

    async def _store(self, operation: Operation) -> None:
        record = msgspec.json.encode(operation)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _file(self._folder, operation.number)
        await asyncio.to_thread(replace_file, file, record, durably=True)

    # --- one operation -------------------------------------------------------------------------

    async def _run(self, operation: Operation) -> None:
        """Work until it is done, is stopped, asks, or fails; note that in the audit log."""
        # Keep the lock until the outcome is stored: otherwise a "Go on" would start a second task
        # meanwhile.
        async with self._queues[operation.selection.queue]:
            try:
                if operation.phase is Phase.RUNNING:
                    await self._settle(operation.selection.queue)
                    steps = self._restore if operation.what == RESTORE else self._change
                    await steps(operation)
            except (PinLaterError, ConnectionFailed, OSError) as error:
                operation.phase, operation.note = Phase.INTERRUPTED, str(error)
            except Exception as error:
                operation.phase, operation.note = Phase.INTERRUPTED, repr(error)
                log.exception("operation %d failed", operation.number)
            self.settle()
            with contextlib.suppress(OSError):  # the disk may be what failed
                await self._store(operation)
                await asyncio.to_thread(self._audit.end, operation.number, operation.outcome)

    async def _change(self, operation: Operation) -> None:
        """Retry or delete the jobs that scans find, batch by batch."""
        async for descriptors, place_behind in self._batches(operation):
            if operation.is_stopped():  # while it looked for them
                return
            keeps = operation.what == "delete" and not operation.without_trash
            if keeps:
                self._unsettled[operation.number] = operation.selection.queue
                try:
                    await self._keep(operation, descriptors)
                except TrashFull:
                    operation.phase, operation.note = Phase.ASKING, _FULL
                    return
            await self._store(operation)
            missed = operation.missed
            await self._send(operation, descriptors)
            if keeps:
                left = await self._there(descriptors) if operation.missed > missed else ()
                await asyncio.to_thread(self.trash.add_left, operation.number, left)
                del self._unsettled[operation.number]
            operation.tried += descriptors[: FIRST_JOBS - len(operation.tried)]
            operation.place = place_behind
            await self._store(operation)
            if operation.phase is not Phase.RUNNING:
                return
            if operation.first_jobs and len(operation.tried) >= operation.first_jobs:
                operation.phase = Phase.ASKING
                return
        operation.phase = Phase.DONE

    async def _send(self, operation: Operation, descriptors: Sequence[str]) -> None:
        """Change a batch; where that is not known to be done, count again what is left."""
        selection, due = operation.selection, descriptors
        if selection.choice.descriptors is not None and selection.unchanged_since_ms is not None:
            # A delete by name checks the state alone, and scans have not read these just now.
            there = await self._client.run(calls.lookup(descriptors))
            due = [one for one in descriptors if one in there and selection.may_have(there[one])]
        call = self._call(operation, due)
        try:
            changed = await self._client.run(call) if due else 0
        except (OutcomeUnknown, ShardConnectionFailed) as error:
            operation.unsure, operation.note = len(due), f"outcome unknown: {error}"
            await self._store(operation)
            left = await self._client.run(self._call(operation, due, dry_run=True))
            changed = await self._client.run(call) + len(due) - left
            operation.unsure, operation.note = 0, ""
        operation.done += changed
        operation.missed += len(descriptors) - changed

    def _call(
        self, operation: Operation, descriptors: Sequence[str], *, dry_run: bool = False
    ) -> PreparedCall[int]:
        selection = operation.selection
        choice = JobChoice(descriptors, selection.choice.ended_before_ms)
        common: dict[str, Any] = {"priority": selection.priority or ALL_PRIORITIES}
        common |= {"dry_run": dry_run, "choice": choice}
        if operation.what == "delete":
            return calls.delete_jobs(selection.queue, selection.job_state, **common)
        if operation.per_second and not dry_run:
            begin_ms = max(operation.spread_from_ms, self._clock.now_ms())
            spread_ms = round(1000 / operation.per_second * len(descriptors))
            common |= {"run_after_ms": begin_ms, "spread_ms": spread_ms}
            operation.spread_from_ms = begin_ms + spread_ms
        return calls.retry_failed(selection.queue, attempts_to_allow=operation.attempts, **common)

    async def _keep(self, operation: Operation, descriptors: Sequence[str]) -> None:
        """Write jobs into the trash before they are deleted. Raises TrashFull, OSError."""
        try:
            records = await self._client.run(calls.lookup(descriptors, include_body=True))
        except InvalidRequest:  # their bodies are too much for one answer
            half = len(descriptors) // 2
            if not half:
                raise
            await self._keep(operation, descriptors[:half])
            await self._keep(operation, descriptors[half:])
            return
        state = operation.selection.job_state
        kept = [record for record in records.values() if record.state is state]
        await asyncio.to_thread(self.trash.add, operation.number, kept)

    async def _settle_until_done(self, queue: str) -> None:
        """Settle the deletes of a queue; try again while that fails."""
        said = ""
        try:
            while queue in self._unsettled.values():
                try:
                    async with self._queues[queue]:
                        await self._settle(queue)
                except (PinLaterError, ConnectionFailed, OSError) as error:
                    if said != (said := str(error)):
                        log.warning("deletes of %s are not settled yet: %s", queue, error)
                    await asyncio.sleep(_SETTLE_SECONDS)
        finally:
            del self._settling[queue]

    async def _settle(self, queue: str) -> None:
        """Note which jobs of cut-short batches are left, of all deletes of a queue. Call it with
        the queue's lock, before any operation changes these jobs."""
        for number in [number for number, its in self._unsettled.items() if its == queue]:
            if self.trash.holds(number):
                before, unsettled = await asyncio.to_thread(self.trash.unsettled, number)
                left: Sequence[str] = ()
                if unsettled:
                    left = await self._there(unsettled)
                    await asyncio.to_thread(self.trash.add_left, number, left)
                await self._count_deleted(number, before + len(unsettled) - len(left))
            del self._unsettled[number]

    async def _count_deleted(self, number: int, deleted: int) -> None:
        """Have a delete count what it is known to have deleted. Deletes of named jobs are left
        alone: `done` is the place where they go on."""
        operation = self._known.get(number)
        if operation is None or operation.selection.choice.descriptors is not None:
            return
        if deleted > operation.done:
            operation.done, operation.unsure = deleted, 0
            await self._store(operation)

    async def _there(self, descriptors: Sequence[str]) -> Sequence[str]:
        """Return the jobs that are there. They may end and be removed later, and are not to run
        again then."""
        there: list[str] = []
        for at in range(0, len(descriptors), _BATCH_JOBS):
            found = await self._client.run(calls.lookup(descriptors[at : at + _BATCH_JOBS]))
            there += found
        return there

    async def _restore(self, operation: Operation) -> None:
        """Enqueue the jobs of a delete again, each once at most."""
        batches = self.trash.batches(operation.source, operation.seen, _RESTORED_JOBS)
        while batch := await asyncio.to_thread(next, batches, None):
            if operation.phase is not Phase.RUNNING:
                return
            await self._enqueue(operation, [kept.job for kept in batch])
            await self._store(operation)
        operation.phase = Phase.DONE

    async def _enqueue(self, operation: Operation, batch: Sequence[Job]) -> None:
        """Enqueue a batch of a restore, without jobs that may have been sent before."""
        queue, now_ms, sent = operation.selection.queue, self._clock.now_ms(), set(operation.sent)
        jobs = {key: job for job in batch if (key := key_of(queue, job.options)) is not None}
        held = await self._held(jobs)
        left = {key: job for key, job in jobs.items() if key not in sent | held}
        new = [key for key, job in left.items() if not _has_expired(job, now_ms)]
        operation.sent += new
        await self._store(operation)
        call = calls.enqueue_keyed(queue, [jobs[key] for key in new])
        try:
            stored = await self._client.run(call) if new else []
        except EnqueuedInPart as error:
            outcomes = zip(new, error.descriptors, strict=True)
            unstored = {key for key, each in outcomes if each == error.NOT_STORED}
            operation.sent = [key for key in operation.sent if key not in unstored]
            raise
        except calls.NOT_STORED as error:
            if not isinstance(error, OutcomeUnknown):
                operation.sent = [*sent]
            raise
        existed = sum(each.existed for each in stored)
        operation.done += len(sent & held) + len(new) - existed
        operation.missed += len(held - sent) + existed + len(batch) - len(jobs)
        operation.expired += len(left) - len(new)
        operation.doubtful += len(sent - held)
        operation.sent = []

    async def _held(self, keys: Iterable[QueueKey]) -> set[QueueKey]:
        """Return those of `keys` that jobs hold."""
        request = LookupRequest((), False, list(keys))
        call = calls.lookup_keys("", [])._replace(request=request, result=dict)
        found: dict[str, JobRecord] = await self._client.run(call)
        held = {key_of(each.partition(":")[0], job.options) for each, job in found.items()}
        return {key for key in keys if key in held}

    async def _batches(self, operation: Operation) -> AsyncIterator[tuple[list[str], str]]:
        """Yield what is left to be changed, and where the scan goes on behind each batch."""
        selection, jobs = operation.selection, operation.first_jobs or _BATCH_JOBS
        if selection.choice.descriptors is not None:
            left = iter(selection.choice.descriptors[operation.seen : operation.most or None])
            while named := list(islice(left, jobs)):
                yield named, ""
            return
        found = pages(self._client, selection, operation.place, jobs)
        if selection.has_order and 0 < operation.most <= operation.expected:
            found = _oldest_first(self._client, operation)
        async for page in found:
            named, place = [record.descriptor for record in page.found], page.place_behind
            room = operation.first_jobs - len(operation.tried)
            if operation.first_jobs and len(named) > room:
                named, place = named[:room], operation.place  # the others are found again
            while named:
                part = named[: operation.most - operation.done] if operation.most else named
                named = named[len(part) :]
                yield part, operation.place if named else place
                if operation.most and operation.done >= operation.most:
                    return


def nonce_of_restore(number: int) -> str:
    """Return what stands for the form of a restore: each delete has one."""
    return f"{RESTORE} {number}"


def _has_expired(job: Job, now_ms: int) -> bool:
    expires_at_ms = job.options.expires_at_ms if job.options is not None else None
    return expires_at_ms is not None and expires_at_ms <= now_ms


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number}.json"


def _load(folder: Path) -> dict[int, Operation]:
    """Return the operations that were stored; what was under way is interrupted."""
    found: dict[int, Operation] = {}
    for file in folder.glob("[0-9]*.json"):
        try:
            operation = msgspec.json.decode(file.read_bytes(), type=Operation)
        except (OSError, ValueError) as error:
            log.warning("%s can't be read: %s", file, error)
            continue
        if operation.phase is Phase.RUNNING:
            operation.phase, operation.note = Phase.INTERRUPTED, _ENDED
        found[operation.number] = operation
    return found


# --- scans ----------------------------------------------------------------------------------


class Page(NamedTuple):
    """Jobs of a selection, and where the scan goes on behind them; "" after the last."""

    found: Sequence[JobRecord]
    place_behind: str


async def pages(
    client: RouterClient, selection: Selection, place: str, jobs: int, max_ms: int | None = None
) -> AsyncIterator[Page]:
    """Yield the jobs of a selection in pages of up to `jobs`, the latest first, from `place` on."""
    begin, _, continuation = place.partition(" ")
    scans = [False] if selection.has_ended else [True, False]
    for at in range(int(begin or 0), len(scans)):
        call = calls.scan(
            selection.queue,
            selection.job_state,
            priority=selection.priority,
            future=scans[at],
            body_regex=selection.body_regex,
            page_size=jobs,
            newest_end_first=selection.has_ended,
            max_ms=max_ms,
            choice=selection.choice or None,
        )
        left: PreparedCall[ScanResult] | None = call
        if continuation and at == int(begin):
            left = calls.page_after(call, ScanResult((), continuation))
        while left is not None:
            page = await client.run(left)
            left = calls.page_after(call, page)
            is_last = left is None and at == len(scans) - 1
            since_ms, found = selection.unchanged_since_ms, page.jobs
            if since_ms is not None:
                found = [job for job in found if job.updated_at_ms < since_ms]
            yield Page(found, "" if is_last else f"{at} {page.continuation}")


async def _oldest_first(client: RouterClient, operation: Operation) -> AsyncIterator[Page]:
    """Yield the jobs of an operation as shards would delete them: those first that would be handed
    out first, or are the oldest. A scan goes the other way: find its pages, take the last first."""
    selection, places = operation.selection, [""]
    async for page in pages(client, selection, "", _BATCH_JOBS):
        if operation.is_stopped():
            return
        places.append(page.place_behind)
    for place in reversed(places[:-1]):
        page = await anext(pages(client, selection, place, _BATCH_JOBS))
        yield Page(page.found[::-1], "")
