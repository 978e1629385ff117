"""tools/quickstart, as a newcomer runs it, but in a folder and on ports of the test's own."""

from __future__ import annotations

import argparse
import importlib
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pinlaterd.client import Client, JobState
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import ServerSettings
from pinlaterd.model import claim_source
from tests.deployment import Deployment

ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]
SECONDS = 600.0  # on a busy machine


@pytest.fixture
def deployment(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    # short: a path of a socket in it has to fit into 107 bytes
    deployment = Deployment(tmp_path_factory.mktemp("q") / "d")
    yield deployment
    if deployment.folder.exists():
        deployment.destroy()


def quickstart(deployment: Deployment, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(str(ROOT / "tools/quickstart"), "--dir", str(deployment.folder), *more),
            *("--port", str(deployment.port), "--stats-port", str(deployment.stats_port)),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )


def test_it_does_what_it_says_and_a_second_run_reuses_what_is_there(deployment):
    first = quickstart(deployment)
    assert first.returncode == 0, first.stdout + first.stderr

    enqueued = re.search(r"Enqueued (\d+) jobs", first.stdout)
    assert enqueued is not None
    assert f"all {enqueued[1]} jobs succeeded" in first.stdout
    longest = first.stdout.split("The ten longest files")[1].split("How fast")[0]
    assert len(re.findall(r"\.py  quickstart:s\d:p1:\d+", longest)) == 10
    assert re.search(r"enqueueJobs +\d+ calls  p50 +[\d.]+ ms  p99 +[\d.]+ ms", first.stdout)
    for way in ("supervisorctl", "pinlater-admin status", "/stats.txt", "pinlaterd down"):
        assert way in first.stdout
    assert "retry jobs there" in first.stdout
    assert "\r" not in first.stdout  # no progress in a pipe

    with deployment.client() as client:
        assert client.count("quickstart", JobState.SUCCEEDED) == int(enqueued[1])
        assert_example(deployment, client)
    pids = deployment.pids()
    assert {"router", "coordinator", "shard-1", "shard-2", "shard-3"} <= pids.keys()

    second = quickstart(deployment)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "there already" in second.stdout
    assert "running already" in second.stdout
    assert "reused" in second.stdout
    assert deployment.pids() == pids
    with deployment.client() as client:
        assert client.count("quickstart", JobState.SUCCEEDED) == 2 * int(enqueued[1])
        assert client.count("images", JobState.PENDING) == 1_200


def assert_example(deployment: Deployment, client: Client) -> None:
    """Every state is there, a queue that nobody asks, a paused one, and failures of several kinds
    in several places at several workers."""
    counts = {state: client.count("mail", state) for state in JobState}
    assert counts == {
        JobState.PENDING: 0,
        JobState.IN_PROGRESS: 6,
        JobState.SUCCEEDED: 200,
        JobState.FAILED: 280,
    }
    assert client.count("images", JobState.PENDING) == 1_200
    assert client.count("invoices", JobState.PENDING, future=True) == 96
    paused = load_config(deployment.folder / "etc").queues["reports"]
    assert (paused.paused_by, paused.pause_reason) == ("quickstart", "an example of a pause")
    failed = list(client.scan("mail", JobState.FAILED))
    statuses = [job.custom_status for job in failed]
    assert len({status.partition(":")[0] for status in statuses}) == 3
    assert {status.count(" in send") for status in statuses} == {0, 2}  # one an attempt
    assert len({claim_source(job.claim_descriptor or "") for job in failed}) >= 5


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("q") / "c"
    yield folder
    for name in ("jobs-1", "jobs-2", "jobs-3", "stores"):
        if (folder / name).exists():
            Deployment(folder / name).destroy()


def test_a_cluster_goes_on_without_the_server_that_it_kills(cluster):
    done = subprocess.run(
        [str(ROOT / "tools/quickstart"), "--cluster", "--dir", str(cluster)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lost = re.search(r"Server (jobs-\d) was killed, with its \d+ processes", done.stdout)
    assert lost is not None
    assert len(re.findall(r"  shard \d: ", done.stdout)) in (2, 3)  # of six: each had its part
    took_over = re.findall(r"shard \d: served by (jobs-\d) after [\d.]+ s", done.stdout)
    assert took_over
    assert lost[1] not in took_over
    assert re.search(r"As promised: all \d+ jobs succeeded", done.stdout)


@pytest.mark.parametrize(
    ("engine", "program", "package"),
    [
        ("mysql", "mariadbd", "mariadb-server"),
        ("redis", "redis-server", "redis-server"),
    ],
)
def test_on_another_engine_it_brings_a_private_server(
    deployment, program_path, engine, program, package
):
    program_path(program, debian_package=package)

    done = quickstart(deployment, "--engine", engine)

    assert done.returncode == 0, done.stdout + done.stderr
    enqueued = re.search(r"Enqueued (\d+) jobs", done.stdout)
    assert enqueued is not None
    assert f"all {enqueued[1]} jobs succeeded" in done.stdout
    assert {"store", "shard-3"} <= deployment.pids().keys()
    secret = (deployment.folder / "etc/store.passwd").read_text().strip()
    assert secret not in done.stdout
    for path in (deployment.folder / "etc").iterdir():
        assert secret not in path.read_text() or path.stat().st_mode & 0o077 == 0, path

    deployment.down()
    deployment.up()

    with deployment.client() as client:
        assert client.count("quickstart", JobState.SUCCEEDED) == int(enqueued[1])


def test_a_server_that_is_named_badly_is_refused(deployment):
    done = quickstart(deployment, "--engine", "redis", "--server", "localhost")

    assert done.returncode == 1
    assert "--server localhost: expected HOST:PORT" in done.stderr


def test_a_taken_port_is_named_with_the_way_out(deployment):
    with socket.create_server(("127.0.0.1", deployment.port)):
        done = quickstart(deployment)

    assert done.returncode == 1
    assert f"127.0.0.1:{deployment.port} is taken" in done.stderr
    assert "give a new --dir DIR without --port: it gets a free port" in done.stderr


def test_a_new_deployment_goes_round_ports_that_are_taken(monkeypatch, free_port, capsys):
    monkeypatch.syspath_prepend(ROOT / "tools")
    job = importlib.import_module("quickstart_job")
    names = ("port", "stats_port", "http_port", "web_port")
    settings = ServerSettings(**{name: free_port() for name in names})
    monkeypatch.setattr(job, "ServerSettings", lambda: settings)
    options = argparse.Namespace(**dict.fromkeys(names))

    assert job.free_ports(options) == []
    with socket.create_server(("127.0.0.1", settings.port)):
        name, port = job.free_ports(options)

    assert name == "--port"
    assert int(port) > settings.port
    assert (
        f"Port {settings.port} is taken: --port {port} is used instead" in capsys.readouterr().out
    )
