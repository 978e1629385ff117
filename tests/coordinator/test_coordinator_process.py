"""The coordinator as a process: its pages, the control channel, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from pinlaterd.client.coordinator import fetch_json
from pinlaterd.errors import ConnectionFailed
from pinlaterd.lifecycle import ExitCode
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ControlClient, ProcessState, read_snapshot
from pinlaterd.wire.curve import ClusterKey
from tests.deployment import unused_port

ROOT = Path(__file__).parents[2]
SECONDS = 60.0

pytestmark = pytest.mark.service


class Coordinator:
    """A coordinator of a deployment with the shards 1 and 2, in a folder of its own."""

    def __init__(self, folder, stats_port):
        self.folder = folder
        self.stats_port = stats_port
        self._running = []
        (folder / "etc").mkdir()
        (folder / "etc" / "pinlaterd.yaml").write_text(
            f"stats_port: {stats_port}\nhttp_port: 0\nweb_port: 0\n"
        )
        (folder / "etc" / "shards.yaml").write_text("shards: {1: {}, 2: {dequeue_only: true}}\n")

    def start(self, limits: str = "") -> subprocess.Popen[str]:
        """`limits`: of the shell's `ulimit`."""
        command = f"ulimit {limits} && exec" if limits else "exec"
        process = subprocess.Popen(
            [
                *("sh", "-c", f'{command} "$@"', "sh", sys.executable, "-m", "pinlaterd"),
                *("coordinator", "--config", self.folder / "etc"),
            ],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        return process

    def end(self):
        for process in self._running:
            process.kill()
            process.communicate()

    def get(self, path: str) -> tuple[int, Any]:
        url = f"http://127.0.0.1:{self.stats_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def status(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = fetch_json("/status.json", directory=self.folder, url=None)
        return found

    def is_up(self) -> bool:
        try:
            return bool(self.status())
        except ConnectionFailed:
            return False

    def serves_its_port(self) -> bool:
        try:
            return self.get("/health")[0] > 0
        except urllib.error.URLError:
            return False

    def state_of(self, process: str) -> str:
        [found] = [one for one in self.status()["processes"] if one["name"] == process]
        return str(found["state"])


@pytest.fixture
def coordinator(monkeypatch):
    # not pytest's own folder: the path of a Unix socket must be short
    with tempfile.TemporaryDirectory(prefix="pl", dir="/tmp") as folder:
        made = Coordinator(Path(folder), unused_port())
        monkeypatch.chdir(folder)
        monkeypatch.setattr("pinlaterd.client.coordinator._TIMEOUT_SECONDS", SECONDS)
        yield made
        made.end()


@pytest.fixture
def serving(coordinator, wait_until):
    coordinator.process = coordinator.start()
    wait_until(coordinator.is_up)
    wait_until(coordinator.serves_its_port)  # opened after the socket
    return coordinator


class Reporter:
    """A process that reports, as a shard does, through the real channel."""

    def __init__(self, name):
        self.stats = Stats()
        self.control = ControlClient(name, "shard", self.stats, int(time.time() * 1000))
        self.snapshot = None
        self.facts = {"durability": "FULL"}

    def report(self, state=ProcessState.SERVING):
        self.control.report(state, self.facts)
        self.snapshot = self.control.receive() or self.snapshot


@pytest.fixture
def reporter():
    made = []

    def make(name):
        made.append(Reporter(name))
        return made[-1]

    yield make
    for one in made:
        one.control.close()


def test_everybody_who_reports_gets_the_snapshot(serving, reporter, wait_until):
    shard = reporter("shard-1")

    def told():
        shard.report()
        return shard.snapshot and serving.state_of("shard-1") == "serving"

    wait_until(told)

    shards = [(entry.name, entry.dequeue_only) for entry in shard.snapshot.shards]
    assert shards == [("1", False), ("2", True)]
    assert read_snapshot() == shard.snapshot


def test_health_is_that_of_all_processes(serving, reporter, wait_until):
    code, body = serving.get("/health")
    assert code == 503
    problems = json.loads(body)["problems"]
    assert problems == ["router is stopped", "shard-1 is stopped", "shard-2 is stopped"]

    all_of_them = [reporter(name) for name in ("router", "shard-1", "shard-2")]

    def health():
        for one in all_of_them:
            one.report()
        code, body = serving.get("/health")
        return code, json.loads(body)

    well = {"healthy": True, "problems": [], "degraded": {}}
    wait_until(lambda: health() == (200, well))

    all_of_them[1].report(ProcessState.STOPPING)
    wait_until(lambda: serving.get("/health")[0] == 503)


def test_figures_of_all_and_of_each(serving, reporter, wait_until):
    one, two = reporter("shard-1"), reporter("shard-2")
    one.stats.count("mail_enqueue", 3)
    two.stats.count("mail_enqueue", 4)
    two.stats.record("shard_commit_ms", 2)

    def counted(path):
        one.report()
        two.report()
        code, text = serving.get(path)
        return code == 200 and json.loads(text)["counters"].get("mail_enqueue")

    wait_until(lambda: counted("/stats.json") == 7)
    assert counted("/stats.json?process=shard-2") == 4
    figures = json.loads(serving.get("/stats.json")[1])
    assert figures["processes"]["shard-1"]["counters"] == {"mail_enqueue": 3}
    assert figures["gauges"]["process_rss_bytes"] > 0
    assert "  mail_enqueue: 7\n" in serving.get("/stats.txt")[1]
    assert "  mail_enqueue: 3\n" in serving.get("/stats.txt?process=shard-1")[1]
    series = 'pinlaterd_queue_enqueue_total{queue="mail",process="shard-1"} 3\n'
    assert series in serving.get("/metrics")[1]

    # what changed, and only that, comes with the next report
    one.stats.count("mail_enqueue")
    wait_until(lambda: counted("/stats.json") == 8)


def test_pages_that_are_not_there(serving):
    assert serving.get("/nope") == (404, '{"error": "no such page; see /"}')
    code, body = serving.get("/stats.txt?process=shard-9")
    assert code == 404
    assert "no process 'shard-9'; choose from coordinator" in body
    request = urllib.request.Request(f"http://127.0.0.1:{serving.stats_port}/health", method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=SECONDS)
    assert caught.value.code == 405
    assert "GET" in caught.value.headers["Allow"]
    caught.value.close()


def test_a_coordinator_that_comes_back_learns_everything_again(serving, reporter, wait_until):
    shard = reporter("shard-1")
    shard.stats.count("mail_enqueue", 3)

    def known():
        shard.report()
        told = shard.snapshot is not None
        return told and serving.is_up() and serving.state_of("shard-1") == "serving"

    wait_until(known)
    before = shard.snapshot
    serving.process.kill()
    serving.process.wait()
    serving.start()

    wait_until(known)
    wait_until(lambda: shard.report() or shard.snapshot.version > before.version)
    wait_until(serving.serves_its_port)
    figures = json.loads(serving.get("/stats.json?process=shard-1")[1])
    assert figures["counters"] == {"mail_enqueue": 3}


def test_sockets_are_the_owners_alone(serving):
    assert stat.S_IMODE((serving.folder / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE((serving.folder / "run/stats.sock").stat().st_mode) == 0o600


def test_a_second_coordinator_is_refused(serving):
    second = serving.start()

    _, said = second.communicate(timeout=SECONDS)

    assert second.returncode == ExitCode.FAILURE
    assert "another coordinator runs in" in said
    assert serving.is_up()


def test_a_port_in_use_is_told(serving, free_port, wait_until):
    with tempfile.TemporaryDirectory(prefix="pl", dir="/tmp") as folder:
        other = Coordinator(Path(folder), serving.stats_port)

        process = other.start()
        _, said = process.communicate(timeout=SECONDS)

    assert process.returncode == ExitCode.FAILURE
    assert "can't listen" in said
    assert str(serving.stats_port) in said


def test_a_broken_configuration_is_told_in_whole(coordinator):
    (coordinator.folder / "etc/pinlaterd.yaml").write_text("prt: 1\nport: x\n")

    process = coordinator.start()
    _, said = process.communicate(timeout=SECONDS)

    assert process.returncode == ExitCode.CONFIG
    assert "etc/pinlaterd.yaml:1: prt: unknown key" in said
    assert "etc/pinlaterd.yaml:2: port: expected a whole number" in said


def test_sigterm_ends_it_and_what_was_left_behind_is_no_obstacle(serving, wait_until):
    os.kill(serving.process.pid, signal.SIGKILL)
    serving.process.wait()
    again = serving.start()
    wait_until(serving.is_up)

    again.send_signal(signal.SIGTERM)

    assert again.wait(SECONDS) == ExitCode.OK


def test_malformed_reports_are_counted_and_harmless(serving, reporter, wait_until):
    shard = reporter("shard-1")
    for message in (b"", b"[]", b'{"process": 1}', b"\xff", b'{"stats": {}}', b"null"):
        wait_until(lambda sent=message: send_raw(shard, sent))

    def counted():
        gauges = json.loads(serving.get("/stats.json?process=coordinator")[1])["counters"]
        return gauges.get("reports_malformed") == 6

    wait_until(counted)


def send_raw(shard: Reporter, message: bytes) -> bool:
    """As a process of another version would; False while there is no connection yet."""
    socket = shard.control._socket
    try:
        socket.send(message, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def test_it_is_small(serving):
    assert psutil.Process(serving.process.pid).memory_info().rss < 85_000_000


MOST_FILES = 1024


@pytest.fixture
def connections():
    """Makes connections to a port that send something, and stay."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    made = []

    def make(port, sent, count=MOST_FILES + 76):
        for _ in range(count):
            made.append(socket.create_connection(("127.0.0.1", port), SECONDS))
            with contextlib.suppress(ConnectionError):
                made[-1].sendall(sent)

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("limits", [f"-S -n {MOST_FILES}", f"-n {MOST_FILES}"])
def test_half_requests_keep_nobody_from_the_pages(coordinator, connections, wait_until, limits):
    coordinator.start(limits)
    wait_until(coordinator.serves_its_port)

    connections(coordinator.stats_port, b"GET /health HT")

    assert coordinator.get("/health")[0] == HTTPStatus.SERVICE_UNAVAILABLE  # no shard is there
    assert coordinator.status()["problems"]


def test_a_page_of_another_name_reads_nothing(serving, wait_until):
    settings = f"stats_port: {serving.stats_port}\nhttp_hosts: jobs.example\n"
    (serving.folder / "etc/pinlaterd.yaml").write_text(settings)

    def answer_to(name):
        request = urllib.request.Request(
            f"http://127.0.0.1:{serving.stats_port}/stats.txt", headers={"Host": name}
        )
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    wait_until(lambda: answer_to("jobs.example") == HTTPStatus.OK)  # the setting is live
    assert answer_to(socket.gethostname()) == HTTPStatus.OK
    assert answer_to("evil.example") == HTTPStatus.MISDIRECTED_REQUEST


@pytest.mark.parametrize("sent", [b"", b"\xff" + bytes(8) + b"\x7f\x03"])
def test_strangers_at_the_port_for_servers_end_nothing(coordinator, connections, wait_until, sent):
    """Without ZooKeeper, and with so few files that they take all."""
    port = unused_port()
    (coordinator.folder / "etc/local.yaml").write_text(
        "{cluster: prod, server: jobs-1, zookeeper: '127.0.0.1:1', peer_host: 127.0.0.1,"
        f" peer_port: {port}}}"
    )
    (coordinator.folder / "etc/shards.yaml").write_text("shards: {1: {server: jobs-1}}")
    ClusterKey.generate(coordinator.folder / "etc/cluster.key")
    process = coordinator.start(f"-n {MOST_FILES}")
    wait_until(coordinator.serves_its_port)

    connections(port, sent)

    wait_until(coordinator.is_up)  # they are still there
    assert process.poll() is None
