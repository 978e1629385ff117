"""The StorageEngine contract: what a shard's store must do, and what it may count on.

An engine stores one shard. It is blocking and used by one thread of one process, its owner; only
the Searcher, which reads, may run in another process. It gets the time as an argument, and knows
queues, keys and rows, never Thrift, sockets or shards' names.

What the owner (`pinlaterd.shard`) guarantees:
  - requests are valid: names, priorities, sizes and times are within `limits`, and within what
    `narrower` says of the place where they go;
  - nobody else writes to the store between `open` and `close`. A foreign writer may all the same (a
    PinLater server that still runs, a hand in a table): no job is claimed twice by that, and the
    owner reads again what shows its traces.

What an engine guarantees:
  - `apply` is one durable commit: when it returns, all of the batch is kept; when it raises
    StorageNotCommitted, nothing is; when it raises another StorageError, nobody knows yet;
  - it hardly waits for locks of others: StorageLocked says which queue is locked, and to try again;
  - after a StorageError other than StorageNotCommitted, and whenever `failure` says so, the owner
    must close and reopen the engine before going on. What a call has told holds all the same;
  - local ids are never used twice within a queue and priority, over deletes, restarts, unclean
    ends and restored copies (see `first_local_id`);
  - foreign exceptions (of drivers, of the operating system) leave it as StorageError only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol

from pinlaterd.model import (
    AlikeJobs,
    FinishOutcome,
    Job,
    JobChoice,
    JobKey,
    JobOptions,
    JobState,
    Payload,
    PendingKey,
    Times,
)

NO_BOUND = 1 << 62
TRIED_BYTES = 60_000  # of StorageEngine.try_enqueue: what the least of tables holds
NO_TIME_MS = -(1 << 62)  # before all that is stored
EARLIEST_MS, LATEST_MS = -(2**63), 2**63 - 1  # as bounds of a search


def first_local_id(now_ms: int) -> int:
    """Return where the ids of an owner that opens its store now begin, at least.

    No earlier owner has got there, unless it gave out more than 1,000,000 ids a second: so no id is
    used twice even if what is opened is an older copy. Below 2**53 until the year 2255."""
    return now_ms * 1000


class Limits(NamedTuple):
    """The limits of a store."""

    queue_name_chars: int
    body_bytes: int
    run_after_ms: int  # the latest run-after
    custom_status_chars: int
    acks_replace_status: bool = False  # an ack's text, if it has one, takes the old one's place


class TableLimits(NamedTuple):
    """The limits of one priority of a queue, where they are less than `Limits`: tables that
    PinLater made, or a server that takes no longer statements. A run-after is stored floored."""

    body_bytes: int
    run_after: Times
    body_cure: str = ""  # what would make room for longer bodies, where the table has it


class Term(NamedTuple):
    """The term in which a store is opened, where several servers share the shards: it belongs to
    the greatest epoch, and within an epoch to the server that came first."""

    server: str = ""
    epoch: int = 0  # 0: there are no other servers
    planned: bool = False  # the owner lives and is about to close the store: wait for that


SINGLE = Term()

# After which an owner in a term takes its connection for cut, if the store's system acknowledges
# nothing of what was sent: sooner than it gives up a store that does not answer.
CUT_SECONDS = 3.0

# A job in progress may be retried: past its expiry it is looked at again after so long.
CHECK_AGAIN_MS = 10_000


class Durability(NamedTuple):
    """The durability of a commit, for `status`; `warning` is "" when acknowledged means kept."""

    setting: str
    warning: str = ""


# --- what a batch is made of: all of one queue each --------------------------------------


class Acks(NamedTuple):
    """Ends for jobs that are IN_PROGRESS, alike in all but their local ids, of which there is one
    at least; their claim is `claim_descriptor` if given."""

    priority: int
    local_ids: Sequence[int]
    append_custom_status: str = ""
    retry_delay_ms: int = 0
    claim_descriptor: str | None = None
    retryable: bool = True  # of failed ones: else no further attempt follows


class AckOp(NamedTuple):
    """`succeeded` go first. An ack that does not apply changes nothing and counts as a no-op."""

    queue: str
    succeeded: Sequence[Acks]
    failed: Sequence[Acks]

    @property
    def jobs(self) -> int:
        return sum([len(acks.local_ids) for acks in (*self.succeeded, *self.failed)])


class Checkpoint(NamedTuple):
    """Applies while IN_PROGRESS and claimed by `claim_descriptor`, else by the op's source."""

    key: JobKey
    run_after_ms: int | None  # None: now
    new_body: bytes | None = None
    move_to_pending: bool = False
    attempts: int | None = None  # becomes both allowed and remaining
    prepend_custom_status: str | None = None
    claim_descriptor: str | None = None


class CheckpointOp(NamedTuple):
    queue: str
    source: str
    checkpoints: Sequence[Checkpoint]

    @property
    def jobs(self) -> int:
        return len(self.checkpoints)


class Release(NamedTuple):
    """A claim that was never delivered: back to PENDING as it was, if that claim still holds."""

    key: JobKey
    claim_descriptor: str


class ReleaseOp(NamedTuple):
    queue: str
    releases: Sequence[Release]

    @property
    def jobs(self) -> int:
        return len(self.releases)


class Finish(NamedTuple):
    """A model.FinishInfo of a job of this shard."""

    key: JobKey
    state: JobState
    attempts_remaining: int
    expected_attempts: int | None = None
    compares_pending: bool = True
    retry_delay_ms: int = 0
    append_custom_status: str = ""

    def judge(self, state: JobState | None, attempts_remaining: int) -> FinishOutcome:
        """Return the outcome for a job that is in `state`; None: there is none."""
        if state is None:
            return FinishOutcome.NO_SUCH_JOB
        if state in (JobState.SUCCEEDED, JobState.FAILED):
            return FinishOutcome.ENDED_BEFORE
        compares = self.compares_pending or state is JobState.IN_PROGRESS
        if compares and self.expected_attempts not in (None, attempts_remaining):
            return FinishOutcome.OTHER_ATTEMPTS
        return FinishOutcome.DONE


class FinishOp(NamedTuple):
    """Finishes of different jobs."""

    queue: str
    finishes: Sequence[Finish]

    @property
    def jobs(self) -> int:
        return len(self.finishes)


class EnqueueOp(NamedTuple):
    queue: str
    jobs: Sequence[Job]


class EnqueueWithOptionsOp(NamedTuple):
    """Jobs that have options. A job is stored unless one that is kept holds its key, or one before
    it in the batch."""

    queue: str
    jobs: Sequence[Job]

    def keys(self, *, of_all_queues: bool) -> list[str]:
        """Return the keys of all queues that the jobs have, or those of theirs."""
        jobs = self.jobs
        if isinstance(jobs, AlikeJobs) and jobs.keys is not None and jobs.alike.options:
            return list(jobs.keys) if jobs.alike.options.key_of_all_queues is of_all_queues else []
        return [
            options.key
            for job in self.jobs
            if (options := job.options)
            and options.key
            and options.key_of_all_queues is of_all_queues
        ]

    @property
    def expires(self) -> bool:
        """Tell whether any of the jobs has an expiry."""
        alike = isinstance(self.jobs, AlikeJobs)
        options = [job.options for job in (self.jobs[:1] if alike else self.jobs)]
        return any(each and each.expires_at_ms is not None for each in options)


class Claims(NamedTuple):
    """Jobs of one priority to claim; a payload is given if it is in memory, else it is read, with
    the claim or before the batch: so it is given for a job that the batch changes first. Claims are
    named by `claimer`, which ends in a colon, and numbers that count up from `first_claim`."""

    priority: int
    local_ids: Sequence[int]
    payloads: Sequence[Payload | None]
    claimer: str
    first_claim: int

    @property
    def descriptors(self) -> list[str]:
        numbers = range(self.first_claim, self.first_claim + len(self.local_ids))
        return [f"{self.claimer}{number}" for number in numbers]


class ClaimOp(NamedTuple):
    """The claims of one answer, in order. They end before the first job with which those of the
    op would take more than `most_bytes`, or all of the batch more than its ClaimRoom has.

    But the first job of a batch is always within that room, and with `at_least_one` the first of
    an op within `most_bytes`: so one that asks first for what did not fit gets on. Ops of the same
    queue behind one that ends early claim nothing: what did not fit comes before theirs."""

    queue: str
    claims: Sequence[Claims]
    most_bytes: int = NO_BOUND
    at_least_one: bool = True

    @property
    def payloads(self) -> Sequence[Payload | None]:
        """The payloads that are given, of all jobs in order."""
        if len(self.claims) == 1:  # as mostly
            return self.claims[0].payloads
        return [payload for claims in self.claims for payload in claims.payloads]


class ClaimRoom(NamedTuple):
    """The room for jobs that a batch claims: each takes its body, whose size nobody knows before,
    and `job_bytes` beside it. It bounds what is read."""

    most_bytes: int = NO_BOUND
    job_bytes: int = 0


class Batch(NamedTuple):
    """One commit. Carried out in this order: acks, checkpoints, releases, enqueues, those with
    options (`with_options`), claims, finishes."""

    acks: Sequence[AckOp] = ()
    checkpoints: Sequence[CheckpointOp] = ()
    releases: Sequence[ReleaseOp] = ()
    enqueues: Sequence[EnqueueOp] = ()
    claims: Sequence[ClaimOp] = ()
    claim_room: ClaimRoom = ClaimRoom()
    with_options: Sequence[EnqueueWithOptionsOp] = ()
    finishes: Sequence[FinishOp] = ()
    fails_expired: bool = True  # whether a claim fails a job that is past its expiry


class Requeued(NamedTuple):
    """A job that became PENDING (again), for the ready index."""

    priority: int
    key: PendingKey


class AckResult(NamedTuple):
    succeeded: int
    failed: int  # those that will be retried, too
    noop: int
    requeued: Sequence[Requeued]  # the failed ones that have attempts left
    missed: AbstractSet[JobKey] = frozenset()  # jobs to which none of the op's acks applied


class CheckpointResult(NamedTuple):
    done: int
    noop: int
    requeued: Sequence[Requeued]
    missed: AbstractSet[JobKey] = frozenset()  # jobs to which a checkpoint of the op did not apply


class Finished(NamedTuple):
    """The outcomes of an op's finishes, in their order; and of those that were done, the jobs that
    were PENDING before and those that are now."""

    outcomes: list[FinishOutcome]
    left_pending: list[JobKey]
    requeued: list[Requeued]


class KeyHolder(NamedTuple):
    """The job that holds the key of one that was to be enqueued: that job itself, or one that
    existed, whose priority may be another, and so may its `queue`, of a key of all queues."""

    priority: int
    local_id: int
    existed: bool
    queue: str = ""  # ""; the queue to which the other job was to be enqueued


class BatchResult(NamedTuple):
    """In the order of the ops. Enqueues: local ids in the order of the jobs, ascending for jobs of
    one queue, priority and run-after. Claims: a Payload for each job, None where it was not PENDING
    any more; fewer than claims where the next did not fit: those jobs stayed as they were.
    `expired`: of each op of claims, how many jobs were past their expiry, and have failed; empty if
    none was."""

    acks: Sequence[AckResult]
    checkpoints: Sequence[CheckpointResult]
    releases: Sequence[Sequence[Requeued]]
    enqueues: Sequence[Sequence[int]]
    claims: Sequence[Sequence[Payload | None]]
    with_options: Sequence[Sequence[KeyHolder]] = ()
    finishes: Sequence[Finished] = ()
    expired: Sequence[int] = ()


class StoredJob(NamedTuple):
    """A job as a look-up or a scan reads it."""

    key: JobKey
    state: JobState
    attempts_allowed: int
    attempts_remaining: int
    custom_status: str
    created_at_ms: int
    run_after_ms: int
    updated_at_ms: int
    claim_descriptor: str | None
    body: bytes | None
    options: JobOptions | None = None
    end_reason: str | None = None  # as in JobRecord


class ScanAfter(NamedTuple):
    """The place where a scan goes on in one queue and state: run-after, or the time of the end,
    downwards, then upwards by priority and local id. A scan yields what comes strictly after
    this."""

    time_ms: int
    priority: int
    local_id: int


class Search(NamedTuple):
    """The jobs of one state to look for, and how far to go."""

    queue: str
    state: JobState
    priorities: Sequence[int] = (1,)
    limit: int = NO_BOUND
    future: bool | None = None  # run-after > `now_ms`, or <= `now_ms`; None: any
    now_ms: int = 0
    after: ScanAfter | None = None
    body_regex: str | None = None  # RE2, found anywhere in the body; it was compiled before
    deadline: float = math.inf  # monotonic seconds
    newest_end_first: bool = False  # of jobs that have ended: by that time instead of run-after
    choice: JobChoice | None = None  # its descriptors mean nothing here

    def time_of(self, job: StoredJob) -> int:
        """Return the time of a job by which a scan is ordered."""
        return job.updated_at_ms if self.newest_end_first else job.run_after_ms

    def order_of(self, job: StoredJob) -> tuple[int, int, int]:
        """Return what a scan is sorted by, as `ScanAfter` says."""
        return (-self.time_of(job), job.key.priority, job.key.local_id)

    @property
    def times_ms(self) -> tuple[int, int]:
        """Return from which to which time jobs are searched, ends included."""
        first = self.now_ms + 1 if self.future else EARLIEST_MS
        last = self.now_ms if self.future is False else LATEST_MS
        if self.newest_end_first:
            first, last = self.ends_ms
        return first, last if self.after is None else min(last, self.after.time_ms)

    @property
    def ends_ms(self) -> tuple[int, int]:
        """Return from when to when jobs ended that are searched, both included."""
        choice = self.choice or JobChoice()
        since, before = choice.ended_since_ms, choice.ended_before_ms
        first = EARLIEST_MS if since is None else since
        return first, LATEST_MS if before is None else before - 1


class Expired(NamedTuple):
    """The result of `release_expired`."""

    retried: Sequence[Requeued]
    failed: int


class ExpiredJobs(NamedTuple):
    """The outcome of `expire_jobs`."""

    failed: Sequence[JobKey]
    looked_at: int  # of these some were in progress, or had ended


class Finding(NamedTuple):
    """A disagreement within the store, as `check` found it."""

    queue: str
    problem: str
    jobs: int


class StorageEngine(Protocol):
    """One shard's store, as its owner uses it."""

    limits: Limits

    @property
    def failure(self) -> str:
        """The reason why it must be reopened, refusing everything until then; "" while it need not
        be. From memory: it is asked for after each step."""

    def open(self, now_ms: int, term: Term = SINGLE) -> int:
        """Take ownership and make the store ready; returns when ownership began, in ms: greater
        than any predecessor's. Raises Superseded if a later term has owned it,
        ShardOwned while another process owns it, StorageCorrupt if it can't be read."""

    def close(self) -> None:
        """Give up ownership. Safe to repeat."""

    def heartbeat(self) -> None:
        """Keep ownership alive; called about once a second, also while nothing else is. Raises
        StorageError if it has been lost: the owner closes and reopens it."""

    def address(self) -> str:
        """Return HOST:PORT of the shard's server; "" where it is a file, or not found yet."""
        return ""

    def durability(self) -> Durability: ...

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        """Carry out `batch` in one durable commit. Queues in it exist."""

    def try_enqueue(self, queue: str) -> None:
        """Write as much as an enqueue to `queue` might, and leave nothing behind: whether there is
        room, and the store takes writes. Raises StorageError."""
        return

    # queues

    def queues(self) -> frozenset[str]: ...

    def narrower(self, queue: str) -> Mapping[int, TableLimits]:
        """Return the priorities of `queue` that hold less than `limits`; mostly none, and none of a
        queue that does not exist. From memory: it is asked for each call."""
        return {}

    def create_queue(self, queue: str, now_ms: int) -> None:
        """Create a queue, unless it exists."""

    def delete_queue(self, queue: str) -> None:
        """Drop the queue and its jobs, at once for every reader; the space may come back later,
        in slices, through `vacuum`. No such queue is no error."""

    # reads of bounded cost, on the owner's connection

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]:
        """Return the first PENDING jobs behind `after` with run-after <= `until_ms`, in order."""

    def payloads(
        self, queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        """Return what a claim would hand out, in the order of `local_ids`; None: no such job.

        The ids are such as `read_pending` gave; whether a job is PENDING still, its claim finds
        out. Ends before the body with which all would have more than `most_bytes`, but never
        before the first: so a read is bounded, however large bodies are."""

    def lookup(
        self, queue: str, keys: Sequence[JobKey], *, include_body: bool
    ) -> Sequence[StoredJob]:
        """Return those jobs of `keys` that exist."""

    def find_keys(self, queue: str, keys: Sequence[str]) -> Mapping[str, JobKey]:
        """Return the jobs that hold those of `keys` that are held."""
        ...

    def find_keys_of_all(self, keys: Sequence[str]) -> Mapping[str, KeyHolder]:
        """Do the same for keys of all queues; each holder bears its queue."""
        ...

    @property
    def fence(self) -> int:
        """The number that `raise_fence` was last given, 0 at first. From memory."""
        ...

    def raise_fence(self, number: int) -> None:
        """Store `number`, durably, as the fence, unless that is as high already."""
        ...

    def depths(
        self, queues: Collection[str] | None = None
    ) -> Mapping[str, Mapping[tuple[int, JobState], int] | None]:
        """Count the jobs, by (priority, state), of those of `queues` that exist, by default of all,
        in constant time for each; None while they are being counted. To be called about once a
        second: it goes on with counting."""

    def suspects(self) -> Collection[str]:
        """Return the queues in which a foreign writer has left traces, beyond those that claims
        show (a job that was not PENDING). From memory: it is asked for each second."""
        return ()

    def recount(self, queue: str) -> None:
        """Count what is in `queue` again, beside other calls, where `depths` is kept in memory; and
        forget its traces of a foreign writer."""
        return

    # writes in slices: each one durable commit of at most `limit` jobs

    def retry_failed(
        self,
        queue: str,
        priority: int,
        *,
        attempts: int,
        run_after_ms: int,
        limit: int,
        now_ms: int,
    ) -> Sequence[Requeued]:
        """Make FAILED jobs PENDING, the longest failed first (by updated-at, then local id).

        `attempts` remain; attempts allowed is raised to that if lower; no claim is left."""

    def retry_found(
        self,
        queue: str,
        run_afters: Mapping[JobKey, int],
        *,
        attempts: int,
        ended_before_ms: int,
        now_ms: int,
    ) -> Sequence[Requeued]:
        """Make those jobs PENDING, each from its run-after on, that are FAILED still, since before
        `ended_before_ms`; otherwise as `retry_failed`."""
        ...

    @property
    def damage(self) -> str:
        """The disagreement within the store, as found beside other calls after an unclean end; ""
        if nothing was found, or nothing was looked for. From memory."""
        return ""

    def check(self, *, repair: bool) -> Sequence[Finding]:
        """Compare what the store holds in several places, over all jobs; `repair` what disagrees.
        Not while calls are served: it takes as long as there are jobs."""
        return ()

    def oldest_failed(self, queue: str, priority: int, *, limit: int) -> Sequence[int]:
        """Return updated-at of the longest failed, in order, to divide a retry over shards."""

    def delete_jobs(
        self, queue: str, state: JobState, priority: int, *, limit: int
    ) -> Sequence[JobKey]:
        """Delete up to `limit` jobs of a state; returns which."""

    def delete_found(
        self,
        queue: str,
        state: JobState,
        keys: Sequence[JobKey],
        *,
        ended_before_ms: int = LATEST_MS,
    ) -> Sequence[JobKey]:
        """Delete those of `keys` that still are in `state`, and ended before that time if they
        have ended; return which."""
        ...

    def release_expired(
        self,
        queue: str,
        *,
        claimed_before_ms: int,
        limit: int,
        now_ms: int,
        claimed_after_ms: int = NO_TIME_MS,
        backoff_attempts: int = 0,
    ) -> Expired:
        """End claims last renewed between `claimed_after_ms` and `claimed_before_ms`, both
        excluded: PENDING with one attempt less and run-after `now_ms`, or FAILED with 0 remaining
        (keeping the claim as a record). `backoff_attempts`, if not 0, is what the jobs had at
        first: the next attempt comes after the pause that `backoff_ms` says."""

    @property
    def expiring(self) -> Collection[str]:
        """Name the queues that may have jobs with an expiry. From memory: it is asked for often."""
        return ()

    def expire_jobs(self, queue: str, *, limit: int, now_ms: int) -> ExpiredJobs:
        """Fail PENDING jobs whose expiry has come, as a claim would; look at `limit` at most. They
        keep their attempts; their custom status ends in EXPIRED, which is also their end reason
        until they are retried."""
        ...

    def collect_garbage(
        self, queue: str, state: JobState, *, updated_before_ms: int, limit: int
    ) -> int:
        """Delete SUCCEEDED or FAILED jobs last changed before `updated_before_ms`; how many."""

    def vacuum(self, *, limit: int) -> bool:
        """Do a bounded piece of the store's own maintenance (space of deleted queues, checkpoints).
        True if there is more to do."""

    def searcher(self) -> SearcherFactory:
        """Return what opens a Searcher on this store in another process: picklable."""


class Searcher(Protocol):
    """Reads of unbounded cost, beside the owner, on a connection of its own.

    Sees all that was committed before the call began. Past the search's deadline a call raises
    TimeoutError. A call goes on in slices of bounded cost, and calls `between_slices`, which the
    factory was given, before each: nothing of the store is held then, so that it may take as long
    as other searches need, or raise an exception that ends the call.
    """

    found: list[StoredJob]
    """Of the scan that was begun last: the first jobs of its result, as far as they are known."""
    looked_at: int
    """At how many jobs the search that was begun last has looked."""
    place: ScanAfter | None
    """Up to where all of that scan's result is known; None: not known."""

    def count(self, search: Search) -> int:
        """Count the jobs, of each priority up to the limit."""

    def scan(self, search: Search) -> Sequence[StoredJob]:
        """Return the first of the jobs, without bodies, in the order of ScanAfter."""

    def find(self, search: Search) -> Sequence[JobKey]:
        """Return any of the jobs, for a delete."""

    def close(self) -> None: ...


def no_pause() -> None:
    """Do nothing: a searcher has its process to itself."""


class SearcherFactory(Protocol):
    def __call__(self, between_slices: Callable[[], None] = no_pause) -> Searcher: ...
