"""What the coordinator shows of queues over time, on a real service: frames, history, marks."""

from __future__ import annotations

import json
import re

import pytest

from pinlaterd.client import AckInfo, Job
from pinlaterd.client.coordinator import fetch_json
from tests.deployment import PATIENT, serving


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overview") / "d"
    with serving(folder, shards=2, settings=PATIENT) as deployment:
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
    first, second = client.dequeue("mail", limit=2)
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
    assert re.fullmatch(r'Paused by ada, [0-9:]{5}: "disk check"', text)
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
