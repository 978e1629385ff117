"""The scripts as the server runs them: each file behind what it shares with others, and one
in parts.

Loaded once, with the first engine of a process. A server knows a script by the SHA-1 of its text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple


class Script(NamedTuple):
    name: str
    text: bytes
    sha: str
    writes: bool


def _read(name: str) -> bytes:
    return resources.files(__package__).joinpath(f"{name}.lua").read_bytes()


_COMMON, _JOBS_WRITE = _read("common"), _read("jobs_write")


def _script(name: str, *, writes: bool, shared: bytes = b"", parts: Sequence[str] = ()) -> Script:
    text = b"\n".join((_COMMON, shared, _read(name), *map(_read, parts)))
    return Script(name, text, hashlib.sha1(text, usedforsecurity=False).hexdigest(), writes)


def _writer(name: str, *parts: str) -> Script:
    return _script(name, writes=True, shared=_JOBS_WRITE, parts=parts)


def _reader(name: str) -> Script:
    return _script(name, writes=False)


OPEN = _writer("open")
CLOSE = _writer("close")
HOLD = _writer("hold")
RELEASE_LEASE = _writer("release_lease")
HEARTBEAT = _writer("heartbeat")
CREATE_QUEUE = _writer("create_queue")
DELETE_QUEUE = _writer("delete_queue")
APPLY = _writer("apply", "apply_acks", "apply_checkpoints", "apply_enqueues", "apply_claims")
RESCORE = _writer("rescore")
FORGET = _writer("forget")
RETRY_FAILED = _writer("retry_failed")
DELETE_FIRST = _writer("delete_first")
DELETE_KEYS = _writer("delete_keys")
RELEASE_EXPIRED = _writer("release_expired")
VACUUM = _writer("vacuum")

DEPTHS = _reader("depths")
PENDING = _reader("pending")
PAYLOADS = _reader("payloads")
LOOKUP = _reader("lookup")
PAGE = _reader("page")
MISSING = _reader("missing")
