"""The quickstart's main job; `tools/quickstart` makes what it needs and runs it.

A job for every source file of Python's own library, its path being the body. Worker processes
(examples/wordcount_worker.py) count lines and words and put the figures into the custom status.
Files called __main__.py fail on their first attempt, on purpose; every 50th is scheduled some
seconds ahead. At the end it checks that all this came out as promised, and says so or exits 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import quickstart_cluster
import quickstart_example
import quickstart_store
from quickstart_store import Store, StoreMissing

from pinlaterd.client import Client, ConnectionFailed, Job, JobRecord, JobState, PinLaterError
from pinlaterd.config.layout import ETC, SHARDS_FILE, STATS_SOCKET, SUPERVISORD_FILE
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import ConfigError, address_of, how_many
from pinlaterd.lifecycle import prepare_streams

REPOSITORY = Path(__file__).resolve().parent.parent
WORKER = REPOSITORY / "examples" / "wordcount_worker.py"
PROGRAMS = Path(sys.executable).parent

ENGINES = ("sqlite", "mysql", "redis")
QUEUE = "quickstart"
SHARDS = 3
WORKERS = 2
ATTEMPTS = 3
FAILS_FIRST = "__main__.py"
SCHEDULED_EVERY = 50
SCHEDULED_AHEAD_MS = 4000
JOBS_A_CALL = 100
GIVE_UP_AFTER_SECONDS = 180.0
REQUEST_SECONDS, CALL_SECONDS = 30, 45.0

_FIGURES = re.compile(r"lines=(\d+) words=(\d+) begun_ms=(\d+)")


class NotAsPromised(Exception):
    """Something did not come out as it should; the message is for whoever runs this."""


class Figures(NamedTuple):
    """What a worker wrote into a job's custom status."""

    lines: int
    words: int
    begun_ms: int


class Enqueued(NamedTuple):
    """This run's jobs, by descriptor."""

    paths: Mapping[str, str]
    scheduled: Mapping[str, int]  # run-after, ms
    seconds: float


def main() -> int:
    prepare_streams()
    defaults = ServerSettings()
    parser = argparse.ArgumentParser(prog="tools/quickstart", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="sqlite", help="what stores the jobs")
    parser.add_argument(
        "--dir", type=Path, help="deployment (this folder; quickstart-ENGINE for another engine)"
    )
    parser.add_argument(
        "--server", metavar="HOST:PORT", help="a MySQL or Redis server to use (a private one)"
    )
    parser.add_argument("--user", default="", help="at that server")
    parser.add_argument(
        "--passwd-env", metavar="NAME", help="the environment's variable with its password"
    )
    parser.add_argument("--port", type=int, help=f"Thrift port ({defaults.port})")
    parser.add_argument("--stats-port", type=int, help=f"HTTP port ({defaults.stats_port})")
    parser.add_argument("--http-port", type=int, help=f"HTTP interface ({defaults.http_port})")
    parser.add_argument("--web-port", type=int, help=f"dashboard port ({defaults.web_port})")
    parser.add_argument("--cluster", action="store_true", help="three servers, one of them killed")
    options = parser.parse_args()
    if options.cluster:
        return run_cluster((options.dir or REPOSITORY / "quickstart-cluster").resolve())
    directory = (options.dir or default_directory(options.engine)).resolve()
    try:
        server = prepare_deployment(directory, options)
        start_service(directory, server)
        with client_of(server, "quickstart:main") as client:
            records = do_main_job(client, server)
            show_results(client, server, records)
        leave_example(directory, server)
    except (NotAsPromised, ConfigError, PinLaterError, ConnectionFailed) as error:
        print(f"\ntools/quickstart: {error}", file=sys.stderr)
        return 1
    show_the_way(directory, server)
    return 0


def run_cluster(directory: Path) -> int:
    """The same with three servers, one of which is killed meanwhile."""
    try:
        servers = quickstart_cluster.prepare(directory)
        hosts = [server.host for server in servers]
        port = quickstart_cluster.THRIFT_PORT
        with Client(hosts, port, source="quickstart:main") as client:
            known = QUEUE in client.queue_names()
            client.create_queue(QUEUE)
            print(f"Queue {QUEUE}: {'there already, reused' if known else 'created'}")
            enqueued = enqueue_library(client)
            victim = quickstart_cluster.most_loaded(servers)
            with workers(hosts, port) as processes, quickstart_cluster.loss_of(victim, servers):
                records = watch(client, enqueued, processes)
            check(records, enqueued)
        quickstart_cluster.bring_back(victim)
    except (
        *(NotAsPromised, PinLaterError, ConnectionFailed),
        *(quickstart_cluster.Failed, StoreMissing),
    ) as error:
        print(f"\ntools/quickstart: {error}", file=sys.stderr)
        return 1
    quickstart_cluster.show_the_way(directory, servers, PROGRAMS)
    return 0


# --- the service ----------------------------------------------------------------------------


def prepare_deployment(directory: Path, options: argparse.Namespace) -> ServerSettings:
    """Write the deployment if there is none; return its settings."""
    ports = {
        "--port": options.port,
        "--stats-port": options.stats_port,
        "--http-port": options.http_port,
        "--web-port": options.web_port,
    }
    given = [word for name, port in ports.items() if port for word in (name, str(port))]
    keep_from_group(directory)
    if (directory / ETC / SHARDS_FILE).exists():
        print(f"Deployment {directory}: there already, its settings hold")
        server = load_config(directory / ETC).server
        if any(
            port not in (None, getattr(server, name.strip("-").replace("-", "_")))
            for name, port in ports.items()
        ):
            raise NotAsPromised(
                f"{directory}/etc/pinlaterd.yaml has other ports than {' '.join(given)}; "
                "change them there, or choose another --dir"
            )
        return server
    given += free_ports(options)
    engine = options.engine
    command = ["init", str(directory), "--engine", engine, "--shards", str(SHARDS), *given]
    run_pinlaterd(command, f"Writing deployment {directory}")
    set_up_demonstration(directory)
    if engine != "sqlite":
        try:
            store = given_store(options) or private_store(directory, engine)
        except NotAsPromised:
            # Half a deployment would be taken for a whole one the next time.
            (directory / ETC / SHARDS_FILE).unlink()
            raise
        text = quickstart_store.shards_text(store, SHARDS)
        (directory / ETC / SHARDS_FILE).write_text(text, encoding="utf-8")
    return load_config(directory / ETC).server


def set_up_demonstration(directory: Path) -> None:
    """Let the dashboard of a new deployment change things, and calls take long: this is a
    demonstration, on loopback, and its machine may be busy."""
    with (directory / ETC / "pinlaterd.yaml").open("a", encoding="utf-8") as file:
        file.write("\n# The quickstart is a demonstration, on loopback.\nweb_writes: true\n")
        file.write(f"request_timeout_ms: {REQUEST_SECONDS * 1000}\n")


def keep_from_group(directory: Path) -> None:
    """Let only its owner write to a checkout's folders, which git makes by the umask: 002 gives
    them to the group, and pinlaterd refuses what others may change."""
    for path in (directory, directory / ETC, directory / ETC / SUPERVISORD_FILE):
        if not path.exists():
            continue
        found = path.stat()
        if found.st_uid == os.geteuid() and found.st_mode & stat.S_IWGRP:
            path.chmod(stat.S_IMODE(found.st_mode) & ~stat.S_IWGRP)
            print(f"{path}: its group may write to it no longer (chmod g-w)")


def free_ports(options: argparse.Namespace) -> list[str]:
    """Return options that give a new deployment ports of its own, where another program, such as an
    earlier quickstart, has the usual ones."""
    defaults, chosen = ServerSettings(), []
    for name, host, usual, wanted in (
        ("--port", defaults.host, defaults.port, options.port),
        ("--stats-port", defaults.stats_host, defaults.stats_port, options.stats_port),
        ("--http-port", defaults.http_host, defaults.http_port, options.http_port),
        ("--web-port", defaults.web_host, defaults.web_port, options.web_port),
    ):
        if wanted is None and is_taken(host, usual):
            port = next(p for p in range(usual + 1, 65536) if not is_taken(host, p))
            print(f"Port {usual} is taken: {name} {port} is used instead")
            chosen += [name, str(port)]
    return chosen


def default_directory(engine: str) -> Path:
    return REPOSITORY if engine == "sqlite" else REPOSITORY / f"quickstart-{engine}"


def given_store(options: argparse.Namespace) -> Store | None:
    """The server that --server names."""
    if options.server is None:
        return None
    host, _, port = options.server.rpartition(":")
    if not host or not port.isdecimal():
        raise NotAsPromised(f"--server {options.server}: expected HOST:PORT")
    passwd_line = f"passwd_env: {options.passwd_env}" if options.passwd_env else ""
    return Store(options.engine, host, int(port), options.user, passwd_line)


def private_store(directory: Path, engine: str) -> Store:
    print(f"Setting up a private {engine} server in {directory}/data ... ", end="", flush=True)
    try:
        store = quickstart_store.add_private_store(directory, engine)
    except (StoreMissing, OSError, subprocess.CalledProcessError) as error:
        print("failed")
        raise NotAsPromised(str(error)) from error
    print("done")
    return store


def start_service(directory: Path, server: ServerSettings) -> None:
    if is_running(directory):
        print("Service: running already")
    else:
        for name, host, port in (
            ("port", server.host, server.port),
            ("stats-port", server.stats_host, server.stats_port),
            ("http-port", server.http_host, server.http_port),
            ("web-port", server.web_host, server.web_port),
        ):
            if port and is_taken(host, port):
                raise NotAsPromised(
                    f"{address_of(host, port)} is taken by another program. Change "
                    f"{name.replace('-', '_')} in {directory}/etc/pinlaterd.yaml, or give a new "
                    f"--dir DIR without --{name}: it gets a free port"
                )
    # Also if it runs: this starts what may be down, and returns once everything serves.
    run_pinlaterd(["up", str(directory)], "Waiting for all shards, under supervisord")


def run_pinlaterd(arguments: Sequence[str], doing: str) -> None:
    print(f"{doing} ... ", end="", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "pinlaterd", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print("failed")
        raise NotAsPromised((done.stderr or done.stdout).strip())
    print("done")


def is_running(directory: Path) -> bool:
    """Whether a coordinator answers in this deployment."""
    with contextlib.chdir(directory), socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(os.fspath(STATS_SOCKET)) == 0


def is_taken(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


# --- the jobs -------------------------------------------------------------------------------


def do_main_job(client: Client, server: ServerSettings) -> dict[str, JobRecord]:
    """Enqueue, let the workers work, and return what became of every job of this run."""
    known = QUEUE in client.queue_names()
    client.create_queue(QUEUE)
    print(f"Queue {QUEUE}: {'there already, reused' if known else 'created'}")
    enqueued = enqueue_library(client)
    with workers([server.host], server.port) as processes:
        records = watch(client, enqueued, processes)
    check(records, enqueued)
    return records


def enqueue_library(client: Client) -> Enqueued:
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in library.rglob("*.py")
        if "site-packages" not in path.parts and path.is_file()
    )
    if not files:
        raise NotAsPromised(f"no source files in {library}; is this a Python without sources?")
    began = time.monotonic()
    run_after_ms = time.time_ns() // 1_000_000 + SCHEDULED_AHEAD_MS
    jobs = [
        Job(
            os.fsencode(path),
            run_after_ms=run_after_ms if number % SCHEDULED_EVERY == 0 else None,
            attempts_allowed=ATTEMPTS,
        )
        for number, path in enumerate(files, start=1)
    ]
    descriptors = [
        descriptor
        for first in range(0, len(jobs), JOBS_A_CALL)
        for descriptor in client.enqueue(QUEUE, jobs[first : first + JOBS_A_CALL])
    ]
    seconds = time.monotonic() - began
    scheduled = {d: run_after_ms for d, job in zip(descriptors, jobs, strict=True) if job[2]}
    print(
        f"Enqueued {len(jobs)} jobs, a source file of {library} each, in {seconds:.2f} s; "
        f"{len(scheduled)} of them for {SCHEDULED_AHEAD_MS // 1000} s later"
    )
    return Enqueued(dict(zip(descriptors, map(str, files), strict=True)), scheduled, seconds)


@contextlib.contextmanager
def workers(hosts: Sequence[str], port: int) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Worker processes, stopped in order at the end: they finish what they have begun."""
    command = [sys.executable, str(WORKER), "--queue", QUEUE, "--fail-first", FAILS_FIRST]
    command += ["--host", *hosts, "--port", str(port)]
    processes = [subprocess.Popen(command) for _ in range(WORKERS)]
    try:
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        exits = [process.wait() for process in processes]
    if any(exits):
        raise NotAsPromised(f"a worker ended with exit status {max(exits)}")


def watch(
    client: Client, enqueued: Enqueued, processes: Sequence[subprocess.Popen[bytes]]
) -> dict[str, JobRecord]:
    """Look jobs up until all have ended, with a line of progress on a terminal."""
    give_up_at = time.monotonic() + GIVE_UP_AFTER_SECONDS
    total = len(enqueued.paths)
    records: dict[str, JobRecord] = {}
    ended = 0
    print(f"{WORKERS} worker processes count lines and words", flush=True)
    while ended < total:
        if time.monotonic() > give_up_at:
            raise NotAsPromised(
                f"only {ended} of {total} jobs had ended after {GIVE_UP_AFTER_SECONDS:.0f} s"
            )
        if any(process.poll() is not None for process in processes):
            raise NotAsPromised("a worker process ended early; see its message above")
        waiting = [d for d in enqueued.paths if d not in records or not has_ended(records[d])]
        with contextlib.suppress(PinLaterError):  # a shard that is about to be taken over
            records |= look_up(client, waiting)
        ended = sum(map(has_ended, records.values()))
        if sys.stdout.isatty():
            states = [record.state for record in records.values()]
            print(
                f"\r  {'#' * (40 * ended // total):<40} {ended}/{total}, "
                f"{states.count(JobState.IN_PROGRESS)} in progress ",
                end="" if ended < total else "\n",
                flush=True,
            )
        time.sleep(0.2)
    return records


def look_up(client: Client, descriptors: Sequence[str]) -> dict[str, JobRecord]:
    """Every one of these jobs, in this order, or it was lost."""
    found = client.lookup(descriptors, include_body=True)
    if lost := [descriptor for descriptor in descriptors if descriptor not in found]:
        raise NotAsPromised(f"{len(lost)} jobs are unknown to the service; {lost[0]}, for one")
    return {descriptor: found[descriptor] for descriptor in descriptors}


def has_ended(record: JobRecord) -> bool:
    return record.state in (JobState.SUCCEEDED, JobState.FAILED)


# --- what came of it ------------------------------------------------------------------------


def figures_of(record: JobRecord) -> Figures:
    match = _FIGURES.search(record.custom_status)
    if match is None:
        raise NotAsPromised(
            f"{record.descriptor} has no figures in its status {record.custom_status[:80]!r}"
        )
    return Figures(*map(int, match.groups()))


def check(records: Mapping[str, JobRecord], enqueued: Enqueued) -> None:
    """Everything this program promised, against what the server says."""
    if failed := [r for r in records.values() if r.state is not JobState.SUCCEEDED]:
        raise NotAsPromised(
            f"{len(failed)} jobs failed; {failed[0].descriptor}, for one, with "
            f"{failed[0].custom_status[:200]!r}"
        )
    retried = [d for d, path in enqueued.paths.items() if Path(path).name == FAILS_FIRST]
    for descriptor, record in records.items():
        allowed = ATTEMPTS - 1 if descriptor in retried else ATTEMPTS
        if record.attempts_remaining > allowed:
            raise NotAsPromised(
                f"{descriptor} has {record.attempts_remaining} attempts left; "
                f"at most {allowed} were expected"
            )
        if figures_of(record).begun_ms < record.run_after_ms:
            raise NotAsPromised(f"{descriptor} ran before its run-after time")
    for descriptor, run_after_ms in enqueued.scheduled.items():
        if figures_of(records[descriptor]).begun_ms < run_after_ms:
            raise NotAsPromised(f"{descriptor} ran before the time it was scheduled for")
    print(
        f"As promised: all {len(records)} jobs succeeded, {len(retried)} of them at a second "
        f"attempt, {len(enqueued.scheduled)} not before their time"
    )


def show_results(client: Client, server: ServerSettings, records: Mapping[str, JobRecord]) -> None:
    print(f"\nJobs in queue {QUEUE}, earlier runs included:")
    for state in JobState:
        counts = [client.count(QUEUE, state)]
        if state is JobState.PENDING:
            counts.append(client.count(QUEUE, state, future=True))
        # A count ends at the server's limit for each shard.
        bound = ">=" if max(counts) >= server.count_limit else ""
        print(f"  {state.name:<12} {f'{bound}{sum(counts)}':>8}")

    longest = sorted(records, key=lambda d: figures_of(records[d]).lines, reverse=True)[:10]
    print("\nThe ten longest files, looked up by descriptor:")
    print("     lines     words  file, descriptor")
    for descriptor, record in look_up(client, longest).items():
        lines, words, _ = figures_of(record)
        path = os.fsdecode(record.body or b"")
        print(f"  {lines:>8}  {words:>8}  {path}  {descriptor}")

    print(
        "\nHow fast, by the server's own figures (since it started; a dequeue may wait up to a\n"
        "second for jobs to come):"
    )
    # Scheduled and retried jobs waited on purpose.
    at_once = [
        r
        for r in records.values()
        if r.attempts_remaining == ATTEMPTS and r.run_after_ms - r.created_at_ms < 1000
    ]
    took_ms = max(r.updated_at_ms for r in at_once) - min(r.created_at_ms for r in at_once)
    print(
        f"  {len(at_once) * 1000 / max(took_ms, 1):.0f} jobs/s from the first enqueue to the "
        "last ack"
    )
    for method, metric in call_metrics(server).items():
        print(
            f"  {method:<16} {how_many(int(metric['count']), 'call'):>14}  "
            f"p50 {metric['p50']:>8.2f} ms  "
            f"p99 {metric['p99']:>8.2f} ms"
        )


def call_metrics(server: ServerSettings) -> dict[str, Mapping[str, float]]:
    """Read the latencies of calls from /stats.json."""
    url = f"http://{address_of(server.stats_host, server.stats_port)}/stats.json"
    with urllib.request.urlopen(url, timeout=10) as response:
        stats: Mapping[str, Any] = json.load(response)
    prefix, suffix = "PinLaterService.", "_msec"
    return {
        name.removeprefix(prefix).removesuffix(suffix): metric
        for name, metric in stats["metrics"].items()
        if name.startswith(prefix) and name.endswith(suffix)
    }


def client_of(server: ServerSettings, source: str) -> Client:
    return Client(server.host, server.port, source=source, timeout_seconds=CALL_SECONDS)


def leave_example(directory: Path, server: ServerSettings) -> None:
    """Leave queues that show what the dashboard is for, unless they are there."""

    if quickstart_example.leave(partial(client_of, server), directory):
        print(
            "\nExample queues: mail (jobs failed), images (no worker), invoices, reports (paused)"
        )


def show_the_way(directory: Path, server: ServerSettings) -> None:
    in_directory = "" if directory == REPOSITORY else f"cd {shlex.quote(str(directory))} && "
    programs = shlex.quote(str(PROGRAMS) if in_directory else os.path.relpath(PROGRAMS))
    print(
        f"""
The service goes on running, on port {server.port}. Look around:
  {in_directory}{programs}/supervisorctl -c etc/supervisord.conf status
  {in_directory}{programs}/pinlater-admin status
  {in_directory}{programs}/pinlater-admin queue stats {QUEUE}
  http://{address_of(server.stats_host, server.stats_port)}/stats.txt has all figures
Stop it:
  {in_directory}{programs}/pinlaterd down
A worker of your own is five lines away: "Your first worker" in README.md{http_way(server)}"""
    )
    if server.web_port:
        may = ", and retry jobs there (web_writes: true)" if server.web_writes else ""
        print(f"See it all in a browser{may}: http://{server.web_address}/")
        if not may:
            print("With web_writes: true in etc/pinlaterd.yaml jobs can be retried there, too")


def http_way(server: ServerSettings) -> str:
    """Return the last lines: where HTTP is, and a command that enqueues."""
    if not server.http_port:
        return ""
    url = f"http://{server.http_address}/v2/queues/{QUEUE}/jobs"
    return f"""
HTTP is on http://{server.http_address}/v2 (docs/http.md). Enqueue a job:
  curl {url} -d '{{"data": "/usr/share/dict/words"}}'"""


if __name__ == "__main__":
    sys.exit(main())
