"""A call of /v2 as a row of its table: where it is, whom it takes, what it reads and answers.

The table makes the routes (`v2`) and the description of the interface. Handlers read a
request by `read_body` and `read_query`, and answer by `answer_json`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
from aiohttp import web

from pinlaterd.http.problems import invalid, invalid_body
from pinlaterd.http_port import body_of, takes_gzip

T = TypeVar("T")

_READING = {"GET", "HEAD"}
_COMPRESSED_BYTES = 1024  # of answers: smaller ones gain little
_COMPRESSED_ASIDE_BYTES = 64 * 1024  # of those that a thread compresses, beside the event loop
_encode = msgspec.json.Encoder().encode


class ApiCall(NamedTuple):
    """One call of the interface: where it is, which role it takes, what carries it out, and for its
    description what it gives and takes."""

    method: str
    path: str
    role: str
    # Its name and the first sentence of its docstring describe the call.
    handler: Callable[..., Awaitable[web.StreamResponse]]
    gives: type | None = None
    takes: type | None = None
    query: type | None = None
    statuses: tuple[HTTPStatus, ...] = (HTTPStatus.OK,)
    media: str = "application/json"
    gives_for_many: type | None = None  # of a call that takes one job, many, or a job a line
    headers: tuple[str, ...] = ()  # of its own, which a request may have
    is_rickovers: bool = False  # its errors are Rickover's, and reads have no ETag

    @property
    def operation(self) -> str:
        """Return its name in the description, as `createQueue`."""
        first, *others = self.handler.__name__.split("_")
        return first + "".join(map(str.capitalize, others))

    @property
    def summary(self) -> str:
        """Return what it does, in a sentence."""
        return " ".join((self.handler.__doc__ or "").partition(".")[0].split())


async def read_body(request: web.Request, of: type[T]) -> T:
    """Read a body; none at all is an empty object. Raises Problem."""
    body = await body_of(request) or b"{}"
    try:
        body.decode()  # msgspec does not look into what it keeps raw
        return msgspec.json.decode(body, type=of)
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise invalid_body(error) from None


def check_query(request: web.Request, call: ApiCall) -> None:
    """Raise Problem for parameters behind the path's `?` that would be ignored or misread."""
    try:
        unquote_to_bytes(request.raw_path).decode()  # yarl replaces what is not UTF-8
    except UnicodeDecodeError:
        raise invalid("", "the URL is not UTF-8 where its %-escapes are read") from None
    names = [name for name, _value in request.query.items()]
    if names and call.query is None:
        raise invalid(names[0], "this call takes no parameters behind the `?` of its path")
    if len(names) > len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise invalid(twice, "is given more than once behind the `?`; give it once")


def read_query(request: web.Request, of: type[T]) -> T:
    """Read the parameters behind the path's `?`. Raises Problem."""
    try:
        return msgspec.convert(dict(request.query), type=of, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_body(error) from None


def answer_json(answer: object, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(
        status=status,
        body=_encode(answer),
        content_type="application/json",
        charset="utf-8",
        zlib_executor_size=_COMPRESSED_ASIDE_BYTES,
    )


def finished(request: web.Request, answer: web.StreamResponse) -> web.StreamResponse:
    """Return an answer as its client takes it: compressed, or as the one that it knows already."""
    if not (isinstance(answer, web.Response) and isinstance(answer.body, bytes)):
        return answer
    if request.method in _READING:
        tag = hashlib.blake2b(answer.body, digest_size=12).hexdigest()
        answer.headers["ETag"] = f'W/"{tag}"'
        if any(known.value in (tag, "*") for known in request.if_none_match or ()):
            return web.Response(status=HTTPStatus.NOT_MODIFIED, headers={"ETag": f'W/"{tag}"'})
    if len(answer.body) >= _COMPRESSED_BYTES:
        answer.headers["Vary"] = "Accept-Encoding"
        if takes_gzip(request):
            answer.enable_compression(web.ContentCoding.gzip)
    return answer
