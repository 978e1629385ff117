"""What `pinlater bench` prints of a run: lines for people, facts as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pinlaterd.cli.load import Figures, Kind, Outcome
from pinlaterd.cli.pace import LATE_AFTER_SECONDS, Punctuality
from pinlaterd.wording import how_many

# From here on a run that falls behind is held up by this process: it has one interpreter.
_BUSY_CPU_SHARE = 0.8
# How much more than a run took is advised to the next one, which may be faster.
_RESERVE = 1.2
_SHOWN_PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p99_9_ms": 0.999}


@dataclass(frozen=True)
class Schedule:
    """An open loop's `rate` (calls per second), by which arrivals, and how it was kept."""

    rate: float
    arrivals: str
    kept: Punctuality

    def facts(self) -> dict[str, object]:
        """For JSON."""
        kept = self.kept
        return {
            "rate": self.rate,
            "arrivals": self.arrivals,
            "due": kept.due,
            "started": kept.started,
            "late_all_busy": kept.late_all_busy,
            "late_to_wake": kept.late_to_wake,
            "latest_ms": round(1000 * kept.latest_seconds, 3),
            "behind_ms": round(1000 * kept.behind_seconds, 3),
            "kept_up": kept.kept_up,
        }


@dataclass(frozen=True)
class Report:
    """A run, and what of its plan is to be said with the figures."""

    outcome: Outcome
    schedule: Schedule | None
    batch_size: int
    concurrency: int
    warm_up_seconds: float
    seconds: float
    slow_ms: float

    def facts(self) -> dict[str, object]:
        """For JSON."""
        outcome = self.outcome
        return {
            "seconds": round(outcome.seconds, 3),
            "warm_up_seconds": self.warm_up_seconds,
            "batch_size": self.batch_size,
            "concurrency": self.concurrency,
            "slow_ms": self.slow_ms,
            "cpu_percent": round(100 * outcome.cpu_share, 1),
            "ran_out": outcome.ran_out,
            "left_claimed": str(outcome.left_claimed[0]) if outcome.left_claimed else None,
            "kinds": {kind: self._facts_of(figures) for kind, figures in outcome.kinds.items()},
            "schedule": None if self.schedule is None else self.schedule.facts(),
        }

    def _facts_of(self, figures: Figures) -> dict[str, object]:
        return {
            **figures.facts(self.outcome.seconds, _SHOWN_PERCENTILES),
            "max_ms": figures.max_ms,
            "slow": figures.slow,
            "errors": dict(figures.errors),
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        yield from self._table()
        for kind, figures in self.outcome.kinds.items():
            for name, count in figures.errors.items():
                yield f"errors: {count:,} of {kind}: {name}; latencies are those of the other calls"
        if self.outcome.left_claimed:
            yield (
                f"some claims could not be ended: {self.outcome.left_claimed[0]}; those jobs come "
                "out again when their claims time out"
            )
        if self.outcome.ran_out:
            yield self._ran_out_line()
        if self.schedule is not None:
            yield from self._schedule_lines(self.schedule)

    def _table(self) -> Iterator[str]:
        loop = "closed loop"
        if self.schedule is not None:
            loop = f"open loop, {self.schedule.rate:,g} calls/s, {self.schedule.arrivals} arrivals"
        yield (
            f"{self.outcome.seconds:.2f} s after {self.warm_up_seconds:g} s of warm-up, {loop}, "
            f"{how_many(self.concurrency, 'connection')}, {how_many(self.batch_size, 'job')} a call"
        )
        yield (
            f"{'':8}{'calls/s':>11}{'jobs/s':>12}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}"
            f"{'p99.9 ms':>10}{'max ms':>10}  slow (> {self.slow_ms:g} ms)"
        )
        for kind, figures in self.outcome.kinds.items():
            facts = self._facts_of(figures)
            yield (
                f"{kind:8}{facts['calls_per_second']:>11,}{facts['jobs_per_second']:>12,}"
                f"{facts['p50_ms']:>10}{facts['p90_ms']:>10}{facts['p99_ms']:>10}"
                f"{facts['p99_9_ms']:>10}{facts['max_ms']:>10}  {facts['slow']:,}"
            )

    def _ran_out_line(self) -> str:
        jobs_per_second = self.outcome.kinds[Kind.DEQUEUE].jobs / self.outcome.seconds
        cure = "--fill makes some"
        if jobs_per_second and math.isfinite(self.seconds):
            whole_seconds = self.warm_up_seconds + self.seconds
            enough = math.ceil(_RESERVE * jobs_per_second * whole_seconds)
            cure = f"--fill {enough} may be enough for {self.seconds:g} s"
        return (
            f"ran out of jobs after {self.outcome.seconds:.2f} s, which the figures are of: {cure}"
        )

    def _schedule_lines(self, schedule: Schedule) -> Iterator[str]:
        kept = schedule.kept
        were = "was" if kept.due == 1 else "were"
        yield (
            f"schedule: {how_many(kept.due, 'call')} {were} due, {kept.started:,} started. More "
            f"than {1000 * LATE_AFTER_SECONDS:g} ms late: {kept.late_all_busy:,} as all "
            f"connections were busy, {kept.late_to_wake:,} as this process woke up late; the "
            f"latest by {1000 * kept.latest_seconds:,.1f} ms"
        )
        behind = f"{1000 * kept.behind_seconds:,.1f} ms behind schedule"
        if kept.kept_up:
            yield f"ended {behind}"
            return
        cpu = f"{self.outcome.cpu_share:.0%} of a CPU"
        if self.outcome.cpu_share > _BUSY_CPU_SHARE:
            reason = f"this process could not: it used {cpu}; share the rate among several"
        else:
            reason = (
                f"all connections were busy while this process used {cpu}; the service or "
                "the machine is the limit, or --concurrency is too low"
            )
        yield f"NOT KEPT UP, ended {behind}: {reason}"
