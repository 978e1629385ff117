"""Descriptors of jobs and of claims, as texts: what a shard parses and makes by the thousand."""

from __future__ import annotations

from itertools import count, islice

from pinlaterd.config.schema import ServerSettings
from pinlaterd.model import JobDescriptor, JobKey

LAST_LOCAL_ID = (1 << 63) - 1
LAST_PRIORITY = 127
# What stands for descriptors that are well formed and whose job no store can hold: local ids
# begin with 1.
NO_JOB = JobKey(1, 0)
_ID_DIGITS = len(str(LAST_LOCAL_ID))
_PRIORITIES = {str(priority): priority for priority in range(1, LAST_PRIORITY + 1)}
_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch


def is_local_id(text: str) -> bool:
    """Whether these are digits, and so few that no number is too large."""
    return text.isdigit() and text.isascii() and len(text) < _ID_DIGITS


class JobDescriptors:
    """Those of the jobs of one queue on this shard."""

    __slots__ = ("_prefix", "queue", "shard")

    def __init__(self, queue: str, shard: str) -> None:
        self.queue = queue
        self.shard = shard
        self._prefix = f"{queue}:s{shard}:p"

    def of(self, priority: int, local_id: int) -> str:
        return f"{self._prefix}{priority}:{local_id}"

    def key(self, descriptor: str) -> JobKey | None:
        """The job that `descriptor` names; None if it is malformed or names none of ours."""
        if descriptor.startswith(self._prefix):
            priority_text, _, id_text = descriptor[len(self._prefix) :].partition(":")
            priority = _PRIORITIES.get(priority_text)
            if priority is not None and is_local_id(id_text):
                return _new(JobKey, (priority, int(id_text)))
        parsed = JobDescriptor.parse(descriptor)
        if parsed is None or parsed.queue != self.queue or parsed.shard != self.shard:
            return None
        if not 1 <= parsed.priority <= LAST_PRIORITY or parsed.local_id > LAST_LOCAL_ID:
            return NO_JOB
        return JobKey(parsed.priority, parsed.local_id)


class ClaimDescriptors:
    """`HOST:PORT:STARTMILLIS:SOURCE:COUNTER`, no two of them alike.

    START differs from every other ownership of this shard. Other shards of this server may begin
    in the same millisecond: each counts through numbers of its own, `position` modulo `shards`.
    """

    def __init__(
        self, server: ServerSettings, start_ms: int, *, position: int, shards: int
    ) -> None:
        self._head = f"{server.advertised_host}:{server.port}:{start_ms}:"
        self.counter = count(position, max(1, shards))

    def take(self, source: str, number: int) -> list[str]:
        """So many for claims of `source`."""
        prefix = f"{self._head}{source}:"
        return [f"{prefix}{count}" for count in islice(self.counter, number)]
