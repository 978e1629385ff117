"""The edits of etc/queues.yaml that commands make: a queue's rate limit, and its pause.

All are safe to repeat. The file may be missing, and may have PinLater's form.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from ruamel.yaml.comments import CommentedMap

from pinlaterd.config.document import Node, parse
from pinlaterd.config.edit import Settings, Text, edit_file
from pinlaterd.config.edit_lines import emptied, is_in_lines, put_first, with_entry, without_entry
from pinlaterd.config.layout import QUEUES_FILE
from pinlaterd.config.schema import Config


class _Names(NamedTuple):
    """What settings are called in the file's form."""

    limit: str
    paused: str


_OURS, _PINLATERS = _Names("max_jobs_per_second", "paused"), _Names("maxJobsPerSecond", "paused")


class LimitSettings(NamedTuple):
    """What queues.yaml says of a queue's rate."""

    max_jobs_per_second: float | None
    paused: bool


def settings_of(etc: Path, queue: str) -> LimitSettings:
    """As the file has it: the limit is the one that holds when the queue is not paused."""
    path = etc / QUEUES_FILE
    before = path.read_bytes() if path.exists() else b""
    document = _QueuesDocument(parse(before), Text.of(path, before).tree)
    found = document.settings(queue) or {}
    names = document.names
    return LimitSettings(found.get(names.limit), bool(found.get(names.paused)))


def set_limit(etc: Path, queue: str, jobs_per_second: float | None) -> bool:
    """None: no limit. Returns whether the file had to be changed. Raises ConfigError."""
    value = jobs_per_second
    if value is not None and value.is_integer():
        value = int(value)
    return _edit(etc, queue, lambda names: (names.limit, value))


def set_paused(etc: Path, queue: str, *, paused: bool) -> bool:
    """The limit stays in the file, and holds again when the queue is resumed."""
    return _edit(etc, queue, lambda names: (names.paused, True if paused else None))


def _edit(etc: Path, queue: str, setting: Any) -> bool:
    path = etc / QUEUES_FILE

    def changed(before: bytes, _config: Config) -> bytes:
        text = Text.of(path, before)
        document = _QueuesDocument(parse(before), text.tree)
        name, value = setting(document.names)
        found = document.settings(queue)
        if value is None:
            if found is None or name not in found:
                return before
            return _without(before, text, document, queue, name)
        if found is not None:
            put_first(found, name, value)
        elif document.is_in_lines:
            entry = CommentedMap({name: value})
            return with_entry(before, text.tree["queues"], queue, entry)
        else:
            document.add(queue)[name] = value
        return text.render()

    return edit_file(etc, QUEUES_FILE, changed)


def _without(before: bytes, text: Text, document: _QueuesDocument, queue: str, name: str) -> bytes:
    """What is left without that setting, and without the queue if it has no other."""
    found = document.settings(queue)
    assert found is not None
    if len(found) > 1:
        if is_in_lines(found):
            return without_entry(before, found, name)
        del found[name]
        return text.render()
    if document.is_in_lines:
        return document.without_lines_of(queue, before)
    document.remove(queue)
    return text.render()


class _QueuesDocument:
    """queues.yaml in either form, as a tree to be changed."""

    def __init__(self, node: Node | None, tree: Settings) -> None:
        """`node`: what the loader reads; `tree`: the same, to be written."""
        self._tree = tree
        self._node = node.get("queues") if node is not None else None
        self._listed: Any = tree.get("queues")
        self.names = _PINLATERS if isinstance(self._listed, MutableSequence) else _OURS

    @property
    def is_in_lines(self) -> bool:
        return is_in_lines(self._listed)

    def settings(self, queue: str) -> Settings | None:
        for _, found in self._found(queue):
            return found
        return None

    def add(self, queue: str) -> Settings:
        made: Settings = {} if not isinstance(self._tree, CommentedMap) else CommentedMap()
        if self.names is _PINLATERS:
            entry = type(made)()
            entry["name"], entry["queueConfig"] = queue, made
            self._listed.append(entry)
            return made
        if not self._listed:  # `queues: {}`: what is put into braces would stay in them
            self._tree["queues"] = self._listed = type(made)()
        self._listed[queue] = made
        return made

    def remove(self, queue: str) -> None:
        for key, _ in self._found(queue):
            del self._listed[key]
            break

    def without_lines_of(self, queue: str, text: bytes) -> bytes:
        """`text` without that queue, where the queues are below each other."""
        key = next(key for key, _ in self._found(queue))
        left = without_entry(text, self._listed, key)
        return left if len(self._listed) > 1 else emptied(left, self._tree, "queues")

    def _found(self, queue: str) -> Iterator[tuple[Any, Settings]]:
        """Its key or index, and its settings. By position: a name such as 001 is text to the
        loader, and a number to others."""
        if self._node is None or not self._listed:
            return
        if self.names is _PINLATERS:
            for index, item in enumerate(self._node.items or ()):
                name = item.get("name")
                if name is not None and name.text == queue:
                    config = self._listed[index].setdefault("queueConfig", {})
                    yield index, cast("Settings", config)
            return
        for entry, key in zip(self._node.entries or (), list(self._listed), strict=True):
            if entry.key == queue:
                if self._listed[key] is None:  # `mail:` and nothing
                    self._listed[key] = type(self._tree)()
                yield key, self._listed[key]
