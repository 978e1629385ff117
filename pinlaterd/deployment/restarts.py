"""Restarts processes of a running deployment, one after the other, at no client's cost.

A process that is told to end finishes its calls in flight, and supervisord starts it again by
itself, even if the command is killed. While a shard is away, routers keep its calls. A router's
handover peer takes over its listening socket and serves; then the router is restarted, and takes
the socket back. So a router that can't start (a broken installation) is found out while the old one
serves, and a crash in the middle leaves at least one that serves. Repeating the command mends that.
Meanwhile the coordinator may add, replace and remove programs: each is looked at again when its
turn comes, under the lock of all that change programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pinlaterd.config.active import load_active
from pinlaterd.config.layout import ETC, router_programs, shard_program
from pinlaterd.config.schema import Config
from pinlaterd.coordinator.processes import Status
from pinlaterd.coordinator.programs import (
    COORDINATOR,
    Program,
    ProgramInfo,
    Supervisord,
    SupervisorError,
    handover_peer_of,
    lock_programs,
    stop_seconds,
    wanted_programs,
)
from pinlaterd.deployment import stats_page
from pinlaterd.deployment.service import Startup, Tell, at_work_in
from pinlaterd.errors import ConnectionFailed, DeploymentError
from pinlaterd.wire.control import ProcessState

ALL_SHARDS = "all"
_SERVE_SECONDS = 60.0
_POLL_SECONDS = 0.05


class Restarted(NamedTuple):
    program: str
    pid: int
    seconds: float  # from the first step until the last


def restart_routers(directory: Path, tell: Tell) -> Sequence[Restarted]:
    """Raises ConfigError, DeploymentError, ConnectionFailed (no coordinator); so do the others."""
    return _restart(directory, lambda config: router_programs(config.server.routers), tell)


def restart_shards(directory: Path, name: str, tell: Tell) -> Sequence[Restarted]:
    """The shard `name`, or each of them."""

    def chosen(config: Config) -> Sequence[str]:
        if name != ALL_SHARDS and name not in config.shards:
            raise DeploymentError(f"no shard {name!r}; there are: {', '.join(config.shards)}")
        return [shard_program(shard) for shard in config.shards if name in (shard, ALL_SHARDS)]

    return _restart(directory, chosen, tell)


def restart_coordinator(directory: Path, tell: Tell) -> Sequence[Restarted]:
    return _restart(directory, lambda _: [COORDINATOR], tell)


def _restart(
    directory: Path, choose: Callable[[Config], Sequence[str]], tell: Tell
) -> Sequence[Restarted]:
    with at_work_in(directory):
        # The active configuration, not what the files say by now: a restart changes no settings.
        names = choose(load_active(ETC).config)
        try:
            if COORDINATOR not in names:
                _fetch_status()  # It is asked what serves: fail before anything is stopped.
            # Each by the configuration that is active when its turn comes.
            restarted = [_Restarts(load_active(ETC).config, tell).restart(name) for name in names]
            return [found for found in restarted if found is not None]
        except SupervisorError as error:
            raise DeploymentError(f"{error}; `pinlaterd up` starts what does not run") from error


class _Restarts:
    """Restarts by one configuration, in the deployment that is the current folder."""

    def __init__(self, config: Config, tell: Tell) -> None:
        self._config = config
        self._supervisord = Supervisord()
        self._programs = {program.name: program for program in wanted_programs(config)}
        self._tell = tell

    def restart(self, name: str) -> Restarted | None:
        """None if it was removed while others were restarted."""
        began = time.monotonic()
        program = self._programs.get(name)
        if program is None:
            self._tell(f"{name} is no more")
            return None
        if name in router_programs(self._config.server.routers):
            pid = self._restart_with_handover(program)
        else:
            pid = self._restart_alone(program)
        return Restarted(name, pid, round(time.monotonic() - began, 2))

    def _restart_with_handover(self, router: Program) -> int:
        peer = handover_peer_of(router)
        found = self._found().get(peer.name)
        if found is None or not self._serves(found):  # else a command before this one got so far
            self._tell(f"starting {peer.name}")
            startup = Startup(_SERVE_SECONDS)
            self._supervisord.add(peer)
            try:
                self._wait_until_serving(peer.name, startup)
            except DeploymentError as error:
                self._supervisord.remove(peer.name)
                raise DeploymentError(f"{router.name} was left as it is: {error}") from error
        try:
            pid = self._restart_alone(router)
        except DeploymentError as error:
            raise DeploymentError(
                f"{peer.name} serves in the place of {router.name}; mend this, then repeat the "
                f"command: {error}"
            ) from error
        self._tell(f"stopping {peer.name}")
        self._supervisord.remove(peer.name)
        return pid

    def _restart_alone(self, program: Program) -> int:
        """Returns the new pid."""
        name = program.name
        self._tell(f"stopping {name}")
        startup = Startup(_SERVE_SECONDS)
        with lock_programs():
            present = {found.name: found for found in self._supervisord.running()}.get(name)
            before = self._found()[name].pid if present is not None else 0
            if present is None or not before or present.definition != program.definition:
                self._supervisord.add(program)  # also where its settings have changed
            else:
                self._supervisord.end(name)
                if not self._has_ended(name, before):
                    self._supervisord.add(program)  # it is stopped by force
        self._tell(f"starting {name}")
        startup.started_at = time.time()
        return self._wait_until_serving(name, startup)

    def _has_ended(self, name: str, pid: int) -> bool:
        """Whether it did in the time that supervisord would give it, too."""
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
        """Whether the coordinator has heard from this very process that it serves."""
        try:
            status = _fetch_status()
        except ConnectionFailed:
            return False
        return any(
            process["pid"] == found.pid and process["state"] == ProcessState.SERVING
            for process in status["processes"]
        )


def _fetch_status() -> Status:
    """Raises ConnectionFailed."""
    found: Status = stats_page.fetch_json("/status.json", directory=Path(), url=None)
    return found
