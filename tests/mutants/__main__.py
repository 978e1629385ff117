"""Mutants: does a test notice when something that protects jobs is broken?

    python -m tests.mutants [TEXT ...]   # those whose file, effect or change holds one of these
    python -m pytest tests/mutants       # whether the text of each is found, without running them

Each mutant of `mutants.txt` is put into a copy of this checkout, and tests are run until one fails:
those that it names, then its package's and its engine's. One that survives lacks a test, or changes
nothing that can be seen. Ends with 1 if one survives, or if its text is not found once any more.
Without mutants all tests have to pass.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ENGINES = {"sqlite", "mysql", "redis"}
SURVIVED, OUT_OF_DATE = "SURVIVED", "OUT OF DATE: its text does not occur once"
_SECONDS = 900.0  # for one run of tests; mostly a test that hangs fails before
_FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_PASSED = (0, 5)  # what pytest ends with if all tests passed, or none was chosen


class Mutant(NamedTuple):
    file: str
    effect: str
    tests: str
    old: str
    new: str

    def matches(self) -> bool:
        """Tell whether its text occurs in its file once."""
        file = ROOT / self.file
        return file.exists() and file.read_text().count(self.old) == 1

    def runs(self) -> Iterator[str]:
        """Arguments for pytest: the narrowest first."""
        yield self.tests
        _, package, *names = self.file.split("/")
        engine = names[0] if names[0] in ENGINES else "sqlite"
        own = package
        if package == "engines":
            own = f"engines/{engine} properties/test_engine_model_{engine}.py"
        only = f"-k 'not ({' or '.join(sorted(ENGINES - {engine}))})'"
        yield f"{own} engines/test_acks.py engines/test_counts.py conformance/engine {only}"
        yield f"conformance simulation hostile {only}"


def read_mutants() -> list[Mutant]:
    mutants = []
    for block in Path(__file__).with_name("mutants.txt").read_text().strip().split("\n\n"):
        if block.startswith("#"):
            continue
        head, *lines = block.split("\n")
        file, _, about = head.partition(": ")
        effect, _, tests = about.partition(" | ")
        old, new = ("\n".join(ln[2:] for ln in lines if ln.startswith(s)) for s in ("- ", "+ "))
        mutants.append(Mutant(file, effect, tests, old, new))
    return mutants


def fate(mutant: Mutant, *, narrow: bool) -> str:
    """The test that fails, or what stands for none."""
    with tempfile.TemporaryDirectory(prefix="mut") as folder:
        copy = Path(folder, "copy")
        listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).exists():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        if not mutant.matches():
            return OUT_OF_DATE
        file = copy / mutant.file
        file.write_text(file.read_text().replace(mutant.old, mutant.new))
        for tests in islice(mutant.runs(), 2 if narrow else None):
            killer = first_failure(copy, tests)
            if killer:
                return killer
    return SURVIVED


def first_failure(copy: Path, tests: str) -> str:
    """What fails of `tests`, "" if nothing does."""
    paths = [
        f"tests/{part}" if (copy / "tests" / part).exists() else part for part in shlex.split(tests)
    ]
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="m") as folder:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        try:
            pytest = subprocess.run(
                [*command, "--basetemp", f"{folder}/t", *paths],
                cwd=copy,
                env={**os.environ, "PYTHONPATH": str(copy)},
                capture_output=True,
                text=True,
                check=False,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"tests that did not end within {_SECONDS:g} s: {tests}"
    if pytest.returncode in _PASSED:
        return ""
    found = _FIRST_FAILURE.search(pytest.stdout)
    return found[1] if found else f"pytest ended with {pytest.returncode}: {pytest.stdout[-200:]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("texts", nargs="*", metavar="TEXT")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--narrow", action="store_true", help="its package's tests at the most")
    options = parser.parse_args()
    mutants = [
        mutant
        for mutant in read_mutants()
        if not options.texts or any(text in "\n".join(mutant) for text in options.texts)
    ]
    lost = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        began = time.monotonic()
        fates = {pool.submit(fate, mutant, narrow=options.narrow): mutant for mutant in mutants}
        for done in as_completed(fates):
            mutant, killer = fates[done], done.result()
            lost += killer in (SURVIVED, OUT_OF_DATE)
            print(f"{mutant.file}: {mutant.effect}\n    {killer}", flush=True)
    print(f"{len(mutants) - lost} of {len(mutants)} killed, {time.monotonic() - began:.0f} s")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
