"""Who shares the cluster's rates: what a server-set file may hold, and when it counts."""

from __future__ import annotations

import os

import pytest

from pinlaterd.coordinator.rates import ServerSetFile, read_server_set

OWN = "a.example:9010"


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "server_set"
    made.write_text(f"# the cluster\n{OWN}\n\nb.example:9010  # the second\n")
    return made


@pytest.fixture
def new_set(path, tmp_path):
    return lambda own=OWN: ServerSetFile(path, own, tmp_path / "copy")


def look(found, times=1):
    return any(found.look() for _ in range(times))


def test_a_file_lists_servers_with_comments(new_set):
    assert new_set().servers == (OWN, "b.example:9010")
    assert new_set().problems == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a.example\n", "set:1: 'a.example' is no server; write HOST:PORT, a line each"),
        ("\na:9010 b:9010\n", "set:2: 'a:9010 b:9010' is no server; write HOST:PORT, a line each"),
        ("a:70000", "set:1: 'a:70000' is no server; write HOST:PORT, a line each"),
        ("a:1\nb:1\na:1\n", "set:3: a:1 stands in line 1 already; remove one"),
        ("# none\n", "set: lists no server; write HOST:PORT, a line each"),
    ],
)
def test_mistakes_name_their_line_and_what_is_right(text, problem):
    assert read_server_set(text, "set").problems == [problem]


def test_names_addresses_and_ipv6_are_servers():
    text = "db-1.example.org:9010\n10.0.0.1:1\n[2001:db8::1]:65535\n"

    servers, problems = read_server_set(text, "set")

    assert problems == []
    assert len(servers) == 3


def test_a_change_counts_once_the_file_lies_still(new_set, path):
    found = new_set()
    path.write_text(f"{OWN}\nb.example:90")  # somebody is writing
    assert not look(found)
    path.write_text(f"{OWN}\nb.example:9010\nc.example:9010\n")
    assert not look(found)
    assert len(found.servers) == 2

    assert look(found)
    assert len(found.servers) == 3
    assert not look(found, 3)


def test_a_file_replaced_by_rename_is_seen(new_set, path):
    found = new_set()
    new = path.with_suffix(".new")
    new.write_text(f"{OWN}\n")
    new.replace(path)

    assert look(found, 2)
    assert found.servers == (OWN,)


@pytest.mark.parametrize("content", [b"nonsense\n", b"\xff\xfe", b"", None, b"x" * 2_000_000])
def test_a_bad_file_leaves_the_last_good_one_active(new_set, path, content):
    found = new_set()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)

    assert not look(found, 3)
    assert found.servers == (OWN, "b.example:9010")
    [problem] = found.problems
    assert problem.startswith(str(path))
    assert f"still active: {OWN}, b.example:9010" in problem
    # also for a coordinator that starts now
    assert new_set().servers == (OWN, "b.example:9010")

    path.write_text(f"{OWN}\n")
    assert look(found, 2)
    assert found.problems == []


def test_a_file_that_was_never_good_leaves_this_server_alone(new_set, path):
    path.unlink()

    found = new_set()

    assert found.servers == (OWN,)
    assert os.strerror(2) in found.problems[0]


def test_a_set_without_this_server_counts_but_is_a_problem(new_set):
    found = new_set("c.example:9010")

    assert len(found.servers) == 2
    assert "does not list this server, c.example:9010" in found.problems[0]
