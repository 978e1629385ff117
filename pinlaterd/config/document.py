"""Text to nodes that know their place: YAML or JSON, and nothing dangerous.

PyYAML finds the places; in text that is valid JSON all scalars are read as JSON. In YAML, scalars
mean what YAML's core types say (numbers, booleans, null, text); aliases and tags are refused. Keys
are text as written: a shard named 001 stays 001. Duplicate keys are kept, for `load` to report.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
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
        if not is_json(text):
            return _compose(_Loader, text, lambda node: (_yaml_scalar(node), node.value))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DocumentError(line, "not valid UTF-8; save the file as UTF-8") from error
    except RecursionError as error:
        raise DocumentError(1, "nested too deeply") from error

    def json_scalar(node: yaml.Node) -> tuple[Scalar, str]:
        written = text[node.start_mark.index : node.end_mark.index]
        scalar: Scalar = json.loads(written)
        return scalar, scalar if isinstance(scalar, str) else written

    # YAML knows no tabs between values; what else is not ASCII is within strings.
    return _compose(_JsonLoader, re.sub(r"[^\n -~]", " ", text), json_scalar)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


_ReadScalar = Callable[[yaml.Node], tuple[Scalar, str]]  # what it means, and how it is written


class _Loader(yaml.SafeLoader):
    """Composes nodes, without aliases: a few lines of those can stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            problem = "aliases (*name) are not accepted; write the value out"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        return super().compose_node(parent, index)


class _JsonLoader(_Loader):
    def stale_possible_simple_keys(self) -> None:
        """Keys may be longer than YAML allows, and their colons may stand on another line."""


def _compose(loader_of: type[_Loader], text: str, read_scalar: _ReadScalar) -> Node | None:
    try:
        loader = loader_of(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
        return None if root is None else _node(root, text, read_scalar, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise DocumentError(mark.line + 1 if mark else 1, f"not valid YAML: {problem}") from error
    except yaml.YAMLError as error:
        raise DocumentError(1, f"not valid YAML: {error}") from error
    except RecursionError as error:
        raise DocumentError(1, "nested too deeply") from error


def _node(node: yaml.Node, text: str, read_scalar: _ReadScalar, depth: int) -> Node:
    line, start, end = node.start_mark.line + 1, node.start_mark.index, node.end_mark.index
    if depth > MAX_DEPTH:
        raise DocumentError(line, "nested too deeply")
    if isinstance(node, yaml.ScalarNode):
        scalar, written = _read_text(node, read_scalar)
        end = start + len(text[start:end].rstrip())
        return Node(line, scalar=scalar, text=written, start=start, end=end)
    assert isinstance(node, yaml.CollectionNode)
    flow = bool(node.flow_style)
    if isinstance(node, yaml.SequenceNode):
        items = [_node(item, text, read_scalar, depth + 1) for item in node.value]
        end = end if flow else items[-1].end  # not where the next token begins
        return Node(line, items=items, start=start, end=end, flow=flow)
    entries = []
    for key, value in node.value:
        mark = key.start_mark
        if not isinstance(key, yaml.ScalarNode):
            raise DocumentError(mark.line + 1, "a key has to be text")
        found = _node(value, text, read_scalar, depth + 1)
        _, written = _read_text(key, read_scalar)
        entries.append(Entry(written, mark.line + 1, found, mark.index))
    end = end if flow else entries[-1].end
    return Node(line, entries=entries, start=start, end=end, flow=flow)


def _read_text(node: yaml.Node, read_scalar: _ReadScalar) -> tuple[Scalar, str]:
    """Refuses what no file name, environment and message can hold."""
    scalar, written = read_scalar(node)
    try:
        written.encode()
    except UnicodeEncodeError as error:
        line = node.start_mark.line + 1
        problem = "a text holds half of a surrogate pair; write the character itself"
        raise DocumentError(line, problem) from error
    return scalar, written


_BOOLEANS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*\Z")


def _yaml_scalar(node: yaml.Node) -> Scalar:
    text = str(node.value)
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind == "null":
        return None
    if kind == "bool":
        return _BOOLEANS[text.lower()]
    with contextlib.suppress(ValueError):  # 1:30.5 in YAML 1.1; thousands of digits
        if kind == "int" and _INTEGER.match(text):
            return int(text.replace("_", ""))
        if kind == "float":
            return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    if kind in ("str", "int", "float", "timestamp", "merge", "value"):
        return text  # not what YAML 1.1 sees in 0x1F, 1:30, 2026-01-01 or =
    raise DocumentError(node.start_mark.line + 1, f"tag {node.tag} is not accepted")
