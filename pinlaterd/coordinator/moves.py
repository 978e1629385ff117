"""Moves of jobs between shards that were cut short: what they hold stays held until they go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pinlaterd.config.layout import move_lock


def unfinished_moves(shards: Iterable[str], is_alive: Callable[[int], bool]) -> list[str]:
    """A warning for each. The command that moves has written its pid into a file that it removes
    at the end."""
    warnings = []
    for shard in shards:
        try:
            pid = int(move_lock(shard).read_text(encoding="ascii") or 0)
        except (OSError, ValueError):
            continue
        if not pid or not is_alive(pid):
            warnings.append(
                f"shard-{shard}: a move of its jobs was cut short and holds some of them; finish "
                f"it: pinlater-admin shard drain {shard} --move"
            )
    return warnings
