"""The engines that the suite is run against: one line each.

A maker is called with an empty folder of the test's own, again and again for the same store: each
call is another process's view of one shard. It can be pickled, so that such a process can be real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from pinlaterd.engines.base import StorageEngine
from pinlaterd.engines.sqlite.engine import SqliteEngine

EngineMaker = Callable[[], StorageEngine]


def sqlite_engine(folder: Path) -> StorageEngine:
    return SqliteEngine(folder / "shard-1.sqlite")


ENGINES: Mapping[str, Callable[[Path], StorageEngine]] = {
    "sqlite": sqlite_engine,
}


def maker(engine: str, folder: Path) -> EngineMaker:
    return partial(ENGINES[engine], folder)
