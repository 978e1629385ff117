"""The placement of keys on shards: a numbered list of shards on which all processes agree.

A key belongs to a slot. Of a slot the best enqueueable shard by rendezvous hash is responsible
(Thaler and Ravishankar, 1998): so a shard that comes or goes moves no slot but its own. Shards that
were responsible before may hold keys still, as jobs never move.

An enqueue under placement v first asks the former shards of its keys. A shard that is asked stores
v, its fence, before it answers: whatever it is restarted with, it never again takes a key under an
earlier placement. Then the responsible shard stores the job, which it does only while it follows
exactly v, and v is not below its fence. A shard begins with the placement with which it came, or
came back, as its fence. What is refused as stale begins again. So no two shards hold a key, and no
two answers say that they stored it, whatever a process follows, and however late calls are.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from pinlaterd.config import layout
from pinlaterd.model import QueueKey

_SLOTS = 4096  # for each of which a process remembers a Home


class FormerTakers(NamedTuple):
    """The shards that took new jobs under placements of the past, the last of which ended then."""

    shards: tuple[str, ...]
    until_ms: int


class KeyPlacement(msgspec.Struct, frozen=True, omit_defaults=True):
    """The `shards` that there are, each with the number of the placement with which it came.
    `enqueueable`: those of them that take new jobs. `earlier`: the sets of those that did under
    placements before, and whose jobs may be kept still."""

    number: int = 0  # grows with each change; 0: not known
    shards: Mapping[str, int] = {}
    enqueueable: tuple[str, ...] = ()
    earlier: tuple[FormerTakers, ...] = ()

    def followed_by(
        self, shards: Mapping[str, bool], now_ms: int, kept_ms: float = math.inf
    ) -> KeyPlacement:
        """Return the placement once there are `shards`, each with whether it takes new jobs; this
        one if nothing changes. `kept_ms`: the longest time for which the job of a key is kept.

        A set is remembered for that time, and as long as a shard of it is there. The number is a
        time, so that it grows even if the last one was lost."""
        enqueueable = tuple(sorted(name for name, takes_jobs in shards.items() if takes_jobs))
        former = {one.shards: one for one in self.earlier if one.until_ms + kept_ms > now_ms}
        is_same = (shards.keys(), enqueueable) == (self.shards.keys(), self.enqueueable)
        if is_same and len(former) == len(self.earlier):
            return self
        number = max(now_ms, self.number + 1)
        since = number if self.number else 0  # at first there is no earlier one to refuse
        came = {name: self.shards.get(name, since) for name in shards}
        former[self.enqueueable] = FormerTakers(self.enqueueable, now_ms)
        former.pop(enqueueable, None)
        earlier = [one for one in former.values() if not came.keys().isdisjoint(one.shards)]
        return KeyPlacement(number, came, enqueueable, tuple(earlier))


def read_key_placement() -> KeyPlacement | None:
    """Read the placement that was written last; None if there is no file. Raises OSError,
    ValueError."""
    try:
        return msgspec.json.decode(layout.KEY_PLACEMENT_FILE.read_bytes(), type=KeyPlacement)
    except FileNotFoundError:
        return None


def unknown_placement(shards: Collection[str], now_ms: int) -> KeyPlacement:
    """Return what stands for a placement that was lost: each of the shards was alone once, so that
    all of them are asked for every key."""
    alone = tuple(FormerTakers((name,), now_ms) for name in sorted(shards))
    return KeyPlacement(now_ms, earlier=alone)


def write_key_placement(placement: KeyPlacement) -> None:
    layout.replace_file(layout.KEY_PLACEMENT_FILE, msgspec.json.encode(placement), durably=True)
    layout.sync_folder(layout.KEY_PLACEMENT_FILE.parent)


class Home(NamedTuple):
    """The shards of a slot: `former` are those, other than the one that is `responsible`, that may
    hold keys from before."""

    responsible: str  # "": no shard takes new jobs
    former: tuple[str, ...]


class KeyHomes:
    """The homes of all keys under one placement."""

    def __init__(self, placement: KeyPlacement) -> None:
        self.placement = placement
        self._homes: dict[int, Home] = {}  # by slot
        is_sole = len(placement.enqueueable) == 1 and not placement.earlier
        self.sole = placement.enqueueable[0] if is_sole else ""  # where all keys are

    def of(self, key: QueueKey) -> Home:
        """Return where a key is."""
        queue, name = key
        slot = zlib.crc32(f"{queue}\0{name}".encode()) % _SLOTS
        home = self._homes.get(slot)
        if home is None:
            home = self._homes[slot] = self._home(slot)
        return home

    def _home(self, slot: int) -> Home:
        present = self.placement.shards
        responsible = _best(slot, self.placement.enqueueable)
        before = dict.fromkeys([_best(slot, one.shards) for one in self.placement.earlier])
        return Home(responsible, tuple(s for s in before if s in present and s != responsible))


def _best(slot: int, shards: Collection[str]) -> str:
    def score(shard: str) -> bytes:
        return hashlib.blake2b(f"{slot}/{shard}".encode()).digest()

    return max(shards, key=score, default="")
