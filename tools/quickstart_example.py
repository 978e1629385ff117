"""Example queues, so that whoever opens the dashboard has something to see.

    mail       failed jobs with several messages, places and workers; some succeeded, some run
    images     ready jobs that no worker asks for
    invoices   a batch that is scheduled for later
    reports    paused

The quickstart makes them once; tests and screenshots of the dashboard use them, too. The workers
are made up: nothing is sent to anybody.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pinlaterd.client import AckInfo, Client, Job, JobState
from pinlaterd.config import edit
from pinlaterd.config.layout import ETC
from pinlaterd.model import ClaimedJob, JobOptions

MAIL, IMAGES, INVOICES, REPORTS = "mail", "images", "invoices", "reports"
MAILS, SUCCEEDED_MAILS, RUNNING_MAILS = 480, 200, 6
READY_IMAGES, SCHEDULED_INVOICES, PAUSED_REPORTS = 1_200, 96, 30
MAIL_WORKERS = tuple(f"mailer:web{number}" for number in range(1, 8))
_HOUR_MS, _MINUTE_MS = 3_600_000, 60_000
_MAILS_A_CALL = 20
_MOST_SECONDS = 180  # of each wait for mails that a shard holds back: it is an example only
_FIRST_ORDER = 10**16  # beyond what a browser's own numbers can hold
_TEMPLATES = ("order-shipped", "order-received", "password-reset")


class _Failure(NamedTuple):
    """A way to fail: that of so many among `_OF_FAILURES` failed mails."""

    share: int
    message: str


_OF_FAILURES = 20
_FAILURES = (
    _Failure(15, "ConnectTimeout: smtp{host} did not answer (mail.py:12 in send)"),
    _Failure(3, 'ValueError: no address in "{template}" (mail.py:48 in parse)'),
    _Failure(2, "KeyError: 'template' (render.py:9 in body < mail.py:30 in send)"),
)


def leave(client_of: Callable[[str], Client], directory: Path) -> bool:
    """Make the example queues with clients of the sources that `client_of` is called with, and
    return True; False if one of them is there, since its jobs may be somebody's."""
    with client_of("quickstart:example") as client:
        if {MAIL, IMAGES, INVOICES, REPORTS} & client.queue_names():
            return False
        for queue in (MAIL, IMAGES, INVOICES, REPORTS):
            client.create_queue(queue)
        _fill_mail(client, client_of)
        client.enqueue(IMAGES, [_body(image=f"{n}.png", width=320) for n in range(READY_IMAGES)])
        client.enqueue(REPORTS, [_body(report="daily", day=n) for n in range(PAUSED_REPORTS)])
        edit.set_paused(
            directory / ETC, REPORTS, paused=True, by="quickstart", reason="an example of a pause"
        )
        first_ms = time.time_ns() // 1_000_000 + _HOUR_MS
        times = [first_ms + n * _MINUTE_MS for n in range(SCHEDULED_INVOICES)]
        client.enqueue(INVOICES, [Job(_body(invoice=n), 1, ms) for n, ms in enumerate(times)])
    return True


def _fill_mail(client: Client, client_of: Callable[[str], Client]) -> None:
    """Have the made-up workers end most mails, and keep a few claimed."""
    workers = [client_of(source) for source in MAIL_WORKERS]
    _enqueue_mails(client, range(MAILS))
    # What fails for the first time comes round again for its second attempt. An answer leaves out
    # the jobs of a shard that is held up for a moment.
    until = time.monotonic() + _MOST_SECONDS
    for worker in itertools.cycle(workers):
        if _end_mails(worker):
            continue
        if time.monotonic() > until or not client.count(MAIL, JobState.PENDING):
            break
    _enqueue_mails(client, range(MAILS, MAILS + RUNNING_MAILS))
    until = time.monotonic() + _MOST_SECONDS
    for worker in workers[:RUNNING_MAILS]:
        while not worker.dequeue(MAIL, limit=1, max_wait_ms=1_000) and time.monotonic() < until:
            pass
    for worker in workers:
        worker.close()


def _enqueue_mails(client: Client, numbers: range) -> None:
    mails = [
        Job(
            _body(to=f"user{n}@example.com", template=_TEMPLATES[n % 3], order=_FIRST_ORDER + n),
            options=JobOptions(key=f"order-{n}"),
        )
        for n in numbers
    ]
    client.enqueue_keyed(MAIL, mails)


def _end_mails(worker: Client) -> bool:
    """Claim mails and end them; return False if none was ready."""
    claimed = worker.dequeue(MAIL, limit=_MAILS_A_CALL)
    succeeded: list[AckInfo] = []
    failed: list[AckInfo] = []
    for job in claimed:
        mail = json.loads(job.body)
        number = mail["order"] - _FIRST_ORDER
        if number < SUCCEEDED_MAILS:
            succeeded.append(_ack(job, "accepted by smtp1"))
            continue
        message = _failure_of(number).message.format(host=1 + number % 3, **mail)
        failed.append(_ack(job, message if job.attempts_remaining == 1 else f"{message}; "))
    if claimed:
        worker.ack(MAIL, succeeded=succeeded, failed=failed)
    return bool(claimed)


def _failure_of(number: int) -> _Failure:
    each = [failure for failure in _FAILURES for _ in range(failure.share)]
    return each[number % _OF_FAILURES]


def _ack(job: ClaimedJob, status: str) -> AckInfo:
    return AckInfo(job.descriptor, status, claim_descriptor=job.claim_descriptor)


def _body(**fields: object) -> bytes:
    return json.dumps(fields).encode()
