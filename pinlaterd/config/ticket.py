"""Tickets: files by which a process of a deployment shows its router that a queue may be deleted.

Only the deployment's own processes can write to run/. One that has checked its user makes a file
there, and its name takes the place of the admin password. The router removes it as it accepts it,
and refuses one that is older than a request may be, whose process was killed. One that was not
presented is removed when another is made.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pinlaterd.config.layout import RUN, replace_file

_TICKET = re.compile(r"ticket-[0-9a-f]{32}")
_MOST_SECONDS = 600.0  # request_timeout_ms at its largest


@contextmanager
def ticket_to_delete(queue: str) -> Iterator[str]:
    """Provide the password of one deleteQueue of `queue`."""
    for left in (*RUN.glob("ticket-*"), *RUN.glob(".ticket-*")):  # or what was to become one
        with suppress(FileNotFoundError):
            if _is_late(left):
                left.unlink()
    ticket = f"ticket-{secrets.token_hex(16)}"
    replace_file(RUN / ticket, queue.encode())
    try:
        yield ticket
    finally:
        (RUN / ticket).unlink(missing_ok=True)


def accept_ticket(password: str, queue: str) -> bool:
    """Return whether a password is a ticket to delete `queue` that was not accepted before and is
    no older than requests may be."""
    if _TICKET.fullmatch(password) is None:
        return False
    try:
        is_right = (RUN / password).read_bytes() == queue.encode()
        is_right &= not _is_late(RUN / password)
        (RUN / password).unlink()
    except FileNotFoundError:
        return False
    return is_right


def _is_late(ticket: Path) -> bool:
    """Return whether a ticket is older than a request may be. Raises FileNotFoundError."""
    # Both times are of the machine's clock; ours may follow its steps later.
    return time.time() - ticket.stat().st_mtime > _MOST_SECONDS
