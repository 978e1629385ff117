"""The description of /v2 in OpenAPI 3.1, made from its table of calls, as JSON or as a page."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from string import Template
from typing import Any

import msgspec

from pinlaterd import __version__
from pinlaterd.http.api import ApiCall
from pinlaterd.http.problems import CONTENT_TYPE, Problem
from pinlaterd.http.stream import JSON_LINES

_PAGE = Template((Path(__file__).parent / "docs.html").read_text("utf-8"))
_PATH_PARAMETER = re.compile(r"{(\w+)}")
_PROBLEM = Problem(
    HTTPStatus.NOT_FOUND, "QUEUE_NOT_FOUND", "queue 'mail' does not exist"
).document()
_REST_ERROR = {"title": "Resource not found", "id": "not_found", "status": 404}
_ABOUT = (
    "A durable job queue. Queues hold jobs; workers claim them and acknowledge them, each under "
    "its claim. docs/http.md is the guide. The paths at /v2/job-types, and their errors, are "
    "Rickover's: see docs/rickover.md."
)
_TEXT = {"schema": {"type": "string"}}
_ANSWER_HEADERS = {
    HTTPStatus.NOT_MODIFIED: "ETag",
    HTTPStatus.UNAUTHORIZED: "WWW-Authenticate",
    HTTPStatus.TOO_MANY_REQUESTS: "Retry-After",
    HTTPStatus.SERVICE_UNAVAILABLE: "Retry-After",
}
_MANY_LINES = "A job a line (JobBody), each answered by a line (EnqueuedAnswer), in order."


def describe(table: Iterable[ApiCall]) -> dict[str, Any]:
    """Return the OpenAPI document of these calls."""
    table = list(table)
    named = [(call.takes, call.gives, call.gives_for_many, call.query) for call in table]
    types = {type_ for each in named for type_ in each if type_ is not None}
    ordered = sorted(types, key=lambda type_: type_.__name__)
    found, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(ordered, found, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for call in table:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call, schemas, components)
    errors = {"type": "array", "items": {"type": "object", "required": ["field", "message"]}}
    problem = _like(_PROBLEM, list(_PROBLEM), errors=errors)
    rest_error = _like(_REST_ERROR, ["title", "id"], instance={"type": "string"})
    return {
        "openapi": "3.1.0",
        "info": {"title": "pinlaterd", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "security": [{}, {"basic": []}, {"bearer": []}],
        "components": {
            "schemas": {**components, "Problem": problem, "RestError": rest_error},
            "securitySchemes": {
                scheme: {"type": "http", "scheme": scheme} for scheme in ("basic", "bearer")
            },
        },
    }


def _like(example: Mapping[str, object], required: list[str], **others: object) -> dict[str, Any]:
    """Return the schema of an error like `example`, with `others` in addition."""
    kinds = {
        name: {"type": "string" if isinstance(value, str) else "integer"}
        for name, value in example.items()
    }
    properties = {**kinds, **others}
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "examples": [example],
    }


def page(document: Mapping[str, Any]) -> str:
    """Return the document as a page of HTML that needs nothing else."""
    calls = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts = [operation["description"]]
            for parameter in operation["parameters"]:
                about = json.dumps(parameter["schema"])
                parts.append(f"{parameter['in']} parameter {parameter['name']}: {about}")
            for media, body in operation.get("requestBody", {}).get("content", {}).items():
                parts.append(f"sends {media}: {_named(body['schema'])}")
            for status, answer in operation["responses"].items():
                of = [_named(body["schema"]) for body in answer.get("content", {}).values()]
                parts.append(f"{status} {answer['description']}: {', '.join(of) or 'no body'}")
            listed = "".join(f"<li>{html.escape(part)}</li>" for part in parts)
            title = html.escape(f"{method.upper()} {path}")
            about = html.escape(operation["summary"])
            calls.append(
                f"<details><summary><code>{title}</code> {about}</summary>"
                f"<ul>{listed}</ul></details>"
            )
    schemas = [
        f'<h3 id="{name}">{name}</h3><pre>{html.escape(json.dumps(schema, indent=2))}</pre>'
        for name, schema in document["components"]["schemas"].items()
    ]
    return _PAGE.substitute(calls="\n".join(calls), schemas="\n".join(schemas))


def _named(schema: Mapping[str, Any]) -> str:
    return str(schema.get("$ref", "").rpartition("/")[2] or json.dumps(schema))


def _operation(
    call: ApiCall, schemas: Mapping[type, Any], components: Mapping[str, Any]
) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAMETER.findall(call.path)
    ]
    if call.query is not None:
        properties = components[call.query.__name__]["properties"]
        parameters += [
            {"name": name, "in": "query", "schema": schema} for name, schema in properties.items()
        ]
    known = ("If-None-Match",) if _is_polled(call) else ()
    parameters += [{"name": name, "in": "header", **_TEXT} for name in (*call.headers, *known)]
    operation: dict[str, Any] = {
        "operationId": call.operation,
        "summary": call.summary,
        "description": f"Takes the role `{call.role}`, where there are users.",
        "parameters": parameters,
        "responses": {
            str(int(status)): _answer(call, status, schemas) for status in _statuses(call)
        },
    }
    if call.takes is not None:
        content: dict[str, Any] = {"application/json": {"schema": schemas[call.takes]}}
        if call.gives_for_many is not None:
            content[JSON_LINES] = {"schema": {"type": "string", "description": _MANY_LINES}}
        operation["requestBody"] = {"content": content}
    return operation


def _is_polled(call: ApiCall) -> bool:
    """Tell whether a read's answer has an ETag."""
    return call.method == "GET" and not call.is_rickovers


def _statuses(call: ApiCall) -> list[HTTPStatus]:
    """Return the statuses of all answers that a call may get while the service is in order."""
    found = {*call.statuses, HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
    found |= {HTTPStatus.NOT_FOUND, HTTPStatus.MISDIRECTED_REQUEST, HTTPStatus.TOO_MANY_REQUESTS}
    found.add(HTTPStatus.SERVICE_UNAVAILABLE)
    if _is_polled(call):
        found.add(HTTPStatus.NOT_MODIFIED)
    if call.takes is not None:
        found |= {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE}
    if call.role == "operate":
        found.add(HTTPStatus.CONFLICT)  # with the configuration's files
    return sorted(found)


def _answer(call: ApiCall, status: HTTPStatus, schemas: Mapping[type, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": status.phrase}
    is_read = _is_polled(call) and status is HTTPStatus.OK
    if header := "ETag" if is_read else _ANSWER_HEADERS.get(status):
        answer["headers"] = {header: _TEXT}
    if status >= HTTPStatus.BAD_REQUEST:
        rest = call.media, "RestError"
        media, error = rest if call.is_rickovers else (CONTENT_TYPE, "Problem")
        answer["content"] = {media: {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    elif call.gives is not None and status is not HTTPStatus.NOT_MODIFIED:
        answer["content"] = {call.media: {"schema": schemas[call.gives]}}
        if call.gives_for_many is not None:
            either = [schemas[call.gives], schemas[call.gives_for_many]]
            answer["content"][call.media] = {"schema": {"anyOf": either}}
            answer["content"][JSON_LINES] = {"schema": {"type": "string"}}
    return answer
