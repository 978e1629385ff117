"""The configuration in force: what was accepted last, whatever etc/ says by now.

The coordinator (and `pinlaterd up`) writes it to run/config.json, as a whole and at once, each
time with a greater version. All processes start from it and read it anew when a snapshot names
another version than theirs: so they agree on what was validated, and one that restarts while a
file in etc/ is broken comes up as before. It may hold passwords, so it is for its owner only;
those that come from the environment stay there, and only the variable's name is written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from pinlaterd.config.layout import CONFIG_FILE, CONFIG_LOCK
from pinlaterd.config.load import load_config
from pinlaterd.config.locks import lock
from pinlaterd.config.schema import (
    HASH_ENVIRONMENT,
    Config,
    QueueSettings,
    ServerSettings,
    ShardSettings,
)
from pinlaterd.errors import ConfigError

NO_VERSION = 0


class InForce(NamedTuple):
    """`version` NO_VERSION: read from etc/, because nothing was accepted yet."""

    version: int
    config: Config


def load_in_force(etc: Path) -> InForce:
    """What was accepted last; else what the folder `etc` says. Raises ConfigError."""
    accepted = read_in_force()
    return accepted if accepted is not None else InForce(NO_VERSION, load_config(etc))


class Superseded(Exception):
    """Somebody else has put a configuration in force meanwhile: `pinlaterd up`, mostly."""


def write_in_force(config: Config, *, after: int | None = None) -> InForce:
    """Put `config` in force for all that read it from now on. Raises OSError.

    `after`: only if that version is still in force, else Superseded."""
    with lock(CONFIG_LOCK, patient=True):
        before = _version()
        if after is not None and before not in (NO_VERSION, after):
            raise Superseded
        accepted = InForce(max(time.time_ns() // 1_000_000, before + 1), config)
        temporary = CONFIG_FILE.with_name(f"{CONFIG_FILE.name}.new")
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(_pack(accepted))
            file.flush()
            os.fsync(file.fileno())  # a machine that loses its power leaves no empty file behind
        temporary.replace(CONFIG_FILE)
    return accepted


def read_in_force() -> InForce | None:
    """None if there is none that this version can read.

    Raises ConfigError if a password's environment variable is not there."""
    try:
        found = json.loads(CONFIG_FILE.read_bytes())
        config = Config(
            _revive(ServerSettings, found["server"]),
            {name: _revive(ShardSettings, one) for name, one in found["shards"].items()},
            {name: _revive(QueueSettings, one) for name, one in found["queues"].items()},
            tuple(found["abandon"]),
            tuple(found["files"]),
        )
        return InForce(int(found["version"]), config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def files_in_force(deployment: Path) -> Sequence[str]:
    """The files of etc/ that said something when they were accepted last; none if that can't be
    read. Unlike `read_in_force` it needs no password, and may be asked from any folder."""
    try:
        return tuple(json.loads((deployment / CONFIG_FILE).read_bytes())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def _version() -> int:
    try:
        return int(json.loads(CONFIG_FILE.read_bytes())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return NO_VERSION


def _pack(accepted: InForce) -> bytes:
    config = accepted.config
    found = {
        "version": accepted.version,
        "server": _packed_server(config.server),
        "shards": {name: _packed_shard(shard) for name, shard in config.shards.items()},
        "queues": {name: dataclasses.asdict(queue) for name, queue in config.queues.items()},
        "abandon": config.abandon,
        "files": config.files,
    }
    return json.dumps(found, indent=1).encode()


def _packed_server(server: ServerSettings) -> Mapping[str, object]:
    values = dataclasses.asdict(server)
    if server.admin_password_hash == os.environ.get(HASH_ENVIRONMENT):
        del values["admin_password_hash"]
    return values


def _packed_shard(shard: ShardSettings) -> Mapping[str, object]:
    values = dataclasses.asdict(shard)
    if shard.passwd_env:
        del values["passwd"]
    if shard.sentinel is not None and shard.sentinel.passwd_env:
        values["sentinel"] = shard.sentinel._replace(passwd="")
    return values


def _revive(schema: type, values: Mapping[str, Any]) -> Any:
    """An object of the settings class `schema`; keys that this version does not know are left
    out, and those that an earlier one did not write have their defaults."""
    hints = get_type_hints(schema)
    given = {name: _typed(hints[name], value) for name, value in values.items() if name in hints}
    if schema is ServerSettings and HASH_ENVIRONMENT in os.environ:
        given["admin_password_hash"] = os.environ[HASH_ENVIRONMENT]
    variable = given.get("passwd_env")
    if variable:
        given["passwd"] = _from_environment(variable)
    sentinel = given.get("sentinel")
    if sentinel is not None and sentinel.passwd_env:
        given["sentinel"] = sentinel._replace(passwd=_from_environment(sentinel.passwd_env))
    return schema(**given)


def _from_environment(variable: str) -> str:
    if variable not in os.environ:
        raise ConfigError(
            [f"{CONFIG_FILE}: the environment has no {variable}; set it, `pinlaterd down`, `up`"]
        )
    return os.environ[variable]


def environment_of(config: Config) -> frozenset[str]:
    """The variables that it takes passwords from."""
    shards = config.shards.values()
    sentinels = (shard.sentinel for shard in shards if shard.sentinel is not None)
    names = (*(shard.passwd_env for shard in shards), *(one.passwd_env for one in sentinels))
    return frozenset(name for name in names if name)


def _typed(hint: Any, value: Any) -> Any:
    """What JSON made a list of, as the tuple that it was; all else as it is."""
    if isinstance(hint, UnionType):
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    if not isinstance(value, list):
        return value
    if get_origin(hint) is tuple:
        return tuple(_typed(get_args(hint)[0], one) for one in value)
    fields: Sequence[Any] = list(get_type_hints(hint).values())
    return hint(*(_typed(kind, one) for kind, one in zip(fields, value, strict=True)))
