"""Text to nodes that know their place: YAML or JSON, and nothing dangerous.

JSON is tried first, so that PinLater's files are read exactly as JSON. In YAML, scalars mean what
YAML's core types say (numbers, booleans, null, text); aliases and tags are refused. Keys are
text as written: a shard named 001 stays 001. Duplicate keys are kept, for `load` to report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 20

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping."""

    key: str
    line: int
    value: Node
    start: int = 0  # of the key, in characters of the document

    @property
    def end(self) -> int:
        return self.value.end


@dataclass(frozen=True, slots=True)
class Node:
    """A mapping (entries), a sequence (items), or a scalar (`scalar`, written as `text`)."""

    line: int
    entries: Sequence[Entry] | None = None
    items: Sequence[Node] | None = None
    scalar: Scalar = None
    text: str = ""
    start: int = 0  # in characters of the document, up to its last character's end
    end: int = 0
    flow: bool = False  # a mapping or sequence in brackets

    @property
    def is_scalar(self) -> bool:
        return self.entries is None and self.items is None

    @property
    def is_nothing(self) -> bool:
        """`key:` without a value, or with null."""
        return self.is_scalar and self.scalar is None

    def get(self, key: str) -> Node | None:
        """The value of `key`, if this is a mapping that has it."""
        entry = self.entry(key)
        return entry.value if entry is not None else None

    def entry(self, key: str) -> Entry | None:
        return next((entry for entry in self.entries or () if entry.key == key), None)

    def describe(self) -> str:
        """What this is, for messages: never the value of anything but a scalar."""
        if self.entries is not None:
            return "a mapping"
        if self.items is not None:
            return "a list"
        if self.scalar is None:
            return "nothing"
        if isinstance(self.scalar, bool):
            return f"the boolean {self.text}"
        if isinstance(self.scalar, int | float):
            return f"the number {self.text}"
        return f"the text {self.text[:60]!r}"


class DocumentError(Exception):
    """The text can't be read at all."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line
        self.problem = problem


def parse(data: bytes) -> Node | None:
    """The document in `data`, None if it is empty. Raises DocumentError."""
    if len(data) > MAX_FILE_BYTES:
        raise DocumentError(1, f"the file has {len(data)} bytes; at most {MAX_FILE_BYTES} are read")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DocumentError(line, "not valid UTF-8; save the file as UTF-8") from error
    try:
        json.loads(text)
    except ValueError:
        return _parse_yaml(text)
    except RecursionError as error:
        raise DocumentError(1, "nested too deeply") from error
    return _JsonReader(text).read()


# --- YAML ---------------------------------------------------------------------------------

_BOOLEANS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*\Z")


class _Loader(yaml.SafeLoader):
    """Composes nodes, without aliases: a few lines of those can stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None,
                None,
                "aliases (*name) are not accepted; write the value out",
                event.start_mark,
            )
        return super().compose_node(parent, index)


def _parse_yaml(text: str) -> Node | None:
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
        return None if root is None else _from_yaml(root, text, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise DocumentError(mark.line + 1 if mark else 1, f"not valid YAML: {problem}") from error
    except yaml.YAMLError as error:
        raise DocumentError(1, f"not valid YAML: {error}") from error
    except RecursionError as error:
        raise DocumentError(1, "nested too deeply") from error


def _from_yaml(node: yaml.Node, text: str, depth: int) -> Node:
    line, start, end = node.start_mark.line + 1, node.start_mark.index, node.end_mark.index
    if depth > MAX_DEPTH:
        raise DocumentError(line, "nested too deeply")
    if isinstance(node, yaml.MappingNode):
        entries = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise DocumentError(key.start_mark.line + 1, "a key has to be text")
            found, mark = _from_yaml(value, text, depth + 1), key.start_mark
            entries.append(Entry(key.value, mark.line + 1, found, mark.index))
        flow = bool(node.flow_style)
        end = end if flow else entries[-1].end  # not where the next token begins
        return Node(line, entries=entries, start=start, end=end, flow=flow)
    if isinstance(node, yaml.SequenceNode):
        items = [_from_yaml(item, text, depth + 1) for item in node.value]
        flow = bool(node.flow_style)
        end = end if flow else items[-1].end
        return Node(line, items=items, start=start, end=end, flow=flow)
    end = start + len(text[start:end].rstrip())
    return Node(line, scalar=_yaml_scalar(node, line), text=node.value, start=start, end=end)


def _yaml_scalar(node: yaml.Node, line: int) -> Scalar:
    text = str(node.value)
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind == "null":
        return None
    if kind == "bool":
        return _BOOLEANS[text.lower()]
    if kind == "int" and _INTEGER.match(text):
        return int(text.replace("_", ""))
    if kind == "float":
        try:
            return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            return text  # 1:30.5, which YAML 1.1 takes for sixty-fold
    if kind in ("str", "int", "timestamp", "merge", "value"):
        return text  # not what YAML 1.1 sees in 0x1F, 1:30, 2026-01-01 or =
    raise DocumentError(line, f"tag {node.tag} is not accepted")


# --- JSON ---------------------------------------------------------------------------------

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\s\[\]{}:,"]+')


class _JsonReader:
    """Nodes from text that `json.loads` has found valid: only lines are added here."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _TOKEN.finditer(text)
        self._line = 1
        self._counted_to = 0

    def read(self) -> Node:
        return self._value(self._next(), 0)

    def _next(self) -> re.Match[str]:
        part = next(self._tokens)
        self._line += self._text.count("\n", self._counted_to, part.start())
        self._counted_to = part.start()
        return part

    def _value(self, part: re.Match[str], depth: int) -> Node:
        line, start, text = self._line, part.start(), part.group()
        if depth > MAX_DEPTH:
            raise DocumentError(line, "nested too deeply")
        if text == "{":
            entries = list(self._entries(depth))
            return Node(line, entries=entries, start=start, end=self._counted_to + 1, flow=True)
        if text == "[":
            items = []
            while (part := self._next()).group() != "]":
                if part.group() != ",":
                    items.append(self._value(part, depth + 1))
            return Node(line, items=items, start=start, end=part.end(), flow=True)
        scalar = json.loads(text)
        shown = scalar if isinstance(scalar, str) else text
        return Node(line, scalar=scalar, text=shown, start=start, end=part.end())

    def _entries(self, depth: int) -> Iterator[Entry]:
        while (part := self._next()).group() != "}":
            if part.group() == ",":
                continue
            key, line = json.loads(part.group()), self._line
            self._next()  # the colon
            yield Entry(key, line, self._value(self._next(), depth + 1), part.start())
