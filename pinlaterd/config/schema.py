"""The configuration: names, units, defaults and limits of all settings, each defined here once.

Times and sizes carry their unit in the name. `pinlaterd init` writes the explanations below into
the files that it makes; `load` checks values against `allowed`.
"""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from pinlaterd.config.allowed import (
    Allowed,
    Between,
    Matching,
    OneOf,
    Re2Pattern,
    characters,
)
from pinlaterd.config.layout import DATA, ETC, LOCAL_FILE, SERVER_FILE
from pinlaterd.errors import address_of
from pinlaterd.model import JobDefaults, JobState

T = TypeVar("T")

KIB = 1024
MIB = 1024 * KIB

ENGINES = ("sqlite", "mysql", "redis")
DEFAULT_ENGINE = "sqlite"
REDIS_LAYOUTS = ("lean", "pinlater")
LOG_LEVELS = ("debug", "info", "warning", "error")
HASH_ENVIRONMENT = "PINLATERD_ADMIN_PASSWORD_HASH"
# Rickover's names.
DOWNSTREAM_ENVIRONMENT = "DOWNSTREAM_URL"
PORT_ENVIRONMENT = "PORT"  # of the HTTP interface, where no file says it
DOWNSTREAM_AUTH_ENVIRONMENT = "DOWNSTREAM_WORKER_AUTH"
# Owners renew their leases once a second: a shorter one would end by an accident.
LEAST_LEASE_SECONDS = 3
# Less would take a server for dead that had a lot to do for a moment.
_LEAST_STORE_ANSWER_SECONDS = 1.0
SECONDS_A_YEAR = 366 * 24 * 3600
HOURS_A_CENTURY = 100 * 366 * 24


class Setting(NamedTuple):
    """The facts about a key that `load` and `init` need, in addition to its type and default."""

    doc: str
    allowed: Allowed = None
    secret: bool = False
    default_of_machine: bool = False  # which is left out of the files that `init` writes
    live: bool = False  # a change acts without a restart
    machine: bool = False  # may stand in local.yaml, which goes before pinlaterd.yaml
    only_local: bool = False  # and nowhere else


def _setting(default: T, doc: str, allowed: Allowed = None, **flags: bool) -> T:
    setting = Setting(doc, allowed, **flags)
    return field(default=default, metadata={"setting": setting}, repr=not setting.secret)


# A claim descriptor HOST:PORT:STARTMILLIS:SOURCE:COUNTER has to fit into PinLater's
# VARCHAR(200); a port, a time, a source of 120 bytes and a counter leave this for the host.
ADVERTISED_HOST_CHARS = 36
MAX_PORT = 65535
MOST_FRAME_BYTES = 1024 * MIB


# Where a process that listens everywhere is reached from this machine.
_OWN_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104
_OWN_HOST_NAME = socket.gethostname()[:ADVERTISED_HOST_CHARS]
CLUSTER_NAME = Matching(
    re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"),
    "use 1 to 64 letters, digits, dots, hyphens and underscores",
)
_HOST_PORT = r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[1-9][0-9]{0,4}"
ZOOKEEPER_HOSTS = Matching(
    re.compile(rf"{_HOST_PORT}(?:,{_HOST_PORT})*"), "expected HOST:PORT,HOST:PORT without spaces"
)


_ANY_HOST = characters(1, 255)
_NOTE = Matching(re.compile(r"[^\x00-\x1f\x7f]{0,200}"), "expected up to 200 printable characters")
_ANY_PORT = Between(1, MAX_PORT)


class _Url(Matching):
    """A URL whose port is the group `port` of the pattern, without zeros before it."""

    def problem(self, value: Any, written: str) -> str:
        found = self.pattern.fullmatch(value)
        if found is not None and int(found["port"] or 1) > MAX_PORT:
            return "this is not valid"
        return super().problem(value, written)


_PORT = "0*(?P<port>[1-9][0-9]{0,4})"
HTTP_URL = _Url(
    re.compile(rf"https?://(?:\[[^/?#@\s\]]+\]|[^/?#@\s:\[\]]+)(?::(?:{_PORT})?)?(?:/[^?#\s]*)?"),
    "expected http://HOST[:PORT][/PATH] or https://, without a password or a query",
    shown=False,
)


def _machine(default: T, doc: str, allowed: Allowed, **flags: bool) -> T:
    return _setting(default, doc, allowed, machine=True, **flags)


def _only_local(default: T, doc: str, allowed: Allowed, **flags: bool) -> T:
    return _machine(default, doc, allowed, only_local=True, **flags)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """etc/pinlaterd.yaml, and what etc/local.yaml says of this machine."""

    host: str = _machine(
        "127.0.0.1", "address that the Thrift port listens on; 0.0.0.0: all", _ANY_HOST
    )
    port: int = _machine(9010, "Thrift port", _ANY_PORT)
    stats_host: str = _machine(
        "127.0.0.1", "address that the statistics port listens on", _ANY_HOST
    )
    stats_port: int = _machine(
        9999, "HTTP port of /stats.txt, /stats.json, /metrics, /health", _ANY_PORT
    )
    http_hosts: str = _machine(
        "",
        "further names by which clients of its HTTP ports may call this server, with commas"
        " between; its addresses and the machine's own names are valid as they are",
        Matching(
            re.compile(r"(?:[\w-]+(?:\.[\w-]+)*(?:,[\w-]+(?:\.[\w-]+)*)*)?"),
            "expected NAME,NAME without spaces",
        ),
        live=True,
    )
    http_host: str = _machine("127.0.0.1", "address that the HTTP interface listens on", _ANY_HOST)
    http_port: int = _machine(
        9013, "port of the HTTP interface; 0: there is none", Between(0, MAX_PORT)
    )
    http_processes: int = _machine(
        1, "processes of the HTTP interface, all on the same port", Between(1, 64)
    )
    insecure: bool = _setting(
        False,
        "whether other machines may use the HTTP interface while it has no users (true or false)",
        machine=True,
    )
    downstream_url: str = _setting(
        "",
        "HTTP server that job types are pushed to; or the environment's"
        f" {DOWNSTREAM_ENVIRONMENT}. None: they are not pushed",
        HTTP_URL._replace(pattern=re.compile(rf"(?:{HTTP_URL.pattern.pattern})?")),
        live=True,
    )
    downstream_auth_file: str = _setting(
        "",
        "file with the password that the downstream expects of the user `jobs`, relative to the"
        f" deployment's folder; or the environment's {DOWNSTREAM_AUTH_ENVIRONMENT}",
        characters(0, 4096),
        live=True,
    )
    push_processes: int = _machine(
        1,
        "processes that push jobs to HTTP servers, where something is to be pushed; 0: none",
        Between(0, 64),
        live=True,
    )
    push_hosts: str = _setting(
        "",
        "hosts that queues with `push` may name in their URLs, with commas between, as shell"
        " patterns; addresses of this machine and of private networks only if they are listed,"
        " too, as 127.0.0.1 or 10.0.0.0/8",
        Matching(re.compile(r"[\w.:*?\[\]/,-]*"), "expected HOST,HOST without spaces"),
        live=True,
    )
    push_timeout_seconds: float = _setting(
        300.0,
        "an attempt whose downstream has not reported how it ended within this has failed, seconds",
        Between(0.1, SECONDS_A_YEAR),
        live=True,
    )
    web_host: str = _machine("127.0.0.1", "address that the dashboard listens on", _ANY_HOST)
    web_port: int = _machine(9011, "port of the dashboard; 0: there is none", Between(0, MAX_PORT))
    web_label: str = _setting(
        "",
        "word that the dashboard shows in red, such as PRODUCTION",
        Matching(re.compile(r".{0,24}"), "expected at most 24 characters"),
        live=True,
    )
    web_writes: bool = _setting(
        False, "whether the dashboard may change anything (true or false)", live=True
    )
    web_redact: str = _setting(
        "",
        "what the dashboard leaves out of bodies and statuses for users without the role `bodies`",
        Re2Pattern(),
        live=True,
    )
    advertised_host: str = _machine(
        _OWN_HOST_NAME,
        "this server's name in claim descriptors (default: the machine's host name)",
        characters(1, ADVERTISED_HOST_CHARS, ":"),
        default_of_machine=True,
    )
    routers: int = _machine(1, "router processes, all on the same port", Between(1, 64))
    cluster: str = _only_local("", "the cluster's name; none: a single machine", CLUSTER_NAME)
    server: str = _only_local("", "this server's name in the cluster", CLUSTER_NAME)
    zookeeper: str = _only_local("", "the servers of ZooKeeper", ZOOKEEPER_HOSTS)
    peer_host: str = _only_local(
        "",
        "address that other servers reach this one at, and that it listens on for them",
        _ANY_HOST,
    )
    peer_port: int = _only_local(9012, "port for the coordinators of other servers", _ANY_PORT)
    shard_ports: int = _only_local(
        9100,
        "first of the ports for routers of other servers; as many as there are shards",
        _ANY_PORT,
    )
    weight: float = _only_local(
        1.0,
        "this server's part of the shards, compared with the weights of the others",
        Between(0.01, 100),
        live=True,
    )
    server_set_file: str = _setting(
        "",
        "file that lists the servers which share the queues' rates, HOST:PORT a line, relative to"
        " the deployment's folder; none: this server has the whole rates",
        characters(0, 4096),
    )
    server_set_name: str = _setting(
        "",
        "this server's HOST:PORT in that file (default: advertised_host and port)",
        characters(0, 300),
    )
    server_set_path: str = _setting(
        "",
        "path of ZooKeeper where servers of a cluster announce themselves; none: nowhere",
        Matching(re.compile(r"(?:(?:/[\w-]+)+)?"), "expected a path like /discovery/pinlater/prod"),
    )

    num_priority_levels: int = _setting(
        3, "priorities are 1 (first) to this; lower it only once nothing uses them", Between(1, 127)
    )
    max_job_body_bytes: int = _setting(
        1 * MIB, "longest body of a job, bytes", Between(1, 1024 * MIB)
    )
    max_queues: int = _setting(
        10_000,
        "at this number of queues createQueue is refused; existing queues are served",
        Between(1, 1_000_000),
        live=True,
    )
    max_jobs_per_call: int = _setting(
        10_000,
        "a list of more jobs, acks, checkpoints or descriptors in a call is refused",
        Between(1, 1_000_000),
        live=True,
    )
    enqueue_split_jobs: int = _setting(
        1000, "an enqueue of more jobs is split over shards", Between(1, 1_000_000), live=True
    )
    max_dequeue_wait_ms: int = _setting(
        30_000,
        "longest wait of a long-polling dequeue, milliseconds",
        Between(0, 3_600_000),
        live=True,
    )
    request_timeout_ms: int = _setting(
        10_000, "a call is answered within this (plus its own wait), ms", Between(100, 600_000)
    )
    shard_restart_grace_ms: int = _setting(
        3000,
        "how long calls wait for a shard that is away, milliseconds; 0: not at all",
        Between(0, 600_000),
    )
    count_limit: int = _setting(
        100_000,
        "how far getJobCount counts, per shard and priority",
        Between(1, 1_000_000_000),
        live=True,
    )
    scan_limit: int = _setting(
        10_000, "most jobs in one answer of scanJobs", Between(1, 1_000_000), live=True
    )

    job_claimed_timeout_seconds: float = _setting(
        600.0,
        "a claim older than this ends: the job is pending again with one attempt less, seconds",
        Between(0.1, SECONDS_A_YEAR),
        live=True,
    )
    job_succeeded_ttl_hours: float = _setting(
        24.0,
        "how long succeeded jobs are kept, hours (fractions allowed)",
        Between(0, HOURS_A_CENTURY),
        live=True,
    )
    job_failed_ttl_hours: float = _setting(
        168.0,
        "how long failed jobs are kept, hours (fractions allowed)",
        Between(0, HOURS_A_CENTURY),
        live=True,
    )
    monitor_interval_seconds: float = _setting(
        10.0,
        "how often each shard looks for expired claims and old jobs, seconds",
        Between(0.05, 3600),
        live=True,
    )
    monitor_batch_size: int = _setting(
        500, "most jobs that one slice of maintenance changes", Between(1, 100_000)
    )

    max_frame_bytes: int = _setting(
        64 * MIB,
        "a longer call is refused, and its connection ends, bytes",
        Between(1 * KIB, MOST_FRAME_BYTES),
    )
    max_http_body_bytes: int = _setting(
        16 * MIB, "a longer body of an HTTP request is refused, bytes", Between(1 * KIB, 1024 * MIB)
    )
    http_authorizer: str = _setting(
        "",
        "asynchronous function that says who makes a request over HTTP, in place of users.yaml",
        Matching(re.compile(r"(?:[\w.]+:\w+)?"), "expected MODULE:NAME"),
    )
    http_cors_origins: str = _setting(
        "",
        "origins of web pages that may use the HTTP interface, with commas between"
        " (https://jobs.example.com)",
        Matching(
            re.compile(r"(?:https?://[^\s,/]+(?:,https?://[^\s,/]+)*)?"),
            "expected SCHEME://HOST or SCHEME://HOST:PORT, with commas between, without spaces",
        ),
        live=True,
    )
    max_response_bytes: int = _setting(
        32 * MIB, "a dequeue's answer stops growing at this, bytes", Between(1 * KIB, 1024 * MIB)
    )
    max_connections: int = _setting(
        10_000,
        "client connections of one router; then the longest idle ends",
        Between(1, 1_000_000),
    )
    max_buffered_bytes: int = _setting(
        256 * MIB,
        "partial frames and unsent answers of all connections of one router, bytes; it also sizes"
        " two more parts: answers in preparation, and calls on their way to shards",
        Between(1 * MIB, 1024 * 1024 * MIB),
    )
    max_calls_in_flight: int = _setting(
        20_000, "calls in flight in one router", Between(1, 10_000_000)
    )
    max_calls_per_connection: int = _setting(
        1000,
        "pipelined calls of one connection in flight; fewer on a new connection, and while answers"
        " are large",
        Between(1, 1_000_000),
    )
    max_waiting_dequeues: int = _setting(
        20_000,
        "dequeues of one router that wait for jobs or their rate; more are refused",
        Between(1, 10_000_000),
    )
    max_waiting_per_connection: int = _setting(
        100,
        "pipelined dequeues of one connection in flight, as each of them may wait",
        Between(1, 1_000_000),
    )
    shard_buffer_bytes: int = _setting(
        32 * MIB,
        "memory of one shard for ready jobs and fresh bodies, bytes",
        Between(1 * MIB, 1024 * 1024 * MIB),
    )
    health_failures_in_row: int = _setting(
        5, "a shard whose store failed this often in a row gets no new work", Between(1, 1_000_000)
    )
    health_failure_share: float = _setting(
        0.5,
        "a shard whose store failed in this share of its uses gets no new work",
        Between(0.001, 1),
    )
    health_window_seconds: float = _setting(
        30.0, "period over which that share is counted, seconds", Between(1, 3600)
    )
    health_slow_factor: float = _setting(
        20.0,
        "a shard whose commits take this many times the normal time gets no new work",
        Between(2, 1_000_000),
    )
    health_slow_ms: int = _setting(
        500, "commits shorter than this are never too slow, milliseconds", Between(1, 600_000)
    )
    owner_lease_seconds: float = _setting(
        10.0,
        "a frozen or cut-off owner of a mysql or redis shard loses it after this, seconds;"
        " half of this, or of request_timeout_ms, is the time limit for a server's answer (1 s at"
        " least)",
        Between(LEAST_LEASE_SECONDS, 3600),
    )
    redis_layout: str = _setting(
        "lean",
        "layout of new queues in redis shards: lean, or pinlater, which PinLater can serve, too;"
        " existing queues keep theirs",
        OneOf(REDIS_LAYOUTS),
    )
    accept_weak_durability: bool = _setting(
        False,
        "`status` does not warn of stores whose settings may lose jobs whose enqueue was answered",
        live=True,
    )
    mysql_num_db_per_queue: int = _setting(
        1,
        "PinLater's shards.yaml in JSON: shards 1, 1d1 ... 1d(n-1) in each MySQL server",
        Between(1, 1000),
        live=True,
    )
    admin_password_hash: str = _setting(
        "",
        "hash of deleteQueue's password, made by `pinlater-admin hash-password`;"
        f" or admin_password_hash_file: PATH; or the environment's {HASH_ENVIRONMENT}."
        " None: deleteQueue is refused",
        secret=True,
        live=True,
    )
    history_mib: int = _setting(
        32,
        "memory for the history that the dashboard plots, MiB: an hour at 5 s and seven days at"
        " 5 min of each queue, of the busiest ones if it is too little",
        Between(0, 4096),
    )
    log_level: str = _setting("info", "lowest level that is logged", OneOf(LOG_LEVELS), live=True)

    @property
    def own_address(self) -> Address:
        """Return the address at which processes of this server reach its routers."""
        return Address(_OWN_ADDRESS.get(self.host, self.host), self.port)

    @property
    def http_address(self) -> str:
        """HOST:PORT that the HTTP interface listens on."""
        return address_of(self.http_host, self.http_port)

    @property
    def web_address(self) -> str:
        """HOST:PORT that the dashboard listens on."""
        return address_of(self.web_host, self.web_port)

    @property
    def store_answer_seconds(self) -> float:
        """Return the seconds after which a store's server that has not answered is given up.

        Half of the time for a call: so the caller is told what is known before the time is up,
        and what had to wait behind it can still be done by another shard. Half of the lease: so an
        owner that is cut off has given up before its successor may take over."""
        half = min(self.owner_lease_seconds, self.request_timeout_ms / 1000) / 2
        return max(half, _LEAST_STORE_ANSWER_SECONDS)


class Address(NamedTuple):
    """The address of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return address_of(self.host, self.port)


class SentinelSettings(NamedTuple):
    """Redis Sentinels, and the name under which they watch a shard's master."""

    service: str
    addresses: tuple[Address, ...]
    user: str = ""  # at the Sentinels
    passwd: str = ""
    passwd_env: str = ""  # the variable that `passwd` comes from, if it does


def default_file(shard: str) -> str:
    """Locate the file of a SQLite shard whose settings name none."""
    return str(DATA / f"shard-{shard}.sqlite")


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """One shard of etc/shards.yaml. `file` is sqlite's; `master` to `passwd` the servers'.

    A redis shard has `sentinel` or `master`."""

    name: str
    engine: str = DEFAULT_ENGINE
    dequeue_only: bool = False
    server: str = ""  # the only one of the cluster that may own it; "": any
    file: str = ""
    master: Address | None = None
    slave: Address | None = None
    sentinel: SentinelSettings | None = field(default=None, repr=False)  # it may hold a password
    user: str = ""
    passwd: str = field(default="", repr=False)
    passwd_env: str = ""  # the environment variable that `passwd` came from, if it did


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """One queue's settings: those of etc/queues.yaml over the server's."""

    job_claimed_timeout_seconds: float
    job_succeeded_ttl_hours: float
    job_failed_ttl_hours: float
    max_jobs_per_second: float | None = _setting(
        None,
        "dequeues of the whole cluster, jobs/s (fractions allowed; 0 stops them)",
        Between(0, 1_000_000_000),
    )
    paused: bool = _setting(False, "no dequeues, whatever max_jobs_per_second says (true or false)")
    paused_by: str = _setting("", "who has paused it, as commands note it", _NOTE)
    paused_at: str = _setting("", "when that was, as 2026-11-26T02:10:00Z", _NOTE)
    pause_reason: str = _setting("", "why it is paused", _NOTE)
    max_in_progress: int | None = _setting(
        None,
        "jobs that are IN_PROGRESS at a time, over all shards (0 stops dequeues)",
        Between(0, 1_000_000_000),
    )
    max_pending: int | None = _setting(
        None,
        "jobs that are PENDING, over all shards, beyond which enqueues are rejected",
        Between(0, 1_000_000_000_000),
    )
    default_attempts: int | None = _setting(
        None, "attempts of a job that is enqueued without any", Between(1, 2**31 - 1)
    )
    default_priority: int | None = _setting(
        None, "priority of a job that is enqueued without one", Between(1, 127)
    )


# What commands note of a pause.
PAUSE_NOTE = ("paused_by", "paused_at", "pause_reason")


@dataclass(frozen=True, slots=True)
class PushSettings:
    """A queue's `push` in etc/queues.yaml: the HTTP server that its jobs are handed to."""

    url: str = _setting("", "URL that each job is posted to", HTTP_URL)
    timeout_seconds: float = _setting(
        300.0,
        "an attempt whose end was not reported within this has failed, seconds",
        Between(0.1, SECONDS_A_YEAR),
    )
    callback_seconds: float = _setting(
        420.0,
        "how long a claim holds if the process that pushes was killed, seconds",
        Between(1, SECONDS_A_YEAR),
    )
    max_in_progress: int | None = _setting(
        None,
        "as the queue's own, which goes before this",
        Between(0, 1_000_000_000),
    )
    auth_file: str = _setting(
        "",
        "file with USER:PASSWORD, or a bearer token, relative to the deployment's folder",
        characters(0, 4096),
    )
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # of each request


# What a user may do: each may also do what `view` may; `admin` may do everything.
ROLES = ("view", "bodies", "enqueue", "work", "operate", "admin")
USER_NAME = Matching(
    re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"),
    "use 1 to 64 letters, digits, dots, hyphens, underscores and @",
)
MAX_GLOB_CHARS = 200


class AccessToken(NamedTuple):
    """A token of a user, of which only the SHA-256 is known, in hexadecimal."""

    sha256: str
    expires_at_ms: int | None = None  # None: never


@dataclass(frozen=True, slots=True)
class UserSettings:
    """A user of etc/users.yaml: how it proves who it is, and what it may do with which queues."""

    name: str
    roles: tuple[str, ...]
    queues: tuple[str, ...] = ("*",)  # as shell patterns
    password_hash: str = field(default="", repr=False)
    tokens: tuple[AccessToken, ...] = field(default=(), repr=False)


DELIVERY_STRATEGIES = ("at_least_once", "at_most_once")
MOST_JOB_TYPE_CHARS = 200
MOST_INT16 = 2**15 - 1
DEFAULT_ARCHIVE_HOURS = 180 * 24.0
# A job with a key is enqueued, due and done within so long.
_LONGEST_UNDONE_HOURS, _MS_AN_HOUR = 366 * 24.0, 3_600_000


@dataclass(frozen=True, slots=True)
class JobType:
    """A job type of etc/job_types.yaml: what Rickover's interface calls jobs that are run alike. It
    may have any name; its jobs are in `queue`."""

    name: str
    queue: str
    created_at: datetime
    delivery_strategy: str = _setting("", "how often a job may run", OneOf(DELIVERY_STRATEGIES))
    attempts: int = _setting(1, "attempts of a job", Between(1, MOST_INT16))
    concurrency: int = _setting(1, "jobs that run at a time", Between(1, MOST_INT16))
    archive_hours: float = _setting(
        DEFAULT_ARCHIVE_HOURS,
        "how long its ended jobs, and so their ids, are kept, hours",
        Between(0, HOURS_A_CENTURY),
    )

    @property
    def is_retried(self) -> bool:
        """Whether a job may run more than once."""
        return self.delivery_strategy == DELIVERY_STRATEGIES[0]


_NO_WORD = re.compile(r"[^A-Za-z0-9]+")
_READABLE_CHARS, _HASH_CHARS = 20, 11


def queue_of_type(name: str) -> str:
    """Return the name of the queue of a job type: no two names have the same."""
    readable = _NO_WORD.sub("_", name).strip("_")[:_READABLE_CHARS]
    return f"{readable or 'type'}_{hashlib.sha256(name.encode()).hexdigest()[:_HASH_CHARS]}"


@dataclass(frozen=True, slots=True)
class Config:
    """A whole deployment's configuration, checked."""

    server: ServerSettings = field(default_factory=ServerSettings)
    shards: Mapping[str, ShardSettings] = field(default_factory=dict)
    queues: Mapping[str, QueueSettings] = field(default_factory=dict)
    abandon: tuple[str, ...] = ()  # shards that may be removed with the jobs that they hold
    files: tuple[str, ...] = ()  # those of etc/ that held anything at all
    warnings: tuple[str, ...] = field(default=(), compare=False)  # of the files
    users: Mapping[str, UserSettings] = field(default_factory=dict)
    job_types: Mapping[str, JobType] = field(default_factory=dict)  # by their queues
    pushes: Mapping[str, PushSettings] = field(default_factory=dict)  # by queue

    def only(self, shards: Collection[str]) -> Config:
        """Return the configuration with those shards only."""
        kept = {name: shard for name, shard in self.shards.items() if name in shards}
        return replace(self, shards=kept)

    def newest_job_types(self) -> Sequence[JobType]:
        """List the job types, the newest first."""
        return sorted(self.job_types.values(), key=lambda one: one.created_at, reverse=True)

    def limits_of(self, state: JobState) -> Mapping[str, int]:
        """Return how many jobs may be in a state, by the queues where that is limited."""
        setting = "max_pending" if state is JobState.PENDING else "max_in_progress"
        found = {name: getattr(queue, setting) for name, queue in self.queues.items()}
        return {name: limit for name, limit in found.items() if limit is not None}

    def job_defaults(self) -> Mapping[str, JobDefaults]:
        """Return the queues whose jobs have others than the usual defaults, with these."""
        usual = JobDefaults()
        found = {
            name: JobDefaults(
                queue.default_priority or usual.priority,
                queue.default_attempts or usual.attempts_allowed,
            )
            for name, queue in self.queues.items()
        }
        return {name: defaults for name, defaults in found.items() if defaults != usual}

    def keys_kept_ms(self) -> float:
        """Return the longest time for which the job of a key is kept: until it is due and done,
        and then for its TTL."""
        queues = [default_queue_settings(self.server), *self.queues.values()]
        ttls = [max(one.job_succeeded_ttl_hours, one.job_failed_ttl_hours) for one in queues]
        return (max(ttls) + _LONGEST_UNDONE_HOURS) * _MS_AN_HOUR

    def queue(self, name: str) -> QueueSettings:
        """Return the settings of the queue `name`, whether or not queues.yaml names it."""
        settings = self.queues.get(name)
        if settings is not None:
            return settings
        return default_queue_settings(self.server)


# For how long a job of a job type runs before it counts as lost.
JOB_TYPE_TIMEOUT_SECONDS = 7 * 60.0


def default_queue_settings(
    server: ServerSettings, job_type: JobType | None = None
) -> QueueSettings:
    """Return the settings of a queue, that of `job_type` if any, that queues.yaml does not name."""
    if job_type is not None:
        hours = job_type.archive_hours
        return QueueSettings(
            JOB_TYPE_TIMEOUT_SECONDS,
            hours,
            hours,
            max_in_progress=job_type.concurrency,
            default_attempts=job_type.attempts,
        )
    return QueueSettings(
        job_claimed_timeout_seconds=server.job_claimed_timeout_seconds,
        job_succeeded_ttl_hours=server.job_succeeded_ttl_hours,
        job_failed_ttl_hours=server.job_failed_ttl_hours,
    )


def settings_of(schema: type) -> Mapping[str, Setting]:
    """Return the keys of a settings class that a file may hold, and what is known of each."""
    return {
        one.name: one.metadata["setting"] for one in fields(schema) if "setting" in one.metadata
    }


# --- what of pinlaterd.yaml can change under way (`Setting.live`) ----------------------------


class Followed(NamedTuple):
    """`settings`: what can be active now; `needs_restart`: what can't be, and its cure."""

    settings: ServerSettings
    needs_restart: Sequence[str]


def follow(active: ServerSettings, wanted: ServerSettings) -> Followed:
    """Return `active` with those settings of `wanted` that act without a restart."""
    live, needs_restart = {}, []
    for name, setting in settings_of(ServerSettings).items():
        before, after = getattr(active, name), getattr(wanted, name)
        if setting.live:
            live[name] = after
        elif before != after:
            file = LOCAL_FILE if setting.only_local else SERVER_FILE
            needs_restart.append(
                f"{ETC / file}: {name}: {before} is active, the file says {after}; "
                "needs a restart: `pinlaterd up`"
            )
    return Followed(replace(active, **live), needs_restart)


def settings_at_start(server: ServerSettings) -> Mapping[str, object]:
    """Select the settings that a process reads at its start only."""
    return {
        name: getattr(server, name)
        for name, setting in settings_of(ServerSettings).items()
        if not setting.live
    }
