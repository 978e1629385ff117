"""What command lines print of strangers' data can't command a terminal; a mistake is one line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.cli.admin import cli as admin
from pinlaterd.cli.command_line import printable, printable_body, record_facts, shown_time
from pinlaterd.cli.pinlater import cli as tool
from pinlaterd.model import JobRecord, JobState

RECORD = JobRecord("q:s1:p1:1", JobState.PENDING, 2, 1, "\x1b[2J", 1, 2, 3, None, b"\xff\x1b")


@given(st.text(), st.integers(1, 300))
def test_text_is_shown_without_control_characters_and_cut(text, max_chars):
    shown = printable(text, max_chars)

    assert shown.isprintable()
    assert shown.startswith(text[:max_chars]) or not text[:max_chars].isprintable()
    if len(text) > max_chars:
        assert f"({len(text)} characters)" in shown


@given(st.binary(max_size=500))
def test_bodies_are_shown_without_control_characters(body):
    assert printable_body(body).isprintable()


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"to: ada", "to: ada"),
        ("für Ada".encode(), "für Ada"),
        (b"\x1b[31mred\x07\n", "\\x1b[31mred\\x07\\n"),
        (b"\xff\x00", "\\xff\\x00"),
        ("\u202egnp.exe".encode(), "\\u202egnp.exe"),
        (b"x" * 300, "x" * 200 + "… (300 bytes)"),
    ],
)
def test_bodies_by_example(body, shown):
    assert printable_body(body) == shown


def test_json_is_exact_and_plain_ascii():
    text = json.dumps(record_facts(RECORD))
    facts = json.loads(text)

    assert text.isascii()
    assert "\x1b" not in text
    assert facts["custom_status"] == "\x1b[2J"
    assert facts["body_base64"] == "/xs="
    assert "body" not in facts


@pytest.mark.parametrize(
    ("at_ms", "shown"),
    [(1_700_000_000_123, "2023-11-14T22:13:20.123Z"), (9 * 10**18, "9000000000000000000 ms")],
)
def test_times(at_ms, shown):
    assert shown_time(at_ms) == shown


@pytest.mark.parametrize("command", [tool, admin])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--host", "http://queue.example.com:9010"],
            "'http://queue.example.com:9010' is no server",
        ),
        (["--host", "a,b"], "write HOST, HOST:PORT or [IPV6]:PORT, with a port from 1 to 65535\n"),
        (["--host", "queue:70000"], "'queue:70000' is no server"),
        (["--port", "0"], "0 is not in the range 1<=x<=65535"),
        (["--port", "70000"], "70000 is not in the range 1<=x<=65535"),
    ],
)
def test_a_server_that_is_none_is_wrong_usage(command, options, says):
    names = {tool: ["get-queue-names"], admin: ["queue", "list"]}

    done = CliRunner().invoke(command, [*names[command], *options])

    assert done.exit_code == 2
    assert says in done.output


@pytest.mark.parametrize(
    "options",
    [["--priority", "128"], ["--attempts", str(2**31)], ["--limit", str(2**31)]]
    + [["--delay-seconds", seconds] for seconds in ("nan", "inf", "1e300")],
)
def test_numbers_that_no_call_can_carry_are_wrong_usage(options):
    done = CliRunner().invoke(admin, ["job", "retry", "mail", *options])

    assert done.exit_code == 2
    assert options[0] in done.output


@pytest.mark.parametrize("seconds", ["nan", "inf", "0"])
def test_seconds_that_nobody_can_wait_are_wrong_usage(seconds):
    done = CliRunner().invoke(admin, ["queue", "stats", "mail", "--seconds", seconds])

    assert done.exit_code == 2
    assert "--seconds" in done.output
