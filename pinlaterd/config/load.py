"""The configuration files to a Config, or all that is wrong with all of them at once.

etc/pinlaterd.yaml    optional: the server's settings
etc/shards.yaml       required: the shards
etc/queues.yaml       optional: settings of single queues; PinLater's JSON is accepted
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from pinlaterd.config.document import Node
from pinlaterd.config.layout import CONFIG_FILES, QUEUES_FILE, SERVER_FILE, SHARDS_FILE
from pinlaterd.config.password import is_hash
from pinlaterd.config.reading import FileReader, ReadBytes, raise_problems
from pinlaterd.config.schema import (
    HASH_ENVIRONMENT,
    Config,
    QueueSettings,
    ServerSettings,
    Setting,
    default_queue_settings,
    settings_of,
)
from pinlaterd.config.shards_file import read_shards
from pinlaterd.errors import ConfigError
from pinlaterd.model import QUEUE_NAME

_HASH = "admin_password_hash"
_HASH_FILE = f"{_HASH}_file"

# what PinLater's queueConfig may hold, and what it is called here; `paused` is ours
_PINLATER_QUEUE_KEYS = {"maxJobsPerSecond": "max_jobs_per_second", "paused": "paused"}


def load_config(etc: Path, read: ReadBytes = Path.read_bytes) -> Config:
    """The configuration in the folder `etc`. Raises ConfigError with every problem."""
    server_file = FileReader(etc / SERVER_FILE, read)
    shards_file = FileReader(etc / SHARDS_FILE, read)
    queues_file = FileReader(etc / QUEUES_FILE, read)
    if not etc.is_dir():
        raise ConfigError([f"{etc}: no such folder; `pinlaterd init DIR` writes a new deployment"])
    server = _read_server(server_file, etc.parent)
    shards = read_shards(shards_file, server, etc.parent)
    queues = _read_queues(queues_file, server)
    files = (server_file, shards_file, queues_file)
    raise_problems(files)
    held = tuple(file.path.name for file in files if not file.blank)
    warnings = tuple(warning for file in files for warning in file.warnings)
    return Config(server, dict(shards.by_name), queues, shards.abandon, held, warnings)


class ConfigFiles:
    """The files of `etc` as they were at one time."""

    def __init__(self, etc: Path) -> None:
        self._contents: dict[Path, bytes | OSError] = {}
        for name in CONFIG_FILES:
            path = etc / name
            try:
                self._contents[path] = path.read_bytes()
            except OSError as error:
                self._contents[path] = error

    @property
    def digest(self) -> str:
        """The same for the same contents, as everybody finds them who reads them."""
        hashed = hashlib.sha256()
        for content in self._contents.values():
            data = b"" if isinstance(content, OSError) else content
            hashed.update(len(data).to_bytes(8, "big") + data)
        return hashed.hexdigest()[:16]

    def read(self, path: Path) -> bytes:
        """For `load_config`. Raises OSError, as reading the file did."""
        content = self._contents[path]
        if isinstance(content, OSError):
            raise content
        return content


def _read_server(reader: FileReader, base: Path) -> ServerSettings:
    settings = settings_of(ServerSettings)
    root = reader.read()
    values: Mapping[str, Node] = {}
    given: dict[str, Any] = {}
    if root is not None:
        values = reader.mapping(root, "")
        reader.refuse_unknown(root, "", (*settings, _HASH_FILE))
        plain = {key: node for key, node in values.items() if key != _HASH}
        given = _read_values(reader, plain, "", settings, get_type_hints(ServerSettings))
    given[_HASH] = _read_hash(reader, values, base)
    return ServerSettings(**given)


def _read_hash(reader: FileReader, values: Mapping[str, Node], base: Path) -> str:
    """The environment's hash, else the file's; a malformed one is a problem, never shown."""
    text = os.environ.get(HASH_ENVIRONMENT, "")
    place = (0, f"environment {HASH_ENVIRONMENT}")
    if not text:
        keys = {key: node for key, node in values.items() if key in (_HASH, _HASH_FILE)}
        text = reader.secret(keys, _HASH, "", base) or ""
        place = next(((node.line, key) for key, node in keys.items()), place)
    if text and not is_hash(text):
        cure = "not a hash; make one with `pinlater-admin hash-password`"
        reader.problem(*place, cure)
        return ""
    return text


def _read_values(
    reader: FileReader,
    values: Mapping[str, Node],
    prefix: str,
    settings: Mapping[str, Setting],
    types: Mapping[str, Any],
) -> dict[str, Any]:
    """The good ones of `values`; the others are reported."""
    good: dict[str, Any] = {}
    for name, node in values.items():
        setting = settings.get(name)
        if setting is None:
            continue
        key = f"{prefix}{name}"
        value: Any
        if types[name] is str:
            value = reader.text(node, key, setting)
        elif types[name] is int:
            value = reader.integer(node, key, setting)
        elif types[name] is bool:
            value = reader.boolean(node, key)
        else:
            value = reader.number(node, key, setting)
        if value is not None:
            good[name] = value
    return good


# --- queues.yaml --------------------------------------------------------------------------


def _read_queues(reader: FileReader, server: ServerSettings) -> dict[str, QueueSettings]:
    root = reader.read()
    if root is None:
        return {}
    values = reader.mapping(root, "")
    reader.refuse_unknown(root, "", ("queues",))
    listed = values.get("queues")
    if listed is None:
        return {}
    if listed.items is not None:
        return _read_pinlater_queues(reader, listed, server)
    queues = {}
    for name, node in reader.mapping(listed, "queues").items():
        if _good_queue(reader, node, f"queues.{name}", name):
            queues[name] = _read_queue(reader, node, f"queues.{name}", server, {})
    return queues


def _read_pinlater_queues(
    reader: FileReader, listed: Node, server: ServerSettings
) -> dict[str, QueueSettings]:
    queues: dict[str, QueueSettings] = {}
    for index, node in enumerate(listed.items or ()):
        key = f"queues.{index}"
        values = reader.mapping(node, key)
        reader.warn_of_unknown(node, f"{key}.", ("name", "queueConfig"))
        if "name" not in values:
            reader.problem(node.line, f"{key}.name", "missing")
            continue
        name = values["name"].text
        if not _good_queue(reader, values["name"], f"{key}.name", name):
            continue
        if name in queues:
            reader.problem(values["name"].line, f"{key}.name", f"a second queue {name!r}")
        inner = values.get("queueConfig", Node(node.line))
        queues[name] = _read_queue(
            reader, inner, f"{key}.queueConfig", server, _PINLATER_QUEUE_KEYS
        )
    return queues


def _read_queue(
    reader: FileReader,
    node: Node,
    key: str,
    server: ServerSettings,
    renamed: Mapping[str, str],
) -> QueueSettings:
    settings = dict(settings_of(ServerSettings)) | dict(settings_of(QueueSettings))
    own = {field.name: settings[field.name] for field in dataclasses.fields(QueueSettings)}
    if renamed:
        own = {name: own[ours] for name, ours in renamed.items()}
    check_keys = reader.warn_of_unknown if renamed else reader.refuse_unknown
    check_keys(node, f"{key}.", own)
    values = {
        name: value
        for name, value in reader.mapping(node, key).items()
        if not (value.is_scalar and value.scalar is None)  # `max_jobs_per_second:` means no limit
    }
    hints = get_type_hints(QueueSettings)
    types = {name: bool if hints[renamed.get(name, name)] is bool else float for name in own}
    good = _read_values(reader, values, f"{key}.", own, types)
    given = {renamed.get(name, name): value for name, value in good.items()}
    if given.get("paused"):
        given["max_jobs_per_second"] = 0.0
    return dataclasses.replace(default_queue_settings(server), **given)


def _good_queue(reader: FileReader, node: Node, key: str, name: str) -> bool:
    if QUEUE_NAME.match(name):
        return True
    reader.problem(
        node.line, key, f"{name[:80]!r} is no queue name; use letters, digits and underscores"
    )
    return False
