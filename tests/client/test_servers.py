"""A Client of several servers: calls go round those that are away, and none is done twice."""

from __future__ import annotations

import pytest

from pinlaterd.client import AckInfo, ClaimedJob, Client, ConnectionFailed, JobState, OutcomeUnknown
from pinlaterd.errors import NoHealthyShards
from pinlaterd.model import LookupRequest
from tests.client.scripted_server import BreakOff, SayNothing

CLAIMED = ClaimedJob("mail:s1:p1:7", b"body", 3, 2, "h:9:1:me:4", 600)


@pytest.fixture
def three_servers(start_server):
    servers = [start_server() for _ in range(3)]
    for server in servers:
        server.reply = lambda _: ["mail:s1:p1:1"]
    return servers


@pytest.fixture
def pair(start_server):
    return start_server(), start_server()


@pytest.fixture
def client_of(connect):
    def make(*servers, **options):
        return connect([f"127.0.0.1:{server.port}" for server in servers], **options)

    return make


def calls_of(*servers):
    return sum(len(server.calls) for server in servers)


def test_calls_are_spread_and_a_server_that_goes_away_costs_none(three_servers, client_of):
    gone, *others = three_servers
    with client_of(*three_servers) as client:
        for _ in range(3):
            client.enqueue("mail", [b"a"])
        assert [len(server.calls) for server in three_servers] == [1, 1, 1]
        gone.close()
        for _ in range(6):
            client.enqueue("mail", [b"a"])

    assert len(gone.calls) == 1
    assert calls_of(*others) == 8


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(
    ("call", "repetitions"),
    [
        pytest.param(lambda c: c.enqueue("mail", [b"a"]), 0, id="a write"),
        pytest.param(
            lambda c: c.ack("mail", succeeded=[CLAIMED], failed=[CLAIMED]), 1, id="an ack"
        ),
        pytest.param(
            lambda c: c.ack("mail", succeeded=[CLAIMED, AckInfo("mail:s1:p1:8")]),
            0,
            id="an ack of a job without its claim",
        ),
        pytest.param(
            lambda c: c.dequeue("mail", limit=1, dry_run=True, succeeded=[CLAIMED]),
            0,
            id="a dequeue with acks, even on a dry run",
        ),
        pytest.param(lambda c: c.queue_names(), 1, id="a read"),
    ],
)
def test_what_is_left_unanswered_is_sent_again_once_if_that_does_nothing_twice(
    start_server, client_of, servers, call, repetitions
):
    started = [start_server() for _ in range(servers)]
    for server in started:
        server.reply = lambda _: BreakOff()
    with (
        client_of(*started) as client,
        pytest.raises(OutcomeUnknown, match="may have been carried out"),
    ):
        call(client)

    sent = [call.request for server in started for call in server.calls]
    assert sent == [sent[0]] * (1 + repetitions)
    if servers > 1:
        assert max(len(server.calls) for server in started) == 1


def test_a_read_without_an_answer_is_answered_by_another_server(pair, client_of):
    for server in pair:
        server.reply = lambda _: BreakOff() if calls_of(*pair) == 1 else 5
    with client_of(*pair) as client:
        assert client.count("mail", JobState.PENDING) == 5

    assert [len(server.calls) for server in pair] == [1, 1]


def test_if_none_can_be_reached_each_is_named_with_its_reason(free_port, connect):
    ports = [free_port(), free_port()]
    with (
        connect([f"127.0.0.1:{port}" for port in ports]) as client,
        pytest.raises(ConnectionFailed) as caught,
    ):
        client.enqueue("mail", [b"a"])

    assert not isinstance(caught.value, OutcomeUnknown)
    for port in ports:
        assert f"127.0.0.1:{port}: connection refused" in str(caught.value)


def test_servers_that_are_all_left_alone_are_tried_all_the_same(start_server, pair, client_of):
    for server in pair:
        server.close()
    with client_of(*pair) as client:
        with pytest.raises(ConnectionFailed):
            client.create_queue("mail")

        back = start_server(port=pair[0].port)
        client.create_queue("mail")

    assert len(back.calls) == 1


def test_a_probe_that_hangs_holds_up_no_call_and_asks_for_nothing(pair, wait_until, client_of):
    broken, well = pair

    broken.reply = lambda _: BreakOff() if len(broken.calls) == 1 else SayNothing()
    well.reply = lambda _: 5
    with client_of(*pair, max_connections=1) as client:

        def was_probed() -> bool:
            assert client.count("mail", JobState.PENDING) == 5
            return len(broken.calls) > 1

        wait_until(was_probed)
        for _ in range(20):
            assert client.count("mail", JobState.PENDING) == 5

    assert [call.request for call in broken.calls[1:]] == [LookupRequest([])]


def test_a_server_whose_probe_is_answered_with_an_error_gets_calls_again(
    pair, wait_until, client_of
):
    broken, well = pair

    def break_then_answer(call):
        if len(broken.calls) == 1:
            return BreakOff()
        return NoHealthyShards() if isinstance(call.request, LookupRequest) else 5

    broken.reply = break_then_answer
    well.reply = lambda _: 5
    with client_of(*pair) as client:

        def gets_calls() -> bool:
            assert client.count("mail", JobState.PENDING) == 5
            return len(broken.calls) > 2

        wait_until(gets_calls)


def test_a_black_hole_does_not_use_up_the_time_of_the_others(server, black_hole):
    """Half of the time there is may be spent on connecting to the first of two."""
    servers = [black_hole, f"127.0.0.1:{server.port}"]
    with Client(servers, timeout_seconds=8, connect_timeout_seconds=100) as client:
        for _ in range(2):  # one of them begins with the black hole
            client.create_queue("mail")

    assert len(server.calls) == 2


def test_connecting_is_bounded_by_its_own_timeout(black_hole, connect):
    with (
        connect(black_hole, connect_timeout_seconds=0.2, timeout_seconds=100_000) as client,
        pytest.raises(ConnectionFailed, match="timed out"),
    ):
        client.queue_names()
