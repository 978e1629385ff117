"""Retries and deletes of many jobs of a queue, which a preview shows before they are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta, Struct

from pinlaterd.client import calls
from pinlaterd.client.calls import PreparedCall
from pinlaterd.config.schema import Config
from pinlaterd.errors import ConnectionFailed, Overloaded, PinLaterError, how_many
from pinlaterd.http.api import answer_json, read_body, read_query
from pinlaterd.http.bodies import JobAnswer, Milliseconds, Time, milliseconds, since_1970
from pinlaterd.http.pages import MOST_TEXT_CHARS, JobPages, literal
from pinlaterd.http.problems import FailedLater
from pinlaterd.model import ALL_PRIORITIES, JobChoice, JobState
from pinlaterd.router_client import RouterClient

_SHOWN = 10  # jobs of a preview
_MOST_LOOKED_AT = 1000  # descriptors, for those
_Text = Annotated[str, Meta(min_length=1, max_length=MOST_TEXT_CHARS)]
_Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class PreviewQuery(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A request to show a change only, as its body may make it, too."""

    preview: bool = False


class PauseBody(PreviewQuery, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A pause, and why."""

    reason: Annotated[str, Meta(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""


class _ChangeBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The jobs to change: up to `limit`, of all priorities unless one is given; or those that meet
    all that is given: named by `descriptors`, with `text` in their bodies, ended since or before a
    time, with `status_text` in their status, that say `message` there or failed in `place`, last
    claimed by `worker`."""

    priority: Annotated[int, Meta(ge=1, le=127)] | None = None
    limit: _Positive = 1000
    preview: bool = False
    descriptors: list[str] | None = None
    text: _Text | None = None
    ended_before: Time | None = None
    ended_since: Time | None = None
    status_text: _Text | None = None
    message: str | None = None
    place: str | None = None
    worker: str | None = None

    @property
    def choice(self) -> JobChoice | None:
        """The conditions that are given in addition to a text."""
        times = (self.ended_before, self.ended_since)
        before_ms, since_ms = (None if time is None else milliseconds(time) for time in times)
        status_regex = self.status_text and literal(self.status_text)
        choice = JobChoice(
            self.descriptors,
            before_ms,
            since_ms,
            status_regex,
            self.message,
            self.place,
            self.worker,
        )
        return choice or None


class RetryBody(_ChangeBody, frozen=True, kw_only=True):
    """The failed jobs that are to have `attempts` more, from `run_after` on; over `spread_ms` the
    times of `limit` jobs, or of those that are named, are spread evenly."""

    state: Literal["failed"] = "failed"
    attempts: _Positive = 1
    run_after: Time | None = None
    spread_ms: Milliseconds | None = None


class DeleteBody(_ChangeBody, frozen=True, kw_only=True):
    """The jobs to delete, which are in a state."""

    state: Literal["pending", "in_progress", "succeeded", "failed"]


class ChangedAnswer(Struct, kw_only=True):
    """The number of jobs that were changed; of a preview, that would be, and ten of them."""

    preview: bool
    count: int
    jobs: Sequence[JobAnswer] = ()


class ChangeHandlers:
    """Changes many jobs of queues for requests."""

    def __init__(
        self, client: RouterClient, pages: JobPages, config_of: Callable[[], Config]
    ) -> None:
        """`config_of` returns the active configuration."""
        self._client = client
        self._pages = pages
        self._config_of = config_of

    async def retry_jobs(self, request: web.Request) -> web.Response:
        """Make failed jobs pending again, the longest failed first. Raises Problem."""
        body = await read_body(request, RetryBody)
        run_after_ms = since_1970(body.run_after, "", "run_after")

        def retried(
            queue: str, priority: int, limit: int, *, dry_run: bool = False
        ) -> PreparedCall[int]:
            return calls.retry_failed(
                queue,
                priority=priority,
                attempts_to_allow=body.attempts,
                run_after_ms=run_after_ms,
                limit=limit,
                body_regex=body.text and literal(body.text),
                spread_ms=body.spread_ms,
                dry_run=dry_run,
                choice=body.choice,
            )

        return await self._change(request, body, JobState.FAILED, retried)

    async def delete_jobs(self, request: web.Request) -> web.Response:
        """Delete jobs of a state. Raises Problem."""
        body = await read_body(request, DeleteBody)
        state, regex = JobState[body.state.upper()], body.text and literal(body.text)

        def deleted(
            queue: str, priority: int, limit: int, *, dry_run: bool = False
        ) -> PreparedCall[int]:
            return calls.delete_jobs(
                queue,
                state,
                priority=priority,
                body_regex=regex,
                limit=limit,
                dry_run=dry_run,
                choice=body.choice,
            )

        return await self._change(request, body, state, deleted)

    async def _change(
        self,
        request: web.Request,
        body: RetryBody | DeleteBody,
        state: JobState,
        call_for: Callable[..., PreparedCall[int]],
    ) -> web.Response:
        """Answer what a change has changed, or would change; where its jobs are not chosen, one
        priority after the other."""
        queue, preview = request.match_info["queue"], read_query(request, PreviewQuery).preview
        levels = range(1, self._config_of().server.num_priority_levels + 1)
        priorities: Sequence[int] = levels if body.priority is None else (body.priority,)
        if body.preview or preview:
            call = call_for(queue, body.priority or ALL_PRIORITIES, body.limit, dry_run=True)
            count = await self._client.run(call)
            shown = await self._shown(queue, body, state, priorities, min(count, _SHOWN))
            return answer_json(ChangedAnswer(preview=True, count=count, jobs=shown))
        if body.text is not None or body.choice is not None:
            priorities = (body.priority or ALL_PRIORITIES,)
        changed: list[int] = []
        try:
            for priority in priorities:
                if (left := body.limit - sum(changed)) > 0:
                    call = calls.noting(call_for(queue, priority, left), changed.append)
                    await self._client.run(call)
        except (ConnectionFailed, PinLaterError) as error:
            if sum(changed):
                told = f"at least {how_many(sum(changed), 'job was', 'jobs were')} changed"
            elif isinstance(error, Overloaded):  # as one shard of several may be
                told = "some jobs may have been changed"
            else:
                raise
            raise FailedLater(error, told) from error
        return answer_json(ChangedAnswer(preview=False, count=sum(changed)))

    async def _shown(
        self,
        queue: str,
        body: RetryBody | DeleteBody,
        state: JobState,
        priorities: Sequence[int],
        limit: int,
    ) -> Sequence[JobAnswer]:
        """Return the first jobs that a change is for."""
        if body.descriptors is None:
            regex = body.text and literal(body.text)
            choice = body.choice
            return await self._pages.first(queue, state, priorities, regex, limit, choice)
        named = calls.lookup(body.descriptors[:_MOST_LOOKED_AT])
        there = [job for job in (await self._client.run(named)).values() if job.state is state]
        first = calls.lookup([job.descriptor for job in there[:limit]], include_body=True)
        return list(map(JobAnswer.of, (await self._client.run(first)).values()))
