"""Moves of jobs between shards that were cut short: what they hold stays held until they go on."""

from __future__ import annotations

from collections.abc import Iterable

from pinlaterd.config.files import is_locked
from pinlaterd.config.layout import move_lock


def unfinished_moves(shards: Iterable[str]) -> list[str]:
    """A warning for each. The command that moves locks a file as long as it runs, writes into it
    once it has it, and removes it at the end: what is written and not locked was left behind."""
    warnings = []
    for shard in shards:
        path = move_lock(shard)
        try:
            # In this order: a file that a command has just made is empty before it is locked.
            was_begun = path.stat().st_size > 0
            is_cut_short = was_begun and not is_locked(path)
        except OSError:
            continue
        if is_cut_short:
            warnings.append(
                f"shard-{shard}: a move of its jobs was cut short and holds some of them; finish "
                f"it: pinlater-admin shard drain {shard} --move"
            )
    return warnings
