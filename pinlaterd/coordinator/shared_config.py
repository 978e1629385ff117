"""The configuration of a cluster: the texts of the shared files in ZooKeeper, and copies in etc/.

What is edited in etc/ of any server is validated there, then proposed; ZooKeeper accepts it if no
other write came first. Every coordinator puts accepted texts into its own etc/ and activates what
they mean there: with its own local.yaml, and passwords of its own environment. Edits of different
files go together. Of two edits of one file the second loses, and is kept beside it. Accepted
configurations have numbers, which only grow. run/shared_config.json is the one that etc/ was made
of last: what differs from it is an edit. For removals of shards see reload.advance and `decide`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.edit import KEPT, AcceptedFiles, take_over
from pinlaterd.config.layout import BASE_FILE, SHARED_FILES, ConfigFiles, FileWatch, replace_file
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import Config, ShardSettings, follow
from pinlaterd.coordinator.reload import (
    Activate,
    HeldJobs,
    Holds,
    Leaving,
    Reload,
    advance,
    vanished,
)
from pinlaterd.coordinator.zookeeper import MOST_DATA_BYTES, Conflict, Node, NotConnected, View
from pinlaterd.errors import ConfigError

log = logging.getLogger(__name__)

_CURE = "make it again, and delete that file"
_REFRESH_STEPS = 40  # of refusals, which say how many jobs there are


class SharedFiles(AcceptedFiles, frozen=True, omit_defaults=True):
    """A configuration as ZooKeeper's node `config` has it."""

    # Shards that the files don't name any more, without passwords. `version`: the number as of
    # which one gets no jobs; 0: it is not removed, and stays as it was.
    kept: Mapping[str, Leaving] = {}
    refused: Mapping[str, str] = {}
    decided: bool = False  # whether the leading server has said by these which of them stay

    def pack(self) -> bytes:
        """Raises ConfigError if it is too large."""
        data = zlib.compress(msgspec.json.encode(self))
        if len(data) > MOST_DATA_BYTES:
            size = f"{len(data):,} bytes when packed; ZooKeeper takes {MOST_DATA_BYTES:,}"
            raise ConfigError([f"{', '.join(SHARED_FILES)} have {size}: shorten them"])
        return data


def unpack(data: bytes) -> SharedFiles:
    """Raises ValueError."""
    try:
        return msgspec.json.decode(zlib.decompress(data), type=SharedFiles)
    except zlib.error as error:
        raise ValueError(str(error)) from error


def read_base() -> SharedFiles:
    """Read the configuration from which etc/ was written last; number 0 if it is not known."""
    try:
        return msgspec.json.decode(BASE_FILE.read_bytes(), type=SharedFiles)
    except (OSError, ValueError):
        return SharedFiles()


def write_base(shared: SharedFiles) -> None:
    replace_file(BASE_FILE, msgspec.json.encode(shared), durably=True)


def accepted(base: SharedFiles, read: Callable[[Path], bytes]) -> Callable[[Path], bytes]:
    """Have `load_config` read `base` in place of the files in etc/, where it is known."""
    return lambda path: (
        base.text(path.name) if base.number and path.name in SHARED_FILES else read(path)
    )


# --- the removal of shards ---------------------------------------------------------------------


def decide(shared: SharedFiles, wanted: Config, active: Config, holds: Holds) -> SharedFiles:
    """Decide what the leading server writes next; return `shared` itself if nothing has changed."""
    # While it was named again it may have got jobs.
    leaving = {
        name: one if shared.decided else one._replace(version=shared.number + 1)
        for name, one in shared.kept.items()
        if one.version
    }
    found = advance(ActiveConfig(shared.number, active), wanted, leaving, holds)
    kept = {
        name: found.leaving.get(name, Leaving(shard, 0))
        for name, shard in found.config.shards.items()
        if name not in wanted.shards
    }
    kept = {
        name: Leaving(_without_passwords(one.before), one.version) for name, one in kept.items()
    }
    decided = msgspec.structs.replace(shared, kept=kept, refused=found.refusals, decided=True)
    if decided == shared:
        return shared
    return msgspec.structs.replace(decided, number=shared.number + 1)


def kept_shards(shared: SharedFiles, wanted: Config, active: Config) -> Mapping[str, ShardSettings]:
    """Return the shards that stay active in addition to `wanted`: all until the leader decides."""
    gone = {name: one for name, one in active.shards.items() if name not in wanted.shards}
    if not shared.decided:
        named = wanted.shards
        return {name: one.before for name, one in shared.kept.items() if name not in named} | gone
    return {
        name: dataclasses.replace(
            gone.get(name, one.before), dequeue_only=one.before.dequeue_only or one.version > 0
        )
        for name, one in shared.kept.items()
    }


# --- all of it ---------------------------------------------------------------------------------

# The data of ZooKeeper's node `config`, its version now, and whether only the leader may write it.
# Raises Conflict, NotConnected.
Write = Callable[[bytes, int, bool], Awaitable[object]]
# What shards hold, as `SharedConfig.holding` says it on the servers that own them.
Ask = Callable[[Collection[str]], Awaitable[Mapping[str, HeldJobs]]]


class SharedConfig(Reload):
    """The live configuration of a cluster's server; `see` gets what ZooKeeper holds."""

    def __init__(
        self,
        etc: Path,
        active: ActiveConfig,
        activate: Activate,
        server: str,
        write: Write,
        ask: Ask,
    ) -> None:
        super().__init__(etc, active, lambda _: None, activate)
        self._server = server
        self._write = write
        self._ask = ask
        self._view = View()
        self._base = self._theirs = read_base()
        self._replaced: Node | None = None  # by us; a View may still have it
        self._files: ConfigFiles | None = None  # None: not read since etc/ was written to
        self._edit: SharedFiles | None = None  # to be proposed
        self._lost: dict[Path, str] = {}  # edits that came second, and what to say of them
        self._kept: Sequence[Path] = ()  # those that are in etc/ still
        self._kept_watch = FileWatch([etc], lambda: sorted(etc.glob(f"*{KEPT}*")))
        self._accepted: Config | None = None  # None: it can't be used here
        self._applied = (0, 0)  # the configuration's number, version of the active configuration
        self._refresh_in = 0

    def see(self, view: View) -> None:
        self._view = view
        config = view.nodes.get("config")
        try:
            if config is not None and config != self._replaced:
                self._theirs = unpack(config.data)
        except ValueError as error:
            log.error("the configuration in ZooKeeper can't be read: %s", error)

    @property
    def number(self) -> int:
        return self._base.number

    @property
    def problems(self) -> Sequence[str]:
        found = []
        if self._edit and not self._view.connected:
            found.append(f"{self._etc}: an edit waits, as ZooKeeper can't be reached")
        if self._theirs.number < self.number:
            found.append(
                f"ZooKeeper has configuration {self._theirs.number}, and {self.number} was "
                "accepted: was it restored from a copy? Remove the cluster's nodes there, then "
                "`pinlaterd cluster init --restore`"
            )
        return (*found, *super().problems)

    @property
    def converged(self) -> bool:
        if self._files is None or self._edit or self._theirs.number != self.number:
            return False
        if self._accepted is None:
            return True
        leaving = any(one.version for one in self._base.kept.values())
        return self._applied[0] == self.number and self._base.decided and not leaving

    def followed(self, version: int) -> int:
        """Return the `number` that a process follows if it follows this version of the active
        configuration; 0 if that is not known."""
        number, active = self._applied
        return number if version >= active else 0

    def holding(self, here: HeldJobs) -> HeldJobs:
        """Return what a shard here holds, with the number of the configuration that it follows."""
        return here._replace(config_version=self.followed(here.config_version))

    async def step(self) -> None:
        if self._theirs.number > self.number:
            await self._take_on(self._theirs)
        files = self._watch.look()
        if files is not None and self.number:
            await self._load(files)
        if self._edit:
            await self._propose(self._edit)
        if self._wanted is not None:
            self._advance(self._wanted)
        if self._view.connected and self._view.leads and self._accepted is not None:
            await self._lead(self._accepted)
        kept = self._kept_watch.look()
        if kept is not None:
            self._kept = kept
        lost = (self._lost.get(p, f"{p}: an edit that came second; {_CURE}") for p in self._kept)
        self.warnings = (*lost, *(self._accepted.warnings if self._accepted else ()))
        self._log_problems()

    async def _take_on(self, theirs: SharedFiles) -> None:
        if theirs.files == self._base.files and self._accepted and not self._edit:
            write_base(theirs)
            self._base, self._wanted = theirs, self._accepted
            return
        found = await asyncio.to_thread(self._take_over, theirs)
        for text in found.values():
            log.warning("%s", text)
        self._lost |= found
        self._start_from(theirs)

    def _take_over(self, theirs: SharedFiles) -> dict[Path, str]:
        """Have etc/ hold what was accepted; returns where edits are that this replaced."""
        found = {}
        for name in SHARED_FILES:
            lost = take_over(self._etc, name, self._base.text(name), theirs.text(name))
            if lost is not None:
                found[lost] = (
                    f"{self._etc / name}: {theirs.by} changed it first, in configuration "
                    f"{theirs.number}; your edit is in {lost}: {_CURE}"
                )
        return found

    def _start_from(self, base: SharedFiles) -> None:
        """Read etc/ again: it differs from `base` by edits only."""
        write_base(base)
        self._base, self._edit, self._files = base, None, None
        self._accepted = self._wanted = None
        self._watch = self._new_watch()

    async def _load(self, files: ConfigFiles) -> None:
        """Load the accepted configuration, and the edits that were made since."""
        base, mistakes = self._base, []
        try:
            read = accepted(base, files.read)
            self._accepted = await asyncio.to_thread(load_config, self._etc, read)
        except ConfigError as error:
            self._accepted = None
            mistakes = [f"configuration {base.number}: {text}" for text in error.problems]
        self._wanted = self._accepted
        texts = {name: files.content(name) for name in SHARED_FILES}
        self._edit = None
        if any(text != base.text(name) for name, text in texts.items()):
            try:
                edited = await asyncio.to_thread(load_config, self._etc, files.read)
                wrong: Sequence[str] = vanished(self._etc, self._active.config, edited)
            except ConfigError as error:
                wrong = error.problems
            mistakes += wrong
            if not wrong:
                written = {name: text.decode() for name, text in texts.items()}
                before = {*base.kept, *(self._accepted.shards if self._accepted else ())}
                stay = self._accepted is not None and before <= edited.shards.keys()
                kept, is_decided = {} if stay else base.kept, base.decided and stay
                number = base.number + 1
                self._edit = SharedFiles(number, written, self._server, kept, {}, is_decided)
        self._mistakes, self._files, self.validated = mistakes, files, files.digest

    async def _propose(self, edit: SharedFiles) -> None:
        try:
            if not await self._put(edit, leads=False):
                return
        except ConfigError as error:
            self._mistakes, self._edit = error.problems, None
            return
        files = self._files
        self._start_from(edit)
        if files is not None:
            await self._load(files)

    async def _put(self, shared: SharedFiles, *, leads: bool) -> bool:
        """Have it follow what is accepted; if not, the next View says why. Raises ConfigError."""
        node = self._view.nodes.get("config")
        if node is None or self._theirs.number != self.number or not self._view.connected:
            return False
        try:
            await self._write(shared.pack(), node.version, leads)
        except (Conflict, NotConnected):
            return False
        self._replaced = node
        if self._theirs.number < shared.number:
            self._theirs = shared
        return True

    def _advance(self, wanted: Config) -> None:
        followed = follow(self._active.config.server, wanted.server)
        kept = kept_shards(self._base, wanted, self._active.config)
        shards = {**wanted.shards, **kept}
        config = dataclasses.replace(wanted, server=followed.settings, shards=shards)
        if config != self._active.config:
            self._active = self._activate(config)
            if self._active.config != config:
                return
        self._applied = (self.number, self._active.version)
        self.needs_restart = followed.needs_restart
        self.refusals = self._base.refused if self._base.decided else {}
        self._wanted = None

    async def _lead(self, wanted: Config) -> None:
        """Decide the next step of the removals."""
        base = self._base
        kept = self._active.config.shards.keys() - wanted.shards.keys()
        if self._applied[0] != base.number or (base.decided and not kept and not base.kept):
            return
        holds = await self._ask(kept - {*wanted.abandon}) if kept else {}
        found = decide(base, wanted, self._active.config, holds.get)
        self._refresh_in -= 1
        is_new = (found.kept, found.decided) != (base.kept, base.decided)
        if found is not base and (is_new or self._refresh_in < 0):
            self._refresh_in = _REFRESH_STEPS
            await self._put(found, leads=True)


def _without_passwords(shard: ShardSettings) -> ShardSettings:
    sentinel = shard.sentinel and shard.sentinel._replace(passwd="")
    return dataclasses.replace(shard, passwd="", sentinel=sentinel)
