"""The edits of etc/shards.yaml that commands make: dequeue-only, another shard, one less.

All are safe to repeat. What a program can't write in PinLater's forms of the file is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from pinlaterd.config.document import parse
from pinlaterd.config.edit import Settings, ShardsDocument, Text, edit_file, edit_shards
from pinlaterd.config.edit_lines import is_in_lines, put_first, with_entry, without_entry
from pinlaterd.config.layout import SHARDS_FILE
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import Config
from pinlaterd.config.shards_file import ABANDON, Form, form_of, pinlater_mysql_shards
from pinlaterd.errors import ConfigError

Value = str | int | bool | Mapping[str, str | int]


def shards_alike(etc: Path, shard: str) -> Sequence[str]:
    """The shards whose settings are one entry with those of `shard`, it among them.

    Raises ConfigError if there is no such shard."""
    config = load_config(etc)
    path = etc / SHARDS_FILE
    if shard not in config.shards:
        names = ", ".join(config.shards)
        raise ConfigError([f"{path}: there is no shard {shard!r}; there are: {names}"])
    root = parse(path.read_bytes())
    if root is not None and form_of(root) is Form.PINLATER_MYSQL:
        for entry in root.entries or ():
            names_there = pinlater_mysql_shards(entry.key, config.server.mysql_num_db_per_queue)
            if shard in names_there:
                return names_there
    return [shard]


def set_dequeue_only(etc: Path, shard: str, *, on: bool) -> bool:
    """For all shards of its entry. Returns whether the file had to be changed."""

    def change(document: ShardsDocument) -> None:
        for entry in document.entries_of([shard]):
            if on or entry.dequeue_only in entry.settings:
                put_first(entry.settings, entry.dequeue_only, on)

    return edit_shards(etc, change)


def add_shard(etc: Path, shard: str, settings: Mapping[str, Value]) -> bool:
    """At the end of the file; False if it is there with just these settings."""
    path = etc / SHARDS_FILE

    def changed(before: bytes, config: Config) -> bytes:
        text = _in_our_form(path, before)
        shards = text.tree["shards"]
        key = _key_like(shards, shard)
        if key in shards and _plain(shards[key]) == settings:
            return before
        if shard in config.shards:
            raise ConfigError(
                [f"{path}: shard {shard!r} is there already; change it there, or choose another"]
            )
        if _forget_abandoned(text.tree, shard):
            return changed(text.render(), config)
        entry = _like(text.tree, settings)
        if is_in_lines(shards):
            return with_entry(before, shards, key, entry)
        shards[key] = entry
        return text.render()

    return edit_file(etc, SHARDS_FILE, changed)


def remove_shard(etc: Path, shard: str, *, abandon: bool) -> bool:
    """Returns whether the file had to be changed. `abandon`: with the jobs that it holds."""
    path = etc / SHARDS_FILE

    def changed(before: bytes, config: Config) -> bytes:
        text = _in_our_form(path, before)
        key = _key_like(text.tree["shards"], shard)
        if key in text.tree["shards"]:
            if len(config.shards) == 1:
                raise ConfigError([f"{path}: {shard!r} is the only shard; add another one first"])
            if is_in_lines(text.tree["shards"]):
                text = Text.of(path, without_entry(before, text.tree["shards"], key))
            else:
                del text.tree["shards"][key]
        if abandon and shard not in map(str, text.tree.get(ABANDON) or ()):
            listed = text.tree.setdefault(ABANDON, _list_like(text.tree))
            listed.append(key)
        return text.render()

    return edit_file(etc, SHARDS_FILE, changed)


def forget_abandoned(etc: Path, shard: str) -> bool:
    """The shard has gone: `abandon` need not name it any more."""
    path = etc / SHARDS_FILE

    def changed(before: bytes, _config: Config) -> bytes:
        text = Text.of(path, before)
        return text.render() if _forget_abandoned(text.tree, shard) else before

    return edit_file(etc, SHARDS_FILE, changed)


def _in_our_form(path: Path, before: bytes) -> Text:
    node = parse(before)
    assert node is not None, "the loader found shards in it"
    form = form_of(node)
    if form is not Form.OURS:
        raise ConfigError(
            [f"{path}: has {form.value} form; add and remove shards there by hand, it acts soon"]
        )
    return Text.of(path, before)


def _key_like(shards: Mapping[Any, Any], shard: str) -> str | int:
    """What the shard is called in the tree: 4, where names are numbers without quotes."""
    for key in shards:
        if str(key) == shard:
            found: str | int = key
            return found
    is_number = shard.isdecimal() and str(int(shard)) == shard
    return int(shard) if is_number and all(isinstance(key, int) for key in shards) else shard


def _plain(settings: Settings | None) -> Mapping[str, Value]:
    return {
        key: dict(value) if isinstance(value, Mapping) else value
        for key, value in (settings or {}).items()
    }


def _like(tree: Settings, settings: Mapping[str, Value]) -> Any:
    """`settings` as the tree has them: JSON's, or YAML's with addresses on one line."""
    if not isinstance(tree, CommentedMap):
        return dict(settings)
    made = CommentedMap()
    for key, value in settings.items():
        if isinstance(value, Mapping):
            address = CommentedMap(value)
            address.fa.set_flow_style()
            made[key] = address
        else:
            made[key] = value
    return made


def _list_like(tree: Settings) -> list[object]:
    if not isinstance(tree, CommentedMap):
        return []
    made = CommentedSeq()
    made.fa.set_flow_style()
    return made


def _forget_abandoned(tree: Settings, shard: str) -> bool:
    listed = tree.get(ABANDON) or []
    left = [name for name in listed if str(name) != shard]
    if len(left) == len(listed):
        return False
    if left:
        listed[:] = left
    else:
        del tree[ABANDON]
    return True
