"""Live configuration: from changed files to the active configuration.

What is read of the files in etc/ once they rest is what gets validated; nothing reads it a second
time. What is not valid as a whole changes nothing, and the reason is kept until it is mended. What
is valid becomes active step by step (`advance`, which is pure), each step written for all processes
at once.

All of it acts at once but a shard that is no longer named. That one gets no more jobs first; it
goes once it said, after that, that it holds none. Else it stays as it was, and why is said. A
shard under `abandon` goes whatever it holds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pinlaterd.clock import until_full
from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.layout import CONFIG_FILES, ETC, SHARDS_FILE, ConfigFiles, FileWatch
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import Config, ShardSettings, follow
from pinlaterd.errors import ConfigError, how_many

log = logging.getLogger(__name__)

# Twice this is the least that a file has to rest.
LOOK_SECONDS = 0.25
# While nothing is under way; each look has an idle machine's core wake up.
QUIET_LOOK_SECONDS = 0.5


# --- the next step -----------------------------------------------------------------------------


class HeldJobs(NamedTuple):
    """The jobs that a shard reports to hold. `config_version`: the one it followed by then."""

    config_version: int
    pending: int
    in_progress: int


class Leaving(NamedTuple):
    """A shard that gets no more jobs since `version` is active; `before`: how it was."""

    before: ShardSettings
    version: int


class Transition(NamedTuple):
    """`config` is to be active; `refusals` say of each shard that is not removed why."""

    config: Config
    leaving: Mapping[str, Leaving]
    refusals: Mapping[str, str]
    needs_restart: Sequence[str]

    @property
    def converged(self) -> bool:
        """Whether nothing more will follow by itself."""
        return not self.leaving and not self.refusals


Holds = Callable[[str], HeldJobs | None]


def advance(
    active: ActiveConfig, wanted: Config, leaving: Mapping[str, Leaving], holds: Holds
) -> Transition:
    """Take the next step towards `wanted`. `holds(shard)`: None while it does not serve."""
    followed = follow(active.config.server, wanted.server)
    shards = dict(wanted.shards)
    still_leaving: dict[str, Leaving] = {}
    refusals = {}
    for name, present in active.config.shards.items():
        if name in wanted.shards or name in wanted.abandon:
            continue
        gone_since = leaving.get(name)
        before = gone_since.before if gone_since is not None else present
        holding = holds(name)
        refusal = _refusal(name, holding)
        if refusal:
            refusals[name] = refusal
            shards[name] = before
            continue
        since = gone_since or _leaving(before, active.version)
        if holding is None or holding.config_version < since.version:
            still_leaving[name] = since
            shards[name] = dataclasses.replace(before, dequeue_only=True)
    config = dataclasses.replace(wanted, server=followed.settings, shards=shards)
    return Transition(config, still_leaving, refusals, followed.needs_restart)


def _leaving(before: ShardSettings, version: int) -> Leaving:
    """Note that it gets no jobs as of the next version, unless it gets none already."""
    return Leaving(before, version if before.dequeue_only else version + 1)


def vanished(etc: Path, before: Config, wanted: Config) -> list[str]:
    """List files that held something and are gone or empty, which is hardly meant."""
    return [
        f"{etc / name}: the file is gone or empty; what it said stays active. Put it back, or "
        "write a comment into it if it is to say nothing"
        for name in CONFIG_FILES
        if name in before.files and name not in wanted.files
    ]


def _refusal(name: str, holding: HeldJobs | None) -> str:
    """Say why the shard can't be removed now; "" if nothing speaks against it."""
    place = f"{ETC / SHARDS_FILE}: shards.{name}: not removed"
    cure = f"or give its jobs up: `abandon: [{name}]` in that file"
    if holding is None:
        return (
            f"{place}: it does not serve, so what it holds is not known; name it again and have "
            f"it serve, {cure}"
        )
    if holding.pending or holding.in_progress:
        return (
            f"{place}: {how_many(holding.pending, 'job is', 'jobs are')} pending and "
            f"{holding.in_progress:,} in progress there; wait until it holds none "
            f"(dequeue_only: true keeps new ones out), {cure}"
        )
    return ""


# --- all of it ---------------------------------------------------------------------------------


Activate = Callable[[Config], ActiveConfig]  # returns what is active by then


class Reload:
    """Follows the files of `etc`. `step` is called again and again, and never by two at once."""

    def __init__(self, etc: Path, active: ActiveConfig, holds: Holds, activate: Activate) -> None:
        self._etc = etc
        self._watch = self._new_watch()
        self._active = active
        self._holds = holds
        self._activate = activate
        self._wanted: Config | None = None  # None: nothing is left to do
        self._leaving: Mapping[str, Leaving] = {}
        self._mistakes: Sequence[str] = ()
        self._logged: frozenset[str] = frozenset()
        self.refusals: Mapping[str, str] = {}  # why shards are not removed, by their names
        self.needs_restart: Sequence[str] = ()
        self.warnings: Sequence[str] = ()  # of the files that were valid last
        self.validated = ""  # which files were validated last: see ConfigFiles.digest

    def _new_watch(self) -> FileWatch[ConfigFiles]:
        paths = [self._etc / name for name in CONFIG_FILES]
        return FileWatch(paths, partial(ConfigFiles, self._etc))

    @property
    def number(self) -> int:
        """Return the number of a cluster's configuration; 0 without one."""
        return 0

    @property
    def problems(self) -> Sequence[str]:
        """List what is wrong with the files, or can't be done as they say."""
        return (*self._mistakes, *self.refusals.values())

    @property
    def converged(self) -> bool:
        """Whether what the files say is active, or was refused."""
        return self._wanted is None or (bool(self.refusals) and not self._leaving)

    def until_look(self, now: float) -> float:
        """Return the seconds from `now` (monotonic) to the next step; while files change not in
        step with other servers, or one of them could always be the last with its edits."""
        if self._watch.rests and self.converged:
            return until_full(QUIET_LOOK_SECONDS, now)
        return LOOK_SECONDS * random.uniform(0.75, 1.25)

    async def step(self) -> None:
        """Look whether the files have changed; do what is due. Raises OSError."""
        files = self._watch.look()
        if files is not None:
            await self._validate(files)
        if self._wanted is not None:
            self._advance(self._wanted)
        self._log_problems()

    async def _validate(self, files: ConfigFiles) -> None:
        try:
            # long files take long to read, and others want to be answered meanwhile
            wanted = await asyncio.to_thread(load_config, self._etc, files.read)
            self._mistakes = vanished(self._etc, self._active.config, wanted)
            self.warnings = wanted.warnings
            for warning in wanted.warnings:
                log.warning("%s", warning)
        except ConfigError as error:
            self._mistakes = error.problems
        self._wanted = self._as_before() if self._mistakes else wanted
        self.validated = files.digest

    def _as_before(self) -> Config:
        """Return what is active, without removals under way: no file asks for them now."""
        config = self._active.config
        before = {name: leaving.before for name, leaving in self._leaving.items()}
        return dataclasses.replace(config, shards={**config.shards, **before})

    def _advance(self, wanted: Config) -> None:
        found = advance(self._active, wanted, self._leaving, self._holds)
        if found.config != self._active.config:
            self._active = self._activate(found.config)
            if self._active.config != found.config:
                return  # another command was faster: on from there, with the next step
        self._leaving, self.refusals = found.leaving, found.refusals
        if not self._mistakes:
            self.needs_restart = found.needs_restart
        if found.converged:
            self._wanted = None

    def _log_problems(self) -> None:
        """Log each problem once, for as long as it stays."""
        for text in self._mistakes:
            if text not in self._logged:
                log.error("%s (nothing was changed)", text)
        for text in (*self.refusals.values(), *self.needs_restart):
            if text not in self._logged:
                log.warning("%s", text)
        now = frozenset((*self.problems, *self.needs_restart))
        if self._logged and not now:
            log.info("the configuration is in order again")
        self._logged = now
