"""Notices that the files in etc/ have changed, and waits until whoever writes them is done.

It only looks when told to: a look costs three stat calls. A file counts once it stayed as it is
from one look to the next, and what is then read is what gets judged: nobody reads it a second
time. Edited in place, replaced, a link turned elsewhere, deleted and put back: all the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pinlaterd.config.layout import CONFIG_FILES
from pinlaterd.config.load import ConfigFiles

# Twice this is the least that a file has to rest. Four looks a second are not to be felt.
LOOK_SECONDS = 0.25


class _Mark(NamedTuple):
    """What changes with a file's content. `changed_ns` can't be set back by any tool."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


_Marks = tuple[_Mark | None, ...]


class ConfigWatch:
    """Looks at the files of `etc`. The first that it finds at rest count as changed."""

    def __init__(self, etc: Path) -> None:
        self._etc = etc
        self._seen: _Marks | None = None
        self._given: _Marks | None = None

    def look(self) -> ConfigFiles | None:
        """The files, if they have changed since they were given out last and rest by now."""
        marks = self._marks()
        before, self._seen = self._seen, marks
        if marks == self._given or marks != before:
            return None
        files = ConfigFiles(self._etc)
        if self._marks() != marks:
            self._seen = None  # written to while we read
            return None
        self._given = marks
        return files

    def _marks(self) -> _Marks:
        return tuple(_mark(self._etc / name) for name in CONFIG_FILES)


def _mark(path: Path) -> _Mark | None:
    try:
        found = os.stat(path)  # noqa: PTH116  (the cheapest, four times a second)
    except OSError:
        return None
    return _Mark(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
