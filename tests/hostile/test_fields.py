"""Well-formed calls whose texts and numbers are meant to do harm: data stays data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from pinlaterd.client import AckInfo, CheckpointInfo, Client, Job, JobState, PinLaterError
from pinlaterd.errors import (
    ContinuationInvalid,
    InvalidEnqueue,
    QueueNameInvalid,
    QueueNameTooLong,
)
from pinlaterd.model import (
    AckRequest,
    CallContext,
    CheckpointRequest,
    DequeueRequest,
    Method,
    Request,
    RetryFailedRequest,
    ScanRequest,
)
from pinlaterd.rpc import codec
from tests.deployment import Deployment, claim
from tests.hostile.wire import RawConnection

pytestmark = pytest.mark.service

TEXTS = {
    "sql": "'; DROP TABLE jobs; --",
    "sql quoted": '"; DELETE FROM queues WHERE 1=1 /*',
    "sql pattern": "%_\\%' OR 'a' LIKE '%",
    "lua": "]] redis.call('FLUSHALL') --[[",
    "shell": "$(reboot)`reboot`; reboot &",
    "html": "<script>alert(1)</script>&amp;<!--",
    "format": "%s%n%d{0.__class__}{}",
    "path": "../../../../etc/passwd",
    "nul": "a\x00b",
    "control": "\r\n\x1b[31m\x07\x7f",
    "log": "x\n2026-01-01T00:00:00.000Z ERROR shard-1 made up",
    "bidi": "\u202eevil\u202c \U0001d4b3 é \ufdfd",
    "colons": "a:b:c:s1:p1:1:::",
    "long": "x" * 70_000,
    "pattern": "(" * 5000,
}
I32 = (-(2**31), -1, 0, 1, 2**31 - 1)
I64 = (-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1)


@pytest.fixture
def client(deployment: Deployment) -> Iterator[Client]:
    with deployment.client() as client:
        yield client


@pytest.fixture
def queue(client: Client, request: pytest.FixtureRequest) -> str:
    name = "".join(c if c.isalnum() else "_" for c in request.node.name)[:60]
    client.create_queue(name)
    return name


def _refused_or_done(call: Callable[[], object]) -> None:
    """Any answer will do but that of a defect."""
    message = _refusal(call)
    assert "internal error" not in message
    assert len(message) < 5000


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except PinLaterError as error:
        return error.message
    return ""


@pytest.fixture(params=TEXTS, ids=lambda name: name.replace(" ", "_"))
def hostile_text(request) -> str:
    return TEXTS[request.param]


def test_no_queue_is_called_so(client: Client, hostile_text):
    for call in (
        lambda: client.create_queue(hostile_text),
        lambda: client.enqueue(hostile_text, [b"x"]),
        lambda: client.dequeue(hostile_text, limit=1),
        lambda: client.ack(hostile_text),
        lambda: client.checkpoint(hostile_text, []),
        lambda: client.count(hostile_text, JobState.PENDING),
        lambda: list(client.scan(hostile_text, JobState.PENDING)),
        lambda: client.retry_failed(hostile_text),
        lambda: client.delete_jobs(hostile_text, JobState.FAILED),
        lambda: client.delete_queue(hostile_text, password=hostile_text),
    ):
        with pytest.raises(PinLaterError) as caught:
            call()
        assert "internal error" not in str(caught.value)
        assert len(str(caught.value)) < 1000
    with pytest.raises((QueueNameInvalid, QueueNameTooLong)):
        client.create_queue(hostile_text)


def test_it_goes_through_a_jobs_life_unchanged(
    deployment: Deployment, client: Client, queue: str, hostile_text
):
    source = "".join(filter(str.isprintable, hostile_text))[:30]
    with deployment.client(source) as worker:
        body = hostile_text.encode()
        [descriptor] = worker.enqueue(queue, [Job(body, custom_status=hostile_text[:100])])
        [job] = claim(worker, queue)
        worker.checkpoint(queue, [CheckpointInfo(descriptor, prepend_custom_status="<")])
        worker.ack(queue, succeeded=[AckInfo(descriptor, hostile_text[:100])])
    record = client.lookup([descriptor], include_body=True)[descriptor]
    [scanned] = client.scan(queue, JobState.SUCCEEDED)

    assert (job.body, record.body) == (body, body)
    assert record.custom_status == f"<{hostile_text[:100]}{hostile_text[:100]}"
    assert record.claim_descriptor is not None
    assert f":{source}:" in record.claim_descriptor
    assert scanned == record._replace(body=None)
    assert client.count(queue, JobState.SUCCEEDED) == 1


@pytest.mark.parametrize("source", ["a\x00b", "a\nb", "\x1b[31m", "x" * 121])
def test_no_caller_is_called_so(deployment: Deployment, queue: str, source):
    """It would be part of claim descriptors, and of what terminals and logs show."""
    with deployment.client(source) as client:
        for call in (
            lambda: client.enqueue(queue, [b"x"]),
            lambda: client.dequeue(queue, limit=1),
        ):
            with pytest.raises(PinLaterError, match=r"invalid request: .*source"):
                call()


def test_it_is_no_descriptor_no_claim_no_token(client: Client, queue: str, hostile_text):
    [descriptor] = client.enqueue(queue, [b"x"])
    [job] = claim(client, queue)

    assert client.lookup([hostile_text, f"{descriptor}{hostile_text}"]) == {}
    for name in (hostile_text, f"{descriptor}{hostile_text}", f"{queue}:s{hostile_text}:p1:1"):
        with pytest.raises(PinLaterError, match="descriptor"):
            client.ack(queue, succeeded=[AckInfo(name)])
        with pytest.raises(PinLaterError, match="descriptor"):
            client.checkpoint(queue, [CheckpointInfo(name)])
    client.ack(queue, failed=[AckInfo(descriptor, claim_descriptor=hostile_text)])
    assert client.lookup([descriptor])[descriptor].state is JobState.IN_PROGRESS
    client.ack(queue, succeeded=[job])
    assert client.lookup([descriptor])[descriptor].state is JobState.SUCCEEDED


def test_it_is_only_a_pattern(client: Client, queue: str, hostile_text):
    client.enqueue(queue, [b"harmless", b"another"])
    for call in (
        lambda: client.count(queue, JobState.PENDING, body_regex=hostile_text),
        lambda: list(client.scan(queue, JobState.PENDING, body_regex=hostile_text)),
        lambda: client.delete_jobs(queue, JobState.PENDING, body_regex=hostile_text),
    ):
        _refused_or_done(call)
    assert client.count(queue, JobState.PENDING) == 2


def test_it_is_no_continuation(deployment: Deployment, queue: str, hostile_text):
    request = ScanRequest(queue, JobState.PENDING, continuation=hostile_text)
    with pytest.raises(ContinuationInvalid):
        _call(deployment, Method.SCAN, request)


@pytest.mark.parametrize("run_after_ms", I64)
def test_any_run_after(client: Client, queue: str, run_after_ms):
    try:
        [descriptor] = client.enqueue(queue, [Job(b"x", run_after_ms=run_after_ms)])
    except InvalidEnqueue:
        return
    assert client.lookup([descriptor])[descriptor].run_after_ms == run_after_ms
    future = run_after_ms > 2**41
    assert client.count(queue, JobState.PENDING, future=future) == 1
    [scanned] = client.scan(queue, JobState.PENDING, future=future, page_size=1)
    assert scanned.descriptor == descriptor
    if future:
        assert client.dequeue(queue, limit=1) == []
    else:
        claim(client, queue)


@pytest.mark.parametrize("delay_ms", I64)
def test_any_retry_delay(client: Client, queue: str, delay_ms):
    [descriptor] = client.enqueue(queue, [Job(b"x", attempts_allowed=5)])
    claim(client, queue)

    _refused_or_done(
        lambda: client.ack(queue, failed=[AckInfo(descriptor, retry_delay_ms=delay_ms)])
    )

    assert descriptor in client.lookup([descriptor])
    counts = [
        client.count(queue, state, future=future) for state in JobState for future in (False, True)
    ]
    assert sum(counts) == 1


@pytest.mark.parametrize("run_after_ms", I64)
def test_any_run_after_in_checkpoints_and_retries(
    deployment: Deployment, client: Client, queue: str, run_after_ms
):
    [descriptor] = client.enqueue(queue, [Job(b"x", attempts_allowed=1)])
    claim(client, queue)
    checkpoint = CheckpointInfo(descriptor, run_after_ms=run_after_ms)
    _refused_or_done(
        lambda: _call(deployment, Method.CHECKPOINT, CheckpointRequest(queue, [checkpoint]))
    )
    client.ack(queue, failed=[AckInfo(descriptor)])
    _refused_or_done(
        lambda: _call(
            deployment,
            Method.RETRY_FAILED,
            RetryFailedRequest(queue, run_after_ms=run_after_ms),
        )
    )
    assert descriptor in client.lookup([descriptor])


@pytest.mark.parametrize("number", I32)
def test_any_number_of_attempts_and_any_limit(client: Client, queue: str, number):
    _refused_or_done(lambda: client.enqueue(queue, [Job(b"x", attempts_allowed=number)]))
    _refused_or_done(lambda: client.dequeue(queue, limit=number))
    _refused_or_done(lambda: client.dequeue(queue, limit=number, dry_run=True))
    _refused_or_done(lambda: client.retry_failed(queue, limit=number))
    _refused_or_done(lambda: client.retry_failed(queue, attempts_to_allow=number))
    _refused_or_done(lambda: client.delete_jobs(queue, JobState.PENDING, limit=number))
    _refused_or_done(lambda: next(client.scan(queue, JobState.PENDING, page_size=number), None))
    [descriptor] = client.enqueue(queue, [b"y"])
    until = time.monotonic() + 60
    while client.lookup([descriptor])[descriptor].state is JobState.PENDING:
        assert time.monotonic() < until
        client.dequeue(queue, limit=1000)
    _refused_or_done(
        lambda: client.checkpoint(queue, [CheckpointInfo(descriptor, attempts=number)])
    )
    assert client.lookup([descriptor])[descriptor].state is JobState.IN_PROGRESS


@pytest.mark.parametrize("number", I32)
def test_any_wait(deployment: Deployment, queue: str, number):
    request = DequeueRequest(queue, 1, max_wait_ms=number)
    began = time.monotonic()
    _refused_or_done(lambda: _call(deployment, Method.DEQUEUE, request))
    assert time.monotonic() - began < 30  # the longest that a number can say is 25 days


def test_an_ack_of_thousands_of_strangers_fails_alone(client: Client, queue: str):
    [descriptor] = client.enqueue(queue, [b"x"])
    [job] = claim(client, queue)
    strangers = [AckInfo(f"elsewhere:s9:p1:{n}") for n in range(5000)]
    request = AckRequest(queue, [*strangers, AckInfo(job.descriptor)])

    with pytest.raises(PinLaterError, match="elsewhere:s9:p1:0") as caught:
        client.ack(queue, succeeded=request.succeeded)

    assert len(caught.value.message) < 17_000
    assert client.lookup([descriptor])[descriptor].state is JobState.SUCCEEDED


def _call(deployment: Deployment, method: Method, request: Request) -> object:
    """A call that the Client would not make."""
    with RawConnection(deployment.port) as connection:
        [answer] = connection.exchange(
            codec.encode_call(method, 7, CallContext("hostile"), request)
        )
        assert connection.open
    return codec.decode_reply(method, answer)
