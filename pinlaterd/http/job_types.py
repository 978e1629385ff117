"""The registry of job types, as a process that serves them sees it.

A type is a record in etc/job_types.yaml, and so the same on all servers. A new one counts once this
process follows a configuration that has it: by then no other of its name can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from pinlaterd.config import edit
from pinlaterd.config.layout import JOB_TYPES_FILE
from pinlaterd.config.schema import Config, JobType

_FOLLOW_SECONDS = 2.0  # by then all servers follow it


class JobTypes:
    """The job types that are active, by name."""

    def __init__(self, etc: Path, config: Config) -> None:
        self._path = etc / JOB_TYPES_FILE
        self._changed = asyncio.Event()
        self.follow(config)

    def follow(self, config: Config) -> None:
        """Know the types of `config` from now on."""
        self._by_name: Mapping[str, JobType] = {one.name: one for one in config.job_types.values()}
        self._by_queue: Mapping[str, JobType] = config.job_types
        self.newest_first = config.newest_job_types()
        self._others_create = bool(config.server.cluster)
        self._changed.set()

    def get(self, name: str) -> JobType | None:
        return self._by_name.get(name)

    async def find(self, name: str) -> JobType | None:
        """Return a type; one that was created on another server a moment ago is waited for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FOLLOW_SECONDS if self._others_create else 0):
                while name not in self._by_name:
                    self._changed.clear()
                    await self._changed.wait()
        return self._by_name.get(name)

    def of_queue(self, queue: str) -> JobType | None:
        return self._by_queue.get(queue)

    def name_of(self, queue: str) -> str:
        """Return the name of the type of a queue's jobs; that of the queue if it was removed."""
        found = self._by_queue.get(queue)
        return queue if found is None else found.name

    async def create(self, made: JobType, *, seconds: float) -> bool:
        """Add a type, and return once it is active; False if there is one of its name. An edit that
        came second, after one on another server, is made again. Raises ConfigError, and
        TimeoutError if it is not active within `seconds`."""
        if made.name in self._by_name:
            return False
        add = partial(edit.add_job_type, self._path.parent, made)
        is_added = await self._carry_out(add, lambda: made.name in self._by_name, seconds)
        return is_added and self._by_name.get(made.name) == made

    async def change(self, wanted: JobType, *, seconds: float) -> None:
        """Give a type other numbers, in the same way."""
        settings = {"attempts": wanted.attempts, "concurrency": wanted.concurrency}
        change = partial(edit.set_job_type, self._path.parent, wanted.name, settings)
        await self._carry_out(change, lambda: self._by_name.get(wanted.name) == wanted, seconds)

    async def _carry_out(
        self, change: Callable[[], edit.Edited], is_active: Callable[[], bool], seconds: float
    ) -> bool:
        """Make a change to the file, and return once it is active; False if it makes none."""
        until = asyncio.get_running_loop().time() + seconds
        if await edit.carry_out(self._path, change, seconds) is None:
            return False
        async with asyncio.timeout_at(until):
            while not is_active():
                self._changed.clear()
                await self._changed.wait()
        return True
