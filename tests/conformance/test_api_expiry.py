"""Jobs with an expiry: from then on nobody gets them any more."""

from __future__ import annotations

import time

import pytest

from tests.conformance.api import FAILED, Client, Deployment, Refused
from tests.conftest import WaitUntil

pytestmark = pytest.mark.service


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_a_job_that_has_expired_is_not_handed_out(
    service: Deployment, client: Client, queue, wait_until: WaitUntil
):
    past, later = _now_ms() - 1, _now_ms() + 600_000
    [gone] = client.enqueue(
        queue, client.job(b"gone", expiresAtTimestampMillis=past, customStatus="sent")
    )
    [stays] = client.enqueue(queue, client.job(b"stays", expiresAtTimestampMillis=later))

    handed_out = client.dequeue(queue, 10)

    assert list(handed_out) == [stays]
    wait_until(lambda: client.info(gone).jobState == FAILED)
    info = client.info(gone)
    assert (info.customStatus, info.endReason) == ("sent expired", "expired")
    assert info.expiresAtTimestampMillis == past
    assert client.info(stays).expiresAtTimestampMillis == later
    assert client.info(stays).endReason is None
    wait_until(lambda: service.counter(f"{queue}_expired") == 1)
    assert service.counter(f"{queue}_claim_mismatch") == 0


def test_a_scheduled_job_expires_without_a_dequeue(client: Client, queue, wait_until: WaitUntil):
    soon, later = _now_ms() + 300, _now_ms() + 600_000
    jobs = [
        client.job(b"%d" % n, expiresAtTimestampMillis=soon, runAfterTimestampMillis=later)
        for n in range(20)
    ]
    descriptors = client.enqueue(queue, *jobs)

    wait_until(lambda: client.count(queue, FAILED, countFutureJobs=True) == 20)

    assert _now_ms() >= soon
    assert {info.endReason for info in client.lookup(*descriptors).values()} == {"expired"}


@pytest.mark.parametrize(
    "field", ["expiresAtTimestampMillis", "runAfterTimestampMicros", "expiresAtTimestampMicros"]
)
def test_a_time_of_options_out_of_range_is_refused(client: Client, queue, field: str):
    with pytest.raises(Refused, match=rf"jobs\[0\].{field} is -1"):
        client.enqueue(queue, client.job(b"x", **{field: -1}))
