"""What the coordinator shows of queues over time, on a real service: frames, history, marks."""

from __future__ import annotations

import json
import re

import pytest

from pinlaterd.client import AckInfo, Job
from pinlaterd.client.coordinator import fetch_json
from tests.deployment import MOST_PATIENT, claim, serving


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overview") / "d"
    with serving(folder, shards=2, settings=MOST_PATIENT) as deployment:
        yield deployment


@pytest.fixture
def client(deployment):
    with deployment.client("mailer:web3") as client:
        yield client


@pytest.fixture
def page(deployment):
    return lambda path: fetch_json(path, directory=deployment.folder, url=None)


@pytest.fixture
def row_of(page):
    """Returns the row of a queue in the frame; {} while there is none."""

    def find(queue):
        rows = page("/frame.json?servers=all")["queues"]
        return next((row for row in rows if row["name"] == queue), {})

    return find


def test_a_frame_says_what_a_queue_holds_and_does(client, row_of, wait_until):
    client.create_queue("mail")
    client.enqueue("mail", [Job(b"a")] * 5 + [Job(b"later", run_after_ms=2**42)])
    first, second = claim(client, "mail", 2)
    client.ack("mail", succeeded=[first])
    client.ack("mail", failed=[second])

    def is_shown():
        row = row_of("mail")
        held = {key: row.get(key) for key in ("pending", "scheduled", "in_progress", "succeeded")}
        return held == {"pending": 4, "scheduled": 1, "in_progress": 0, "succeeded": 1} and row

    wait_until(is_shown)
    assert row_of("mail")["verdict"]["kind"] in ("failing", "well")


def test_a_frame_takes_less_than_a_kilobyte_a_queue(client, page, wait_until):
    for number in range(20):
        client.create_queue(f"small{number}")
    wait_until(lambda: len(page("/frame.json")["queues"]) >= 20)

    found = page("/frame.json")

    assert len(json.dumps(found["queues"])) < 1_000 * len(found["queues"])


def test_a_paused_queue_says_who_paused_it_and_why(deployment, client, row_of, wait_until):
    client.create_queue("reports")
    deployment.admin("queue", "pause", "reports", "--by", "ada", "--reason", "disk check")

    wait_until(lambda: row_of("reports").get("verdict", {}).get("kind") == "paused")

    text = row_of("reports")["verdict"]["text"]
    assert re.fullmatch(r'Paused by ada, [0-9]{2}-[0-9]{2} [0-9:]{5}: "disk check"', text)
    assert "Paused by ada" in deployment.admin("queue", "list", "--long")
    assert "Paused by ada" in deployment.admin("queue", "stats", "reports", "--seconds", "0.1")
    assert "Paused by ada" in deployment.admin("top", "--once")
    deployment.admin("queue", "resume", "reports")
    wait_until(lambda: row_of("reports")["verdict"]["kind"] == "idle")
    assert "ada" not in (deployment.folder / "etc/queues.yaml").read_text()


def test_a_queue_that_fails_says_what_its_attempts_said(client, row_of, wait_until):
    """By what routers and shards report while somebody looks."""
    client.create_queue("pay")
    client.enqueue("pay", [Job(b"a", attempts_allowed=9)] * 10)
    said = "ConnectTimeout: smtp7 did not answer (mail.py:12 in send)"

    def fails():
        for job in client.dequeue("pay", limit=3):
            client.ack("pay", failed=[AckInfo(job.descriptor, said)])
        verdict = row_of("pay").get("verdict", {"text": ""})
        return verdict["text"].endswith(" %: ConnectTimeout: smtp# did not answer")

    wait_until(fails)
    row = row_of("pay")
    assert row["verdict"]["kind"] == "failing"
    assert row["verdict"]["sentence"].endswith(
        "100 % of them ConnectTimeout: smtp# did not answer."
    )


def test_workers_are_shown_with_what_they_do_and_hold(deployment, client, page, wait_until):
    client.create_queue("work")
    client.enqueue("work", [Job(b"a", attempts_allowed=9)] * 8)
    first, *_ = claim(client, "work", 4)
    client.ack("work", failed=[AckInfo(first.descriptor, "no such address")])
    with deployment.client("idler:web9") as idler:
        idler.create_queue("quiet")
        idler.dequeue("quiet", limit=1)

    def workers():
        return {(one["queue"], one["source"]): one for one in page("/workers.json")["workers"]}

    busy_one, idle_one = ("work", "mailer:web3"), ("quiet", "idler:web9")

    def are_known():
        """By claims, which shards report, and by calls, which routers do."""
        found = workers()
        busy = found.get(busy_one, {})
        shown = (busy.get("held"), busy.get("jobs"), busy.get("failed_share"))
        return shown == (3, 4, 0.25) and idle_one in found

    wait_until(are_known)
    found = workers()
    busy, idle = found[busy_one], found[idle_one]
    assert busy["near_time_out"] == 0
    assert 0 <= busy["ack_seconds"] <= busy["dequeue_seconds"] < 60
    assert 0 <= busy["oldest_renewal_seconds"] < 60
    assert (idle["held"], idle["jobs"], idle["ack_seconds"]) == (0, 0, None)
    assert idle["dequeue_seconds"] < 60
    assert page("/workers.json")["all_claims"]
    wait_until(lambda: page("/failures.json?queue=work")["failures"])
    [counted] = page("/failures.json?queue=work")["failures"]
    assert (counted["signature"], counted["attempts"]) == ("no such address", 1)
    assert sum(counted["by_minute"]) == 1
    listed = deployment.admin("worker", "list", "--queue", "work")
    assert "mailer:web3" in listed
    assert "idler" not in listed


@pytest.mark.parametrize(
    "path",
    [
        *("/history.json", "/history.json?queue=a&shard=1", "/history.json?queue=a&since=soon"),
        *("/events.json?since=-1", "/failures.json"),
    ],
)
def test_a_question_that_cannot_be_answered_says_why(page, path):
    assert ":" in page(path)["error"]


def test_history_and_marks_outlive_a_restart_of_the_coordinator(
    deployment, client, page, wait_until
):
    client.create_queue("past")
    client.enqueue("past", [b"a"] * 7)

    def ready():
        return page("/history.json?queue=past&since=10m")["series"]["ready"]

    wait_until(lambda: 7 in ready())
    before = deployment.kill("shard-1")
    wait_until(lambda: deployment.pids().get("shard-1", before) != before)
    deployment.wait_until_serving()

    def marks():
        return [one["text"] for one in page("/events.json")["events"]]

    wait_until(lambda: any(text.startswith("shard-1 restarted") for text in marks()))
    marked = marks()
    known = page("/history.json?queue=past")
    deployment.admin("restart", "coordinator")

    assert marks()[: len(marked)] == marked
    assert any(text.startswith("coordinator restarted") for text in marks()[len(marked) :])
    again = page("/history.json?queue=past")
    assert 7 in again["series"]["ready"]
    assert again["step_ms"] == 5_000
    assert set(again["series"]) == set(known["series"])
    assert 7 in page("/history.json?queue=past&since=7d")["series"]["ready"]
    shard = page("/history.json?shard=1")["series"]
    assert [one for one in page("/history.json?process=router")["series"]["rss_bytes"] if one]
    assert len(shard) == 8


def test_mends_and_configurations_are_marked(deployment, client, page, wait_until):
    deployment.wait_until_serving()  # a mark is lost where the coordinator has just restarted
    client.create_queue("mended")
    client.enqueue("mended", [Job(b"a", attempts_allowed=1)] * 3)
    client.ack("mended", failed=claim(client, "mended", 3))

    assert client.retry_failed("mended") == 3
    deployment.admin("queue", "limit", "mended", "7")

    def marks(kind):
        return [one["text"] for one in page("/events.json")["events"] if one["kind"] == kind]

    wait_until(lambda: "mended: 3 jobs retried" in marks("mend"))
    wait_until(lambda: "mended: max_jobs_per_second 7" in marks("config"))


def test_a_history_that_cannot_be_read_is_dropped_and_the_coordinator_serves(
    deployment, page, wait_until
):
    deployment.supervisorctl("stop", "coordinator")
    (deployment.folder / "data/history").write_bytes(b"no history")
    deployment.supervisorctl("start", "coordinator")

    wait_until(deployment.is_serving)
    log = deployment.folder / "run/log/coordinator.log"
    wait_until(lambda: "is dropped" in log.read_text())
