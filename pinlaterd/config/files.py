"""The configuration files as they were at one time, and by what they are told from others."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pinlaterd.config.layout import CONFIG_FILES


class ConfigFiles:
    """The files of `etc` as they were at one time."""

    def __init__(self, etc: Path) -> None:
        self._contents: dict[Path, bytes | OSError] = {}
        for name in CONFIG_FILES:
            path = etc / name
            try:
                self._contents[path] = path.read_bytes()
            except OSError as error:
                self._contents[path] = error

    @property
    def digest(self) -> str:
        """The same for the same contents, as everybody finds them who reads them."""
        hashed = hashlib.sha256()
        for content in self._contents.values():
            data = b"" if isinstance(content, OSError) else content
            hashed.update(len(data).to_bytes(8, "big") + data)
        return hashed.hexdigest()[:16]

    def read(self, path: Path) -> bytes:
        """For `load_config`. Raises OSError, as reading the file did."""
        content = self._contents[path]
        if isinstance(content, OSError):
            raise content
        return content
