"""Which shard keeps a key: the placement, a numbered list of shards on which all processes agree.

A key belongs to a slot. Of a slot the best enqueueable shard by rendezvous hash is responsible
(Thaler and Ravishankar, 1998): so a shard that comes or goes moves no slot but its own. Shards that
were responsible before may hold keys still, as jobs never move. Pure, but for what it remembers.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from pinlaterd.model import QueueKey

_SLOTS = 4096  # for each of which a process remembers a Home


class KeyPlacement(msgspec.Struct, frozen=True, omit_defaults=True):
    """All `shards` that there are, each with the number of the placement with which it came.
    `enqueueable`: those of them that take new jobs. `earlier`: the sets of those that did under
    placements before."""

    number: int = 0  # grows with each change; 0: not known
    shards: Mapping[str, int] = {}
    enqueueable: tuple[str, ...] = ()
    earlier: tuple[tuple[str, ...], ...] = ()


class Home(NamedTuple):
    """The shards of a slot: `former` are those, other than the one that is `responsible`, that may
    hold keys from before."""

    responsible: str
    former: tuple[str, ...]


class KeyHomes:
    """The homes of all keys under one placement."""

    def __init__(self, placement: KeyPlacement) -> None:
        self.placement = placement
        self._homes: dict[int, Home] = {}  # by slot

    def of(self, key: QueueKey) -> Home | None:
        """Return where a key is; None if no shard takes new jobs."""
        slot = zlib.crc32("\0".join(key).encode()) % _SLOTS
        home = self._homes.get(slot)
        if home is None and self.placement.enqueueable:
            home = self._homes[slot] = self._home(slot)
        return home

    def _home(self, slot: int) -> Home:
        present = self.placement.shards
        responsible = _best(slot, self.placement.enqueueable)
        before = {_best(slot, shards): None for shards in self.placement.earlier if shards}
        return Home(responsible, tuple(s for s in before if s in present and s != responsible))


def _best(slot: int, shards: Collection[str]) -> str:
    return max(shards, key=lambda shard: hashlib.blake2b(f"{slot}/{shard}".encode()).digest())
