"""Keeps supervisord's shard programs in step with the configuration in force, while all run.

Only programs that a change concerns are touched: not those that somebody stopped by hand, nor those
that a newer version of this software would write otherwise. Their names lie in run/programs.due
until it is done, so that a coordinator that was killed in between goes on with them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from pinlaterd.config.layout import PROGRAMS_DUE
from pinlaterd.config.schema import Config
from pinlaterd.coordinator.plan import Step, plan
from pinlaterd.coordinator.programs import shard_programs
from pinlaterd.coordinator.supervisord import (
    Supervisord,
    SupervisorError,
    carry_out,
    lock_programs,
)

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


def changed_programs(before: Config, after: Config) -> frozenset[str]:
    """Names of shard programs to add, replace or remove on the way from one to the other."""
    return frozenset(
        program.name for program in {*shard_programs(before)} ^ {*shard_programs(after)}
    )


class ShardPrograms:
    """What is still to be done, and the doing of it. `problem`: why it could not be, or ""."""

    def __init__(self, monotonic: Callable[[], float], due_file: Path = PROGRAMS_DUE) -> None:
        self.problem = ""
        self._monotonic = monotonic
        self._due_file = due_file
        self._due = self._read()
        self._since: frozenset[str] = frozenset()  # of those, since the work in hand began
        self._at_work: asyncio.Task[frozenset[str]] | None = None
        self._next_try = 0.0

    @property
    def settled(self) -> bool:
        return not self._due

    def want(self, names: Iterable[str]) -> None:
        """To be called before the configuration that needs it is written. Raises OSError."""
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
        """A thread can't be ended: what it has begun it finishes, or `programs.due` says so."""
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

    def _read(self) -> frozenset[str]:
        try:
            return frozenset(map(str, json.loads(self._due_file.read_bytes())))
        except (OSError, ValueError, TypeError):
            return frozenset()

    def _write(self) -> None:
        if self._due:
            self._due_file.write_text(json.dumps(sorted(self._due)), encoding="utf-8")
        else:
            self._due_file.unlink(missing_ok=True)


def _arrange(names: frozenset[str], config: Config) -> frozenset[str]:
    """Make supervisord run the programs of `names` as `config` wants them; returns `names`.

    Raises SupervisorError, OSError."""
    # whoever has the lock may wait for this process to end, so this must not wait for the lock
    with lock_programs(patient=False):
        supervisord = Supervisord()
        wanted = [program for program in shard_programs(config) if program.name in names]
        present = [program for program in supervisord.running() if program.name in names]
        actions = [one for one in plan(wanted, present) if one.step is not Step.START]
        for action in actions:
            log.info("%s %s", action.step.value, action.program.name)
        carry_out(actions, supervisord)
    return names
