"""The bodies of jobs as a page shows them, with nothing changed and nothing hidden.

JSON keeps its numbers, the order of its keys and keys that occur twice: it is indented token by
token, never read into values. What is no JSON is text if it is UTF-8, else bytes. Characters that
cannot be seen, or that change the order of others, are shown by their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

import msgspec
import re2
from markupsafe import Markup, escape

from pinlaterd.signature import MOST_CHARS

Form = Literal["json", "text", "hex"]
FORMS: Sequence[Form] = get_args(Form)

MOST_JSON_BYTES = 256 * 1024
MOST_JSON_DEPTH = 64
PAGE_BYTES = 4 * 1024  # of bytes in hexadecimal
MOST_TEXT_BYTES = 256 * 1024
REDACTED = b"[redacted]"
_INDENT = 2
_BYTES_A_ROW = 16
# A line of indented JSON: its indent, a key with its colon, the rest.
_LINE = re.compile(r'( *)("(?:[^"\\]|\\.)*": )?(.*)', re.DOTALL)
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NOT_PLAIN = re.compile(r"[^\n\t -~]")
# Letters, by Unicode's classes, that are blank.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")


class JsonLine(NamedTuple):
    """A line of JSON. `key`: with its quotes and colon; "" where there is none."""

    indent: str
    key: str
    rest: str


class HexRow(NamedTuple):
    """A row of bytes: where the first is, all in hexadecimal, and as ASCII."""

    offset: str
    digits: str
    text: str


class BodyView(NamedTuple):
    """A body, or a part of it, in one form. `possible`: the forms that it has."""

    form: Form
    possible: Sequence[Form]
    size: int
    at: int  # where the part begins, bytes
    end: int  # where it ends
    json: Sequence[JsonLine] = ()
    text: str = ""
    rows: Sequence[HexRow] = ()


def visible(text: str) -> Markup:
    """Return text as HTML in which each character can be seen, those that can't as \\uXXXX."""
    marked = _NOT_PLAIN.sub(lambda found: _number_of(found, mark=True), str(escape(text)))
    return Markup(marked)  # noqa: S704 - it was escaped


def visible_text(text: str) -> str:
    """Return the same as plain text, for what is not shown as HTML."""
    return _NOT_PLAIN.sub(_number_of, text)


def _number_of(found: re.Match[str], *, mark: bool = False) -> str:
    character = found[0]
    if character.isprintable() and character not in _BLANK:
        return character
    code = ord(character)
    number = f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return f'<b class="escape">{number}</b>' if mark else number


def redact(body: bytes, pattern: str) -> bytes:
    """Return a body with all that the RE2 `pattern` matches left out; "": as it is."""
    if not pattern:
        return body
    redacted: bytes = re2.compile(pattern.encode()).sub(REDACTED, body)
    return redacted


def redacted_text(said: str, pattern: str) -> str:
    """Return a status, or other words, with what the RE2 `pattern` matches left out."""
    return redact(said.encode(), pattern).decode()


def redacted_message(message: str, pattern: str) -> str:
    """Return a signature's message with what the pattern matches left out. What it leaves out of a
    status, or cuts off, the pattern may need to match: then all of it is left out."""
    if pattern and ("#" in message or len(message) >= MOST_CHARS):
        return REDACTED.decode()
    return redacted_text(message, pattern)


def view_of(body: bytes, wanted: str = "", at: int = 0) -> BodyView:
    """Return a body in the form that is wanted, or else in the one that says most."""
    lines, text = _json_lines(body), _text_of(body)
    has_form = {"json": lines is not None, "text": text is not None, "hex": True}
    possible = [form for form in FORMS if has_form[form]]
    form = next((form for form in possible if form == wanted), possible[0])
    view = BodyView(form, possible, len(body), 0, len(body))
    match form:
        case "json":
            return view._replace(json=lines or ())
        case "text":
            shown = body[:MOST_TEXT_BYTES].decode(errors="ignore")
            return view._replace(text=shown, end=min(len(body), MOST_TEXT_BYTES))
        case "hex":
            first = max(0, min(at, len(body) - 1)) // PAGE_BYTES * PAGE_BYTES
            end = min(first + PAGE_BYTES, len(body))
            rows = [_row(body, place) for place in range(first, end, _BYTES_A_ROW)]
            return view._replace(at=first, end=end, rows=rows)


def _json_lines(body: bytes) -> list[JsonLine] | None:
    """Return a body's JSON as it is written, a value or key a line; None if it is none, or too
    large or deep to be read so."""
    if not body or len(body) > MOST_JSON_BYTES:
        return None
    try:
        # Deep JSON would be a thousand times as long with its indents.
        if _depth(msgspec.json.format(body, indent=-1)) > MOST_JSON_DEPTH:
            return None
        text = msgspec.json.format(body, indent=_INDENT).decode()
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return [_json_line(line) for line in text.split("\n")]


def _depth(body: bytes) -> int:
    """Return how deep the brackets of JSON, which is valid, are nested."""
    brackets = _STRING.sub(b"", body).translate(None, _NO_BRACKETS)
    return max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)


def _json_line(line: str) -> JsonLine:
    found = _LINE.match(line)
    assert found is not None, line
    indent, key, rest = found.groups("")
    return JsonLine(indent, key, rest)


def _text_of(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _row(body: bytes, place: int) -> HexRow:
    part = body[place : place + _BYTES_A_ROW]
    text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
    return HexRow(f"{place:08x}", part.hex(" "), text)
