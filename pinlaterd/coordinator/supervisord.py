"""Programs under supervisord, through its XML-RPC on run/supervisor.sock.

Each program is one file in run/supervisord.d, written before supervisord is told, so that a
supervisord that starts anew runs the same. Blocking: callers on an event loop use a thread.
"""

from __future__ import annotations

import http.client
import socket
import xmlrpc.client
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

from supervisor import xmlrpc as supervisor_xmlrpc

from pinlaterd.config.files import lock
from pinlaterd.config.layout import PROGRAMS_LOCK, SHARD_PROGRAMS, SUPERVISOR_SOCKET
from pinlaterd.coordinator.plan import Action, Present, Program, Step

_ANSWER_SECONDS = 10.0
# Those that wait until a process has ended, which may take its stopwaitsecs.
_PATIENT = {"stopProcess": 120.0, "stopProcessGroup": 120.0}
_RUNNING_STATES = ("STARTING", "RUNNING", "BACKOFF")  # those that need no start
_Faults = supervisor_xmlrpc.Faults


class SupervisorError(Exception):
    """supervisord is not there, or refuses."""


class SupervisorSilent(SupervisorError):
    """supervisord runs and does not answer in time: it was stopped (SIGSTOP), or can't keep up."""


class ProgramInfo(NamedTuple):
    """A program as supervisord sees it."""

    name: str
    state: str  # supervisord's own word: RUNNING, BACKOFF, …
    pid: int
    exit_status: int
    started_at: int  # seconds since the epoch, 0: never
    stopped_at: int
    description: str


class Supervisor(Protocol):
    """Who keeps programs running. Every call may be repeated; all raise SupervisorError."""

    def running(self) -> Sequence[Present]:
        """The programs it knows, running or not."""
        ...

    def add(self, program: Program) -> None:
        """Make it known, now and after a restart, and start it; replace one of that name."""
        ...

    def remove(self, name: str) -> None:
        """Stop and forget it. None of that name is no error."""
        ...

    def start(self, name: str) -> None: ...

    def stop(self, name: str) -> None: ...


def carry_out(actions: Sequence[Action], supervisor: Supervisor) -> None:
    for step, program in actions:
        if step is Step.REMOVE:
            supervisor.remove(program.name)
        elif step is Step.START:
            supervisor.start(program.name)
        else:
            supervisor.add(program)


def lock_programs(*, patient: bool = True) -> BinaryIO:
    """Whoever changes several programs keeps others, who do the same, out of it until this is
    closed.

    Raises SupervisorError if somebody does, and this is not `patient`."""
    try:
        return lock(PROGRAMS_LOCK, patient=patient)
    except BlockingIOError as error:
        raise SupervisorError("a command changes programs at this moment") from error


def write_programs(wanted: Sequence[Program], folder: Path = SHARD_PROGRAMS) -> None:
    """Make `folder` hold exactly `wanted`, for a supervisord that is about to start."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = {f"{program.name}.conf" for program in wanted}
    for path in folder.glob("*.conf"):
        if path.name not in names:
            path.unlink()
    for program in wanted:
        _write(folder / f"{program.name}.conf", program.definition)


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket, with a time-out, which supervisor's own has not."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class _Transport(supervisor_xmlrpc.SupervisorTransport):  # type: ignore[misc]
    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__(None, None, f"unix://{path}")
        self._get_connection = lambda: _Connection(path, seconds)


class Supervisord:
    """The Supervisor that is supervisord. `path` is its socket's, from the current folder."""

    def __init__(self, path: Path = SUPERVISOR_SOCKET, folder: Path = SHARD_PROGRAMS) -> None:
        self._folder = folder
        self._path = path

    def pid(self) -> int:
        """supervisord's own; SupervisorError if it does not run."""
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
                started_at=int(info["start"]),
                stopped_at=int(info["stop"]),
                description=str(info["spawnerr"] or info["description"]),
            )
            for info in found
        ]

    def running(self) -> Sequence[Present]:
        stale = self._reread()
        return [
            Present(
                info.name,
                "" if info.name in stale else self._definition(info.name),
                info.state in _RUNNING_STATES,
            )
            for info in self.programs()
        ]

    def add(self, program: Program) -> None:
        path = self._folder / f"{program.name}.conf"
        self._forget(program.name)
        _write(path, program.definition)
        self._reread()
        self._call("addProcessGroup", program.name)

    def remove(self, name: str) -> None:
        (self._folder / f"{name}.conf").unlink(missing_ok=True)
        self._forget(name)
        self._reread()

    def start(self, name: str) -> None:
        self._call("startProcess", name, False, tolerate=_Faults.ALREADY_STARTED)

    def end(self, name: str) -> None:
        """Have the process end in order; supervisord starts it again by itself."""
        self._call("signalProcess", name, "TERM", tolerate=_Faults.NOT_RUNNING)

    def stop(self, name: str) -> None:
        self._call("stopProcess", name, True, tolerate=_Faults.NOT_RUNNING)

    def _forget(self, name: str) -> None:
        self._call("stopProcessGroup", name, True, tolerate=_Faults.BAD_NAME)
        self._call("removeProcessGroup", name, tolerate=_Faults.BAD_NAME)

    def _reread(self) -> frozenset[str]:
        """Names of programs that run by another definition than the files give now."""
        answer = cast("list[tuple[list[str], list[str], list[str]]]", self._call("reloadConfig"))
        _added, changed, removed = answer[0]
        return frozenset((*changed, *removed))

    def _definition(self, name: str) -> str:
        try:
            return (self._folder / f"{name}.conf").read_text(encoding="utf-8")
        except OSError:
            return ""

    def _call(self, method: str, *arguments: object, tolerate: int | None = None) -> object:
        # a connection each: after a failure the transport would go on with the broken one
        transport = _Transport(self._path, _PATIENT.get(method, _ANSWER_SECONDS))
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


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
