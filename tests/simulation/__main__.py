"""Run seeds of the simulation: `python -m tests.simulation --seeds 2000`.

Exit 1, naming the seeds, if any breaks a promise; `--seed N` runs one and prints its history.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.checker.run import Violation
from tests.simulation.simulation import FAULTS, Simulation
from tests.simulation.variants import VARIANTS

_SHOWN = 3  # violations of one seed
_STACKED = 5  # seeds of one task: what is begun goes on although a variant was found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, help="only this one; prints its history")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="only this kind")
    parser.add_argument("--no-faults", action="store_true", help="but clients that hang up")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--variant", choices=VARIANTS, help="a broken version, to be found")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets is part of what a seed decides.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    if arguments.variant:
        VARIANTS[arguments.variant]()
    faults = () if arguments.no_faults else tuple(arguments.fault or FAULTS)
    if arguments.seed is not None:
        return _show(arguments.seed, faults)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    return _run_all(seeds, faults, arguments.processes, stop_early=bool(arguments.variant))


def _show(seed: int, faults: Sequence[str]) -> int:
    simulation, found = _simulate(seed, faults)
    for record in sorted(simulation.records, key=lambda record: (record.t0, record.t1)):
        print(record)
    for violation in found:
        print(violation)
    return 1 if found else 0


def _run_all(seeds: range, faults: Sequence[str], processes: int, *, stop_early: bool) -> int:
    began = time.monotonic()
    broken = done = calls = 0
    stacks = [seeds[at : at + _STACKED] for at in range(0, len(seeds), _STACKED)]
    with ProcessPoolExecutor(processes) as pool:
        run = partial(_run_some, faults=faults, stop_early=stop_early)
        for some, made, found in pool.map(run, stacks):
            done += some
            calls += made
            broken += len(found)
            for seed, violations in found:
                print(f"seed {seed}: {len(violations)} broken promises")
                print("\n".join(f"  {violation}" for violation in violations[:_SHOWN]))
            if found and stop_early:
                pool.shutdown(cancel_futures=True)
                break
    seconds = time.monotonic() - began
    print(f"{done} seeds, {calls} calls in {seconds:.1f} s: {broken} seeds broke a promise")
    return 1 if broken else 0


def _run_some(
    seeds: range, *, faults: Sequence[str], stop_early: bool
) -> tuple[int, int, list[tuple[int, list[str]]]]:
    """How many seeds, how many calls, and what was broken by which seed."""
    broken: list[tuple[int, list[str]]] = []
    done = calls = 0
    for seed in seeds:
        simulation, found = _simulate(seed, faults)
        done += 1
        calls += simulation.calls
        problems = [str(violation) for violation in found]
        if not simulation.calls:
            problems.append("no call was answered, so that nothing was tried")
        if problems:
            broken.append((seed, problems))
            if stop_early:
                break
    return done, calls, broken


def _simulate(seed: int, faults: Sequence[str]) -> tuple[Simulation, Sequence[Violation]]:
    """In a folder of its own, and without the logs of the faults that it suffers."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="pinlaterd-simulation-") as folder:
        os.chdir(folder)
        simulation = Simulation(seed, faults)
        found = simulation.run()
    return simulation, found


if __name__ == "__main__":
    sys.exit(main())
