"""The scripts as the server runs them: a file of them behind what all share, called by name.

Loaded once, with the first engine of a process. A server knows a text by its SHA-1.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import NamedTuple

RUN_JOBS = 1000  # that one run of a script's arguments may be of (common.lua)


class Script(NamedTuple):
    name: str
    text: bytes
    sha: str
    writes: bool


def _read(name: str) -> bytes:
    return resources.files(__package__).joinpath(f"{name}.lua").read_bytes()


_SHARED = [_read("common"), _read("runs"), _read("jobs")]


def _scripts(file: str, *names: str, writes: bool = True) -> list[Script]:
    text = b"\n".join((*_SHARED, _read(file)))
    sha = hashlib.sha1(text, usedforsecurity=False).hexdigest()
    return [Script(name, text, sha, writes) for name in names]


[APPLY] = _scripts("apply", "apply")
OPEN, CLOSE, HEARTBEAT, HOLD, RELEASE_LEASE, CREATE_QUEUE, DELETE_QUEUE, CONVERT, VACUUM = _scripts(
    *("owner", "open", "close", "heartbeat", "hold", "release_lease"),
    *("create_queue", "delete_queue", "convert", "vacuum"),
)
RESCORE, FORGET, RETRY_FAILED, DELETE_FIRST, DELETE_KEYS, RELEASE_EXPIRED = _scripts(
    *("slices", "rescore", "forget", "retry_failed", "delete_first", "delete_keys"),
    "release_expired",
)
PENDING, PAGE, PAYLOADS, LOOKUP, DEPTHS = _scripts(
    "reads", "pending", "page", "payloads", "lookup", "depths", writes=False
)
