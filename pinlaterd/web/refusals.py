"""Requests that are not carried out: why, and what to do about it, as a page says it."""

from __future__ import annotations

import errno
import hmac
import json
import logging
from collections.abc import Mapping
from http import HTTPStatus

from aiohttp import web
from multidict import MultiDict

from pinlaterd.access import may_with_all_queues
from pinlaterd.client.coordinator import CoordinatorAway
from pinlaterd.config.schema import UserSettings
from pinlaterd.errors import (
    ConfigError,
    ConnectionFailed,
    PinLaterError,
    QueueNotFound,
    RequestError,
)

log = logging.getLogger(__name__)

_MOST_DIGITS = 20  # of a number: more would take long to read
_SAME_ORIGIN = "same-origin"
_TOKEN = "token"  # noqa: S105 - the name of a form's field
# Mistakes in all files are reported together, and may name any queue.
HIDDEN_MISTAKES = "The configuration has a mistake; who may view all queues sees it."
_TRY_AGAIN = "Go back, load the page again, and repeat what you did."


class PageProblem(Exception):
    """A request that is not carried out. `cure`: what its sender can do."""

    def __init__(self, status: HTTPStatus, what: str, cure: str) -> None:
        super().__init__(what)
        self.status = status
        self.what = what
        self.cure = cure


def mistake(what: str) -> PageProblem:
    """Return a mistake of a link or a form, to be raised."""
    return PageProblem(HTTPStatus.BAD_REQUEST, what, "Go back, load the page again, and repeat it.")


def whole_number(given: Mapping[str, str], name: str, otherwise: int, least: int, most: int) -> int:
    """Return the whole number that a query or a form has under a name, or `otherwise` if it has
    none. Raises PageProblem."""
    shown = given.get(name, "").strip()
    if not shown:
        return otherwise
    is_number = shown.isascii() and shown.isdecimal() and len(shown) <= _MOST_DIGITS
    if not is_number or not least <= int(shown) <= most:
        what = f"{name}: {shown[:20]!r} is no whole number from {least:,} to {most:,}."
        raise PageProblem(HTTPStatus.BAD_REQUEST, what, "Go back, change it, and send it again.")
    return int(shown)


def problem_of(request: web.Request, error: Exception, user: UserSettings | None) -> PageProblem:
    """Return what the page says of `error` to `user`; log a defect of ours."""
    match error:
        case PageProblem():
            return error
        case web.HTTPException():
            return _of_aiohttp(request, error)
        case QueueNotFound():
            cure = "The overview lists all queues."
            return PageProblem(HTTPStatus.NOT_FOUND, str(error), cure)
        case CoordinatorAway():
            what = f"{str(error).capitalize()}."
            # The error's own cure names options of commands.
            is_slow = isinstance(error.__cause__, TimeoutError)
            cure = "It may be slow: load the page again" if is_slow else "`pinlaterd up` starts it"
            cure += ". The pages of jobs work meanwhile."
            return PageProblem(HTTPStatus.SERVICE_UNAVAILABLE, what, cure)
        case RequestError():
            cure = "Go back and change the request."
            return PageProblem(HTTPStatus.BAD_REQUEST, str(error), cure)
        case ConfigError():
            return config_problem(error, user)
        case OSError(errno=errno.ENOSPC):
            cure = "Make room in the folder data, and repeat it."
            return PageProblem(HTTPStatus.INSUFFICIENT_STORAGE, "The disk is full.", cure)
        case ConnectionFailed() | PinLaterError():
            cure = "`pinlaterd status` says what runs. Load this page again once it serves."
            what = f"{str(error)[:1].upper()}{str(error)[1:]}"
            return PageProblem(HTTPStatus.SERVICE_UNAVAILABLE, what, cure)
        case _:
            log.error("%s %s: a defect", request.method, raw_path(request), exc_info=error)
            what, cure = "This page has a defect.", "The log of the process `web` says more."
            if isinstance(error, OSError) and error.filename is not None:  # it can't be used
                what, cure = f"{error.filename}: {error.strerror}.", "Mend that, and repeat it."
            return PageProblem(HTTPStatus.INTERNAL_SERVER_ERROR, what, cure)


def config_problem(error: ConfigError | OSError, user: UserSettings | None) -> PageProblem:
    """Return what the page says to `user` of a configuration that can't be read or changed."""
    is_hidden = isinstance(error, ConfigError) and not may_with_all_queues(user, "view")
    what = HIDDEN_MISTAKES if is_hidden else str(error)
    return PageProblem(HTTPStatus.CONFLICT, what, "Mend that, and repeat it.")


def _of_aiohttp(request: web.Request, error: web.HTTPException) -> PageProblem:
    status = HTTPStatus(error.status)
    if status is HTTPStatus.NOT_FOUND:
        what, cure = f"There is no page {request.path}.", "The overview lists all queues."
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        what, cure = f"This page takes no {request.method}.", "Open it by a link."
    elif error.content_type == "application/json":  # of the port
        what, cure = json.loads(error.text or "{}")["error"], _TRY_AGAIN
        log.warning("refused: %s %s from %s: %s", *_facts(request), what)
    else:
        what, cure = str(error.reason), _TRY_AGAIN
    return PageProblem(status, what, cure)


def check_form(request: web.Request, form: MultiDict[str], token: str) -> None:
    """Check that a page of ours sent this form, in the session that loaded it. Raises
    PageProblem."""
    site = request.headers.get("Sec-Fetch-Site")
    if site is None:  # browsers leave it out where plain HTTP goes over a network
        own = f"{request.scheme}://{request.host}"
        is_own = request.headers.get("Origin", "") == own
    else:
        is_own = site == _SAME_ORIGIN
    if not is_own:
        raise refusal(request, "it comes from a page of another site", "Open the dashboard itself.")
    if not hmac.compare_digest(form.get(_TOKEN, "").encode(), token.encode()):
        raise refusal(request, "its form is not of this session", _TRY_AGAIN)


def refusal(request: web.Request, why: str, cure: str, user: str = "") -> PageProblem:
    """Return a refusal, to be raised; log it with who and what."""
    log_refusal(request, why, user)
    what = f"This request was refused: {why}."
    return PageProblem(HTTPStatus.FORBIDDEN, what, cure)


def log_refusal(request: web.Request, why: str, user: str = "") -> None:
    """Log what a request asked for in vain, with who and what."""
    log.warning("refused: %s %s from %s as %r: %s", *_facts(request), user, why)


def raw_path(request: web.Request) -> str:
    """Return the path as it was sent, which can't forge a line of the log."""
    return request.rel_url.raw_path


def _facts(request: web.Request) -> tuple[str, str, str | None]:
    return request.method, raw_path(request), request.remote
