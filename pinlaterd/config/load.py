"""The configuration files to a Config, or all that is wrong with all of them at once.

etc/pinlaterd.yaml    optional: the server's settings
etc/shards.yaml       required: the shards
etc/queues.yaml       optional: settings of single queues; PinLater's JSON is accepted
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from pinlaterd.config.layout import CONFIG_FILES
from pinlaterd.config.password import is_hash
from pinlaterd.config.reading import FileReader, ReadBytes, Section
from pinlaterd.config.schema import (
    HASH_ENVIRONMENT,
    Config,
    QueueSettings,
    ServerSettings,
    default_queue_settings,
    settings_of,
)
from pinlaterd.config.shards_file import read_shards
from pinlaterd.errors import ConfigError
from pinlaterd.model import QUEUE_NAME

_HASH = "admin_password_hash"
_HASH_FILE = f"{_HASH}_file"

_SERVER_SETTINGS, _SERVER_TYPES = settings_of(ServerSettings), get_type_hints(ServerSettings)
_QUEUE_SETTINGS = {**_SERVER_SETTINGS, **settings_of(QueueSettings)}

# What a queue's settings may hold, and what it is called here; in PinLater's form `paused` is ours.
_OUR_KEYS = {field.name: field.name for field in fields(QueueSettings)}
_PINLATER_KEYS = {"maxJobsPerSecond": "max_jobs_per_second", "paused": "paused"}


def load_config(etc: Path, read: ReadBytes = Path.read_bytes) -> Config:
    """The configuration in the folder `etc`. Raises ConfigError with every problem."""
    files = [FileReader(etc / name, read) for name in CONFIG_FILES]
    if not etc.is_dir():
        raise ConfigError([f"{etc}: no such folder; `pinlaterd init DIR` writes a new deployment"])
    server_file, shards_file, queues_file = files
    server = _read_server(server_file)
    shards = read_shards(shards_file, server)
    queues = _read_queues(queues_file, server)
    problems = [problem for file in files for problem in file.problems]
    if problems:
        raise ConfigError(problems)
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
        """The same for the same contents, in every process that reads them."""
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


# --- pinlaterd.yaml ---------------------------------------------------------------------------


def _read_server(file: FileReader) -> ServerSettings:
    root = file.read()
    given: dict[str, Any] = {}
    section = None
    if root is not None:
        section = Section(file, root)
        section.check_known((*_SERVER_SETTINGS, _HASH_FILE))
        for name in section.values:
            if name in _SERVER_SETTINGS and name != _HASH:
                given[name] = section.get(name, _SERVER_TYPES[name], _SERVER_SETTINGS[name])
    given[_HASH] = _read_hash(file, section)
    return ServerSettings(**{name: value for name, value in given.items() if value is not None})


def _read_hash(file: FileReader, section: Section | None) -> str:
    """The environment's hash, else the file's; a malformed one is a problem, never shown."""
    text, line, key = os.environ.get(HASH_ENVIRONMENT, ""), 0, f"environment {HASH_ENVIRONMENT}"
    if not text and section is not None:
        text = section.secret(_HASH)
        key = next((name for name in section.values if name in (_HASH, _HASH_FILE)), key)
        line = section.values[key].line if key in section else 0
    if text and not is_hash(text):
        file.problem(line, key, "not a hash; make one with `pinlater-admin hash-password`")
        return ""
    return text


# --- queues.yaml ------------------------------------------------------------------------------


def _read_queues(file: FileReader, server: ServerSettings) -> dict[str, QueueSettings]:
    root = file.read()
    if root is None:
        return {}
    section = Section(file, root)
    section.check_known(("queues",))
    if "queues" not in section:
        return {}
    defaults = default_queue_settings(server)
    if section.values["queues"].items is not None:
        section = Section(file, root, refuse_unknown=False)
        return _read_pinlater_queues(section, defaults)
    queues = section.section("queues")
    return {
        name: _read_queue(queues.section(name), defaults, _OUR_KEYS)
        for name in queues.values
        if _is_queue(queues, name, name)
    }


def _read_pinlater_queues(section: Section, defaults: QueueSettings) -> dict[str, QueueSettings]:
    queues: dict[str, QueueSettings] = {}
    for item in section.sections("queues"):
        item.check_known(("name", "queueConfig"))
        if not item.require("name"):
            continue
        name = item.values["name"].text
        if not _is_queue(item, "name", name):
            continue
        if name in queues:
            item.problem("name", f"a second queue {name!r}")
        queues[name] = _read_queue(item.section("queueConfig"), defaults, _PINLATER_KEYS)
    return queues


def _read_queue(
    section: Section, defaults: QueueSettings, keys: Mapping[str, str]
) -> QueueSettings:
    section.check_known(keys)
    given: dict[str, Any] = {}
    for key, name in keys.items():
        # `max_jobs_per_second:` and nothing means no limit
        if key in section and not section.values[key].is_nothing:
            kind = bool if name == "paused" else float
            given[name] = section.get(key, kind, _QUEUE_SETTINGS[name])
    if given.get("paused"):
        given["max_jobs_per_second"] = 0.0
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


def _is_queue(section: Section, key: str, name: str) -> bool:
    """Whether `name`, which stands at `key`, can be a queue's."""
    if QUEUE_NAME.match(name):
        return True
    section.problem(key, f"{name[:80]!r} is no queue name; use letters, digits and underscores")
    return False
