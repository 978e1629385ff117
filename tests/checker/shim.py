"""The library (shim.c) through which flushes fail and the wall clock steps in all processes."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")
_CONTROL = "control"


def load_shim(folder: Path) -> dict[str, str]:
    """Build it in `folder`; returns the environment that loads it."""
    library = folder / "shim.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "a C compiler is missing; on Debian: apt-get install g++"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(library), "CHECKER_CONTROL": str(folder / _CONTROL)}


def control_shim(folder: Path, *, flush_error: int = 0, clock_seconds: int = 0) -> None:
    """The error of every flush (0: none), and by how much the wall clock is ahead."""
    path = folder / _CONTROL
    path.touch()
    with path.open("r+b") as file:
        file.write(struct.pack("=qq", flush_error, clock_seconds))
