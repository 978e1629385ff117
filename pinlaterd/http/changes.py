"""Retries and deletes of many jobs of a queue, which a preview shows before they are done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta, Struct

from pinlaterd.client import calls
from pinlaterd.client.calls import PreparedCall
from pinlaterd.config.schema import Config
from pinlaterd.http.api import answer_json, read_body, read_query
from pinlaterd.http.bodies import JobAnswer, Time, milliseconds
from pinlaterd.http.pages import MOST_TEXT_CHARS, JobPages, literal
from pinlaterd.model import JobState
from pinlaterd.router_client import RouterClient

_SHOWN = 10  # jobs of a preview
_Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class PreviewQuery(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A request to show a change only, as its body may make it, too."""

    preview: bool = False


class PauseBody(PreviewQuery, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A pause, and why."""

    reason: Annotated[str, Meta(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""


class _ChangeBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The jobs to change: up to `limit`, of all priorities unless one is given."""

    priority: Annotated[int, Meta(ge=1, le=127)] | None = None
    limit: _Positive = 1000
    preview: bool = False


class RetryBody(_ChangeBody, frozen=True, kw_only=True):
    """The failed jobs that are to have `attempts` more, from `run_after` on."""

    state: Literal["failed"] = "failed"
    attempts: _Positive = 1
    run_after: Time | None = None


class DeleteBody(_ChangeBody, frozen=True, kw_only=True):
    """The jobs to delete: of a state, and with a text in their bodies, if one is given."""

    state: Literal["pending", "in_progress", "succeeded", "failed"]
    text: Annotated[str, Meta(min_length=1, max_length=MOST_TEXT_CHARS)] | None = None


class ChangedAnswer(Struct, kw_only=True):
    """The number of jobs that were changed; of a preview, that would be, and ten of them."""

    preview: bool
    count: int
    jobs: Sequence[JobAnswer] = ()


class JobChanges:
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
        run_after_ms = None if body.run_after is None else milliseconds(body.run_after)

        def retried(queue: str, priority: int, limit: int) -> PreparedCall[int]:
            return calls.retry_failed(
                queue,
                priority=priority,
                attempts_to_allow=body.attempts,
                run_after_ms=run_after_ms,
                limit=limit,
            )

        return await self._change(request, body, JobState.FAILED, None, retried)

    async def delete_jobs(self, request: web.Request) -> web.Response:
        """Delete jobs of a state. Raises Problem."""
        body = await read_body(request, DeleteBody)
        state, regex = JobState[body.state.upper()], body.text and literal(body.text)

        def deleted(queue: str, priority: int, limit: int) -> PreparedCall[int]:
            return calls.delete_jobs(queue, state, priority=priority, body_regex=regex, limit=limit)

        return await self._change(request, body, state, body.text, deleted)

    async def _change(
        self,
        request: web.Request,
        body: RetryBody | DeleteBody,
        state: JobState,
        text: str | None,
        call_for: Callable[[str, int, int], PreparedCall[int]],
    ) -> web.Response:
        """Answer what a change has changed, or would change, one priority after the other."""
        queue = request.match_info["queue"]
        levels = self._config_of().server.num_priority_levels
        priorities = range(1, levels + 1) if body.priority is None else (body.priority,)
        if body.preview or read_query(request, PreviewQuery).preview:
            return answer_json(await self._preview(queue, priorities, body.limit, state, text))
        changed = 0
        for priority in priorities:
            if changed < body.limit:
                changed += await self._client.run(call_for(queue, priority, body.limit - changed))
        return answer_json(ChangedAnswer(preview=False, count=changed))

    async def _preview(
        self, queue: str, priorities: Sequence[int], limit: int, state: JobState, text: str | None
    ) -> ChangedAnswer:
        regex = text and literal(text)
        counted = [
            calls.count(queue, state, priority=priority, future=future, body_regex=regex)
            for priority in priorities
            for future in (True, False)
        ]
        count = min(limit, sum(await asyncio.gather(*map(self._client.run, counted))))
        shown = await self._pages.first(queue, state, priorities, regex, min(count, _SHOWN))
        return ChangedAnswer(preview=True, count=count, jobs=shown)
