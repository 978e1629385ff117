"""The way of a call: how many of our functions it goes through in router and shard, in how many
files, from the client's send until it has the answer and all are idle again.

The processes run with a profile hook that notes every call of a function of ours (`call_recorder`).
The service is idle but for one client, which makes the same call many times; of each kind the
shortest way counts, so that nothing periodic is in it. May rely on `benchmarks.deployment`.
"""

from __future__ import annotations

import tempfile
import time
from bisect import bisect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.call_recorder import ROLES, STOP_FILE
from benchmarks.deployment import Deployment, patched

TRIES = 60
PAUSE_SECONDS = 0.02
# What is done once the answer is on its way belongs to the call.
AFTERMATH_SECONDS = 0.005
# Frames that are no functions of their own.
_INLINE = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")
_QUEUE = "traced"


class Noted(NamedTuple):
    at_ns: int  # of the monotonic clock, which all processes share
    file: str  # within the package
    function: str


def trace() -> dict[str, list[Noted]]:
    """The shortest way of each kind of call, in the order of time."""
    with tempfile.TemporaryDirectory(prefix="calls-") as name:
        folder = Path(name)
        with patched(folder, "benchmarks.call_recorder"), Deployment(folder, shards=1) as service:
            times = _drive(service)
            (folder / STOP_FILE).touch()
            noted = _read(folder)
    return {kind: _shortest(noted, spans) for kind, spans in times.items()}


def _drive(service: Deployment) -> dict[str, list[tuple[int, int]]]:
    times: dict[str, list[tuple[int, int]]] = {"enqueue": [], "dequeue_with_acks": []}

    def timed(kind: str, call: Callable[[], Any]) -> Any:
        began = time.monotonic_ns()
        result = call()
        times[kind].append((began, time.monotonic_ns()))
        time.sleep(PAUSE_SECONDS)
        return result

    with service.client() as client:
        client.create_queue(_QUEUE)
        for _ in range(TRIES):
            timed("enqueue", lambda: client.enqueue(_QUEUE, [bytes(200)]))
        jobs = client.dequeue(_QUEUE, limit=1)
        for _ in range(TRIES - 1):  # each brings a job: a way to an empty answer is shorter
            dequeue = partial(client.dequeue, _QUEUE, limit=1, succeeded=jobs)
            jobs = timed("dequeue_with_acks", dequeue)
            assert jobs, "every dequeue claims a job"
    return times


def _read(folder: Path) -> list[Noted]:
    deadline = time.monotonic() + 20
    while len(found := list(folder.glob("*.calls"))) < len(ROLES):
        assert time.monotonic() < deadline, "router and shard did not write their calls"
        time.sleep(0.05)
    lines = (line.split("\t") for path in found for line in path.read_text().splitlines())
    noted = (Noted(int(at), file, name) for at, file, name in lines)
    return sorted(call for call in noted if not call.function.endswith(_INLINE))


def _shortest(noted: list[Noted], spans: list[tuple[int, int]]) -> list[Noted]:
    after = round(AFTERMATH_SECONDS * 1e9)
    ways = [
        noted[bisect(noted, (began,)) : bisect(noted, (ended + after,))] for began, ended in spans
    ]
    shortest = min(ways, key=len)
    packages = {call.file.partition("/")[0] for call in shortest}
    assert packages >= {*ROLES, "engines"}, f"a call was noted in {', '.join(packages)} alone"
    return shortest


def main() -> None:
    """Print the ways, call by call."""
    for kind, way in trace().items():
        print(f"{kind}: {len(way)} calls in {len({call.file for call in way})} files")
        for call in way:
            print(f"    {call.file:28} {call.function}")


if __name__ == "__main__":
    main()
