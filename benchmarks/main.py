"""The command line of the benchmark: `tools/bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from benchmarks import (
    dashboard,
    failures,
    http,
    idle,
    interference,
    many_queues,
    push,
    sections,
    worker,
)
from benchmarks.deployment import BenchmarkFailed, scratch_folder
from benchmarks.load import Generators
from benchmarks.report import Report, machine_facts
from benchmarks.sections import Bench
from benchmarks.stores import ENGINES, open_store
from benchmarks.targets import judged

# What depends on the engine; the rest of SECTIONS is measured with SQLite, whatever the engine.
OF_ENGINES = ("enqueue", "dequeue", "cycle", failures.SECTION)
OF_MYSQL = "statements"
SECTIONS: Mapping[str, Callable[[Bench, int], None]] = {
    "enqueue": sections.enqueue,
    "dequeue": sections.dequeue,
    "cycle": sections.cycle,
    "keys": sections.keys,
    OF_MYSQL: sections.statements,
    "echo": sections.echo,
    "generator": sections.generator,
    interference.SECTION: interference.interference,
    "idle": idle.idle,
    many_queues.SECTION: many_queues.many_queues,
    worker.SECTION: worker.worker,
    push.SECTION: push.push,
    http.SECTION: http.http,
    failures.SECTION: failures.failures,
    dashboard.SECTION: dashboard.dashboard,
}
WARM_UP_SECONDS = 1.0
QUICK_SECONDS = 1.5
GENERATORS = 4  # processes: at most so many loads and searches run at a time


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--seconds", default=6.0, show_default=True, help="What each figure is measured over."
)
@click.option("--runs", default=3, show_default=True, help="Medians of so many are reported.")
@click.option(
    "--only", default="",
    help=f"Which sections, of {', '.join(SECTIONS)}  [default: those that depend on the engine;"
    " with sqlite all that it has]",
)  # fmt: skip
@click.option(
    "--engine", type=click.Choice(ENGINES), default="sqlite", show_default=True,
    help="What enqueue, dequeue and cycle are measured on; redis: appendfsync everysec.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="A look in a few minutes: one short run, fewer jobs.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False),
    help="Where the figures go  [default: bench-results/TIME.json]",
)  # fmt: skip
@click.option(
    "--dir", "parent", type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where the services keep their data  [default: the folder for temporary files]",
)  # fmt: skip
def cli(
    *,
    seconds: float,
    runs: int,
    only: str,
    engine: str,
    quick: bool,
    json_file: Path | None,
    parent: Path | None,
) -> None:
    """Measure the whole path against the storage engine alone, on this machine.

    Starts services of its own in a temporary folder, on free ports, and ends them. Exits with 1
    if a target is not reached.

    \b
    tools/bench                              everything; the section queues alone takes 15 minutes
    tools/bench --quick --only enqueue,echo  a look
    tools/bench --only cycle --runs 1        a minute of enqueues, dequeues and acks
    tools/bench --engine mysql               enqueue, dequeue, cycle, and PinLater's own statements
    """
    wanted = [name.strip() for name in only.split(",")] if only else list(_default(engine))
    unknown = set(wanted) - set(SECTIONS)
    if unknown:
        raise click.BadParameter(
            f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}",
            param_hint="--only",
        )
    if OF_MYSQL in wanted and engine != "mysql":
        raise click.BadParameter(f"{OF_MYSQL} needs --engine mysql", param_hint="--only")
    if quick:
        seconds, runs = QUICK_SECONDS, 1
    report = Report(_progress)
    try:
        with (
            scratch_folder(parent) as folder,
            Generators(GENERATORS) as generators,
            open_store(engine, folder) as store,
        ):
            report.facts |= machine_facts(folder)
            report.facts["runs"] = f"{runs} of {seconds:g} s each; medians"
            report.facts["engine"] = engine
            scale = 0.1 if quick else 1.0
            bench = Bench(folder, seconds, WARM_UP_SECONDS, scale, report, generators, store)
            for run in range(1, runs + 1):
                for name in wanted:
                    SECTIONS[name](bench, run)
            report.facts["load"] = "{:.1f}, {:.1f}, {:.1f}".format(*os.getloadavg())
    except BenchmarkFailed as error:
        raise click.ClickException(str(error)) from error
    targets = judged(report, engine)
    click.echo(report.text(targets))
    json_file = json_file or _default_json_file()
    report.write_json(json_file, targets)
    click.echo(f"\nwritten to {json_file}")
    sys.exit(0 if all(target.reached for target in targets) else 1)


def _default(engine: str) -> Sequence[str]:
    if engine == "sqlite":
        return [name for name in SECTIONS if name != OF_MYSQL]
    return (*OF_ENGINES, OF_MYSQL) if engine == "mysql" else OF_ENGINES


def _default_json_file() -> Path:
    return Path("bench-results") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        click.echo(line, err=True)


if __name__ == "__main__":
    cli()
