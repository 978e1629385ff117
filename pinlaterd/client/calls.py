"""The twelve operations as calls to be sent: what each asks for, and what its answer becomes.

A client has a method for every function here, with the same parameters and the documentation that
stands here (`as_method_of`); all that it adds is the sending. Everything here is pure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar, cast

from pinlaterd.client.addresses import Address
from pinlaterd.errors import (
    ConnectionFailed,
    EnqueuedInPart,
    NoHealthyShards,
    OutcomeUnknown,
    Overloaded,
    PinLaterError,
    ProtocolError,
    RequestError,
)
from pinlaterd.model import (
    CONTINUATION_END,
    AckInfo,
    AckRequest,
    CallContext,
    CheckpointInfo,
    CheckpointRequest,
    ClaimedJob,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    DequeueRequest,
    DequeueResult,
    EnqueueRequest,
    Job,
    JobRecord,
    JobState,
    LookupRequest,
    Method,
    QueueNamesRequest,
    Request,
    Result,
    RetryFailedRequest,
    ScanRequest,
    ScanResult,
)
from pinlaterd.rpc import codec

T = TypeVar("T")

# The errors that are sure that an enqueue has stored nothing; but OutcomeUnknown is none of them.
_NOT_STORED = (RequestError, Overloaded, NoHealthyShards, ConnectionFailed)
# A call that changes many jobs uses half of request_timeout_ms, which is at least 100, or more.
_LEAST_USED_SECONDS = 0.05


class PreparedCall(NamedTuple, Generic[T]):
    """A call whose answer is a T.

    `repeatable`: carried out twice, it has done what it does once, so that it may be sent again
    when no answer came. `wait_ms`: how long it asks the server to wait, beside what calls take.
    """

    method: Method
    request: Request
    result: Callable[[Result], T]
    repeatable: bool = False
    wait_ms: int = 0

    def encode(self, seqid: int, context: CallContext) -> bytes:
        """The message. Raises InvalidRequest, or InvalidEnqueue, for what Thrift's types cannot
        hold."""
        return codec.encode_call(self.method, seqid, context, self.request)

    def decode(self, seqid: int, answer: bytes, *, server: Address) -> T:
        """What the answer of that server says: a result, or an error of the service, raised.

        Raises OutcomeUnknown if it is no answer to this call.
        """
        try:
            if codec.peek_seqid(answer) != seqid:
                raise ProtocolError("it belongs to another call")
            return self.result(codec.decode_reply(self.method, answer))
        except ProtocolError as error:
            raise OutcomeUnknown(
                f"what {server} sent is no answer to {self.method.value}: {error}; "
                "the call may have been carried out"
            ) from error


# --- queues -------------------------------------------------------------------------------


def create_queue(queue: str) -> PreparedCall[None]:
    """Make a queue; one that exists already is left as it is."""
    return PreparedCall(Method.CREATE_QUEUE, CreateQueueRequest(queue), _nothing)


def delete_queue(queue: str, *, password: str) -> PreparedCall[None]:
    """Drop a queue with all its jobs; `password` is the server's admin password."""
    return PreparedCall(Method.DELETE_QUEUE, DeleteQueueRequest(queue, password), _nothing)


def queue_names() -> PreparedCall[frozenset[str]]:
    """The names of all queues."""
    return PreparedCall(Method.QUEUE_NAMES, QueueNamesRequest(), _names, repeatable=True)


# --- the life of a job --------------------------------------------------------------------


def enqueue(queue: str, jobs: Iterable[Job | bytes]) -> PreparedCall[list[str]]:
    """Store jobs (a plain body means Job(body)) and return their descriptors, in order.

        client.enqueue("mail", [b"now", Job(b"later", run_after_ms=1_900_000_000_000)])

    Up to 1,000 jobs are stored all or none. When this returns, they are durable. If only a part
    of a larger call is stored, the jobs that certainly are not are sent once more; if not all are
    stored then, EnqueuedInPart is raised: its `descriptors` tell of each job what became of it.
    """
    listed = _listed("jobs", jobs)
    request = EnqueueRequest(queue, [j if isinstance(j, Job) else Job(j) for j in listed])
    return PreparedCall(Method.ENQUEUE, request, _descriptors)


class RestOfEnqueue(Generic[T]):
    """The jobs of `enqueued` that certainly are not stored, by the error that it ended with: `call`
    sends them once more."""

    def __init__(self, enqueued: PreparedCall[T], error: EnqueuedInPart) -> None:
        """Raises `error` if there are none."""
        request = cast("EnqueueRequest", enqueued.request)
        self._descriptors = list(error.descriptors)
        self._why = error.message
        self._places = [
            place for place, found in enumerate(self._descriptors) if found == error.NOT_STORED
        ]
        if not self._places:
            raise error
        self.call = enqueue(request.queue, [request.jobs[place] for place in self._places])

    def after(self, error: PinLaterError | ConnectionFailed) -> list[str]:
        """What `call` has stored, if it ended with `error`."""
        self._why = str(error)
        if isinstance(error, EnqueuedInPart):
            return list(error.descriptors)
        not_stored = isinstance(error, _NOT_STORED) and not isinstance(error, OutcomeUnknown)
        mark = EnqueuedInPart.NOT_STORED if not_stored else EnqueuedInPart.MAY_BE_STORED
        return [mark] * len(self._places)

    def result(self, descriptors: Sequence[str]) -> T:
        """The result of both calls, given what the second has stored. Raises EnqueuedInPart."""
        for place, descriptor in zip(self._places, descriptors, strict=True):
            self._descriptors[place] = descriptor
        if {EnqueuedInPart.NOT_STORED, EnqueuedInPart.MAY_BE_STORED}.intersection(
            self._descriptors
        ):
            raise EnqueuedInPart(self._descriptors, self._why)
        return cast("T", self._descriptors)


def dequeue(
    queue: str,
    *,
    limit: int,
    succeeded: Iterable[ClaimedJob | AckInfo] = (),
    failed: Iterable[ClaimedJob | AckInfo] = (),
    max_wait_ms: int = 0,
    dry_run: bool = False,
    coverage: float = 1.0,
) -> PreparedCall[list[ClaimedJob]]:
    """Claim up to `limit` jobs that are ready, the most urgent first.

    `succeeded` and `failed` acknowledge earlier jobs in the same call, before it claims; if one of
    them can't be carried out, nothing is claimed and its error is raised. With no job ready, the
    answer waits up to `max_wait_ms` for one. A dry run claims nothing.
    """
    acks = _acks(queue, succeeded, failed)
    has_acks = bool(acks.succeeded or acks.failed)
    request = DequeueRequest(
        queue, limit, acks if has_acks else None, dry_run, coverage, max_wait_ms
    )
    return PreparedCall(
        Method.DEQUEUE,
        request,
        _claimed,
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
    return PreparedCall(Method.ACK, request, _nothing, repeatable=under_claims)


def checkpoint(queue: str, checkpoints: Iterable[CheckpointInfo]) -> PreparedCall[None]:
    """Renew claims, and change what the jobs hold: body, attempts, status, run-after."""
    return PreparedCall(
        Method.CHECKPOINT, CheckpointRequest(queue, _listed("checkpoints", checkpoints)), _nothing
    )


# --- looking and mending ------------------------------------------------------------------


def lookup(
    descriptors: Iterable[str], *, include_body: bool = False
) -> PreparedCall[dict[str, JobRecord]]:
    """What is known of these jobs, by descriptor; unknown ones are left out."""
    request = LookupRequest(_listed("descriptors", descriptors), include_body)
    return PreparedCall(Method.LOOKUP, request, _records, repeatable=True)


def count(
    queue: str,
    state: JobState,
    *,
    priority: int | None = None,
    future: bool = False,
    body_regex: str | None = None,
) -> PreparedCall[int]:
    """How many jobs are in a state; `future`: those whose run-after is still to come."""
    request = CountRequest(queue, state, priority, future, body_regex)
    return PreparedCall(Method.COUNT, request, _number, repeatable=True)


def scan(
    queue: str,
    state: JobState,
    *,
    priority: int | None = None,
    future: bool = False,
    body_regex: str | None = None,
    page_size: int = 100,
) -> PreparedCall[ScanResult]:
    """All jobs in a state, the latest run-after first, fetched page by page.

        for job in client.scan("mail", JobState.FAILED):
            print(job.descriptor, job.custom_status)

    An AsyncClient's is for `async for`.
    """
    request = ScanRequest(queue, state, priority, future, limit=page_size, body_regex=body_regex)
    return PreparedCall(Method.SCAN, request, _page, repeatable=True)


def page_after(call: PreparedCall[ScanResult], page: ScanResult) -> PreparedCall[ScanResult] | None:
    """The call for what follows the `page` that this one brought; None after the last."""
    if page.continuation == CONTINUATION_END:
        return None
    request = cast("ScanRequest", call.request)
    return call._replace(request=request._replace(continuation=page.continuation))


def retry_failed(
    queue: str,
    *,
    priority: int = 1,
    attempts_to_allow: int = 1,
    run_after_ms: int | None = None,
    limit: int = 1000,
) -> PreparedCall[int]:
    """Make up to `limit` FAILED jobs PENDING again, the oldest first; return how many.

    Fewer than `limit` only if there are no more. What takes longer than the server gives a call is
    done in several; one that fails raises its error, and what those before it did stays. A job
    that fails again meanwhile may be retried again.
    """
    request = RetryFailedRequest(queue, priority, attempts_to_allow, run_after_ms, limit)
    return PreparedCall(Method.RETRY_FAILED, request, _number)


def delete_jobs(
    queue: str,
    state: JobState,
    *,
    priority: int = 1,
    body_regex: str | None = None,
    limit: int = 1000,
) -> PreparedCall[int]:
    """Delete up to `limit` jobs of a state and priority; return how many.

    Fewer than `limit` only if there are no more; in several calls, as retry_failed.
    """
    request = DeleteJobsRequest(queue, state, priority, body_regex, limit)
    return PreparedCall(Method.DELETE_JOBS, request, _number)


class RepeatedCall:
    """A call that changes up to `limit` jobs, and is made again for the rest if the server answered
    because the time for it was used up. `call` is the next one; None once no more is to be done.

    The server does not say so, and how much time it gives a call is not known here. But it uses at
    least half of that: a call that was short, by itself or beside the first one, has left nothing.
    So jobs that come to be there meanwhile don't keep this going.
    """

    def __init__(self, call: PreparedCall[int]) -> None:
        self.call: PreparedCall[int] | None = call
        self.done = 0
        self._first = call
        self._request = cast("RetryFailedRequest | DeleteJobsRequest", call.request)
        self._short_seconds = 0.0

    def after(self, jobs: int, seconds: float) -> None:
        """`call` took that long, and changed so many jobs."""
        self.done += jobs
        left = self._request.limit - self.done
        self._short_seconds = self._short_seconds or max(seconds / 2, _LEAST_USED_SECONDS)
        if jobs and left > 0 and seconds >= self._short_seconds:
            self.call = self._first._replace(request=self._request._replace(limit=left))
        else:
            self.call = None


def as_method_of(
    client: str,
    method: Callable[..., object],
    prepare: Callable[..., object],
    *,
    returns: str | None = None,
) -> None:
    """Let `help`, editors and tracebacks show a client's method as the operation that it is.

    `returns` is the type of its result, if that is not the prepared call's.
    """
    signature = inspect.signature(prepare)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    prepared = str(signature.return_annotation).removeprefix("PreparedCall[").removesuffix("]")
    described = signature.replace(
        parameters=[itself, *signature.parameters.values()],
        return_annotation=prepared if returns is None else returns,
    )
    method.__name__ = prepare.__name__
    method.__qualname__ = f"{client}.{prepare.__name__}"
    method.__doc__ = prepare.__doc__
    vars(method)["__signature__"] = described


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


# --- results: what `decode_reply` returns for a method is always of its type ---------------


def _nothing(_: Result) -> None:
    return None


def _names(result: Result) -> frozenset[str]:
    return cast("frozenset[str]", result)


def _descriptors(result: Result) -> list[str]:
    return list(cast("list[str]", result))


def _claimed(result: Result) -> list[ClaimedJob]:
    return list(cast("DequeueResult", result).jobs)


def _records(result: Result) -> dict[str, JobRecord]:
    return dict(cast("Mapping[str, JobRecord]", result))


def _number(result: Result) -> int:
    return cast("int", result)


def _page(result: Result) -> ScanResult:
    return cast("ScanResult", result)
