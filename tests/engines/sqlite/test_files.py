"""Which files are opened, which are refused, and that those are left as they are."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from pinlaterd.engines.base import Search
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.errors import ShardOwned, StorageCorrupt, StorageError
from pinlaterd.model import JobState
from tests.conformance.engine.harness import QUEUE, EngineHarness


def _of_another_application(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE recipes (name TEXT)")


def _with_another_id(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA application_id = 1234")


def _of_version(version: int, path: Path) -> None:
    engine = SqliteEngine(path)
    engine.open(1)
    engine.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {version}")


def _text(path: Path) -> None:
    path.write_text("shards:\n  1: {engine: sqlite}\n" * 100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_of_another_application, "another application"),
        (_with_another_id, "another application"),
        (partial(_of_version, 99), "version 99, expected 3; it was written by a later release"),
        (partial(_of_version, 2), "version 2, expected 3; .* let that build finish its jobs"),
        (_text, "not a database"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_and_left_as_it_is(
    path: Path, make: Callable[[Path], None], message: str
):
    make(path)
    before = path.read_bytes()
    engine = SqliteEngine(path)

    with pytest.raises(StorageCorrupt, match=message):
        engine.open(1)

    assert path.read_bytes() == before


def test_a_folder_in_place_of_the_file_is_named(path: Path):
    path.mkdir()

    with pytest.raises(StorageError, match="it is no file"):
        SqliteEngine(path).open(1)


def test_an_engine_that_could_not_open_holds_no_lock(path: Path):
    _text(path)
    with pytest.raises(StorageCorrupt):
        SqliteEngine(path).open(1)

    path.unlink()
    engine = SqliteEngine(path)
    engine.open(1)
    engine.close()


def test_an_empty_file_becomes_ours(path: Path):
    path.touch()
    engine = SqliteEngine(path)

    engine.open(1)
    engine.close()

    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (3,)
        assert db.execute("PRAGMA application_id").fetchone() == (0x504C4A31,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_no_id_is_given_twice_where_the_same_process_finds_a_new_file(
    store: EngineHarness, path: Path
):
    before = store.enqueue(b"a", b"b")
    store.engine.close()
    path.unlink()

    store.engine.open(store.now_ms)
    store.engine.create_queue(QUEUE, store.now_ms)

    [after] = store.enqueue(b"c")
    assert after > max(before)


def test_a_missing_folder_is_a_storage_error(tmp_path: Path):
    with pytest.raises(StorageError, match="nowhere"):
        SqliteEngine(tmp_path / "nowhere" / "shard.sqlite").open(1)


def test_a_folder_in_the_place_of_the_file_is_a_storage_error(path: Path):
    path.mkdir()

    with pytest.raises(StorageError, match="shard-1"):
        SqliteEngine(path).open(1)


def test_the_owner_is_named(store: EngineHarness, path: Path):
    with pytest.raises(ShardOwned, match=f"process {os.getpid()}"):
        SqliteEngine(path).open(1)


def test_two_links_to_a_file_that_is_not_there_yet_are_one_file(path: Path, tmp_path: Path):
    links = [tmp_path / "a.sqlite", tmp_path / "b.sqlite"]
    for link in links:
        link.symlink_to(path)
    engine = SqliteEngine(links[0])
    engine.open(1)

    with pytest.raises(ShardOwned):
        SqliteEngine(links[1]).open(1)

    engine.close()


def test_a_lock_file_without_a_pid_locks_all_the_same(store: EngineHarness, path: Path):
    path.with_name(path.name + ".lock").write_bytes(b"\xff?")

    with pytest.raises(ShardOwned, match="another process"):
        SqliteEngine(path).open(1)


def test_an_engine_that_is_not_open_says_so(path: Path):
    with pytest.raises(StorageError, match="not open"):
        SqliteEngine(path).create_queue("mail", 1)


def test_an_engine_is_opened_once(store: EngineHarness):
    with pytest.raises(StorageError, match="open already"):
        store.engine.open(store.now_ms)


def test_commits_are_durable(store: EngineHarness):
    assert isinstance(store.engine, SqliteEngine)
    assert store.engine.db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store.engine.durability() == ("synchronous=FULL", "")


def test_the_file_is_sound_after_work(store: EngineHarness, stranger: sqlite3.Connection):
    store.enqueue(*[b"x" * 3_000] * 200)
    store.succeed(*[claimed.key for claimed in store.claim(limit=100)])
    store.fail(*[claimed.key for claimed in store.claim(limit=50)])
    store.engine.delete_queue("mail")
    store.engine.vacuum(limit=77)

    assert stranger.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_the_log_stays_short_though_nobody_calls_vacuum(store: EngineHarness, path: Path):
    searcher = store.engine.searcher()()
    for _ in range(60):
        store.enqueue(*[b"x" * 10_000] * 50)
        searcher.find(Search("mail", JobState.PENDING, limit=10, body_regex="x"))

    log = path.with_name(path.name + "-wal")
    assert path.stat().st_size > 20 << 20
    assert log.stat().st_size < 8 << 20
    searcher.close()
