"""examples/shop_tasks.py and shop_enqueue.py, run as they say, on a real service."""

from __future__ import annotations

import time

import pytest

from pinlaterd.client import JobState

pytestmark = pytest.mark.service


@pytest.fixture
def found(client):
    """The state, attempts remaining and custom status of a job."""

    def find(descriptor):
        record = client.lookup([descriptor])[descriptor]
        return record.state, record.attempts_remaining, record.custom_status

    return find


def test_what_becomes_of_the_shops_jobs(examples_shell, client, found, wait_until):
    began = time.time()
    worker = examples_shell.start("pinlater worker shop_tasks --create-queues")
    try:
        wait_until(lambda: "working on" in worker.printed(), seconds=60)
        made = dict(
            line.split() for line in examples_shell.run("python shop_enqueue.py").splitlines()
        )
        jobs = {name: lambda job=job: found(job) for name, job in made.items()}
        ended = (JobState.SUCCEEDED, JobState.FAILED)
        for name in ("plain", "slow", "stolen", "import"):
            wait_until(lambda job=jobs[name]: job()[0] in ended, seconds=60)
        wait_until(lambda: jobs["report"]()[2].startswith("reported "), seconds=60)
        mails = [jobs[name]()[2].split("mail is ")[1] for name in ("plain", "slow")]
        wait_until(lambda: {found(mail)[0] for mail in mails} == {JobState.SUCCEEDED}, seconds=60)
        again = examples_shell.run("python shop_enqueue.py")
    finally:
        worker.end()

    state, attempts, status = jobs["plain"]()
    assert (state, attempts) == (JobState.SUCCEEDED, 5)
    assert status == f"charged, mail is {mails[0]}"
    state, attempts, status = jobs["slow"]()
    assert (state, attempts) == (JobState.SUCCEEDED, 4)
    assert status.startswith("ConnectionError: the gateway did not answer about orders:s")
    assert status.endswith(f"; charged, mail is {mails[1]}")
    assert jobs["stolen"]() == (JobState.FAILED, 0, "the card for 90000 cents was refused; ")
    assert {found(mail)[2] for mail in mails} == {"delivered"}
    state, attempts, status = jobs["import"]()
    assert (state, attempts) == (JobState.SUCCEEDED, 1)
    assert status == "page 2; page 1; page 2 is locked; all 3 pages imported"
    report = client.lookup([made["report"]])[made["report"]]
    assert (report.state, report.attempts_remaining) == (JobState.PENDING, 3)
    assert began * 1000 < report.run_after_ms
    assert report.run_after_ms % 86_400_000 == 0
    assert "report " not in again  # the job of every night is there

    printed = worker.printed()
    assert "mail to ada@example.com: 12.50 were charged" in printed
    assert f"WARNING worker {made['slow']}, attempt 1: the gateway did not answer" in printed
    assert f"{made['stolen']} discarded after " in printed
    assert f"{made['report']} postponed after " in printed
