"""Which server a call goes to, without sockets and without a clock."""

from __future__ import annotations

import itertools
import random

import pytest

from pinlaterd.client.addresses import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    AddressInvalid,
    Servers,
    parse_addresses,
)
from pinlaterd.config.schema import Address

A, B, C = (Address(name, 9010) for name in "abc")


@pytest.fixture
def servers() -> Servers:
    return Servers([A, B, C], rng=random.Random(0))


@pytest.mark.parametrize(
    ("named", "addresses"),
    [
        ("queue.example.com", [("queue.example.com", 9010)]),
        ("10.0.0.1:99", [("10.0.0.1", 99)]),
        ("::1", [("::1", 9010)]),
        ("[::1]", [("::1", 9010)]),
        ("[::1]:99", [("::1", 99)]),
        (["a", "b:99", "a:9010"], [("a", 9010), ("b", 99)]),
    ],
)
def test_servers_are_named_by_host_and_port(named, addresses):
    assert parse_addresses(named, 9010) == tuple(Address(*each) for each in addresses)


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ([], "no server is named"),
        ("", "'' is no server"),
        (":9010", "':9010' is no server"),
        ("http://a:9010", "'http://a:9010' is no server"),
        ("http://a", "port '//a' is not a number"),
        ("a:9010,b:9010", "several as a list"),
        ("[::1", "is no server"),
        ("[::1]9010", "is no server"),
        ("a:", "port '' is not a number from 1 to 65535"),
        ("a:0", "port '0'"),
        ("a:65536", "port '65536'"),
        ("a:²", "port '²'"),
        (["a", "b:x"], "'b:x': port 'x'"),
        ("a..b", "a label of a host's name has 1 to 63 characters"),
        (f"{'x' * 64}.example:9010", "has 1 to 63 characters"),
        (f"{'ü' * 64}.example", "has 1 to 63 characters"),
        ("\ud800", "that DNS can hold"),
    ],
)
def test_what_names_no_server_is_refused(named, problem):
    with pytest.raises(AddressInvalid, match=problem):
        parse_addresses(named, 9010)


def test_an_address_is_shown_as_it_is_written():
    shown = [str(address) for address in parse_addresses(["a:1", "[::1]:2"], 9010)]
    assert shown == ["a:1", "[::1]:2"]


def firsts(servers, calls=6):
    """Where that many calls go first, in the order of names."""
    return sorted(servers.order()[0] for _ in range(calls))


def test_servers_that_are_well_take_turns(servers):
    assert sorted(servers.order()) == [A, B, C]
    assert firsts(servers) == [A, A, B, B, C, C]
    # Clients do not all begin with the same one.
    assert {Servers([A, B, C], rng=random.Random(s)).order()[0] for s in range(20)} == {A, B, C}


def test_one_that_failed_is_left_alone_until_it_answers_a_probe(servers):
    for _ in range(16):  # many calls that break at once are one failure
        servers.failed(A, now=0)

    assert servers.begin_probe(now=FIRST_PAUSE_SECONDS / 2) is None
    assert servers.begin_probe(now=FIRST_PAUSE_SECONDS) == A
    assert servers.begin_probe(now=1000) is None  # it is probed by one
    assert firsts(servers) == [B, B, B, C, C, C]
    assert servers.order()[-1] == A

    servers.end_probe(A, now=1, is_back=True)
    assert firsts(servers) == [A, A, B, B, C, C]
    assert servers.begin_probe(now=1000) is None


def test_one_that_answers_a_call_is_well_again_whatever_its_probe_finds(servers):
    servers.failed(A, now=0)
    servers.begin_probe(now=1)
    servers.answered(A)
    servers.end_probe(A, now=1, is_back=False)

    assert firsts(servers, 3) == [A, B, C]


def pauses(servers, fail_again, seconds):
    """How long A is left alone each time, from one failure to the next."""
    servers.failed(A, now=0)
    ends = [0.0]
    for tick in range(int(seconds / FIRST_PAUSE_SECONDS)):
        now = tick * FIRST_PAUSE_SECONDS
        if servers.begin_probe(now=now) == A:
            fail_again(now)
            ends.append(now)
    return [end - begin for begin, end in itertools.pairwise(ends)]


def test_pauses_double_up_to_a_limit(servers):
    found = pauses(servers, lambda now: servers.end_probe(A, now=now, is_back=False), 100)

    assert found[:4] == [FIRST_PAUSE_SECONDS * 2**n for n in range(4)]
    assert max(found) == found[-1] == LONGEST_PAUSE_SECONDS


def test_one_that_answers_probes_but_no_calls_is_left_alone_for_longer_and_longer(servers):
    def answer_the_probe_alone(now):
        servers.end_probe(A, now=now, is_back=True)
        servers.failed(A, now=now)

    found = pauses(servers, answer_the_probe_alone, 100)
    assert found[:4] == [FIRST_PAUSE_SECONDS * 2**n for n in range(4)]


def test_if_all_are_away_all_are_tried_and_the_first_to_return_first(servers):
    servers.failed(B, now=0)
    servers.failed(C, now=0.1)
    servers.failed(A, now=0.2)

    assert servers.order() == [B, C, A]


def test_a_server_without_others_is_never_probed():
    alone = Servers([A], rng=random.Random(0))
    alone.failed(A, now=0)

    assert alone.order() == [A]
    assert alone.begin_probe(now=1000) is None
