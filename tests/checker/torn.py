"""What a kill within a write leaves at the end of a log, behind all that was committed."""

from __future__ import annotations

import os
import random
from pathlib import Path

_WAL_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
# A transaction without its end, as Redis writes the effects of a script.
_TRANSACTION = b"*1\r\n$5\r\nMULTI\r\n*3\r\n$3\r\nSET\r\n$4\r\ntorn\r\n$4\r\nhalf\r\n"


def tear_wal(log: Path, rng: random.Random) -> None:
    """Cut SQLite's write-ahead log off behind the last commit, and begin another one there: a frame
    that is marked as a commit, whose checksum is wrong or of which the end is missing."""
    data = log.read_bytes()
    frame_bytes = _FRAME_HEADER_BYTES + _page_bytes(data)
    end = end_of_commits(data)
    if end < _WAL_HEADER_BYTES + frame_bytes:
        return
    last = data[end - frame_bytes : end]
    with log.open("r+b") as file:
        file.truncate(end)
        file.seek(end)
        file.write(last[: rng.randrange(1, frame_bytes + 1)])


def end_of_commits(data: bytes) -> int:
    """Where the last commit of a write-ahead log ends. What follows may be of an earlier round of
    the log, which other salts tell, or of a transaction without an end."""
    salts = data[16:24]
    frame_bytes = _FRAME_HEADER_BYTES + _page_bytes(data)
    end = at = min(_WAL_HEADER_BYTES, len(data))
    while at + frame_bytes <= len(data) and data[at + 8 : at + 16] == salts:
        is_commit = any(data[at + 4 : at + 8])
        at += frame_bytes
        if is_commit:
            end = at
    return end


def _page_bytes(data: bytes) -> int:
    stored = int.from_bytes(data[8:12], "big")
    return 1 << 16 if stored == 1 else stored


def tear_aof(folder: Path, rng: random.Random) -> None:
    """End the newest append-only file of a Redis server, which must not run, within a command."""
    files = folder.glob("appendonlydir/*.incr.aof")
    newest = max(files, key=lambda path: int(path.name.split(".")[-3]))
    with newest.open("ab") as file:
        file.write(_TRANSACTION[: rng.randrange(1, len(_TRANSACTION))])
        os.fsync(file.fileno())
