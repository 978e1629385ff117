"""Entries of a YAML mapping added and removed by lines.

A tree keeps a comment with what stands before it: what is appended to it would come behind the
comments that follow, and what is removed would take the next one's along. So whole entries are
lines here, and a new key of an entry is its first (`put_first`).
"""

from __future__ import annotations

import io
from collections.abc import MutableMapping
from typing import Any, TypeGuard

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

_DEFAULT_STEP = 2


def is_in_lines(mapping: object) -> TypeGuard[CommentedMap]:
    """Whether it is a mapping of YAML with its entries below each other, and has any."""
    return isinstance(mapping, CommentedMap) and bool(mapping) and not mapping.fa.flow_style()


def put_first(settings: MutableMapping[str, Any], key: str, value: object) -> None:
    """Set `key`; one that is new stands before all others."""
    if isinstance(settings, CommentedMap) and key not in settings:
        settings.insert(0, key, value)
    else:
        settings[key] = value


def with_entry(text: bytes, mapping: CommentedMap, key: str | int, entry: CommentedMap) -> bytes:
    """`text`, of which `mapping` is a part that is in lines, with one more entry at its end."""
    lines = _lines(text)
    last = next(reversed(mapping))
    _, column = mapping.lc.key(last)
    _, end = _span(lines, mapping, last)
    out = io.StringIO()
    yaml = YAML(typ="rt")
    step = _step(mapping, column)
    yaml.indent(mapping=step, sequence=step, offset=0)
    yaml.dump(CommentedMap({key: entry}), out)
    new = [f"{' ' * column}{line}" for line in out.getvalue().splitlines(keepends=True)]
    if "\r\n" in lines[0]:
        new = [line.replace("\n", "\r\n") for line in new]
    before = lines[:end]
    if not before[-1].endswith("\n"):
        before[-1] += "\n"
    return "".join([*before, *new, *lines[end:]]).encode("utf-8")


def without_entry(text: bytes, mapping: CommentedMap, key: str | int) -> bytes:
    """`text`, of which `mapping` is a part that is in lines, without that entry."""
    lines = _lines(text)
    start, end = _span(lines, mapping, key)
    return "".join([*lines[:start], *lines[end:]]).encode("utf-8")


def emptied(text: bytes, mapping: MutableMapping[str, Any], key: str) -> bytes:
    """`text`, in which nothing is left below `key` of `mapping`: it says `{}` there."""
    assert isinstance(mapping, CommentedMap)
    lines = _lines(text)
    line, _ = mapping.lc.key(key)
    start, colon, rest = lines[line].partition(":")
    lines[line] = f"{start}{colon} {{}}{rest}"
    return "".join(lines).encode("utf-8")


def _lines(text: bytes) -> list[str]:
    return text.decode("utf-8").splitlines(keepends=True)


def _span(lines: list[str], mapping: CommentedMap, key: str | int) -> tuple[int, int]:
    """From its own line to the last of its lines; what stands above the next one is the next's."""
    start, column = mapping.lc.key(key)
    end = start + 1
    while end < len(lines) and not _begins_another(lines[end], column):
        end += 1
    while _is_remark(lines[end - 1]):
        end -= 1
    return start, end


def _step(mapping: CommentedMap, column: int) -> int:
    """By how much the entries' own keys are indented."""
    for entry in mapping.values():
        if is_in_lines(entry):
            _, inner = entry.lc.key(next(iter(entry)))
            return max(1, int(inner) - column)
    return _DEFAULT_STEP


def _begins_another(line: str, column: int) -> bool:
    return not _is_remark(line) and len(line) - len(line.lstrip(" ")) <= column


def _is_remark(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")
