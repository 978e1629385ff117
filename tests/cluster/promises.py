"""Hurts a cluster under load, by a seeded choice of faults, and judges what its clients saw.

    tools/check-promises --cluster --minutes 30
    tools/check-promises --cluster --faults off:60,moves:200,freeze:50,cut:50 --seed 7

`--faults KIND:COUNT,…` chooses kinds and counts; of `moves`, shards that moved. Without it, all
kinds in turn until the time is over. At the end: how many there were of each, the median and the
longest time until all shards took an enqueue and an ack through every router that could serve (of
planned moves: the longest call), and what was broken. Exit 1 if anything was.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.checker.run import Violation
from tests.cluster.faults import FAULTS, moves
from tests.cluster.machines import Network, NoNamespacesError
from tests.cluster.run import Run
from tests.cluster.site import Site
from tests.conftest import SYSTEM_PROGRAMS

# A load is judged after so long, which takes the longer the more it has seen.
_RUN_SECONDS = 150.0
_SHOWN, _SHOWN_CHARS = 3, 600
_FAILED = "no errors without faults"
_WENT_WRONG = "all serves in time"


@dataclass
class Found:
    """What came of the faults."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    moved: int = 0
    violations: list[Violation] = field(default_factory=list)

    def table(self) -> str:
        head = ("fault", "times", "median s", "longest s")
        rows = [
            (name, f"{len(s)}", f"{statistics.median(s):.2f}", f"{max(s):.2f}")
            for name, s in sorted(self.seconds.items())
        ]
        lines = [
            f"{n:18}{times:>7}{median:>10}{most:>11}" for n, times, median, most in [head, *rows]
        ]
        rules = Counter(violation.rule for violation in self.violations)
        lines += [
            f"shards moved in order: {self.moved}",
            f"failed calls outside faults: {rules.pop(_FAILED, 0)}",
            f"other violations: {rules.total()}",
            *(f"    {rule}: {count}" for rule, count in rules.items()),
        ]
        return "\n".join(lines)


def check(site: Site, plan: Iterator[str], rng: random.Random, found: Found) -> None:
    """Until the plan ends, in loads of some faults each."""
    name = next(plan, "")
    while name:
        run = Run(site)
        ends = time.monotonic() + _RUN_SECONDS
        try:
            with run:
                while name and time.monotonic() < ends:
                    _hurt(run, name, rng, found)
                    name = next(plan, "")
        except AssertionError as error:
            broken = run.violations or [Violation(_WENT_WRONG, f"{name}: {error}")]
            found.violations += broken
            for violation in broken[:_SHOWN]:
                say(f"BROKEN: {str(violation)[:_SHOWN_CHARS]}")
            site.restore()
            name = next(plan, "") if not run.violations else name


def _hurt(run: Run, name: str, rng: random.Random, found: Found) -> None:
    began = time.monotonic()
    seconds = FAULTS[name](run, rng)
    found.seconds[name].append(seconds)
    moved = len(run.site.planned_moves(began)) if FAULTS[name] is moves else 0
    found.moved += moved
    say(f"{name}: {seconds:.2f} s" + f", {moved} shards" * bool(moved))


def planned(counts: Mapping[str, int], rng: random.Random, found: Found) -> Iterator[str]:
    """So many of each in a random order."""
    names = [name for name, count in counts.items() if name != "moves" for _ in range(count)]
    wanted = counts.get("moves", 0)
    while names or found.moved < wanted:
        left = -(-max(0, wanted - found.moved) // 4)
        at = rng.randrange(len(names) + left)
        yield names.pop(at) if at < len(names) else "moves"


def endless(seconds: float, rng: random.Random) -> Iterator[str]:
    """Each kind as often as the others, until the time is over."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for name in rng.sample(list(FAULTS), len(FAULTS)):
            if time.monotonic() < ends:
                yield name


def counts_of(text: str) -> Mapping[str, int]:
    """Raises argparse.ArgumentTypeError."""
    counts = {}
    for part in text.split(","):
        name, _, count = part.partition(":")
        if name not in FAULTS or not (count or "1").isdecimal():
            kinds = ", ".join(FAULTS)
            raise argparse.ArgumentTypeError(f"{part!r} is no KIND:COUNT; kinds are {kinds}")
        counts[name] = int(count or 1)
    return counts


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command's output


def _program(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path=SYSTEM_PROGRAMS)
    return path or sys.exit(f"{name} is missing; tools/test names what to install")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/check-promises --cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="without --faults (default: 5)")
    parser.add_argument("--faults", type=counts_of, metavar="KIND:COUNT,…", help=", ".join(FAULTS))
    parser.add_argument("--seed", type=int, help="of the choices (default: a random one)")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    rng, found = random.Random(seed), Found()
    for program in ("mariadbd", "redis-server", "curl"):
        _program(program)
    folder = Path(tempfile.mkdtemp(prefix="check", dir=_short_folder()))
    try:
        network = Network()
    except NoNamespacesError as error:
        sys.exit(str(error))
    try:
        say(f"seed {seed}, in {folder}")
        site = Site(network, folder / "c", _program("java"), clocks_step=True)
        site.start()
        if options.faults:
            plan = planned(options.faults, rng, found)
        else:
            plan = endless(options.minutes * 60, rng)
        check(site, plan, rng, found)
    finally:
        network.close()
        say(found.table())
    if found.violations:
        return 1
    shutil.rmtree(folder)
    return 0


def _short_folder() -> str | None:
    """In memory, if there is such a place: a slow disk would make calls late."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    sys.exit(main())
