"""Rickover's interface, /v1: job types and their jobs, for clients of Rickover as they are.

docs/rickover.md is the guide. The paths in `V1` are tried in order, then methods; a path that is
not there and a method that it does not take are refused before the user is identified, but below
/v2.
"""

from __future__ import annotations

import asyncio
import dataclasses
import html
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from pinlaterd import __version__
from pinlaterd.access import USER, Access, check, identify, may
from pinlaterd.client import calls
from pinlaterd.client.coordinator import fetch_json
from pinlaterd.config.schema import (
    DELIVERY_STRATEGIES,
    MOST_JOB_TYPE_CHARS,
    JobType,
    queue_of_type,
)
from pinlaterd.errors import ConnectionFailed, PinLaterError
from pinlaterd.http.api import ApiCall
from pinlaterd.http.job_types import JobTypes
from pinlaterd.http.problems import Handler
from pinlaterd.http.v1_archive import Archive
from pinlaterd.http.v1_bodies import (
    INT16,
    Fields,
    JobTypeAnswer,
    JobTypeBody,
    JobTypeNumbers,
    job_type_answer,
)
from pinlaterd.http.v1_errors import (
    HEADERS,
    RestError,
    bad_request,
    json_response,
    method_not_allowed,
    missing,
    not_found,
    rest_error_of,
    unavailable,
)
from pinlaterd.http.v1_jobs import JobHandlers, Names
from pinlaterd.http_port import BODY, body_of
from pinlaterd.router_client import RouterClient
from pinlaterd.status import Status

log = logging.getLogger(__name__)

_ALIAS = "/rickover"  # before the paths below /v2, which are ours otherwise
_OF_RICKOVER = re.compile(r"/(?:v1(?:/.*)?|rickover/.*|v2/job-types(?:/.*)?)?\Z", re.DOTALL)
_SECURITY = "max-age=31536000; includeSubDomains; preload"
_CREDENTIALS = ("authorization", "cookie", "proxy-authorization", "x-admin-password")
_NAME = r"(?P<name>[^\t\n\f\r /]+)"
_ID = r"(?P<id>(?:job_)?[^\t\n\f\r /]{20,40}|random_id)"
_PREFIXED_ID = r"(?P<id>job_[^\t\n\f\r /]+)"
_RESERVED_NAME = "meta.shutdown"
_MOST_SHOWN = 100  # queues of the home page


class _Operation(NamedTuple):
    """An operation on a path, by one method: the role that it takes, and its handler."""

    role: str
    handler: Callable[[web.Request, Names], Awaitable[web.StreamResponse]]


class V1:
    """The handlers of Rickover's interface, on one service."""

    def __init__(
        self,
        client: RouterClient,
        access: Access,
        job_types: JobTypes,
        *,
        follow_seconds: float,
    ) -> None:
        """Serve requests; a job type that is created has to be active within `follow_seconds`."""
        self._client = client
        self._access = access
        self._job_types = job_types
        self._follow_seconds = follow_seconds
        self._allows_insecure = os.environ.get("ALLOW_UNENCRYPTED_PROXY_TRAFFIC") == "true"
        self._logs_traffic = os.environ.get("DEBUG_HTTP_TRAFFIC") == "true"
        jobs, archive = JobHandlers(client, job_types), Archive(client, job_types)
        self._operations: dict[re.Pattern[str], dict[str, _Operation]] = {}
        for path, method, role, handler in (
            ("/v1/jobs", "POST", "operate", self.create_job_type),
            (f"/v1/jobs/{_PREFIXED_ID}", "GET", "view", jobs.show),
            (f"/v1/jobs/{_NAME}", "GET", "view", self.get_job_type),
            (f"/v1/jobs/{_NAME}", "PATCH", "operate", self.change_job_type),
            (f"/v1/jobs/{_NAME}/{_ID}", "GET", "view", jobs.show),
            (f"/v1/jobs/{_NAME}/{_ID}", "POST", "work", jobs.report),
            (f"/v1/jobs/{_NAME}/{_ID}", "PUT", "enqueue", jobs.enqueue),
            (f"/v1/jobs(?:/{_NAME})?/{_PREFIXED_ID}/replay", "POST", "enqueue", jobs.replay),
            ("/v1/archived-jobs", "GET", "view", archive.show),
            ("/v2/job-types", "GET", "view", self.list_job_types),
            ("/v2/job-types", "POST", "operate", self.create_job_type),
            (f"/v2/job-types/{_NAME}", "GET", "view", self.get_job_type),
            (f"/v2/job-types/{_NAME}", "PATCH", "operate", self.change_job_type),
            ("/", "GET", "view", self._show_home),
        ):
            of_path = self._operations.setdefault(re.compile(path + r"\Z"), {})
            of_path[method] = _Operation(role, handler)

    def routes(self) -> list[web.RouteDef]:
        """Return what takes all paths of Rickover's interface."""
        paths = ("/", "/v1{rest:(?:/.*)?}", f"{_ALIAS}{{rest:/.*}}", "/v2/job-types{rest:(?:/.*)?}")
        return [web.route("*", path, self._serve) for path in paths]

    def described_calls(self) -> list[ApiCall]:
        """Return the calls below /v2, for its description."""
        types, one = "/v2/job-types", "/v2/job-types/{name}"
        call = partial(ApiCall, gives=JobTypeAnswer, is_rickovers=True)
        listed, made = list[JobTypeAnswer], (HTTPStatus.CREATED,)
        create, change = self.create_job_type, self.change_job_type
        return [
            call("GET", types, "view", self.list_job_types, gives=listed),
            call("POST", types, "operate", create, takes=JobTypeBody, statuses=made),
            call("GET", one, "view", self.get_job_type),
            call("PATCH", one, "operate", change, takes=JobTypeNumbers),
        ]

    @web.middleware
    async def explain(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every error of a handler of ours into Rickover's; what others serve passes."""
        if _OF_RICKOVER.match(request.path) is None:
            return await handler(request)
        if self._logs_traffic:
            request[BODY] = bytearray()
        try:
            if request.headers.get("X-Forwarded-Proto") == "http" and not self._allows_insecure:
                raise RestError(403, "insecure_request", "Server not available over HTTP")
            answer = await handler(request)
        except Exception as error:  # noqa: BLE001 - the outermost place of a request
            answer = rest_error_of(error).response(request.path)
        answer.headers["Strict-Transport-Security"] = _SECURITY
        if self._logs_traffic:
            heads = request.headers.items()
            head = {name: text for name, text in heads if name.lower() not in _CREDENTIALS}
            received, sent = request[BODY], getattr(answer, "body", b"")
            text = "%s %s %s %s: answered %d %s"
            what = (request.method, request.path_qs, head, bytes(received), answer.status, sent)
            log.info(text, *what)
        return answer

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix(_ALIAS)
        authenticates_first = path.startswith("/v2/")
        if authenticates_first:
            await identify(request, self._access)
        names, operations = self._find(path)
        if request.method == "OPTIONS":
            return web.Response(headers={**HEADERS, "Allow": ", ".join([*operations, "OPTIONS"])})
        operation = operations.get(request.method)
        if operation is None:
            raise method_not_allowed()
        if not authenticates_first:
            await identify(request, self._access)
        check(request, operation.role, self._queue_of(names["name"]) if names.get("name") else "")
        return await operation.handler(request, names)

    def _find(self, path: str) -> tuple[Names, Mapping[str, _Operation]]:
        """Return the parts of a path that differ, and its operations by method. Raises
        RestError."""
        for pattern, operations in self._operations.items():
            if match := pattern.match(path):
                return match.groupdict(), operations
        raise not_found()

    def _queue_of(self, name: str) -> str:
        found = self._job_types.get(name)
        return found.queue if found is not None else queue_of_type(name)

    async def _show_home(self, request: web.Request, _names: Names) -> web.Response:
        title, frame = os.environ.get("HOMEPAGE_TITLE"), os.environ.get("HOMEPAGE_IFRAME_URL")
        heading = html.escape(title or "pinlaterd")
        page = f"<!DOCTYPE html><title>{heading}</title><h1>{heading}</h1>"
        lines = [f"Version: {__version__}", *await _state_lines(), await self._queues_line(request)]
        page += "".join(f"<p>{html.escape(line)}</p>" for line in lines)
        if frame:
            page += f'<iframe src="{html.escape(frame)}" width="100%" height="800"></iframe>'
        return web.Response(text=page, content_type="text/html", charset="utf-8")

    async def _queues_line(self, request: web.Request) -> str:
        """Return the line that names the queues which the user may view."""
        try:
            names = await self._client.run(calls.queue_names())
        except (ConnectionFailed, PinLaterError) as error:
            return f"Queues: {error}"
        shown = sorted(name for name in names if may(request.get(USER), "view", name))
        more = ", …" if len(shown) > _MOST_SHOWN else ""
        return f"Queues ({len(shown)}): {', '.join(shown[:_MOST_SHOWN])}{more}"

    # --- job types ---------------------------------------------------------------------------

    async def list_job_types(self, request: web.Request, _names: Names) -> web.Response:
        """List all job types, the newest first."""
        user, types = request.get(USER), self._job_types.newest_first
        return json_response(
            [job_type_answer(one) for one in types if may(user, "view", one.queue)]
        )

    async def get_job_type(self, _request: web.Request, names: Names) -> web.Response:
        """Show a job type."""
        found = await self._job_types.find(names["name"])
        if found is None:
            raise not_found()
        return json_response(job_type_answer(found))

    async def create_job_type(self, request: web.Request, _names: Names) -> web.Response:
        """Create a job type, unless there is one of its name."""
        made = _new_type(Fields(await body_of(request)))
        check(request, "operate", self._queue_of(made.name))
        exists = bad_request("invalid_parameter", f"Job type {made.name} exists already")
        if self._job_types.get(made.name) is not None:
            raise exists
        await self._client.run(calls.create_queue(made.queue))
        try:
            is_new = await self._job_types.create(made, seconds=self._follow_seconds)
        except TimeoutError:
            raise _not_active() from None
        if not is_new:
            raise exists
        return json_response(job_type_answer(made), HTTPStatus.CREATED)

    async def change_job_type(self, request: web.Request, names: Names) -> web.Response:
        """Give a job type other numbers."""
        found, fields = self._job_types.get(names["name"]), Fields(await body_of(request))
        if found is None:
            raise not_found()
        attempts = fields.get("attempts", INT16, found.attempts)
        concurrency = fields.get("concurrency", INT16, found.concurrency)
        wanted = dataclasses.replace(found, attempts=attempts, concurrency=concurrency)
        _check(wanted)
        try:
            await self._job_types.change(wanted, seconds=self._follow_seconds)
        except TimeoutError:
            raise _not_active() from None
        return json_response(job_type_answer(wanted))


async def _state_lines() -> list[str]:
    """Return what the coordinator says of this service, its processes and its shards."""
    try:
        status: Status = await asyncio.to_thread(
            fetch_json, "/status.json", directory=Path(), url=None
        )
    except ConnectionFailed as error:
        return [f"Service: {error}"]
    processes = [f"{each['name']} {each['state']}" for each in status["processes"]]
    shards = [
        f"{each['name']} {'healthy' if each['healthy'] else 'not healthy'}"
        for each in status["shards"]
    ]
    return [
        f"Service: {'healthy' if status['healthy'] else '; '.join(status['problems'])}",
        f"Processes: {', '.join(processes)}",
        f"Shards: {', '.join(shards)}",
    ]


_not_active = partial(
    unavailable, "The job type is stored, and usable once the coordinator is back"
)


def _new_type(fields: Fields) -> JobType:
    """Return the job type that a body describes. Raises RestError, for the first mistake in the
    order in which Rickover looks."""
    name, strategy = fields.get("name", str, ""), fields.get("delivery_strategy", str, "")
    attempts, concurrency = fields.get("attempts", INT16, 0), fields.get("concurrency", INT16, 0)
    if not name:
        raise missing("name")
    if name == _RESERVED_NAME:
        title = f"The name {name} is reserved"
        raise bad_request("forbidden_parameter", title, instance="")
    if not strategy:
        raise missing("delivery_strategy")
    if strategy not in DELIVERY_STRATEGIES:
        raise bad_request("invalid_delivery_strategy", f"Invalid delivery strategy: {strategy}")
    now = datetime.now(UTC)
    made = JobType(name, queue_of_type(name), now, strategy, attempts, concurrency)
    _check(made)
    if len(name) > MOST_JOB_TYPE_CHARS or "\0" in name:
        most = f"at most {MOST_JOB_TYPE_CHARS} characters"
        title = f"A name has {most}, none of them zero or half of a pair"
        raise bad_request("invalid_parameter", title)
    return made


def _check(made: JobType) -> None:
    """Raise RestError if its numbers are wrong."""
    if made.attempts > 1 and not made.is_retried:
        title = f"A job type that is {made.delivery_strategy} has one attempt"
        raise bad_request("invalid_attempts", title)
    for field, value in (("attempts", made.attempts), ("concurrency", made.concurrency)):
        if value < 1:
            raise bad_request("invalid_parameter", f"{field} must be 1 or more, got {value}")
