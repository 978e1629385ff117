"""Changes of a YAML or JSON text that leave all else as it stands: comments, order, quotes, blanks.

The nodes that the loader reads know their places, and a change is new text in place of old. Below
a key of a block, whole lines come and go; within brackets, what stands between two commas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from pinlaterd.config.document import DocumentError, Entry, Node, is_json, parse

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_STEP = 2  # blanks by which a block is indented where nothing else shows how many

Value = str | float | bool | Mapping[str, "Value"] | Sequence["Value"]


class Text:
    """The text of a file. Changes are gathered, each by the places before all of them."""

    def __init__(self, data: bytes) -> None:
        """Raises DocumentError if it can't be read."""
        self.root = parse(data)
        self._mark = _BYTE_ORDER_MARK if data.startswith(_BYTE_ORDER_MARK) else b""
        self._text = data.removeprefix(_BYTE_ORDER_MARK).decode()
        self._is_json = is_json(self._text)
        self._newline = "\r\n" if "\r\n" in self._text else "\n"
        self._changes: list[tuple[int, int, str]] = []  # from, to, what comes in between

    def render(self) -> bytes:
        """What the file should hold now."""
        text = self._text
        for start, end, new in sorted(self._changes, reverse=True):
            text = text[:start] + new + text[end:]
        return self._mark + text.encode()

    def replace(self, node: Node, value: Value) -> None:
        """A scalar, or nothing at all, by `value`."""
        if node.scalar == value and isinstance(node.scalar, bool) == isinstance(value, bool):
            return
        before = self._text[node.start : node.end]
        new = self._flow(value)
        if isinstance(value, str) and before.startswith("'"):
            new = "'" + value.replace("'", "''") + "'"
        elif isinstance(value, str) and before.startswith('"'):
            new = self._quoted(value)
        self._change(node.start, node.end, new if before else f" {new}")

    def add(self, owner: Entry | None, key: str, value: Value, *, first: bool = False) -> None:
        """A new key behind all others of the mapping that is the value of `owner` (None: of the
        document), or before them."""
        mapping = owner.value if owner is not None else self.root
        if mapping is None:  # a file without anything but comments
            self._add_line(len(self._text), *self._block(0, key, value))
        elif mapping.entries and mapping.flow:
            new = f"{self._key(key)}: {self._flow(value)}"
            self._add_in_brackets(mapping, mapping.entries, new, first=first)
        elif mapping.entries:
            lines = self._block(self._column(mapping.entries[0].start), key, value, mapping)
            self._add_line(owner.start if first and owner is not None else mapping.end, *lines)
        elif first or owner is None or (self.root is not None and self.root.flow):
            self.replace(mapping, {key: value})
        else:
            self._begin(owner, self._block(self._column(owner.start) + _STEP, key, value))

    def append(self, owner: Entry, value: Value) -> None:
        """A new item at the end of the list that is the value of `owner`."""
        listed = owner.value
        if not listed.items:
            self._change(listed.start, listed.end, self._flow([value]))
        elif listed.flow:
            self._add_in_brackets(listed, listed.items, self._flow(value))
        else:
            start = self._line_start(listed.items[0].start)
            dash = self._text.index("-", start)
            self._add_line(listed.end, f"{self._text[start:dash]}- {self._flow(value)}")

    def _add_in_brackets(
        self, node: Node, parts: Sequence[Entry | Node], new: str, *, first: bool = False
    ) -> None:
        start = parts[0].start
        _, line_break, indent = self._text[node.start + 1 : start].rpartition("\n")
        gap = f"{self._newline}{indent}" if line_break else " "
        if first:
            self._change(start, start, f"{new},{gap}")
        else:
            self._change(parts[-1].end, parts[-1].end, f",{gap}{new}")

    def remove(self, owner: Entry | None, index: int) -> None:
        """That entry or item of the value of `owner` (None: of the document)."""
        node = owner.value if owner is not None else self.root
        assert node is not None
        parts: Sequence[Entry | Node] = node.entries or node.items or ()
        part = parts[index]
        if not node.flow:
            self._change(self._line_start(part.start), self._line_end(part.end), "")
            if len(parts) == 1 and owner is not None:
                colon = self._text.index(":", owner.start) + 1
                self._change(colon, colon, " {}" if node.entries else " []")
        elif index + 1 < len(parts):
            self._change(part.start, parts[index + 1].start, "")
        else:
            self._change(parts[index - 1].end if index else part.start, part.end, "")

    def remove_key(self, owner: Entry | None, key: str) -> None:
        node = owner.value if owner is not None else self.root
        assert node is not None
        self.remove(owner, [entry.key for entry in node.entries or ()].index(key))

    # --- places -------------------------------------------------------------------------------

    def _change(self, start: int, end: int, new: str) -> None:
        self._changes.append((start, end, new))

    def _begin(self, owner: Entry, lines: Sequence[str]) -> None:
        """A block below `owner`, which has `{}` for its value, or nothing."""
        value = owner.value
        start = len(self._text[: value.start].rstrip(" "))
        self._change(start, value.end, "")
        self._add_line(value.end, *lines)

    def _add_line(self, behind: int, *lines: str) -> None:
        """Below the line of the place `behind`."""
        at = self._line_end(behind)
        is_open = at > 0 and self._text[at - 1] != "\n"  # the last line, which nothing ends
        new = "".join(f"{line}{self._newline}" for line in lines)
        self._change(at, at, self._newline + new if is_open else new)

    def _line_start(self, place: int) -> int:
        return self._text.rfind("\n", 0, place) + 1

    def _line_end(self, place: int) -> int:
        """Behind the line break."""
        return self._text.find("\n", place) + 1 or len(self._text)

    def _column(self, place: int) -> int:
        return place - self._line_start(place)

    # --- values -------------------------------------------------------------------------------

    def _block(
        self, column: int, key: str, value: Value, siblings: Node | None = None
    ) -> list[str]:
        """Lines for a new key; `siblings` show how far what is below one of them is indented."""
        indent = " " * column
        if not isinstance(value, Mapping) or _is_address(value):
            return [f"{indent}{self._key(key)}: {self._flow(value)}"]
        step = _STEP
        for entry in (siblings.entries or ()) if siblings is not None else ():
            if entry.value.entries and not entry.value.flow:
                step = self._column(entry.value.entries[0].start) - column
        lines = [f"{indent}{self._key(key)}:"]
        for inner_key, inner in value.items():
            lines += self._block(column + step, inner_key, inner)
        return lines

    def _flow(self, value: Value) -> str:
        if isinstance(value, Mapping):
            parts = (f"{self._key(key)}: {self._flow(inner)}" for key, inner in value.items())
            return f"{{{', '.join(parts)}}}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            return f"[{', '.join(map(self._flow, value))}]"
        if isinstance(value, str):
            return value if not self._is_json and _is_plain(value) else self._quoted(value)
        text = json.dumps(value)
        if isinstance(value, float) and "." not in text:
            return text.replace("e", ".0e")  # 1e-05 would be text in YAML
        return text

    def _key(self, key: str) -> str:
        return self._quoted(key) if self._is_json else key

    def _quoted(self, text: str) -> str:
        is_ascii = self._is_json and self._text.isascii()
        return json.dumps(text, ensure_ascii=is_ascii or not text.isprintable())


def _is_address(value: Mapping[str, Value]) -> bool:
    return value.keys() == {"host", "port"}


def _is_plain(text: str) -> bool:
    """Whether YAML takes it for this text without quotes, within brackets too."""
    if not re.fullmatch(r"[^\s,:#\[\]{}][^\n,#\[\]{}]*", text):
        return False
    try:
        node = parse(f"[{text}]".encode())
    except DocumentError:
        return False
    items = node.items if node is not None else None
    return items is not None and len(items) == 1 and items[0].scalar == text
