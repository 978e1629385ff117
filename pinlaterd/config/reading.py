"""Checks of what a file holds against what is allowed; every problem is kept, with its place."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar, cast

from pinlaterd.config.document import DocumentError, Node, Scalar, parse
from pinlaterd.config.schema import Between, Characters, OneOf, Setting

ANYTHING = Setting("")

ReadBytes = Callable[[Path], bytes]
Kind = TypeVar("Kind", str, int, float, bool)


class FileReader:
    """One file: what it holds, and what is wrong with it as `file:line: key: …`."""

    def __init__(self, path: Path, read: ReadBytes = Path.read_bytes) -> None:
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
        """`line` 0: about the file as a whole; `key` "": about no key."""
        self._problems.append((line, self._placed(line, key, text)))

    def warn(self, line: int, key: str, text: str) -> None:
        """The same of what does not keep the file from being used."""
        self._warn(self._placed(line, key, text))

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _placed(self, line: int, key: str, text: str) -> str:
        place = f"{self.path}:{line}" if line else f"{self.path}"
        return ": ".join(part for part in (place, key, text) if part)

    def read(self, *, required: bool = False) -> Node | None:
        """The file's document; None if there is nothing in it to use."""
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

    def _report_duplicates(self, node: Node, prefix: str) -> None:
        first_lines: dict[str, int] = {}
        for entry in node.entries or ():
            key = f"{prefix}{entry.key}"
            if entry.key in first_lines:
                first = first_lines[entry.key]
                self.problem(
                    entry.line, key, f"given twice, first in line {first}; keep one of them"
                )
            first_lines.setdefault(entry.key, entry.line)
            self._report_duplicates(entry.value, f"{key}.")
        for index, item in enumerate(node.items or ()):
            self._report_duplicates(item, f"{prefix}{index}.")

    def warn_of_readers(self, path: Path) -> None:
        """If others may read `path`, which holds a password."""
        with contextlib.suppress(OSError):
            if path.stat().st_mode & stat.S_IROTH:
                self._warn(f"{path}: holds a password, and others can read it; chmod 600 {path}")


class Section:
    """A mapping of a file: the first value of each key, and the path by which messages name it."""

    def __init__(
        self, file: FileReader, node: Node, path: str = "", *, refuse_unknown: bool = True
    ) -> None:
        """A problem if `node` is no mapping; nothing at all (`queues:`) is an empty one.

        `refuse_unknown` False: unknown keys are warnings, here and below. PinLater ignores them."""
        self.file = file
        self.node = node
        self.path = path
        self._refuse_unknown = refuse_unknown
        self.values: dict[str, Node] = {}
        for entry in node.entries or ():
            self.values.setdefault(entry.key, entry.value)
        if node.entries is None and not node.is_nothing:
            file.problem(node.line, path, f"expected a mapping, got {node.describe()}")

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def key(self, name: str) -> str:
        """As messages call it."""
        return f"{self.path}.{name}" if self.path else name

    def problem(self, name: str, text: str) -> None:
        """Of a key that is there, or missing."""
        self.file.problem(self.values.get(name, self.node).line, self.key(name), text)

    def check_known(self, names: Iterable[str]) -> None:
        """Report keys that are not in `names`, and what may be meant."""
        names = list(names)
        for entry in self.node.entries or ():
            if entry.key in names:
                continue
            close = difflib.get_close_matches(entry.key, names, n=1)
            cure = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names)}"
            if self._refuse_unknown:
                self.file.problem(entry.line, self.key(entry.key), f"unknown key; {cure}")
            else:
                self.file.warn(entry.line, self.key(entry.key), f"unknown key, ignored; {cure}")

    def require(self, *names: str, reason: str = "") -> bool:
        """Whether all are there; those that are not are problems."""
        missing = [name for name in names if name not in self.values]
        for name in missing:
            self.problem(name, f"missing{reason}")
        return not missing

    def section(self, name: str) -> Section:
        return self._at(self.values.get(name, Node(self.node.line)), self.key(name))

    def sections(self, name: str) -> Sequence[Section]:
        """The items of a list of mappings."""
        return [self._at(item, f"{self.key(name)}.{n}") for n, item in enumerate(self.items(name))]

    def _at(self, node: Node, path: str) -> Section:
        return Section(self.file, node, path, refuse_unknown=self._refuse_unknown)

    def items(self, name: str) -> Sequence[Node]:
        node = self.values[name]
        if node.items is None:
            self.problem(name, f"expected a list, got {node.describe()}")
            return ()
        return node.items

    def get(self, name: str, kind: type[Kind], setting: Setting = ANYTHING) -> Kind | None:
        """The value of a key that is there; None after reporting what is wrong with it."""
        try:
            return cast("Kind", _SCALARS[kind](self.values[name], setting))
        except _Wrong as error:
            self.problem(name, str(error))
            return None

    def text(self, name: str) -> str:
        """ "" without that key."""
        return (self.get(name, str) or "") if name in self.values else ""

    def flag(self, name: str) -> bool:
        """False without that key."""
        return name in self.values and bool(self.get(name, bool))

    def secret(self, name: str) -> str:
        """What `name`, `name_file` or `name_env` gives; "" if none of them is there.

        A file's path is relative to the deployment. The value itself never gets into a message."""
        ways = [way for way in secret_keys(name) if way in self.values]
        for extra in ways[1:]:
            self.problem(extra, f"{self.key(ways[0])} is given too; keep one")
        if not ways:
            return ""
        way = ways[0]
        given = self.get(way, str, Setting("", secret=way == name))
        if way == name:
            self.file.warn_of_readers(self.file.path)
        if given is None or way == name:
            return given or ""
        if way.endswith("_env"):
            if given not in os.environ:
                self.problem(way, f"the environment has no {given}; set it, and start again")
            return os.environ.get(given, "")
        return self._secret_file(way, self.file.path.parent.parent / given)

    def _secret_file(self, name: str, path: Path) -> str:
        try:
            self.file.warn_of_readers(path)
            return path.read_text(encoding="utf-8").strip("\r\n")
        except OSError as error:
            self.problem(name, f"{path}: {error.strerror}")
        except UnicodeDecodeError:
            self.problem(name, f"{path} is not valid UTF-8")
        return ""


def secret_keys(name: str) -> tuple[str, str, str]:
    """Where a secret may come from: its value, a file that holds it, an environment variable."""
    return name, f"{name}_file", f"{name}_env"


# --- scalars ------------------------------------------------------------------------------------


class _Wrong(Exception):
    """What is wrong with a value."""


def _boolean(node: Node, _setting: Setting) -> Scalar:
    if not isinstance(node.scalar, bool):
        raise _Wrong(f"expected true or false, got {node.describe()}")
    return node.scalar


def _integer(node: Node, setting: Setting) -> Scalar:
    value = node.scalar
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _unexpected(node, "a whole number", setting)
    _check_range(node, value, setting)
    return value


def _number(node: Node, setting: Setting) -> Scalar:
    value = node.scalar
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise _unexpected(node, "a number", setting)
    _check_range(node, value, setting)
    return float(value)


def _text(node: Node, setting: Setting) -> Scalar:
    text, allowed = node.scalar, setting.allowed
    if not isinstance(text, str):
        got = "something else" if setting.secret else node.describe()
        quotes = "; put it in quotes" if node.is_scalar and node.text else ""
        raise _Wrong(f"expected text, got {got}{quotes}")
    if isinstance(allowed, OneOf) and text not in allowed.choices:
        raise _Wrong(f"unknown {allowed.noun} {text[:60]!r}; {allowed}")
    if isinstance(allowed, Characters) and not _fits(text, allowed):
        raise _Wrong(f"{text[:60]!r} is not valid; {allowed}")
    return text


_SCALARS = {str: _text, int: _integer, float: _number, bool: _boolean}


def _unexpected(node: Node, wanted: str, setting: Setting) -> _Wrong:
    allowed = f"; {setting.allowed}" if setting.allowed else ""
    return _Wrong(f"expected {wanted}, got {node.describe()}{allowed}")


def _check_range(node: Node, value: float, setting: Setting) -> None:
    allowed = setting.allowed
    if isinstance(allowed, Between) and not allowed.low <= value <= allowed.high:
        raise _Wrong(f"{node.text} is out of range; {allowed}")


def _fits(text: str, allowed: Characters) -> bool:
    return (
        allowed.low <= len(text) <= allowed.high
        and text.isprintable()
        and not any(character in allowed.without or character.isspace() for character in text)
    )
