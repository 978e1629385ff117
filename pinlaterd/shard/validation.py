"""The rules of what a caller may ask of a shard: all are checked here, before anything is stored.

Pure. A check either passes or raises the error that the caller gets, which says what is wrong,
where (the index of the job in its list) and what would be right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from pinlaterd.config.schema import ServerSettings
from pinlaterd.engines.base import Acks, Checkpoint, Finish, Limits, TableLimits
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
    ALL_PRIORITIES,
    CONTINUATION_START,
    MOST_KEY_BYTES,
    QUEUE_NAME,
    AlikeJobs,
    CallContext,
    CountRequest,
    DeleteJobsRequest,
    DequeueRequest,
    EnqueueRequest,
    Job,
    JobChoice,
    JobState,
    RetryFailedRequest,
    ScanKey,
    ScanRequest,
)

# A claim descriptor bears the source, and PinLater's tables hold 200 characters of it.
SOURCE_BYTES = 120
_LEAST_CLAIM_TIMEOUT_MS = 1_000  # maintenance looks once a second
_LARGEST_I32 = 2**31 - 1
_LARGEST_I64 = 2**63 - 1
_MOST_REGEX_CHARS = 10_000  # the loop waits until its searcher has taken the call


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

    def queue_name(self, queue: str) -> None:
        """Check the name of a queue that is to be created or deleted."""
        if QUEUE_NAME.match(queue) is None:
            raise QueueNameInvalid(queue)
        if len(queue) > self._limits.queue_name_chars:
            raise QueueNameTooLong(queue, self._limits.queue_name_chars)

    def _priority(self, priority: int | None) -> None:
        if priority is not None and not 1 <= priority <= self._levels:
            raise PriorityNotSupported(priority, self._levels)

    # --- enqueue ---------------------------------------------------------------------------

    def enqueue(
        self, context: CallContext, request: EnqueueRequest, now_ms: int
    ) -> tuple[Sequence[Job], bool]:
        """Return the jobs as they are to be stored, and whether any has options. Custom statuses
        and times are cut to what the store holds, so that the order in memory is the store's."""
        check_source(context.source, InvalidEnqueue)
        most_body, levels = self._body_bytes, self._levels
        latest, most_status = self._limits.run_after_ms, self._limits.custom_status_chars
        too_long, with_options, jobs, longest = False, False, request.jobs, 0
        some: Sequence[Job] = jobs
        if type(jobs) is AlikeJobs:
            some, longest = (jobs.alike,), max(map(len, jobs.bodies))
        for job in some:
            is_right = (
                (longest or len(job.body)) <= most_body
                and 0 < job.priority <= levels
                and 0 < job.attempts_allowed <= _LARGEST_I32
                and 0 <= (job.run_after_ms or 0) <= latest
            )
            if job.options is not None:
                with_options = True
                is_right = is_right and self._has_right_options(job, jobs)
            if not is_right:
                for index, each in enumerate(jobs):
                    self._explain(f"jobs[{index}]", each)
            if len(job.custom_status) > most_status:
                too_long = True
        if too_long:
            jobs = [job._replace(custom_status=job.custom_status[:most_status]) for job in jobs]
        narrower = self._narrower(request.queue)
        if narrower:
            jobs = [
                _fitted(f"jobs[{index}]", job, narrower.get(job.priority), now_ms)
                for index, job in enumerate(jobs)
            ]
        return jobs, with_options

    def _explain(self, where: str, job: Job) -> None:
        """Raise what is wrong with a job of an enqueue, if anything is."""
        self._priority(job.priority)
        if len(job.body) > self._body_bytes:
            raise InvalidEnqueue(
                f"{where}.body has {len(job.body)} bytes; at most {self._body_bytes} are kept"
            )
        attempts, latest = job.attempts_allowed, self._limits.run_after_ms
        _check_range(f"{where}.numAttemptsAllowed", attempts, 1, _LARGEST_I32, InvalidEnqueue)
        run_after = f"{where}.runAfterTimestampMillis"
        _check_range(run_after, job.run_after_ms, 0, latest, InvalidEnqueue)
        options = job.options
        if options is not None:
            expires_at, latest_us = f"{where}.expiresAtTimestampMillis", 1000 * latest + 999
            _check_range(expires_at, options.expires_at_ms, 0, latest, InvalidEnqueue)
            run_after_us = f"{where}.runAfterTimestampMicros"
            _check_range(run_after_us, options.run_after_us, 0, latest_us, InvalidEnqueue)
            expires_at_us = f"{where}.expiresAtTimestampMicros"
            _check_range(expires_at_us, options.expires_at_us, 0, latest_us, InvalidEnqueue)
            if not self._has_right_options(job):
                raise InvalidEnqueue(
                    f"{where}.key has {len((options.key or '').encode())} bytes; "
                    f"a key has 1 to {MOST_KEY_BYTES}"
                )

    def _has_right_options(self, job: Job, jobs: Sequence[Job] = ()) -> bool:
        """Tell whether the options of a job are right; `jobs`: if they are alike, also theirs."""
        if type(jobs) is AlikeJobs and jobs.keys is not None:
            sizes = [len(key.encode()) for key in jobs.keys]
            if min(sizes) == 0 or max(sizes) > MOST_KEY_BYTES:
                return False
            job = jobs[0]
        options = job.options
        if options is None:
            return True
        key, of_all_queues = options.key, options.key_of_all_queues
        is_key = not of_all_queues if key is None else 0 < len(key.encode()) <= MOST_KEY_BYTES
        exact_us = (options.run_after_us or 0, options.expires_at_us or 0)
        times_ms = [options.expires_at_ms or 0, *[time_us // 1000 for time_us in exact_us]]
        return is_key and min(times_ms) >= 0 and max(times_ms) <= self._limits.run_after_ms

    # --- dequeue, ack, checkpoint ------------------------------------------------------------

    def dequeue(self, context: CallContext, request: DequeueRequest) -> None:
        check_source(context.source)
        if request.limit < 1 or request.max_wait_ms < 0:
            _check_least("limit", request.limit, 1)
            _check_least("maxWaitMillis", request.max_wait_ms, 0)
        if request.claim_timeout_ms is not None:
            check_claim_timeout(request.claim_timeout_ms)
        if not 0 < request.coverage <= 1:
            raise InvalidRequest(
                f"coverage is {request.coverage}; it must be above 0 and at most 1"
            )

    def retry_delay(self, queue: str, acks: Acks, descriptor: str, now_ms: int) -> None:
        """Check the retry delay of failed jobs; `descriptor`: of one of them."""
        latest_ms = self._latest(queue, acks.priority) - now_ms
        _check_range(f"retryDelayMillis of {descriptor!r}", acks.retry_delay_ms, 0, latest_ms)

    def checkpoint(self, queue: str, descriptor: str, info: Checkpoint) -> None:
        where, priority = f"of the checkpoint of {descriptor[:200]!r}", info.key.priority
        if info.new_body is not None:
            most_body, cure = self._most_body(queue, priority)
            if len(info.new_body) > most_body:
                raise InvalidRequest(
                    f"newBody {where} has {len(info.new_body)} bytes; at most {most_body} are kept"
                    + cure
                )
        _check_range(f"numOfAttemptsAllowed {where}", info.attempts, 1, _LARGEST_I32)
        latest_ms = self._latest(queue, priority)
        _check_range(f"runAfterTimestampMillis {where}", info.run_after_ms, 0, latest_ms)

    def finish(self, queue: str, descriptor: str, finish: Finish, now_ms: int) -> None:
        where = f"of the finish of {descriptor[:200]!r}"
        latest_ms = self._latest(queue, finish.key.priority) - now_ms
        _check_range(f"retryDelayMillis {where}", finish.retry_delay_ms, 0, latest_ms)
        again = finish.state is JobState.PENDING
        attempts = f"attemptsRemaining {where}"
        _check_range(attempts, finish.attempts_remaining, int(again), _LARGEST_I32)
        if finish.state is JobState.IN_PROGRESS:
            raise InvalidRequest(f"jobState {where} is IN_PROGRESS, which no finish can make it")

    # --- jobs by state -----------------------------------------------------------------------

    def count(self, request: CountRequest) -> None:
        self._priority(request.priority)
        _check_regex(request.body_regex)

    def scan(self, request: ScanRequest) -> ScanKey | None:
        """Check a scan, and return the place where it goes on; None: it starts."""
        self._priority(request.priority)
        _check_least("limit", request.limit, 1)
        _check_least("maxMillis", 1 if request.max_ms is None else request.max_ms, 1)
        _check_regex(request.body_regex)
        if request.newest_end_first and request.state not in (JobState.SUCCEEDED, JobState.FAILED):
            raise InvalidRequest("newestEndFirst is for jobs that have ended, SUCCEEDED or FAILED")
        check_choice(request.options, request.state)
        if request.continuation == CONTINUATION_START:
            return None
        key = ScanKey.parse_token(request.continuation)
        if key is None or max(key.time_ms, key.local_id) > _LARGEST_I64:
            raise ContinuationInvalid(request.continuation)
        return key

    def retry_failed(self, request: RetryFailedRequest, now_ms: int) -> None:
        self._choice(request, JobState.FAILED)
        _check_range("attemptsToAllow", request.attempts_to_allow, 1, _LARGEST_I32)
        latest_ms = min(self._latest(request.queue, level) for level in self.levels(request))
        _check_range("runAfterTimestampMillis", request.run_after_ms, 0, latest_ms)
        begin_ms = now_ms if request.run_after_ms is None else request.run_after_ms
        _check_range("spreadMillis", request.spread_ms, 0, max(0, latest_ms - begin_ms))

    def delete_jobs(self, request: DeleteJobsRequest) -> None:
        self._choice(request, request.state)

    def levels(self, request: RetryFailedRequest | DeleteJobsRequest) -> Sequence[int]:
        """Return the priorities of the jobs that a retry or a delete is for."""
        is_for_all = request.priority == ALL_PRIORITIES
        return range(1, self._levels + 1) if is_for_all else (request.priority,)

    def _choice(self, request: RetryFailedRequest | DeleteJobsRequest, state: JobState) -> None:
        if request.priority != ALL_PRIORITIES or not request.chooses:
            self._priority(request.priority)
        _check_least("limit", request.limit, 1)
        _check_regex(request.body_regex)
        check_choice(request.options, state)
        choice = request.options or JobChoice()
        by_name = JobChoice(choice.descriptors, choice.ended_before_ms)
        if choice.descriptors is not None and (choice != by_name or request.body_regex is not None):
            raise InvalidRequest(
                "jobDescriptors excludes all other conditions but endedBeforeMillis"
            )

    # --- what the tables of a queue hold -----------------------------------------------------

    def _most_body(self, queue: str, priority: int) -> tuple[int, str]:
        """Return the longest body in bytes, and what else is to be said of it."""
        table = self._narrower(queue).get(priority)
        if table is None or table.body_bytes >= self._body_bytes:
            return self._body_bytes, ""
        return table.body_bytes, _cure(table)

    def _latest(self, queue: str, priority: int) -> int:
        table = self._narrower(queue).get(priority)
        return self._limits.run_after_ms if table is None else table.run_after.latest_ms


def _fitted(where: str, job: Job, table: TableLimits | None, now_ms: int) -> Job:
    """Return a job, valid otherwise, as its table holds it. Raises InvalidEnqueue if it can't."""
    if table is None:
        return job
    its_table = f"the table of priority {job.priority} of this queue holds"
    if len(job.body) > table.body_bytes:
        raise InvalidEnqueue(
            f"{where}.body has {len(job.body)} bytes; {its_table} {table.body_bytes}{_cure(table)}"
        )
    run_after_ms = now_ms if job.run_after_ms is None else job.run_after_ms
    latest = table.run_after.latest_ms
    if run_after_ms > latest:
        raise InvalidEnqueue(
            f"{where}.runAfterTimestampMillis is {run_after_ms}; {its_table} times up to {latest}"
        )
    return job._replace(run_after_ms=table.run_after.floor(run_after_ms))


def _cure(table: TableLimits) -> str:
    return f"; {table.body_cure}" if table.body_cure else ""


def check_claim_timeout(asked_ms: int | None) -> None:
    if asked_ms is not None:
        _check_least("claimTimeoutMillis", asked_ms, _LEAST_CLAIM_TIMEOUT_MS)


@lru_cache(maxsize=256)  # a client has the same in all its calls
def check_source(
    source: str, error: Callable[[str], InvalidRequest | InvalidEnqueue] = InvalidRequest
) -> None:
    """Raise `error` if a source is too long for claims, or could forge a line where it is shown."""
    size = len(source.encode())
    if size > SOURCE_BYTES:
        raise error(f"the context's source has {size} bytes; at most {SOURCE_BYTES} are allowed")
    if not source.isprintable():  # nor controls, ends of lines, or what turns the direction
        raise error(
            f"the context's source {source!r} holds characters that can't be printed, as control "
            "characters; use printable text"
        )


def _check_range(
    what: str,
    value: int | None,
    first: int,
    last: int,
    error: Callable[[str], RequestError] = InvalidRequest,
) -> None:
    if value is not None and not first <= value <= last:
        raise error(f"{what} is {value}; it must be {first} to {last}")


def _check_least(what: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidRequest(f"{what} is {value}; it must be at least {least}")


def check_choice(choice: JobChoice | None, state: JobState) -> None:
    """Raise InvalidRequest if jobs in `state` can't be chosen so."""
    if choice is None:
        return
    before_ms, since_ms = choice.ended_before_ms, choice.ended_since_ms
    if state not in (JobState.SUCCEEDED, JobState.FAILED) and (before_ms, since_ms) != (None, None):
        shown = "endedSinceMillis" if before_ms is None else "endedBeforeMillis"
        raise InvalidRequest(f"{shown} is for jobs that have ended, SUCCEEDED or FAILED")
    _check_regex(choice.status_regex, "statusRegexToMatch")


def _check_regex(pattern: str | None, name: str = "bodyRegexToMatch") -> None:
    if pattern is not None:
        if len(pattern) > _MOST_REGEX_CHARS:
            raise InvalidRequest(
                f"{name} has {len(pattern):,} characters; at most {_MOST_REGEX_CHARS:,}"
            )
        # Loaded when first needed: the library costs an idle shard more memory than its index.
        from pinlaterd.engines.searching import compile_body_regex  # noqa: PLC0415

        compile_body_regex(pattern, name)
