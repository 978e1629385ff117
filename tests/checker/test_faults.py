"""The faults do what the checker takes for granted: shims take effect, torn logs keep commits."""

from __future__ import annotations

import errno
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checker.shim import control_shim, load_shim
from tests.checker.torn import end_of_commits, tear_aof, tear_wal
from tests.conftest import FreePort, ProgramPath
from tests.servers.redis import RedisServer

_PROGRAM = """
import json, os, sys, tempfile, time
def error_of(flush):
    with tempfile.TemporaryFile(dir=sys.argv[1]) as file:
        try:
            flush(file.fileno())
        except OSError as error:
            return error.errno
print(json.dumps([error_of(os.fsync), error_of(os.fdatasync), time.time(), time.monotonic()]))
"""


@pytest.mark.parametrize(("flush_error", "clock_seconds"), [(0, 0), (errno.EIO, 3600)])
def test_shims_take_effect(
    flush_error: int, clock_seconds: int, needs: Callable[[str], None], tmp_path: Path
):
    needs("sqlite")
    environment = {**os.environ, **load_shim(tmp_path)}
    control_shim(tmp_path, flush_error=flush_error, clock_seconds=clock_seconds)
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    before, before_wall = time.monotonic(), time.time()

    done = subprocess.run(command, env=environment, capture_output=True, check=True)

    fsync, fdatasync, wall, monotonic = json.loads(done.stdout)
    assert (fsync or 0, fdatasync or 0) == (flush_error, flush_error)
    assert before_wall + clock_seconds <= wall <= time.time() + clock_seconds
    assert before <= monotonic <= time.monotonic()


@pytest.mark.parametrize("seed", range(10))
def test_a_torn_write_ahead_log_keeps_what_was_committed(seed: int, tmp_path: Path):
    path, copy = tmp_path / "db", tmp_path / "copy"
    log = tmp_path / "copy-wal"
    with sqlite3.connect(path, isolation_level=None) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE jobs (number)")
        for number in range(8):
            db.execute("INSERT INTO jobs VALUES (?)", (number,))
            if number == 4:
                db.execute("PRAGMA wal_checkpoint(RESTART)")  # what follows overwrites the log
        copy.write_bytes(path.read_bytes())
        log.write_bytes(path.with_name("db-wal").read_bytes())
    db.close()
    committed = end_of_commits(log.read_bytes())

    tear_wal(log, random.Random(seed))

    assert log.stat().st_size > committed
    with sqlite3.connect(copy) as torn:
        assert [number for (number,) in torn.execute("SELECT number FROM jobs")] == [*range(8)]
    torn.close()


def test_a_torn_append_only_file_keeps_what_was_acknowledged(
    program_path: ProgramPath, free_port: FreePort, tmp_path: Path
):
    program = program_path("redis-server", debian_package="redis-server")
    server = RedisServer(program, tmp_path, free_port())
    server.start()
    try:
        for seed in range(8):
            with server.client() as client:
                # As scripts of ours do it, which write and renew their lease.
                client.pipeline().incr("count").rpush("jobs", seed).execute()
            server.kill()
            tear_aof(tmp_path, random.Random(seed))
            server.start()
            with server.client() as client:
                assert client.lrange("jobs", 0, -1) == [b"%d" % n for n in range(seed + 1)]
    finally:
        server.stop()
