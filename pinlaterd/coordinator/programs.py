"""The configuration to the programs that supervisord runs, one for each process, and which of
them to add, replace, start and remove. Pure.

A program's definition changes with what its process reads at its start only, never with what it
follows while it runs: a comparison of definitions restarts just those that have to be.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import site
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import pinlaterd
from pinlaterd.config.layout import ETC, LOGS, handover_program, router_programs, shard_program
from pinlaterd.config.schema import Config, ServerSettings, settings_at_start

COORDINATOR = "coordinator"
PROGRAM_VARIABLE = "PINLATERD_PROGRAM"

# Started from low to high, stopped from high to low: the routers finish their calls first.
_COORDINATOR_PRIORITY, _SHARD_PRIORITY, _ROUTER_PRIORITY = 100, 200, 300
_SPARE_STOP_SECONDS = 5

# A process that fails lives two seconds at least (lifecycle.exit_process), so supervisord, which
# only waits longer and longer for those that end within startsecs, starts it again at once. One
# killed within its first second is retried after 1, 2, 3, … seconds, and never given up.
_DEFINITION = """\
; Written by pinlaterd, each time. Configuration: {fingerprint}
[program:{name}]
command = {command}
directory = %(here)s/../..
environment = {environment}
autostart = true
autorestart = true
startsecs = 1
startretries = 1000000
priority = {priority}
stopsignal = TERM
stopwaitsecs = {stop_seconds}
stopasgroup = true
killasgroup = true
umask = 077
redirect_stderr = true
stdout_logfile = %(here)s/../../{log}
stdout_logfile_maxbytes = 10MB
stdout_logfile_backups = 5
"""


class Program(NamedTuple):
    """A program as wanted: its name and its section of supervisord's configuration."""

    name: str
    definition: str


def wanted_programs(config: Config) -> Sequence[Program]:
    """All programs of a deployment, in the order of their start."""

    server = settings_at_start(config.server)
    seconds, own = stop_seconds(config.server), _fingerprint([server])
    routers = router_programs(config.server.routers)
    return [
        _program(COORDINATOR, [COORDINATOR], _COORDINATOR_PRIORITY, seconds, own),
        *shard_programs(config),
        *(_program(name, ["router"], _ROUTER_PRIORITY, seconds, own) for name in routers),
    ]


def shard_programs(config: Config) -> Sequence[Program]:
    server, seconds = settings_at_start(config.server), stop_seconds(config.server)
    return [
        _program(
            shard_program(name),
            ["shard", name],
            _SHARD_PRIORITY,
            seconds,
            _fingerprint([server, asdict(replace(shard, dequeue_only=False))]),
        )
        for name, shard in config.shards.items()
    ]


def handover_peer_of(router: Program) -> Program:
    """The program that serves in a router's place: the same command, under a name of its own."""
    name = handover_program(router.name)
    definition = router.definition.replace(f"[program:{router.name}]", f"[program:{name}]")
    return Program(name, definition.replace(str(log_file(router.name)), str(log_file(name))))


def stop_seconds(server: ServerSettings) -> int:
    """What a process has to finish the calls in flight, before it is killed."""
    return math.ceil(server.request_timeout_ms / 1000) + _SPARE_STOP_SECONDS


def log_file(program: str) -> Path:
    return LOGS / f"{program}.log"


def _fingerprint(settings: Sequence[object]) -> str:
    """Changes when `settings` do, secrets included, and gives none of them away: so `up` restarts
    those processes, and only those, whose configuration has changed."""
    # not pickled: that differs for equal settings, by which of their parts are one object
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _program(
    name: str, arguments: Sequence[str], priority: int, stop_seconds: int, fingerprint: str
) -> Program:
    # -P: a folder named pinlaterd in DIR is not taken for the package
    command = [sys.executable, "-P", "-m", "pinlaterd", *arguments, "--config", str(ETC)]
    return Program(
        name,
        _DEFINITION.format(
            name=name,
            fingerprint=fingerprint,
            command=shlex.join(command).replace("%", "%%"),
            environment=_environment(),
            priority=priority,
            stop_seconds=stop_seconds,
            log=log_file(name),
        ),
    )


def _environment() -> str:
    """What marks our processes, and where the package is if it is not installed beside this Python.

    With SPT_NOENV setproctitle does not overwrite the environment that /proc shows."""
    variables = f'{PROGRAM_VARIABLE}="%(program_name)s",SPT_NOENV="1"'
    root = str(Path(pinlaterd.__file__).parent.parent)
    if root in site.getsitepackages():
        return variables
    quoted = root.replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return f'{variables},PYTHONPATH="{quoted}"'


# --- what to do --------------------------------------------------------------------------------


class Present(NamedTuple):
    """A program that supervisord knows. `definition` "": not what its file says any more."""

    name: str
    definition: str
    running: bool


class Step(Enum):
    REMOVE = "remove"  # stop it, forget it
    REPLACE = "replace"  # stop it, start it by its new definition
    ADD = "add"  # make it known, start it
    START = "start"  # it is known, but stopped


class Action(NamedTuple):
    step: Step
    program: Program


def plan(wanted: Iterable[Program], present: Iterable[Present]) -> Sequence[Action]:
    """What to do, in order: removals first, since they may hold what a newcomer needs."""
    wanted_by_name = {program.name: program for program in wanted}
    present_by_name: Mapping[str, Present] = {program.name: program for program in present}
    actions = [
        Action(Step.REMOVE, Program(name, found.definition))
        for name, found in sorted(present_by_name.items())
        if name not in wanted_by_name
    ]
    for name, program in wanted_by_name.items():
        found = present_by_name.get(name)
        if found is None:
            actions.append(Action(Step.ADD, program))
        elif found.definition != program.definition:
            actions.append(Action(Step.REPLACE, program))
        elif not found.running:
            actions.append(Action(Step.START, program))
    return actions
