"""The operations as calls to be sent: what each asks for, and what its answer becomes.

Both clients have a method for each, with its parameters and docstring. Everything here is pure.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar, cast

from pinlaterd.config.schema import Address
from pinlaterd.errors import (
    ConnectionFailed,
    EnqueuedInPart,
    NoHealthyShards,
    OutcomeUnknown,
    Overloaded,
    PinLaterError,
    ProtocolError,
    RequestError,
    how_many,
)
from pinlaterd.model import (
    CONTINUATION_END,
    QUEUE_DEFAULT,
    AckInfo,
    AckOutcomes,
    AckRequest,
    CallContext,
    CheckpointInfo,
    CheckpointOutcomes,
    CheckpointRequest,
    ClaimedJob,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    DequeueRequest,
    EnqueueRequest,
    EnqueueWithOptionsResult,
    FinishInfo,
    FinishOutcome,
    FinishRequest,
    Job,
    JobChoice,
    JobRecord,
    JobState,
    LookupRequest,
    Method,
    QueueKey,
    QueueNamesRequest,
    Request,
    RetryFailedRequest,
    ScanRequest,
    ScanResult,
    key_of,
)
from pinlaterd.rpc import codec

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

# The errors that are sure that an enqueue has stored nothing; but OutcomeUnknown is none of them.
NOT_STORED = (RequestError, Overloaded, NoHealthyShards, ConnectionFailed)
# A call that changes many jobs uses half of request_timeout_ms, which is at least 100, or more.
_LEAST_USED_SECONDS = 0.05


class PreparedCall(NamedTuple, Generic[T]):
    """A call whose answer is a T: `result` makes it of what the codec decodes. `repeatable`: it may
    be sent again when no answer came, as carried out twice it does no more than once. `wait_ms`:
    how long it asks the server to wait, beside what calls take."""

    method: Method
    request: Request
    result: Callable[[Any], T]
    repeatable: bool = False
    wait_ms: int = 0

    def encode(self, seqid: int, context: CallContext) -> bytes:
        """Raises InvalidRequest, or InvalidEnqueue, for what Thrift's types cannot hold."""
        return codec.encode_call(self.method, seqid, context, self.request)

    def decode(self, seqid: int, answer: bytes, *, server: Address) -> T:
        """Return the result. Raises an error of the service, or OutcomeUnknown if this is no answer
        to this call."""
        try:
            if codec.peek_seqid(answer) != seqid:
                raise ProtocolError("it belongs to another call")
            return self.result(codec.decode_reply(self.method, answer))
        except ProtocolError as error:
            raise OutcomeUnknown(
                f"what {server} sent is no answer to {self.method.value}: {error}; "
                "the call may have been carried out"
            ) from error


class EnqueuedJob(NamedTuple):
    """The outcome of one job of an enqueue; `existed`: it was there before, under its key."""

    descriptor: str
    existed: bool


# --- queues -------------------------------------------------------------------------------


def create_queue(queue: str) -> PreparedCall[None]:
    """Make a queue; one that exists already is left as it is."""
    return PreparedCall(Method.CREATE_QUEUE, CreateQueueRequest(queue), _done)


def delete_queue(queue: str, *, password: str) -> PreparedCall[None]:
    """Drop a queue with all its jobs; `password` is the server's admin password."""
    return PreparedCall(Method.DELETE_QUEUE, DeleteQueueRequest(queue, password), _done)


def queue_names() -> PreparedCall[frozenset[str]]:
    """Return the names of all queues."""
    return PreparedCall(Method.QUEUE_NAMES, QueueNamesRequest(), frozenset, repeatable=True)


# --- the life of a job --------------------------------------------------------------------


def enqueue(queue: str, jobs: Iterable[Job | bytes]) -> PreparedCall[list[str]]:
    """Store jobs and return their descriptors, in order. A plain body has its queue's defaults.

        client.enqueue("mail", [b"now", Job(b"later", run_after_ms=1_900_000_000_000)])

    Up to 1,000 jobs are stored all or none. When this returns, they are durable. If only a part
    of a larger call is stored, the jobs that certainly are not are sent once more; if not all are
    stored then, EnqueuedInPart is raised: its `descriptors` tell of each job what became of it.
    """
    listed = _listed("jobs", jobs)
    made = [j if isinstance(j, Job) else Job(j, QUEUE_DEFAULT, None, QUEUE_DEFAULT) for j in listed]
    request = EnqueueRequest(queue, made)
    return PreparedCall(Method.ENQUEUE, request, _descriptors)


def enqueue_keyed(queue: str, jobs: Iterable[Job]) -> PreparedCall[list[EnqueuedJob]]:
    """Store jobs that have keys, and return of each its descriptor and whether it was there before.

        client.enqueue_keyed("mail", [Job(b"to: ada", options=JobOptions(key="order-17"))])

    In a queue at most one job holds a key, as long as it is kept, in whatever state: a job whose
    key is held is not stored, and the holder is returned. So repeat a call whose outcome is not
    known, or that raises EnqueuedInPart.
    """

    def result(answer: object) -> list[EnqueuedJob]:
        if not answer:
            return []  # no jobs were sent
        if not isinstance(answer, EnqueueWithOptionsResult):
            raise ProtocolError("it does not say which jobs existed; the server knows no keys")
        return list(map(EnqueuedJob, *answer))

    return PreparedCall(Method.ENQUEUE, EnqueueRequest(queue, _listed("jobs", jobs)), result)


def dequeue(
    queue: str,
    *,
    limit: int,
    succeeded: Iterable[ClaimedJob | AckInfo] = (),
    failed: Iterable[ClaimedJob | AckInfo] = (),
    max_wait_ms: int = 0,
    dry_run: bool = False,
    coverage: float = 1.0,
    claim_timeout_ms: int | None = None,
) -> PreparedCall[list[ClaimedJob]]:
    """Claim up to `limit` jobs that are ready, the most urgent first.

    `succeeded` and `failed` acknowledge earlier jobs in the same call, before it claims; if one of
    them can't be carried out, nothing is claimed and its error is raised. With no job ready, the
    answer waits up to `max_wait_ms` for one. A dry run claims nothing. The claims last for
    `claim_timeout_ms` (from 1,000 up to the queue's time-out, which is the default); a checkpoint
    renews one for as long again.
    """
    acks = _acks(queue, succeeded, failed)
    has_acks = bool(acks.succeeded or acks.failed)
    acks_if_any = acks if has_acks else None
    request = DequeueRequest(
        queue, limit, acks_if_any, dry_run, coverage, max_wait_ms, claim_timeout_ms
    )
    return PreparedCall(
        Method.DEQUEUE,
        request,
        lambda answer: list(answer.jobs),
        repeatable=dry_run and not has_acks,
        wait_ms=max_wait_ms,
    )


def ack(
    queue: str,
    *,
    succeeded: Iterable[ClaimedJob | AckInfo] = (),
    failed: Iterable[ClaimedJob | AckInfo] = (),
) -> PreparedCall[None]:
    """Say how jobs ended. A ClaimedJob is acknowledged under its claim, with no status:

        client.ack("mail", failed=[AckInfo(job.descriptor, "no such address",
                                           retry_delay_ms=60_000,
                                           claim_descriptor=job.claim_descriptor)])

    An ack that names its claim counts only while that holds. So a call in which all do is sent once
    more, to another server if there are several, when no answer comes.
    """
    request = _acks(queue, succeeded, failed)
    infos = (*request.succeeded, *request.failed)
    # What is no AckInfo at all is found out when it is encoded, and said by name.
    under_claims = all(isinstance(info, AckInfo) and info.claim_descriptor for info in infos)
    return PreparedCall(Method.ACK, request, _done, repeatable=under_claims)


def ack_jobs(
    queue: str,
    *,
    succeeded: Iterable[ClaimedJob | AckInfo] = (),
    failed: Iterable[ClaimedJob | AckInfo] = (),
) -> PreparedCall[AckOutcomes]:
    """Say how jobs ended, each named once, and return which of these acks applied.

    One that did not, because its claim no longer holds, has changed nothing. Otherwise as `ack`;
    but if no answer comes, the call is not repeated, as the outcomes would be those of the second.
    """
    return PreparedCall(Method.ACK_JOBS, _acks(queue, succeeded, failed), lambda answer: answer)


def finish_jobs(queue: str, finishes: Iterable[FinishInfo]) -> PreparedCall[list[FinishOutcome]]:
    """End jobs, or have them tried again, claimed or not; return the outcome of each.

        client.finish_jobs("mail", [FinishInfo(descriptor, JobState.PENDING, 2, expected_attempts=3,
                                               retry_delay_ms=60_000)])

    For programs that run jobs without a claim. If no answer comes, the call is not repeated.
    """
    request = FinishRequest(queue, _listed("finishes", finishes))
    return PreparedCall(Method.FINISH, request, lambda answer: list(answer.outcomes))


def checkpoint(
    queue: str, checkpoints: Iterable[CheckpointInfo], *, claim_timeout_ms: int | None = None
) -> PreparedCall[None]:
    """Renew claims, and change what the jobs hold: body, attempts, status, run-after. The claims
    last for as long again, or for `claim_timeout_ms`."""
    request = CheckpointRequest(queue, _listed("checkpoints", checkpoints), claim_timeout_ms)
    return PreparedCall(Method.CHECKPOINT, request, _done)


def apply_checkpoints(
    queue: str, checkpoints: Iterable[CheckpointInfo], *, claim_timeout_ms: int | None = None
) -> PreparedCall[CheckpointOutcomes]:
    """Checkpoint jobs, each named once, and return which of these checkpoints applied.

    One that did not, because its claim no longer holds, has changed nothing.
    """
    request = CheckpointRequest(queue, _listed("checkpoints", checkpoints), claim_timeout_ms)
    return PreparedCall(Method.APPLY_CHECKPOINTS, request, lambda answer: answer)


def release(queue: str, jobs: Iterable[ClaimedJob]) -> PreparedCall[None]:
    """Make claimed jobs pending again, at no attempt's cost; those whose claims no longer hold stay
    as they are."""
    back = [
        CheckpointInfo(job.descriptor, move_to_pending=True, claim_descriptor=job.claim_descriptor)
        for job in jobs
    ]
    return checkpoint(queue, back)


# --- looking and mending ------------------------------------------------------------------


def lookup(
    descriptors: Iterable[str], *, include_body: bool = False
) -> PreparedCall[dict[str, JobRecord]]:
    """Look jobs up; return what is known of them, by descriptor, without the unknown ones."""
    request = LookupRequest(_listed("descriptors", descriptors), include_body)
    return PreparedCall(Method.LOOKUP, request, dict, repeatable=True)


def lookup_keys(
    queue: str, keys: Iterable[str], *, include_body: bool = False
) -> PreparedCall[dict[str, JobRecord]]:
    """Look up jobs of a queue by their keys; return what is known of them, by key, without the
    keys that no job holds. Keys of all queues are those of the queue ""."""
    named = [QueueKey(queue, key) for key in _listed("keys", keys)]
    return PreparedCall(
        Method.LOOKUP,
        LookupRequest((), include_body, named),
        lambda found: {job.options.key: job for job in found.values()},
        repeatable=True,
    )


def count(
    queue: str,
    state: JobState,
    *,
    priority: int | None = None,
    future: bool = False,
    body_regex: str | None = None,
) -> PreparedCall[int]:
    """Count the jobs in a state; `future`: those whose run-after is still to come."""
    request = CountRequest(queue, state, priority, future, body_regex)
    return PreparedCall(Method.COUNT, request, int, repeatable=True)


def scan(  # noqa: PLR0913  one parameter for each field of the request
    queue: str,
    state: JobState,
    *,
    priority: int | None = None,
    future: bool = False,
    body_regex: str | None = None,
    page_size: int = 100,
    newest_end_first: bool = False,
    max_ms: int | None = None,
    accept_partial: bool = False,
    choice: JobChoice | None = None,
) -> PreparedCall[ScanResult]:
    """Yield all jobs in a state, the latest run-after first, fetched page by page; with
    `newest_end_first` those that have ended, the most recent end first.

        for job in client.scan("mail", JobState.FAILED, choice=JobChoice(message="KeyError: #")):
            print(job.descriptor, job.custom_status)

    An AsyncClient's is for `async for`. A page is answered after `max_ms` with what was found by
    then: `client.run` with this call, and then with `page_after`, shows how far the search got, and
    with `accept_partial` the `missing_shards` without which a page was answered.
    """
    request = ScanRequest(
        queue,
        state,
        priority,
        future,
        limit=page_size,
        body_regex=body_regex,
        newest_end_first=newest_end_first,
        max_ms=max_ms,
        accept_partial=accept_partial,
        options=choice,
    )
    return PreparedCall(Method.SCAN, request, lambda page: page, repeatable=True)


def retry_failed(
    queue: str,
    *,
    priority: int = 1,
    attempts_to_allow: int = 1,
    run_after_ms: int | None = None,
    limit: int = 1000,
    body_regex: str | None = None,
    spread_ms: int | None = None,
    dry_run: bool = False,
    choice: JobChoice | None = None,
) -> PreparedCall[int]:
    """Make up to `limit` FAILED jobs PENDING again, the oldest first; return how many.

    Fewer than `limit` only if there are no more. What takes longer than the server gives a call is
    done in several; one that fails raises its error, and what those before it did stays. A job
    that fails again meanwhile may be retried again.

    With any of the other parameters those jobs are retried that all of these choose, in no order;
    then priority 0 stands for all, and a server that knows no choices refuses that. `spread_ms`
    spreads the run-afters of `limit` jobs, or of those that are named. A dry run only counts.

        client.retry_failed("mail", priority=0, choice=JobChoice(["mail:s1:p1:4711"]))
    """
    request = RetryFailedRequest(
        *(queue, priority, attempts_to_allow, run_after_ms, _limit(limit, choice)),
        *(body_regex, spread_ms, dry_run, choice),
    )
    return PreparedCall(Method.RETRY_FAILED, request, int, repeatable=dry_run)


def delete_jobs(
    queue: str,
    state: JobState,
    *,
    priority: int = 1,
    body_regex: str | None = None,
    limit: int = 1000,
    dry_run: bool = False,
    choice: JobChoice | None = None,
) -> PreparedCall[int]:
    """Delete up to `limit` jobs of a state and priority; return how many.

    Fewer than `limit` only if there are no more; in several calls, as retry_failed. Jobs are chosen
    as there.
    """
    limit = _limit(limit, choice)
    request = DeleteJobsRequest(queue, state, priority, body_regex, limit, dry_run, choice)
    return PreparedCall(Method.DELETE_JOBS, request, int, repeatable=dry_run)


def _limit(limit: int, choice: JobChoice | None) -> int:
    """Return the limit of a call that may name its jobs: then it is how many these are."""
    named = choice and choice.descriptors
    return limit if named is None else max(1, len(named))


# --- operations that take several calls ---------------------------------------------------


def page_after(call: PreparedCall[ScanResult], page: ScanResult) -> PreparedCall[ScanResult] | None:
    """Make the call for what follows the `page` that this one brought; None after the last."""
    if page.continuation == CONTINUATION_END:
        return None
    request = cast("ScanRequest", call.request)
    return call._replace(request=request._replace(continuation=page.continuation))


def pages(
    run: Callable[[PreparedCall[ScanResult]], ScanResult], call: PreparedCall[ScanResult]
) -> Iterator[ScanResult]:
    """Yield the pages of a scan from the one that `call` brings on, each once it is asked for."""
    left: PreparedCall[ScanResult] | None = call
    while left is not None:
        page = run(left)
        yield page
        left = page_after(left, page)


async def enqueue_rest(
    run: Callable[[PreparedCall[list[str]]], Awaitable[list[str]]],
    enqueued: PreparedCall[T],
    error: EnqueuedInPart,
) -> T:
    """Send the jobs that certainly are not stored, by the error that `enqueued` ended with, once
    more; return the descriptors of all. Raises EnqueuedInPart if still not all are stored."""
    request = cast("EnqueueRequest", enqueued.request)
    descriptors = list(error.descriptors)
    places = [place for place, each in enumerate(descriptors) if each == error.NOT_STORED]
    # A call with keys may be repeated as it is, and then tells which jobs existed.
    if not places or any(key_of(request.queue, job.options) for job in request.jobs):
        raise error
    why = error.message
    try:
        stored = await run(enqueue(request.queue, [request.jobs[place] for place in places]))
    except EnqueuedInPart as again:
        why = again.message
        stored = list(again.descriptors)
    except (PinLaterError, ConnectionFailed) as failure:
        why = str(failure)
        is_certain = isinstance(failure, NOT_STORED) and not isinstance(failure, OutcomeUnknown)
        stored = [error.NOT_STORED if is_certain else error.MAY_BE_STORED] * len(places)
    for place, descriptor in zip(places, stored, strict=True):
        descriptors[place] = descriptor
    if error.NOT_STORED in descriptors or error.MAY_BE_STORED in descriptors:
        raise EnqueuedInPart(descriptors, why)
    return cast("T", descriptors)


def noting(call: PreparedCall[T], note: Callable[[T], object]) -> PreparedCall[T]:
    """Return `call` so that `note` gets the result of each answer: a client may make it several
    times for one result, and an error does not say what the answers before it did."""

    def result(answer: Any) -> T:
        found = call.result(answer)
        note(found)
        return found

    return call._replace(result=result)


async def change_all(
    run: Callable[[PreparedCall[int]], Awaitable[int]],
    call: PreparedCall[int],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Make a call that changes up to `limit` jobs, and make it again for the rest if the server
    answered because the time for it was used up. Return how many jobs were changed.

    The server does not say so. But it uses at least half of its time: a call that was short, by
    itself or beside the first one, has left nothing. So new jobs don't keep this going. Raises
    OutcomeUnknown, for ConnectionFailed would mean that nothing was done, where a part was.
    """
    request = cast("RetryFailedRequest | DeleteJobsRequest", call.request)
    done = 0
    short_seconds = 0.0
    while True:
        began = clock()
        try:
            changed = await run(call)
        except OutcomeUnknown:
            raise
        except ConnectionFailed as error:
            if not done:
                raise
            told = f"{how_many(done, 'job was', 'jobs were')} changed, and the rest was not"
            raise OutcomeUnknown(f"{told}: {error}") from error
        seconds = clock() - began
        done += changed
        left = request.limit - done
        short_seconds = short_seconds or max(seconds / 2, _LEAST_USED_SECONDS)
        if not changed or left <= 0 or seconds < short_seconds or request.dry_run:
            return done
        call = call._replace(request=request._replace(limit=left))


# --- for the clients ----------------------------------------------------------------------


def as_operation(method: F, prepare: Callable[..., object]) -> F:
    """Let `help`, editors and tracebacks show a client's method as the operation that it is."""
    signature = inspect.signature(prepare)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    prepared = str(signature.return_annotation).removeprefix("PreparedCall[").removesuffix("]")
    returns = method.__annotations__["return"]
    vars(method)["__signature__"] = signature.replace(
        parameters=[itself, *signature.parameters.values()],
        return_annotation=prepared if returns == "T" else returns,
    )
    method.__name__ = prepare.__name__
    method.__qualname__ = f"{method.__annotations__['self']}.{prepare.__name__}"
    method.__doc__ = prepare.__doc__
    return method


def _listed(name: str, values: Iterable[T]) -> list[T]:
    """Raises TypeError for one that stands alone: a text could be taken for a list of its
    characters, a job for one of its fields, and an empty text for nothing to do."""
    if isinstance(values, str | bytes | bytearray | Job | ClaimedJob | AckInfo | CheckpointInfo):
        raise TypeError(f"{name}: expected a list, got a single {type(values).__name__}")
    return list(values)


def _acks(
    queue: str, succeeded: Iterable[ClaimedJob | AckInfo], failed: Iterable[ClaimedJob | AckInfo]
) -> AckRequest:
    return AckRequest(
        queue,
        [_ack_info(job) for job in _listed("succeeded", succeeded)],
        [_ack_info(job) for job in _listed("failed", failed)],
    )


def _ack_info(job: ClaimedJob | AckInfo) -> AckInfo:
    if isinstance(job, ClaimedJob):
        return AckInfo(job.descriptor, claim_descriptor=job.claim_descriptor or None)
    return job


def _descriptors(answer: list[str] | EnqueueWithOptionsResult) -> list[str]:
    return list(answer.descriptors if isinstance(answer, EnqueueWithOptionsResult) else answer)


def _done(_: Any) -> None:
    """Return nothing, as calls without a result do."""
