"""`pinlater-admin shard drain`: a shard takes no new jobs, and gets rid of those that it has.

    dequeue-only, followed by all  ->  --move: scheduled jobs go to other shards
                                   ->  --wait: until nothing is pending or running

What a shard says it holds was counted after it followed, so that nothing can be added to it but
by its own jobs: those that become due, or fail and are to be retried later.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pinlaterd.cli import options
from pinlaterd.cli.command_line import confirm, fail, yes_option
from pinlaterd.cli.frames import ListedShard, ShardJobs, shards_of, take_sample
from pinlaterd.cli.moving import Kept, Move, ShardCalls
from pinlaterd.cli.rendering import print_json, printable, shown_time
from pinlaterd.cli.shards import set_dequeue_only, shard
from pinlaterd.config.files import lock
from pinlaterd.config.layout import move_lock, shard_endpoint
from pinlaterd.errors import QueueNotFound
from pinlaterd.model import JobRecord, JobState
from pinlaterd.wire.shard_caller import ShardCallers

_POLL_SECONDS = 0.5
_REPORT_SECONDS = 2.0  # no figure is older
_RATE_SECONDS = 30.0
_MOST_KEPT_SHOWN = 10


class Drained(NamedTuple):
    """How a drain ended. `latest_ms`: the latest run-after of a scheduled job."""

    jobs: ShardJobs | None
    latest_ms: int | None
    moved: int
    kept: Sequence[Kept]


@shard.command()
@click.argument("name")
@click.option("--wait", is_flag=True, help="Return once nothing is pending or running there.")
@click.option(
    "--move", is_flag=True, help="Move jobs that are scheduled for later to other shards."
)
@yes_option
@options.json_option
@options.deployment_options
def drain(*, name: str, wait: bool, move: bool, yes: bool, as_json: bool) -> None:
    """Have shard NAME take no new jobs, so that it becomes empty.

    Once this returns, no job is enqueued there any more. Jobs that are scheduled for later do not
    hold up --wait: --move enqueues them on other shards with the attempts that they
    have left; what is due within 10 s runs where it is. Their old descriptors tell the
    new ones as long as succeeded jobs are kept. No job is lost if a --move is cut short, but
    some may be in both places then.

    \b
    Examples:
      pinlater-admin shard drain 3 --wait
      pinlater-admin shard drain 3 --wait --move --yes && pinlater-admin shard remove 3
    """
    if move:
        confirm(f"Give the scheduled jobs of shard {name} new descriptors, elsewhere?", yes=yes)
    acts = set_dequeue_only(name, on=True, yes=yes).acts
    options.enter()  # the paths of sockets have to be short
    with ShardCallers(shard_endpoint) as callers, _Bar(f"draining shard {name}") as bar:
        found = _Drain(name, callers, bar).run(wait=wait, move=move)
    _tell(name, found, acts=acts, as_json=as_json)


class _Bar(contextlib.ExitStack):
    """How far it is, on a terminal; silent elsewhere."""

    def __init__(self, what: str) -> None:
        super().__init__()
        console = Console(stderr=True)
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} jobs"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=_RATE_SECONDS,
            disable=not console.is_terminal,
        )
        self._progress = self.enter_context(progress)
        self._what = what
        self._task: TaskID | None = None

    def left(self, jobs: int) -> None:
        """So many are to go. If there are more than before, the whole is more than it was."""
        if self._task is None:
            self._task = self._progress.add_task(self._what, total=jobs, rate="")
        task = self._progress.tasks[0]
        total = max(task.total or 0, task.completed + jobs)
        speed = f"{task.speed:,.0f}/s" if task.speed else ""
        self._progress.update(
            self._task, description=self._what, total=total, completed=total - jobs, rate=speed
        )

    def did(self, jobs: int) -> None:
        if self._task is not None:
            self._progress.advance(self._task, jobs)

    def say(self, text: str) -> None:
        if self._task is None:
            self._task = self._progress.add_task(text, total=0, rate="")
        self._progress.update(self._task, description=text)


class _Drain:
    """One shard on its way to being empty."""

    def __init__(self, name: str, callers: ShardCallers, bar: _Bar) -> None:
        self._name = name
        self._callers = callers
        self._bar = bar
        self._moved = 0
        self._kept: Sequence[Kept] = ()

    def run(self, *, wait: bool, move: bool) -> Drained:
        found = self._look(counts_scheduled=move)
        if move:
            self._move()
            time.sleep(_REPORT_SECONDS)
            found = self._look(counts_scheduled=True)
        while wait and not self._is_empty(found, move=move):
            time.sleep(_POLL_SECONDS)
            found = self._look(counts_scheduled=move)
            if move and found is not None and found["scheduled"] > len(self._kept):
                self._move()
        latest_ms = self._latest_ms() if found is not None and found["scheduled"] else None
        return Drained(found, latest_ms, self._moved, self._kept)

    def _is_empty(self, jobs: ShardJobs | None, *, move: bool) -> bool:
        if jobs is None:
            return False
        to_be_moved = jobs["scheduled"] - len(self._kept) if move else 0
        return not (jobs["pending"] or jobs["in_progress"] or to_be_moved > 0)

    def _look(self, *, counts_scheduled: bool) -> ShardJobs | None:
        found = self._shards().get(self._name)
        if found is None:
            fail(f"shard {self._name} is not part of the service any more")
        jobs = found["jobs"] if found["state"] == "serving" else None
        if jobs is None:
            doing = "counting its jobs" if found["state"] == "serving" else found["state"]
            self._bar.say(f"shard {self._name} is {doing}")
        else:
            scheduled = jobs["scheduled"] if counts_scheduled else 0
            self._bar.left(jobs["pending"] + jobs["in_progress"] + scheduled)
        return jobs

    def _shards(self) -> dict[str, ListedShard]:
        return {shard["name"]: shard for shard in shards_of(take_sample())}

    def _move(self) -> None:
        try:
            sole = lock(move_lock(self._name), patient=False)
        except BlockingIOError:
            fail(f"another command moves the jobs of shard {self._name}; wait until it has ended")
        with sole:
            move = Move(self._calls(self._name), self._takers, self._note_moved)
            move.run()
        self._kept = move.kept

    def _note_moved(self, count: int) -> None:
        self._moved += count
        self._bar.did(count)

    def _takers(self) -> list[ShardCalls]:
        return [
            self._calls(shard["name"])
            for shard in self._shards().values()
            if shard["name"] != self._name
            and shard["state"] == "serving"
            and not shard["dequeue_only"]
            and not shard["ailing"]
        ]

    def _calls(self, name: str) -> ShardCalls:
        return ShardCalls(self._callers[name])

    def _latest_ms(self) -> int | None:
        calls = self._calls(self._name)
        found: list[JobRecord] = []
        for queue in calls.queues():
            with contextlib.suppress(QueueNotFound):  # deleted meanwhile
                found += islice(calls.scan(queue, JobState.PENDING, future=True), 1)
        return max((record.run_after_ms for record in found), default=None)


def _tell(name: str, found: Drained, *, acts: bool, as_json: bool) -> None:
    jobs = found.jobs
    if as_json:
        facts = {
            "shard": name,
            "dequeue_only": True,
            "acts": acts,
            "jobs": jobs,
            "latest_run_after_ms": found.latest_ms,
            "moved": found.moved,
            "kept": [kept._asdict() for kept in found.kept],
        }
        print_json(facts)
        return
    if found.moved:
        click.echo(f"{found.moved:,} scheduled jobs were moved to other shards")
    for kept in found.kept[:_MOST_KEPT_SHOWN]:
        click.echo(f"  not moved: {kept.descriptor}: {printable(kept.reason)}")
    if len(found.kept) > _MOST_KEPT_SHOWN:
        click.echo(f"  … and {len(found.kept) - _MOST_KEPT_SHOWN:,} more")
    if jobs is None:
        click.echo(f"shard {name} does not serve, or counts its jobs: what it holds is not known")
        return
    click.echo(
        f"shard {name} holds {jobs['pending']:,} pending and {jobs['in_progress']:,} running jobs"
    )
    if jobs["scheduled"]:
        latest = "" if found.latest_ms is None else f", the last for {shown_time(found.latest_ms)}"
        click.echo(
            f"and {jobs['scheduled']:,} scheduled for later{latest}: wait for them, or have them "
            f"moved: `pinlater-admin shard drain {name} --wait --move`"
        )
    elif not (jobs["pending"] or jobs["in_progress"]):
        click.echo(f"`pinlater-admin shard remove {name}` takes it out of the service")
