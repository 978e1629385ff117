"""Notes every call of a function of ours, in a process of the service: see `call_trace`.

Imported by sitecustomize.py, before anything else: relies on the standard library only.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

STOP_FILE = "stop"
ROLES = ("router", "shard")
_NOTED_CALLS = 400_000


def install() -> None:
    """In a process that starts: note calls until the folder has a file `stop`; then write them."""
    if "pinlaterd" not in sys.orig_argv or not set(ROLES) & set(sys.orig_argv):
        return
    folder = Path(os.environ["PYTHONPATH"])  # the one that `deployment.patched` was given
    ours = str(folder / "pinlaterd") + os.sep  # no library, wherever .venv lies
    noted: deque[tuple[int, str, str]] = deque(maxlen=_NOTED_CALLS)

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ours):
            file = code.co_filename.removeprefix(ours)
            noted.append((time.monotonic_ns(), file, code.co_qualname))

    def write() -> None:
        while not (folder / STOP_FILE).exists():
            time.sleep(0.05)
        whole = folder / f"{os.getpid()}.calls"
        part = whole.with_suffix(".part")
        part.write_text("".join(f"{at}\t{file}\t{name}\n" for at, file, name in list(noted)))
        part.rename(whole)

    threading.Thread(target=write, daemon=True).start()
    sys.setprofile(note)
