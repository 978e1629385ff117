"""Waits until processes serve; restarts those of a running deployment, one after the other, at no
client's cost.

A process that is told to end finishes its calls in flight, and supervisord starts it again by
itself, even if the command is killed. Where the rule of its kind is a handover, a peer takes over
the process's listening socket first: so one that can't start (a broken installation) is found out
while the old one serves, and a crash in the middle, which repeating the command mends, leaves at
least one that serves. Meanwhile the coordinator may change programs: each is looked at again when
its turn comes, under the lock of all that change programs.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pinlaterd.client.client import Client
from pinlaterd.client.coordinator import fetch_json
from pinlaterd.config import kinds
from pinlaterd.config.active import load_active
from pinlaterd.config.layout import COORDINATOR, ETC, LOGS, ConfigFiles
from pinlaterd.config.schema import Config
from pinlaterd.coordinator.programs import (
    Program,
    ProgramInfo,
    Supervisord,
    SupervisorError,
    handover_peer_of,
    hosted_here,
    lock_programs,
    log_file,
    stop_seconds,
    wanted_programs,
)
from pinlaterd.deployment.files import at_work_in
from pinlaterd.errors import ConnectionFailed, DeploymentError, PinLaterError
from pinlaterd.lifecycle import ExitCode
from pinlaterd.status import Status
from pinlaterd.wire.control import ProcessState

ALL = "all"
_POLL_SECONDS = 0.05
UP_SECONDS = 60.0  # for all to serve, or for one that is restarted
_LOG_LINES = 15
_LOG_BYTES = 64 * 1024
_CRASHES = 2  # a process that ended so often since `up` began won't come up by itself

Tell = Callable[[str], None]


class Restarted(NamedTuple):
    program: str
    pid: int
    seconds: float  # from the first step until the last


def restart(
    directory: Path, kind: kinds.ProcessKind, tell: Tell, *, member: str = ALL
) -> Sequence[Restarted]:
    """Restart one member of a kind, or all, one after the other.

    Raises ConfigError, DeploymentError, ConnectionFailed (no coordinator)."""
    with at_work_in(directory):
        # The active configuration, not what the files say by now: a restart changes no settings.
        chosen = _chosen(load_active(ETC).config, kind, member)
        try:
            if kind is not kinds.COORDINATOR_KIND:
                fetch_status()  # It is asked what serves: fail before anything is stopped.
            # Each by the configuration that is active when its turn comes.
            restarted = [_Restarts(load_active(ETC).config, tell).restart(one) for one in chosen]
            return [found for found in restarted if found is not None]
        except SupervisorError as error:
            raise DeploymentError(f"{error}; `pinlaterd up` starts what does not run") from error


def _chosen(config: Config, kind: kinds.ProcessKind, member: str) -> Sequence[kinds.Instance]:
    there = kind.members(config)
    if member not in (ALL, *there):
        named = f"there are: {', '.join(there)}" if any(there) else "leave the name out"
        raise DeploymentError(f"no {kind.name} {member!r}; {named}")
    here = [one for one in kinds.instances(hosted_here(config)) if one.kind is kind]
    chosen = [one for one in here if member in (one.member, ALL)]
    if not chosen and member != ALL:
        raise DeploymentError(
            f"{kind.name} {member} has no process on this server, {config.server.server}; "
            "`pinlater-admin status` names its server: repeat the command there"
        )
    return chosen


class _Restarts:
    """Restarts by one configuration, in the deployment that is the current folder."""

    def __init__(self, config: Config, tell: Tell) -> None:
        self._config = config
        self._supervisord = Supervisord()
        self._programs = {p.name: p for p in wanted_programs(hosted_here(config))}
        self._tell = tell

    def restart(self, instance: kinds.Instance) -> Restarted | None:
        """Restart one; return None if it was removed while others were restarted."""
        began = time.monotonic()
        name = instance.program
        program = self._programs.get(name)
        if program is None:
            self._tell(f"{name} is no more")
            return None
        if instance.kind.restart is kinds.RestartRule.HANDOVER:
            pid = self._restart_with_handover(program)
        else:
            pid = self._restart_alone(program)
        return Restarted(name, pid, round(time.monotonic() - began, 2))

    def _restart_with_handover(self, program: Program) -> int:
        peer = handover_peer_of(program)
        found = self._found().get(peer.name)
        if found is None or not self._serves(found):  # else a command before this one got so far
            self._tell(f"starting {peer.name}")
            startup = Startup()
            self._supervisord.add(peer)
            try:
                self._wait_until_serving(peer.name, startup)
            except DeploymentError as error:
                self._supervisord.remove(peer.name)
                raise DeploymentError(f"{program.name} was left as it is: {error}") from error
        try:
            pid = self._restart_alone(program)
        except DeploymentError as error:
            raise DeploymentError(
                f"{peer.name} serves in the place of {program.name}; mend this, then repeat the "
                f"command: {error}"
            ) from error
        self._tell(f"stopping {peer.name}")
        self._supervisord.remove(peer.name)
        return pid

    def _restart_alone(self, program: Program) -> int:
        """Restart a program; return its new pid."""
        name = program.name
        self._tell(f"stopping {name}")
        startup = Startup()
        with lock_programs():
            present = {found.name: found for found in self._supervisord.present()}.get(name)
            if present is None or not present.pid or present.definition != program.definition:
                self._supervisord.add(program)  # also where its settings have changed
            else:
                self._supervisord.end(name)
                if not self._has_ended(name, present.pid):
                    self._supervisord.add(program)  # it is stopped by force
        self._tell(f"starting {name}")
        startup.started_at = time.time()
        return self._wait_until_serving(name, startup)

    def _has_ended(self, name: str, pid: int) -> bool:
        """Tell whether it ended in the time that supervisord would give it, too."""
        deadline = time.monotonic() + stop_seconds(self._config.server)
        while self._found()[name].pid == pid:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _wait_until_serving(self, name: str, startup: Startup) -> int:
        while True:
            found = self._found().get(name)  # None while it is being replaced
            if found is not None and self._serves(found):
                return found.pid
            if startup.is_late or (found is not None and startup.has_failed(found)):
                raise DeploymentError(f"{name} does not serve. {startup.log_tail(name)}")
            time.sleep(_POLL_SECONDS)

    def _found(self) -> Mapping[str, ProgramInfo]:
        return {found.name: found for found in self._supervisord.programs()}

    def _serves(self, found: ProgramInfo) -> bool:
        """Tell whether the coordinator has heard from this very process that it serves."""
        try:
            status = fetch_status()
        except ConnectionFailed:
            return False
        return any(
            process["pid"] == found.pid and process["state"] == ProcessState.SERVING
            for process in status["processes"]
        )


def fetch_status() -> Status:
    """Raises ConnectionFailed."""
    found: Status = fetch_json("/status.json", directory=Path(), url=None)
    return found


# --- waiting ------------------------------------------------------------------------------


class Startup:
    """Processes that were just started: whether there is still hope, and what they logged since."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.deadline = time.monotonic() + UP_SECONDS
        self._log_bytes = {path.stem: path.stat().st_size for path in LOGS.glob("*.log")}
        self._crashes: defaultdict[str, set[int]] = defaultdict(set)  # when each program ended

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def has_failed(self, program: ProgramInfo) -> bool:
        """Tell whether `program` ended in a way that no further try mends."""
        crashes = self._crashes[program.name]
        if program.stopped_at >= self.started_at:
            crashes.add(program.stopped_at)
            if program.exit_status == ExitCode.CONFIG:
                return True
        return program.state == "FATAL" or len(crashes) >= _CRASHES

    def log_tail(self, program: str) -> str:
        path = log_file(program)
        return f"The last lines of {path}:\n{last_lines(path, self._log_bytes.get(program, 0))}"


def wait_for_all(config: Config, supervisord: Supervisord, startup: Startup, tell: Tell) -> None:
    """Raises DeploymentError as soon as a process has failed for good, or the deadline passed."""
    while missing := _missing(config):
        tell("waiting for " + ", ".join(missing))
        try:
            programs = supervisord.programs()
        except SupervisorError as error:
            tail = last_lines(LOGS / "supervisord.log")
            raise DeploymentError(f"supervisord has ended: {error}\n{tail}") from error
        for program in filter(startup.has_failed, programs):
            tail = startup.log_tail(program.name)
            raise DeploymentError(f"{program.name} does not start. {tail}")
        if startup.is_late:
            text = f"gave up waiting for {', '.join(missing)}; `pinlaterd status` shows more"
            tails = [startup.log_tail(name) for name in missing if log_file(name).exists()]
            raise DeploymentError("\n".join([text, *tails]))
        time.sleep(_POLL_SECONDS)


def _missing(config: Config) -> Sequence[str]:
    """List what does not serve yet; nothing once all do, and a call over Thrift is answered.

    Raises DeploymentError for what the coordinator refuses to carry out."""
    try:
        status = fetch_status()
    except ConnectionFailed:
        return [COORDINATOR]
    if status["problems"]:
        return [problem.split(" is ")[0] for problem in status["problems"]]
    alive = [server["name"] for server in status["servers"] if server["state"] == "alive"]
    if status["server"] and status["server"] not in alive:
        if status["config_problems"]:
            raise DeploymentError("\n".join(status["config_problems"]))
        return [f"ZooKeeper, {config.server.zookeeper}, to make this server a member"]
    # Of the files as they are now: another command may edit them meanwhile.
    if status["config_judged"] != ConfigFiles(ETC).digest:
        # what it says of the files before these is no matter
        return ["the coordinator, which carries out the configuration", *status["config_problems"]]
    if status["config_problems"]:
        raise DeploymentError("\n".join(status["config_problems"]))
    server = config.server
    serving = {p["name"] for p in status["processes"] if p["state"] == ProcessState.SERVING}
    handed_over = [kind for kind in kinds.KINDS if kind.restart is kinds.RestartRule.HANDOVER]
    expected = [name for kind in handed_over for name in kind.programs(config)]
    missing = [name for name in expected if name not in serving]
    if missing:  # though a handover peer serves in its place
        return missing
    try:
        with Client(*server.own_address) as client:
            client.queue_names()
    except (ConnectionFailed, PinLaterError):
        return [f"an answer on port {server.port}"]
    return []


def last_lines(path: Path, since: int = 0) -> str:
    """Return the end of a log, from byte `since` on if there is anything behind it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since if since < size else 0, size - _LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        text = ""
    lines = text.splitlines()[-_LOG_LINES:]
    return "\n".join(f"  {line}" for line in lines) or "  (empty)"
