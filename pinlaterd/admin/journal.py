"""How far a failover has come, on disk: a command that is broken off is gone on with by the next.

One file a failover, `run/failover-SHARD.json`, from before the first change to a server until after
the last. It holds no secrets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pinlaterd.config.schema import Address
from pinlaterd.engines.failover import Notes
from pinlaterd.errors import ConfigError

_PATTERN = "failover-*.json"


@dataclass
class _Record:
    shards: list[str]
    master: tuple[str, int]
    replica: tuple[str, int]
    accept_loss: bool
    done: list[str] = field(default_factory=list)  # the names of steps
    notes: dict[str, str] = field(default_factory=dict)


class Journal(Notes):
    """Of one failover. What `put` and `note_done` were given is on disk when they return."""

    def __init__(self, path: Path, record: _Record, *, resumed: bool) -> None:
        self._path = path
        self._record = record
        self.resumed = resumed  # whether another command began it

    @classmethod
    def new(
        cls,
        run: Path,
        shards: Sequence[str],
        master: Address,
        replica: Address,
        *,
        accept_loss: bool,
    ) -> Journal:
        """Nothing is written before the first note, or `begin`."""
        record = _Record(
            list(shards), (master.host, master.port), (replica.host, replica.port), accept_loss
        )
        return cls(run / _PATTERN.replace("*", shards[0]), record, resumed=False)

    @classmethod
    def find(cls, run: Path, shard: str) -> Journal | None:
        """That of a failover of `shard` that was begun and not ended. Raises ConfigError."""
        for path in sorted(run.glob(_PATTERN)):
            try:
                facts = json.loads(path.read_bytes())
                record = _Record(**facts)
                record.master = (str(record.master[0]), int(record.master[1]))
                record.replica = (str(record.replica[0]), int(record.replica[1]))
            except (OSError, ValueError, TypeError, IndexError) as error:
                raise ConfigError(
                    [
                        f"{path}: can't be read ({error}); a failover was begun: see what both"
                        " servers are, put them in order by hand, and delete this file"
                    ]
                ) from error
            if shard in record.shards:
                return cls(path, record, resumed=True)
        return None

    @property
    def shards(self) -> Sequence[str]:
        return self._record.shards

    @property
    def master(self) -> Address:
        return Address(*self._record.master)

    @property
    def replica(self) -> Address:
        return Address(*self._record.replica)

    @property
    def accept_loss(self) -> bool:
        return self._record.accept_loss

    def accepts_loss(self) -> None:
        """From now on."""
        self._record.accept_loss = True

    def begin(self) -> None:
        self._write()

    def get(self, key: str) -> str:
        return self._record.notes.get(key, "")

    def put(self, key: str, text: str) -> None:
        self._record.notes[key] = text
        self._write()

    def is_done(self, step: str) -> bool:
        return step in self._record.done

    def note_done(self, step: str) -> None:
        if step not in self._record.done:
            self._record.done.append(step)
            self._write()

    def end(self) -> None:
        """Nothing is left to go on with."""
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(asdict(self._record), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
