"""The trash data/trash: jobs that the dashboard deleted, with their bodies, for a day.

Each delete has a file named after its number, a job a line, which is fsynced before any of its jobs
is deleted. Behind each batch a line lists those of it that were not deleted, as they had changed
meanwhile; it is missing where the process ended before. All files together hold `MOST_BYTES` at
most.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from pinlaterd.clock import Clock
from pinlaterd.config.layout import sync_folder
from pinlaterd.model import Job, JobDescriptor, JobOptions, JobRecord

MOST_BYTES = 256 << 20
_KEPT_SECONDS = 24 * 3600
_BATCH_BYTES = 16 << 20  # of lines: jobs that go into one call


class TrashFull(Exception):
    """The jobs of a delete don't fit: none of the batch was written."""


class KeptJob(NamedTuple):
    """A deleted job: the descriptor that it had, and as what it is enqueued again."""

    descriptor: str
    job: Job


class _Head(msgspec.Struct):
    """The fields that are read of all lines: of a job, or of the jobs that were not deleted."""

    descriptor: str = ""
    left: Sequence[str] | None = None


class Trash:
    """The deleted jobs of one deployment. Its methods block for the disk: call them beside the
    loop."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock

    def add(self, number: int, jobs: Iterable[JobRecord]) -> None:
        """Keep jobs that are about to be deleted, durably. Raises TrashFull, OSError."""
        data = b"".join(map(_line, jobs))
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.clean()
        if self._size() + len(data) > MOST_BYTES:
            raise TrashFull
        self._append(number, data)

    def add_left(self, number: int, descriptors: Sequence[str]) -> None:
        """Keep which jobs of the last batch were not deleted, durably. Raises OSError."""
        self._append(number, msgspec.json.encode({"left": descriptors}) + b"\n")

    def unsettled(self, number: int) -> tuple[int, Sequence[str]]:
        """Return how many jobs were deleted before the last batch, and those of that, if it isn't
        known which of them were deleted. Raises OSError."""
        before = 0
        batch: Mapping[str, int] = {}
        for following in self._deleted(number):
            before += len(batch)
            batch = following
        return before, list(batch)

    def _append(self, number: int, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(os.open(self._file(number), flags, 0o600), "ab") as file:
            file.write(b"\n" + data)  # a line that a crash cut short ends before ours
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)

    def holds(self, number: int) -> bool:
        """Return whether the jobs of a delete are kept still."""
        return self._is_young(self._file(number))

    def batches(self, number: int, begin: int, jobs: int) -> Iterator[list[KeptJob]]:
        """Yield the jobs that were deleted from place `begin` on, so many at a time or fewer, each
        with a key. Raises OSError."""
        batch: list[KeptJob] = []
        size = 0
        places = array("Q")  # of up to some millions of lines
        for deleted in self._deleted(number):
            places.extend(deleted.values())
        with self._file(number).open("rb") as file:
            for place in islice(places, begin, None):
                file.seek(place)
                line = file.readline()
                batch.append(_job(line, f"trash-{number}-"))
                size += len(line)
                if len(batch) == jobs or size >= _BATCH_BYTES:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def _deleted(self, number: int) -> Iterator[Mapping[str, int]]:
        """Yield where the lines of each batch's deleted jobs begin, by descriptor. The last one are
        the jobs behind the last line that lists what was not deleted."""
        batch: dict[str, int] = {}
        place = 0
        with self._file(number).open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):  # a crash may have cut the last one
                    head = msgspec.json.decode(line, type=_Head)
                    if head.left is not None:
                        for descriptor in head.left:
                            batch.pop(descriptor, None)
                        yield batch
                        batch = {}
                    else:  # a batch that was sent again is there twice
                        batch.setdefault(head.descriptor, place)
                place += len(line)
        yield batch

    def clean(self) -> None:
        """Remove what is older than a day."""
        for file in self._files():
            if not self._is_young(file):
                file.unlink(missing_ok=True)

    def _is_young(self, file: Path) -> bool:
        oldest = self._clock.now_ms() / 1000 - _KEPT_SECONDS
        try:
            return file.stat().st_mtime >= oldest
        except FileNotFoundError:
            return False

    def _size(self) -> int:
        return sum(file.stat().st_size for file in self._files())

    def _files(self) -> Iterator[Path]:
        return self._folder.glob("*.jsonl")

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.jsonl"


def _line(record: JobRecord) -> bytes:
    options = record.options or JobOptions()
    facts = {
        "descriptor": record.descriptor,
        "body": base64.b64encode(record.body or b"").decode(),
        "run_after_ms": record.run_after_ms,
        "attempts": record.attempts_allowed,
        "status": record.custom_status,
        "options": list(options),
    }
    return json.dumps(facts).encode() + b"\n"


def _job(line: bytes, key: str) -> KeptJob:
    """Read a line, and give the job a key if it has none. Raises ValueError,
    KeyError."""
    facts = json.loads(line)
    descriptor: str = facts["descriptor"]
    named, options = JobDescriptor.parse(descriptor), JobOptions(*facts["options"])
    if named is None:
        raise ValueError(descriptor)
    if options.key is None:
        options = options._replace(key=f"{key}{named.shard}-{named.priority}-{named.local_id}")
    body = base64.b64decode(facts["body"], validate=True)
    fields = (facts["run_after_ms"], facts["attempts"], facts["status"])
    return KeptJob(descriptor, Job(body, named.priority, *fields, options))
