"""What a caller may ask of a shard: every rule is checked here, before anything is stored.

Pure. A check either passes or raises the error that the caller gets, which says what is wrong,
where (the index of the job in its list) and what would be right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pinlaterd.config.schema import ServerSettings
from pinlaterd.engines.base import Acks, Checkpoint, Limits, TableLimits
from pinlaterd.errors import (
    ContinuationInvalid,
    InvalidEnqueue,
    InvalidRequest,
    PriorityNotSupported,
    QueueNameInvalid,
    QueueNameTooLong,
    RequestError,
)
from pinlaterd.model import (
    CONTINUATION_START,
    QUEUE_NAME,
    CallContext,
    CountRequest,
    DeleteJobsRequest,
    DequeueRequest,
    EnqueueRequest,
    Job,
    RetryFailedRequest,
    ScanKey,
    ScanRequest,
)

# A claim descriptor bears the source, and PinLater's tables hold 200 characters of it.
SOURCE_BYTES = 120
_LARGEST_I32 = 2**31 - 1
_LARGEST_I64 = 2**63 - 1
_MOST_REGEX_CHARS = 10_000  # the loop waits until its searcher has taken the call
_NO_CONTROL = str.maketrans("", "", "".join(map(chr, (*range(32), 127))))


class Rules:
    """The rules of one shard: those of the interface, and what its store can hold: `limits`, and
    of a queue, by priority, what `narrower` says."""

    def __init__(
        self,
        limits: Limits,
        narrower: Callable[[str], Mapping[int, TableLimits]],
        server: ServerSettings,
    ) -> None:
        self._limits = limits
        self._narrower = narrower
        self._levels = server.num_priority_levels
        self._body_bytes = min(server.max_job_body_bytes, limits.body_bytes)

    # --- names -----------------------------------------------------------------------------

    def queue_name(self, queue: str) -> None:
        """Of a queue that is to be created or deleted."""
        if QUEUE_NAME.match(queue) is None:
            raise QueueNameInvalid(queue)
        if len(queue) > self._limits.queue_name_chars:
            raise QueueNameTooLong(queue, self._limits.queue_name_chars)

    def priority(self, priority: int) -> None:
        if not 1 <= priority <= self._levels:
            raise PriorityNotSupported(priority, self._levels)

    # --- enqueue ---------------------------------------------------------------------------

    def enqueue(self, context: CallContext, request: EnqueueRequest, now_ms: int) -> Sequence[Job]:
        """The jobs as they are to be stored: custom statuses and times cut to what the store
        holds, so that the order in memory is that of the store."""
        _check_source(context.source, InvalidEnqueue)
        most_body, levels = self._body_bytes, self._levels
        latest, most_status = self._limits.run_after_ms, self._limits.custom_status_chars
        too_long = False
        for index, (body, priority, run_after_ms, attempts, status) in enumerate(request.jobs):
            if (
                len(body) > most_body
                or not 0 < priority <= levels
                or not 0 < attempts <= _LARGEST_I32
                or (run_after_ms is not None and not 0 <= run_after_ms <= latest)
            ):
                self._explain(index, request.jobs[index])
            if status and len(status) > most_status:
                too_long = True
        jobs = request.jobs
        if too_long:
            jobs = [job._replace(custom_status=job.custom_status[:most_status]) for job in jobs]
        narrower = self._narrower(request.queue)
        if narrower:
            jobs = [
                _fitted(index, job, narrower.get(job.priority), now_ms)
                for index, job in enumerate(jobs)
            ]
        return jobs

    def _explain(self, index: int, job: Job) -> None:
        """Raise what is wrong with a job of an enqueue."""
        if not 1 <= job.priority <= self._levels:
            raise PriorityNotSupported(job.priority, self._levels)
        if len(job.body) > self._body_bytes:
            raise InvalidEnqueue(
                f"jobs[{index}].body has {len(job.body)} bytes; at most {self._body_bytes} are kept"
            )
        if not 1 <= job.attempts_allowed <= _LARGEST_I32:
            raise InvalidEnqueue(
                f"jobs[{index}].numAttemptsAllowed is {job.attempts_allowed}; "
                f"it must be 1 to {_LARGEST_I32}"
            )
        raise InvalidEnqueue(
            f"jobs[{index}].runAfterTimestampMillis is {job.run_after_ms}; "
            f"it must be 0 to {self._limits.run_after_ms}"
        )

    # --- dequeue, ack, checkpoint ------------------------------------------------------------

    def dequeue(self, context: CallContext, request: DequeueRequest) -> None:
        _check_source(context.source, InvalidRequest)
        if request.limit < 1:
            raise InvalidRequest(f"limit is {request.limit}; it must be at least 1")
        if not 0 < request.coverage <= 1:
            raise InvalidRequest(
                f"coverage is {request.coverage}; it must be above 0 and at most 1"
            )
        if request.max_wait_ms < 0:
            raise InvalidRequest(f"maxWaitMillis is {request.max_wait_ms}; it must be at least 0")

    def retry_delay(self, queue: str, acks: Acks, now_ms: int) -> str | None:
        """What is wrong with the delay of failed jobs' acks."""
        most_ms = self._latest(queue, acks.priority) - now_ms
        delay_ms = acks.retry_delay_ms
        return None if 0 <= delay_ms <= most_ms else f"{delay_ms}; it must be 0 to {most_ms}"

    def source(self, context: CallContext) -> None:
        _check_source(context.source, InvalidRequest)

    def checkpoint(self, queue: str, descriptor: str, info: Checkpoint) -> InvalidRequest | None:
        """What is wrong with one checkpoint, of a job of that queue."""
        where, priority = f"of the checkpoint of {descriptor[:200]!r}", info.key.priority
        if info.new_body is not None:
            most_body, cure = self._most_body(queue, priority)
            if len(info.new_body) > most_body:
                return InvalidRequest(
                    f"newBody {where} has {len(info.new_body)} bytes; at most {most_body} are kept"
                    + cure
                )
        if info.attempts is not None and not 1 <= info.attempts <= _LARGEST_I32:
            return InvalidRequest(
                f"numOfAttemptsAllowed {where} is {info.attempts}; it must be 1 to {_LARGEST_I32}"
            )
        latest = self._latest(queue, priority)
        if info.run_after_ms is not None and not 0 <= info.run_after_ms <= latest:
            return InvalidRequest(
                f"runAfterTimestampMillis {where} is {info.run_after_ms}; it must be 0 to {latest}"
            )
        return None

    # --- jobs by state -----------------------------------------------------------------------

    def count(self, request: CountRequest) -> None:
        if request.priority is not None:
            self.priority(request.priority)
        _check_regex(request.body_regex)

    def scan(self, request: ScanRequest) -> ScanKey | None:
        """Where the scan goes on; None: it starts."""
        if request.priority is not None:
            self.priority(request.priority)
        _check_limit(request.limit)
        _check_regex(request.body_regex)
        if request.continuation == CONTINUATION_START:
            return None
        key = ScanKey.parse_token(request.continuation)
        if key is None or max(key.run_after_ms, key.local_id) > _LARGEST_I64:
            raise ContinuationInvalid(request.continuation)
        return key

    def retry_failed(self, request: RetryFailedRequest) -> None:
        self.priority(request.priority)
        _check_limit(request.limit)
        if not 1 <= request.attempts_to_allow <= _LARGEST_I32:
            raise InvalidRequest(
                f"attemptsToAllow is {request.attempts_to_allow}; it must be 1 to {_LARGEST_I32}"
            )
        run_after_ms, latest = request.run_after_ms, self._latest(request.queue, request.priority)
        if run_after_ms is not None and not 0 <= run_after_ms <= latest:
            raise InvalidRequest(
                f"runAfterTimestampMillis is {run_after_ms}; it must be 0 to {latest}"
            )

    def delete_jobs(self, request: DeleteJobsRequest) -> None:
        self.priority(request.priority)
        _check_limit(request.limit)
        _check_regex(request.body_regex)

    # --- what the tables of a queue hold -----------------------------------------------------

    def _most_body(self, queue: str, priority: int) -> tuple[int, str]:
        """In bytes, and what else is to be said of it."""
        table = self._narrower(queue).get(priority)
        if table is None or table.body_bytes >= self._body_bytes:
            return self._body_bytes, ""
        return table.body_bytes, _cure(table)

    def _latest(self, queue: str, priority: int) -> int:
        table = self._narrower(queue).get(priority)
        return self._limits.run_after_ms if table is None else table.run_after.latest_ms


def _fitted(index: int, job: Job, table: TableLimits | None, now_ms: int) -> Job:
    """A job, valid otherwise, as its table holds it. Raises InvalidEnqueue if it can't."""
    if table is None:
        return job
    if len(job.body) > table.body_bytes:
        raise InvalidEnqueue(
            f"jobs[{index}].body has {len(job.body)} bytes; the table of priority {job.priority} "
            f"of this queue holds {table.body_bytes}{_cure(table)}"
        )
    run_after_ms = now_ms if job.run_after_ms is None else job.run_after_ms
    latest = table.run_after.latest_ms
    if run_after_ms > latest:
        raise InvalidEnqueue(
            f"jobs[{index}].runAfterTimestampMillis is {run_after_ms}; the table of priority "
            f"{job.priority} of this queue holds times up to {latest}"
        )
    return job._replace(run_after_ms=table.run_after.floor(run_after_ms))


def _cure(table: TableLimits) -> str:
    return f"; {table.body_cure}" if table.body_cure else ""


def _check_source(source: str, error: Callable[[str], RequestError]) -> None:
    if source.isascii() and len(source) <= SOURCE_BYTES and source.isprintable():
        return
    size = len(source.encode())
    if size > SOURCE_BYTES:
        raise error(f"the context's source has {size} bytes; at most {SOURCE_BYTES} are allowed")
    if source.translate(_NO_CONTROL) != source:
        raise error(f"the context's source {source!r} holds control characters; use printable text")


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise InvalidRequest(f"limit is {limit}; it must be at least 1")


def _check_regex(pattern: str | None) -> None:
    if pattern is not None:
        if len(pattern) > _MOST_REGEX_CHARS:
            raise InvalidRequest(
                f"bodyRegexToMatch has {len(pattern):,} characters; at most {_MOST_REGEX_CHARS:,}"
            )
        # Loaded when first needed: the library costs an idle shard more memory than its index.
        from pinlaterd.engines.searching import compile_body_regex  # noqa: PLC0415

        compile_body_regex(pattern)
