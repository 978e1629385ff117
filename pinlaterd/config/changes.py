"""From one configuration to the next: what of pinlaterd.yaml can change under way.

Pure. Whether a setting can is said where it is defined (`Setting.live` in the schema).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pinlaterd.config.layout import ETC, SERVER_FILE
from pinlaterd.config.load import settings_of
from pinlaterd.config.schema import ServerSettings


class Followed(NamedTuple):
    """`settings`: what can be in force now; `needs_restart`: what can't be, and its cure."""

    settings: ServerSettings
    needs_restart: Sequence[str]


def follow(in_force: ServerSettings, wanted: ServerSettings) -> Followed:
    """`in_force` with those settings of `wanted` that act without a restart."""
    live, needs_restart = {}, []
    for name, setting in settings_of(ServerSettings).items():
        before, after = getattr(in_force, name), getattr(wanted, name)
        if setting.live:
            live[name] = after
        elif before != after:
            needs_restart.append(
                f"{ETC / SERVER_FILE}: {name}: {before} is in force, the file says {after}; "
                "needs a restart: `pinlaterd up`"
            )
    return Followed(dataclasses.replace(in_force, **live), needs_restart)


def settings_at_start(server: ServerSettings) -> Mapping[str, object]:
    """Those that a process takes from its start to its end."""
    return {
        name: getattr(server, name)
        for name, setting in settings_of(ServerSettings).items()
        if not setting.live
    }
