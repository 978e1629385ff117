"""Errors as RFC 9457 has them: `application/problem+json`, with our code's name and the cure.

    {"type": "about:blank", "title": "Not Found", "status": 404, "code": "QUEUE_NOT_FOUND",
     "detail": "queue 'mail' does not exist; create it first"}

A mistake in a body also has `errors`: `[{"field": "jobs[3].priority", "message": "…"}]`. Codes are
those of the Thrift interface, and a few that only HTTP needs (`Code`).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from pinlaterd.access import (
    FAILURES_SECONDS,
    AuthorizerFailed,
    Forbidden,
    NotIdentified,
    Refusal,
)
from pinlaterd.errors import (
    ConfigError,
    ConnectionFailed,
    DequeueRateLimited,
    EnqueuedInPart,
    EnqueueRejected,
    InvalidEnqueue,
    InvalidRequest,
    NoHealthyShards,
    OutcomeUnknown,
    Overloaded,
    PasswordInvalid,
    PinLaterError,
    PriorityNotSupported,
    QueueNameInvalid,
    QueueNameTooLong,
    QueueNotFound,
    RequestError,
    ShardConnectionFailed,
)
from pinlaterd.http.bodies import Mistake

log = logging.getLogger(__name__)

CONTENT_TYPE = "application/problem+json"
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="pinlaterd", Bearer realm="pinlaterd"'}
# A restart of what is away mostly takes less.
_RETRY_SECONDS = 1
_RETRY_AFTER = re.compile(r"retry after ([0-9]{1,9}) ms")
# `Expected `int`, got `str` - at `$.jobs[...].priority``
_PLACE = re.compile(r" - at `\$\.?(.*)`\Z")
# What msgspec reports at the object that has the field, or lacks it.
_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`\Z", re.DOTALL)
_TRUNCATED = "Input data was truncated"  # as msgspec says of a lone surrogate, too
_UNHELPFUL = ("Object contains unknown", "Invalid enum")
_NOTHING = "nothing was done"
_CURE = "; /v2/docs lists what this call takes"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Code(StrEnum):
    """The codes of problems that the Thrift interface has no code for."""

    FORBIDDEN = "FORBIDDEN"
    INVALID_REQUEST = "INVALID_REQUEST"
    INTERNAL = "INTERNAL"
    JOB_NOT_FOUND = "JOB_NOT_FOUND"
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
    NOT_FOUND = "NOT_FOUND"
    OVERLOADED = "OVERLOADED"
    TOO_LARGE = "TOO_LARGE"
    UNAUTHORIZED = "UNAUTHORIZED"
    UNAVAILABLE = "UNAVAILABLE"


class Problem(Exception):
    """An answer that says why a request was not carried out."""

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        **members: object,
    ) -> None:
        """`members`: further members of the document."""
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = dict(headers or {})
        self.members = members

    def document(self) -> dict[str, object]:
        return {
            "type": "about:blank",
            "title": self.status.phrase,
            "status": self.status.value,
            "code": self.code,
            "detail": self.detail,
            **self.members,
        }

    def response(self) -> web.Response:
        return web.Response(
            status=self.status,
            body=msgspec.json.encode(self.document()),
            headers={"Content-Type": CONTENT_TYPE, **self.headers},
        )


class FailedLater(Exception):
    """An error of the service, of a request that had done by then what `done` says."""

    def __init__(self, error: Exception, done: str, **members: object) -> None:
        """`members`: further members of its document."""
        super().__init__(f"{error}; {done}")
        self.error = error
        self.done = done
        self.members = members


@contextmanager
def after(done: str) -> Iterator[None]:
    """Have an error of the service say what the request has done before. Raises FailedLater."""
    try:
        yield
    except (ConnectionFailed, PinLaterError) as error:
        raise FailedLater(error, done) from error


_PORT_CODES = {
    HTTPStatus.FORBIDDEN: Code.FORBIDDEN,
    HTTPStatus.SERVICE_UNAVAILABLE: Code.OVERLOADED,
}


class _Kind(NamedTuple):
    status: HTTPStatus
    code: str = ""  # "": the name of the error's Thrift code
    is_passing: bool = False  # whether the same request may succeed soon


# The first that an error is an instance of.
_KINDS: tuple[tuple[type[Exception], _Kind], ...] = (
    (Forbidden, _Kind(HTTPStatus.FORBIDDEN, Code.FORBIDDEN)),
    (QueueNotFound, _Kind(HTTPStatus.NOT_FOUND)),
    (PasswordInvalid, _Kind(HTTPStatus.FORBIDDEN)),
    (DequeueRateLimited, _Kind(HTTPStatus.TOO_MANY_REQUESTS, is_passing=True)),
    (InvalidRequest, _Kind(HTTPStatus.BAD_REQUEST, Code.INVALID_REQUEST)),
    (InvalidEnqueue, _Kind(HTTPStatus.BAD_REQUEST)),
    (EnqueueRejected, _Kind(HTTPStatus.SERVICE_UNAVAILABLE, is_passing=True)),
    (RequestError, _Kind(HTTPStatus.BAD_REQUEST)),
    (Overloaded, _Kind(HTTPStatus.SERVICE_UNAVAILABLE, Code.OVERLOADED, is_passing=True)),
    (NoHealthyShards, _Kind(HTTPStatus.SERVICE_UNAVAILABLE, is_passing=True)),
    (ShardConnectionFailed, _Kind(HTTPStatus.SERVICE_UNAVAILABLE, is_passing=True)),
    (PinLaterError, _Kind(HTTPStatus.INTERNAL_SERVER_ERROR)),
    (ConnectionFailed, _Kind(HTTPStatus.SERVICE_UNAVAILABLE, Code.UNAVAILABLE, is_passing=True)),
    (ConfigError, _Kind(HTTPStatus.CONFLICT, Code.INVALID_REQUEST)),
    (AuthorizerFailed, _Kind(HTTPStatus.INTERNAL_SERVER_ERROR, Code.INTERNAL)),
)
_FIELDS_OF_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (PriorityNotSupported, "priority"),
    (QueueNameInvalid, "queue"),
    (QueueNameTooLong, "queue"),
)
# Our fields by the names that the service has for them, which its messages begin with.
_ARGUMENT = re.compile(r"invalid request: (\w+) ")
_FIELDS = {
    "jobDescriptors": "descriptors",
    "retryDelayMillis": "retry_delay_ms",
    "spreadMillis": "spread_ms",
}


def problem_of(error: Exception) -> Problem | None:
    """Return what the client is told of `error`; None if it is a defect of ours."""
    members: dict[str, object] = {}
    done = ""
    if isinstance(error, FailedLater):
        done, members, error = error.done, error.members, error.error
    kind = next((kind for of, kind in _KINDS if isinstance(error, of)), None)
    if kind is None:
        return None
    if isinstance(error, EnqueuedInPart):
        members["jobs"] = [_fate(descriptor) for descriptor in error.descriptors]
    detail = str(error)
    if field := _field_of(error, detail):
        members["errors"] = [{"field": field, "message": detail}]
    if done:  # by the calls before the one that this is about
        detail = detail.removesuffix(f"; {_NOTHING}")
    if done := done or _left_undone(error, kind, detail):
        detail += f"; {done}"
    code = kind.code or (error.code.name if isinstance(error, PinLaterError) else "")
    wait = _RETRY_AFTER.search(detail)  # the core may say when
    seconds = math.ceil(int(wait[1]) / 1000) if wait else _RETRY_SECONDS
    headers = {"Retry-After": str(seconds)} if kind.is_passing else {}
    return Problem(kind.status, code, detail, headers=headers, **members)


def _left_undone(error: Exception, kind: _Kind, detail: str) -> str:
    """Return what an error is sure of and does not say: that nothing was done; else ""."""
    if isinstance(error, EnqueueRejected):
        is_said = kind.status is HTTPStatus.BAD_REQUEST or "nothing was stored" in detail
        return "" if is_said else "nothing was stored"
    is_sure = isinstance(error, ConnectionFailed | NoHealthyShards | Overloaded)
    return _NOTHING if is_sure and not isinstance(error, OutcomeUnknown) else ""


def _field_of(error: Exception, detail: str) -> str | None:
    """Return the field that is at fault for an error of the service; None if that is not known."""
    if isinstance(error, InvalidRequest):
        named = _ARGUMENT.match(detail)
        return named and _FIELDS.get(named[1])
    return next((field for of, field in _FIELDS_OF_KINDS if isinstance(error, of)), None)


def _unauthorized(refused: NotIdentified) -> Problem:
    if refused.why is Refusal.TOO_MANY_FAILURES:
        headers = {"Retry-After": str(FAILURES_SECONDS)}
        text = "too many failures from this address; try again in a minute"
        return Problem(HTTPStatus.TOO_MANY_REQUESTS, Code.UNAUTHORIZED, text, headers=headers)
    text = "give the password of a user (Basic) or a token (Bearer) that is valid"
    return Problem(HTTPStatus.UNAUTHORIZED, Code.UNAUTHORIZED, text, headers=_CHALLENGE)


def _fate(descriptor: str) -> dict[str, object]:
    """Say of a job of an enqueue that was stored in part whether it is stored."""
    if descriptor == EnqueuedInPart.NOT_STORED:
        return {"stored": False}
    if descriptor == EnqueuedInPart.MAY_BE_STORED:
        return {"stored": None}
    return {"stored": True, "descriptor": descriptor}


def invalid(field: str, message: str, code: str = Code.INVALID_REQUEST) -> Problem:
    """Return the problem of a body that has a mistake at `field`."""
    where = f"{field}: " if field else ""
    return Problem(
        HTTPStatus.BAD_REQUEST,
        code,
        f"{where}{message}",
        errors=[{"field": field, "message": message}],
    )


def invalid_body(error: Exception) -> Problem:
    """Return the problem of a body that `bodies` refuses."""
    if isinstance(error, Mistake):
        code = Code.INVALID_REQUEST if error.code is None else error.code.name
        return invalid(error.field, error.message, code)
    if isinstance(error, UnicodeDecodeError):
        return invalid("", f"the body is not UTF-8 at byte {error.start}")
    if isinstance(error, RecursionError):
        return invalid("", "the body is nested too deeply")
    text = str(error)
    place = _PLACE.search(text)
    message = text[: place.start()] if place else text
    parts = [place[1]] if place and place[1] else []
    if named := _FIELD.match(message):
        parts.append(named[1])
    cure = _CURE if message.startswith(_UNHELPFUL) else ""
    if message == _TRUNCATED:
        cure = ", or half a surrogate pair stands alone in it"
    return invalid(".".join(parts), message + cure)


@web.middleware
async def explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error of a handler into its problem document."""
    try:
        return await handler(request)
    except Exception as error:  # noqa: BLE001 - the outermost place of a request
        return explained(request, error).response()


def explained(request: web.Request, error: Exception) -> Problem:
    """Return the problem that any error is to the client, and log a defect of ours."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, web.HTTPException):
        return of_aiohttp(error)
    if isinstance(error, NotIdentified):
        return _unauthorized(error)
    if isinstance(error, Mistake):
        return invalid_body(error)
    problem = problem_of(error)
    if problem is None:
        log.error("%s %s: a defect", request.method, request.path, exc_info=error)
        text = "a defect; the log says more"
        problem = Problem(HTTPStatus.INTERNAL_SERVER_ERROR, Code.INTERNAL, text)
    return problem


def no_request(why: str) -> web.Response:
    """Answer what is no HTTP."""
    return invalid("", f"the request can't be read: {why}").response()


def of_aiohttp(refused: web.HTTPException) -> Problem:
    """Return the problem that a refusal of aiohttp, or of the port, is."""
    status, kept = HTTPStatus(refused.status), dict[str, str]()
    detail: Any = refused.reason
    code = Code.INVALID_REQUEST
    match refused:
        case web.HTTPNotFound():
            code, detail = (
                Code.NOT_FOUND,
                "there is nothing at this path; docs/http.md lists all",
            )
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(refused.allowed_methods))
            code, kept = Code.METHOD_NOT_ALLOWED, {"Allow": allowed}
            detail = f"this path takes {allowed}, not {refused.method}"
        case web.HTTPRequestEntityTooLarge():
            cure = "send less at a time, or raise max_http_body_bytes in etc/pinlaterd.yaml"
            code, detail = Code.TOO_LARGE, f"{refused.text}; {cure}"
        case _ if refused.content_type == "application/json":  # the port's own
            detail = msgspec.json.decode(refused.text or "{}")["error"]
            code = _PORT_CODES.get(status, code)
            if "Retry-After" in refused.headers:
                kept = {"Retry-After": refused.headers["Retry-After"]}
    return Problem(status, code, str(detail), headers=kept)
