"""The calls of /v2 (`V2.table`): queues, jobs, claims and acks, for clients that have only HTTP.

docs/http.md is the guide. Each handler reads a body (`bodies`), makes a call of the service, and
writes the answer; errors become problems in `problems.explain`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from itertools import chain, product, repeat
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from pinlaterd.access import USER, Access, check, identify, may
from pinlaterd.client import calls
from pinlaterd.client.calls import PreparedCall
from pinlaterd.config import edit
from pinlaterd.config.layout import QUEUES_FILE
from pinlaterd.config.load import LIMIT, load_config
from pinlaterd.config.password import AdminPasswords
from pinlaterd.config.schema import Config
from pinlaterd.config.ticket import ticket_to_delete
from pinlaterd.errors import (
    ConfigError,
    ConnectionFailed,
    PasswordInvalid,
    PinLaterError,
    QueueNotFound,
)
from pinlaterd.http import openapi
from pinlaterd.http.api import (
    ApiCall,
    answer_json,
    check_query,
    finished,
    read_body,
    read_query,
)
from pinlaterd.http.bodies import (
    AckAnswer,
    AcksAnswer,
    AcksBody,
    CheckpointBody,
    CheckpointsAnswer,
    CheckpointsBody,
    ClaimAnswer,
    ClaimsAnswer,
    ClaimsBody,
    EnqueueBody,
    EnqueuedAnswer,
    EnqueuedManyAnswer,
    JobAnswer,
    LimitsBody,
    QueueAnswer,
    QueueBody,
    QueueNameAnswer,
    QueuesAnswer,
    QueuesQuery,
    SucceededBody,
)
from pinlaterd.http.changes import (
    ChangedAnswer,
    ChangeHandlers,
    DeleteBody,
    PauseBody,
    PreviewQuery,
    RetryBody,
)
from pinlaterd.http.gathering import EnqueueGathering
from pinlaterd.http.pages import JobPages, PageAnswer, PageQuery
from pinlaterd.http.problems import Code, FailedLater, Handler, Problem, after, invalid
from pinlaterd.http.stream import JSON_LINES, JobStreams
from pinlaterd.http_port import UNDELIVERED
from pinlaterd.model import AckOutcomes, CheckpointOutcomes, JobDescriptor, JobState
from pinlaterd.router_client import RouterClient

log = logging.getLogger(__name__)
T = TypeVar("T")
Ack = TypeVar("Ack", bound=SucceededBody | CheckpointBody)

_KEY = "Idempotency-Key"  # the name of a header, as is the next
_OF_ONE_JOB = "is the key of one job; of several give each its `key`"
_PASSWORD = "X-Admin-Password"  # noqa: S105 - the name of a header
# How long an answer waits for limits that were set to be followed, and how often it looks.
_FOLLOWED_SECONDS, _LOOK_SECONDS = 3.0, 0.05


class V2:
    """The handlers of /v2, on one service."""

    def __init__(
        self,
        client: RouterClient,
        access: Access,
        etc: Path,
        config: Config,
        others: Sequence[ApiCall] = (),
    ) -> None:
        """Serve requests. `others`: calls of other handlers, which the description lists as
        well."""
        self._client = client
        self._others = others
        self._access = access
        self._etc = etc
        self._passwords = AdminPasswords()
        self._pages = JobPages(client)
        self._gathering = EnqueueGathering(client, lambda: self.config)
        self.streams = JobStreams(self._gathering.store, lambda: self.config.server)
        self._changes = ChangeHandlers(client, self._pages, lambda: self.config)
        self.config = config  # the active one, which the process replaces

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of all calls, each behind the check of its caller."""
        return [web.route(call.method, call.path, self._guarded(call)) for call in self.table()]

    def table(self) -> list[ApiCall]:
        """Return all calls."""
        queues, queue = "/v2/queues", "/v2/queues/{queue}"
        get, post = partial(ApiCall, "GET"), partial(ApiCall, "POST")
        made, gone = (HTTPStatus.OK, HTTPStatus.CREATED), (HTTPStatus.NO_CONTENT,)
        retry, delete = self._changes.retry_jobs, self._changes.delete_jobs
        preview = PreviewQuery
        return [
            get(queues, "view", self.list_queues, QueuesAnswer, query=QueuesQuery),
            ApiCall(
                "PUT", queue, "operate", self.create_queue, QueueAnswer, QueueBody, statuses=made
            ),
            get(queue, "view", self.get_queue, QueueAnswer),
            ApiCall(
                "DELETE", queue, "admin", self.delete_queue, statuses=gone, headers=(_PASSWORD,)
            ),
            post(
                f"{queue}/jobs",
                "enqueue",
                self.enqueue,
                EnqueuedAnswer,
                EnqueueBody,
                statuses=made,
                gives_for_many=EnqueuedManyAnswer,
                headers=(_KEY,),
            ),
            get(f"{queue}/jobs", "view", self._pages.list_jobs, PageAnswer, query=PageQuery),
            post(f"{queue}/retry", "operate", retry, ChangedAnswer, RetryBody, preview),
            post(f"{queue}/delete", "operate", delete, ChangedAnswer, DeleteBody, preview),
            post(f"{queue}/pause", "operate", self.pause_queue, QueueAnswer, PauseBody, preview),
            post(f"{queue}/resume", "operate", self.resume_queue, QueueAnswer, preview, preview),
            post(f"{queue}/claims", "work", self.claim, ClaimsAnswer, ClaimsBody),
            post("/v2/jobs/acks", "work", self.ack, AcksAnswer, AcksBody),
            post(
                "/v2/jobs/checkpoints", "work", self.checkpoint, CheckpointsAnswer, CheckpointsBody
            ),
            get("/v2/jobs/{descriptor}", "view", self.get_job, JobAnswer),
            get("/v2/openapi.json", "view", self.get_description, dict),
            get("/v2/docs", "view", self.get_docs, str, media="text/html"),
        ]

    def _guarded(self, call: ApiCall) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            await identify(request, self._access)
            named = request.match_info.get("queue", "")
            queue = named or request.match_info.get("descriptor", "").partition(":")[0]
            check(request, call.role, queue)
            check_query(request, call)
            return finished(request, await call.handler(request))

        return handle

    # --- its description ---------------------------------------------------------------------

    async def get_description(self, _request: web.Request) -> web.Response:
        """Describe this interface for tools, as OpenAPI does."""
        return answer_json(openapi.describe([*self.table(), *self._others]))

    async def get_docs(self, _request: web.Request) -> web.Response:
        """Describe this interface as a page."""
        text = openapi.page(openapi.describe([*self.table(), *self._others]))
        headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return web.Response(text=text, content_type="text/html", headers=headers)

    # --- queues ------------------------------------------------------------------------------

    async def list_queues(self, request: web.Request) -> web.Response:
        """List all queues by name, or page by page."""
        query, user = read_query(request, QueuesQuery), request.get(USER)
        names = await self._client.run(calls.queue_names())
        left = sorted(name for name in names if name > query.cursor and may(user, "view", name))
        shown = left[: query.limit]
        cursor = shown[-1] if len(shown) < len(left) else None
        queues = [QueueNameAnswer(name=name) for name in shown]
        return answer_json(QueuesAnswer(queues=queues, cursor=cursor))

    async def create_queue(self, request: web.Request) -> web.Response:
        """Create a queue, and set its limits."""
        queue = request.match_info["queue"]
        body = await read_body(request, QueueBody)
        levels, priority = self.config.server.num_priority_levels, body.limits.default_priority
        if isinstance(priority, int) and priority > levels:
            raise invalid("limits.default_priority", f"expected 1 to {levels}")
        existed = queue in await self._client.run(calls.queue_names())
        await self._client.run(calls.create_queue(queue))
        if given := body.limits.given():
            try:
                await self._edit(queue, partial(edit.set_limits, self._etc, queue, given))
            except ConfigError as error:
                if existed:
                    raise
                raise ConfigError([f"{error}; the queue is there now, without limits"]) from None
        told = "the queue existed" if existed else "the queue was created"
        with after(f"{told}, and its limits are set" if given else told):
            answer = await self._describe(queue)
        return answer_json(answer, HTTPStatus.OK if existed else HTTPStatus.CREATED)

    async def get_queue(self, request: web.Request) -> web.Response:
        """Show a queue with its counts and limits."""
        return answer_json(await self._describe(request.match_info["queue"]))

    async def delete_queue(self, request: web.Request) -> web.Response:
        """Delete a queue with all its jobs; without users the admin password is needed, in
        X-Admin-Password."""
        queue, given = request.match_info["queue"], request.headers.get(_PASSWORD, "")
        user, where = request.get(USER), request.remote or ""
        if user is None:  # else its role was checked
            stored, seconds = self.config.server.admin_password_hash, self._client.seconds
            try:
                await self._passwords.check(given, stored, where, seconds)
            except PasswordInvalid as error:
                log.warning("refused: DELETE %s from %s: %s", request.path, where, error)
                raise
        existed = queue in await self._client.run(calls.queue_names())
        with ticket_to_delete(queue) as ticket:
            await self._client.run(calls.delete_queue(queue, password=ticket))
        if not existed:
            raise QueueNotFound(queue)
        who = f" as {user.name!r}" if user is not None else ""
        log.warning("deleted: queue %r from %s%s", queue, where, who)
        return web.Response(status=HTTPStatus.NO_CONTENT)

    async def pause_queue(self, request: web.Request) -> web.Response:
        """Hand out no jobs of a queue."""
        return await self._set_paused(request, PauseBody, paused=True)

    async def resume_queue(self, request: web.Request) -> web.Response:
        """Hand out jobs of a queue again."""
        return await self._set_paused(request, PreviewQuery, paused=False)

    async def _set_paused(
        self, request: web.Request, kind: type[PreviewQuery], *, paused: bool
    ) -> web.Response:
        """Pause or resume a queue, unless that is only to be shown; answer the queue after it."""
        queue, body = request.match_info["queue"], await read_body(request, kind)
        user, reason = request.get(USER), getattr(body, "reason", "")
        if not reason.isprintable():
            raise invalid("reason", "expected printable characters")
        answer = await self._describe(queue)
        if not (body.preview or read_query(request, PreviewQuery).preview):
            note = {"by": "" if user is None else user.name, "reason": reason}
            change = partial(edit.set_paused, self._etc, queue, paused=paused, **note)
            await self._edit(queue, change)
        answer.paused = paused
        return answer_json(answer)

    async def _describe(self, queue: str) -> QueueAnswer:
        # A checkpoint may have put off the run-after of a job that is not pending, too.
        counted = list(product(JobState, (False, True)))
        numbers = await asyncio.gather(
            *(self._client.run(calls.count(queue, state, future=far)) for state, far in counted)
        )
        counts: Counter[str] = Counter()
        for (state, is_future), number in zip(counted, numbers, strict=True):
            is_scheduled = is_future and state is JobState.PENDING
            counts["scheduled" if is_scheduled else state.name.lower()] += number
        return QueueAnswer(
            name=queue,
            counts=counts,
            limits=self._limits(queue),
            paused=self.config.queue(queue).paused,
        )

    def _limits(self, queue: str) -> dict[str, float | None]:
        settings = self.config.queue(queue)
        limits = {name: getattr(settings, name) for name in LimitsBody.__struct_fields__}
        if settings.paused:  # the limit that holds again once it is resumed
            limits[LIMIT] = edit.limit_settings(self._etc, queue).max_jobs_per_second
        return limits

    async def _edit(self, queue: str, change: Callable[[], edit.Edited]) -> None:
        """Edit the settings of a queue, and wait until this process follows what the file says."""
        seconds, loop = self.config.server.request_timeout_ms / 1000, asyncio.get_running_loop()
        until = loop.time() + seconds
        if await edit.carry_out(self._etc / QUEUES_FILE, change, seconds) is None:
            return
        with suppress(ConfigError, TimeoutError):
            wanted = (await asyncio.to_thread(load_config, self._etc)).queues.get(queue)
            async with asyncio.timeout_at(min(until, loop.time() + _FOLLOWED_SECONDS)):
                while self.config.queues.get(queue) != wanted:  # noqa: ASYNC110 - rare
                    await asyncio.sleep(_LOOK_SECONDS)

    # --- jobs --------------------------------------------------------------------------------

    async def enqueue(self, request: web.Request) -> web.StreamResponse:
        """Enqueue a job, or many."""
        keys = request.headers.getall(_KEY, [])
        if len(set(keys)) > 1:
            raise invalid(_KEY, "is given more than once; give one")
        key = keys[0] if keys else None
        if request.content_type == JSON_LINES:
            if key is not None:
                raise invalid(_KEY, _OF_ONE_JOB)
            return await self.streams.enqueue(request)
        queue = request.match_info["queue"]
        body = _with_key(await read_body(request, EnqueueBody), key)
        stored = await self._gathering.store(queue, body.all_jobs(self.config.server))
        if body.jobs is not msgspec.UNSET:
            return answer_json(EnqueuedManyAnswer(jobs=stored), HTTPStatus.CREATED)
        status = HTTPStatus.OK if stored[0].existed else HTTPStatus.CREATED
        return answer_json(stored[0], status)

    async def claim(self, request: web.Request) -> web.Response:
        """Claim jobs that are ready."""
        queue, body = request.match_info["queue"], await read_body(request, ClaimsBody)
        call = calls.dequeue(
            queue, limit=body.limit, max_wait_ms=body.wait_ms, claim_timeout_ms=body.lease_ms
        )
        claimed = await self._client.claim(queue, call)
        answer = answer_json(ClaimsAnswer(jobs=list(map(ClaimAnswer.of, claimed))))

        def release(may_have_left: bool) -> None:  # noqa: FBT001 - as UNDELIVERED
            """Make jobs pending again; not one to be run at most once that its worker may have."""
            back = [job for job in claimed if job.attempts_allowed > 1 or not may_have_left]
            self._client.release(queue, back)

        answer[UNDELIVERED] = release
        return answer

    async def ack(self, request: web.Request) -> web.Response:
        """End claimed jobs, of any queues."""
        body = await read_body(request, AcksBody)
        named = set[JobDescriptor]()
        succeeded = _by_queue("succeeded", body.succeeded, named)
        failed = _by_queue("failed", body.failed, named)

        def acks_of(queue: str) -> PreparedCall[AckOutcomes]:
            return calls.ack_jobs(
                queue,
                succeeded=[ack.info() for ack in succeeded.get(queue, ())],
                failed=[ack.info() for ack in failed.get(queue, ())],
            )

        def answer_of(found: Mapping[str, AckOutcomes]) -> AcksAnswer:
            done = {queue: outcomes.succeeded for queue, outcomes in found.items()}
            lost = {queue: outcomes.failed for queue, outcomes in found.items()}
            return AcksAnswer(
                succeeded=_outcomes(body.succeeded, done), failed=_outcomes(body.failed, lost)
            )

        return await self._call_each(request, {**succeeded, **failed}, acks_of, answer_of)

    async def checkpoint(self, request: web.Request) -> web.Response:
        """Renew claims and change claimed jobs, of any queues."""
        body = await read_body(request, CheckpointsBody)
        by_queue = _by_queue("checkpoints", body.checkpoints, set())
        for place, each in enumerate(body.checkpoints):
            each.check(f"checkpoints[{place}]")

        def checkpoints_of(queue: str) -> PreparedCall[CheckpointOutcomes]:
            infos = [each.info() for each in by_queue[queue]]
            return calls.apply_checkpoints(queue, infos, claim_timeout_ms=body.lease_ms)

        def answer_of(found: Mapping[str, CheckpointOutcomes]) -> CheckpointsAnswer:
            applied = {queue: outcomes.applied for queue, outcomes in found.items()}
            return CheckpointsAnswer(checkpoints=_outcomes(body.checkpoints, applied))

        return await self._call_each(request, by_queue, checkpoints_of, answer_of)

    async def _call_each(
        self,
        request: web.Request,
        queues: Iterable[str],
        call_of: Callable[[str], PreparedCall[T]],
        answer_of: Callable[[Mapping[str, T]], AcksAnswer | CheckpointsAnswer],
    ) -> web.Response:
        """Make a call for each queue, all at once; answer their results by queue, without those
        queues that are not there, unless none is. Raises Forbidden before any is made. An error of
        one of several has the outcomes of the others, and null for those that are not known."""
        prepared = {queue: call_of(queue) for queue in queues}
        for queue in prepared:
            check(request, "work", queue)
        runs = map(self._client.run, prepared.values())
        results = await asyncio.gather(*runs, return_exceptions=True)
        found: dict[str, T] = {}
        errors: dict[str, BaseException] = {}
        for queue, result in zip(prepared, results, strict=True):
            if isinstance(result, BaseException):
                errors[queue] = result
            else:
                found[queue] = result
        failed = {q: error for q, error in errors.items() if not isinstance(error, QueueNotFound)}
        if not failed and (found or not errors):
            return answer_json(answer_of(found))
        error = next(iter((failed or errors).values()))
        is_told = len(prepared) > 1 and failed  # else the error says it all
        if not (is_told and isinstance(error, ConnectionFailed | PinLaterError)):
            raise error
        outcomes = msgspec.to_builtins(answer_of(found))
        for each in chain.from_iterable(outcomes.values()):
            if each["descriptor"].partition(":")[0] in failed:
                each["outcome"] = None
        told = "`outcome` says what became of each job, null where that is not known"
        raise FailedLater(error, told, **outcomes)

    async def get_job(self, request: web.Request) -> web.Response:
        """Show a job."""
        descriptor = request.match_info["descriptor"]
        if JobDescriptor.parse(descriptor) is not None:
            found = await self._client.run(calls.lookup([descriptor], include_body=True))
            if descriptor in found:
                return answer_json(JobAnswer.of(found[descriptor]))
        raise Problem(
            HTTPStatus.NOT_FOUND, Code.JOB_NOT_FOUND, f"there is no job {descriptor[:200]!r}"
        )


def _with_key(body: EnqueueBody, key: str | None) -> EnqueueBody:
    """Return the body of an enqueue with the key of the header. Raises Problem."""
    if key is None:
        return body
    if body.jobs is not msgspec.UNSET:
        raise invalid(_KEY, _OF_ONE_JOB)
    try:
        key.encode()  # bytes that are no UTF-8 came as surrogates
    except UnicodeEncodeError:
        raise invalid(_KEY, "expected UTF-8") from None
    if body.key not in (None, key):
        raise invalid(_KEY, "differs from `key` in the body; give one of them")
    return msgspec.structs.replace(body, key=key)


def _by_queue(field: str, acks: Sequence[Ack], named: set[JobDescriptor]) -> dict[str, list[Ack]]:
    """Return acks or checkpoints by the queue that their descriptors name, and add these to
    `named`. Raises Problem, for a job that is named already, too."""
    found: dict[str, list[Ack]] = {}
    for place, ack in enumerate(acks):
        descriptor = JobDescriptor.parse(ack.descriptor)
        if descriptor is None:
            where = f"{field}[{place}].descriptor"
            raise invalid(where, "expected a descriptor as an enqueue or a claim returned it")
        if descriptor in named:  # refused here, before the jobs of other queues are changed
            raise invalid(f"{field}[{place}].descriptor", "names a job twice; name each once")
        named.add(descriptor)
        found.setdefault(descriptor.queue, []).append(ack)
    return found


def _outcomes(
    acks: Sequence[SucceededBody | CheckpointBody], applied: Mapping[str, Iterable[bool]]
) -> list[AckAnswer]:
    """Return the outcome of each ack or checkpoint, from those of each queue in their order; where
    the queue is not there, no claim holds."""
    left, gone = {queue: iter(outcomes) for queue, outcomes in applied.items()}, repeat(False)
    return [
        AckAnswer(
            descriptor=ack.descriptor,
            outcome="done" if next(left.get(ack.descriptor.partition(":")[0], gone)) else "stale",
        )
        for ack in acks
    ]
