"""How far a failover has come, on disk: a command that is broken off is gone on with by the next.

One file a failover, `run/failover-SHARD.json`, from before the first change to a server until after
the last. It holds no secrets. Where Sentinels choose the servers there is none: a crash leaves
nothing that they, or time, do not bring to an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from pinlaterd.config.files import replace_file
from pinlaterd.engines.failover import Notes, Pair
from pinlaterd.errors import ConfigError

_PATTERN = "failover-*.json"


class _Record(msgspec.Struct):
    shards: Sequence[str]
    pair: Pair | None
    accept_loss: bool
    done: list[str] = []  # the names of steps
    notes: dict[str, str] = {}


class Journal(Notes):
    """Of one failover. What `put` and `note_done` were given is on disk when they return."""

    def __init__(self, path: Path, record: _Record, *, resumed: bool) -> None:
        self._path = path
        self._record = record
        self.shards = record.shards
        self.pair = record.pair
        self.resumed = resumed  # whether another command began it

    @classmethod
    def new(
        cls, run: Path, shards: Sequence[str], pair: Pair | None, *, accept_loss: bool
    ) -> Journal:
        """Nothing is written before the first note, or `begin`. No `pair`: Sentinels choose."""
        record = _Record(shards, pair, accept_loss)
        return cls(run / _PATTERN.replace("*", shards[0]), record, resumed=False)

    @classmethod
    def find(cls, run: Path, shard: str) -> Journal | None:
        """That of a failover of `shard` that was begun and not ended. Raises ConfigError."""
        for path in sorted(run.glob(_PATTERN)):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=_Record)
                if record.pair is None:
                    raise ValueError("it names no servers")
            except (OSError, ValueError) as error:
                problem = (
                    f"{path}: can't be read ({error}); a failover was begun: see what both servers"
                    " are, put them in order by hand, and delete this file"
                )
                raise ConfigError([problem]) from error
            if shard in record.shards:
                return cls(path, record, resumed=True)
        return None

    @property
    def accepts_loss(self) -> bool:
        return self._record.accept_loss

    def accept_loss(self) -> None:
        """From now on."""
        self._record.accept_loss = True

    def begin(self) -> None:
        if self.pair is not None:
            replace_file(self._path, msgspec.json.encode(self._record), durably=True)

    def get(self, key: str) -> str:
        return self._record.notes.get(key, "")

    def put(self, key: str, text: str) -> None:
        self._record.notes[key] = text
        self.begin()

    def is_done(self, step: str) -> bool:
        return step in self._record.done

    def note_done(self, step: str) -> None:
        if step not in self._record.done:
            self._record.done.append(step)
            self.begin()

    def end(self) -> None:
        """Nothing is left to go on with."""
        self._path.unlink(missing_ok=True)
