"""Faults of SQLite and of the operating system: what becomes of them, and that service goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pinlaterd.engines.base import Batch, EnqueueOp, Searcher, StorageEngine
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.errors import StorageCorrupt, StorageError, StorageFull, StorageNotCommitted
from pinlaterd.model import Job, JobKey, JobState
from tests.clocks import FakeClock
from tests.conformance.engine.calls import SEARCHES, STORAGE_CALLS, Call
from tests.conformance.engine.harness import QUEUE, EngineHarness, keyed

# These answer from memory, or have tests of their own.
OTHER_CALLS = {
    *("open", "close", "heartbeat", "queues", "narrower", "depths", "address", "durability"),
    *("searcher", "suspects", "recount", "check"),
}
STORE_CALLS = {name: call for name, call in STORAGE_CALLS.items() if name not in OTHER_CALLS}


def _methods(protocol: type) -> set[str]:
    return {name for name, value in vars(protocol).items() if callable(value) and name[0] != "_"}


def test_every_call_is_looked_at():
    assert STORE_CALLS.keys() | OTHER_CALLS == _methods(StorageEngine)
    assert SEARCHES.keys() | {"close"} == _methods(Searcher)


def _break_the_schema(stranger: sqlite3.Connection) -> None:
    tables = stranger.execute("SELECT type, name FROM sqlite_master WHERE sql IS NOT NULL")
    for kind, name in tables.fetchall():
        if kind == "view" or (kind == "table" and name != "sqlite_sequence"):
            stranger.execute(f"DROP {kind} {name}")


@pytest.mark.parametrize("call", STORE_CALLS.values(), ids=STORE_CALLS)
def test_no_call_lets_a_foreign_exception_through(
    store: EngineHarness, stranger: sqlite3.Connection, call: Call
):
    # as if there were jobs of each state: some calls ask only where the depths say so
    store.failed(Job(b"failed", attempts_allowed=1))
    store.in_progress(b"running")
    store.enqueue(b"pending")
    store.enqueue_keyed(keyed("k"))
    _break_the_schema(stranger)

    with pytest.raises(StorageNotCommitted) as caught:
        call(store.engine)

    assert isinstance(caught.value.__cause__, sqlite3.Error)


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_no_search_lets_a_foreign_exception_through(
    store: EngineHarness, stranger: sqlite3.Connection, search: Callable[[Searcher], object]
):
    searcher = store.engine.searcher()()
    _break_the_schema(stranger)

    with pytest.raises(StorageError):
        search(searcher)

    searcher.close()


def test_a_searcher_without_a_file_is_a_storage_error(tmp_path: Path):
    with pytest.raises(StorageError, match=r"unable to open database file \(SQLITE_CANTOPEN\)$"):
        SqliteEngine(tmp_path / "absent.sqlite").searcher()()
    with pytest.raises(StorageError, match="check that the folder exists"):
        SqliteEngine(tmp_path / "nowhere" / "absent.sqlite").searcher()()


@pytest.mark.parametrize(
    "job",
    [
        Job(b"x", custom_status="\ud800"),
        Job(b"x", run_after_ms=2**63),
        Job(b"x", attempts_allowed=2**70),
    ],
)
def test_values_that_sqlite_cannot_hold_change_nothing(store: EngineHarness, job: Job):
    with pytest.raises(StorageNotCommitted):
        store.enqueue(b"good", job)

    assert store.depths() == {}
    assert store.states(store.enqueue(b"next")) == [JobState.PENDING]


def test_a_strangers_lock_changes_nothing(store: EngineHarness, stranger: sqlite3.Connection):
    stranger.execute("BEGIN IMMEDIATE")

    with pytest.raises(StorageNotCommitted, match="SQLITE_BUSY"):
        store.enqueue(b"x")

    stranger.execute("ROLLBACK")
    assert store.states(store.enqueue(b"x")) == [JobState.PENDING]
    assert store.depths() == {(1, JobState.PENDING): 1}


def test_an_error_of_the_caller_rolls_back(store: EngineHarness):
    batch = Batch(enqueues=[EnqueueOp(QUEUE, [Job(b"x")]), EnqueueOp("unknown", [Job(b"y")])])

    with pytest.raises(Exception, match="unknown"):
        store.engine.apply(batch, store.now_ms)

    assert store.depths() == {}
    assert store.ready() == []
    assert store.states(store.enqueue(b"x")) == [JobState.PENDING]


def test_damage_is_corruption(store: EngineHarness, path: Path):
    keys = store.enqueue(*[b"x" * 5_000] * 100)
    store.engine.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(os.urandom(size - 8192))
    store.engine = store.make()

    def open_and_read() -> None:
        store.engine.open(store.now_ms)
        store.engine.lookup(QUEUE, keys, include_body=True)

    with pytest.raises(StorageCorrupt, match="backup"):
        open_and_read()


# --- no room --------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB; half of it taken by a file that a test may remove. Then there is room
    for the log and for what is copied from it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    if mounted:
        options = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
        mounted = subprocess.run(options, capture_output=True, check=False).returncode == 0
    if not mounted:
        pytest.skip("a small file system can't be mounted; run this as root")
    (disk / "ballast").write_bytes(bytes(3 << 20))
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _fill(store: EngineHarness, body: bytes) -> tuple[list[JobKey], StorageError]:
    """Enqueue until the store refuses; returns what it had acknowledged, and why it refused."""
    kept: list[JobKey] = []
    while True:
        try:
            kept += store.enqueue(body, body)
        except StorageError as error:
            return kept, error


@pytest.mark.parametrize("body_bytes", [100, 50_000, 1 << 20])
def test_a_full_disk_costs_nothing_acknowledged_and_room_brings_service_back(
    small_disk: Path, clock: FakeClock, body_bytes: int
):
    store = EngineHarness(lambda: SqliteEngine(small_disk / "shard-1.sqlite"), clock)
    store.engine.create_queue(QUEUE, store.now_ms)

    kept, error = _fill(store, b"x" * body_bytes)

    assert isinstance(error, StorageFull)
    assert "SQLITE_FULL" in error.message
    assert "make room" in error.message
    assert set(store.states(kept)) <= {JobState.PENDING}
    assert store.depths().get((1, JobState.PENDING), 0) == len(kept)
    (small_disk / "ballast").unlink()
    more = store.enqueue(b"y" * 100)
    assert set(store.states(kept + more)) == {JobState.PENDING}
    store.reopen()
    assert set(store.states(kept + more)) == {JobState.PENDING}
    assert store.depths() == {(1, JobState.PENDING): len(kept) + 1}
    store.engine.close()


def test_an_owner_starts_once_a_full_disk_has_room(small_disk: Path):
    with contextlib.suppress(OSError):
        (small_disk / "filler").write_bytes(bytes(8 << 20))
    assert shutil.disk_usage(small_disk).free == 0
    engine = SqliteEngine(small_disk / "shard-1.sqlite")

    with pytest.raises(StorageError, match="SQLITE_"):
        engine.open(1)

    (small_disk / "ballast").unlink()
    engine.open(1)
    engine.create_queue(QUEUE, 1)
    engine.close()


@contextlib.contextmanager
def _files_limited_to(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_after_a_failed_write_the_engine_goes_on_or_asks_to_be_opened_anew(
    store: EngineHarness, path: Path
):
    before = store.enqueue(*[b"x" * 1_000] * 100)
    log_bytes = path.with_name(path.name + "-wal").stat().st_size

    with _files_limited_to(log_bytes + 50_000):
        kept, error = _fill(store, b"y" * 10_000)

    assert "SQLITE_IOERR" in error.message
    assert bool(store.engine.failure) != isinstance(error, StorageNotCommitted)
    if not isinstance(error, StorageNotCommitted):
        with pytest.raises(StorageError, match="must be reopened"):
            store.enqueue(b"z")
        store.reopen()
    assert set(store.states(before + kept)) == {JobState.PENDING}
    assert store.depths()[1, JobState.PENDING] in (
        len(before) + len(kept),
        len(before) + len(kept) + 2,  # that commit was in doubt
    )
    assert store.states(store.enqueue(b"z")) == [JobState.PENDING]
