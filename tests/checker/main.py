"""Drives a deployment with many clients, hurts it, and judges what they saw.

    tools/check-promises --minutes 30                      every engine, in turns
    tools/check-promises --engine redis-always --seed 7
    tools/check-promises --engine sqlite --fault "kill shard" --fault "stop router"
    tools/check-promises --judge history.jsonl             judge a recorded history again
    tools/check-promises --engine sqlite --variant no-claim-compare
    tools/check-promises --cluster --help                  several servers

Exit 1 if a promise was broken; the history and the deployment's folder are kept then.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.checker import history
from tests.checker.calls import Calls
from tests.checker.clients import (
    DRAINED_SECONDS,
    KEYED,
    QUEUES,
    Builder,
    Client,
    Cutter,
    Enqueuer,
    Keeper,
    Limited,
    OneAttempt,
    Repeater,
    Searcher,
    Shared,
    Worker,
    drain,
)
from tests.checker.faults import FAULTS, Nemesis
from tests.checker.history import History
from tests.checker.judge import judge
from tests.checker.operators import OPERATIONS
from tests.checker.run import Violation
from tests.checker.site import ENGINES, PASSWORD, REPLICATED, Site, history_head

_DRAIN_SECONDS = 40.0
_RUN_SECONDS = 120.0  # of one deployment: longer checks are several runs, with seeds of their own
# How long a process is stopped, or a network silent.
FAULT_SECONDS = (1, 4, 15, 60)
_SHOWN, _SHOWN_CHARS = 3, 2000
ALL_FAULTS = FAULTS | OPERATIONS


def check(
    engine: str,
    seconds: float,
    seed: int,
    folder: Path,
    *,
    variant: str = "",
    faults: Sequence[str] = (),
    fault_seconds: Sequence[float] = FAULT_SECONDS,
    large: bool = True,
    drained: bool = True,
    first_faults: Sequence[str] = (),
) -> list[Violation]:
    """One run on a new deployment; the history is left in `folder`.

    `large`: a client is cut off within large answers. `drained`: all that is ready is worked off
    at the end, so that the rules on the end apply. `first_faults`: those that come first."""
    path = folder / "history.jsonl"
    site = Site(folder / "s", engine, variant, replicated="failover" in faults)
    log = History(path)
    failures: list[str] = []
    try:
        wall_offset = time.time() - time.monotonic()
        log.add(history_head(site, wall_offset))
        nemesis = Nemesis(site, log, seed, fault_seconds, ALL_FAULTS)
        failures = _drive(site, log, seconds, nemesis, faults, first_faults, large=large)
        if drained:
            last = Calls("last", site.target(), log)
            drain(last, log, seconds=_DRAIN_SECONDS)
            last.close()
            for record in site.gauges(DRAINED_SECONDS):
                log.add(record)
            site.deployment.down()
        else:
            site.deployment.kill_all()
        for record in site.stored():
            is_keyed = record.arguments["descriptor"].startswith(f"{KEYED}:")
            log.add(replace(record, operation="keyed_row") if is_keyed else record)
    finally:
        log.close()
        site.close()
    found = judge(history.read(path))
    return [*(Violation("the run itself", failure) for failure in failures), *found]


def _drive(
    site: Site,
    log: History,
    seconds: float,
    nemesis: Nemesis,
    faults: Sequence[str],
    first_faults: Sequence[str],
    *,
    large: bool,
) -> list[str]:
    shared = Shared(PASSWORD, nemesis.seed)

    def calls(name: str) -> Calls:
        return Calls(name, site.target(), log)

    kinds: list[type[Client]] = [Enqueuer] * 2 + [Repeater] * 2 + [Worker] * 4
    kinds += [Limited] * 4 + [Keeper, Builder, Searcher]
    names = [f"{kind.__name__.lower()}{number}" for number, kind in enumerate(kinds)]
    clients = [kind(name, calls(name), shared) for kind, name in zip(kinds, names, strict=True)]
    dying: list[type[Client]] = [OneAttempt, Cutter] if large else [OneAttempt]
    for kind in dying:
        name = kind.__name__.lower()
        clients.append(kind(name, Calls(name, site.direct_target(), log), shared))
    first = calls("first")
    for queue in QUEUES:
        first.create_queue(queue)
    first.close()
    for client in clients:
        client.start()
    nemesis.note_starts()
    calm = threading.Event()
    choice = {"only": faults, "first": first_faults}
    thread = threading.Thread(target=nemesis.run, args=(calm,), kwargs=choice)
    if "none" not in faults:
        thread.start()
    time.sleep(seconds)
    calm.set()
    if thread.ident is not None:
        thread.join()
    shared.stop_enqueuing.set()
    time.sleep(1)
    shared.stop.set()
    for client in clients:
        client.join(30)
    broken = [f"{client.name}: {client.error!r}" for client in clients if client.error]
    return [*nemesis.failures, *broken]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/check-promises",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="for each engine (default: 1)")
    parser.add_argument("--engine", choices=(*ENGINES, "all"), default="all")
    parser.add_argument("--seed", type=int, help="of the first run (default: a random one)")
    parser.add_argument("--variant", default="", help="a broken variant: the check should fail")
    parser.add_argument("--fault", action="append", choices=(*ALL_FAULTS, "none"), default=[])
    parser.add_argument("--longest-fault", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--no-large", action="store_true", help="no client is cut off in an answer")
    parser.add_argument("--judge", type=Path, metavar="FILE")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a run ends what it started
    if options.judge is not None:
        return _report(judge(history.read(options.judge)), options.judge)
    if "restore" in options.fault and "drain" in options.fault:
        parser.error("a copy of one shard can't be judged where jobs move: restore and drain apart")
    engines: Sequence[str] = ENGINES if options.engine == "all" else (options.engine,)
    if "failover" in options.fault:
        engines = [engine for engine in engines if engine in REPLICATED]
        if not engines:
            parser.error(f"failover: choose from the engines {', '.join(REPLICATED)}")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    left = dict.fromkeys(engines, options.minutes * 60)
    while left:
        for engine in list(left):
            seconds = min(left[engine], _RUN_SECONDS)
            left[engine] -= seconds
            if left[engine] < 1:
                del left[engine]
            folder = Path(tempfile.mkdtemp(prefix="check"))
            print(f"{engine}, seed {seed}, {seconds:g} s, in {folder}", flush=True)
            found = check(
                engine,
                seconds,
                seed,
                folder,
                variant=options.variant,
                faults=options.fault,
                large=not options.no_large,
                fault_seconds=[s for s in FAULT_SECONDS if s <= options.longest_fault],
            )
            if _report(found, folder / "history.jsonl"):
                return 1
            shutil.rmtree(folder)
            seed += 1
    return 0


def _report(found: Sequence[Violation], path: Path) -> int:
    with path.open() as file:
        print(f"  {sum(1 for _ in file):,} records", flush=True)
    for rule, count in Counter(violation.rule for violation in found).items():
        print(f"BROKEN: {rule}: {count} times; see {path}")
        for violation in [v for v in found if v.rule == rule][:_SHOWN]:
            print(f"  {violation.text[:_SHOWN_CHARS]}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
