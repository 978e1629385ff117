"""Live configuration: from changed files to what is in force.

What is not valid as a whole changes nothing; why is kept until it is mended. What is valid is put
in force step by step (see `transition`), each step written for all processes at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.load import ConfigFiles, load_config
from pinlaterd.config.schema import Config
from pinlaterd.coordinator.transition import Holds, Leaving, advance, vanished
from pinlaterd.coordinator.watch import ConfigWatch
from pinlaterd.errors import ConfigError

log = logging.getLogger(__name__)

PutInForce = Callable[[Config], ActiveConfig]  # returns what is in force by then


class Reload:
    """Follows the files of `etc`. `step` is called again and again, and never by two at once."""

    def __init__(
        self, etc: Path, in_force: ActiveConfig, holds: Holds, put_in_force: PutInForce
    ) -> None:
        self._etc = etc
        self._watch = ConfigWatch(etc)
        self._in_force = in_force
        self._holds = holds
        self._put_in_force = put_in_force
        self._wanted: Config | None = None  # None: nothing is left to do
        self._leaving: Mapping[str, Leaving] = {}
        self._mistakes: Sequence[str] = ()
        self._refusals: Sequence[str] = ()
        self._said: frozenset[str] = frozenset()
        self.needs_restart: Sequence[str] = ()
        self.warnings: Sequence[str] = ()  # of the files that were valid last
        self.judged = ""  # which files were judged last: see ConfigFiles.digest

    @property
    def problems(self) -> Sequence[str]:
        """What is wrong with the files, or can't be done as they say."""
        return (*self._mistakes, *self._refusals)

    @property
    def settled(self) -> bool:
        """Whether what the files say is in force, or was refused."""
        return self._wanted is None or (bool(self._refusals) and not self._leaving)

    async def step(self) -> None:
        """Look whether the files have changed; do what is due. Raises OSError."""
        files = self._watch.look()
        if files is not None:
            await self._judge(files)
        if self._wanted is not None:
            self._advance(self._wanted)
        self._say()

    async def _judge(self, files: ConfigFiles) -> None:
        try:
            # long files take long to read, and others want to be answered meanwhile
            wanted = await asyncio.to_thread(load_config, self._etc, files.read)
            self._mistakes = vanished(self._etc, self._in_force.config, wanted)
            self.warnings = wanted.warnings
            for warning in wanted.warnings:
                log.warning("%s", warning)
        except ConfigError as error:
            self._mistakes = error.problems
        self._wanted = self._as_before() if self._mistakes else wanted
        self.judged = files.digest

    def _as_before(self) -> Config:
        """What is in force, without the removals that are under way: nobody asks for them now."""
        config = self._in_force.config
        before = {name: leaving.before for name, leaving in self._leaving.items()}
        return dataclasses.replace(config, shards={**config.shards, **before})

    def _advance(self, wanted: Config) -> None:
        found = advance(self._in_force, wanted, self._leaving, self._holds)
        if found.config != self._in_force.config:
            self._in_force = self._put_in_force(found.config)
            if self._in_force.config != found.config:
                return  # somebody was faster: on from there, with the next step
        self._leaving, self._refusals = found.leaving, found.refusals
        if not self._mistakes:
            self.needs_restart = found.needs_restart
        if found.settled:
            self._wanted = None

    def _say(self) -> None:
        """Log each problem once, for as long as it stays."""
        for text in self._mistakes:
            if text not in self._said:
                log.error("%s (nothing was changed)", text)
        for text in (*self._refusals, *self.needs_restart):
            if text not in self._said:
                log.warning("%s", text)
        now = frozenset((*self.problems, *self.needs_restart))
        if self._said and not now:
            log.info("the configuration is in order again")
        self._said = now
