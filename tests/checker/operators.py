"""What an operator does while clients go on: restart, drain a shard, put its copy back, fail over.

As faults of the nemesis (faults.py); beside that, records tell the judge what it may find by them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.checker.faults import ALL_SHARDS, Fault, Hurt, Nemesis, runs
from tests.checker.history import Record
from tests.checker.site import SHARDS, Site, wait_until
from tests.deployment import frozen
from tests.servers.mariadb import MariaDB

_EMPTY_SECONDS = 4.0


# --- restart, dequeue-only ------------------------------------------------------------------


@contextmanager
def _restarted(nemesis: Nemesis) -> Iterator[Hurt]:
    """In order, at no client's cost."""
    shards = nemesis.rng.random() < 0.5
    yield Hurt((), away=ALL_SHARDS if shards else ())
    nemesis.operate("restart", *(("shard", "all") if shards else ("router",)))


@contextmanager
def _dequeue_only(nemesis: Nemesis) -> Iterator[Hurt]:
    name = nemesis.rng.choice(SHARDS)
    with nemesis.closing:
        nemesis.operate("shard", "dequeue-only", name, "on")
        yield Hurt(())
        time.sleep(1)
        nemesis.operate("shard", "dequeue-only", name, "off")


# --- drain ----------------------------------------------------------------------------------


@contextmanager
def _drained(nemesis: Nemesis) -> Iterator[Hurt]:
    """Its scheduled jobs go elsewhere, now and then by a command that is killed and repeated."""
    name = nemesis.rng.choice(SHARDS)
    with nemesis.closing:
        with _noted(nemesis, "moved", name):
            if nemesis.alone and nemesis.rng.random() < 0.5:
                _cut_short(nemesis, name)
            said = nemesis.operate("shard", "drain", name, "--move", "--yes", "--json")
        facts = json.loads(said.splitlines()[-1])
        yield Hurt(())
        closed_at = time.monotonic()
        _wait_until_empty(nemesis, name)
        if facts["acts"]:  # or the coordinator is away, and no process knows of it
            _note(nemesis, "closed", name, since=closed_at)
        nemesis.operate("shard", "dequeue-only", name, "off")
    nemesis.say(f"drain: {facts['moved']} jobs were moved, {len(facts['kept'])} kept")


def _cut_short(nemesis: Nemesis, name: str) -> None:
    deployment = nemesis.site.deployment
    command = deployment.start_admin("shard", "drain", name, "--move", "--yes")
    lock = deployment.folder / f"run/move-{name}.lock"
    wait_until(lambda: lock.exists() or command.poll() is not None)
    time.sleep(nemesis.rng.uniform(0, 0.3))
    command.kill()
    command.wait()


def _wait_until_empty(nemesis: Nemesis, name: str) -> None:
    """By the command, which is given up if clients keep the shard from it."""
    began = time.monotonic()
    command = nemesis.site.deployment.start_admin("shard", "drain", name, "--wait")
    try:
        wait_until(lambda: command.poll() is not None, seconds=_EMPTY_SECONDS)
    except TimeoutError:
        command.kill()
    if command.wait() == 0:
        _note(nemesis, "emptied", name, since=began)


@contextmanager
def _noted(nemesis: Nemesis, operation: str, shard: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        _note(nemesis, operation, shard, since=began)


def _note(nemesis: Nemesis, operation: str, shard: str, *, since: float) -> None:
    given = {"shard": shard}
    nemesis.history.add(Record(since, time.monotonic(), "nemesis", operation, given))


# --- copy and restore -----------------------------------------------------------------------


@contextmanager
def _copied_or_restored(nemesis: Nemesis) -> Iterator[Hurt]:
    """The store of a shard is copied, or a copy of it is put back: in SQLite one shard's file, in
    the others all that the server has."""
    site = nemesis.site
    shards = (nemesis.rng.choice(SHARDS),) if site.engine == "sqlite" else SHARDS
    copy = site.folder / f"copy-{'-'.join(shards)}"
    restores = copy.exists() and nemesis.rng.random() < 0.6
    with _shards_down(nemesis, shards), _store_down(site):
        began = time.monotonic()
        if restores:
            _replace(site, shards, copy)
        else:
            _copy(site, shards, copy)
        operation, given = "restored" if restores else "copied", {"shards": shards}
        nemesis.history.add(Record(began, time.monotonic(), "nemesis", operation, given))
    nemesis.say(f"{operation}: {', '.join(shards)}")
    yield Hurt([f"shard-{shard}" for shard in shards], "commits")


@contextmanager
def _shards_down(nemesis: Nemesis, shards: Sequence[str]) -> Iterator[None]:
    """In order, or killed."""
    deployment = nemesis.site.deployment
    programs = [f"shard-{shard}" for shard in shards]
    if nemesis.rng.random() < 0.5:
        deployment.supervisorctl("stop", *programs)
        yield
        deployment.supervisorctl("start", *programs)
        return
    with frozen(deployment.supervisord_pid()):
        pids = [nemesis.site.pid_of(program) for program in programs]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(runs, pids)))
        yield


@contextmanager
def _store_down(site: Site) -> Iterator[None]:
    if site.server is None:
        yield
        return
    site.server.stop()
    yield
    site.start_server_again()


def _files(site: Site, shards: Sequence[str]) -> tuple[Path, list[str]]:
    """The folder that a store is in, and the patterns of what belongs to it."""
    if site.server is None:
        return site.deployment.folder / "data", [f"shard-{shard}.sqlite*" for shard in shards]
    if isinstance(site.server, MariaDB):
        return site.server.folder, ["data"]
    return site.server.folder, ["appendonlydir"]


def _copy(site: Site, shards: Sequence[str], copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    folder, patterns = _files(site, shards)
    copy.mkdir()
    for pattern in patterns:
        _copy_all(folder, pattern, copy)


def _replace(site: Site, shards: Sequence[str], copy: Path) -> None:
    folder, patterns = _files(site, shards)
    for pattern in patterns:
        for path in folder.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        _copy_all(copy, pattern, folder)


def _copy_all(source: Path, pattern: str, target: Path) -> None:
    for path in source.glob(pattern):
        if path.is_dir():
            shutil.copytree(path, target / path.name, symlinks=True)
        else:
            shutil.copy2(path, target / path.name)


# --- failover -------------------------------------------------------------------------------


@contextmanager
def _failed_over(nemesis: Nemesis) -> Iterator[Hurt]:
    """As planned: the replica becomes the master, the master its replica, and nothing is lost."""
    nemesis.operate("shard", "failover", SHARDS[0], "--yes")
    nemesis.site.swap_servers()
    yield Hurt(ALL_SHARDS, "commits")


# --- all of them ----------------------------------------------------------------------------

OPERATIONS: dict[str, Fault] = {
    "restart": _restarted,
    "dequeue-only": _dequeue_only,
    "drain": _drained,
    "restore": _copied_or_restored,
    "failover": _failed_over,
}
