"""Reads the files of etc/ into a Config; reports every mistake at once.

etc/pinlaterd.yaml    optional: the server's settings
etc/queues.yaml       optional: settings of single queues; PinLater's JSON is accepted
etc/users.yaml        optional: who may use the HTTP interface, and for what
etc/job_types.yaml    optional: the job types of Rickover's interface
etc/local.yaml        optional: settings of this machine alone, and of its place in a cluster
etc/shards.yaml       required: the shards, in one of three forms

    ours     shards: {NAME: {engine: sqlite, dequeue_only: false, file: …}}
             a redis shard has `master`, or `sentinel: {service, addresses: [{host, port}, …]}`
    MySQL    {"<prefix>001": {"master": {"host", "port"}, "slave", "user", "passwd", "dequeueOnly"}}
             shard 001 is named 1; with mysql_num_db_per_queue n there are also 1d1 … 1d(n-1)
    Redis    {"shards": [{"name", "shardConfig": {"master", "slave", "dequeueOnly"}}]}

The last two are PinLater's. In each, `abandon: [NAME, ...]` names shards that may be removed with
the jobs that they hold.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import NamedTuple, get_type_hints

from pinlaterd.config.allowed import Between, Matching, OneOf, characters
from pinlaterd.config.document import FileReader, ReadBytes, Section, ValueNode, secret_keys
from pinlaterd.config.layout import (
    CLUSTER_KEY_FILE,
    CONFIG_FILES,
    ETC,
    LOCAL_FILE,
    SERVER_FILE,
    read_file,
)
from pinlaterd.config.password import is_hash
from pinlaterd.config.push_hosts import PushHosts, host_of
from pinlaterd.config.schema import (
    CLUSTER_NAME,
    DEFAULT_ENGINE,
    DOWNSTREAM_ENVIRONMENT,
    ENGINES,
    HASH_ENVIRONMENT,
    HTTP_URL,
    MAX_GLOB_CHARS,
    MAX_PORT,
    MOST_JOB_TYPE_CHARS,
    PAUSE_NOTE,
    PORT_ENVIRONMENT,
    ROLES,
    USER_NAME,
    AccessToken,
    Address,
    Config,
    JobType,
    PushSettings,
    QueueSettings,
    SentinelSettings,
    ServerSettings,
    Setting,
    ShardSettings,
    UserSettings,
    default_file,
    default_queue_settings,
    settings_of,
)
from pinlaterd.errors import ConfigError
from pinlaterd.model import QUEUE_NAME, SHARD_NAME


def load_config(etc: Path, read: ReadBytes = read_file) -> Config:
    """Load the configuration in the folder `etc`. Raises ConfigError with every problem."""
    files = [FileReader(etc / name, read) for name in CONFIG_FILES]
    if not etc.is_dir():
        raise ConfigError([f"{etc}: no such folder; `pinlaterd init DIR` writes a new deployment"])
    server_file, shards_file, queues_file, users_file, job_types_file, local_file = files
    local = _read_settings(local_file, shared=False)
    server = _read_server(server_file, local)
    shards, abandon = _read_shards(shards_file, server)
    _check_cluster(local, server, etc / CLUSTER_KEY_FILE, len(shards))
    job_types = _read_job_types(job_types_file)
    named, pushes = _read_queues(queues_file, server, job_types)
    of_types = {name: default_queue_settings(server, one) for name, one in job_types.items()}
    queues = {**of_types, **named}
    users = _read_users(users_file)
    if not (users or users_file.problems):
        _check_reach(local.file if "http_host" in local else server_file, server)
    problems = [problem for file in files for problem in file.problems]
    if problems:
        raise ConfigError(problems)
    held = tuple(file.path.name for file in files if not file.blank)
    warnings = tuple(warning for file in files for warning in file.warnings)
    return Config(server, shards, queues, abandon, held, warnings, users, job_types, pushes)


# --- pinlaterd.yaml and local.yaml ------------------------------------------------------------

_HASH = "admin_password_hash"
_HASH_FILE = f"{_HASH}_file"
_SERVER_SETTINGS = settings_of(ServerSettings)
_SERVER_KINDS = {
    name: kind
    for name, kind in get_type_hints(ServerSettings).items()
    if name in _SERVER_SETTINGS and name != _HASH
}


def _read_settings(file: FileReader, *, shared: bool) -> Section:
    """Read pinlaterd.yaml if `shared`, else local.yaml; drop keys that belong in the other."""
    root = file.read()
    section = Section(file, root if root is not None else ValueNode(0))
    section.allow((*_SERVER_SETTINGS, _HASH_FILE))
    for key in list(section.values):
        setting = _SERVER_SETTINGS.get(key, _SERVER_SETTINGS[_HASH])
        if shared and setting.only_local:
            section.problem(key, f"each server has its own; write it into {ETC / LOCAL_FILE}")
        elif not shared and not setting.machine:
            section.problem(key, f"is the same on all servers; write it into {ETC / SERVER_FILE}")
        else:
            continue
        del section.values[key]
    return section


def _read_server(file: FileReader, local: Section) -> ServerSettings:
    section = _read_settings(file, shared=True)
    given = section.get_all(_SERVER_KINDS, _SERVER_SETTINGS)
    given |= local.get_all(_SERVER_KINDS, _SERVER_SETTINGS)
    if local.values.get("cluster") and "server_set_file" in given:
        problem = "the servers of a cluster divide the rates without it; remove it"
        section.problem("server_set_file", problem)
    port = os.environ.get(PORT_ENVIRONMENT, "")
    if "http_port" not in given and port.isdecimal() and 0 < int(port) <= MAX_PORT:
        given["http_port"] = int(port)
    if not given.get(_DOWNSTREAM):
        given[_DOWNSTREAM] = _read_downstream(file)
    return ServerSettings(**given, admin_password_hash=_read_hash(section))


_DOWNSTREAM = "downstream_url"


def _read_downstream(file: FileReader) -> str:
    """Return the environment's downstream, or "" if there is none."""
    url = os.environ.get(DOWNSTREAM_ENVIRONMENT, "").rstrip("/")
    problem = HTTP_URL.problem(url, url) if url else ""
    if problem:
        file.problem(0, f"environment {DOWNSTREAM_ENVIRONMENT}", f"{problem}; {HTTP_URL}")
        return ""
    return url


_CLUSTER_NEEDS = ("cluster", "server", "zookeeper", "peer_host")


def _check_cluster(local: Section, server: ServerSettings, key: Path, shards: int) -> None:
    """Check that a server of a cluster has all that makes it one, and no other has any of it."""
    if not any(name in local for name in _CLUSTER_NEEDS):
        if key.exists():
            cure = f"restore {local.file.path}, or remove {key} if it is not to belong to one"
            local.file.problem(0, "", f"names no cluster, but {key} is that of one; {cure}")
        return
    local.require(*_CLUSTER_NEEDS, reason="; a server of a cluster needs it")
    get_key = "copy it from another server, with mode 600"
    if not key.exists():
        local.file.problem(0, "", f"{key} is missing; {get_key}")
    elif key.stat().st_mode & 0o077:
        local.file.problem(0, "", f"{key}: others can read it; chmod 600 {key}")
    ports = {getattr(server, name): name for name in ("stats_port", "peer_port", "port")}
    for name in ("stats_port", "peer_port"):
        port = getattr(server, name)
        if ports[port] != name:
            local.problem(name, f"{port} is the {ports[port]}, too; choose another")
    last = server.shard_ports + max(shards, 1) - 1
    for port in (*ports, MAX_PORT + 1):
        if server.shard_ports <= port <= last:
            problem = f"the shards would have the ports to {last}, {port} among them; choose others"
            local.problem("shard_ports", problem)


def _check_reach(file: FileReader, server: ServerSettings) -> None:
    """Check that without users HTTP and the dashboard are open to this machine only."""
    add = "add one with `pinlater-admin user add` first"
    is_open = server.insecure or bool(server.http_authorizer)
    http_host = server.http_host if server.http_port and not is_open else ""
    web_host = server.web_host if server.web_port else ""
    for key, host, cure in (
        ("http_host", http_host, f"{add}, or set `insecure: true`"),
        ("web_host", web_host, add),
    ):
        if host and not _is_loopback(host):
            problem = f"{host!r} reaches beyond this machine, and there are no users; {cure}"
            file.problem(0, key, problem)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _read_hash(section: Section) -> str:
    """Read the environment's hash, else the file's; a malformed one is a problem, never shown."""
    text, line, key = os.environ.get(HASH_ENVIRONMENT, ""), 0, f"environment {HASH_ENVIRONMENT}"
    if not text:
        text = section.secret(_HASH).value
        key = _HASH if _HASH in section else _HASH_FILE
        line = section.values[key].line if key in section else 0
    if text and not is_hash(text):
        problem = "not a hash; make one with `pinlater-admin hash-password`"
        section.file.problem(line, key, problem)
        return ""
    return text


# --- queues.yaml ------------------------------------------------------------------------------

_QUEUE_SETTINGS = {**_SERVER_SETTINGS, **settings_of(QueueSettings)}
_COUNTS = dict.fromkeys(
    ("max_in_progress", "max_pending", "default_attempts", "default_priority"), int
)
_FLOATS = dict.fromkeys(get_type_hints(QueueSettings), float)
_PAUSE = {"paused": bool, **dict.fromkeys(PAUSE_NOTE, str)}
_QUEUE_KINDS: Mapping[str, type] = {**_FLOATS, **_PAUSE, **_COUNTS}
# What PinLater's form may hold; all but the rate is ours.
LIMIT, PINLATERS_LIMIT = "max_jobs_per_second", "maxJobsPerSecond"
_PINLATER_QUEUE_KINDS: Mapping[str, type] = {PINLATERS_LIMIT: float, **_PAUSE, **_COUNTS}


def _read_queues(
    file: FileReader, server: ServerSettings, job_types: Mapping[str, JobType]
) -> tuple[dict[str, QueueSettings], dict[str, PushSettings]]:
    """Return what the file says of queues, and of those that are pushed."""
    root = file.read()
    if root is None:
        return {}, {}
    section = Section(file, root)
    section.allow(("queues",))
    if "queues" not in section:
        return {}, {}
    defaults = default_queue_settings(server)
    if section.values["queues"].items is not None:
        section = Section(file, root, refuse_unknown=False)
        return _read_pinlater_queues(section, defaults), {}
    queues = section.section("queues")
    named = {name: queues.section(name) for name in queues.values if _is_queue(queues, name, name)}
    # Before their settings are read, which forgets what is no setting.
    pushes = {
        name: _read_push(one.section(_PUSH), server) for name, one in named.items() if _PUSH in one
    }
    settings = {}
    for name, one in named.items():
        defaults = default_queue_settings(server, job_types.get(name))
        if name in pushes and pushes[name].max_in_progress is not None:
            defaults = replace(defaults, max_in_progress=pushes[name].max_in_progress)
        settings[name] = _read_queue(one, defaults, _QUEUE_KINDS)
    return settings, pushes


_PUSH = "push"
_PUSH_SETTINGS = settings_of(PushSettings)
_PUSH_KINDS = {
    name: int if name in _COUNTS else kind
    for name, kind in get_type_hints(PushSettings).items()
    if name in _PUSH_SETTINGS
}
# Of a header: nothing that could begin another one.
_HEADER = Matching(re.compile(r"[\x20-\x7e]{1,4096}"), "expected printable ASCII", shown=False)
_FRAMING = {"content-length", "transfer-encoding"}
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}\Z")


def _read_push(section: Section, server: ServerSettings) -> PushSettings:
    section.allow((*_PUSH_KINDS, "headers"))
    section.require("url")
    host = host_of(section.text("url"))
    if host and not PushHosts(server.push_hosts).names(host):
        cure = f"list it under push_hosts in {ETC / SERVER_FILE}"
        section.problem("url", f"host {host!r} is not one to push to; {cure}")
    headers = section.section("headers") if "headers" in section else None
    names = () if headers is None else headers.values
    given = section.get_all(_PUSH_KINDS, _PUSH_SETTINGS)
    if headers is not None:
        for name in [name for name in names if not _HEADER_NAME.match(name)]:
            headers.problem(name, "no name of a header")
        for name in [name for name in names if name.lower() in _FRAMING]:
            headers.problem(name, "pinlaterd itself says how long a body is; leave it out")
        given["headers"] = {
            name: headers.get(name, str, Setting("", _HEADER, secret=True)) or "" for name in names
        }
    return PushSettings(**{"timeout_seconds": server.push_timeout_seconds, **given})


def _read_pinlater_queues(section: Section, defaults: QueueSettings) -> dict[str, QueueSettings]:
    queues: dict[str, QueueSettings] = {}
    for item in section.sections("queues"):
        item.allow(("name", "queueConfig"))
        if not item.require("name"):
            continue
        name = item.values["name"].text
        if not _is_queue(item, "name", name):
            continue
        if name in queues:
            item.problem("name", f"a second queue {name!r}")
        queues[name] = _read_queue(item.section("queueConfig"), defaults, _PINLATER_QUEUE_KINDS)
    return queues


def _read_queue(
    section: Section, defaults: QueueSettings, kinds: Mapping[str, type]
) -> QueueSettings:
    section.allow((*kinds, _PUSH) if kinds is _QUEUE_KINDS else kinds)
    # `max_jobs_per_second:` and nothing means no limit
    section.values = {name: one for name, one in section.values.items() if not one.is_nothing}
    settings = {**_QUEUE_SETTINGS, PINLATERS_LIMIT: _QUEUE_SETTINGS[LIMIT]}
    given = section.get_all(kinds, settings)
    if PINLATERS_LIMIT in given:
        given[LIMIT] = given.pop(PINLATERS_LIMIT)
    if given.get("paused"):
        given[LIMIT] = 0.0
    return replace(defaults, **given)


def _is_queue(section: Section, key: str, name: str) -> bool:
    """Tell whether `name`, which stands at `key`, can be a queue's."""
    if QUEUE_NAME.match(name):
        return True
    section.problem(key, f"{name[:80]!r} is no queue name; use letters, digits and underscores")
    return False


# --- users.yaml -------------------------------------------------------------------------------

_USER_KEYS = ("roles", "queues", "password_hash", "tokens")
_SHA256 = Setting("", Matching(re.compile(r"[0-9a-f]{64}"), "expected 64 hexadecimal digits"))


def _read_users(file: FileReader) -> dict[str, UserSettings]:
    root = file.read()
    if root is None:
        return {}
    file.warn_of_readers(file.path)
    section = Section(file, root)
    section.allow(("users",))
    users = section.section("users")
    return {
        name: _read_user(users.section(name), name)
        for name in users.values
        if _is_user(users, name)
    }


def _is_user(users: Section, name: str) -> bool:
    problem = USER_NAME.problem(name, name)
    if problem:
        users.problem(name, f"{problem}; {USER_NAME}")
    return not problem


def _read_user(section: Section, name: str) -> UserSettings:
    section.allow(_USER_KEYS)
    section.require("roles", reason=f"; choose from {', '.join(ROLES)}")
    hashed = section.get("password_hash", str, Setting("", secret=True)) or ""
    if hashed and not is_hash(hashed):
        section.problem("password_hash", "not a hash; make one with `pinlater-admin user add`")
    tokens = section.sections("tokens") if "tokens" in section else ()
    if not hashed and not tokens:
        section.problem("password_hash", "missing, and so are tokens; nobody could be this user")
    return UserSettings(
        name,
        section.texts("roles", OneOf(ROLES, "role")),
        section.texts("queues", characters(1, MAX_GLOB_CHARS)) or ("*",),
        hashed,
        tuple(map(_read_token, tokens)),
    )


def _read_token(section: Section) -> AccessToken:
    section.allow(("sha256", "expires"))
    section.require("sha256")
    at = _read_time(section, "expires") if "expires" in section else None
    expires_at_ms = None if at is None else round(at.timestamp() * 1000)
    return AccessToken(section.get("sha256", str, _SHA256) or "", expires_at_ms)


def _read_time(section: Section, name: str) -> datetime | None:
    try:
        return datetime.fromisoformat(section.values[name].text).astimezone(UTC)
    except (ValueError, OverflowError):
        section.problem(name, "expected a time as 2027-01-31T00:00:00Z")
        return None


# --- job_types.yaml ---------------------------------------------------------------------------

_JOB_TYPE_SETTINGS = settings_of(JobType)
_JOB_TYPE_KINDS = {
    name: kind for name, kind in get_type_hints(JobType).items() if name in _JOB_TYPE_SETTINGS
}
_REQUIRED = ("name", "delivery_strategy", "attempts", "concurrency", "created_at")


def _read_job_types(file: FileReader) -> dict[str, JobType]:
    root = file.read()
    if root is None:
        return {}
    section = Section(file, root)
    section.allow(("job_types",))
    listed = section.section("job_types")
    found: dict[str, JobType] = {}
    names: set[str] = set()
    for queue in listed.values:
        if not _is_queue(listed, queue, queue):
            continue
        one = _read_job_type(listed.section(queue), queue)
        if one is not None:
            if one.name in names:
                listed.problem(queue, f"a second job type {one.name!r}")
            names.add(one.name)
            found[queue] = one
    return found


def _read_job_type(section: Section, queue: str) -> JobType | None:
    section.allow((*_REQUIRED, "archive_hours"))
    if not section.require(*_REQUIRED):
        return None
    name = section.values["name"].text
    if not 1 <= len(name) <= MOST_JOB_TYPE_CHARS:
        section.problem("name", f"use 1 to {MOST_JOB_TYPE_CHARS} characters")
    created_at = _read_time(section, "created_at")
    given = section.get_all(_JOB_TYPE_KINDS, _JOB_TYPE_SETTINGS)
    if created_at is None or not given.keys() >= _JOB_TYPE_KINDS.keys() & {*_REQUIRED}:
        return None
    return JobType(name, queue, created_at, **given)


# --- shards.yaml ------------------------------------------------------------------------------

ABANDON = "abandon"
MAX_SHARDS = 1024
_NAME_RULE = "use 1 to 16 letters, digits and hyphens"
_ENGINE = Setting("", OneOf(ENGINES, "engine"))
_HOST = Setting("", characters(1, 255))
_PORT = Setting("", Between(1, MAX_PORT))
_SERVER = Setting("", CLUSTER_NAME)
_PINLATER_MYSQL_NAME = re.compile(r".*?([0-9]+)\Z", re.DOTALL)


class Form(Enum):
    """The formats in which shards can be configured."""

    OURS = "ours"
    PINLATER_MYSQL = "PinLater's for MySQL"
    PINLATER_REDIS = "PinLater's for Redis"


def form_of(root: ValueNode) -> Form:
    listed = root.get("shards")
    if listed is not None and listed.items is not None:
        return Form.PINLATER_REDIS
    if listed is None and any(entry.value.get("master") for entry in root.entries or ()):
        return Form.PINLATER_MYSQL
    return Form.OURS


def _pinlater_mysql_shards(key: str, databases: int) -> Sequence[str]:
    """Return the shards that an entry of PinLater's for MySQL stands for, if any."""
    match = _PINLATER_MYSQL_NAME.match(key)
    if match is None:
        return []
    number = match[1].lstrip("0") or "0"
    return [f"{number}d{index}" if index else number for index in range(databases)]


class _Keys(NamedTuple):
    """The keys of a shard's settings in one form of the file."""

    engine: str
    known: tuple[str, ...]
    required: tuple[str, ...] = ()
    reason: str = ""  # why those are

    @property
    def dequeue_only(self) -> str:
        """Name the key that this format has for dequeue-only shards."""
        return next(key for key in _DEQUEUE_ONLY if key in self.known)


_DEQUEUE_ONLY = ("dequeue_only", "dequeueOnly")  # ours, PinLater's
_ALL = ("engine", "dequeue_only", "server")
_PASSWORD = secret_keys("passwd")
_MYSQL = ("master", "user", "slave", *_PASSWORD)
_REDIS = ("master", "slave", "sentinel", "user", *_PASSWORD)
_NEEDED = ("master", "user")
_OURS = {
    "sqlite": _Keys("sqlite", (*_ALL, "file")),
    "mysql": _Keys("mysql", (*_ALL, *_MYSQL), _NEEDED, "; mysql shards need it"),
    "redis": _Keys("redis", (*_ALL, *_REDIS)),
}
_PINLATER_MYSQL = _Keys("mysql", ("dequeueOnly", *_MYSQL), _NEEDED)
_PINLATER_REDIS = _Keys("redis", ("dequeueOnly", "master", "slave", *_PASSWORD), ("master",))
assert set(_OURS) == set(ENGINES)


class ListedShard(NamedTuple):
    """One entry of shards.yaml, which stands for the shards `names`: they are named at `key`."""

    names: Sequence[str]
    owner: Section
    key: str
    settings: Section
    keys: _Keys


def _read_shards(
    file: FileReader, server: ServerSettings
) -> tuple[Mapping[str, ShardSettings], tuple[str, ...]]:
    """Read the shards, in the order of the file, and the abandoned ones."""
    root = file.read(required=True)
    if root is None:
        if not file.problems:
            file.problem(1, "shards", "the file is empty; name at least one shard")
        return {}, ()
    shards: dict[str, ShardSettings] = {}
    owners: dict[str, str] = {}  # of SQLite's files
    for entry in shard_entries(file, root, server.mysql_num_db_per_queue):
        shard = _shard(entry, owners)
        _check_place(entry, in_cluster=bool(server.cluster))
        for name in entry.names:
            if not _is_shard(entry.owner, entry.key, name):
                break
            if name in shards:
                entry.owner.problem(entry.key, f"a second shard {name!r}; rename one")
            else:
                shards[name] = replace(shard, name=name)
    if not shards and not file.problems:
        file.problem(root.line, "shards", "no shard is named; name at least one")
    if len(shards) > MAX_SHARDS:
        problem = f"{len(shards)} shards are too many; at most {MAX_SHARDS}"
        file.problem(root.line, "shards", problem)
    return shards, _read_abandon(file, root.get(ABANDON), shards)


def shard_entries(file: FileReader, root: ValueNode, databases: int) -> Iterator[ListedShard]:
    """Yield the entries; `databases`: so many shards are in each of PinLater's form for MySQL."""
    form = form_of(root)
    if root.entries is not None:  # no form of the file has a place for it
        root = replace(root, entries=[entry for entry in root.entries if entry.key != ABANDON])
    section = Section(file, root, refuse_unknown=form is Form.OURS)
    if form is Form.PINLATER_MYSQL:
        yield from _pinlater_mysql_entries(section, databases)
        return
    section.allow(("shards",))
    if form is Form.PINLATER_REDIS:
        yield from _pinlater_redis_entries(section.sections("shards"))
    elif "shards" in section:
        yield from _our_entries(section.section("shards"))
    elif root.entries is not None:
        section.problem("shards", "missing; write `shards:` and the shards below it")


def _pinlater_mysql_entries(section: Section, databases: int) -> Iterator[ListedShard]:
    for key in section.values:
        names = _pinlater_mysql_shards(key, databases)
        if names:
            yield ListedShard(names, section, key, section.section(key), _PINLATER_MYSQL)
        else:
            section.problem(key, "expected a name that ends in the shard's number")


def _pinlater_redis_entries(items: Sequence[Section]) -> Iterator[ListedShard]:
    for item in items:
        item.allow(("name", "shardConfig"))
        if not item.require("name", "shardConfig"):
            continue
        name = item.values["name"].text
        if _is_shard(item, "name", name):
            yield ListedShard([name], item, "name", item.section("shardConfig"), _PINLATER_REDIS)


def _our_entries(shards: Section) -> Iterator[ListedShard]:
    for name in shards.values:
        if not _is_shard(shards, name, name):
            continue
        settings = shards.section(name)
        has_engine = "engine" in settings
        engine = settings.get("engine", str, _ENGINE) if has_engine else DEFAULT_ENGINE
        if engine is not None:
            yield ListedShard([name], shards, name, settings, _OURS[engine])


def _is_shard(section: Section, key: str, name: str) -> bool:
    """Tell whether `name`, which stands at `key`, can be a shard's."""
    if SHARD_NAME.match(name):
        return True
    section.problem(key, f"{name[:40]!r} is no shard name; {_NAME_RULE}")
    return False


def _shard(entry: ListedShard, owners: dict[str, str]) -> ShardSettings:
    section, keys = entry.settings, entry.keys
    section.allow(keys.known)
    section.require(*keys.required, reason=keys.reason)
    if keys is _OURS["redis"]:
        _check_redis_master(section)
    passwd = section.secret("passwd")
    return ShardSettings(
        name=entry.names[0],
        engine=keys.engine,
        dequeue_only=section.get(keys.dequeue_only, bool) or False,
        server=section.get("server", str, _SERVER) or "",
        file=_file(section, entry.names[0], owners) if keys.engine == "sqlite" else "",
        master=_address(section, "master"),
        slave=_address(section, "slave"),
        sentinel=_sentinel(section.section("sentinel")) if "sentinel" in section else None,
        user=section.text("user"),
        passwd=passwd.value,
        passwd_env=passwd.variable,
    )


def _check_place(entry: ListedShard, *, in_cluster: bool) -> None:
    """Report a shard that can't be where it is to be, and secrets that would lie in ZooKeeper."""
    section = entry.settings
    if not in_cluster:
        if "server" in section:
            line, text = section.values["server"].line, "this is a single machine: ignored"
            section.file.warn(line, section.key("server"), text)
        return
    if "file" in entry.keys.known:
        section.require("server", reason="; its file is on one server: name that")
    for one in (section, section.section("sentinel")):
        if "passwd" in one:
            text = "would lie in ZooKeeper as it is; use passwd_env or passwd_file"
            one.file.warn(one.values["passwd"].line, one.key("passwd"), text)


def _file(section: Section, name: str, owners: dict[str, str]) -> str:
    path = default_file(name)
    if "file" in section:
        given = section.get("file", str)
        if given is None:
            return path
        if not given or "\0" in given:
            section.problem("file", "expected a path")
            return path
        path = given
    owner = owners.setdefault(str(Path(path)), name)
    if owner != name:
        section.problem("file", f"shard {owner!r} has the file {path!r} already")
    return path


def _check_redis_master(section: Section) -> None:
    """Check that the master is named, or Sentinels that name it."""
    if "sentinel" not in section:
        section.require("master", reason="; redis shards need it, or sentinel")
        return
    for key in ("master", "slave"):
        if key in section:
            section.problem(key, "Sentinels know it; keep only sentinel")


def _sentinel(section: Section) -> SentinelSettings | None:
    section.allow(("service", "addresses", "user", *_PASSWORD))
    if not section.require("service", "addresses"):
        return None
    found = [_address_at(place) for place in section.sections("addresses")]
    if not found:
        section.problem("addresses", "name at least one Sentinel")
    passwd = section.secret("passwd")
    return SentinelSettings(
        service=section.get("service", str, _HOST) or "",
        addresses=tuple(address for address in found if address is not None),
        user=section.text("user"),
        passwd=passwd.value,
        passwd_env=passwd.variable,
    )


def _address(section: Section, name: str) -> Address | None:
    if name not in section or (section.values[name].is_nothing and name != "master"):
        return None
    return _address_at(section.section(name))


def _address_at(section: Section) -> Address | None:
    if section.node.is_nothing:
        section.file.problem(section.node.line, section.name, "expected a mapping of host and port")
    if section.node.entries is None:
        return None
    section.allow(("host", "port"))
    if not section.require("host", "port"):
        return None
    host, port = section.get("host", str, _HOST), section.get("port", int, _PORT)
    return None if host is None or port is None else Address(host, port)


def _read_abandon(
    file: FileReader, node: ValueNode | None, shards: Mapping[str, ShardSettings]
) -> tuple[str, ...]:
    if node is None or node.is_nothing:
        return ()
    if node.items is None:
        file.problem(node.line, ABANDON, f"expected a list, got {node.describe()}")
    names = []
    for index, item in enumerate(node.items or ()):
        key = f"{ABANDON}.{index}"
        if not item.is_scalar or not SHARD_NAME.match(item.text):
            file.problem(item.line, key, f"expected a shard's name; {_NAME_RULE}")
        elif item.text in shards:
            file.problem(item.line, key, f"shard {item.text!r} is under shards, too; keep one")
        else:
            names.append(item.text)
    return tuple(names)
