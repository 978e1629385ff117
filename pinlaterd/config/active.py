"""The active configuration: what was validated last, whatever etc/ says by now.

The coordinator (and `pinlaterd up`) writes it to run/config.json, as a whole and at once, each
time with a greater version; processes follow it (docs/architecture.md, "Live configuration"). It
may hold passwords, so it is for its owner only; those that come from the environment stay there,
and only the variable's name is written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from pinlaterd.config.layout import CONFIG_FILE, CONFIG_LOCK, lock, replace_file
from pinlaterd.config.schema import (
    HASH_ENVIRONMENT,
    Config,
    JobType,
    PushSettings,
    QueueSettings,
    ServerSettings,
    ShardSettings,
    UserSettings,
)
from pinlaterd.errors import ConfigError

T = TypeVar("T")

NO_VERSION = 0


class ActiveConfig(NamedTuple):
    """`version` NO_VERSION: read from etc/, because nothing was validated yet."""

    version: int
    config: Config


class _File(msgspec.Struct):
    """run/config.json. Fields that this version does not know are left out, and those of settings
    that an earlier one did not write have their defaults."""

    version: int
    server: ServerSettings
    shards: Mapping[str, ShardSettings]
    queues: Mapping[str, QueueSettings]
    abandon: tuple[str, ...]
    files: tuple[str, ...]
    users: Mapping[str, UserSettings] = {}
    job_types: Mapping[str, JobType] = {}
    pushes: Mapping[str, PushSettings] = {}


class _Head(msgspec.Struct):
    """The fields that can still be read of a configuration that `read_active` refuses."""

    version: int = NO_VERSION
    files: tuple[str, ...] = ()


def load_active(etc: Path) -> ActiveConfig:
    """Load what was validated last; else read the folder `etc`. Raises ConfigError."""
    active = read_active()
    if active is not None:
        return active
    # Only here: processes that the coordinator has started need no YAML.
    from pinlaterd.config.load import load_config  # noqa: PLC0415

    return ActiveConfig(NO_VERSION, load_config(etc))


class ConfigSuperseded(Exception):
    """Another process has activated a configuration meanwhile: `pinlaterd up`, mostly."""


def activate(config: Config, *, after: int | None = None) -> ActiveConfig:
    """Make `config` the active one for all that read it from now on. Raises OSError.

    `after`: only if that version is still active, else ConfigSuperseded."""
    with lock(CONFIG_LOCK, patient=True):
        before = (_decode(CONFIG_FILE, _Head) or _Head()).version
        if after is not None and before not in (NO_VERSION, after):
            raise ConfigSuperseded
        active = ActiveConfig(max(time.time_ns() // 1_000_000, before + 1), config)
        replace_file(CONFIG_FILE, _pack(active), durably=True)
    return active


def read_active() -> ActiveConfig | None:
    """Read it; return None if there is none that this version can read.

    Raises ConfigError if a password's environment variable is not there."""
    found = _decode(CONFIG_FILE, _File)
    if found is None:
        return None
    server = found.server
    if HASH_ENVIRONMENT in os.environ:
        server = replace(server, admin_password_hash=os.environ[HASH_ENVIRONMENT])
    shards = _with_passwords(found.shards, _from_environment)
    return ActiveConfig(
        found.version, Config(**{**_parts_of(found), "server": server, "shards": shards})
    )


def active_files(deployment: Path) -> Sequence[str]:
    """Return the files of etc/ that said something when they were validated last; none if that
    can't be read. Unlike `read_active` it needs no password, and may be asked from any folder."""
    return (_decode(deployment / CONFIG_FILE, _Head) or _Head()).files


def _decode(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError):
        return None


def _pack(active: ActiveConfig) -> bytes:
    config = active.config
    server = config.server
    if server.admin_password_hash == os.environ.get(HASH_ENVIRONMENT):
        server = replace(server, admin_password_hash="")
    shards = _with_passwords(config.shards, lambda _: "")
    parts = {**_parts_of(config), "server": server, "shards": shards}
    found = _File(active.version, **parts)
    return msgspec.json.format(msgspec.json.encode(found), indent=1)


def _parts_of(one: _File | Config) -> dict[str, Any]:
    """Return what the file and the configuration have alike."""
    return {name: getattr(one, name) for name in _File.__struct_fields__ if name != "version"}


def _with_passwords(
    shards: Mapping[str, ShardSettings], value: Callable[[str], str]
) -> Mapping[str, ShardSettings]:
    """Set passwords; `value`: of an environment variable that one comes from."""
    found = {}
    for name, shard in shards.items():
        sentinel = shard.sentinel
        if sentinel is not None and sentinel.passwd_env:
            sentinel = sentinel._replace(passwd=value(sentinel.passwd_env))
        passwd = value(shard.passwd_env) if shard.passwd_env else shard.passwd
        found[name] = replace(shard, passwd=passwd, sentinel=sentinel)
    return found


def _from_environment(variable: str) -> str:
    if variable not in os.environ:
        raise ConfigError(
            [f"{CONFIG_FILE}: the environment has no {variable}; set it, `pinlaterd down`, `up`"]
        )
    return os.environ[variable]


def environment_of(config: Config) -> frozenset[str]:
    """Return the variables that it takes passwords from."""
    shards = config.shards.values()
    sentinels = (shard.sentinel for shard in shards if shard.sentinel is not None)
    names = (*(shard.passwd_env for shard in shards), *(one.passwd_env for one in sentinels))
    return frozenset(name for name in names if name)
