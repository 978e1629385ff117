"""The calls that `pinlater-admin` makes at run/web.sock, to use the dashboard's operations.

Only the deployment's owner can connect, who may change all of it in any case: so nobody logs in,
and `web_writes` does not matter. The audit log has who did what, as of changes on pages.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from pinlaterd.http_port import body_of
from pinlaterd.web.operations import ENDED, Operation, Operations, Phase, Selection


class _Delete(msgspec.Struct):
    """A delete that is asked for: of how many jobs at most, and as they were counted before."""

    by: str
    selection: Selection
    most: int
    expected: int


class OperationCalls:
    """The handlers of these calls. They answer with what is known of operations."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the calls."""
        one = r"/operations/{number:\d{1,9}}"
        return [
            web.get("/operations", self._list),
            web.post("/operations", self._delete),
            web.get(one, self._one),
            web.post(f"{one}/stop", self._call(self._stop)),
            web.post(f"{one}/go_on", self._call(self._go_on)),
            web.post(f"{one}/restore", self._call(self._restore)),
        ]

    async def _list(self, _request: web.Request) -> web.Response:
        return web.json_response([self._facts(one) for one in self._operations.known()])

    async def _one(self, request: web.Request) -> web.Response:
        return web.json_response(self._facts(self._find(request)))

    def _find(self, request: web.Request) -> Operation:
        operation = self._operations.get(int(request.match_info["number"]))
        if operation is None:
            raise _refusal("there is no such operation; `operation list` shows those there are")
        return operation

    def _call(
        self, act: Callable[[Operation, str], Awaitable[Operation]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Make the handler of a call that has something done with an operation, by somebody."""

        async def handler(request: web.Request) -> web.Response:
            operation = self._find(request)
            who = str(json.loads(await body_of(request))["by"])
            return web.json_response(self._facts(await act(operation, who)))

        return handler

    async def _delete(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await body_of(request), type=_Delete)
        operation = Operation(
            "delete",
            asked.by,
            f"command {secrets.token_hex(16)}",
            asked.selection,
            expected=asked.expected,
            most=asked.most,
        )
        return web.json_response(self._facts(await self._operations.begin(operation)))

    async def _stop(self, operation: Operation, who: str) -> Operation:
        if operation.phase in (Phase.DONE, Phase.STOPPED):
            raise _refusal(f"it has ended: {operation.outcome}")
        await self._operations.steer(operation, "stop", who)
        return operation

    async def _go_on(self, operation: Operation, who: str) -> Operation:
        if operation.phase in (Phase.DONE, Phase.RUNNING):
            raise _refusal(f"it does not wait: {operation.outcome}")
        if self._operations.is_restored(operation):
            raise _refusal("its jobs were enqueued again")
        await self._operations.steer(operation, "go_on", who)
        return operation

    async def _restore(self, operation: Operation, who: str) -> Operation:
        if operation.phase not in ENDED:
            raise _refusal(f"it has not ended: {operation.outcome}")
        if self._operations.is_restored(operation):
            raise _refusal("its jobs were enqueued again")
        if not self._operations.can_restore(operation):
            raise _refusal("it has no jobs in the trash")
        return await self._operations.restore(operation, who)

    def _facts(self, operation: Operation) -> Mapping[str, Any]:
        return {
            "number": operation.number,
            "what": operation.what,
            "queue": operation.selection.queue,
            "state": operation.selection.state,
            "who": operation.who,
            "reason": operation.reason,
            "phase": operation.phase,
            "done": operation.done,
            "expected": operation.expected,
            "outcome": operation.outcome,
            "note": operation.note,
            "can_restore": self._operations.can_restore(operation),
        }


@web.middleware
async def explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what prevents a call into a refusal that says why, as commands can show it."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        raise _refusal("too many jobs are named at once: name fewer") from None
    except OSError as error:
        raise _refusal(f"the audit log can't be used: {error}") from None


def _refusal(why: str) -> web.HTTPConflict:
    return web.HTTPConflict(text=json.dumps({"error": why}), content_type="application/json")
