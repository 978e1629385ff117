"""What was measured: the table, the targets, the JSON file. Several runs become their medians."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from benchmarks.deployment import Usages, cpu_seconds_between, rss_mb
from benchmarks.load import Outcome


class Case(NamedTuple):
    """What was measured, but for the run."""

    section: str
    name: str
    connections: int
    what: str  # "whole", "engine alone", …


@dataclass(frozen=True)
class Measurement:
    """One case in one run."""

    case: Case
    run: int
    calls_per_second: float = 0.0
    jobs_per_second: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    cpu_seconds_per_1000_jobs: Mapping[str, float] = field(default_factory=dict)
    rss_mb: Mapping[str, float] = field(default_factory=dict)
    generator_cpu_share: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)  # others, by name with unit
    note: str = ""

    @classmethod
    def of(
        cls,
        case: Case,
        run: int,
        outcome: Outcome,
        before: Usages | None = None,
        after: Usages | None = None,
    ) -> Measurement:
        """`before`, `after`: what the service's processes had used."""
        notes = [f"{outcome.errors} errors"] if outcome.errors else []
        notes += ["ran dry"] if outcome.ran_dry else []
        used = cpu_seconds_between(before or {}, after or {}) if outcome.jobs else {}
        return cls(
            case=case,
            run=run,
            calls_per_second=outcome.calls_per_second,
            jobs_per_second=outcome.jobs_per_second,
            p50_ms=outcome.percentile_ms(50),
            p99_ms=outcome.percentile_ms(99),
            cpu_seconds_per_1000_jobs={
                name: seconds / outcome.jobs * 1000.0 for name, seconds in used.items()
            },
            rss_mb=rss_mb(after or {}),
            generator_cpu_share=outcome.cpu_share,
            note=", ".join(notes),
        )


@dataclass(frozen=True)
class Target:
    """A figure to reach."""

    name: str
    value: float
    bound: Literal["at least", "at most"]
    limit: float
    unit: str = ""

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.bound == "at least" else self.value <= self.limit

    def line(self) -> str:
        verdict = "reached    " if self.reached else "NOT REACHED"
        value, limit = _number(self.value), _number(self.limit)
        return f"{verdict}  {self.name}: {value}{self.unit}  ({self.bound} {limit}{self.unit})"


class Report:
    """Collects measurements, and shows them."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.measurements: list[Measurement] = []
        self.facts: dict[str, object] = {}
        self._progress = progress

    def add(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        self._progress(f"run {measurement.run}: {_row_text(measurement)}")

    def runs(self, case: Case) -> list[Measurement]:
        return [m for m in self.measurements if m.case == case]

    def ratio(
        self, above: Case, below: Case, figure: Callable[[Measurement], float]
    ) -> float | None:
        """The median of the runs' ratios; None if one of the two was not measured."""
        ratios = [
            figure(a) / statistics.median(figure(b) for b in same_run)
            for a in self.runs(above)
            if (same_run := [b for b in self.runs(below) if b.run == a.run and figure(b)])
        ]
        return statistics.median(ratios) if ratios else None

    def median(self, case: Case) -> Measurement | None:
        """None if it was not measured."""
        runs = self.runs(case)
        return _median(runs) if runs else None

    def medians(self) -> list[Measurement]:
        cases = dict.fromkeys(m.case for m in self.measurements)
        return [_median(self.runs(case)) for case in cases]

    def text(self, targets: Sequence[Target]) -> str:
        medians = self.medians()
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        lines += ["", *_aligned([_HEADINGS, *(_row(m) for m in medians)])]
        lines += [
            "",
            "CPU seconds for 1,000 jobs / MB resident:",
            *_aligned(_process_rows(medians)),
        ]
        lines += ["", *(target.line() for target in targets)]
        return "\n".join(lines)

    def write_json(self, path: Path, targets: Sequence[Target]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "facts": self.facts,
            "targets": [{**asdict(t), "reached": t.reached} for t in targets],
            "medians": [_as_json(m) for m in self.medians()],
            "runs": [_as_json(m) for m in self.measurements],
        }
        path.write_text(json.dumps(content, indent=1) + "\n")


def machine_facts(folder: Path) -> dict[str, object]:
    """What figures depend on."""
    return {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, {_filesystem(folder)}",
        "software": f"CPython {platform.python_version()}, SQLite {sqlite3.sqlite_version}",
    }


def _commit() -> str:
    """Of the code that is measured; `-dirty` if files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _filesystem(folder: Path) -> str:
    """The kind of file system that `folder` lies on: on tmpfs a flush costs nothing."""
    mounts = [
        part
        for part in psutil.disk_partitions(all=True)
        if folder.resolve().is_relative_to(part.mountpoint)
    ]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"


# --- the table ----------------------------------------------------------------------------

_HEADINGS = (
    "section", "case", "connections", "what", "calls/s", "jobs/s", "p50 ms", "p99 ms",
    "generator's CPU", "",
)  # fmt: skip


def _row(m: Measurement) -> Sequence[str]:
    others = [f"{name} {_number(value)}" for name, value in m.figures.items()]
    return (
        m.case.section,
        m.case.name,
        str(m.case.connections or ""),
        m.case.what,
        f"{m.calls_per_second:,.0f}" if m.calls_per_second else "",
        f"{m.jobs_per_second:,.0f}" if m.jobs_per_second else "",
        f"{m.p50_ms:.2f}" if m.p50_ms else "",
        f"{m.p99_ms:.2f}" if m.p99_ms else "",
        f"{m.generator_cpu_share:.0%}" if m.generator_cpu_share else "",
        ", ".join([*others, m.note] if m.note else others),
    )


def _process_rows(measurements: Sequence[Measurement]) -> Sequence[Sequence[str]]:
    """A column for each process."""
    known = [m for m in measurements if m.cpu_seconds_per_1000_jobs or m.rss_mb]
    names = dict.fromkeys(name for m in known for name in (*m.cpu_seconds_per_1000_jobs, *m.rss_mb))
    rows = [["section", "case", "connections", "what", *names]]
    for m in known:
        case = [m.case.section, m.case.name, str(m.case.connections or ""), m.case.what]
        rows.append([*case, *(_process_cell(m, name) for name in names)])
    return rows


def _process_cell(m: Measurement, name: str) -> str:
    cpu, rss = m.cpu_seconds_per_1000_jobs.get(name), m.rss_mb.get(name)
    parts = [f"{cpu:.4f}"] if cpu is not None else []
    parts += [f"{rss:.0f}"] if rss is not None else []
    return " / ".join(parts)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _row_text(m: Measurement) -> str:
    return "  ".join(text for text in _row(m) if text)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


# --- medians ------------------------------------------------------------------------------


def _median(runs: Sequence[Measurement]) -> Measurement:
    """Of each figure by itself."""
    middles: dict[str, Any] = {}
    for name in _FIGURES:
        values = [getattr(m, name) for m in runs]
        if not isinstance(values[0], Mapping):
            middles[name] = statistics.median(values)
            continue
        keys = dict.fromkeys(key for each in values for key in each)
        middles[name] = {
            key: statistics.median(each[key] for each in values if key in each) for key in keys
        }
    return Measurement(runs[0].case, 0, note=runs[-1].note, **middles)


_FIGURES = [
    found.name for found in fields(Measurement) if found.name not in ("case", "run", "note")
]


def _as_json(m: Measurement) -> dict[str, object]:
    return {**m.case._asdict(), **{k: v for k, v in asdict(m).items() if k != "case"}}
