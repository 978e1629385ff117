"""A deployment as a service: started as a whole, or stopped as a whole.

`up` and `down` work from any state, also from what a kill -9 of everything left behind, and can be
repeated. They run with the deployment as the current folder, so that socket paths stay short.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import BinaryIO, NamedTuple

import psutil

from pinlaterd.client.client import Client
from pinlaterd.config.active import (
    Superseded,
    activate,
    environment_of,
    read_active,
)
from pinlaterd.config.layout import (
    ETC,
    LOGS,
    PROGRAMS_DUE,
    RATES_FILE,
    RUN,
    SERVER_FILE,
    SNAPSHOT_FILE,
    STATS_SOCKET,
    SUPERVISOR_PID_FILE,
    SUPERVISOR_SOCKET,
    SUPERVISORD_FILE,
    enter,
    is_handover_peer,
    lock,
    router_programs,
    shard_program,
)
from pinlaterd.config.load import ConfigFiles, load_config
from pinlaterd.config.schema import Config, ServerSettings
from pinlaterd.coordinator.programs import (
    COORDINATOR,
    ProgramInfo,
    Supervisord,
    SupervisorError,
    SupervisorSilent,
    carry_out,
    lock_programs,
    log_file,
    plan,
    wanted_programs,
    write_programs,
)
from pinlaterd.deployment import orphans, stats_page
from pinlaterd.deployment.files import check_depth
from pinlaterd.errors import ConnectionFailed, DeploymentError, PinLaterError
from pinlaterd.lifecycle import ExitCode
from pinlaterd.wire.control import ProcessState

UP_SECONDS = 60.0
_SHUT_DOWN_SECONDS = 60.0  # for supervisord to stop its programs, before we do
_STOP_SECONDS = 15.0  # for orphans, which supervisord does not stop
POLL_SECONDS = 0.1
_LOG_LINES = 15
_LOG_BYTES = 64 * 1024
_CRASHES = 2  # a process that ended so often since `up` began won't come up by itself
_COMMAND_LOCK = RUN / "command.lock"
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104

Tell = Callable[[str], None]


class UpResult(NamedTuple):
    config: Config
    changed: bool  # False: it was serving already


def up(directory: Path, tell: Tell, seconds: float = UP_SECONDS) -> UpResult:
    """Start everything, or what is missing of it, and return once all serve.

    Raises ConfigError, DeploymentError. `tell` gets what is waited for, in short."""
    config = load_config(directory / ETC)
    with at_work_in(directory):
        startup = Startup()
        supervisord = Supervisord()
        changed = True
        if _runs(supervisord):
            changed = _reconcile(config, supervisord, tell)
        else:
            _start(config, supervisord, tell)
        startup.deadline = time.monotonic() + seconds
        _wait_until_serving(config, supervisord, startup, tell)
        _remove_handover_peers(supervisord, tell)
    return UpResult(config, changed)


def down(directory: Path, tell: Tell) -> bool:
    """Let every process finish its calls in flight and stop. False: none ran."""
    if not (directory / ETC).is_dir():
        raise DeploymentError(f"{directory}: no deployment there (it has no {ETC} folder)")
    with at_work_in(directory):
        supervisord = Supervisord()
        running = orphans.processes_of(Path())
        if not running:
            return False
        orphans.resume(running)
        try:
            _shut_down(supervisord, running, tell)
        except SupervisorError as error:
            tell(f"{error}; stopping processes without it")
        orphans.end(orphans.processes_of(Path()), _STOP_SECONDS, tell)
        left = orphans.processes_of(Path())
        if left:
            names = ", ".join(f"{orphans.name_of(one)} (pid {one.pid})" for one in left)
            raise DeploymentError(f"still running: {names}; stop them by hand")
        _remove_stale_files()
    return True


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
        left = orphans.wait_for(left, POLL_SECONDS)
        with contextlib.suppress(SupervisorError):
            supervisord.pid()  # when called, it reaps at once; else once a second
        tell("stopping " + ", ".join(sorted({orphans.name_of(process) for process in left})))


# --- the folder ---------------------------------------------------------------------------


@contextlib.contextmanager
def at_work_in(directory: Path) -> Iterator[None]:
    """Make the deployment the current folder, and keep other commands out of it meanwhile."""
    check_depth(directory)
    before = Path.cwd()
    try:
        with _enter_and_lock(directory):
            yield
    finally:
        os.chdir(before)


def _enter_and_lock(directory: Path) -> BinaryIO:
    try:
        enter(directory / ETC)
        LOGS.mkdir(mode=0o700, exist_ok=True)
        return lock(_COMMAND_LOCK, patient=False)
    except BlockingIOError as error:
        raise DeploymentError(
            f"another `pinlaterd up`, `down` or `pinlater-admin restart` works in {directory}; "
            "wait until it is done"
        ) from error
    except OSError as error:
        raise DeploymentError(
            f"{error.filename or directory}: {error.strerror}; run this as the deployment's owner"
        ) from error


def _remove_stale_files() -> None:
    """Nothing runs any more. Without the snapshot no shard is a newcomer, which would have to serve
    before it is admitted; without the rates no router holds a share."""
    for path in (
        *(SUPERVISOR_SOCKET, SUPERVISOR_PID_FILE, STATS_SOCKET),
        *(SNAPSHOT_FILE, PROGRAMS_DUE, RATES_FILE),
    ):
        path.unlink(missing_ok=True)


# --- starting -----------------------------------------------------------------------------


def _runs(supervisord: Supervisord) -> bool:
    """Raises DeploymentError if it runs, and does not answer."""
    try:
        supervisord.pid()
    except SupervisorSilent as error:
        raise DeploymentError(
            f"{error}: was it stopped? `kill -CONT $(cat {SUPERVISOR_PID_FILE})` has it go on; "
            "`pinlaterd down` ends it, by force if need be"
        ) from error
    except SupervisorError:
        return False
    return True


def _activate_beside_leaving(config: Config) -> AbstractSet[str]:
    """For processes that start from now on: `config`, and the shards that it does not name any
    more. Returns those: the coordinator lets them go, once they hold no jobs."""
    while True:
        before = read_active()
        shards = {} if before is None else before.config.shards
        left = {name: shard for name, shard in shards.items() if name not in config.shards}
        wanted = dataclasses.replace(config, shards={**config.shards, **left})
        try:
            activate(wanted, after=None if before is None else before.version)
        except Superseded:
            continue
        return left.keys()


def _reconcile(config: Config, supervisord: Supervisord, tell: Tell) -> bool:
    """Make a running supervisord run what is wanted; whether anything had to be done."""
    try:
        with lock_programs():
            # A handover peer stays until the routers serve: they may take over its socket.
            present = [found for found in supervisord.running() if not is_handover_peer(found.name)]
            actions = plan(wanted_programs(config), present)
            _check_ports(config.server, {action.program.name for action in actions})
            _check_environment(config, supervisord)
            if actions:
                kept = {shard_program(name) for name in _activate_beside_leaving(config)}
                actions = [action for action in actions if action.program.name not in kept]
            for action in actions:
                tell(f"{action.step.value} {action.program.name}")
            carry_out(actions, supervisord)
    except SupervisorError as error:
        raise DeploymentError(f"{error}; `pinlaterd down`, then `up` again") from error
    return bool(actions)


def _check_environment(config: Config, supervisord: Supervisord) -> None:
    """Processes get their environment from supervisord, which got its own when it was started."""
    there = psutil.Process(supervisord.pid()).environ()
    other = sorted(
        name for name in environment_of(config) if there.get(name) != os.environ.get(name)
    )
    if other:
        raise DeploymentError(
            f"{', '.join(other)}: not what supervisord was started with, and so not what its "
            "processes would see; `pinlaterd down`, then `up`"
        )


def _remove_handover_peers(supervisord: Supervisord, tell: Tell) -> None:
    """Of a restart that was interrupted."""
    try:
        for program in supervisord.programs():
            if is_handover_peer(program.name):
                tell(f"stopping {program.name}")
                supervisord.remove(program.name)
    except SupervisorError as error:
        raise DeploymentError(f"{error}; `pinlaterd up` again") from error


def _start(config: Config, supervisord: Supervisord, tell: Tell) -> None:
    """Start a supervisord of our own, over the remains of one that was killed."""
    orphans.end(orphans.processes_of(Path()), _STOP_SECONDS, tell)
    _remove_stale_files()
    wanted = wanted_programs(config)
    _check_ports(config.server, {program.name for program in wanted})
    write_programs(wanted)
    activate(config)
    command = [sys.executable, "-m", "supervisor.supervisord", "-c", str(ETC / SUPERVISORD_FILE)]
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
            tail = _last_lines(LOGS / "supervisord.log")
            raise DeploymentError(f"supervisord did not start:\n{tail}")
        time.sleep(POLL_SECONDS)


def _check_ports(server: ServerSettings, starting: set[str]) -> None:
    """Say now, not in some log, if another program has a port that one of `starting` needs."""
    if not starting.isdisjoint(router_programs(server.routers)):
        _check_port(server.host, server.port, "port")
    if COORDINATOR in starting:
        _check_port(server.stats_host, server.stats_port, "stats_port")


def _check_port(host: str, port: int, key: str) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise DeploymentError(f"{host}: {error.strerror}; see etc/pinlaterd.yaml") from error
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise DeploymentError(f"can't listen on {host}:{port}: {error.strerror}") from error
            holder = _holder(port)
            if holder in orphans.processes_of(Path()):
                return  # our own predecessor, which supervisord is about to replace
            by = f" by pid {holder.pid} ({orphans.name_of(holder)})" if holder else ""
            raise DeploymentError(
                f"{key} {port} is in use{by}; stop that, or set another {key} in "
                f"{ETC / SERVER_FILE}"
            ) from error


def _holder(port: int) -> psutil.Process | None:
    """Which process listens on `port`, as far as we may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            listening = connection.status == psutil.CONN_LISTEN
            if listening and connection.laddr[1:2] == (port,) and connection.pid:
                return psutil.Process(connection.pid)
    except psutil.Error:
        return None
    return None


# --- waiting ------------------------------------------------------------------------------


class Startup:
    """Processes that were just started: whether there is still hope, and what they logged since."""

    def __init__(self, seconds: float = UP_SECONDS) -> None:
        self.started_at = time.time()
        self.deadline = time.monotonic() + seconds
        self._log_bytes = {path.stem: path.stat().st_size for path in LOGS.glob("*.log")}
        self._crashes: defaultdict[str, set[int]] = defaultdict(set)  # when each program ended

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def has_failed(self, program: ProgramInfo) -> bool:
        """Whether `program` ended in a way that no further try mends."""
        crashes = self._crashes[program.name]
        if program.stopped_at >= self.started_at:
            crashes.add(program.stopped_at)
            if program.exit_status == ExitCode.CONFIG:
                return True
        return program.state == "FATAL" or len(crashes) >= _CRASHES

    def log_tail(self, program: str) -> str:
        path = log_file(program)
        return f"The last lines of {path}:\n{_last_lines(path, self._log_bytes.get(program, 0))}"


def _wait_until_serving(
    config: Config, supervisord: Supervisord, startup: Startup, tell: Tell
) -> None:
    """Raises DeploymentError as soon as a process has failed for good, or the deadline passed."""
    while missing := _missing(config):
        tell("waiting for " + ", ".join(missing))
        try:
            programs = supervisord.programs()
        except SupervisorError as error:
            tail = _last_lines(LOGS / "supervisord.log")
            raise DeploymentError(f"supervisord has ended: {error}\n{tail}") from error
        for program in filter(startup.has_failed, programs):
            tail = startup.log_tail(program.name)
            raise DeploymentError(f"{program.name} does not start. {tail}")
        if startup.is_late:
            text = f"gave up waiting for {', '.join(missing)}; `pinlaterd status` shows more"
            tails = [startup.log_tail(name) for name in missing if log_file(name).exists()]
            raise DeploymentError("\n".join([text, *tails]))
        time.sleep(POLL_SECONDS)


def _missing(config: Config) -> Sequence[str]:
    """What does not serve yet; nothing once all do, and a call over Thrift is answered.

    Raises DeploymentError for what the coordinator refuses to carry out."""
    try:
        status = stats_page.fetch_json("/status.json", directory=Path(), url=None)
    except (ConnectionFailed, PinLaterError):
        return [COORDINATOR]
    if status["problems"]:
        return [str(problem).split(" is ")[0] for problem in status["problems"]]
    # Of the files as they are now: another command may edit them meanwhile.
    if status["config_judged"] != ConfigFiles(ETC).digest:
        # what it says of the files before these is no matter
        return ["the coordinator, which carries out the configuration", *status["config_problems"]]
    if status["config_problems"]:
        raise DeploymentError("\n".join(status["config_problems"]))
    server = config.server
    serving = {p["name"] for p in status["processes"] if p["state"] == ProcessState.SERVING}
    missing = [name for name in router_programs(server.routers) if name not in serving]
    if missing:  # though a handover peer serves in its place
        return missing
    try:
        with Client(_EVERYWHERE.get(server.host, server.host), server.port) as client:
            client.queue_names()
    except (ConnectionFailed, PinLaterError):
        return [f"an answer on port {server.port}"]
    return []


def _last_lines(path: Path, since: int = 0) -> str:
    """The end of a log, from byte `since` on if there is anything behind it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since if since < size else 0, size - _LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        text = ""
    lines = text.splitlines()[-_LOG_LINES:]
    return "\n".join(f"  {line}" for line in lines) or "  (empty)"
