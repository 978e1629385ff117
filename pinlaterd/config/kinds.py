"""The kinds of process that a deployment runs: a row of `KINDS` each.

Whatever has to know which processes there are reads the table: supervisord's programs, the ports
that `up` checks, `pinlaterd KIND`, `pinlater-admin restart KIND`, `status` and /health. The service
is unhealthy unless each process reports that it serves, or a handover peer in its place.

A new kind takes a row, and a module whose `run(etc)`, or `run(member, etc)`, calls `start_process`
of wire/process.py. Only the process itself imports it: a deployment that wants no member of a kind
imports nothing of that. What calls the routers has a priority above theirs; supervisord waits for
none before it starts the next, so it reports `starting` until a router has answered it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from pinlaterd.config.layout import COORDINATOR, program_name
from pinlaterd.config.schema import Config

_HANDOVER = "-handover"


class RestartRule(Enum):
    """The way to restart the processes of a kind, one after the other."""

    ALONE = "alone"  # it ends, then it starts: its callers wait, or do without it
    HANDOVER = "handover"  # meanwhile another process serves at its listening sockets


@dataclass(frozen=True)
class ProcessKind:
    """A kind of process: a row of the table."""

    name: str  # no kind's name begins with another's and "-"
    main: str  # the module that has `run`
    purpose: str  # for the help of the command that runs one
    priority: int  # started from low to high, stopped from high to low
    # The part of each program's name behind "NAME-" (or ""), and what its process takes from the
    # configuration at its start, in addition to the server's settings.
    members: Callable[[Config], Mapping[str, object]]
    has_named_members: bool = False  # operators name them: `run` and `restart` take a member
    restart: RestartRule = RestartRule.ALONE
    is_live: bool = False  # whether the coordinator starts and stops them as settings change
    address: tuple[str, str] | None = None  # the settings of the host and port they listen at

    def programs(self, config: Config) -> Sequence[str]:
        """Return the names of its processes, in supervisord and in reports."""
        return [program_name(self.name, member) for member in self.members(config)]


class Instance(NamedTuple):
    """A process that a configuration wants."""

    kind: ProcessKind
    member: str
    program: str
    settings: object  # that it takes at its start, in addition to the server's


def numbered(count: int) -> Mapping[str, object]:
    """Return the members of a kind of `count` equal processes: one alone has no number."""
    return dict.fromkeys([""] if count == 1 else map(str, range(1, count + 1)))


def _shards(config: Config) -> Mapping[str, object]:
    # Without what acts at once: a change of that restarts no process.
    started = (replace(one, dequeue_only=False, server="") for one in config.shards.values())
    return {shard.name: shard for shard in started}


def _push_processes(config: Config) -> Mapping[str, object]:
    # Where nothing is to be pushed there is none.
    is_needed = bool(config.pushes or config.server.downstream_url)
    count = config.server.push_processes if is_needed else 0
    # One alone has a number, too, so that the first is left as it is when others come.
    return dict.fromkeys(map(str, range(1, count + 1)))


KINDS = [
    COORDINATOR_KIND := ProcessKind(
        COORDINATOR,
        main="pinlaterd.coordinator.main",
        purpose="Run the coordinator: configuration, health, statistics.",
        priority=100,
        members=lambda _: numbered(1),
        address=("stats_host", "stats_port"),
    ),
    SHARD := ProcessKind(
        "shard",
        main="pinlaterd.shard.process",
        purpose="Run the owner of the shard NAME.",
        priority=200,
        members=_shards,
        has_named_members=True,
        is_live=True,
    ),
    ROUTER := ProcessKind(
        "router",
        main="pinlaterd.router.main",
        purpose="Run a router: Thrift in, shards behind it.",
        priority=300,
        members=lambda config: numbered(config.server.routers),
        restart=RestartRule.HANDOVER,
        address=("host", "port"),
    ),
    HTTP := ProcessKind(
        "http",
        main="pinlaterd.http.main",
        purpose="Run the HTTP interface, a client of the routers.",
        priority=400,
        members=lambda config: numbered(
            config.server.http_processes if config.server.http_port else 0
        ),
        restart=RestartRule.HANDOVER,
        address=("http_host", "http_port"),
    ),
    PUSH := ProcessKind(
        "push",
        main="pinlaterd.push.main",
        purpose="Push jobs to HTTP servers, as a client of the routers.",
        priority=500,
        members=_push_processes,
        is_live=True,
    ),
    WEB := ProcessKind(
        "web",
        main="pinlaterd.web.main",
        purpose="Run the dashboard, a client of the routers.",
        priority=600,
        members=lambda config: numbered(1 if config.server.web_port else 0),
        address=("web_host", "web_port"),
    ),
]


def instances(config: Config) -> Sequence[Instance]:
    """Return every process that `config` wants, in the order of their start."""
    return [
        Instance(kind, member, program_name(kind.name, member), settings)
        for kind in sorted(KINDS, key=lambda kind: kind.priority)
        for member, settings in kind.members(config).items()
    ]


def reporting(config: Config) -> Sequence[Instance]:
    """Return the processes that report to the coordinator, those that clients call first."""
    found = (one for one in instances(config) if one.kind is not COORDINATOR_KIND)
    return sorted(found, key=lambda one: -one.kind.priority)


# --- handover peers: each serves in the place of one process while that one is restarted ----------


def handover_program(program: str) -> str:
    return f"{program}{_HANDOVER}"


def is_handover_peer(program: str) -> bool:
    # A shard's name may end so, too.
    able = (kind.name for kind in KINDS if kind.restart is RestartRule.HANDOVER)
    return program.endswith(_HANDOVER) and any(program.startswith(f"{name}-") for name in able)


def counterpart(program: str) -> str:
    """Return the program that a handover peer serves for, or the handover peer of a program."""
    served = program.removesuffix(_HANDOVER)
    return served if is_handover_peer(program) else handover_program(program)
