"""The calls of /v2: queues, jobs, claims and acks, for whoever has only HTTP.

    PUT    /v2/queues/{queue}            create it, and set its limits
    GET    /v2/queues                    all names
    GET    /v2/queues/{queue}            counts and limits
    DELETE /v2/queues/{queue}            with the admin password in X-Admin-Password
    POST   /v2/queues/{queue}/jobs       enqueue one, or many
    GET    /v2/queues/{queue}/jobs       its jobs, page by page (`pages`)
    POST   /v2/queues/{queue}/retry      make failed jobs pending again (`changes`)
    POST   /v2/queues/{queue}/delete     delete jobs of a state (`changes`)
    POST   /v2/queues/{queue}/pause      hand out no jobs
    POST   /v2/queues/{queue}/resume     hand out jobs again
    POST   /v2/queues/{queue}/claims     dequeue
    POST   /v2/jobs/acks                 end claimed jobs
    POST   /v2/jobs/checkpoints          renew claims, change claimed jobs
    GET    /v2/jobs/{descriptor}         one job
    GET    /v2/openapi.json              all of this in OpenAPI (`openapi`); /v2/docs as a page

docs/http.md is the guide. Each handler reads a body (`bodies`), makes a call of the service, and
writes the answer; errors become problems in `problems.explain`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from itertools import product
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from pinlaterd.access import FAILURES_SECONDS, Access, Refusal, Refused, may
from pinlaterd.client import calls
from pinlaterd.config import edit
from pinlaterd.config.load import LIMIT
from pinlaterd.config.schema import Config, UserSettings
from pinlaterd.http import openapi
from pinlaterd.http.api import (
    USER,
    ApiCall,
    answer_json,
    finished,
    forbidden,
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
    Mistake,
    QueueAnswer,
    QueueBody,
    QueueNameAnswer,
    QueuesAnswer,
    SucceededBody,
)
from pinlaterd.http.changes import (
    ChangedAnswer,
    DeleteBody,
    JobChanges,
    PauseBody,
    PreviewQuery,
    RetryBody,
)
from pinlaterd.http.gathering import Gathering
from pinlaterd.http.pages import JobPages, PageAnswer, PageQuery
from pinlaterd.http.problems import Code, Handler, Problem, invalid, invalid_body
from pinlaterd.http.stream import JSON_LINES, JobStreams
from pinlaterd.http_port import UNDELIVERED
from pinlaterd.model import JobDescriptor, JobState
from pinlaterd.router_client import RouterClient

Ack = TypeVar("Ack", bound=SucceededBody | CheckpointBody)

log = logging.getLogger(__name__)

_CHALLENGE = {"WWW-Authenticate": 'Basic realm="pinlaterd", Bearer realm="pinlaterd"'}
_KEY = "Idempotency-Key"  # the name of a header, as is the next
_PASSWORD = "X-Admin-Password"  # noqa: S105 - the name of a header
# How long an answer waits for limits that were set to be followed, and how often it looks.
_FOLLOWED_SECONDS, _LOOK_SECONDS = 3.0, 0.05


class V2:
    """The handlers of /v2, on one service."""

    def __init__(self, client: RouterClient, access: Access, etc: Path, config: Config) -> None:
        self._client = client
        self._access = access
        self._etc = etc
        self._pages = JobPages(client)
        self._gathering = Gathering(client, lambda: self.config)
        self.streams = JobStreams(self._gathering.store)
        self._changes = JobChanges(client, self._pages, lambda: self.config)
        self.config = config  # the active one; whoever follows the coordinator replaces it

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of all calls, each behind the check of its caller."""
        return [web.route(call.method, call.path, self._guarded(call)) for call in self.table()]

    def table(self) -> list[ApiCall]:
        """Return all calls."""
        queues, queue, made = "/v2/queues", "/v2/queues/{queue}", HTTPStatus.CREATED
        pages, changes = self._pages, self._changes
        return [
            ApiCall("GET", queues, "view", self._queues, "listQueues", "All queues", QueuesAnswer),
            ApiCall(
                *("PUT", queue, "operate", self._create, "createQueue"),
                *("Create a queue, and set its limits", QueueAnswer, QueueBody),
                statuses=(HTTPStatus.OK, made),
            ),
            ApiCall(
                *("GET", queue, "view", self._queue, "getQueue"),
                *("A queue with its counts and limits", QueueAnswer),
            ),
            ApiCall(
                *("DELETE", queue, "admin", self._delete, "deleteQueue"),
                "Delete a queue with all its jobs; takes the admin password in X-Admin-Password",
                statuses=(HTTPStatus.NO_CONTENT,),
            ),
            ApiCall(
                *("POST", f"{queue}/jobs", "enqueue", self._enqueue, "enqueue"),
                *("Enqueue a job, or many", EnqueuedAnswer, EnqueueBody),
                statuses=(HTTPStatus.OK, made),
                gives_for_many=EnqueuedManyAnswer,
            ),
            ApiCall(
                *("GET", f"{queue}/jobs", "view", pages.page, "listJobs"),
                *("Jobs of a queue, page by page", PageAnswer),
                query=PageQuery,
            ),
            ApiCall(
                *("POST", f"{queue}/retry", "operate", changes.retry, "retryJobs"),
                *("Make failed jobs pending again", ChangedAnswer, RetryBody, PreviewQuery),
            ),
            ApiCall(
                *("POST", f"{queue}/delete", "operate", changes.delete, "deleteJobs"),
                *("Delete jobs of a state", ChangedAnswer, DeleteBody, PreviewQuery),
            ),
            ApiCall(
                *("POST", f"{queue}/pause", "operate", self._pause, "pauseQueue"),
                *("Hand out no jobs of a queue", QueueAnswer, PauseBody, PreviewQuery),
            ),
            ApiCall(
                *("POST", f"{queue}/resume", "operate", self._resume, "resumeQueue"),
                *("Hand out jobs of a queue again", QueueAnswer, PreviewQuery, PreviewQuery),
            ),
            ApiCall(
                *("POST", f"{queue}/claims", "work", self._claim, "claim"),
                *("Claim jobs that are ready", ClaimsAnswer, ClaimsBody),
            ),
            ApiCall(
                *("POST", "/v2/jobs/acks", "work", self._ack, "ack"),
                *("End claimed jobs", AcksAnswer, AcksBody),
            ),
            ApiCall(
                *("POST", "/v2/jobs/checkpoints", "work", self._checkpoint, "checkpoint"),
                *("Renew claims, change claimed jobs", CheckpointsAnswer, CheckpointsBody),
            ),
            ApiCall(
                *("GET", "/v2/jobs/{descriptor}", "view", self._job, "getJob"),
                *("A job", JobAnswer),
            ),
            ApiCall(
                *("GET", "/v2/openapi.json", "view", self._openapi, "getDescription"),
                *("This description", dict),
            ),
            ApiCall(
                *("GET", "/v2/docs", "view", self._docs, "getDocs"),
                *("This description as a page", str),
                media="text/html",
            ),
        ]

    def _guarded(self, call: ApiCall) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            user = await self._user_of(request)
            if user is not None:
                request[USER] = user
            named = request.match_info.get("queue", "")
            queue = named or request.match_info.get("descriptor", "").partition(":")[0]
            if not may(user, call.role, queue):
                raise forbidden(request, call.role, queue)
            return finished(request, await call.handler(request))

        return handle

    async def _user_of(self, request: web.Request) -> UserSettings | None:
        """Return who makes the request; None if there are no users. Raises Problem."""
        address = request.remote or ""
        try:
            return await self._access.identify(request.headers.get("Authorization"), address)
        except Refused as refused:
            why = refused.why
            log.warning(
                "refused: %s %s from %s as %r: %s",
                *(request.method, request.path, address, refused.user, why.name.lower()),
            )
        if why is Refusal.TOO_MANY_FAILURES:
            headers = {"Retry-After": str(FAILURES_SECONDS)}
            text = "too many failures from this address; try again in a minute"
            raise Problem(HTTPStatus.TOO_MANY_REQUESTS, Code.UNAUTHORIZED, text, headers=headers)
        text = "give the password of a user (Basic) or a token (Bearer) that is valid"
        raise Problem(HTTPStatus.UNAUTHORIZED, Code.UNAUTHORIZED, text, headers=_CHALLENGE)

    # --- its description ---------------------------------------------------------------------

    async def _openapi(self, _request: web.Request) -> web.Response:
        return answer_json(openapi.describe(self.table()))

    async def _docs(self, _request: web.Request) -> web.Response:
        text = openapi.page(openapi.describe(self.table()))
        headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return web.Response(text=text, content_type="text/html", headers=headers)

    # --- queues ------------------------------------------------------------------------------

    async def _queues(self, request: web.Request) -> web.Response:
        user, names = request.get(USER), await self._client.run(calls.queue_names())
        shown = [QueueNameAnswer(name=name) for name in sorted(names) if may(user, "view", name)]
        return answer_json(QueuesAnswer(queues=shown))

    async def _create(self, request: web.Request) -> web.Response:
        queue = request.match_info["queue"]
        body = await read_body(request, QueueBody)
        existed = queue in await self._client.run(calls.queue_names())
        await self._client.run(calls.create_queue(queue))
        await self._edit(partial(edit.set_limits, self._etc, queue, body.limits.given()))
        answer = await self._describe(queue)
        return answer_json(answer, HTTPStatus.OK if existed else HTTPStatus.CREATED)

    async def _queue(self, request: web.Request) -> web.Response:
        return answer_json(await self._describe(request.match_info["queue"]))

    async def _delete(self, request: web.Request) -> web.Response:
        password = request.headers.get(_PASSWORD, "")
        await self._client.run(calls.delete_queue(request.match_info["queue"], password=password))
        return web.Response(status=HTTPStatus.NO_CONTENT)

    async def _pause(self, request: web.Request) -> web.Response:
        return await self._set_paused(request, PauseBody, paused=True)

    async def _resume(self, request: web.Request) -> web.Response:
        return await self._set_paused(request, PreviewQuery, paused=False)

    async def _set_paused(
        self, request: web.Request, kind: type[PreviewQuery], *, paused: bool
    ) -> web.Response:
        """Pause or resume a queue, unless that is only to be shown; answer the queue after it."""
        queue, body = request.match_info["queue"], await read_body(request, kind)
        answer = await self._describe(queue)
        if not (body.preview or read_query(request, PreviewQuery).preview):
            user, reason = request.get(USER), getattr(body, "reason", "")
            note = {"by": "" if user is None else user.name, "reason": reason}
            await self._edit(partial(edit.set_paused, self._etc, queue, paused=paused, **note))
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

    async def _edit(self, edit_file: Callable[[], bool]) -> None:
        """Edit the configuration, and wait until this process follows the change."""
        before = self.config
        if await asyncio.to_thread(edit_file):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FOLLOWED_SECONDS):
                    while self.config is before:  # noqa: ASYNC110 - too rare for an event
                        await asyncio.sleep(_LOOK_SECONDS)

    # --- jobs --------------------------------------------------------------------------------

    async def _enqueue(self, request: web.Request) -> web.StreamResponse:
        if request.content_type == JSON_LINES:
            return await self.streams.enqueue(request)
        queue = request.match_info["queue"]
        body = _with_key(await read_body(request, EnqueueBody), request.headers.get(_KEY))
        try:
            jobs = body.all_jobs()
        except Mistake as mistake:
            raise invalid_body(mistake) from None
        stored = await self._gathering.store(queue, jobs)
        if body.jobs is not msgspec.UNSET:
            return answer_json(EnqueuedManyAnswer(jobs=stored), HTTPStatus.CREATED)
        status = HTTPStatus.OK if stored[0].existed else HTTPStatus.CREATED
        return answer_json(stored[0], status)

    async def _claim(self, request: web.Request) -> web.Response:
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

    async def _ack(self, request: web.Request) -> web.Response:
        """End jobs of any queues, by a call for each queue, all at once."""
        body = await read_body(request, AcksBody)
        succeeded, failed = _by_queue("succeeded", body.succeeded), _by_queue("failed", body.failed)
        queues = list({**succeeded, **failed})
        for queue in queues:
            if not may(request.get(USER), "work", queue):
                raise forbidden(request, "work", queue)
        answers = await asyncio.gather(
            *(
                self._client.run(
                    calls.ack_jobs(
                        queue,
                        succeeded=[ack.info() for ack in succeeded.get(queue, ())],
                        failed=[ack.info() for ack in failed.get(queue, ())],
                    )
                )
                for queue in queues
            )
        )
        outcomes = dict(zip(queues, answers, strict=True))
        done = {queue: iter(found.succeeded) for queue, found in outcomes.items()}
        lost = {queue: iter(found.failed) for queue, found in outcomes.items()}
        return answer_json(
            AcksAnswer(
                succeeded=_outcomes(body.succeeded, done), failed=_outcomes(body.failed, lost)
            )
        )

    async def _checkpoint(self, request: web.Request) -> web.Response:
        """Checkpoint jobs of any queues, by a call for each queue, all at once."""
        body = await read_body(request, CheckpointsBody)
        by_queue = _by_queue("checkpoints", body.checkpoints)
        for place, each in enumerate(body.checkpoints):
            if isinstance(each.body, bytes) and isinstance(each.data, msgspec.Raw):
                raise invalid(f"checkpoints[{place}]", "give `data` or `body`, not both")
        for queue in by_queue:
            if not may(request.get(USER), "work", queue):
                raise forbidden(request, "work", queue)
        answers = await asyncio.gather(
            *(
                self._client.run(
                    calls.apply_checkpoints(
                        queue, [each.info() for each in given], claim_timeout_ms=body.lease_ms
                    )
                )
                for queue, given in by_queue.items()
            )
        )
        applied = {
            queue: iter(found.applied) for queue, found in zip(by_queue, answers, strict=True)
        }
        return answer_json(CheckpointsAnswer(checkpoints=_outcomes(body.checkpoints, applied)))

    async def _job(self, request: web.Request) -> web.Response:
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
        raise invalid(_KEY, "is the key of one job; of several give each its `key`")
    if body.key not in (None, key):
        raise invalid(_KEY, "differs from `key` in the body; give one of them")
    return msgspec.structs.replace(body, key=key)


def _by_queue(field: str, acks: Sequence[Ack]) -> dict[str, list[Ack]]:
    """Return acks or checkpoints by the queue that their descriptors name. Raises Problem."""
    found: dict[str, list[Ack]] = {}
    for place, ack in enumerate(acks):
        descriptor = JobDescriptor.parse(ack.descriptor)
        if descriptor is None:
            where = f"{field}[{place}].descriptor"
            raise invalid(where, "expected a descriptor as an enqueue or a claim returned it")
        found.setdefault(descriptor.queue, []).append(ack)
    return found


def _outcomes(
    acks: Sequence[SucceededBody | CheckpointBody], applied: Mapping[str, Iterator[bool]]
) -> list[AckAnswer]:
    """Return the outcome of each ack or checkpoint, from those of each queue in their order."""
    return [
        AckAnswer(
            descriptor=ack.descriptor,
            outcome="done" if next(applied[ack.descriptor.partition(":")[0]]) else "stale",
        )
        for ack in acks
    ]
