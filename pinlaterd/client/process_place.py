"""A place of a pool that runs its jobs in a process of its own: `run_in="processes"`.

    thread of the place              its child
      RunningJob ──order──────────▶    handler(RunningJob of its own)
      Outcome    ◀──answer─────────    what was returned or raised, what was saved

Policies and hooks stay with the worker: the child knows the handler's function alone. A child that
died over a job is replaced before the place takes another one; one that died idle, which nobody
looks at, when it is given a job. When a claim is lost, the child's job says so
at once; what still runs LOST_GRACE_SECONDS later is killed.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from pinlaterd.client.carried_errors import CarriedError
from pinlaterd.client.client import Client
from pinlaterd.client.handlers import QueueHandler
from pinlaterd.client.outcomes import HANDED_BACK, ClaimLost, Outcome, error_text, returned
from pinlaterd.client.processes import (
    Bell,
    Flag,
    HandlerProcess,
    OutOfTime,
    ProcessDied,
    ProcessNotStarted,
)
from pinlaterd.client.running_job import Claim, RunningJob
from pinlaterd.model import ClaimedJob

# How long a handler may go on after it could see that its claim is lost.
LOST_GRACE_SECONDS = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """A job to run."""

    queue: str
    job: ClaimedJob


@dataclass(frozen=True, slots=True)
class Failure:
    """What a handler raised."""

    carried: CarriedError
    text: str  # its `error_text`


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an order. `status` is what was returned, unless there is a `failure`."""

    claim_descriptor: str  # the order's
    status: str
    failure: Failure | None
    body: bytes  # the job's, as it was saved last
    is_lost: bool  # the child has found out that the claim has ended


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """What a child is made from, each part pickled: what fails with one in the child is told as
    any other failure to begin. A handler may do without a client; `no_client` is why it has to."""

    function: bytes
    set_up: bytes
    client: bytes | None = None
    no_client: str = ""

    @classmethod
    def of(
        cls, handler: QueueHandler, client: Client, set_up: Callable[[], object] | None
    ) -> ChildPlan:
        """Raises ValueError for a function that a child could not find: it imports it by name.
        RuntimeError if this is a child, which imports the program."""
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # as it tells itself
            raise RuntimeError(
                "the program makes a Worker as it is imported, which processes of handlers do; "
                'put that under `if __name__ == "__main__":`'
            )
        plan = cls(
            _pickled(handler.function, f"the handler of queue {handler.queue!r}"),
            _pickled(set_up, "set_up_process"),
        )
        try:
            return replace(plan, client=pickle.dumps(client))
        except Exception as error:  # noqa: BLE001 - it has an SSLContext, or is a stranger's subclass
            return replace(plan, no_client=str(error))


def _pickled(function: Callable[..., object] | None, what: str) -> bytes:
    try:
        return pickle.dumps(function)
    except Exception as error:
        raise ValueError(
            f"{what} can't be found by a process of its own ({error}); it must be defined at the "
            "top level of a module, and be what the module has by its name, decorators included"
        ) from error


class ProcessPlace:
    """Runs one job at a time in a child that it keeps; in one thread, but for `abandon`."""

    can_be_ended = True

    def __init__(self, handler: QueueHandler, plan: ChildPlan, name: str) -> None:
        self._handler = handler
        self._make = partial(_Child, plan)
        self._name = name
        self._bell = Bell()
        self._process: HandlerProcess[Order, Answer] | None = None
        self._is_abandoned = False

    def prepare(self) -> None:
        """Have a child that is ready. Raises ProcessNotStarted."""
        if self._process is not None or self._is_abandoned:
            return
        try:
            self._process = HandlerProcess(self._make, self._name, self._bell)
            self._process.wait_until_ready(self._end_of_abandoned)
        except OutOfTime:
            self._end_process()
        except ProcessNotStarted as error:
            self._end_process()
            raise ProcessNotStarted(
                f"no process can run the handler of queue {self._handler.queue!r}: {error}"
            ) from error

    def run(self, job: RunningJob) -> Outcome:
        job.claim.when_lost(self._bell.ring)
        try:
            return self._outcome(job, self._answer(job))
        except ProcessNotStarted:  # handed back; `prepare` will say why
            return HANDED_BACK
        except (ProcessDied, TimeoutError, ClaimLost) as error:
            log.warning("job %s: %s", job.descriptor, error)
            return self._handler.outcome_of(job, error.with_traceback(None))
        finally:
            job.claim.when_lost(None)

    def abandon(self) -> None:
        self._is_abandoned = True
        self._bell.ring()

    def close(self) -> None:
        self._end_process()
        self._bell.close()

    def _answer(self, job: RunningJob) -> Answer:
        """Raises ProcessNotStarted, ProcessDied, TimeoutError and ClaimLost: there is no child any
        more."""
        order = Order(job.queue, job.claim.job)
        try:
            try:
                return self._apply(order, job)
            except ProcessNotStarted:  # it died while it had nothing to do
                self._end_process()
                return self._apply(order, job)
        except BaseException:
            self._end_process()
            raise

    def _apply(self, order: Order, job: RunningJob) -> Answer:
        self.prepare()
        process = self._process
        if process is None:
            raise ProcessNotStarted("the worker ends")
        limit_seconds = self._handler.time_limit_seconds
        run = _Run(job, process, math.inf if limit_seconds is None else limit_seconds)
        try:
            answer = process.apply(order, lambda: min(run.deadline(), self._end_of_abandoned()))
        except OutOfTime as error:
            if job.lost:
                raise ClaimLost(
                    "its claim has ended, and its handler goes on; its process was killed"
                ) from error
            raise TimeoutError(
                f"the handler took longer than {run.limit_seconds:g} s; its process was killed"
            ) from error
        if answer.claim_descriptor != order.job.claim_descriptor:  # as of a copy that C code made
            raise ProcessDied("the handler's process answered for another job, and was killed")
        return answer

    def _outcome(self, job: RunningJob, answer: Answer) -> Outcome:
        job.note_saved(answer.body)
        if answer.is_lost:
            job.claim.lose()
        if answer.failure is None:
            return self._handler.outcome_of_value(job, answer.status or None)
        failure = answer.failure
        return self._handler.outcome_of(job, failure.carried.restored(), failure.text)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def _end_of_abandoned(self) -> float:
        return -math.inf if self._is_abandoned else math.inf


@dataclass(slots=True)
class _Run:
    """Until when a run may go on."""

    job: RunningJob
    process: HandlerProcess[Order, Answer]
    limit_seconds: float
    began_at: float = field(default_factory=time.monotonic)
    lost_at: float | None = None

    def deadline(self) -> float:
        limit = self.began_at + self.limit_seconds
        if not self.job.lost:
            return limit
        if self.lost_at is None:
            self.lost_at = time.monotonic()
            self.process.warn()
        return min(limit, self.lost_at + LOST_GRACE_SECONDS)


# --- in the child ---------------------------------------------------------------------------


class _Child:
    """Runs the handler's function for one order after the other."""

    def __init__(self, plan: ChildPlan, is_lost: Flag) -> None:
        self._is_lost = is_lost
        set_up: Callable[[], object] | None = pickle.loads(plan.set_up)  # noqa: S301
        if set_up is not None:
            set_up()
        self._function: Callable[[RunningJob], object] = pickle.loads(plan.function)  # noqa: S301
        self._client: Client | None = pickle.loads(plan.client) if plan.client else None  # noqa: S301
        self._no_client = plan.no_client

    def __call__(self, order: Order) -> Answer:
        claim = _WatchedClaim(order.job, self._is_lost)
        job = RunningJob(order.queue, claim, self._the_client)
        status, failure = "", None
        try:
            status = returned(self._function(job)).status
        except BaseException as error:  # noqa: BLE001 - it is the job's outcome, whatever it is
            failure = Failure(CarriedError.of(error), error_text(error))
        return Answer(job.claim_descriptor, status, failure, job.body, job.lost)

    def _the_client(self) -> Client:
        if self._client is None:
            raise RuntimeError(
                f"job.client and job.save can't be had in a process: {self._no_client}"
            )
        return self._client


class _WatchedClaim(Claim):
    """A claim that the worker keeps, and tells of when it is lost."""

    __slots__ = ("_found_lost", "_told_lost")

    def __init__(self, job: ClaimedJob, told_lost: Flag) -> None:
        self._told_lost = told_lost
        self._found_lost = False
        super().__init__(job, time.monotonic())

    @property
    def is_lost(self) -> bool:
        return self._found_lost or self._told_lost.value

    @is_lost.setter
    def is_lost(self, value: bool) -> None:
        self._found_lost = value
