"""The command line `pinlater-admin`; `top` and what concerns shards are in modules of their own."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from pinlaterd import __version__
from pinlaterd.cli import command, operations, service_status
from pinlaterd.cli.shards import carry_out
from pinlaterd.config import edit
from pinlaterd.config.kinds import KINDS
from pinlaterd.config.layout import ETC, QUEUES_FILE
from pinlaterd.config.load import load_config
from pinlaterd.config.password import hash_password
from pinlaterd.errors import ConfigError, ConnectionFailed, PinLaterError, how_many
from pinlaterd.lifecycle import ExitCode
from pinlaterd.model import (
    ALL_PRIORITIES,
    QUEUE_NAME,
    JobChoice,
    JobRecord,
    JobState,
)
from pinlaterd.stats import merge
from pinlaterd.status import between, worst_first

if TYPE_CHECKING:
    from pinlaterd.client import Client
    from pinlaterd.client.failures import Grouping

PASSWORD_ENVIRONMENT = "PINLATERD_ADMIN_PASSWORD"  # noqa: S105  a variable's name

# what `stats` shows -> the counter behind it, without `<queue>_`
_RATES = {
    "enqueued": "enqueue",
    "dequeued": "dequeue",
    "succeeded": "ack_succeeded",
    "failed": "ack_failed",
}


@click.group(
    "pinlater-admin",
    cls=command.CommandLine,
    modules={
        "audit": ["record"],
        "events": ["record"],
        "history": ["record"],
        "job-type": ["job_types"],
        "operation": ["operations"],
        "server": ["servers"],
        "shard": ["shards", "drain", "failover"],
        "top": ["service_status"],
        "user": ["users"],
    },
    context_settings=command.WIDTH,
)
@click.version_option(__version__, prog_name="pinlater-admin")
@command.target_options
def cli() -> None:
    """Look at a pinlaterd service, and mend what is in it.

    The service is that of the deployment in the current folder, or in --dir DIR.

    Examples:
      pinlater-admin status
      pinlater-admin top
      pinlater-admin shard drain 3 --wait
      pinlater-admin queue stats mail
      pinlater-admin job scan mail failed
      pinlater-admin --dir /srv/pinlaterd job retry mail
    """


@cli.group()
def config() -> None:
    """Check the configuration."""


@config.command()
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@command.admin_options
def check(*, folder: Path | None) -> None:
    """Report every mistake in DIR/etc at once. Exit 1 if there is one.

    Warns of keys of PinLater's JSON that are ignored, and of files with passwords that others can
    read.

    Example: pinlater-admin config check /srv/pinlaterd
    """
    etc = (folder if folder is not None else command.directory()) / ETC
    try:
        found = load_config(etc)
    except ConfigError as error:
        text = "\n".join(map(command.printable_line, error.problems))
        command.show({"ok": False, "problems": error.problems, "warnings": []}, text)
        sys.exit(ExitCode.FAILURE)
    settings = f"settings of {how_many(len(found.queues), 'queue')}"
    lines = [
        *(f"warning: {command.printable_line(warning)}" for warning in found.warnings),
        f"{etc}: fine; shards {', '.join(found.shards)}; {settings}",
    ]
    facts = {"ok": True, "problems": [], "warnings": list(found.warnings)}
    facts |= {"shards": list(found.shards), "queues": list(found.queues)}
    command.show(facts, "\n".join(lines))


@cli.command("hash-password")
@command.json_option
def hash_password_command() -> None:
    """Print the hash of a password, for admin_password_hash in etc/pinlaterd.yaml.

    The password is asked for on a terminal, without echo; in a pipe it is the first line of
    standard input. It is never an argument, which everyone on the machine could read.

    Examples:
      pinlater-admin hash-password
      pinlater-admin hash-password < /run/secrets/pinlaterd
    """
    hashed = hash_password(command.read_password("Password", twice=True))
    command.show({"hash": hashed}, hashed)


@cli.command()
@command.admin_options
def status() -> None:
    """Show processes, shards, problems and warnings. Exit 1 if a router or shard does not serve.

    What else it shows, such as mistakes in etc/ and warnings, leaves exit 0. Exit 1 also if the
    coordinator does not answer.

    Examples:
      pinlater-admin status
      pinlater-admin status --json --stats-url http://queue.example.com:9999
    """
    service_status.report(service_status.fetch(whole=True))


# --- restart ----------------------------------------------------------------------------------


@cli.command()
@click.argument("kind", type=click.Choice([kind.name for kind in KINDS]))
@click.argument("name", metavar="[NAME|all]", default="all")
@command.admin_options
def restart(*, kind: str, name: str) -> None:
    """Restart the processes of a kind, one after the other, with what is installed now.

    No client meets an error. Calls that need a shard wait meanwhile, for shard_restart_grace_ms at
    most; NAME is one shard. While a router, or a process of the HTTP interface, is restarted, a
    second one serves at the same listening socket. Exit 1 if the new one does not come up; then the
    old one goes on.

    Examples:
      pinlater-admin restart router
      pinlater-admin restart shard 1
      pinlater-admin restart shard all
      pinlater-admin restart coordinator
    """
    from pinlaterd.deployment import restarts

    [chosen] = [one for one in KINDS if one.name == kind]
    with command.waiting("restarting") as tell:
        done = restarts.restart(command.directory(), chosen, tell, member=name)
    lines = [f"{one.program} is restarted, pid {one.pid}, in {one.seconds:.1f} s" for one in done]
    command.show([one._asdict() for one in done], "\n".join(lines) or f"no {kind} is to run here")


# --- queues -----------------------------------------------------------------------------------


@cli.group()
def queue() -> None:
    """List, create, delete queues; see what is in them; limit and pause them."""


@queue.command("list")
@command.option("--long", is_flag=True, help="Show what waits and runs, and the verdict.")
@command.admin_options
def list_queues(*, long: bool) -> None:
    """List the queues, a name a line; with --long those that need somebody first.

    Examples:
      pinlater-admin queue list
      pinlater-admin queue list --long
    """
    if not long:
        command.show_queue_names()
        return
    queues = worst_first(service_status.take_frame()["queues"])
    command.show(queues, lambda: command.print_table(service_status.LIST_COLUMNS, queues))


@queue.command()
@click.argument("name")
@command.admin_options
def create(*, name: str) -> None:
    """Create a queue. One that exists is left as it is.

    Example: pinlater-admin queue create mail
    """
    with command.connect() as client:
        client.create_queue(name)
    command.show({"created": name}, f"queue {name} is there")


@queue.command()
@click.argument("name")
@command.option(
    "--password-file", type=click.File("r"), metavar="F|-", help="Its first line is the password."
)
@command.admin_options
def delete(*, name: str, password_file: IO[str] | None) -> None:
    """Delete a queue with all its jobs.

    Asks for the admin password on a terminal; else it is the first line of standard input,
    unless --password-file or the environment's PINLATERD_ADMIN_PASSWORD has it.

    Examples:
      pinlater-admin queue delete mail
      pinlater-admin queue delete mail --password-file /run/secrets/pinlaterd
    """
    if password_file is not None:
        password = command.password_in(password_file)
    elif PASSWORD_ENVIRONMENT in os.environ:
        password = os.environ[PASSWORD_ENVIRONMENT]
    else:
        password = command.read_password("Admin password")
    with command.connect() as client, command.waiting("deleting the queue"):
        client.delete_queue(name, password=password)
    command.show({"deleted": name}, f"queue {name} is gone")


@queue.command()
@click.argument("name")
@command.option(
    "--seconds",
    type=command.Amount(command.MAX_SECONDS, least=0.1),
    default=3.0,
    help="Over how long rates are taken.",
)
@command.admin_options
def stats(*, name: str, seconds: float) -> None:
    """Show how many jobs are in each state, how many come and go in a second, and the verdict.

    SCHEDULED are the PENDING ones whose run-after is still to come. Large numbers are those of the
    last second; they have a >= where a shard is still counting.

    Example: pinlater-admin queue stats mail --seconds 10
    """
    with command.connect() as client, command.waiting("counting"):
        counts = {"SCHEDULED": client.count(name, JobState.PENDING, future=True)}
        counts |= {state.name: client.count(name, state) for state in JobState}
    with command.waiting(f"measuring for {seconds:g} s"):
        rates = _rates(name, seconds)
    frame = service_status.take_frame()
    shown = next((one for one in frame["queues"] if one["name"] == name), None)
    verdict = shown["verdict"] if shown is not None else None
    # A count ends at the server's limit for each shard and priority; a frame is a second old.
    limit = frame.get("count_limit", command.server_settings().count_limit)
    bounds = {state: ">=" for state, jobs in counts.items() if jobs >= limit}
    if shown is not None and all(shard["jobs"] is not None for shard in frame["shards"]):
        counts |= {state: max(counts[state], shown[state.lower()] or 0) for state in bounds}
        bounds = {}

    def print_tables() -> None:
        if verdict is not None:
            click.echo(f"{command.printable(verdict['text'])}\n")
        jobs: command.Column = ("#jobs", lambda state: f"{bounds.get(state[0], '')}{state[1]}")
        command.print_table((("state", 0), jobs), counts.items())
        click.echo()
        per_second: command.Column = ("#per second", lambda rate: f"{rate[1]:.1f}")
        command.print_table((("jobs", 0), per_second), rates.items())

    facts = {"queue": name, "jobs": counts, "per_second": rates, "verdict": verdict}
    command.show(facts | {"at_least": {state: state in bounds for state in counts}}, print_tables)


@cli.group()
def worker() -> None:
    """Show the workers: the sources that call for jobs."""


@worker.command("list")
@command.option("--queue", "of_queue", default="", metavar="QUEUE", help="Those of one queue.")
@command.files_options
def list_workers(*, of_queue: str) -> None:
    """List who called for which queue, and when last; how many jobs a second each was handed, how
    many it holds, since when their claims were not renewed, and how many are near their time-out.

    Examples:
      pinlater-admin worker list
      pinlater-admin worker list --queue mail --json
    """
    found = service_status.take_workers()
    rows = [one for one in found["workers"] if of_queue in ("", one["queue"])]
    columns = service_status.WORKER_COLUMNS
    command.show({**found, "workers": rows}, lambda: command.print_table(columns, rows))
    if not found["all_claims"]:
        click.echo("not all claims were looked at: there are too many", err=True)


def _rates(name: str, seconds: float) -> dict[str, float]:
    """Measure over at least `seconds` how fast the counters of all servers grow, in 1/s."""
    before = service_status.take_sample()
    time.sleep(seconds)
    now = service_status.take_sample()
    counters = merge(between(before, now).values())["counters"]
    return {
        what: round(counters.get(f"{name}_{counter}", 0) / (now.at - before.at), 2)
        for what, counter in _RATES.items()
    }


def _rate(text: str) -> float:
    """Read jobs per second; infinite for none."""
    with contextlib.suppress(ValueError):
        if text == "none":
            return math.inf
        if 0 <= float(text) < math.inf:
            return float(text)
    raise click.BadParameter(f"{text!r} is neither a number of jobs per second nor none")


def _queue_name(text: str) -> str:
    if not QUEUE_NAME.match(text):
        raise click.BadParameter(f"{text!r} is no queue name; use letters, digits and underscores")
    return text


_name_argument = click.argument("name", type=_queue_name)


# a number below 0 is told to be wrong, and not taken for an option
@queue.command(context_settings={"ignore_unknown_options": True})
@_name_argument
@click.argument("rate", type=_rate, metavar="JOBS_PER_SECOND|none")
@command.files_options
def limit(*, name: str, rate: float) -> None:
    """Let no more jobs of queue NAME be dequeued in a second, over the whole cluster.

    Fractions are allowed (0.1: one in ten seconds); 0 stops dequeues; none means no limit.

    Examples:
      pinlater-admin queue limit mail 100
      pinlater-admin queue limit mail none
    """
    is_limited = math.isfinite(rate)
    shown = f"a limit of {rate:g} jobs/s" if is_limited else "no limit"
    etc = command.directory() / ETC
    _edit_queue(
        name,
        lambda: edit.set_limit(etc, name, rate if is_limited else None),
        f"queue {name} has {shown}",
    )


@queue.command()
@_name_argument
@command.option("--reason", default="", metavar="TEXT", help="Why, which others are shown.")
@command.option("--by", default="", metavar="NAME", help="Who: by default the system's user.")
@command.files_options
def pause(*, name: str, reason: str, by: str) -> None:
    """Let no jobs of queue NAME be dequeued until it is resumed. Its limit is kept.

    Who has paused it, when and why is noted in etc/queues.yaml, and part of its verdict.

    Examples:
      pinlater-admin queue pause mail
      pinlater-admin queue pause mail --reason "disk check"
    """
    etc, note = command.directory() / ETC, {"by": by or command.user_name(), "reason": reason}
    _edit_queue(
        name,
        lambda: edit.set_paused(etc, name, paused=True, **note),
        f"queue {name} is paused",
    )


@queue.command()
@_name_argument
@command.files_options
def resume(*, name: str) -> None:
    """Let jobs of queue NAME be dequeued again, under the limit that it had.

    Example: pinlater-admin queue resume mail
    """
    etc = command.directory() / ETC
    _edit_queue(name, lambda: edit.set_paused(etc, name, paused=False), f"queue {name} is resumed")


def _edit_queue(name: str, change: Callable[[], edit.Edited], done: str) -> None:
    acts = carry_out(change, QUEUES_FILE, done)
    # Settings may come before their queue; mistyped ones look the same, and do nothing.
    with contextlib.suppress(PinLaterError, ConnectionFailed), command.connect() as client:
        if name not in client.queue_names():
            click.echo(
                f"warning: there is no queue {name} yet; `pinlater-admin queue list` shows those "
                "there are",
                err=True,
            )
    facts = edit.limit_settings(command.directory() / ETC, name)
    command.show({"queue": name, **facts._asdict(), "acts": acts})


# --- jobs -------------------------------------------------------------------------------------

_regex_option = command.option(
    "--body-regex", metavar="RE2", help="Only jobs whose body this is found in."
)
_PROGRESS_MS = 1_000  # after so long a search says how far it got


@cli.group(modules={"find": ["job_find"], "restore": ["operations"]})
def job() -> None:
    """Look at jobs, retry them, delete them."""


@job.command()
@click.argument("descriptors", nargs=-1, metavar="DESCRIPTOR...")
@command.key_options
@command.admin_options
def lookup(*, descriptors: tuple[str, ...], queue: str | None, keys: tuple[str, ...]) -> None:
    """Show all that is known of jobs. Exit 1 if one of them is unknown.

    Examples:
      pinlater-admin job lookup mail:s1:p1:1 mail:s2:p1:7
      pinlater-admin job lookup --queue mail --key order-17
    """
    command.show_jobs(descriptors, queue, keys)


_COLUMNS: Sequence[command.Column] = (
    ("descriptor", attrgetter("descriptor")),
    ("run after", lambda job: command.shown_time(job.run_after_ms)),
    ("#attempts left", lambda job: f"{job.attempts_remaining} of {job.attempts_allowed}"),
    ("custom status", attrgetter("custom_status")),
)


@job.command()
@click.argument("queue")
@click.argument("state", type=command.STATE)
@command.option(
    "--priority", type=command.PRIORITY, help="Jobs of this priority only  [default: all]"
)
@command.option("--future", is_flag=True, help="Jobs whose run-after is still to come.")
@command.option("--newest", is_flag=True, help="Jobs that have ended, the most recent end first.")
@_regex_option
@command.choice_options
@command.option("--limit", type=command.COUNT, default=100, help="At most so many jobs.")
@command.progress_option
@command.partial_option
@command.admin_options
def scan(
    *,
    queue: str,
    state: str,
    priority: int | None,
    future: bool,
    newest: bool,
    body_regex: str | None,
    limit: int,
    progress: bool | None,
    accept_partial: bool,
    **conditions: Any,
) -> None:
    """List jobs of QUEUE in STATE, the latest run-after first.

    With --since or --before they come by their ends, as with --newest.

    Examples:
      pinlater-admin job scan mail failed --newest --limit 20
      pinlater-admin job scan mail failed --since 02:40:00 --status-regex 'smtp[0-9]'
      pinlater-admin job scan mail pending --future --body-regex '^to: ada'
    """
    from pinlaterd.client import calls

    choice = JobChoice(**conditions)
    by_end = newest or (choice.ended_since_ms, choice.ended_before_ms) != (None, None)
    call = calls.scan(
        queue,
        command.state_of(state),
        priority=priority,
        future=future,
        body_regex=body_regex,
        page_size=min(limit, 1000),
        newest_end_first=by_end,
        max_ms=_PROGRESS_MS,
        accept_partial=accept_partial,
        choice=choice or None,
    )
    records: list[JobRecord] = []
    looked_at, missing = 0, set[str]()
    with command.connect() as client:
        for page in calls.pages(client.run, call):
            records += page.jobs
            looked_at += page.looked_at
            missing.update(page.missing_shards or ())
            if command.shows_progress(asked=progress):
                about = "?" if page.in_state is None else f"{page.in_state:,}"
                found = f"{len(records):,} found"
                click.echo(f"looked at {looked_at:,} of about {about} jobs, {found}", err=True)
            if len(records) >= limit:
                break
    command.warn_without(missing)
    del records[limit:]
    facts = [command.record_facts(record) for record in records]
    columns = list(_COLUMNS)
    if by_end:
        columns[1] = ("ended", lambda job: command.shown_time(job.updated_at_ms))
    command.show(facts, lambda: command.print_table(columns, records))


@job.command()
@click.argument("queue")
@command.option(
    "--by",
    type=click.Choice(["message", "place", "worker"]),
    default="message",
    help="What the jobs of a group have in common.",
)
@command.option(
    "--since",
    "since_ms",
    type=command.past_moment,
    metavar="TIME",
    help="Only jobs that failed at this time or later, such as 03:08:00 (UTC).",
)
@command.partial_option
@command.admin_options
def failures(*, queue: str, by: Grouping, since_ms: int | None, accept_partial: bool) -> None:
    """Show the newest 10,000 failed jobs of QUEUE in groups of those that failed alike.

    The message is what the last attempt said, with # for what differs from job to job.

    Examples:
      pinlater-admin job failures mail
      pinlater-admin job failures mail --by worker --since 02:40:00
    """
    from pinlaterd.client.failures import FailureWindow, facts_of, shown_workers

    window = FailureWindow(queue, since_ms, accept_partial=accept_partial)
    with command.connect() as client, command.waiting("looking at failed jobs") as tell:
        while window.call is not None:
            window.take(client.run(window.call))
            tell(f"looked at {how_many(len(window.failures), 'failed job')}")
    command.warn_without(window.missing_shards)
    facts, grouped = facts_of(window, by, round(time.time() * 1000)), len(window.failures)
    columns: Sequence[command.Column] = (
        ("#jobs", "jobs"),
        ("#%", lambda group: f"{group['jobs'] / grouped:.0%}".removesuffix("%")),
        ("first", lambda group: command.shown_time(group["first_ms"])),
        ("last", lambda group: command.shown_time(group["last_ms"])),
        ("workers", lambda group: shown_workers(group["workers"])),
        *(() if by == "message" else ((by, "key"),)),
        ("message", "message"),
        *(() if by == "place" else (("place", "place"),)),
    )

    def print_groups() -> None:
        times = [command.shown_time(at_ms) for at_ms in window.times_ms or ()]
        every = "?" if window.failed is None else f"{window.failed:,}"
        of = f" ({' to '.join(times)})" if times else ""
        click.echo(f"{queue}: the newest {grouped:,} of {every} failed jobs{of}")
        command.print_table(columns, facts["groups"])

    command.show(facts, print_groups)


_MOST_JOBS = 2**31 - 1  # of a retry or a delete whose jobs are chosen, unless it says
_USUAL_JOBS = 1000


_change_options = command.together(
    click.argument("descriptors", nargs=-1, metavar="[DESCRIPTOR...|-]"),
    command.option(
        "--priority",
        type=command.PRIORITY,
        help="Jobs of this priority only  [default: 1; of chosen jobs: all]",
    ),
    _regex_option,
    command.choice_options,
    command.option(
        *("--limit", "--first", "limit"),
        type=command.COUNT,
        help="At most so many jobs  [default: 1000; of chosen jobs: all]",
    ),
    command.option("--preview", is_flag=True, help="Only say how many jobs that would be."),
)


def _chosen(
    descriptors: Sequence[str],
    body_regex: str | None,
    priority: int | None,
    limit: int | None,
    *,
    by_age: bool = False,
    **conditions: Any,
) -> dict[str, Any]:
    """Return the parameters of a retry or a delete that say which jobs it is for."""
    named = sys.stdin.read().split() if tuple(descriptors) == ("-",) else list(descriptors)
    choice = JobChoice(named if descriptors else None, **conditions)
    usual = not (choice or by_age)  # --body-regex alone is as it was
    return {
        "priority": priority or (1 if usual else ALL_PRIORITIES),
        "limit": limit or (_USUAL_JOBS if usual else _MOST_JOBS),
        "body_regex": body_regex,
        "choice": choice or None,
    }


@job.command()
@click.argument("queue")
@_change_options
@command.option("--attempts", type=command.COUNT, default=1, help="Attempts that each job gets.")
@command.option(
    "--delay-seconds",
    type=command.Amount(command.MAX_DELAY_SECONDS, least=0),
    help="Run them so much later  [default: now]",
)
@command.option(
    "--spread",
    type=command.Amount(1_000_000.0, least=0.001),
    metavar="PER_SECOND",
    help="Have so many of them become ready in a second  [default: all at once]",
)
@command.admin_options
def retry(
    *,
    queue: str,
    attempts: int,
    delay_seconds: float | None,
    spread: float | None,
    preview: bool,
    **which: Any,
) -> None:
    """Make failed jobs of QUEUE pending again, the oldest first, or those that are chosen.

    Jobs are chosen by their descriptors (-: those on standard input), or by conditions, which all
    have to be met.

    Examples:
      pinlater-admin job retry mail --attempts 3 --limit 10000
      pinlater-admin job retry mail mail:s1:p1:1 mail:s2:p1:7
      pinlater-admin job retry mail --body-regex '^to: ada' --spread 50
      pinlater-admin job retry mail --message 'Timeout: smtp# is away' --before 03:08:00 --first 10
    """
    from pinlaterd.client import calls

    at_ms = round((time.time() + delay_seconds) * 1000) if delay_seconds else None
    call = _chosen(**which) | {"attempts_to_allow": attempts, "run_after_ms": at_ms}
    with command.connect() as client:
        if preview or spread is not None:
            with command.waiting("counting jobs"):
                jobs = client.retry_failed(queue, dry_run=True, **call)
            if preview:
                command.show({"would_retry": jobs}, f"{how_many(jobs, 'job')} would be retried")
                return
            call["limit"] = max(1, jobs)
            call["spread_ms"] = round(jobs * 1000 / spread) if spread else None
        with command.waiting("retrying jobs") as tell:
            retried = client.run(command.telling(calls.retry_failed(queue, **call), tell))
    command.show({"retried": retried}, f"{how_many(retried, 'job')} made pending again")


@job.command("delete")
@click.argument("queue")
@click.argument("state", type=command.STATE)
@_change_options
@command.option(
    "--unchanged-since",
    "unchanged_since_ms",
    type=command.past_moment,
    metavar="TIME",
    help="Only jobs that were enqueued, claimed or renewed last before this time.",
)
@click.option("--no-trash", is_flag=True, help="Don't keep what is deleted, which is quicker.")
@command.yes_option
@command.admin_options
def delete_jobs(
    *,
    queue: str,
    state: str,
    unchanged_since_ms: int | None,
    no_trash: bool,
    yes: bool,
    preview: bool,
    **which: Any,
) -> None:
    """Delete jobs of QUEUE in STATE, which may be chosen as by `job retry`.

    In the deployment's folder the dashboard, if it runs, deletes them, and keeps them for 24 hours
    (256 MiB; beyond, it asks): `job restore` enqueues them again. Else that is said before.

    Examples:
      pinlater-admin job delete mail failed --limit 100
      pinlater-admin job delete mail pending --body-regex '@example[.]com' --yes
      pinlater-admin job delete mail failed mail:s1:p1:1 --yes
      pinlater-admin job delete mail pending --unchanged-since 03:08:00
    """
    call = _chosen(**which, by_age=unchanged_since_ms is not None)
    in_state = command.state_of(state)
    if unchanged_since_ms is not None and in_state in (JobState.SUCCEEDED, JobState.FAILED):
        # The shards check this time as they delete, but only that of an end.
        choice = call["choice"] or JobChoice()
        before_ms = choice.ended_before_ms
        if before_ms is None or before_ms > unchanged_since_ms:
            call["choice"] = choice._replace(ended_before_ms=unchanged_since_ms)
        unchanged_since_ms = None
    with command.connect() as client:
        change = partial(_delete, client, queue, in_state, call, unchanged_since_ms)
        if preview:
            jobs = change(dry_run=True)
            command.show({"would_delete": jobs}, f"{how_many(jobs, 'job')} would be deleted")
            return
        keeps = not no_trash and operations.keeps_deleted()
        asks = not yes and unchanged_since_ms is not None
        counted = change(dry_run=True) if keeps or asks else None
        command.confirm(_question(queue, in_state, call, counted if asks else None), yes=yes)
        if keeps and counted:
            operations.delete(queue, in_state, call, unchanged_since_ms, counted, yes=yes)
            return
        deleted = 0 if keeps else change()
    command.show({"deleted": deleted}, f"{how_many(deleted, 'job')} deleted")


def _delete(
    client: Client,
    queue: str,
    state: JobState,
    call: Mapping[str, Any],
    since_ms: int | None,
    *,
    dry_run: bool = False,
) -> int:
    """Delete the jobs that `call` chooses, or, if there is a time, those of them that nothing has
    changed since; return how many, or of a dry run how many it would delete."""
    from pinlaterd.client import calls

    with command.waiting("counting jobs" if dry_run else "deleting jobs") as tell:
        if since_ms is None:
            made = calls.delete_jobs(queue, state, dry_run=dry_run, **call)
            return client.run(command.telling(made, tell))
        if call["choice"] is not None and call["choice"].descriptors is not None:
            return operations.delete_named(client, queue, state, call, since_ms, dry_run=dry_run)
        which = {"body_regex": call["body_regex"], "choice": call["choice"]}
        which |= {"priority": call["priority"] or None, "page_size": _USUAL_JOBS}
        changed, earliest_ms = 0, math.inf
        for future in (True, False):
            for page in calls.pages(client.run, calls.scan(queue, state, future=future, **which)):
                unchanged = [job for job in page.jobs if job.updated_at_ms < since_ms]
                if not unchanged:
                    continue
                if dry_run:  # a job that falls due meanwhile comes in both scans
                    changed += sum(future or job.run_after_ms < earliest_ms for job in unchanged)
                    earliest_ms = unchanged[-1].run_after_ms if future else earliest_ms
                else:  # at once, since a delete by name checks nothing but the state
                    names = [job.descriptor for job in unchanged[: call["limit"] - changed]]
                    choice, of_all = JobChoice(names), ALL_PRIORITIES
                    changed += client.delete_jobs(queue, state, priority=of_all, choice=choice)
                tell(f"{how_many(changed, 'job')} so far")
                if changed >= call["limit"]:
                    return int(call["limit"])
        return changed


def _question(queue: str, state: JobState, call: dict[str, Any], counted: int | None) -> str:
    """Return the question whether these jobs are to be deleted, which may have been counted."""
    choice, regex = call["choice"] or JobChoice(), call["body_regex"]
    of_queue = f"of {queue}"
    if call["priority"] != ALL_PRIORITIES:
        of_queue += f", priority {call['priority']},"
    if choice.descriptors is not None:
        counted = len(choice.descriptors)
    if counted is not None:
        return f"Delete {how_many(counted, 'job')} {of_queue} in state {state.name}?"
    matching = f" whose body matches {regex!r}" if regex is not None else ""
    for name, value in choice._asdict().items():
        if value is not None:
            shown = command.shown_time(value) if isinstance(value, int) else repr(value)
            matching += f", {name.removesuffix('_ms').replace('_', ' ')} {shown}"
    jobs = "all jobs" if call["limit"] == _MOST_JOBS else f"up to {how_many(call['limit'], 'job')}"
    return f"Delete {jobs} {of_queue} in state {state.name}{matching}?"


if __name__ == "__main__":
    cli(prog_name="pinlater-admin")
