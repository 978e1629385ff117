"""A file of the configuration: its text as nodes that know their place, and checks of what they
hold. Every problem is kept, with its place.

PyYAML finds the places, and nothing dangerous is read. In text that is valid JSON all scalars are
read as JSON. In YAML, scalars mean what YAML's core types say (numbers, booleans, null, text);
aliases and tags are refused. Keys are text as written: a shard named 001 stays 001.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import yaml

from pinlaterd.config.allowed import Matching, OneOf
from pinlaterd.config.layout import read_file
from pinlaterd.config.schema import Setting

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 20

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping."""

    key: str
    line: int
    value: ValueNode
    start: int = 0  # of the key, in characters of the document

    @property
    def end(self) -> int:
        return self.value.end


@dataclass(frozen=True, slots=True)
class ValueNode:
    """A mapping (entries), a sequence (items), or a scalar (`scalar`, written as `text`)."""

    line: int
    entries: Sequence[Entry] | None = None
    items: Sequence[ValueNode] | None = None
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

    def get(self, key: str) -> ValueNode | None:
        """Return the value of `key`, if this is a mapping that has it."""
        entry = self.entry(key)
        return entry.value if entry is not None else None

    def entry(self, key: str) -> Entry | None:
        return next((entry for entry in self.entries or () if entry.key == key), None)

    def describe(self) -> str:
        """Describe this node for a message, showing only scalars' values."""
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


def parse(data: bytes) -> ValueNode | None:
    """Return the document in `data`, None if it is empty. Raises DocumentError."""
    if len(data) > MAX_FILE_BYTES:
        raise DocumentError(1, f"the file has {len(data)} bytes; at most {MAX_FILE_BYTES} are read")
    try:
        text = data.decode("utf-8-sig")
        loader = _JsonLoader(text) if _is_json(text) else _Loader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
        return None if root is None else _node(root, loader, 0)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DocumentError(line, "not valid UTF-8; save the file as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise DocumentError(mark.line + 1 if mark else 1, f"not valid YAML: {problem}") from error
    except yaml.YAMLError as error:
        raise DocumentError(1, f"not valid YAML: {error}") from error
    except RecursionError as error:
        raise DocumentError(1, "nested too deeply") from error


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class _Loader(yaml.SafeLoader):
    """Composes nodes, without aliases: a few lines of those can stand for gigabytes."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            problem = "aliases (*name) are not accepted; write the value out"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        return super().compose_node(parent, index)

    def read_scalar(self, node: yaml.Node) -> tuple[Scalar, str]:
        """Return the value that a scalar means, and its text."""
        return _yaml_scalar(node), node.value


class _JsonLoader(_Loader):
    def __init__(self, text: str) -> None:
        # YAML knows no tabs between values; what else is not ASCII is within strings.
        super().__init__(re.sub(r"[^\n -~]", " ", text))
        self.text = text

    def stale_possible_simple_keys(self) -> None:
        """Allow keys that are longer than YAML's, and whose colons stand on another line."""

    def read_scalar(self, node: yaml.Node) -> tuple[Scalar, str]:
        written = self.text[node.start_mark.index : node.end_mark.index]
        scalar: Scalar = json.loads(written)
        return scalar, scalar if isinstance(scalar, str) else written


def _node(node: yaml.Node, loader: _Loader, depth: int) -> ValueNode:
    line, start, end = node.start_mark.line + 1, node.start_mark.index, node.end_mark.index
    if depth > MAX_DEPTH:
        raise DocumentError(line, "nested too deeply")
    if isinstance(node, yaml.ScalarNode):
        scalar, written = _read_text(node, loader)
        end = start + len(loader.text[start:end].rstrip())
        return ValueNode(line, scalar=scalar, text=written, start=start, end=end)
    assert isinstance(node, yaml.CollectionNode)
    flow = bool(node.flow_style)
    if isinstance(node, yaml.SequenceNode):
        items = [_node(item, loader, depth + 1) for item in node.value]
        end = end if flow else items[-1].end  # not where the next token begins
        return ValueNode(line, items=items, start=start, end=end, flow=flow)
    entries = []
    for key, value in node.value:
        mark = key.start_mark
        if not isinstance(key, yaml.ScalarNode):
            raise DocumentError(mark.line + 1, "a key has to be text")
        found = _node(value, loader, depth + 1)
        entries.append(Entry(_read_text(key, loader)[1], mark.line + 1, found, mark.index))
    end = end if flow else entries[-1].end
    return ValueNode(line, entries=entries, start=start, end=end, flow=flow)


def _read_text(node: yaml.Node, loader: _Loader) -> tuple[Scalar, str]:
    """Read a text; refuse what no file name, environment and message can hold."""
    scalar, written = loader.read_scalar(node)
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


# --- checks -------------------------------------------------------------------------------------

ReadBytes = Callable[[Path], bytes]
Kind = TypeVar("Kind", str, int, float, bool)
_ANY = Setting("")


class FileReader:
    """One file: what it holds, and what is wrong with it as `file:line: key: …`."""

    def __init__(self, path: Path, read: ReadBytes = read_file) -> None:
        """`read` gives the file's bytes, or raises OSError."""
        self.path = path
        self.blank = True  # whether there was nothing in it
        self._read = read
        self._problems: list[tuple[int, str]] = []
        self.warnings: list[str] = []  # each once

    @property
    def problems(self) -> list[str]:
        """In the order of their lines."""
        return [text for _, text in sorted(self._problems, key=lambda found: found[0])]

    def problem(self, line: int, key: str, text: str) -> None:
        """Note a problem. `line` 0: about the file as a whole; `key` "": about no key."""
        self._problems.append((line, self._placed(line, key, text)))

    def warn(self, line: int, key: str, text: str) -> None:
        """Note a problem that does not keep the file from being used."""
        self._warn(self._placed(line, key, text))

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _placed(self, line: int, key: str, text: str) -> str:
        place = f"{self.path}:{line}" if line else f"{self.path}"
        return ": ".join(part for part in (place, key, text) if part)

    def read(self, *, required: bool = False) -> ValueNode | None:
        """Return the file's document; None if there is nothing in it to use."""
        try:
            data = self._read(self.path)
            self.blank = not data.strip()
            node = parse(data)
        except FileNotFoundError:
            if required:
                self.problem(0, "", "no such file; `pinlaterd init DIR` writes a new deployment")
            return None
        except OSError as error:
            self.problem(0, "", f"can't be read: {error.strerror}")
            return None
        except DocumentError as error:
            self.problem(error.line, "", error.problem)
            return None
        if node is not None:
            self._report_duplicates(node, "")
        return node

    def _report_duplicates(self, node: ValueNode, prefix: str) -> None:
        first_lines: dict[str, int] = {}
        for entry in node.entries or ():
            key = f"{prefix}{entry.key}"
            if entry.key in first_lines:
                first = first_lines[entry.key]
                text = f"given twice, first in line {first}; keep one of them"
                self.problem(entry.line, key, text)
            first_lines.setdefault(entry.key, entry.line)
            self._report_duplicates(entry.value, f"{key}.")
        for index, item in enumerate(node.items or ()):
            self._report_duplicates(item, f"{prefix}{index}.")

    def warn_of_readers(self, path: Path) -> None:
        """Warn if others may read `path`, which holds a password."""
        with contextlib.suppress(OSError):
            if path.stat().st_mode & stat.S_IROTH:
                self._warn(f"{path}: holds a password, and others can read it; chmod 600 {path}")


class Secret(NamedTuple):
    value: str
    variable: str = ""  # of the environment, if it comes from there


class Section:
    """A mapping of a file: the first value of each key, and the path by which messages name it."""

    def __init__(
        self,
        file: FileReader,
        node: ValueNode,
        path: tuple[str | int, ...] = (),
        *,
        refuse_unknown: bool = True,
    ) -> None:
        """A problem if `node` is no mapping; nothing at all (`queues:`) is an empty one.

        `refuse_unknown` False: unknown keys are warnings, here and below. PinLater ignores them."""
        self.file = file
        self.node = node
        self.path = path
        self._refuse_unknown = refuse_unknown
        self.values: dict[str, ValueNode] = {}
        for entry in node.entries or ():
            self.values.setdefault(entry.key, entry.value)
        if node.entries is None and not node.is_nothing:
            file.problem(node.line, self.name, f"expected a mapping, got {node.describe()}")

    def __contains__(self, name: str) -> bool:
        return name in self.values

    @property
    def name(self) -> str:
        """Join the path as messages show it."""
        return ".".join(map(str, self.path))

    def key(self, name: str) -> str:
        return ".".join(map(str, (*self.path, name)))

    def problem(self, name: str, text: str) -> None:
        """Note a problem of a key at its line, or at that of the mapping if it is missing."""
        self.file.problem(self.values.get(name, self.node).line, self.key(name), text)

    def allow(self, names: Iterable[str]) -> None:
        """Report keys that are not in `names`, with what may be meant, and forget them."""
        names = list(names)
        for entry in self.node.entries or ():
            if entry.key in names:
                continue
            self.values.pop(entry.key, None)
            close = difflib.get_close_matches(entry.key, names, n=1)
            cure = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names)}"
            if self._refuse_unknown:
                self.file.problem(entry.line, self.key(entry.key), f"unknown key; {cure}")
            else:
                self.file.warn(entry.line, self.key(entry.key), f"unknown key, ignored; {cure}")

    def require(self, *names: str, reason: str = "") -> bool:
        """Return whether all are there; those that are not are problems."""
        missing = [name for name in names if name not in self.values]
        for name in missing:
            self.problem(name, f"missing{reason}")
        return not missing

    def section(self, name: str) -> Section:
        return self._at(self.values.get(name, ValueNode(self.node.line)), name)

    def sections(self, name: str) -> Sequence[Section]:
        """Return the items of a list of mappings."""
        node = self.values[name]
        if node.items is None:
            self.problem(name, f"expected a list, got {node.describe()}")
        return [self._at(item, name, n) for n, item in enumerate(node.items or ())]

    def texts(self, name: str, allowed: Matching | OneOf) -> tuple[str, ...]:
        """Return the items of a list of texts that are right; none without that key."""
        node = self.values.get(name, ValueNode(self.node.line, items=()))
        if node.items is None:
            self.problem(name, f"expected a list, got {node.describe()}")
        found = []
        for number, item in enumerate(node.items or ()):
            text = item.text if item.is_scalar else ""
            problem = allowed.problem(text, text)
            if problem:
                self.file.problem(item.line, f"{self.key(name)}.{number}", f"{problem}; {allowed}")
            else:
                found.append(text)
        return tuple(found)

    def _at(self, node: ValueNode, *steps: str | int) -> Section:
        path = (*self.path, *steps)
        return Section(self.file, node, path, refuse_unknown=self._refuse_unknown)

    def get(self, name: str, kind: type[Kind], setting: Setting = _ANY) -> Kind | None:
        """Return the value of a key, or None: it is absent, or what is wrong is reported."""
        try:
            return _scalar(self.values[name], kind, setting) if name in self.values else None
        except _Wrong as error:
            self.problem(name, str(error))
            return None

    def get_all(self, kinds: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
        """Return the valid values of those keys that are present."""
        found = {name: self.get(name, kind, settings[name]) for name, kind in kinds.items()}
        return {name: value for name, value in found.items() if value is not None}

    def text(self, name: str) -> str:
        """Return a text, "" without that key."""
        return self.get(name, str) or ""

    def secret(self, name: str) -> Secret:
        """Read a secret from `name`, `name_file` or `name_env`; it is "" if none of them is there.

        A file's path is relative to the deployment. The value itself never gets into a message."""
        ways = [way for way in secret_keys(name) if way in self.values]
        for extra in ways[1:]:
            self.problem(extra, f"{self.key(ways[0])} is given too; keep one")
        if not ways:
            return Secret("")
        way = ways[0]
        given = self.get(way, str, Setting("", secret=way == name))
        if way == name:
            self.file.warn_of_readers(self.file.path)
        if given is None or way == name:
            return Secret(given or "")
        if way.endswith("_file"):
            return Secret(self._secret_file(way, self.file.path.parent.parent / given))
        value = os.environ.get(given, "")
        if given not in os.environ:
            self.problem(way, f"the environment has no {given}; set it, and start again")
        elif value != value.encode(errors="replace").decode():  # as it is of a file
            self.problem(way, f"the environment's {given} is not valid UTF-8")
        return Secret(value, given)

    def _secret_file(self, name: str, path: Path) -> str:
        try:
            self.file.warn_of_readers(path)
            return read_file(path).decode().strip("\r\n")
        except OSError as error:
            self.problem(name, f"{path}: {error.strerror}")
        except UnicodeDecodeError:
            self.problem(name, f"{path} is not valid UTF-8")
        return ""


def secret_keys(name: str) -> tuple[str, str, str]:
    """Name the three keys that can give a secret: its value, a file, an environment variable."""
    return name, f"{name}_file", f"{name}_env"


# --- scalars ------------------------------------------------------------------------------------

_CALLED = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


class _Wrong(Exception):
    """A value that a key can't have; the message says why."""


def _scalar(node: ValueNode, kind: type[Kind], setting: Setting) -> Kind:
    value, allowed = node.scalar, setting.allowed
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    is_number = kind is float and type(value) is int
    if not (type(value) is kind or is_number) or value != value:  # noqa: PLR0124  (NaN)
        got = "something else" if setting.secret else node.describe()
        cure = f"; {allowed}" if allowed else ""
        if kind is str:
            cure = "; put it in quotes" if node.is_scalar and node.text else ""
        raise _Wrong(f"expected {_CALLED[kind]}, got {got}{cure}")
    problem = allowed.problem(value, node.text) if allowed is not None else ""
    if problem:
        raise _Wrong(f"{problem}; {allowed}")
    return cast("Kind", float(cast("int", value)) if is_number else value)
