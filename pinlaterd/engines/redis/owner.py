"""Who owns a shard's keys, in words that tell a process of this machine whether that one lives.

The name of an owner is the last part of its token:

    process PID on HOST (PLACE/STARTED/SECRET)

PLACE is the machine's boot and the name space that PID counts in, STARTED when the process started,
in ticks of that boot. A name that has them and is of this very place belongs to a process that can
be looked for; of any other nothing is known, and its lease has to be waited for.

To be wrong costs no job: a token that was replaced writes nothing (common.lua).
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from pathlib import Path

from pinlaterd.lifecycle import process_place

_PROC = Path("/proc")
_NAME = re.compile(r"process (\d+) on .* \(([^/ ]+)/(\d+)/[0-9a-f]+\)")
# Of what is behind the name of its program in /proc/PID/stat.
_STATE, _STARTED = 0, 19
_ENDED = ("Z", "X")


def own_name() -> str:
    """For one more owner in this process: no two are alike."""
    pid, host = os.getpid(), socket.gethostname().replace(":", "-")
    place, secret = process_place(), secrets.token_hex(8)
    stat = _stat(pid)
    if not place or stat is None:
        return f"process {pid} on {host} ({secret})"
    return f"process {pid} on {host} ({place}/{stat[_STARTED]}/{secret})"


def has_ended(name: str) -> bool:
    """Whether the process of this name runs no more, for sure."""
    match = _NAME.fullmatch(name)
    if match is None or match[2] != process_place():
        return False
    pid = int(match[1])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # another user's: perhaps that of a successor to its number
    stat = _stat(pid)
    return stat is not None and (stat[_STATE] in _ENDED or stat[_STARTED] != match[3])


def _stat(pid: int) -> list[str] | None:
    """What the system says of a process from its state on; None if it says nothing."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()
