"""What should be in force next: what the files say, against what is in force.

Pure. All of it acts at once but a shard that is no longer named. That one gets no more jobs first;
it goes once it said, after that, that it holds none. Else it stays as it was, and why is said. A
shard under `abandon` goes whatever it holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.changes import follow
from pinlaterd.config.layout import CONFIG_FILES, ETC, SHARDS_FILE
from pinlaterd.config.schema import Config, ShardSettings
from pinlaterd.wording import how_many


class Holding(NamedTuple):
    """What a shard that serves says it holds. `config_version`: what it followed by then."""

    config_version: int
    pending: int
    in_progress: int


class Leaving(NamedTuple):
    """A shard that gets no more jobs since `version` is in force; `before`: how it was."""

    before: ShardSettings
    version: int


class Transition(NamedTuple):
    """`config` is to be in force; `refusals` say what is not done, and why."""

    config: Config
    leaving: Mapping[str, Leaving]
    refusals: Sequence[str]
    needs_restart: Sequence[str]

    @property
    def settled(self) -> bool:
        """Whether nothing more will follow by itself."""
        return not self.leaving and not self.refusals


Holds = Callable[[str], Holding | None]


def advance(
    in_force: ActiveConfig, wanted: Config, leaving: Mapping[str, Leaving], holds: Holds
) -> Transition:
    """The next step towards `wanted`. `holds(shard)`: None while it does not serve."""
    followed = follow(in_force.config.server, wanted.server)
    shards = dict(wanted.shards)
    still_leaving: dict[str, Leaving] = {}
    refusals = []
    for name, present in in_force.config.shards.items():
        if name in wanted.shards or name in wanted.abandon:
            continue
        gone_since = leaving.get(name)
        before = gone_since.before if gone_since is not None else present
        holding = holds(name)
        refusal = _refusal(name, holding)
        if refusal:
            refusals.append(refusal)
            shards[name] = before
            continue
        since = gone_since or _leaving(before, in_force.version)
        if holding is None or holding.config_version < since.version:
            still_leaving[name] = since
            shards[name] = dataclasses.replace(before, dequeue_only=True)
    config = dataclasses.replace(wanted, server=followed.settings, shards=shards)
    return Transition(config, still_leaving, refusals, followed.needs_restart)


def _leaving(before: ShardSettings, version: int) -> Leaving:
    """It gets no jobs as of the next version, unless it gets none already."""
    return Leaving(before, version if before.dequeue_only else version + 1)


def vanished(etc: Path, before: Config, wanted: Config) -> list[str]:
    """Files that held something and are gone or empty: nobody means that by it."""
    return [
        f"{etc / name}: the file is gone or empty; what it said stays in force. Put it back, or "
        "write a comment into it if it is to say nothing"
        for name in CONFIG_FILES
        if name in before.files and name not in wanted.files
    ]


def _refusal(name: str, holding: Holding | None) -> str:
    """Why the shard can't be removed now; "" if nothing speaks against it."""
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
