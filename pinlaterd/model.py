"""The nouns of pinlaterd: jobs, their descriptors, and the requests with their results.

Everything here is frozen and does no I/O; it may rely on the standard library only. Times are
milliseconds since the epoch (`_ms`) unless a name says otherwise. What is made for every single
job is a NamedTuple, which costs a third of what a frozen dataclass does. A record may get further
fields, behind those that it has and with a default: so fields are read by name.

    Job                 what a client enqueues
    PendingKey          where a PENDING job stands in its queue and priority: run-after, local id
    JobKey              a job within its queue on one shard: priority, local id
    JobDescriptor       a job in the whole service: QUEUE:sSHARD:pPRIORITY:LOCALID
    ClaimedJob          what a dequeue hands out
    JobRecord           all that is known of a job: what lookup and scan return
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum, StrEnum
from itertools import chain, groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast, get_args, overload

QUEUE_NAME = re.compile(r"[A-Za-z0-9_]+\Z")
SHARD_NAME = re.compile(r"[A-Za-z0-9-]{1,16}\Z")
_SCAN_TOKEN = re.compile(r"v1:(-?[0-9]{1,19}):([A-Za-z0-9-]{1,16}):([0-9]{1,3}):([0-9]{1,19})\Z")
_DESCRIPTOR = re.compile(r"([A-Za-z0-9_]+):s([A-Za-z0-9-]{1,16}):p([0-9]{1,3}):([0-9]{1,19})\Z")

CONTINUATION_START = "0"
CONTINUATION_END = "-1"

# Makes a NamedTuple of all its fields in order, at half the cost of its own constructor: once a job
# or a call, nowhere else.
new_record: Final = tuple.__new__
# All fields of a record but its first: what jobs of a call mostly have in common, as they differ in
# their bodies alone; and acks, in their descriptors.
all_but_first: Final[Callable[[Any], tuple[Any, ...]]] = itemgetter(slice(1, None))


def defaults_behind(record: type[Any], field: str) -> tuple[Any, ...]:
    """Return the defaults of the fields behind `field`, for callers of `new_record`."""
    names = record._fields[record._fields.index(field) + 1 :]
    return tuple([record._field_defaults[name] for name in names])


class JobState(IntEnum):
    """The life of a job; the numbers are PinLater's, on the wire and in storage."""

    PENDING = 0
    IN_PROGRESS = 1
    SUCCEEDED = 2
    FAILED = 3

    def __str__(self) -> str:
        return self.name


class Method(StrEnum):
    """The operations, named as on the wire."""

    CREATE_QUEUE = "createQueue"
    DELETE_QUEUE = "deleteQueue"
    ENQUEUE = "enqueueJobs"
    DEQUEUE = "dequeueJobs"
    ACK = "ackDequeuedJobs"
    ACK_JOBS = "ackJobs"
    CHECKPOINT = "checkpointJobs"
    APPLY_CHECKPOINTS = "applyCheckpoints"
    LOOKUP = "lookupJobs"
    COUNT = "getJobCount"
    QUEUE_NAMES = "getQueueNames"
    SCAN = "scanJobs"
    RETRY_FAILED = "retryFailedJobs"
    DELETE_JOBS = "deleteJobs"
    FINISH = "finishJobs"


# --- jobs ---------------------------------------------------------------------------------


class Times(NamedTuple):
    """The times that a column of a store can hold: whole steps, first and last included."""

    step_ms: int
    earliest_ms: int
    latest_ms: int

    def floor(self, time_ms: int) -> int:
        """Return the time as it is stored."""
        if self.step_ms > 1:
            time_ms -= time_ms % self.step_ms
        return min(max(time_ms, self.earliest_ms), self.latest_ms)


MOST_KEY_BYTES = 200  # of a job's key, in UTF-8


# As a Job's priority or attempts: what its queue has as `default_priority` or `default_attempts`.
# It is sent as a field that is not given; no job that was decoded or stored has it.
QUEUE_DEFAULT: Final[int] = cast("int", None)


class JobDefaults(NamedTuple):
    """The priority and the attempts of jobs that are enqueued without any."""

    priority: int = 1
    attempts_allowed: int = 2


NO_DEFAULTS: Final[Mapping[str, JobDefaults]] = MappingProxyType({})  # all queues have the usual


class JobOptions(NamedTuple):
    """The options of a job, which few jobs have. In a queue at most one job holds a `key`, as long
    as that job is kept, in whatever state; it has 1 to MOST_KEY_BYTES bytes. A `key_of_all_queues`
    is held once in all queues of the service together, apart from the keys of single queues. From
    `expires_at_ms` on a job is not handed out any more: it fails. `run_after_us` and
    `expires_at_us` are both times in microseconds, as the client gave them, which look-ups return:
    they have no effect."""

    key: str | None = None
    expires_at_ms: int | None = None
    key_of_all_queues: bool = False
    run_after_us: int | None = None
    expires_at_us: int | None = None


EXPIRED = "expired"  # why a job failed: also the last word of its custom status then


MOST_BACKOFF_DOUBLINGS = 24  # half a year, which every store can hold


class Job(NamedTuple):
    """A job as a client enqueues it. `run_after_ms` None means now, by the shard's clock; `options`
    None is a usual job."""

    body: bytes
    priority: int = 1
    run_after_ms: int | None = None
    attempts_allowed: int = 2
    custom_status: str = ""
    options: JobOptions | None = None


class JobKey(NamedTuple):
    """A job within its queue on one shard."""

    priority: int
    local_id: int


class PendingKey(NamedTuple):
    """The place of a PENDING job among those of its queue and priority: earliest first."""

    run_after_ms: int
    local_id: int


class Payload(NamedTuple):
    """The content of a claim for its worker, in addition to the key and the claim itself."""

    body: bytes
    attempts_allowed: int
    attempts_remaining: int


body_of: Final[Callable[[Payload], bytes]] = itemgetter(Payload._fields.index("body"))


class ClaimedJob(NamedTuple):
    """A job that a dequeue hands out. On a dry run `claim_descriptor` is empty."""

    descriptor: str
    body: bytes
    attempts_allowed: int
    attempts_remaining: int
    claim_descriptor: str
    claim_timeout_seconds: int


class JobRecord(NamedTuple):
    """A job as a look-up returns it. `claim_descriptor` and `body` are None where there is none.
    `end_reason` is EXPIRED, or None: of a job that its last ack or claim has ended."""

    descriptor: str
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
    end_reason: str | None = None


class JobDescriptor(NamedTuple):
    """`QUEUE:sSHARD:pPRIORITY:LOCALID`, e.g. `mail:s1d2:p1:4711`."""

    queue: str
    shard: str
    priority: int
    local_id: int

    def __str__(self) -> str:
        return f"{self.queue}:s{self.shard}:p{self.priority}:{self.local_id}"

    @classmethod
    def parse(cls, text: str) -> JobDescriptor | None:
        """Return the descriptor that `text` spells, or None if it spells none."""
        match = _DESCRIPTOR.match(text)
        if match is None:
            return None
        queue, shard, priority, local_id = match.groups()
        return cls(queue, shard, int(priority), int(local_id))


def backoff_ms(attempts: int, left: int) -> int:
    """Return the pause before the next attempt of a job that had `attempts`, and has so many left:
    2, 4, 8 … seconds, as Rickover's."""
    return 1000 << min(max(attempts - left, 0), MOST_BACKOFF_DOUBLINGS)


def claim_source(claim_descriptor: str) -> str | None:
    """Return the source in `HOST:PORT:STARTMILLIS:SOURCE:COUNTER`; None if it has another form.

    A source may itself hold colons (`service:host`), so the ends are counted off.
    """
    head, _, _counter = claim_descriptor.rpartition(":")
    parts = head.split(":", 3)
    return parts[3] if len(parts) == 4 else None


# --- requests and results -----------------------------------------------------------------


class CallContext(NamedTuple):
    """The caller: `source` is typically `service:host`."""

    source: str
    request_id: str = ""


class CreateQueueRequest(NamedTuple):
    queue: str


class DeleteQueueRequest(NamedTuple):
    queue: str
    password: str


class EnqueueRequest(NamedTuple):
    queue: str
    jobs: Sequence[Job]


class EnqueueWithOptionsResult(NamedTuple):
    """The answer to an enqueue of which some jobs have keys: all descriptors in the order of the
    jobs, and whether each job was there before."""

    descriptors: Sequence[str]
    existed: Sequence[bool]


class AckInfo(NamedTuple):
    """One job of an ack. `descriptor` is as the client sent it, perhaps malformed."""

    descriptor: str
    append_custom_status: str = ""
    retry_delay_ms: int = 0
    claim_descriptor: str | None = None
    retryable: bool | None = None  # False: failed for good, whatever attempts remain


class AlikeAcks(Sequence[AckInfo]):
    """Acks that differ only in the last part of their descriptors, the jobs' numbers.

    Those of one call mostly are; who makes use of it is spared several objects for each."""

    __slots__ = ("alike", "digits")

    def __init__(self, alike: AckInfo, digits: Sequence[bytes]) -> None:
        self.alike = alike  # what they have in common; its descriptor ends with the last colon
        self.digits = digits  # what follows there: as many decimal digits in all of them

    @property
    def retry_delay_ms(self) -> int:
        return self.alike.retry_delay_ms

    def __len__(self) -> int:
        return len(self.digits)

    @overload
    def __getitem__(self, index: int) -> AckInfo: ...
    @overload
    def __getitem__(self, index: slice) -> AlikeAcks: ...
    def __getitem__(self, index: int | slice) -> AckInfo | AlikeAcks:
        if isinstance(index, slice):
            return AlikeAcks(self.alike, self.digits[index])
        alike = self.alike
        return alike._replace(descriptor=alike.descriptor + self.digits[index].decode())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


usual_fields = itemgetter(slice(1, Job._fields.index("options")))  # of a Job: not body and options
_OTHERS_OF_JOB = defaults_behind(Job, "options")


class AlikeJobs(Sequence[Job]):
    """Jobs that differ only in their bodies and, where they have keys, in those.

    Those of one enqueue mostly are; what makes use of it is spared several objects for each. One
    job without a key costs less in a list. The job path asks for the very type: of a list,
    isinstance would ask the abstract base, at ten times the cost."""

    __slots__ = ("alike", "bodies", "keys")

    def __init__(
        self, alike: Job, bodies: Sequence[bytes], keys: Sequence[str] | None = None
    ) -> None:
        self.alike = alike  # what they have in common; its body means nothing, nor its key beside
        self.bodies = bodies
        self.keys = keys  # None: that of `alike`, if any

    def __len__(self) -> int:
        return len(self.bodies)

    def __iter__(self) -> Iterator[Job]:
        alike, options, keys = self.alike, self.alike.options, self.keys
        if keys is None or options is None:
            others = all_but_first(alike)
            return (new_record(Job, (body, *others)) for body in self.bodies)
        usual, of_key, others = usual_fields(alike), all_but_first(options), _OTHERS_OF_JOB
        return (
            new_record(Job, (body, *usual, new_record(JobOptions, (key, *of_key)), *others))
            for body, key in zip(self.bodies, keys, strict=True)
        )

    @overload
    def __getitem__(self, index: int) -> Job: ...
    @overload
    def __getitem__(self, index: slice) -> AlikeJobs: ...
    def __getitem__(self, index: int | slice) -> Job | AlikeJobs:
        keys, bodies = self.keys, self.bodies
        if isinstance(index, slice):
            return AlikeJobs(self.alike, bodies[index], None if keys is None else keys[index])
        job = self.alike._replace(body=bodies[index])
        if keys is None or job.options is None:
            return job
        return job._replace(options=job.options._replace(key=keys[index]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def runs_of(jobs: Sequence[Job]) -> Sequence[tuple[Job, Sequence[bytes]]]:
    """Divide jobs into runs that differ only in their bodies and options: one of each, and the
    bodies."""
    if type(jobs) is AlikeJobs:
        return [(jobs.alike, jobs.bodies)]
    if len(jobs) == 1:
        return [(jobs[0], [jobs[0].body])]
    runs = [list(run) for _, run in groupby(jobs, usual_fields)]
    return [(run[0], [job.body for job in run]) for run in runs]


def joined(parts: Sequence[Sequence[Job]]) -> Sequence[Job]:
    """Put jobs of several calls together, in their order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    some = [part for part in parts if type(part) is AlikeJobs]
    if len(some) == len(parts):
        alike, has_keys = some[0].alike, some[0].keys is not None
        if all(part.alike == alike and (part.keys is not None) is has_keys for part in some):
            bodies = list(chain.from_iterable([part.bodies for part in some]))
            keys = list(chain.from_iterable([part.keys or () for part in some]))
            return AlikeJobs(alike, bodies, keys if has_keys else None)
    jobs = list(chain.from_iterable(parts))
    if len(jobs) == len(parts):
        others = list(map(all_but_first, jobs))
        if others.count(others[0]) == len(jobs):
            return AlikeJobs(jobs[0], [job.body for job in jobs])
    return jobs


class AckRequest(NamedTuple):
    queue: str
    succeeded: Sequence[AckInfo] = ()
    failed: Sequence[AckInfo] = ()


class AckOutcomes(NamedTuple):
    """Whether each ack of a request applied, in the order of its lists."""

    succeeded: Sequence[bool]
    failed: Sequence[bool]


class DequeueRequest(NamedTuple):
    queue: str
    limit: int
    acks: AckRequest | None = None
    dry_run: bool = False
    coverage: float = 1.0
    max_wait_ms: int = 0
    claim_timeout_ms: int | None = None  # None: as the queue says


class DequeueResult(NamedTuple):
    jobs: Sequence[ClaimedJob]


class CheckpointInfo(NamedTuple):
    """One checkpoint; None leaves as it is (run-after: becomes now)."""

    descriptor: str
    new_body: bytes | None = None
    move_to_pending: bool = False
    run_after_ms: int | None = None
    attempts: int | None = None
    prepend_custom_status: str | None = None
    claim_descriptor: str | None = None


class CheckpointRequest(NamedTuple):
    queue: str
    checkpoints: Sequence[CheckpointInfo]
    claim_timeout_ms: int | None = None  # None: as before


class CheckpointOutcomes(NamedTuple):
    """Whether each checkpoint of a request applied, in their order."""

    applied: Sequence[bool]


ALL_QUEUES = ""  # in place of a queue's name: where keys of all queues are


class QueueKey(NamedTuple):
    """A key, and the queue of which it is, or ALL_QUEUES."""

    queue: str
    key: str


def key_of(queue: str, options: JobOptions | None) -> QueueKey | None:
    """Return the key of a job of `queue` with these options, if it has one."""
    if options is None or options.key is None:
        return None
    scope = ALL_QUEUES if options.key_of_all_queues else queue
    return new_record(QueueKey, (scope, options.key))


class LookupRequest(NamedTuple):
    descriptors: Sequence[str]
    include_body: bool = False
    keys: Sequence[QueueKey] | None = None


class CountRequest(NamedTuple):
    queue: str
    state: JobState
    priority: int | None = None
    future: bool = False
    body_regex: str | None = None


class QueueNamesRequest(NamedTuple):
    pass


class JobChoice(NamedTuple):
    """The jobs that a scan, a retry or a delete is for: those that meet all that is given. Message
    and place are those of `signature`, `worker` is the source of the last claim."""

    descriptors: Sequence[str] | None = None
    ended_before_ms: int | None = None  # of jobs that have ended: later ends stay
    ended_since_ms: int | None = None
    status_regex: str | None = None
    message: str | None = None
    place: str | None = None
    worker: str | None = None

    def __bool__(self) -> bool:
        """Tell whether anything is given."""
        return any(given is not None for given in self)


class ScanRequest(NamedTuple):
    """A scan, which answers after `max_ms` with what it has found by then; with `accept_partial`,
    without unavailable shards, too. `options` names no descriptors."""

    queue: str
    state: JobState
    priority: int | None = None
    future: bool = False
    continuation: str = CONTINUATION_START
    limit: int = 100
    body_regex: str | None = None
    newest_end_first: bool = False
    max_ms: int | None = None
    accept_partial: bool = False
    options: JobChoice | None = None


class ScanResult(NamedTuple):
    """`looked_at`: at how many jobs this call has looked, of about `in_state`; None: not known.
    `missing_shards`: without which a partial scan was answered; None: there are none."""

    jobs: Sequence[JobRecord]
    continuation: str = CONTINUATION_END
    looked_at: int = 0
    in_state: int | None = None
    missing_shards: Sequence[str] | None = None


ALL_PRIORITIES: Final = 0  # as the priority of a retry or a delete that chooses its jobs


class RetryFailedRequest(NamedTuple):
    """A retry of the longest failed jobs of a priority; or of jobs that it chooses (`chooses`).
    Over `spread_ms` the run-afters of `limit` jobs, or of all descriptors, are spread evenly."""

    queue: str
    priority: int = 1
    attempts_to_allow: int = 1
    run_after_ms: int | None = None
    limit: int = 1000
    body_regex: str | None = None
    spread_ms: int | None = None
    dry_run: bool = False
    options: JobChoice | None = None

    @property
    def chooses(self) -> bool:
        """Tell whether its jobs are looked for one by one."""
        chosen_by = (self.body_regex, self.spread_ms, self.dry_run, self.options)
        return chosen_by != (None, None, False, None)


class DeleteJobsRequest(NamedTuple):
    """A delete of jobs of a state, any of a priority or those that it chooses (`chooses`)."""

    queue: str
    state: JobState
    priority: int = 1
    body_regex: str | None = None
    limit: int = 1000
    dry_run: bool = False
    options: JobChoice | None = None

    @property
    def chooses(self) -> bool:
        """Tell whether its jobs are looked for one by one."""
        return (self.body_regex, self.dry_run, self.options) != (None, False, None)


class FinishOutcome(IntEnum):
    """The outcome of a finish: whether it was carried out, or why nothing has changed."""

    DONE = 0
    NO_SUCH_JOB = 1
    ENDED_BEFORE = 2  # it is SUCCEEDED or FAILED
    OTHER_ATTEMPTS = 3  # not as many remain as were expected


class FinishInfo(NamedTuple):
    """The end of one job that is PENDING or IN_PROGRESS, claimed or not: as SUCCEEDED, as FAILED,
    or PENDING for a further attempt. It applies only while `expected_attempts` remain, if given,
    of a PENDING job unless `compares_pending` is false."""

    descriptor: str
    state: JobState
    attempts_remaining: int  # from then on
    expected_attempts: int | None = None
    compares_pending: bool = True
    retry_delay_ms: int = 0
    append_custom_status: str = ""


class FinishRequest(NamedTuple):
    queue: str
    finishes: Sequence[FinishInfo]


class FinishResult(NamedTuple):
    """The outcome of each finish of a request, in its order."""

    outcomes: Sequence[FinishOutcome]


Request = (
    CreateQueueRequest
    | DeleteQueueRequest
    | EnqueueRequest
    | DequeueRequest
    | AckRequest
    | CheckpointRequest
    | LookupRequest
    | CountRequest
    | QueueNamesRequest
    | ScanRequest
    | RetryFailedRequest
    | DeleteJobsRequest
    | FinishRequest
)
# Methods that take the request of another one.
_ALIKE: dict[Method, type[Request]] = {
    Method.ACK_JOBS: AckRequest,
    Method.APPLY_CHECKPOINTS: CheckpointRequest,
}
REQUESTS: dict[Method, type[Request]] = {
    **dict(zip([m for m in Method if m not in _ALIKE], get_args(Request), strict=True)),
    **_ALIKE,
}

# createQueue, deleteQueue, ackDequeuedJobs, checkpoint: None. enqueue: the descriptors in the order
# of the jobs. lookup: descriptor -> record. count, retry, delete: how many. getQueueNames: names.
Result = (
    None
    | Sequence[str]
    | EnqueueWithOptionsResult
    | AckOutcomes
    | CheckpointOutcomes
    | DequeueResult
    | Mapping[str, JobRecord]
    | int
    | frozenset[str]
    | ScanResult
    | FinishResult
)


class ScanKey(NamedTuple):
    """The order of a scan: most recent run-after first, or most recent end, then shard, priority,
    local id."""

    time_ms: int
    shard: str
    priority: int
    local_id: int

    def sort_key(self) -> tuple[int, str, int, int]:
        return (-self.time_ms, self.shard, self.priority, self.local_id)

    def token(self) -> str:
        """Return a continuation that resumes right behind this job."""
        return f"v1:{self.time_ms}:{self.shard}:{self.priority}:{self.local_id}"

    @classmethod
    def parse_token(cls, token: str) -> ScanKey | None:
        """Return the key that `token` was made from, or None if it is not one of ours."""
        match = _SCAN_TOKEN.match(token)
        if match is None:
            return None
        time_ms, shard, priority, local_id = match.groups()
        return cls(int(time_ms), shard, int(priority), int(local_id))


# Where a scan that has found nothing yet goes on: before every job.
SCAN_START = ScanKey((1 << 63) - 1, "-", 0, 0)
