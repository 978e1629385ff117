"""The programs that supervisord runs, one for each process: from the configuration to definitions,
which of them to add, replace, start and remove (`plan`), and supervisord itself.

A program's definition changes with what its process reads at its start only, never with what it
follows while it runs: a comparison of definitions restarts just those that have to be. Each
program is one file in run/supervisord.d, written before supervisord is told by XML-RPC, so that a
supervisord that is restarted runs the same. Blocking: callers on an event loop use a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import logging
import math
import re
import shlex
import site
import socket
import sys
import xmlrpc.client
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from supervisor import xmlrpc as supervisor_xmlrpc

import pinlaterd
from pinlaterd.config import layout
from pinlaterd.config.kinds import Instance, handover_program, instances
from pinlaterd.config.schema import Config, ServerSettings, settings_at_start
from pinlaterd.wire.control import read_snapshot

log = logging.getLogger(__name__)

PROGRAM_VARIABLE = "PINLATERD_PROGRAM"

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
    """Return all programs of a deployment, in the order of their start."""
    return [_program(instance, config.server) for instance in instances(config)]


def hosted_here(config: Config) -> Config:
    """Return `config` with those shards only that have a process on this server, by the last
    snapshot: all of them, if there is no other server."""
    snapshot, server = read_snapshot(), config.server.server
    if not server:
        return config
    entries = () if snapshot is None else snapshot.shards
    return config.only({entry.name for entry in entries if server in (entry.server, entry.next)})


def live_programs(config: Config) -> Sequence[Program]:
    """Return those that the coordinator starts and stops as the configuration changes."""
    found = [instance for instance in instances(config) if instance.kind.is_live]
    return [_program(instance, config.server) for instance in found]


def handover_peer_of(program: Program) -> Program:
    """Return what serves in the place of `program`: the same command, under a name of its own."""
    name = handover_program(program.name)
    definition = program.definition.replace(f"[program:{program.name}]", f"[program:{name}]")
    return Program(name, definition.replace(str(log_file(program.name)), str(log_file(name))))


def stop_seconds(server: ServerSettings) -> int:
    """Return the time that a process has to finish the calls in flight, before it is killed."""
    return math.ceil(server.request_timeout_ms / 1000) + _SPARE_STOP_SECONDS


def log_file(program: str) -> Path:
    return layout.LOGS / f"{program}.log"


def _fingerprint(settings: Sequence[object]) -> str:
    """Return a text that changes when `settings` do, secrets included, and gives none of them away:
    so `up` restarts those processes, and only those, whose configuration has changed."""
    # not pickled: that differs for equal settings, by which of their parts are one object
    text = json.dumps(settings, sort_keys=True, default=asdict)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _program(instance: Instance, server: ServerSettings) -> Program:
    kind, member, name, settings = instance
    own = [] if settings is None else [settings]
    arguments = [kind.name, member] if kind.has_named_members else [kind.name]
    # -P: a folder named pinlaterd in DIR is not taken for the package
    command = [sys.executable, "-P", "-m", "pinlaterd", *arguments, "--config", str(layout.ETC)]
    return Program(
        name,
        _DEFINITION.format(
            name=name,
            fingerprint=_fingerprint([settings_at_start(server), *own]),
            command=_plain(shlex.join(command)),
            environment=_environment(),
            priority=kind.priority,
            stop_seconds=stop_seconds(server),
            log=log_file(name),
        ),
    )


def _environment() -> str:
    """Mark our processes, and name the package's folder if it is not installed with this Python.

    With SPT_NOENV setproctitle does not overwrite the environment that /proc shows."""
    variables = f'{PROGRAM_VARIABLE}="%(program_name)s",SPT_NOENV="1"'
    root = str(Path(pinlaterd.__file__).parent.parent)
    if root in site.getsitepackages():
        return variables
    # supervisor knows no escapes here, and strips the value of quotes at its end
    quote = "'" if '"' in root else '"'
    return f"{variables},PYTHONPATH={quote}{_plain(root)}/{quote}"


def _plain(text: str) -> str:
    """Write `text` so that supervisor expands nothing in it, and takes none of it for a comment.

    A comment begins with # or ; after a blank, so what expands to nothing goes in between."""
    return re.sub(r"(?<=\s)(?=[#;])", "%(program_name).0s", text.replace("%", "%%"))


# --- what to do --------------------------------------------------------------------------------


class ProgramInfo(NamedTuple):
    """A program that supervisord knows."""

    name: str
    state: str  # supervisord's own word: RUNNING, BACKOFF, …
    pid: int = 0
    exit_status: int = 0
    stopped_at: int = 0  # seconds since the epoch, 0: never
    definition: str = ""  # by which it runs, if `present` gave it and its file says so still

    @property
    def needs_start(self) -> bool:
        return self.state not in ("STARTING", "RUNNING", "BACKOFF")


class ProgramStep(Enum):
    REMOVE = "remove"  # stop it, forget it
    REPLACE = "replace"  # stop it, start it by its new definition
    ADD = "add"  # make it known, start it
    START = "start"  # it is known, but stopped


class Action(NamedTuple):
    step: ProgramStep
    program: Program


def plan(wanted: Iterable[Program], present: Iterable[ProgramInfo]) -> Sequence[Action]:
    """Return what to do, in order: removals first, since they may hold what a newcomer needs."""
    wanted_by_name = {program.name: program for program in wanted}
    present_by_name = {program.name: program for program in present}
    actions = [
        Action(ProgramStep.REMOVE, Program(name, found.definition))
        for name, found in sorted(present_by_name.items())
        if name not in wanted_by_name
    ]
    for name, program in wanted_by_name.items():
        found = present_by_name.get(name)
        if found is None:
            actions.append(Action(ProgramStep.ADD, program))
        elif found.definition != program.definition:
            actions.append(Action(ProgramStep.REPLACE, program))
        elif found.needs_start:
            actions.append(Action(ProgramStep.START, program))
    return actions


# --- supervisord ------------------------------------------------------------------------------

_RETRY_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_STOP_SECONDS = 120.0  # for a process to end, which may take its stopwaitsecs
_Faults = supervisor_xmlrpc.Faults


class SupervisorError(Exception):
    """supervisord is not there, or refuses."""


class SupervisorSilent(SupervisorError):
    """supervisord runs and does not answer in time: it was stopped (SIGSTOP), or can't keep up."""


def carry_out(actions: Sequence[Action], supervisord: Supervisord) -> None:
    for step, program in actions:
        if step is ProgramStep.REMOVE:
            supervisord.remove(program.name)
        elif step is ProgramStep.START:
            supervisord.start(program.name)
        else:
            supervisord.add(program)


def lock_programs(*, patient: bool = True) -> BinaryIO:
    """Keep other processes from changing several programs until this is closed.

    Raises SupervisorError if one does at this moment, and this is not `patient`."""
    try:
        return layout.lock(layout.PROGRAMS_LOCK, patient=patient)
    except BlockingIOError as error:
        raise SupervisorError("a command changes programs at this moment") from error


def write_programs(wanted: Sequence[Program]) -> None:
    """Make the programs' folder hold exactly `wanted`, for a supervisord that is about to start."""
    layout.SHARD_PROGRAMS.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = {_file(program.name) for program in wanted}
    for path in layout.SHARD_PROGRAMS.glob("*.conf"):
        if path not in files:
            path.unlink()
    for program in wanted:
        layout.replace_file(_file(program.name), program.definition.encode())


def _file(program: str) -> Path:
    return layout.SHARD_PROGRAMS / f"{program}.conf"


class _Connection(http.client.HTTPConnection):
    """HTTP over supervisord's Unix socket, with a time-out, which supervisor's own has not."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(layout.SUPERVISOR_SOCKET))


class Supervisord:
    """The supervisord of the deployment that is the current folder.

    Every call may be repeated; all raise SupervisorError."""

    def pid(self) -> int:
        """Return supervisord's pid. Raises SupervisorError if it does not run."""
        return cast("int", self._call("getPID"))

    def shut_down(self) -> None:
        """Stop every program, then supervisord; it goes on after this call returned."""
        self._call("shutdown")

    def programs(self) -> Sequence[ProgramInfo]:
        found = cast("list[Mapping[str, str | int]]", self._call("getAllProcessInfo"))
        return [
            ProgramInfo(
                name=str(info["name"]),
                state=str(info["statename"]),
                pid=int(info["pid"]),
                exit_status=int(info["exitstatus"]),
                stopped_at=int(info["stop"]),
            )
            for info in found
        ]

    def present(self) -> Sequence[ProgramInfo]:
        """Return the programs with their definitions."""
        stale = self._reread()
        return [
            info if info.name in stale else info._replace(definition=_definition(info.name))
            for info in self.programs()
        ]

    def add(self, program: Program) -> None:
        """Make it known, now and after a restart, and start it; replace one of that name."""
        self._forget(program.name)
        layout.replace_file(_file(program.name), program.definition.encode())
        self._reread()
        self._call("addProcessGroup", program.name)

    def remove(self, name: str) -> None:
        """Stop and forget it. None of that name is no error."""
        _file(name).unlink(missing_ok=True)
        self._forget(name)
        self._reread()

    def start(self, name: str) -> None:
        self._call("startProcess", name, False, tolerate=_Faults.ALREADY_STARTED)

    def end(self, name: str) -> None:
        """Have the process end in order; supervisord starts it again by itself."""
        self._call("signalProcess", name, "TERM", tolerate=_Faults.NOT_RUNNING)

    def _forget(self, name: str) -> None:
        self._call("stopProcessGroup", name, True, tolerate=_Faults.BAD_NAME)
        self._call("removeProcessGroup", name, tolerate=_Faults.BAD_NAME)

    def _reread(self) -> frozenset[str]:
        """Return the programs that run by another definition than the files give now."""
        answer = cast("list[tuple[list[str], list[str], list[str]]]", self._call("reloadConfig"))
        _added, changed, removed = answer[0]
        return frozenset((*changed, *removed))

    def _call(self, method: str, *arguments: object, tolerate: int | None = None) -> object:
        # a connection each: after a failure the transport would go on with the broken one
        seconds = _STOP_SECONDS if method == "stopProcessGroup" else _ANSWER_SECONDS
        transport = supervisor_xmlrpc.SupervisorTransport(
            serverurl=f"unix://{layout.SUPERVISOR_SOCKET}"
        )
        transport._get_connection = lambda: _Connection("localhost", timeout=seconds)  # noqa: SLF001
        server = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)
        try:
            with server:
                return cast("object", getattr(server.supervisor, method)(*arguments))
        except xmlrpc.client.Fault as fault:
            if fault.faultCode == tolerate:
                return None
            raise SupervisorError(f"supervisord refuses {method}: {fault.faultString}") from fault
        except TimeoutError as error:
            raise SupervisorSilent(f"supervisord runs, but does not answer {method}") from error
        except (OSError, http.client.HTTPException, xmlrpc.client.Error) as error:
            raise SupervisorError(f"supervisord does not answer: {error}") from error


def _definition(program: str) -> str:
    try:
        return _file(program).read_text(encoding="utf-8")
    except OSError:
        return ""


# --- live configuration ------------------------------------------------------------------------


def changed_programs(before: Config, after: Config) -> frozenset[str]:
    """Return the names of live programs to add, replace or remove from `before` to `after`."""
    return frozenset(program.name for program in {*live_programs(before)} ^ {*live_programs(after)})


class LivePrograms:
    """Keeps live programs in step with the active configuration, while all run.

    Only programs that a change concerns are touched: not those that an operator stopped by hand,
    nor those that a newer version of this software would write otherwise. Their names lie in
    run/programs.due until it is done, so that a coordinator that was killed in between goes on
    with them. `problem`: why it could not be done, or ""."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.problem = ""
        self._monotonic = monotonic
        self._due: frozenset[str] = frozenset()
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._due = frozenset(map(str, json.loads(layout.PROGRAMS_DUE.read_bytes())))
        self._since: frozenset[str] = frozenset()  # of those, since that work began
        self._at_work: asyncio.Task[frozenset[str]] | None = None
        self._next_try = 0.0

    @property
    def converged(self) -> bool:
        return not self._due

    def want(self, names: Iterable[str]) -> None:
        """Add programs, before the configuration that needs them is written. Raises OSError."""
        self._since |= frozenset(names)
        self._due |= self._since
        self._write()

    def step(self, config: Config) -> None:
        """Take what is done off the list; start on what is due. Raises OSError."""
        if self._at_work is not None:
            if not self._at_work.done():
                return
            self._finish(self._at_work)
            self._at_work = None
        if self._due and self._monotonic() >= self._next_try:
            self._since = frozenset()
            self._at_work = asyncio.create_task(asyncio.to_thread(_arrange, self._due, config))

    async def stop(self) -> None:
        """Stop the thread; what it has begun it finishes, or `programs.due` says so."""
        if self._at_work is not None:
            await asyncio.wait({self._at_work})

    def _finish(self, work: asyncio.Task[frozenset[str]]) -> None:
        try:
            done = work.result()
        except (SupervisorError, OSError) as error:
            problem = f"{', '.join(sorted(self._due))}: can't be brought up to date: {error}"
            if problem != self.problem:
                log.error("%s; trying again", problem)
            self.problem = problem
            self._next_try = self._monotonic() + _RETRY_SECONDS
            return
        self.problem = ""
        self._due -= done - self._since
        self._write()

    def _write(self) -> None:
        if self._due:
            layout.replace_file(layout.PROGRAMS_DUE, json.dumps(sorted(self._due)).encode())
        else:
            layout.PROGRAMS_DUE.unlink(missing_ok=True)


def _arrange(names: frozenset[str], config: Config) -> frozenset[str]:
    """Make supervisord run the programs of `names` as `config` wants them; returns `names`.

    Raises SupervisorError, OSError."""
    # The lock's holder may wait for this process to end, so this must not wait for the lock.
    with lock_programs(patient=False):
        supervisord = Supervisord()
        wanted = [program for program in live_programs(config) if program.name in names]
        present = [program for program in supervisord.present() if program.name in names]
        actions = [one for one in plan(wanted, present) if one.step is not ProgramStep.START]
        for action in actions:
            log.info("%s %s", action.step.value, action.program.name)
        carry_out(actions, supervisord)
    return names
