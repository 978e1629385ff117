"""Hundreds of queues: all their figures are shown, and go with them."""

from __future__ import annotations

import re
import urllib.request

import pytest

from pinlaterd.client import Job
from tests.deployment import CALL_SECONDS

pytestmark = pytest.mark.service

QUEUES = [f"one_of_many_{number}" for number in range(300)]
PASSWORD = "open sesame"
# Of no worth: it takes next to no time to check.
PASSWORD_HASH = "scrypt$16$8$1$bWFueQ==$6JzeErJBMlr1abrwqnVffxeSCTz6SS5qNKWfoisi9po="


def metrics(live) -> str:
    url = f"http://127.0.0.1:{live.deployment.stats_port}/metrics"
    with urllib.request.urlopen(url, timeout=CALL_SECONDS) as answer:
        return str(answer.read(), "utf-8")


def shown(live) -> set[str]:
    return set(re.findall(r'queue="(one_of_many_\d+)"', metrics(live)))


def test_figures_of_deleted_queues_leave_nothing_behind(live, client, wait_until):
    live.settings(admin_password_hash=f'"{PASSWORD_HASH}"')
    live.wait_until_changed()
    for queue in QUEUES:
        client.create_queue(queue)
        client.enqueue(queue, [Job(b"x")])
    wait_until(lambda: set(QUEUES) <= shown(live), seconds=60)

    for queue in QUEUES:
        client.delete_queue(queue, password=PASSWORD)

    wait_until(lambda: "one_of_many_" not in metrics(live), seconds=60)
    assert "one_of_many_" not in str(live.figures())
