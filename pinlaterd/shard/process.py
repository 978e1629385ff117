"""`pinlaterd shard NAME`: wires a shard's parts together, waits until the store is its own, and
runs the loop until told to stop."""

from __future__ import annotations

import gc
import logging
import select
from collections.abc import Callable, Mapping
from pathlib import Path

from pinlaterd.clock import Clock
from pinlaterd.config import layout
from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.kinds import SHARD
from pinlaterd.config.schema import ShardSettings
from pinlaterd.engines import make_engine
from pinlaterd.engines.base import StorageEngine
from pinlaterd.errors import ConfigError, ShardOwned, StorageCorrupt, StorageError, Superseded
from pinlaterd.lifecycle import ExitCode, StopSignal, prefer_throughput
from pinlaterd.shard.loop import ShardLoop, Updates
from pinlaterd.shard.service import ShardService
from pinlaterd.shard.timekeeping import Timekeeper
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ControlClient, ProcessState
from pinlaterd.wire.curve import ClusterKey
from pinlaterd.wire.envelope import ShardEnd, new_context
from pinlaterd.wire.process import start_process

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
# Jobs come and go by the thousands and hold no cycles: looking for some costs more than it finds.
_COLLECT_AFTER_ALLOCATIONS = (50_000, 20, 1_000)


def run(name: str, etc: Path, make: Callable[..., StorageEngine] = make_engine) -> int:
    """Serve until SIGTERM, finish the calls in flight, return the exit code. Raises ConfigError."""
    prefer_throughput()
    _, etc, active, key = start_process(SHARD, etc, name)
    config = active.config
    settings = config.shards.get(name)
    if settings is None:
        names = ", ".join(config.shards) or "none"
        raise ConfigError([f"{etc / layout.SHARDS_FILE}: no shard {name!r}; there are: {names}"])
    engine = make(settings, config.server)
    stop = StopSignal()
    stop.catch()
    return _Shard(settings, active, engine, stop, key).run()


class _Shard:
    """The shard's process."""

    def __init__(
        self,
        settings: ShardSettings,
        active: ActiveConfig,
        engine: StorageEngine,
        stop: StopSignal,
        key: ClusterKey | None,
    ) -> None:
        """`key`: of the cluster that this server belongs to; None: there is no other server."""
        self._settings = settings
        self._engine = engine
        self._stop = stop
        self._clock: Clock = Clock()
        self._stats = Stats()
        timekeeper = Timekeeper(self._clock, layout.clock_file(settings.name))
        self._service = ShardService(
            settings.name, engine, active.config, self._clock, self._stats, timekeeper=timekeeper
        )
        self._context = new_context()
        self._control = ControlClient(
            layout.shard_program(settings.name),
            SHARD.name,
            self._stats,
            self._clock.now_ms(),
            context=self._context,
        )
        self._control.config_version = active.version
        self._updates = Updates(self._control, self._service, active.config.server)
        self._key = key
        self._end = ShardEnd(self._context)
        self._listens_at = ""  # for other servers

    def run(self) -> int:
        try:
            while self._take_ownership():
                self._serve()
        except StorageCorrupt as error:
            log.error("can't serve: %s", error.message)
            return ExitCode.FAILURE
        except ShardOwned as error:
            log.error("has lost its store: %s", error.message)
            return ExitCode.FAILURE
        finally:
            self._end.close()
            self._control.close()
            self._context.term()
        return ExitCode.OK

    def _take_ownership(self) -> bool:
        """Wait until the store is ours; False if told to stop before."""
        logged = ""
        while not self._stop.requested:
            state, facts = self._try_to_own()
            if state is ProcessState.SERVING:
                return True
            text = next(iter(facts.values()))
            if text != logged:
                log.warning("waits for its store: %s", text)
                logged = text
            self._control.report(state, {**self._facts(), **facts})
            self._updates.follow()
            select.select([self._stop.fileno(), self._control.fileno()], [], [], _RETRY_SECONDS)
        return False

    def _try_to_own(self) -> tuple[ProcessState, Mapping[str, str]]:
        """Return SERVING if the store is ours, else what is waited for: the first of the facts."""
        term = self._updates.term
        try:
            self._listen()
            if term is None:
                return ProcessState.STANDBY, {"owner": "another server owns this shard"}
            self._service.term = term
            self._service.open()
        except Superseded as error:
            superseded = {"owner": error.message, "superseded by epoch": str(error.epoch)}
            return ProcessState.STANDBY, superseded
        except ShardOwned as error:
            return ProcessState.STANDBY, {"owner": error.message}
        except StorageCorrupt:
            raise
        except StorageError as error:
            return ProcessState.STARTING, {"store warning": error.message}
        except OSError as error:
            return ProcessState.STARTING, {"port warning": str(error.strerror)}
        return ProcessState.SERVING, {}

    def _listen(self) -> None:
        """Listen for other servers before the store is ours: their routers connect meanwhile.
        Raises OSError."""
        endpoint = self._updates.endpoint
        if self._key is not None and endpoint not in ("", self._listens_at):
            self._end.listen(endpoint, self._key)
            self._listens_at = endpoint

    def _serve(self) -> None:
        """Serve until told to stop, or another term is to own the shard. Raises ShardOwned."""
        endpoint = layout.shard_endpoint(self._settings.name)
        try:
            self._end.bind(endpoint)
            log.info("serves at %s", endpoint)
            # All that lives as long as the process is out of the collector's sight from now on.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_COLLECT_AFTER_ALLOCATIONS)
            ShardLoop(
                self._service,
                self._end,
                self._updates,
                self._stop,
                self._clock,
                self._stats,
                self._facts_of_owner,
            ).run()
        except ShardOwned as error:
            if self._key is None:
                raise
            log.warning("has lost its store: %s", error.message)
        finally:
            self._end.close()
            self._end, self._listens_at = ShardEnd(self._context), ""
        log.info("stopped" if self._stop.requested else "gave the shard up")

    def _facts_of_owner(self) -> Mapping[str, str]:
        durability, damage = self._service.durability, self._engine.damage
        facts = self._facts()
        facts |= {"durability": durability.setting, "durability warning": durability.warning}
        if damage:
            cure = f"stop it, then pinlater-admin shard check {self._settings.name} --repair"
            facts["damage warning"] = f"its store disagrees with itself: {damage}; {cure}"
        return facts

    def _facts(self) -> dict[str, str]:
        settings = self._settings
        return {
            "engine": settings.engine,
            "file": settings.file,
            "master": self._engine.address(),
            "epoch": str(self._service.term.epoch) if self._key else "",
        }
