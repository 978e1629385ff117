"""Changing the configuration files themselves, so that file and service never disagree.

A person's file stays a person's file: comments, order, quotes and indentation stay, JSON stays
JSON, and mode and owner of the file stay. A change is checked by the loader before it takes the
file's place, all at once; whoever reads meanwhile finds the old file or the new one. Nothing is
changed where the configuration has mistakes already, or where the file was changed by others
meanwhile.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import ScalarString

from pinlaterd.config.document import Node, parse
from pinlaterd.config.in_force import files_in_force
from pinlaterd.config.layout import SHARDS_FILE
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import Address, Config
from pinlaterd.config.shards_file import ABANDON, Form, form_of, pinlater_mysql_shards
from pinlaterd.errors import ConfigError

_BYTE_ORDER_MARK = "\ufeff"
# A key at the margin, then comments and empty lines, then what is below it.
_INDENTED_KEY = re.compile(
    r"^[^\s#-][^\n]*:[ \t]*(?:#[^\n]*)?\n(?:[ \t]*(?:#[^\n]*)?\n)*( +)[^\s#-]", re.MULTILINE
)
_DASH = re.compile(r"^( *)- ( *)\S", re.MULTILINE)
_NEVER_WRAPPED = 1 << 20  # characters of a line
_DEFAULT_INDENT = 2
_NEW_FILE_MODE = 0o600

Settings = MutableMapping[str, Any]


class Entry(NamedTuple):
    """One entry of shards.yaml. PinLater's form for MySQL has some that are several shards."""

    shards: Sequence[str]
    place: Any  # the mapping or list that the entry's settings are in
    key: Any
    dequeue_only: str  # what that setting is called here

    @property
    def settings(self) -> Settings:
        """To be changed in place."""
        if self.place[self.key] is None:  # nothing but a name, `1:`
            self.place[self.key] = CommentedMap()
        settings: Settings = self.place[self.key]
        return settings


class ShardsDocument:
    """shards.yaml in whichever form, as a tree to be changed."""

    def __init__(self, node: Node, tree: Any, databases: int) -> None:
        """`node`: what the loader reads; `tree`: the same, to be written; `databases`: that many
        shards are in each entry of PinLater's for MySQL."""
        self._form = form_of(node)
        self._entries = list(self._read_entries(node, tree, databases))

    def _read_entries(self, node: Node, tree: Any, databases: int) -> Iterator[Entry]:
        """By position: a key such as 001 is text to the loader, and a number to others."""
        listed = node.get("shards")
        if self._form is Form.PINLATER_MYSQL:
            for entry, key in zip(node.entries or (), list(tree), strict=True):
                if entry.key != ABANDON:
                    names = pinlater_mysql_shards(entry.key, databases)
                    yield Entry(names, tree, key, "dequeueOnly")
        elif self._form is Form.PINLATER_REDIS:
            assert listed is not None
            for item, shard in zip(listed.items or (), tree["shards"], strict=True):
                name = item.get("name")
                assert name is not None
                yield Entry([name.text], shard, "shardConfig", "dequeueOnly")
        else:
            assert listed is not None
            shards = tree["shards"]
            for entry, key in zip(listed.entries or (), list(shards), strict=True):
                yield Entry([entry.key], shards, key, "dequeue_only")

    def entries_of(self, shards: Collection[str]) -> list[Entry]:
        """The entries that stand for any of these shards, in the order of the file."""
        return [entry for entry in self._entries if not set(entry.shards).isdisjoint(shards)]


def set_servers(etc: Path, shards: Collection[str], *, master: Address, slave: Address) -> bool:
    """Give shards other servers. Returns whether the file had to be changed. Raises ConfigError."""

    def change(document: ShardsDocument) -> None:
        for entry in document.entries_of(shards):
            _set_address(entry.settings, "master", master)
            _set_address(entry.settings, "slave", slave)

    return edit_shards(etc, change)


def edit_shards(etc: Path, change: Callable[[ShardsDocument], None]) -> bool:
    """Have `change` change etc/shards.yaml. Returns whether that made a difference.

    Raises ConfigError, with nothing changed, if there are mistakes in the configuration before or
    after, or if the file can't be written."""

    def changed(before: bytes, config: Config) -> bytes:
        node = parse(before)
        assert node is not None, "the loader found shards in it"
        text = Text.of(etc / SHARDS_FILE, before)
        change(ShardsDocument(node, text.tree, config.server.mysql_num_db_per_queue))
        return text.render()

    return edit_file(etc, SHARDS_FILE, changed)


def edit_file(etc: Path, name: str, change: Callable[[bytes, Config], bytes]) -> bool:
    """Have `change` make what the file `name` of `etc` should hold of what it holds, and of what
    all files together mean. As `edit_shards`. An optional file that is missing holds b""; one that
    said something, and has gone or is empty by now, is not begun anew."""
    path = etc / name
    with _alone(etc):
        config = load_config(etc)
        before = _read(path) if name in config.files else _read_if_there(path)
        if not before.strip() and name in files_in_force(etc.parent):
            problem = "the file is gone or empty, and what it said stays in force"
            cure = "put it back first, or write a comment into it if it is to say nothing"
            raise ConfigError([f"{path}: {problem}; {cure}"])
        after = change(before, config)
        if after == before:
            return False
        load_config(etc, lambda read: after if read == path else read.read_bytes())
        _replace(path, before, after)
    return True


def _set_address(settings: Settings, key: str, address: Address) -> None:
    old = settings.get(key)
    if not isinstance(old, MutableMapping):
        old = settings[key] = type(settings)()
        if isinstance(old, CommentedMap):
            old.fa.set_flow_style()
    host = old.get("host")
    old["host"] = type(host)(address.host) if isinstance(host, ScalarString) else address.host
    old["port"] = address.port


# --- text and tree ----------------------------------------------------------------------------


class Text:
    """A file's text as a tree that remembers how it was written."""

    def __init__(self, text: str) -> None:
        self._text = text.removeprefix(_BYTE_ORDER_MARK)
        self._mark = _BYTE_ORDER_MARK if text.startswith(_BYTE_ORDER_MARK) else ""
        self._lead = ""
        self._yaml: YAML | None = None
        try:
            self.tree = json.loads(self._text)
        except ValueError:
            self._yaml = _yaml_like(self._text)
            self.tree = self._yaml.load(self._text)
        if self.tree is None:  # nothing but comments, which no tree holds
            self.tree = CommentedMap()
            if self._text and not self._text.endswith("\n"):
                self._text += "\n"
            self._lead = self._text
        self._unchanged = self._written()

    @classmethod
    def of(cls, path: Path, data: bytes) -> Text:
        try:
            return cls(data.decode("utf-8"))
        except YAMLError as error:
            raise ConfigError([f"{path}: can't be edited by a program: {error}"]) from error

    def render(self) -> bytes:
        """What the file should hold now, with all as it was that was not changed."""
        before = (self._mark + self._text).encode("utf-8")
        return _as_it_was(before, self._unchanged, self._written())

    def _written(self) -> bytes:
        text = self._json() if self._yaml is None else self._dump(self._yaml)
        if "\r\n" in self._text:
            text = text.replace("\r\n", "\n").replace("\n", "\r\n")
        return (self._mark + text).encode("utf-8")

    def _dump(self, yaml: YAML) -> str:
        out = io.StringIO()
        if self.tree or not self._lead:
            yaml.dump(self.tree, out)
        return self._lead + out.getvalue()

    def _json(self) -> str:
        indent = re.search(r'\n([ \t]+)"', self._text)
        colon = ": " if re.search(r'"\s*:\s', self._text) else ":"
        comma = "," if indent or not re.search(r",\s", self._text) else ", "
        text = json.dumps(
            self.tree,
            indent=indent[1] if indent else None,
            separators=(comma, colon),
            ensure_ascii=self._text.isascii(),
        )
        return text + self._text[len(self._text.rstrip()) :]


def _as_it_was(before: bytes, unchanged: bytes, after: bytes) -> bytes:
    """`after`, but with the lines of `before` where it does not differ from `unchanged`, which is
    what the writer makes of `before`: blanks within lines, for one, it does not keep."""
    old, same, new = (text.splitlines(keepends=True) for text in (before, unchanged, after))
    if len(old) != len(same):
        return after
    lines: list[bytes] = []
    matcher = difflib.SequenceMatcher(None, same, new, autojunk=False)
    for kind, start, end, new_start, new_end in matcher.get_opcodes():
        lines += old[start:end] if kind == "equal" else new[new_start:new_end]
    return b"".join(lines)


def _yaml_like(text: str) -> YAML:
    """Writes as `text` is written, as far as that can be told."""
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = _NEVER_WRAPPED
    yaml.explicit_start = bool(re.search(r"^---", text, re.MULTILINE))
    mapping, dash = _INDENTED_KEY.search(text), _DASH.search(text)
    indent = len(mapping[1]) if mapping else _DEFAULT_INDENT
    offset = len(dash[1]) if dash else 0
    sequence = offset + 2 + len(dash[2]) if dash else indent
    yaml.indent(mapping=indent, sequence=sequence, offset=offset)
    return yaml


# --- files ------------------------------------------------------------------------------------


@contextmanager
def _alone(etc: Path) -> Iterator[None]:
    """Keep other commands that edit out of the folder meanwhile."""
    try:
        descriptor = os.open(etc, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError([f"{etc}: {error.strerror}"]) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{path}: can't be read: {error.strerror}"]) from error


def _read_if_there(path: Path) -> bytes:
    return _read(path) if path.exists() else b""


def _replace(path: Path, before: bytes, after: bytes) -> None:
    """Put `after` in the file's place, durably. A link stays one: what it names is replaced. A file
    that was missing is made for its owner only."""
    target = path.resolve()
    try:
        status = target.stat() if target.exists() else None
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(after)
                mode = _NEW_FILE_MODE if status is None else status.st_mode & 0o7777
                os.fchmod(descriptor, mode)
                if status is not None and not _is_ours(status):
                    os.fchown(descriptor, status.st_uid, status.st_gid)
                file.flush()
                os.fsync(descriptor)
            if _read_if_there(target) != before:
                raise ConfigError([f"{path}: was changed by somebody else meanwhile; try again"])
            Path(temporary).rename(target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
        _sync_folder(target.parent)
    except OSError as error:
        raise ConfigError([f"{path}: can't be written: {error.strerror}"]) from error


def _is_ours(status: os.stat_result) -> bool:
    return (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
