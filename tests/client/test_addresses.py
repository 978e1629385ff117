"""Which server a call goes to, without sockets and without a clock."""

from __future__ import annotations

import random

import pytest

from pinlaterd.client.addresses import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    Address,
    AddressInvalid,
    Servers,
    parse_addresses,
)

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


def test_servers_that_are_well_take_turns(servers):
    orders = [servers.order(now=0) for _ in range(6)]

    assert all(sorted(order) == [A, B, C] for order in orders)
    assert sorted(order[0] for order in orders) == [A, A, B, B, C, C]


def test_clients_do_not_all_begin_with_the_same_server():
    firsts = {Servers([A, B, C], rng=random.Random(seed)).order(now=0)[0] for seed in range(20)}
    assert firsts == {A, B, C}


def test_one_that_failed_is_left_alone_and_the_others_share_its_calls(servers):
    servers.failed(A, now=0)

    orders = [servers.order(now=0.1) for _ in range(4)]

    assert sorted(order[0] for order in orders) == [B, B, C, C]
    assert all(order[-1] == A for order in orders)


def test_once_its_pause_is_over_one_call_looks_and_the_others_go_elsewhere(servers):
    servers.failed(A, now=0)
    later = FIRST_PAUSE_SECONDS

    assert [servers.order(now=later)[0] == A for _ in range(3)] == [True, False, False]


def test_one_that_answers_is_well_again(servers):
    servers.failed(A, now=0)
    servers.order(now=FIRST_PAUSE_SECONDS)
    servers.answered(A)

    assert sorted(servers.order(now=FIRST_PAUSE_SECONDS)[0] for _ in range(3)) == [A, B, C]


def test_pauses_double_up_to_a_limit(servers):
    servers.failed(A, now=0)
    looks = []
    for second in range(200):
        if servers.order(now=second)[0] == A:
            looks.append(second)
            servers.failed(A, now=second)

    assert looks[:5] == [1, 3, 7, 15, 31]
    assert looks[-1] - looks[-2] == LONGEST_PAUSE_SECONDS


def test_many_calls_that_break_at_once_are_one_failure(servers):
    for _ in range(16):
        servers.failed(A, now=0)

    assert servers.order(now=FIRST_PAUSE_SECONDS)[0] == A


def test_if_all_are_away_all_are_tried_and_the_first_to_return_first(servers):
    servers.failed(B, now=0)
    servers.failed(C, now=0.1)
    servers.failed(A, now=0.2)

    assert servers.order(now=0.3) == [B, C, A]
