"""CPU and memory of processes, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import psutil

_TITLE = "pinlaterd: "


class Usage(NamedTuple):
    cpu_seconds: float
    rss_bytes: int


Usages = Mapping[str, Usage]


def process_name(process: psutil.Process) -> str:
    """`router` for a process titled `pinlaterd: router`, else the program's own name."""
    command = process.cmdline()
    title = command[0] if command else ""
    if title.startswith(_TITLE):
        return title.removeprefix(_TITLE).strip()
    return "supervisord" if any("supervisord" in word for word in command) else process.name()


def measure(root: psutil.Process) -> dict[str, Usage]:
    """The usage of `root` and all that descend from it."""
    usages: dict[str, Usage] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            with process.oneshot():
                name = process_name(process)
                times = process.cpu_times()
                usage = Usage(times.user + times.system, process.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
        usages[name if name not in usages else f"{name} ({process.pid})"] = usage
    return usages


def cpu_seconds_between(before: Usages, after: Usages) -> dict[str, float]:
    """What each process used meanwhile; one that is new, all that it has used."""
    return {
        name: usage.cpu_seconds - (before[name].cpu_seconds if name in before else 0.0)
        for name, usage in after.items()
    }
