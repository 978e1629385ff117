"""A deployment as a service: started as a whole, or stopped as a whole.

`up` and `down` work from any state, also from what a kill -9 of everything left behind, and can be
repeated. They run with the deployment as the current folder, so that socket paths stay short.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

import psutil

from pinlaterd.config import layout
from pinlaterd.config.active import ConfigSuperseded, activate, environment_of, read_active
from pinlaterd.config.kinds import KINDS, is_handover_peer
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import (
    DOWNSTREAM_AUTH_ENVIRONMENT,
    DOWNSTREAM_ENVIRONMENT,
    Config,
)
from pinlaterd.coordinator.programs import (
    PROGRAM_VARIABLE,
    Supervisord,
    SupervisorError,
    SupervisorSilent,
    carry_out,
    hosted_here,
    lock_programs,
    plan,
    wanted_programs,
    write_programs,
)
from pinlaterd.deployment.files import at_work_in
from pinlaterd.deployment.restarts import (
    UP_SECONDS,
    Startup,
    Tell,
    fetch_status,
    last_lines,
    wait_for_all,
)
from pinlaterd.errors import ConnectionFailed, DeploymentError, address_of
from pinlaterd.wire.control import read_snapshot

_LEAVE_SECONDS = 60.0  # for other servers to take over what this one owns
_SHUT_DOWN_SECONDS = 60.0  # for supervisord to stop its programs, before we do
_STOP_SECONDS = 15.0  # for orphans, which supervisord does not stop
_POLL_SECONDS = 0.05
_TITLE = "pinlaterd: "
_SERVER_FILE = layout.ETC / layout.SERVER_FILE
# supervisord expands %, [ and spaces in the paths that it makes of this one's: so none has DIR.
_SUPERVISORD_CONF = Path("/proc/self/cwd") / layout.ETC / layout.SUPERVISORD_FILE


class UpResult(NamedTuple):
    config: Config
    changed: bool  # False: it was serving already


def up(directory: Path, tell: Tell) -> UpResult:
    """Start everything, or what is missing of it, and return once all serve.

    Raises ConfigError, DeploymentError. `tell` gets what is waited for, in short."""
    layout.check_folders(directory)  # before anything in them is believed
    config = load_config(directory / layout.ETC)
    with at_work_in(directory):
        startup = Startup()
        supervisord = Supervisord()
        changed = True
        layout.LEAVING.unlink(missing_ok=True)
        if config.server.cluster:
            config = _accepted_config()
        if _runs(supervisord):
            config = _with_running_downstream(config, supervisord)
            changed = _reconcile(config, supervisord, tell)
        else:
            _start(config, supervisord, tell)
        startup.deadline = time.monotonic() + UP_SECONDS
        wait_for_all(config, supervisord, startup, tell)
        _remove_handover_peers(supervisord, tell)
    return UpResult(config, changed)


def _accepted_config() -> Config:
    """Load what the cluster has accepted; later edits are for the coordinator to propose."""
    # Only here: a single machine needs no ZooKeeper.
    from pinlaterd.coordinator.shared_config import accepted, read_base  # noqa: PLC0415

    return load_config(layout.ETC, accepted(read_base(), layout.read_file))


def down(directory: Path, tell: Tell) -> bool:
    """Let every process finish its calls in flight and stop. False: none ran."""
    if not (directory / layout.ETC).is_dir():
        raise DeploymentError(f"{directory}: no deployment there (it has no {layout.ETC} folder)")
    with at_work_in(directory):
        supervisord = Supervisord()
        running = processes_of(Path())
        if not running:
            return False
        _resume(running)
        _leave_cluster(tell)
        try:
            _shut_down(supervisord, running, tell)
        except SupervisorError as error:
            tell(f"{error}; stopping processes without it")
        _end(processes_of(Path()), _STOP_SECONDS, tell)
        left = processes_of(Path())
        if left:
            names = ", ".join(f"{name_of(one)} (pid {one.pid})" for one in left)
            raise DeploymentError(f"still running: {names}; stop them by hand")
        _remove_stale_files()
    return True


def _leave_cluster(tell: Tell) -> None:
    """Give this server's shards to others, where there are any, before they stop here."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    while time.monotonic() < deadline:
        try:
            status = fetch_status()
        except ConnectionFailed:
            return
        if not status["cluster"]:
            return
        layout.LEAVING.touch()
        shards = status["shards_to_leave"]
        if not shards:
            return
        tell("waiting until other servers own shard " + ", ".join(shards))
        time.sleep(_POLL_SECONDS)
    tell("other servers have not taken all shards over; stopping all the same")


def _shut_down(supervisord: Supervisord, running: Sequence[psutil.Process], tell: Tell) -> None:
    """Raises SupervisorError if it does not run, or does not answer."""
    pid = supervisord.pid()
    tell("stopping")
    with contextlib.suppress(SupervisorError):
        supervisord.shut_down()
    left = running
    deadline = time.monotonic() + _SHUT_DOWN_SECONDS
    while any(process.pid == pid for process in left) and time.monotonic() < deadline:
        # supervisord itself kills what does not stop in time, one priority after the other
        left = wait_for(left, _POLL_SECONDS)
        with contextlib.suppress(SupervisorError):
            supervisord.pid()  # when called, it reaps at once; else once a second
        tell("stopping " + ", ".join(sorted({name_of(process) for process in left})))


def _remove_stale_files() -> None:
    """Remove what processes that have ended left. Without the snapshot no shard is a newcomer,
    which would have to serve before it is admitted; without the rates no router holds a share. A
    cluster's snapshot stays: it tells what to start while ZooKeeper is unavailable."""
    for path in (
        *(layout.SUPERVISOR_SOCKET, layout.SUPERVISOR_PID_FILE, layout.STATS_SOCKET),
        *(layout.PROGRAMS_DUE, layout.RATES_FILE, layout.WEB_SOCKET),
    ):
        path.unlink(missing_ok=True)
    snapshot = read_snapshot()
    if snapshot is None or not snapshot.server:
        layout.SNAPSHOT_FILE.unlink(missing_ok=True)


# --- starting -----------------------------------------------------------------------------


def _runs(supervisord: Supervisord) -> bool:
    """Raises DeploymentError if it runs, and does not answer."""
    try:
        supervisord.pid()
    except SupervisorSilent as error:
        raise DeploymentError(
            f"{error}: was it stopped? `kill -CONT $(cat {layout.SUPERVISOR_PID_FILE})` has it go "
            "on; `pinlaterd down` ends it, by force if need be"
        ) from error
    except SupervisorError:
        return False
    return True


def _activate_beside_leaving(config: Config) -> AbstractSet[str]:
    """Activate `config`, and the shards that it does not name any more, for processes that start
    from now on. Return those: the coordinator lets them go, once they hold no jobs."""
    while True:
        before = read_active()
        shards = {} if before is None else before.config.shards
        left = {name: shard for name, shard in shards.items() if name not in config.shards}
        wanted = dataclasses.replace(config, shards={**config.shards, **left})
        try:
            activate(wanted, after=None if before is None else before.version)
        except ConfigSuperseded:
            continue
        return left.keys()


def _reconcile(config: Config, supervisord: Supervisord, tell: Tell) -> bool:
    """Make a running supervisord run what is wanted; whether anything had to be done."""
    try:
        with lock_programs():
            # A handover peer stays until the routers serve: they may take over its socket.
            present = [found for found in supervisord.present() if not is_handover_peer(found.name)]
            actions = plan(wanted_programs(hosted_here(config)), present)
            _check_ports(config, {action.program.name for action in actions})
            _check_environment(config, supervisord)
            if actions:
                kept = {layout.shard_program(name) for name in _activate_beside_leaving(config)}
                actions = [action for action in actions if action.program.name not in kept]
            for action in actions:
                tell(f"{action.step.value} {action.program.name}")
            carry_out(actions, supervisord)
    except SupervisorError as error:
        raise DeploymentError(f"{error}; `pinlaterd down`, then `up` again") from error
    return bool(actions)


def _with_running_downstream(config: Config, supervisord: Supervisord) -> Config:
    """Return `config` with the downstream that the processes have from their environment, unless
    it names one: a command in another shell must not end what was started with one."""
    there = psutil.Process(supervisord.pid()).environ().get(DOWNSTREAM_ENVIRONMENT, "")
    if config.server.downstream_url or not there:
        return config
    server = dataclasses.replace(config.server, downstream_url=there.rstrip("/"))
    return dataclasses.replace(config, server=server)


def _check_environment(config: Config, supervisord: Supervisord) -> None:
    """Check that supervisord has the variables: processes get their environment from it."""
    there = psutil.Process(supervisord.pid()).environ()
    given = (DOWNSTREAM_ENVIRONMENT, DOWNSTREAM_AUTH_ENVIRONMENT)
    names = environment_of(config).union(name for name in given if name in os.environ)
    other = sorted(name for name in names if there.get(name) != os.environ.get(name))
    if other:
        raise DeploymentError(
            f"{', '.join(other)}: not what supervisord was started with, and so not what its "
            "processes would see; `pinlaterd down`, then `up`"
        )


def _remove_handover_peers(supervisord: Supervisord, tell: Tell) -> None:
    """Remove the programs that an interrupted restart has left."""
    try:
        for program in supervisord.programs():
            if is_handover_peer(program.name):
                tell(f"stopping {program.name}")
                supervisord.remove(program.name)
    except SupervisorError as error:
        raise DeploymentError(f"{error}; `pinlaterd up` again") from error


def _start(config: Config, supervisord: Supervisord, tell: Tell) -> None:
    """Start a supervisord of our own, over the remains of one that was killed."""
    _end(processes_of(Path()), _STOP_SECONDS, tell)
    _remove_stale_files()
    wanted = wanted_programs(hosted_here(config))
    _check_ports(config, {program.name for program in wanted})
    write_programs(wanted)
    activate(config)
    command = [sys.executable, "-m", "supervisor.supervisord", "-c", str(_SUPERVISORD_CONF)]
    tell("starting supervisord")
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=UP_SECONDS,
    )
    if done.returncode != 0:
        raise DeploymentError(f"supervisord did not start: {done.stdout.strip()}")
    deadline = time.monotonic() + UP_SECONDS
    while not _runs(supervisord):
        if time.monotonic() > deadline:
            tail = last_lines(layout.LOGS / "supervisord.log")
            raise DeploymentError(f"supervisord did not start:\n{tail}")
        time.sleep(_POLL_SECONDS)


def _check_ports(config: Config, starting: set[str]) -> None:
    """Say now, not in some log, if another program has a port that one of `starting` needs."""
    for kind in KINDS:
        if kind.address is not None and not starting.isdisjoint(kind.programs(config)):
            host, port = (getattr(config.server, key) for key in kind.address)
            _check_port(host, port, kind.address[1])


def _check_port(host: str, port: int, key: str) -> None:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise DeploymentError(
                f"can't listen on {address_of(host, port)}: {error.strerror}; see {_SERVER_FILE}"
            ) from error
        holder = _holder(port)
        if holder in processes_of(Path()):
            return  # our own predecessor, which supervisord is about to replace
        by = f" by pid {holder.pid} ({name_of(holder)})" if holder else ""
        raise DeploymentError(
            f"{key} {port} is in use{by}; stop that, or set another {key} in {_SERVER_FILE}"
        ) from error


def _holder(port: int) -> psutil.Process | None:
    """Find the process that listens on `port`; None if we may not know."""
    try:
        for connection in psutil.net_connections("tcp"):
            listening = connection.status == psutil.CONN_LISTEN
            if listening and connection.laddr[1:2] == (port,) and connection.pid:
                return psutil.Process(connection.pid)
    except psutil.Error:
        return None
    return None


# --- processes, by what the kernel knows of them ----------------------------------------------

# So they are found whatever became of supervisord, its pid file and its socket. Such a process has
# the deployment as its current folder. Either its environment has the variable that our definitions
# of programs set, and searchers inherit; or it is supervisord: it holds the socket that is named
# run/supervisor.sock. Other processes in that folder belong to its users.


def processes_of(directory: Path) -> list[psutil.Process]:
    """List the processes of the deployment in `directory`, supervisord's included."""
    home = os.path.realpath(directory)
    found = []
    for process in psutil.process_iter():
        # it has ended, or is another user's
        with contextlib.suppress(psutil.Error):
            if process.cwd() == home and (_is_program(process) or _is_supervisord(process)):
                found.append(process)
    return found


def _resume(processes: Sequence[psutil.Process]) -> None:
    """Continue those that were stopped (SIGSTOP): they could not react to a request to end."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def _end(processes: Sequence[psutil.Process], seconds: float, tell: Tell) -> None:
    """Ask processes to stop; kill those that have not within `seconds`."""
    for process in processes:
        try:
            tell(f"stopping {name_of(process)}, pid {process.pid}")
            process.terminate()
        except psutil.NoSuchProcess:
            continue
    stubborn = wait_for(processes, seconds)
    for process in stubborn:
        tell(f"killing pid {process.pid}, which did not stop within {seconds:g} s")
        process.kill()
    wait_for(stubborn, seconds)


def wait_for(processes: Sequence[psutil.Process], seconds: float) -> Sequence[psutil.Process]:
    """Wait until all have ended, but no longer than `seconds`; return those that still run."""
    deadline = time.monotonic() + seconds
    left = [process for process in processes if _is_alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        left = [process for process in left if _is_alive(process)]
    return left


def name_of(process: psutil.Process) -> str:
    """Name the process's role in a deployment, or else its program."""
    try:
        line = process.cmdline()
        if line and line[0].startswith(_TITLE):
            return line[0].removeprefix(_TITLE).strip()
        return "supervisord" if "supervisord" in " ".join(line[:3]) else process.name()
    except psutil.Error:
        return "a process that has ended"


def _is_alive(process: psutil.Process) -> bool:
    """Tell whether it runs. A zombie has ended: in a container PID 1 may reap it late, or never."""
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_program(process: psutil.Process) -> bool:
    return PROGRAM_VARIABLE in process.environ()


def _is_supervisord(process: psutil.Process) -> bool:
    """Tell by the socket, which it binds to that name with its pid at the end, then links."""
    bound = [str(socket.laddr) for socket in process.net_connections("unix") if socket.laddr]
    return any(f"/{layout.SUPERVISOR_SOCKET}" in path for path in bound)
