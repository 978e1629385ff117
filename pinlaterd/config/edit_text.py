"""Changes of a YAML or JSON text that leave all else as it stands: comments, order, quotes, blanks.

A change is made to the plain values that the text holds. What differs becomes new text in place of
old, at the places that the loader's nodes know: below a key of a block, whole lines come and go;
within brackets, what stands between two commas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pinlaterd.config.document import DocumentError, Entry, ValueNode, parse

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_STEP = 2  # blanks by which a block is indented where nothing else shows how many

_Part = Entry | ValueNode
Value = str | float | bool | Mapping[str, "Value"] | Sequence["Value"]


def plain(node: ValueNode | None) -> Any:
    """Convert a node to dicts, lists and scalars."""
    if node is None:
        return None
    if node.entries is not None:
        return {entry.key: plain(entry.value) for entry in node.entries}
    if node.items is not None:
        return [plain(item) for item in node.items]
    return node.scalar


class Text:
    """The text of a file, and its `tree`, to be changed: an empty mapping if there is nothing."""

    def __init__(self, data: bytes) -> None:
        """Raises DocumentError if it can't be read."""
        self.root = parse(data)
        self.tree = plain(self.root) or {}
        self._mark = _BYTE_ORDER_MARK if data.startswith(_BYTE_ORDER_MARK) else b""
        self._text = data.removeprefix(_BYTE_ORDER_MARK).decode()
        self._quotes = bool(re.match(r'\s*\{\s*["}]', self._text))  # JSON, or like it
        self._newline = "\r\n" if "\r\n" in self._text else "\n"
        self._changes: list[tuple[int, int, str]] = []  # from, to, what comes in between

    def render(self) -> bytes:
        """Render the file so that it holds `tree`, changing only the lines that differ."""
        self._changes = []
        if self.tree == (plain(self.root) or {}):
            return self._mark + self._text.encode()
        if self.root is None:
            self._add_lines(len(self._text), self._blocks(0, self.tree, self.tree))
        else:
            self._update(None, self.root, self.tree, in_brackets=self.root.flow)
        text = self._text
        for start, end, new in sorted(self._changes, reverse=True):
            text = text[:start] + new + text[end:]
        return self._mark + text.encode()

    # --- what differs -------------------------------------------------------------------------

    def _update(self, owner: Entry | None, node: ValueNode, new: Any, *, in_brackets: bool) -> None:
        """Update a node. `owner`: its key; None: it is the document, or of a list."""
        if isinstance(new, Mapping) and node.entries:
            self._update_mapping(owner, node, node.entries, new)
        elif isinstance(new, Sequence) and not isinstance(new, str) and node.items:
            self._update_list(owner, node, node.items, new)
        elif plain(node) == new and isinstance(node.scalar, bool) == isinstance(new, bool):
            return
        elif not isinstance(new, Mapping) or _is_flow(new) or in_brackets or owner is None:
            self._replace(node, new)
        else:
            start = len(self._text[: node.start].rstrip(" "))
            self._change(start, node.end, "")
            column = self._column(owner.start) + _STEP
            self._add_lines(node.end, self._blocks(column, new, new))

    def _update_mapping(
        self, owner: Entry | None, node: ValueNode, entries: Sequence[Entry], new: Mapping[str, Any]
    ) -> None:
        kept = [entry for entry in entries if entry.key in new]
        is_item = owner is None and node is not self.root  # in a block its first key has the dash
        if not kept or (is_item and not node.flow and kept[0] is not entries[0]):
            self._put_in_brackets(owner, node, entries, new)
            return
        self._remove(node, entries, kept)
        for entry in kept:
            self._update(entry, entry.value, new[entry.key], in_brackets=node.flow)
        kept_keys = {entry.key for entry in kept}
        added = [key for key in new if key not in kept_keys]
        is_first = next(iter(new)) not in kept_keys
        if added and node.flow:
            pairs = [f"{self._key(key)}: {self._flow(new[key])}" for key in added]
            self._add_in_brackets(node, entries, pairs, first=is_first)
        elif added:
            lines = self._blocks(self._column(entries[0].start), added, new, node)
            self._add_lines(owner.start if is_first and owner is not None else node.end, lines)

    def _update_list(
        self, owner: Entry | None, node: ValueNode, items: Sequence[ValueNode], new: Sequence[Any]
    ) -> None:
        """Change, remove or add items at the end; else write all of the list again."""
        kept = list(items)
        if len(new) < len(items):
            left = iter(items)
            found = (next((item for item in left if plain(item) == value), None) for value in new)
            kept = [item for item in found if item is not None]
        if not kept or len(kept) < min(len(new), len(items)):
            self._put_in_brackets(owner, node, items, new)
            return
        self._remove(node, items, kept)
        for item, value in zip(kept, new, strict=False):
            self._update(None, item, value, in_brackets=node.flow)
        added = [self._flow(value) for value in new[len(kept) :]]
        if added and node.flow:
            self._add_in_brackets(node, items, added)
        elif added:
            start = self._line_start(items[0].start)
            dash = self._text[start : self._text.index("-", start)]
            self._add_lines(node.end, [f"{dash}- {value}" for value in added])

    def _remove(self, node: ValueNode, parts: Sequence[_Part], kept: Sequence[_Part]) -> None:
        """Remove all parts but the `kept` ones, of which there is at least one."""
        stay = set(map(id, kept))
        for index, part in enumerate(parts):
            if id(part) in stay:
                continue
            if not node.flow:
                self._change(self._line_start(part.start), self._line_end(part.end), "")
            elif part.start < kept[-1].start:
                self._change(part.start, parts[index + 1].start, "")
            else:
                self._change(parts[index - 1].end, part.end, "")

    def _put_in_brackets(
        self, owner: Entry | None, node: ValueNode, parts: Sequence[_Part], new: Any
    ) -> None:
        """Write `new` in brackets; lines between a block's parts stay, as they may be comments."""
        if node.flow or owner is None:
            self._change(node.start, node.end, self._flow(new))
            return
        for part in parts:
            self._change(self._line_start(part.start), self._line_end(part.end), "")
        colon = self._text.index(":", owner.start) + 1
        self._change(colon, colon, f" {self._flow(new)}")

    def _replace(self, node: ValueNode, value: Any) -> None:
        """Replace a scalar, or nothing at all, by `value`."""
        before = self._text[node.start : node.end]
        new = self._flow(value)
        if isinstance(value, str) and node.is_scalar and before.startswith(("'", '"')):
            is_single = before[0] == "'" and value.isprintable()  # others need escapes
            new = "'" + value.replace("'", "''") + "'" if is_single else self._quoted(value)
        self._change(node.start, node.end, new if before else f" {new}")

    def _add_in_brackets(
        self, node: ValueNode, parts: Sequence[_Part], added: Sequence[str], *, first: bool = False
    ) -> None:
        start = parts[0].start
        _, line_break, indent = self._text[node.start + 1 : start].rpartition("\n")
        gap = f"{self._newline}{indent}" if line_break else " "
        if first:
            self._change(start, start, "".join(f"{new},{gap}" for new in added))
        else:
            end = parts[-1].end
            self._change(end, end, "".join(f",{gap}{new}" for new in added))

    # --- places -------------------------------------------------------------------------------

    def _change(self, start: int, end: int, new: str) -> None:
        self._changes.append((start, end, new))

    def _add_lines(self, behind: int, lines: Sequence[str]) -> None:
        """Add lines below the line of the place `behind`."""
        at = self._line_end(behind)
        is_open = at > 0 and self._text[at - 1] != "\n"  # the last line, which nothing ends
        new = "".join(f"{line}{self._newline}" for line in lines)
        self._change(at, at, self._newline + new if is_open else new)

    def _line_start(self, place: int) -> int:
        return self._text.rfind("\n", 0, place) + 1

    def _line_end(self, place: int) -> int:
        """Return the place behind the line break."""
        return self._text.find("\n", place) + 1 or len(self._text)

    def _column(self, place: int) -> int:
        return place - self._line_start(place)

    # --- values -------------------------------------------------------------------------------

    def _blocks(
        self,
        column: int,
        keys: Iterable[str],
        values: Mapping[str, Any],
        siblings: ValueNode | None = None,
    ) -> list[str]:
        """Write lines for new keys; `siblings` show how far lines below them are indented."""
        indent, step = " " * column, _STEP
        for entry in (siblings.entries or ()) if siblings is not None else ():
            if entry.value.entries and not entry.value.flow:
                step = self._column(entry.value.entries[0].start) - column
        lines = []
        for key in keys:
            value = values[key]
            if isinstance(value, Mapping) and not _is_flow(value):
                below = self._blocks(column + step, value, value)
                lines += [f"{indent}{self._key(key)}:", *below]
            else:
                lines.append(f"{indent}{self._key(key)}: {self._flow(value)}")
        return lines

    def _flow(self, value: Any) -> str:
        if isinstance(value, Mapping):
            parts = (f"{self._key(key)}: {self._flow(inner)}" for key, inner in value.items())
            return f"{{{', '.join(parts)}}}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            return f"[{', '.join(map(self._flow, value))}]"
        if isinstance(value, str):
            return value if not self._quotes and _is_plain(value) else self._quoted(value)
        text = json.dumps(value)
        if isinstance(value, float) and "." not in text:
            return text.replace("e", ".0e")  # 1e-05 would be text in YAML
        return text

    def _key(self, key: str) -> str:
        return self._quoted(key) if self._quotes else key

    def _quoted(self, text: str) -> str:
        if self._quotes:
            is_ascii = self._text.isascii() or not text.isprintable()
            return json.dumps(text, ensure_ascii=is_ascii)
        return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    """Write a character within the double quotes of YAML."""
    if character.isprintable():
        return json.dumps(character, ensure_ascii=False)[1:-1]
    return f"\\U{ord(character):08x}"


def _is_flow(value: Mapping[str, Any]) -> bool:
    """Tell whether it stands in brackets, also within a block: an address, or nothing at all."""
    return not value or value.keys() == {"host", "port"}


def _is_plain(text: str) -> bool:
    """Tell whether YAML takes it for this text without quotes, within brackets too."""
    if not re.fullmatch(r"[^\s,:#\[\]{}][^\n,#\[\]{}]*", text):
        return False
    try:
        parse(f"key: {text}".encode())  # `-` means something there
        node = parse(f"[{text}]".encode())
    except DocumentError:
        return False
    items = node.items if node is not None else None
    return items is not None and len(items) == 1 and items[0].scalar == text
