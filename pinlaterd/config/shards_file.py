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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from pinlaterd.config.document import Node
from pinlaterd.config.reading import FileReader, secret_keys
from pinlaterd.config.schema import (
    DEFAULT_ENGINE,
    ENGINES,
    Address,
    Between,
    Characters,
    SentinelSettings,
    ServerSettings,
    Setting,
    ShardSettings,
    default_file,
)
from pinlaterd.model import SHARD_NAME

NAME_RULE = "use 1 to 16 letters, digits and hyphens"
ABANDON = "abandon"
_HOST = Setting("", Characters(1, 255))
_PORT = Setting("", Between(1, 65535))
_PINLATER_MYSQL_NAME = re.compile(r".*?([0-9]+)\Z", re.DOTALL)

MAX_SHARDS = 1024


class _EngineKeys(NamedTuple):
    """The keys of one engine's shards, beside those of all."""

    required: tuple[str, ...]
    optional: tuple[str, ...]


_COMMON_KEYS = ("engine", "dequeue_only")
_ENGINE_KEYS = {
    "sqlite": _EngineKeys((), ("file",)),
    "mysql": _EngineKeys(("master", "user"), ("slave", *secret_keys("passwd"))),
    "redis": _EngineKeys((), ("master", "slave", "sentinel", "user", *secret_keys("passwd"))),
}
assert set(_ENGINE_KEYS) == set(ENGINES)


class ShardsFile(NamedTuple):
    """What shards.yaml says; the shards in the order of the file."""

    by_name: Mapping[str, ShardSettings]
    abandon: tuple[str, ...]


def read_shards(reader: FileReader, server: ServerSettings, base: Path) -> ShardsFile:
    """`base` is DIR, for relative paths."""
    root = reader.read(required=True)
    if root is None:
        if not reader.problems:
            reader.problem(1, "shards", "the file is empty; name at least one shard")
        return ShardsFile({}, ())
    root, abandoned = _without(root, ABANDON)
    listed = root.get("shards")
    kind = form_of(root)
    check_keys = reader.refuse_unknown if kind is Form.OURS else reader.warn_of_unknown
    form = _ShardsReader(reader, base, check_keys)
    if kind is Form.PINLATER_REDIS:
        assert listed is not None
        check_keys(root, "", ("shards",))
        form.read_pinlater_redis(listed)
    elif kind is Form.PINLATER_MYSQL:
        form.read_pinlater_mysql(root, server.mysql_num_db_per_queue)
    else:
        form.read_ours(root)
    if not form.shards and not reader.problems:
        reader.problem(root.line, "shards", "no shard is named; name at least one")
    if len(form.shards) > MAX_SHARDS:
        reader.problem(
            root.line, "shards", f"{len(form.shards)} shards are too many; at most {MAX_SHARDS}"
        )
    return ShardsFile(form.shards, _read_abandon(reader, abandoned, form.shards))


def _without(root: Node, key: str) -> tuple[Node, Node | None]:
    """`root` without `key`, whose place no form of the file has; and what `key` says."""
    if root.entries is None:
        return root, None
    rest = [entry for entry in root.entries if entry.key != key]
    return replace(root, entries=rest), root.get(key)


def _read_abandon(
    reader: FileReader, node: Node | None, shards: Mapping[str, ShardSettings]
) -> tuple[str, ...]:
    if node is None or (node.is_scalar and node.scalar is None):
        return ()
    names = []
    for index, item in enumerate(reader.sequence(node, ABANDON)):
        key = f"{ABANDON}.{index}"
        if not item.is_scalar or not SHARD_NAME.match(item.text):
            reader.problem(item.line, key, f"expected a shard's name; {NAME_RULE}")
        elif item.text in shards:
            reader.problem(
                item.line, key, f"shard {item.text!r} is listed under shards too; keep one of them"
            )
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


CheckKeys = Callable[[Node, str, Iterable[str]], None]  # of a mapping, its prefix, known keys


class _ShardsReader:
    def __init__(self, reader: FileReader, base: Path, check_keys: CheckKeys) -> None:
        self._reader = reader
        self._base = base
        self._check_keys = check_keys
        self._files: dict[str, str] = {}
        self.shards: dict[str, ShardSettings] = {}

    def read_ours(self, root: Node) -> None:
        reader = self._reader
        values = reader.mapping(root, "")
        if "shards" not in values and root.entries is not None:
            reader.problem(root.line, "shards", "missing; write `shards:` and the shards below it")
        self._check_keys(root, "", ("shards",))
        if "shards" not in values:
            return
        for name, node in reader.mapping(values["shards"], "shards").items():
            if self._good_name(node, f"shards.{name}", name):
                self._add(self._ours(name, node))

    def _ours(self, name: str, node: Node) -> ShardSettings | None:
        reader, prefix = self._reader, f"shards.{name}."
        values = reader.mapping(node, f"shards.{name}")
        engine: str | None = DEFAULT_ENGINE
        if "engine" in values:
            engine = self._engine(values["engine"], f"{prefix}engine")
        if engine is None:
            return None
        keys = _ENGINE_KEYS[engine]
        self._check_keys(node, prefix, (*_COMMON_KEYS, *keys.required, *keys.optional))
        for missing in [key for key in keys.required if key not in values]:
            reader.problem(node.line, f"{prefix}{missing}", f"missing; {engine} shards need it")
        if engine == "redis":
            self._check_redis_master(node, values, prefix)
        return ShardSettings(
            name=name,
            engine=engine,
            dequeue_only=self._flag(values, "dequeue_only", prefix),
            file=self._file(name, values, prefix) if "file" in keys.optional else "",
            master=self._address(values, "master", prefix),
            slave=self._address(values, "slave", prefix),
            sentinel=self._sentinel(values, prefix),
            user=self._text(values, "user", prefix),
            passwd=reader.secret(values, "passwd", prefix, self._base) or "",
            passwd_env=_variable(values),
        )

    def _check_redis_master(self, node: Node, values: Mapping[str, Node], prefix: str) -> None:
        """It is named, or Sentinels name it."""
        if "sentinel" not in values:
            if "master" not in values:
                self._reader.problem(
                    node.line, f"{prefix}master", "missing; redis shards need it, or sentinel"
                )
            return
        for key in ("master", "slave"):
            if key in values:
                self._reader.problem(
                    values[key].line, f"{prefix}{key}", "Sentinels know it; keep only sentinel"
                )

    def _sentinel(self, values: Mapping[str, Node], prefix: str) -> SentinelSettings | None:
        node = values.get("sentinel")
        if node is None:
            return None
        reader, prefix = self._reader, f"{prefix}sentinel."
        inner = reader.mapping(node, prefix.removesuffix("."))
        self._check_keys(node, prefix, ("service", "addresses", "user", *secret_keys("passwd")))
        if not self._require(node, inner, prefix, ("service", "addresses")):
            return None
        service = reader.text(inner["service"], f"{prefix}service", _HOST)
        places = reader.sequence(inner["addresses"], f"{prefix}addresses")
        addresses = [
            self._address_at(place, f"{prefix}addresses.{index}")
            for index, place in enumerate(places)
        ]
        if not addresses:
            reader.problem(node.line, f"{prefix}addresses", "name at least one Sentinel")
        return SentinelSettings(
            service=service or "",
            addresses=tuple(address for address in addresses if address is not None),
            user=self._text(inner, "user", prefix),
            passwd=reader.secret(inner, "passwd", prefix, self._base) or "",
            passwd_env=_variable(inner),
        )

    def read_pinlater_mysql(self, root: Node, databases: int) -> None:
        reader = self._reader
        for key, node in reader.mapping(root, "").items():
            names = pinlater_mysql_shards(key, databases)
            if not names:
                reader.problem(node.line, key, "expected a name that ends in the shard's number")
                continue
            values = reader.mapping(node, key)
            prefix = f"{key}."
            known = ("master", "slave", "user", "dequeueOnly", *secret_keys("passwd"))
            self._check_keys(node, prefix, known)
            self._require(node, values, prefix, ("master", "user"))
            for name in names:
                if not self._good_name(node, key, name):
                    break
                self._add(
                    ShardSettings(
                        name=name,
                        engine="mysql",
                        dequeue_only=self._flag(values, "dequeueOnly", prefix),
                        master=self._address(values, "master", prefix),
                        slave=self._address(values, "slave", prefix),
                        user=self._text(values, "user", prefix),
                        passwd=reader.secret(values, "passwd", prefix, self._base) or "",
                        passwd_env=_variable(values),
                    ),
                    node,
                    key,
                )

    def read_pinlater_redis(self, listed: Node) -> None:
        reader = self._reader
        for index, node in enumerate(listed.items or ()):
            key = f"shards.{index}"
            values = reader.mapping(node, key)
            self._check_keys(node, f"{key}.", ("name", "shardConfig"))
            if not self._require(node, values, f"{key}.", ("name", "shardConfig")):
                continue
            name = values["name"].text
            if not self._good_name(values["name"], f"{key}.name", name):
                continue
            prefix = f"{key}.shardConfig."
            inner = values["shardConfig"]
            settings = reader.mapping(inner, f"{key}.shardConfig")
            known = ("master", "slave", "dequeueOnly", *secret_keys("passwd"))
            self._check_keys(inner, prefix, known)
            self._require(inner, settings, prefix, ("master",))
            shard = ShardSettings(
                name=name,
                engine="redis",
                dequeue_only=self._flag(settings, "dequeueOnly", prefix),
                master=self._address(settings, "master", prefix),
                slave=self._address(settings, "slave", prefix),
                passwd=reader.secret(settings, "passwd", prefix, self._base) or "",
                passwd_env=_variable(settings),
            )
            self._add(shard, values["name"], f"{key}.name")

    # --- pieces -------------------------------------------------------------------------------

    def _add(self, shard: ShardSettings | None, node: Node | None = None, key: str = "") -> None:
        if shard is None:
            return
        if node is not None and shard.name in self.shards:
            self._reader.problem(node.line, key, f"a second shard {shard.name!r}; rename one")
            return
        self.shards[shard.name] = shard

    def _require(
        self, node: Node, values: Mapping[str, Node], prefix: str, keys: Iterable[str]
    ) -> bool:
        missing = [key for key in keys if key not in values]
        for key in missing:
            self._reader.problem(node.line, f"{prefix}{key}", "missing")
        return not missing

    def _good_name(self, node: Node, key: str, name: str) -> bool:
        if SHARD_NAME.match(name):
            return True
        self._reader.problem(node.line, key, f"{name[:40]!r} is no shard name; {NAME_RULE}")
        return False

    def _engine(self, node: Node, key: str) -> str | None:
        if node.scalar in ENGINES:
            return str(node.scalar)
        if isinstance(node.scalar, str):
            choices = ", ".join(ENGINES)
            self._reader.problem(
                node.line, key, f"unknown engine {node.scalar[:40]!r}; choose from {choices}"
            )
            return None
        return self._reader.text(node, key)

    def _flag(self, values: Mapping[str, Node], name: str, prefix: str) -> bool:
        if name not in values:
            return False
        return bool(self._reader.boolean(values[name], f"{prefix}{name}"))

    def _text(self, values: Mapping[str, Node], name: str, prefix: str) -> str:
        if name not in values:
            return ""
        return self._reader.text(values[name], f"{prefix}{name}") or ""

    def _file(self, name: str, values: Mapping[str, Node], prefix: str) -> str:
        path = default_file(name)
        line_node = values.get("file")
        if line_node is not None:
            given = self._reader.text(line_node, f"{prefix}file")
            if not given or "\0" in given:
                if given is not None:
                    self._reader.problem(line_node.line, f"{prefix}file", "expected a path")
                return path
            path = given
        owner = self._files.setdefault(str(Path(path)), name)
        if owner != name and line_node is not None:
            self._reader.problem(
                line_node.line, f"{prefix}file", f"shard {owner!r} has the file {path!r} already"
            )
        return path

    def _address(self, values: Mapping[str, Node], name: str, prefix: str) -> Address | None:
        node = values.get(name)
        if node is None or (node.is_scalar and node.scalar is None and name != "master"):
            return None
        return self._address_at(node, f"{prefix}{name}")

    def _address_at(self, node: Node, key: str) -> Address | None:
        inner = self._reader.mapping(node, key)
        if node.entries is None:
            if node.scalar is None and node.is_scalar:
                self._reader.problem(node.line, key, "expected a mapping of host and port")
            return None
        self._check_keys(node, f"{key}.", ("host", "port"))
        if not self._require(node, inner, f"{key}.", ("host", "port")):
            return None
        host = self._reader.text(inner["host"], f"{key}.host", _HOST)
        port = self._reader.integer(inner["port"], f"{key}.port", _PORT)
        return None if host is None or port is None else Address(host, port)


def _variable(values: Mapping[str, Node]) -> str:
    """The environment variable that a shard's password comes from; "" if it does not."""
    _, _, env = secret_keys("passwd")
    return values[env].text if env in values else ""
