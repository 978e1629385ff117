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

from pinlaterd.access import FAILURES_SECONDS, Forbidden, NotIdentified, Refusal
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


def unavailable(title: str) -> RestError:
    headers = {"Retry-After": "1"}
    return RestError(503, "service_unavailable", title, has_status=True, headers=headers)


def rest_error_of(error: Exception) -> RestError:
    """Return what the client is told of an error that no handler has explained."""
    if isinstance(error, RestError):
        return error
    if isinstance(error, NotIdentified):
        return _unidentified(error)
    if isinstance(error, Forbidden):
        return forbidden("forbidden", str(error))
    problem = of_aiohttp(error) if isinstance(error, web.HTTPException) else problem_of(error)
    if problem is None:
        log.error("a defect", exc_info=error)
        return server_error("Unexpected server error. Please try again")
    status = problem.status
    id_ = _IDS.get(status, status.name.lower())
    if status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return RestError(status, id_, problem.detail, instance="")
    return RestError(status, id_, problem.detail, has_status=True, headers=problem.headers)


_UNIDENTIFIED = {
    Refusal.NO_CREDENTIALS: partial(unauthorized, "unauthorized", "Unauthorized"),
    Refusal.NO_NAME: partial(unauthorized, "missing_authentication", "Please give a user name"),
    Refusal.UNKNOWN_USER: partial(forbidden, "forbidden", "Username or password are invalid"),
    Refusal.WRONG_TOKEN: partial(forbidden, "forbidden", "The token is invalid"),
    Refusal.TOO_MANY_FAILURES: partial(
        RestError,
        429,
        "too_many_requests",
        "Too many failures from this address; try again in a minute",
        headers={"Retry-After": str(FAILURES_SECONDS)},
    ),
}


def _unidentified(refused: NotIdentified) -> RestError:
    if refused.why is Refusal.WRONG_PASSWORD:
        return forbidden("incorrect_password", f"Incorrect password for user {refused.user}")
    return _UNIDENTIFIED[refused.why]()
