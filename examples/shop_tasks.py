"""A shop's background work: the handlers of four queues. From this folder:

    pinlater worker shop_tasks --create-queues
    python shop_enqueue.py                          # in another terminal

Bodies are JSON. What a handler does it may have to do twice (a worker that dies has its jobs handed
out again), so charges bear the job's descriptor, by which a payment gateway knows a repetition.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from datetime import UTC, datetime, timedelta

from pinlaterd.client import (
    Discard,
    Handlers,
    Later,
    Outcome,
    Retry,
    RunningJob,
    exponential,
)

log = logging.getLogger("shop")
handlers = Handlers()


class CardRefused(Exception):
    """The bank refused the card; a retry changes nothing."""


# --- a plain function runs in a thread; errors are retried by policy ---------------------------
# How many attempts there are is the producer's to say: `shop_enqueue.py` gives orders five.


@handlers.queue("orders", concurrency=4, retry={ConnectionError: exponential(0.2, most=60)})
def charge(job: RunningJob) -> str:
    """Charge an order, then enqueue the next step: a mail, as a job of another queue."""
    order = json.loads(job.body)
    try:
        charge_card(order["card"], order["cents"], key=job.descriptor, attempt=job.attempt)
    except CardRefused as error:
        raise Discard(f"{error}; ") from error  # FAILED, whatever attempts remain
    mail = {"to": order["to"], "text": f"{order['cents'] / 100:.2f} were charged"}
    [descriptor] = job.client.enqueue("mail", [json.dumps(mail).encode()])
    return f"charged, mail is {descriptor}"  # appended to the job's custom status


def charge_card(card: str, cents: int, *, key: str, attempt: int) -> None:
    """The payment gateway; `key` makes charges idempotent."""
    if card == "stolen":
        raise CardRefused(f"the card for {cents} cents was refused")
    if card == "slow" and attempt == 1:
        raise ConnectionError(f"the gateway did not answer about {key}")


# --- async def: a hundred at a time in one event loop ------------------------------------------


@handlers.queue("mail", concurrency=100, time_limit_seconds=30)
async def send(job: RunningJob) -> str:
    mail = json.loads(job.body)
    if "@" not in mail["to"]:
        raise Discard(f"no address: {mail['to']}")
    await deliver(mail["to"], mail["text"])
    return "delivered"


async def deliver(to: str, text: str) -> None:
    await asyncio.sleep(0.01)  # stands for a call to a mail server
    log.info("mail to %s: %s", to, text)


# --- step by step: the body says where to continue ---------------------------------------------


@handlers.queue("imports")
def import_catalogue(job: RunningJob) -> str:
    """A page a run; other jobs get their turn in between, and a crash costs one page at most."""
    progress = json.loads(job.body)
    page, pages = progress["page"], progress["pages"]
    if page == 2 and job.attempt == 1:
        raise Retry(0.2, status="page 2 is locked; ")  # an attempt less, in a fifth of a second
    if page < pages:
        rest = json.dumps({"page": page + 1, "pages": pages}).encode()
        raise Later(0, body=rest, status=f"page {page}; ")  # no attempt less
    return f"all {pages} pages imported"


# --- periodic: one job that is postponed until the next night, as by cron ----------------------


@handlers.queue("reports")
def report(job: RunningJob) -> None:
    """Each night has three attempts, which `shop_enqueue.py` gives the job. After the third failure
    it has FAILED, and no night has a report until `pinlater-admin job retry reports` restarts it:
    have an alarm on `pinlaterd_worker_jobs_total{ending="failed"}`."""
    today = datetime.now(UTC).date()
    log.info("%s: the report of %s", job.descriptor, today)
    midnight = datetime.combine(today + timedelta(days=1), datetime.min.time(), UTC)
    raise Later(
        run_after_ms=round(midnight.timestamp() * 1000), status=f"reported {today}; ", attempts=3
    )


# --- around each job: logging, tracing, figures ------------------------------------------------

began_at: dict[str, float] = {}  # by descriptor: hooks may be called in several threads


@handlers.before
def begin(job: RunningJob) -> None:
    began_at[job.descriptor] = time.monotonic()


@handlers.on_error
def complain(job: RunningJob, error: BaseException) -> None:
    log.warning("%s, attempt %d: %s", job.descriptor, job.attempt, error)


@handlers.after
def end(job: RunningJob, outcome: Outcome) -> None:
    milliseconds = 1000 * (time.monotonic() - began_at.pop(job.descriptor))
    log.info("%s %s after %.0f ms", job.descriptor, outcome.ending, milliseconds)
