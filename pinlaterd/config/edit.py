"""The edits of configuration files that commands make, so that file and service never disagree.

A person's file stays a person's file: all that a change does not concern stays as it is, and so do
mode and owner of the file. A change is checked by the loader before it takes the file's place, all
at once; readers find the old file or the new one. Nothing is changed where the configuration has
mistakes already, or where the file was changed by others meanwhile. All edits are safe to repeat.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pinlaterd.config.active import active_files
from pinlaterd.config.document import Entry, Node, parse
from pinlaterd.config.edit_text import Text, Value
from pinlaterd.config.layout import QUEUES_FILE, SHARDS_FILE, write_beside
from pinlaterd.config.load import (
    ABANDON,
    LIMIT,
    PINLATERS_LIMIT,
    Form,
    form_of,
    load_config,
    pinlater_mysql_shards,
)
from pinlaterd.config.schema import Address, Config
from pinlaterd.errors import ConfigError


def edit_file(etc: Path, name: str, change: Callable[[bytes, Config], bytes]) -> bool:
    """Have `change` make what the file `name` of `etc` should hold of what it holds, and of what
    all files together mean. Returns whether that made a difference.

    Raises ConfigError, with nothing changed, if there are mistakes in the configuration before or
    after, or if the file can't be written. An optional file that is missing holds b""; one that
    said something, and has gone or is empty by now, is not written."""
    path = etc / name
    with _open_folder(etc) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX)  # keeps other commands that edit out of it
        config = load_config(etc)
        before = _read(path) if name in config.files else _read_if_there(path)
        if not before.strip() and name in active_files(etc.parent):
            problem = "the file is gone or empty, and what it said stays active"
            cure = "put it back first, or write a comment into it if it is to say nothing"
            raise ConfigError([f"{path}: {problem}; {cure}"])
        after = change(before, config)
        if after == before:
            return False
        config = load_config(etc, lambda read: after if read == path else read.read_bytes())
        if change(after, config) != after:
            raise ConfigError([f"{path}: can't be edited by a program; change it by hand"])
        _replace(path, before, after)
    return True


# --- shards.yaml ------------------------------------------------------------------------------


class _Shards(NamedTuple):
    """One entry of shards.yaml. PinLater's form for MySQL has some that are several shards."""

    names: Sequence[str]
    settings: Entry
    dequeue_only: str  # what that setting is called here


def _entries(root: Node, databases: int) -> Iterator[_Shards]:
    """`databases`: so many shards are in each entry of PinLater's form for MySQL."""
    form, listed = form_of(root), root.get("shards")
    if form is Form.PINLATER_MYSQL:
        for entry in root.entries or ():
            if entry.key != ABANDON:
                yield _Shards(pinlater_mysql_shards(entry.key, databases), entry, "dequeueOnly")
    elif form is Form.PINLATER_REDIS:
        for item in (listed.items or ()) if listed is not None else ():
            name, settings = item.get("name"), item.entry("shardConfig")
            if name is not None and settings is not None:
                yield _Shards([name.text], settings, "dequeueOnly")
    else:
        for entry in (listed.entries or ()) if listed is not None else ():
            yield _Shards([entry.key], entry, "dequeue_only")


def shards_alike(etc: Path, shard: str) -> Sequence[str]:
    """The shards whose settings are one entry with those of `shard`, it among them.

    Raises ConfigError if there is no such shard."""
    config = load_config(etc)
    path = etc / SHARDS_FILE
    if shard not in config.shards:
        names = ", ".join(config.shards)
        raise ConfigError([f"{path}: there is no shard {shard!r}; there are: {names}"])
    root = parse(path.read_bytes())
    entries = _entries(root, config.server.mysql_num_db_per_queue) if root is not None else ()
    return next((entry.names for entry in entries if shard in entry.names), [shard])


def set_servers(etc: Path, shards: Collection[str], *, master: Address, slave: Address) -> bool:
    """Give shards other servers. Returns whether the file had to be changed; so do the others."""

    def change(text: Text, entry: _Shards) -> None:
        _set_address(text, entry.settings, "master", master)
        _set_address(text, entry.settings, "slave", slave)

    return _edit_entries(etc, shards, change)


def set_dequeue_only(etc: Path, shard: str, *, on: bool) -> bool:
    """For all shards of its entry."""

    def change(text: Text, entry: _Shards) -> None:
        found = entry.settings.value.get(entry.dequeue_only)
        if found is not None:
            text.replace(found, on)
        elif on:
            text.add(entry.settings, entry.dequeue_only, on, first=True)

    return _edit_entries(etc, [shard], change)


def _edit_entries(
    etc: Path, shards: Collection[str], change: Callable[[Text, _Shards], None]
) -> bool:
    """`change` each entry that stands for any of `shards`."""

    def changed(before: bytes, config: Config) -> bytes:
        text = Text(before)
        assert text.root is not None, "the loader found shards in it"
        for entry in _entries(text.root, config.server.mysql_num_db_per_queue):
            if not set(entry.names).isdisjoint(shards):
                change(text, entry)
        return text.render()

    return edit_file(etc, SHARDS_FILE, changed)


def _set_address(text: Text, settings: Entry, key: str, address: Address) -> None:
    found = settings.value.get(key)
    if found is not None and found.entries:
        for name, value in address._asdict().items():
            part = found.get(name)
            assert part is not None, "the loader requires it"
            text.replace(part, value)
    elif found is not None:
        text.replace(found, address._asdict())
    else:
        text.add(settings, key, address._asdict())


def add_shard(etc: Path, shard: str, settings: Mapping[str, Value]) -> bool:
    """At the end of the file; False if it is there with just these settings."""
    path = etc / SHARDS_FILE

    def changed(before: bytes, config: Config) -> bytes:
        text, shards = _in_our_form(path, before)
        found = shards.value.get(shard)
        if found is not None and _plain(found) == settings:
            return before
        if shard in config.shards:
            raise ConfigError(
                [f"{path}: shard {shard!r} is there already; change it there, or choose another"]
            )
        _forget_abandoned(text, shard)
        text.add(shards, shard, settings)
        return text.render()

    return edit_file(etc, SHARDS_FILE, changed)


def remove_shard(etc: Path, shard: str, *, abandon: bool) -> bool:
    """`abandon`: with the jobs that it holds."""
    path = etc / SHARDS_FILE

    def changed(before: bytes, config: Config) -> bytes:
        text, shards = _in_our_form(path, before)
        if shards.value.get(shard) is not None:
            if len(config.shards) == 1:
                raise ConfigError([f"{path}: {shard!r} is the only shard; add another one first"])
            text.remove_key(shards, shard)
        if abandon:
            _abandon(text, shard)
        return text.render()

    return edit_file(etc, SHARDS_FILE, changed)


def forget_abandoned(etc: Path, shard: str) -> bool:
    """The shard has gone: `abandon` need not name it any more."""

    def changed(before: bytes, _config: Config) -> bytes:
        text = Text(before)
        _forget_abandoned(text, shard)
        return text.render()

    return edit_file(etc, SHARDS_FILE, changed)


def _in_our_form(path: Path, before: bytes) -> tuple[Text, Entry]:
    """The text, and its entry `shards`."""
    text = Text(before)
    assert text.root is not None, "the loader found shards in it"
    form = form_of(text.root)
    if form is not Form.OURS:
        raise ConfigError(
            [f"{path}: has {form.value} form; add and remove shards there by hand, it acts soon"]
        )
    shards = text.root.entry("shards")
    assert shards is not None, "the loader requires it"
    return text, shards


def _plain(node: Node) -> object:
    if node.entries is not None:
        return {entry.key: _plain(entry.value) for entry in node.entries}
    return node.scalar


def _abandoned(text: Text) -> tuple[Entry | None, list[str]]:
    entry = text.root.entry(ABANDON) if text.root is not None else None
    return entry, [item.text for item in (entry.value.items or ())] if entry is not None else []


def _abandon(text: Text, shard: str) -> None:
    entry, names = _abandoned(text)
    if entry is None:
        text.add(None, ABANDON, [shard])
    elif shard not in names:
        text.append(entry, shard)


def _forget_abandoned(text: Text, shard: str) -> None:
    entry, names = _abandoned(text)
    if names == [shard]:
        text.remove_key(None, ABANDON)
    elif entry is not None and shard in names:
        text.remove(entry, names.index(shard))


# --- queues.yaml ------------------------------------------------------------------------------


class LimitSettings(NamedTuple):
    """What queues.yaml says of a queue's rate."""

    max_jobs_per_second: float | None
    paused: bool


def limit_settings(etc: Path, queue: str) -> LimitSettings:
    """As the file has it: the limit is the one that holds when the queue is not paused."""
    queues = _Queues(Text(_read_if_there(etc / QUEUES_FILE)))
    limit, paused = queues.find(queue, LIMIT), queues.find(queue, "paused")
    rate = limit.scalar if limit is not None else None
    assert rate is None or isinstance(rate, int | float)
    return LimitSettings(rate, paused is not None and bool(paused.scalar))


def set_limit(etc: Path, queue: str, jobs_per_second: float | None) -> bool:
    """None: no limit. Raises ConfigError."""
    value = jobs_per_second
    if value is not None and value.is_integer():
        value = int(value)
    return _edit_queue(etc, queue, LIMIT, value)


def set_paused(etc: Path, queue: str, *, paused: bool) -> bool:
    """The limit stays in the file, and holds again when the queue is resumed."""
    return _edit_queue(etc, queue, "paused", True if paused else None)


def _edit_queue(etc: Path, queue: str, name: str, value: float | None) -> bool:
    def changed(before: bytes, _config: Config) -> bytes:
        text = Text(before)
        if value is None:
            _Queues(text).unset(queue, name)
        else:
            _Queues(text).set(queue, name, value)
        return text.render()

    return edit_file(etc, QUEUES_FILE, changed)


class _Queues:
    """queues.yaml in either form, to be changed. Settings have our names here."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._listed = text.root.entry("queues") if text.root is not None else None
        self._items = self._listed.value.items if self._listed is not None else None

    def find(self, queue: str, name: str) -> Node | None:
        settings = self._settings(queue)
        return settings.value.get(self._key(name)) if settings is not None else None

    def set(self, queue: str, name: str, value: float) -> None:
        key, found, settings = self._key(name), self.find(queue, name), self._settings(queue)
        if found is not None:
            self._text.replace(found, value)
        elif settings is not None:
            self._text.add(settings, key, value, first=True)
        elif self._listed is None:
            self._text.add(None, "queues", {queue: {key: value}})
        elif self._items is None:
            self._text.add(self._listed, queue, {key: value})
        elif (index := self._index(queue)) is not None:
            item = self._items[index]
            self._text.add(Entry("", item.line, item, item.start), "queueConfig", {key: value})
        else:
            self._text.append(self._listed, {"name": queue, "queueConfig": {key: value}})

    def unset(self, queue: str, name: str) -> None:
        """And remove the queue if it has no other setting."""
        settings, index = self._settings(queue), self._index(queue)
        if settings is None or self.find(queue, name) is None:
            return
        if len(settings.value.entries or ()) > 1:
            self._text.remove_key(settings, self._key(name))
        elif index is not None:
            self._text.remove(self._listed, index)
        else:
            self._text.remove_key(self._listed, queue)

    def _key(self, name: str) -> str:
        return PINLATERS_LIMIT if self._items is not None and name == LIMIT else name

    def _settings(self, queue: str) -> Entry | None:
        if self._items is None:
            return self._listed.value.entry(queue) if self._listed is not None else None
        index = self._index(queue)
        return None if index is None else self._items[index].entry("queueConfig")

    def _index(self, queue: str) -> int | None:
        names = [item.get("name") for item in self._items or ()]
        found = (n for n, name in enumerate(names) if name is not None and name.text == queue)
        return next(found, None)


# --- files ------------------------------------------------------------------------------------


@contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from error
    try:
        yield descriptor
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
        temporary = write_beside(target, after, durably=True, like=status)
        try:
            if _read_if_there(target) != before:
                raise ConfigError([f"{path}: was changed by somebody else meanwhile; try again"])
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)
        with _open_folder(target.parent) as folder:
            os.fsync(folder)
    except OSError as error:
        raise ConfigError([f"{path}: can't be written: {error.strerror}"]) from error
