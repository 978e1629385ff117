"""Errors as Rickover answers them: `{"title": …, "id": …}`, whose ids clients compare.

`instance` (the request's path) and `status` are in some of them only, as in Rickover's. A service
that is away for now is 503 `service_unavailable` with `Retry-After`, which Rickover has not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus

import msgspec
from aiohttp import web

from pinlaterd.config.schema import UserSettings
from pinlaterd.http.problems import of_aiohttp, problem_of

log = logging.getLogger(__name__)

HEADERS = {"Content-Type": "application/json; charset=utf-8"}
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="rickover"'}
_HERE = "the request's path"
# Of what the service or the port refuses, by status.
_IDS = {400: "invalid_parameter", 413: "entity_too_large", 500: "server_error"}


class RestError(Exception):
    """An answer that says why a request was not carried out. `instance`: the path that it names, ""
    for none; `has_status`: whether it repeats the status."""

    def __init__(
        self,
        status: int,
        id_: str,
        title: str,
        *,
        instance: str = _HERE,
        has_status: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(title)
        self._status = status
        self._headers = headers or {}
        self._document = {"title": title, "id": id_}
        self._instance = instance
        self._has_status = has_status

    def response(self, path: str) -> web.Response:
        document: dict[str, object] = {**self._document}
        if self._instance:
            document["instance"] = path if self._instance is _HERE else self._instance
        if self._has_status:
            document["status"] = self._status
        return json_response(document, self._status, self._headers)


def json_response(
    answer: object, status: int = HTTPStatus.OK, headers: Mapping[str, str] = HEADERS
) -> web.Response:
    body = msgspec.json.encode(answer)
    return web.Response(status=status, body=body, headers={**HEADERS, **headers})


# Each takes what it lacks: id and title.
bad_request = partial(RestError, 400, has_status=True)
unauthorized = partial(RestError, 401, has_status=True, headers=_CHALLENGE)
forbidden = partial(RestError, 403, instance="")
server_error = partial(RestError, 500, "server_error", has_status=True)
not_found = partial(RestError, 404, "not_found", "Resource not found", has_status=True)
method_not_allowed = partial(
    RestError, 405, "method_not_allowed", "Method not allowed", has_status=True
)
bad_json = partial(
    bad_request,
    "invalid_request",
    "Invalid request: bad JSON. Double check the types of the fields you sent",
    instance="",
)


def missing(field: str) -> RestError:
    return bad_request("missing_parameter", f"Missing required field: {field}")


def no_role(request: web.Request, user: UserSettings, role: str) -> RestError:
    """Return the refusal of a user who may not do that, and log it."""
    log_refusal(request, user.name, f"no role {role}")
    return forbidden("forbidden", f"User {user.name} has no role {role} here")


def log_refusal(request: web.Request, user: str, why: str) -> None:
    log.warning(
        "refused: %s %s from %s as %r: %s", request.method, request.path, request.remote, user, why
    )


def unavailable(title: str, retry_seconds: int = 1) -> RestError:
    headers = {"Retry-After": str(retry_seconds)}
    return RestError(503, "service_unavailable", title, has_status=True, headers=headers)


def rest_error_of(error: Exception) -> RestError:
    """Return what the client is told of an error that no handler has explained."""
    if isinstance(error, RestError):
        return error
    problem = of_aiohttp(error) if isinstance(error, web.HTTPException) else problem_of(error)
    if problem is None:
        log.error("a defect", exc_info=error)
        return server_error("Unexpected server error. Please try again")
    status = problem.status
    id_ = _IDS.get(status, status.name.lower())
    return RestError(status, id_, problem.detail, has_status=True, headers=problem.headers)
