"""An enqueue that was stored in part: what certainly is not stored is sent once more."""

from __future__ import annotations

from typing import cast

import pytest

from pinlaterd.client import EnqueuedInPart
from pinlaterd.errors import EnqueueRejected, NoHealthyShards, PinLaterError
from pinlaterd.model import EnqueueRequest
from pinlaterd.rpc.codec import Call
from tests.client.scripted_server import BreakOff

BODIES = [b"stored", b"not", b"neither"]


def bodies(call: Call) -> list[bytes]:
    return [job.body for job in cast("EnqueueRequest", call.request).jobs]


def test_the_rest_is_stored_at_the_second_time(server, connect):
    in_part = EnqueuedInPart(["q:s1:p1:1", "", ""], "shard 2: the store is full")
    answers = iter([in_part, ["q:s1:p1:2", "q:s1:p1:3"]])
    server.reply = lambda _: next(answers)
    with connect(port=server.port) as client:
        assert client.enqueue("q", BODIES) == ["q:s1:p1:1", "q:s1:p1:2", "q:s1:p1:3"]
    assert [bodies(call) for call in server.calls] == [BODIES, BODIES[1:]]


@pytest.mark.parametrize(
    ("again", "found"),
    [
        (EnqueueRejected("overloaded: full"), ["q:s1:p1:1", "", ""]),
        (EnqueuedInPart(["", "q:s1:p1:3"], "full"), ["q:s1:p1:1", "", "q:s1:p1:3"]),
        (NoHealthyShards(), ["q:s1:p1:1", "", ""]),
        (PinLaterError("internal error; the server's log says more"), ["q:s1:p1:1", "?", "?"]),
        (BreakOff(), ["q:s1:p1:1", "?", "?"]),
    ],
)
def test_what_became_of_each_job_is_told(server, connect, again, found):
    answers = iter([EnqueuedInPart(["q:s1:p1:1", "", ""], "full"), again])
    server.reply = lambda _: next(answers)
    with connect(port=server.port) as client, pytest.raises(EnqueuedInPart) as caught:
        client.enqueue("q", BODIES)
    assert caught.value.descriptors == found


def test_jobs_that_may_be_stored_are_not_sent_again(server, connect):
    why = "shard 2: did not answer in time"
    server.reply = lambda _: EnqueuedInPart(["q:s1:p1:1", "?", "?"], why)
    with connect(port=server.port) as client, pytest.raises(EnqueuedInPart, match="2 may be"):
        client.enqueue("q", BODIES)
    assert len(server.calls) == 1
