"""An SQLite engine on a file of the test's own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.clocks import FakeClock
from tests.conformance.engine.engines import sqlite_engine
from tests.conformance.engine.harness import QUEUE, EngineHarness


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of the shard that `store` opens."""
    return tmp_path / "shard-1.sqlite"


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[EngineHarness]:
    harness = EngineHarness(partial(sqlite_engine, tmp_path), clock)
    harness.engine.create_queue(QUEUE, clock.now_ms())
    yield harness
    harness.engine.close()


@pytest.fixture
def stranger(store: EngineHarness, path: Path) -> Iterator[sqlite3.Connection]:
    """Somebody with the sqlite3 shell, who knows nothing of owners."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection
