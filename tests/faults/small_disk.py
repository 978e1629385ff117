"""A file system of a few MB, which a test can fill to the last byte."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

SmallDisk = Callable[[Path, int], None]

_CHUNK = bytes(64 * 1024)


@pytest.fixture
def small_disk() -> Iterator[SmallDisk]:
    """Mounts one of so many bytes on a folder. Who uses it has to end before the test does."""
    mounted: list[Path] = []

    def mount(folder: Path, size: int) -> None:
        if os.geteuid() != 0:
            _skip("not root")
        options = f"size={size},mode=700"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            _skip(done.stderr.strip())
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _skip(why: str) -> NoReturn:
    pytest.skip(f"a small file system can't be mounted: {why}; run this as root")


def fill(path: Path) -> None:
    """Write until not one more byte fits."""
    with path.open("wb", buffering=0) as file:
        for chunk in (_CHUNK, bytes(1)):
            try:
                while file.write(chunk):
                    pass
            except OSError:
                continue
