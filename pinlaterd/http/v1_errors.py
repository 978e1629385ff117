"""Errors as Rickover answers them: `{"title": …, "id": …}`, whose ids clients compare.

`instance` (the request's path) and `status` are in some of them only, as in Rickover's. A service
that is away for now is 503 `service_unavailable` with `Retry-After`, which Rickover has not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web

from pinlaterd.http.problems import of_aiohttp, problem_of

log = logging.getLogger(__name__)

CONTENT_TYPE = "application/json; charset=utf-8"
_BAD_JSON = "Invalid request: bad JSON. Double check the types of the fields you sent"


class RestError(Exception):
    """An answer that says why a request was not carried out. `has_instance`, `has_status`: whether
    the document names the request's path, and repeats the status."""

    def __init__(
        self,
        status: HTTPStatus,
        id_: str,
        title: str,
        *,
        detail: str = "",
        instance: str | None = None,
        has_instance: bool = True,
        has_status: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(title)
        self.status = status
        self.id = id_
        self.title = title
        self.detail = detail
        self.instance = instance  # if it is not the request's path
        self.has_instance = has_instance
        self.has_status = has_status
        self.headers = dict(headers or {})

    def response(self, path: str) -> web.Response:
        document: dict[str, object] = {"title": self.title, "id": self.id}
        if self.detail:
            document["detail"] = self.detail
        if self.has_instance:
            document["instance"] = self.instance or path
        if self.has_status:
            document["status"] = self.status.value
        return json_response(document, self.status, self.headers)


def json_response(
    answer: object,
    status: HTTPStatus = HTTPStatus.OK,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(answer),
        headers={"Content-Type": CONTENT_TYPE, **(headers or {})},
    )


# --- callers' mistakes ----------------------------------------------------------------------


def bad_request(id_: str, title: str, *, detail: str = "", has_instance: bool = True) -> RestError:
    return RestError(
        HTTPStatus.BAD_REQUEST,
        id_,
        title,
        detail=detail,
        has_instance=has_instance,
        has_status=True,
    )


def bad_json() -> RestError:
    return bad_request("invalid_request", _BAD_JSON, has_instance=False)


def missing(field: str) -> RestError:
    return bad_request("missing_parameter", f"Missing required field: {field}")


def not_found() -> RestError:
    return RestError(HTTPStatus.NOT_FOUND, "not_found", "Resource not found", has_status=True)


def method_not_allowed() -> RestError:
    status = HTTPStatus.METHOD_NOT_ALLOWED
    return RestError(status, "method_not_allowed", "Method not allowed", has_status=True)


# --- who calls ------------------------------------------------------------------------------

_CHALLENGE = {"WWW-Authenticate": 'Basic realm="rickover"'}


def unauthorized(id_: str, title: str) -> RestError:
    return RestError(HTTPStatus.UNAUTHORIZED, id_, title, has_status=True, headers=_CHALLENGE)


def forbidden(id_: str, title: str) -> RestError:
    return RestError(HTTPStatus.FORBIDDEN, id_, title, has_instance=False)


def insecure() -> RestError:
    title = "Server not available over HTTP"
    detail = "For your security, please use an encrypted connection"
    return RestError(HTTPStatus.FORBIDDEN, "insecure_request", title, detail=detail)


# --- what else goes wrong -------------------------------------------------------------------


# Of what the service or the port refuses, by status.
_IDS = {
    HTTPStatus.BAD_REQUEST: "invalid_parameter",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "entity_too_large",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
}


def rest_error_of(error: Exception) -> RestError:
    """Return what the client is told of an error that no handler has explained."""
    if isinstance(error, RestError):
        return error
    problem = of_aiohttp(error) if isinstance(error, web.HTTPException) else problem_of(error)
    if problem is None:
        log.error("a defect", exc_info=error)
        status, title = HTTPStatus.INTERNAL_SERVER_ERROR, "Unexpected server error"
        return RestError(status, "server_error", title, has_status=True)
    status = problem.status
    id_ = _IDS.get(status, status.name.lower())
    return RestError(status, id_, problem.detail, has_status=True, headers=problem.headers)
