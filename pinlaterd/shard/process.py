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
from pinlaterd.config.active import ActiveConfig, load_active
from pinlaterd.config.schema import ShardSettings
from pinlaterd.engines import make_engine
from pinlaterd.engines.base import StorageEngine
from pinlaterd.errors import ConfigError, ShardOwned, StorageCorrupt, StorageError
from pinlaterd.lifecycle import (
    ExitCode,
    StopSignal,
    prefer_throughput,
    set_title,
    set_up_log,
)
from pinlaterd.shard.loop import ShardLoop, follow_updates
from pinlaterd.shard.service import ShardService
from pinlaterd.shard.timekeeping import Timekeeper
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ControlClient, ProcessState
from pinlaterd.wire.envelope import ShardEnd, new_context

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
# Jobs come and go by the thousands and hold no cycles: looking for some costs more than it finds.
_COLLECT_AFTER_ALLOCATIONS = (50_000, 20, 1_000)


def run(name: str, etc: Path, make: Callable[..., StorageEngine] = make_engine) -> int:
    """Serve until SIGTERM; then finish the calls in flight. Returns the exit code."""
    process = layout.shard_program(name)
    set_title(process)
    prefer_throughput()
    etc = layout.enter(etc)
    try:
        active = load_active(etc)
        config = active.config
        settings = config.shards.get(name)
        if settings is None:
            names = ", ".join(config.shards) or "none"
            raise ConfigError(
                [f"{etc / layout.SHARDS_FILE}: no shard {name!r}; there are: {names}"]
            )
        engine = make(settings, config.server)
    except ConfigError as error:
        set_up_log(process, "info")
        for problem in error.problems:
            log.error("%s", problem)
        return ExitCode.CONFIG
    set_up_log(process, config.server.log_level)
    stop = StopSignal()
    stop.catch()
    return _Shard(settings, active, engine, stop).run()


class _Shard:
    """The shard's process."""

    def __init__(
        self,
        settings: ShardSettings,
        active: ActiveConfig,
        engine: StorageEngine,
        stop: StopSignal,
    ) -> None:
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
            "shard",
            self._stats,
            self._clock.now_ms(),
            context=self._context,
        )
        self._control.config_version = active.version

    def run(self) -> int:
        try:
            if self._take_ownership():
                self._serve()
        except StorageCorrupt as error:
            log.error("can't serve: %s", error.message)
            return ExitCode.FAILURE
        except ShardOwned as error:
            log.error("has lost its store: %s", error.message)
            return ExitCode.FAILURE
        finally:
            self._control.close()
            self._context.term()
        return ExitCode.OK

    def _take_ownership(self) -> bool:
        """Wait until the store is ours; False if told to stop before."""
        told = ""
        while not self._stop.requested:
            try:
                self._service.open()
            except ShardOwned as error:
                state, key, text = ProcessState.STANDBY, "owner", error.message
            except StorageCorrupt:
                raise
            except StorageError as error:
                state, key, text = ProcessState.STARTING, "store warning", error.message
            else:
                return True
            if text != told:
                log.warning("waits for its store: %s", text)
                told = text
            self._control.report(state, {**self._facts(), key: text})
            follow_updates(self._control, self._service)
            select.select([self._stop], [], [], _RETRY_SECONDS)
        return False

    def _serve(self) -> None:
        """Raises ShardOwned."""
        endpoint = layout.shard_endpoint(self._settings.name)
        end = ShardEnd(self._context)
        try:
            end.bind(endpoint)
            log.info("serves at %s", endpoint)
            # All that lives as long as the process is out of the collector's sight from now on.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_COLLECT_AFTER_ALLOCATIONS)
            ShardLoop(
                self._service,
                end,
                self._control,
                self._stop,
                self._clock,
                self._stats,
                self._facts_of_owner,
            ).run()
        finally:
            end.close()
        log.info("stopped")

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
        }
