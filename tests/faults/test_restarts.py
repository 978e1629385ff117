"""What is restarted in order costs no client an error, whatever it was doing."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from pinlaterd.client import ConnectionFailed, JobState, PinLaterError
from pinlaterd.config.kinds import handover_program
from pinlaterd.errors import OutcomeUnknown
from tests.deployment import Deployment, claim, serving
from tests.faults.callers import Callers
from tests.faults.conftest import SETTINGS
from tests.faults.load import CALL_SECONDS, Load

pytestmark = pytest.mark.service

ROUTERS = ("router-1", "router-2")
SHARDS = ("shard-1", "shard-2", "shard-3")
HANDOVER = handover_program(ROUTERS[0])


# A busy machine starts processes slowly, and gives searchers what is left of it.
PATIENCE = {"shard_restart_grace_ms": 30_000}


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One shard behind two routers."""
    settings = SETTINGS | PATIENCE | {"routers": len(ROUTERS)}
    with serving(tmp_path_factory.mktemp("d"), settings=settings) as deployment:
        yield deployment


@pytest.fixture
def pair(shared_pair: Deployment) -> Deployment:
    shared_pair.wait_until_serving()
    return shared_pair


@pytest.fixture
def pair_load(pair: Deployment, request: pytest.FixtureRequest) -> Load:
    with pair.client() as client:
        client.create_queue(request.node.name)
    return Load(pair, request.node.name)


@contextmanager
def _unnoticed(load: Load) -> Iterator[None]:
    """What happens during the block costs `load` neither a job nor an error."""
    with load.running():
        yield
    load.check()
    assert load.errors == []


@contextmanager
def _asking(deployment: Deployment, queue: str) -> Iterator[None]:
    """Searches over all shards run all the time, and none of them fails."""
    errors: list[Exception] = []
    stop = threading.Event()

    def ask() -> None:
        with deployment.client(timeout_seconds=CALL_SECONDS) as client:
            while not stop.is_set():
                try:
                    client.count(queue, JobState.SUCCEEDED, body_regex="[0-9]/[0-9]")
                    client.lookup(
                        record.descriptor for record in client.scan(queue, JobState.FAILED)
                    )
                    client.dequeue(queue, limit=100, dry_run=True)
                except (PinLaterError, ConnectionFailed) as error:
                    errors.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        yield
    finally:
        stop.set()
        asking.join()
    assert errors == []


# --- shards -----------------------------------------------------------------------------------


def test_each_shard_in_turn_and_all_at_once(tmp_path_factory: pytest.TempPathFactory):
    # The last call waits while all three end and start.
    settings = SETTINGS | {"shard_restart_grace_ms": 90_000, "request_timeout_ms": 90_000}
    with serving(tmp_path_factory.mktemp("d"), shards=3, settings=settings) as deployment:
        with deployment.client() as client:
            client.create_queue("q")
        load = Load(deployment, "q")

        with _unnoticed(load):
            for shard in SHARDS:
                deployment.supervisorctl("restart", shard)
                load.advance()

        with deployment.client(timeout_seconds=100) as client, ThreadPoolExecutor() as one:
            deployment.supervisorctl("stop", *SHARDS)
            dequeue = one.submit(client.dequeue, "q", limit=1, coverage=0.67)
            deployment.supervisorctl("start", *SHARDS)
            assert dequeue.result() == []


def test_the_only_shard(pair: Deployment, pair_load: Load):
    before = pair.pid_of("shard-1")

    with _unnoticed(pair_load), _asking(pair, pair_load.queue):
        [done] = json.loads(pair.admin("restart", "shard", "all", "--json"))
        pair.supervisorctl("restart", "shard-1")

    assert done["program"] == "shard-1"
    assert done["pid"] not in (before, pair.pid_of("shard-1"))


def test_calls_that_come_after_a_kill_wait_for_the_successor(pair: Deployment, wait_until):
    logs = [pair.folder / f"run/log/{router}.log" for router in ROUTERS]
    read = [log.stat().st_size for log in logs]
    with pair.client() as client:
        client.create_queue("q")

        pair.kill("shard-1")
        wait_until(
            lambda: all(
                b"shard-1 has gone" in log.read_bytes()[size:]
                for log, size in zip(logs, read, strict=True)
            )
        )

        descriptors = client.enqueue("q", [b"abc"])
        assert client.count("q", JobState.PENDING) == 1
        assert [job.descriptor for job in claim(client, "q")] == list(descriptors)
        assert client.dequeue("q", limit=10) == []


# --- routers ----------------------------------------------------------------------------------


def test_routers_that_clients_connect_to_all_the_time(
    pair: Deployment, pair_load: Load, wait_until
):
    before = pair.pids()
    callers = Callers(pair.port)

    with _unnoticed(pair_load), callers.running():
        done = json.loads(pair.admin("restart", "router", "--json"))

    assert callers.errors == []
    assert callers.answered() > 100
    after = pair.pids()
    assert {one["program"]: one["pid"] for one in done} == {name: after[name] for name in ROUTERS}
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == set(ROUTERS)
    wait_until(lambda: pair.status()["healthy"])


@pytest.mark.parametrize(
    "mend", [lambda pair: pair.admin("restart", "router"), Deployment.up], ids=["repeat", "up"]
)
def test_a_restart_that_is_killed_in_the_middle_can_be_mended(pair: Deployment, mend, wait_until):
    programs = pair.pids().keys()
    callers = Callers(pair.port)
    with callers.running():
        killed = pair.start_admin("restart", "router")
        wait_until(lambda: HANDOVER in pair.pids())
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        wait_until(lambda: "serving" in pair.states_of(HANDOVER).values())
        pair.supervisorctl("stop", ROUTERS[0])
        wait_until(lambda: pair.status()["healthy"])

        mend(pair)

    assert callers.errors == []
    assert pair.pids().keys() == programs


def test_a_router_that_can_not_start_leaves_the_old_one_as_it_is(pair: Deployment):
    """What is in force has a port by now that a stranger has."""
    before = pair.pids()
    in_force = pair.folder / "run/config.json"
    text = in_force.read_text()
    callers = Callers(pair.port)
    with socket.create_server(("127.0.0.1", 0)) as stranger, callers.running():
        port = stranger.getsockname()[1]
        in_force.write_text(text.replace(f'"port": {pair.port}', f'"port": {port}', 1))
        with pytest.raises(AssertionError, match="router-1 was left as it is") as failure:
            pair.admin("restart", "router")
        in_force.write_text(text)

    assert f"can't listen on 127.0.0.1:{port}" in str(failure.value)
    assert callers.errors == []
    assert pair.pids() == before


# --- the coordinator --------------------------------------------------------------------------


def test_the_coordinator(pair: Deployment, pair_load: Load):
    before = pair.pids()

    with _unnoticed(pair_load):
        told = pair.admin("restart", "coordinator")

    after = pair.pids()
    assert told.startswith(f"coordinator is restarted, pid {after['coordinator']}, in ")
    assert {name for name in after if after[name] != before[name]} == {"coordinator"}


def test_without_a_coordinator_nothing_is_stopped(pair: Deployment):
    pair.supervisorctl("stop", "coordinator")
    before = pair.pids()

    with pytest.raises(AssertionError, match="no answer from the coordinator"):
        pair.admin("restart", "router")

    assert pair.pids() == before
    pair.admin("restart", "coordinator")
    pair.wait_until_serving()  # it hears from the others within a second


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("shard", "no shard '7'; there are: 1"),
        ("coordinator", "no coordinator '7'; leave the name"),
    ],
)
def test_a_process_that_there_is_not(pair: Deployment, kind: str, refusal: str):
    with pytest.raises(AssertionError, match=refusal):
        pair.admin("restart", kind, "7")


def test_a_router_restarted_by_supervisorctl_finishes_what_is_in_hand(
    deployment: Deployment, load: Load, wait_until
):
    with load.running():
        deployment.supervisorctl("restart", "router")

        deployment.wait_until_serving()

    load.check()
    # A clean end leaves no call half done, nor a claim that nobody got.
    unknown = [e for e in load.errors if isinstance(e, OutcomeUnknown) or "not known" in str(e)]
    assert unknown == []
    with deployment.client() as client:
        assert client.count(load.queue, JobState.IN_PROGRESS) == 0
