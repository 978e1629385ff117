"""Checking nodes against what is allowed, and gathering every problem with its place."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pinlaterd.config.document import DocumentError, Node, parse
from pinlaterd.config.schema import Between, Characters, OneOf, Setting
from pinlaterd.errors import ConfigError

ANYTHING = Setting("")

ReadBytes = Callable[[Path], bytes]


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

    def problem(self, line: int, key: str, what: str) -> None:
        """`line` 0: about the file as a whole; `key` "": about no key."""
        self._problems.append((line, self._placed(line, key, what)))

    def warn(self, line: int, key: str, what: str) -> None:
        """The same of what does not keep the file from being used."""
        self._warn(self._placed(line, key, what))

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _placed(self, line: int, key: str, what: str) -> str:
        place = f"{self.path}:{line}" if line else f"{self.path}"
        return ": ".join(part for part in (place, key, what) if part)

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
                self.problem(
                    entry.line,
                    key,
                    f"given twice, first in line {first_lines[entry.key]}; keep one of them",
                )
            first_lines.setdefault(entry.key, entry.line)
            self._report_duplicates(entry.value, f"{key}.")
        for index, item in enumerate(node.items or ()):
            self._report_duplicates(item, f"{prefix}{index}.")

    def mapping(self, node: Node, key: str) -> Mapping[str, Node]:
        """The first value of each key of `node`; a problem if it is no mapping.

        Nothing at all (`queues:`) is an empty mapping."""
        if node.entries is None:
            if not node.is_scalar or node.scalar is not None:
                self.problem(node.line, key, f"expected a mapping, got {node.describe()}")
            return {}
        values: dict[str, Node] = {}
        for entry in node.entries:
            values.setdefault(entry.key, entry.value)
        return values

    def sequence(self, node: Node, key: str) -> Iterable[Node]:
        if node.items is None:
            self.problem(node.line, key, f"expected a list, got {node.describe()}")
            return ()
        return node.items

    def refuse_unknown(self, node: Node, prefix: str, known: Iterable[str]) -> None:
        for line, key, cure in _unknown(node, prefix, list(known)):
            self.problem(line, key, f"unknown key; {cure}")

    def warn_of_unknown(self, node: Node, prefix: str, known: Iterable[str]) -> None:
        """For PinLater's JSON: PinLater ignores keys that it does not know."""
        for line, key, cure in _unknown(node, prefix, list(known)):
            self.warn(line, key, f"unknown key, ignored; {cure}")

    # --- scalars: each returns None after reporting what is wrong ------------------------------

    def boolean(self, node: Node, key: str) -> bool | None:
        if isinstance(node.scalar, bool):
            return node.scalar
        self.problem(node.line, key, f"expected true or false, got {node.describe()}")
        return None

    def integer(self, node: Node, key: str, setting: Setting) -> int | None:
        value = node.scalar
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            self._expected(node, key, "a whole number", setting)
            return None
        return value if self._within(node, key, value, setting) else None

    def number(self, node: Node, key: str, setting: Setting) -> float | None:
        value = node.scalar
        if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
            self._expected(node, key, "a number", setting)
            return None
        return float(value) if self._within(node, key, value, setting) else None

    def text(self, node: Node, key: str, setting: Setting = ANYTHING) -> str | None:
        if not isinstance(node.scalar, str):
            got = "something else" if setting.secret else node.describe()
            quotes = "; put it in quotes" if node.is_scalar and node.text else ""
            self.problem(node.line, key, f"expected text, got {got}{quotes}")
            return None
        allowed = setting.allowed
        if isinstance(allowed, OneOf) and node.scalar not in allowed.choices:
            self.problem(node.line, key, f"unknown value {node.scalar[:60]!r}; {allowed}")
            return None
        if isinstance(allowed, Characters) and not _fits(node.scalar, allowed):
            self.problem(node.line, key, f"{node.scalar[:60]!r} is not valid; {allowed}")
            return None
        return node.scalar

    def secret(self, values: Mapping[str, Node], name: str, prefix: str, base: Path) -> str | None:
        """What `name`, `name_file` or `name_env` gives; None if none of them is there.

        A file's path is relative to `base`. The value itself never gets into a message."""
        ways = [way for way in secret_keys(name) if way in values]
        for extra in ways[1:]:
            self.problem(
                values[extra].line, f"{prefix}{extra}", f"{prefix}{ways[0]} is given too; keep one"
            )
        if not ways:
            return None
        way, key, node = ways[0], f"{prefix}{ways[0]}", values[ways[0]]
        given = self.text(node, key, Setting("", secret=way == name))
        if way == name:
            self._warn_of_readers(self.path)
        if given is None or way == name:
            return given
        if way.endswith("_env"):
            if given not in os.environ:
                self.problem(
                    node.line, key, f"the environment has no {given}; set it, and start anew"
                )
            return os.environ.get(given, "")
        try:
            self._warn_of_readers(base / given)
            return (base / given).read_text(encoding="utf-8").strip("\r\n")
        except OSError as error:
            self.problem(node.line, key, f"{base / given}: {error.strerror}")
        except UnicodeDecodeError:
            self.problem(node.line, key, f"{base / given} is not valid UTF-8")
        return None

    def _warn_of_readers(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            if path.stat().st_mode & stat.S_IROTH:
                self._warn(f"{path}: holds a password, and others can read it; chmod 600 {path}")

    def _expected(self, node: Node, key: str, what: str, setting: Setting) -> None:
        allowed = f"; {setting.allowed}" if setting.allowed else ""
        self.problem(node.line, key, f"expected {what}, got {node.describe()}{allowed}")

    def _within(self, node: Node, key: str, value: float, setting: Setting) -> bool:
        allowed = setting.allowed
        if isinstance(allowed, Between) and not allowed.low <= value <= allowed.high:
            self.problem(node.line, key, f"{node.text} is out of range; {allowed}")
            return False
        return True


def _unknown(node: Node, prefix: str, names: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """The line of each unknown key, the key, and what may be meant."""
    for entry in node.entries or ():
        if entry.key not in names:
            close = difflib.get_close_matches(entry.key, names, n=1)
            cure = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names)}"
            yield entry.line, f"{prefix}{entry.key}", cure


def secret_keys(name: str) -> tuple[str, str, str]:
    """Where a secret may come from: its value, a file that holds it, an environment variable."""
    return name, f"{name}_file", f"{name}_env"


def raise_problems(readers: Iterable[FileReader]) -> None:
    problems = [problem for reader in readers for problem in reader.problems]
    if problems:
        raise ConfigError(problems)


def _fits(text: str, allowed: Characters) -> bool:
    return (
        allowed.low <= len(text) <= allowed.high
        and text.isprintable()
        and not any(character in allowed.without or character.isspace() for character in text)
    )
