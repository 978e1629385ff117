"""etc/shards.yaml, in its three forms: ours, and PinLater's JSON for MySQL and for Redis.

ours     shards: {NAME: {engine: sqlite, dequeue_only: false, file: …}}
         a redis shard has `master`, or `sentinel: {service, addresses: [{host, port}, …]}`
MySQL    {"<prefix>001": {"master": {"host", "port"}, "slave", "user", "passwd", "dequeueOnly"}}
         shard 001 is named 1; with mysql_num_db_per_queue n there are also 1d1 … 1d(n-1)
Redis    {"shards": [{"name", "shardConfig": {"master", "slave", "dequeueOnly"}}]}

In each, `abandon: [NAME, ...]` names shards that may be removed with the jobs that they hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from pinlaterd.config.document import Node
from pinlaterd.config.reading import FileReader, Section, secret_keys
from pinlaterd.config.schema import (
    DEFAULT_ENGINE,
    ENGINES,
    Address,
    Between,
    Characters,
    OneOf,
    SentinelSettings,
    ServerSettings,
    Setting,
    ShardSettings,
    default_file,
)
from pinlaterd.model import SHARD_NAME

NAME_RULE = "use 1 to 16 letters, digits and hyphens"
ABANDON = "abandon"
_ENGINE = Setting("", OneOf(ENGINES, "engine"))
_HOST = Setting("", Characters(1, 255))
_PORT = Setting("", Between(1, 65535))
_PINLATER_MYSQL_NAME = re.compile(r".*?([0-9]+)\Z", re.DOTALL)

MAX_SHARDS = 1024


class _Keys(NamedTuple):
    """The keys of a shard's settings in one form of the file."""

    engine: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    dequeue_only: str = "dequeueOnly"


_PASSWORD = secret_keys("passwd")
_SERVERS = ("master", "slave", "sentinel", "user", *_PASSWORD)
_OURS = {
    "sqlite": _Keys("sqlite", (), ("file",), "dequeue_only"),
    "mysql": _Keys("mysql", ("master", "user"), ("slave", *_PASSWORD), "dequeue_only"),
    "redis": _Keys("redis", (), _SERVERS, "dequeue_only"),
}
_PINLATER_MYSQL = _Keys("mysql", ("master", "user"), ("slave", *_PASSWORD))
_PINLATER_REDIS = _Keys("redis", ("master",), ("slave", *_PASSWORD))
assert set(_OURS) == set(ENGINES)


class ShardsFile(NamedTuple):
    """What shards.yaml says; the shards in the order of the file."""

    by_name: Mapping[str, ShardSettings]
    abandon: tuple[str, ...]


def read_shards(file: FileReader, server: ServerSettings) -> ShardsFile:
    root = file.read(required=True)
    if root is None:
        if not file.problems:
            file.problem(1, "shards", "the file is empty; name at least one shard")
        return ShardsFile({}, ())
    abandoned = root.get(ABANDON)
    if root.entries is not None:  # no form of the file has a place for it
        root = replace(root, entries=[entry for entry in root.entries if entry.key != ABANDON])
    form = form_of(root)
    section = Section(file, root, refuse_unknown=form is Form.OURS)
    reader = _ShardsReader()
    if form is Form.PINLATER_REDIS:
        reader.read_pinlater_redis(section)
    elif form is Form.PINLATER_MYSQL:
        reader.read_pinlater_mysql(section, server.mysql_num_db_per_queue)
    else:
        reader.read_ours(section)
    shards = reader.shards
    if not shards and not file.problems:
        file.problem(root.line, "shards", "no shard is named; name at least one")
    if len(shards) > MAX_SHARDS:
        file.problem(
            root.line, "shards", f"{len(shards)} shards are too many; at most {MAX_SHARDS}"
        )
    return ShardsFile(shards, _read_abandon(file, abandoned, shards))


def _read_abandon(
    file: FileReader, node: Node | None, shards: Mapping[str, ShardSettings]
) -> tuple[str, ...]:
    if node is None or node.is_nothing:
        return ()
    if node.items is None:
        file.problem(node.line, ABANDON, f"expected a list, got {node.describe()}")
    names = []
    for index, item in enumerate(node.items or ()):
        key = f"{ABANDON}.{index}"
        if not item.is_scalar or not SHARD_NAME.match(item.text):
            file.problem(item.line, key, f"expected a shard's name; {NAME_RULE}")
        elif item.text in shards:
            problem = f"shard {item.text!r} is listed under shards too; keep one of them"
            file.problem(item.line, key, problem)
        else:
            names.append(item.text)
    return tuple(names)


class Form(Enum):
    """How shards are written down."""

    OURS = "ours"
    PINLATER_MYSQL = "PinLater's for MySQL"
    PINLATER_REDIS = "PinLater's for Redis"


def form_of(root: Node) -> Form:
    listed = root.get("shards")
    if listed is not None and listed.items is not None:
        return Form.PINLATER_REDIS
    if listed is None and any(entry.value.get("master") for entry in root.entries or ()):
        return Form.PINLATER_MYSQL
    return Form.OURS


def pinlater_mysql_shards(key: str, databases: int) -> Sequence[str]:
    """The shards that an entry of PinLater's for MySQL stands for; none if `key` names none."""
    match = _PINLATER_MYSQL_NAME.match(key)
    if match is None:
        return []
    number = match[1].lstrip("0") or "0"
    return [f"{number}d{index}" if index else number for index in range(databases)]


class _ShardsReader:
    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        self.shards: dict[str, ShardSettings] = {}

    def read_ours(self, root: Section) -> None:
        root.check_known(("shards",))
        if "shards" not in root:
            if root.node.entries is not None:
                root.problem("shards", "missing; write `shards:` and the shards below it")
            return
        shards = root.section("shards")
        for name in shards.values:
            if _is_shard(shards, name, name):
                self._read_ours(shards.section(name), name)

    def _read_ours(self, section: Section, name: str) -> None:
        engine: str | None = DEFAULT_ENGINE
        if "engine" in section:
            engine = section.get("engine", str, _ENGINE)
        if engine is None:
            return
        section.check_known(("engine", *_known(_OURS[engine])))
        if engine == "redis":
            _check_redis_master(section)
        reason = f"; {engine} shards need it"
        self.shards[name] = self._settings(section, name, _OURS[engine], reason)

    def read_pinlater_mysql(self, root: Section, databases: int) -> None:
        for key in root.values:
            names = pinlater_mysql_shards(key, databases)
            if not names:
                root.problem(key, "expected a name that ends in the shard's number")
                continue
            section = root.section(key)
            section.check_known(_known(_PINLATER_MYSQL))
            shard = self._settings(section, names[0], _PINLATER_MYSQL)
            for name in names:
                if not _is_shard(root, key, name):
                    break
                self._add(replace(shard, name=name), root, key)

    def read_pinlater_redis(self, root: Section) -> None:
        root.check_known(("shards",))
        for item in root.sections("shards"):
            item.check_known(("name", "shardConfig"))
            if not item.require("name", "shardConfig"):
                continue
            name = item.values["name"].text
            if _is_shard(item, "name", name):
                section = item.section("shardConfig")
                section.check_known(_known(_PINLATER_REDIS))
                self._add(self._settings(section, name, _PINLATER_REDIS), item, "name")

    def _add(self, shard: ShardSettings, section: Section, key: str) -> None:
        if shard.name in self.shards:
            section.problem(key, f"a second shard {shard.name!r}; rename one")
        else:
            self.shards[shard.name] = shard

    def _settings(
        self, section: Section, name: str, keys: _Keys, reason: str = ""
    ) -> ShardSettings:
        """`reason`: why required keys are."""
        section.require(*keys.required, reason=reason)
        known = _known(keys)
        sentinel = "sentinel" in known and "sentinel" in section
        return ShardSettings(
            name=name,
            engine=keys.engine,
            dequeue_only=section.flag(keys.dequeue_only),
            file=self._file(section, name) if "file" in known else "",
            master=_address(section, "master") if "master" in known else None,
            slave=_address(section, "slave") if "slave" in known else None,
            sentinel=_sentinel(section.section("sentinel")) if sentinel else None,
            user=section.text("user") if "user" in known else "",
            passwd=section.secret("passwd") if "passwd" in known else "",
            passwd_env=_variable(section) if "passwd" in known else "",
        )

    def _file(self, section: Section, name: str) -> str:
        path = default_file(name)
        if "file" in section:
            given = section.get("file", str)
            if given is None:
                return path
            if not given or "\0" in given:
                section.problem("file", "expected a path")
                return path
            path = given
        owner = self._files.setdefault(str(Path(path)), name)
        if owner != name and "file" in section:
            section.problem("file", f"shard {owner!r} has the file {path!r} already")
        return path


def _known(keys: _Keys) -> Sequence[str]:
    return (keys.dequeue_only, *keys.required, *keys.optional)


def _is_shard(section: Section, key: str, name: str) -> bool:
    """Whether `name`, which stands at `key`, can be a shard's."""
    if SHARD_NAME.match(name):
        return True
    section.problem(key, f"{name[:40]!r} is no shard name; {NAME_RULE}")
    return False


def _check_redis_master(section: Section) -> None:
    """It is named, or Sentinels name it."""
    if "sentinel" not in section:
        section.require("master", reason="; redis shards need it, or sentinel")
        return
    for key in ("master", "slave"):
        if key in section:
            section.problem(key, "Sentinels know it; keep only sentinel")


def _sentinel(section: Section) -> SentinelSettings | None:
    section.check_known(("service", "addresses", "user", *_PASSWORD))
    if not section.require("service", "addresses"):
        return None
    found = [_address_at(place) for place in section.sections("addresses")]
    if not found:
        section.problem("addresses", "name at least one Sentinel")
    return SentinelSettings(
        service=section.get("service", str, _HOST) or "",
        addresses=tuple(address for address in found if address is not None),
        user=section.text("user"),
        passwd=section.secret("passwd"),
        passwd_env=_variable(section),
    )


def _address(section: Section, name: str) -> Address | None:
    if name not in section or (section.values[name].is_nothing and name != "master"):
        return None
    return _address_at(section.section(name))


def _address_at(section: Section) -> Address | None:
    if section.node.is_nothing:
        section.file.problem(section.node.line, section.path, "expected a mapping of host and port")
    if section.node.entries is None:
        return None
    section.check_known(("host", "port"))
    if not section.require("host", "port"):
        return None
    host, port = section.get("host", str, _HOST), section.get("port", int, _PORT)
    return None if host is None or port is None else Address(host, port)


def _variable(section: Section) -> str:
    """The environment variable that a password comes from; "" if it does not."""
    node = section.values.get(_PASSWORD[2])
    return node.text if node is not None else ""
