"""Help and wrong usage of all programs, and what they print of anybody's data."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.cli.admin import cli as admin
from pinlaterd.cli.command import printable, printable_body, record_text, shown_time
from pinlaterd.cli.pinlater import cli as pinlater
from pinlaterd.cli.pinlaterd import cli as pinlaterd
from pinlaterd.config.password import is_hash
from pinlaterd.model import JobOptions, JobRecord, JobState
from tests.cli.program import ROOT, SECONDS, Program

HEAVY = "aiohttp rich prometheus_client psutil zmq thriftpy2 supervisor yaml"


def commands(group: click.Group, *names: str) -> Iterator[tuple[str, ...]]:
    """Every command of the group."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, *names, name)
        else:
            yield (*names, name)


@pytest.mark.parametrize("program", [pinlaterd, pinlater, admin], ids=lambda it: it.name)
def test_every_command_has_help_with_an_example(program):
    for names in ((), *commands(program)):
        done = CliRunner().invoke(program, [*names, "--help"])

        assert done.exit_code == 0
        assert f"\n    {' '.join((program.name, *names))}" in done.stdout.partition("Example")[2]


def test_importing_the_command_line_loads_none_of_the_processes_libraries():
    loaded = f"{{*'{HEAVY}'.split()}} & {{*sys.modules}}"
    code = f"import sys, pinlaterd.cli.pinlaterd; assert not {loaded}"

    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_dashboard_loads_what_edits_configurations_when_it_edits_one():
    loaded = "{'yaml', 'pinlaterd.config.load'} & {*sys.modules}"
    code = f"import sys, pinlaterd.web.main; assert not {loaded}"

    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("program", "line", "named"),
    [
        (pinlater, "enqueue", "--queue"),
        (pinlater, "dequeue --queue q --batch-size 0", "--batch-size"),
        (pinlater, f"dequeue --queue q --batch-size {2**31}", "--batch-size"),
        (pinlater, "enqueue --queue q --priority 128", "--priority"),
        (pinlater, "enqueue --queue q --body a --from-file -", "--from-file"),
        (pinlater, "enqueue --queue q --delay 1 --run-after 1", "--run-after exclude each other"),
        (pinlater, "enqueue --queue q --run-after tomorrow", "write 2026-11-21T03:00:00Z"),
        (pinlater, "enqueue --queue q --run-after 2026-11-21T03:00:00", "no time with a zone"),
        (pinlater, "fly", "fly"),
        (pinlater, "bench enqueue", "--queue"),
        (pinlater, "bench enqueue --queue q --rate 0", "--rate"),
        (pinlater, "bench enqueue --queue q --rate nan", "--rate"),
        (pinlater, "bench enqueue --queue q --rate 10001", "--rate"),
        (pinlater, "bench enqueue --queue q --num-queries -2", "--num-queries"),
        (pinlater, "bench enqueue --queue q --seconds 0", "--seconds"),
        (pinlater, "bench enqueue --queue q --warm-up -1", "--warm-up"),
        (pinlater, "bench enqueue --queue q --slow-ms inf", "--slow-ms"),
        (pinlater, "bench enqueue --queue q --fill 10", "--fill"),
        (pinlater, "bench dequeue --queue q --fill -1", "--fill"),
        (pinlater, "bench cycle --queue q --concurrency 0", "--concurrency"),
        (pinlater, "get-queue-names --host a,b", "'a,b' is no server; write HOST, HOST:PORT or"),
        (pinlater, "get-queue-names --host queue:70000", "is not a number from 1 to 65535"),
        (pinlater, "get-queue-names --port 0", "0 is not in the range 1<=x<=65535"),
        (admin, "queue list --host http://a:1", "'http://a:1' is no server"),
        (admin, "queue list --port 70000", "70000 is not in the range 1<=x<=65535"),
        (admin, "queue limit mail -1", "'-1' is neither a number of jobs per second nor none"),
        (admin, "queue pause no-name", "'no-name' is no queue name; use letters"),
        (admin, "job retry mail --priority 128", "--priority"),
        (admin, f"job retry mail --attempts {2**31}", "--attempts"),
        (admin, f"job retry mail --limit {2**31}", "--limit"),
        (admin, "job retry mail --delay-seconds nan", "--delay-seconds"),
        (admin, "job retry mail --delay-seconds 1e300", "--delay-seconds"),
        (admin, "queue stats mail --seconds inf", "--seconds"),
        (admin, "queue stats mail --seconds 0", "--seconds"),
        (admin, "hash-password secret", "unexpected extra argument"),
        (admin, "shard failover 1 --to nowhere", "'nowhere' is not HOST:PORT"),
        (pinlaterd, "init d --engine oracle", "--engine"),
        (pinlaterd, "init d --shards 0", "--shards"),
        (pinlaterd, f"init {__file__}", "is a file"),
    ],
)
def test_wrong_usage_exits_2_and_is_named(program, line, named):
    done = CliRunner().invoke(program, line.split())

    assert done.exit_code == 2, done.output
    assert named in " ".join(done.output.splitlines())


# --- streams that are closed, full, or can't show a character -------------------------------------

PROGRAMS = ("pinlaterd", "pinlater", "admin")


def shell(line: str, program: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a program by a shell's line, in which it is $P."""
    return subprocess.run(
        ["bash", "-c", line],
        env=os.environ | {"P": " ".join(Program(program).line(""))} | environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=SECONDS,
    )


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_help_and_errors_into_a_full_device_are_one_line(program, unbuffered):
    done = shell("$P --help >/dev/full", program, PYTHONUNBUFFERED=unbuffered)
    unsaid = shell("$P --nonsense 2>/dev/full", program, PYTHONUNBUFFERED=unbuffered)

    assert done.returncode == 1
    assert done.stderr.decode().endswith(": input or output failed: no space left on device\n")
    assert done.stderr.count(b"\n") == 1
    assert unsaid.returncode != 0


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_programs_run_with_standard_streams_closed(program, closed):
    assert shell(f"$P --help {closed}", program).returncode == 0
    assert shell(f"$P --nonsense {closed}", program).returncode == 2


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_programs_that_another_starts_have_all_standard_streams(closed):
    code = (
        "import subprocess; from pinlaterd.lifecycle import prepare_streams; prepare_streams();"
        "raise SystemExit(subprocess.call(['sh', '-c', ': <&0 >&1 7>&2']))"
    )
    assert shell(f'"{sys.executable}" -c "{code}" {closed}', "pinlater").returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_a_stream_cannot_show_is_escaped_on_both(encoding):
    line = "$P status /nowhere/\U0001f600; $P init /proc/\U0001f600; $P \U0001f600; $P init --help"
    done = shell(line, "pinlaterd", PYTHONIOENCODING=encoding, LC_ALL="C.UTF-8")

    assert done.stderr.decode("ascii").count(r"\U0001f600") == 3
    assert b"Traceback" not in done.stderr
    assert "Examples:" in done.stdout.decode("ascii")


def test_an_input_that_is_no_utf_8_is_a_message_or_taken_as_it_is(tmp_path: Path):
    strict = {"PYTHONIOENCODING": "utf-8:strict", "LC_ALL": "C.UTF-8", "D": str(tmp_path)}
    wrong = shell('$P job-type add --dir "$D" $(printf "a\\377")', "admin", **strict)
    taken = shell(r'printf "p\344ss" | $P hash-password', "admin", **strict)

    what = b"an argument, the environment or standard input"
    assert wrong.stderr == b"pinlater-admin: " + what + b" is not valid UTF-8\n"
    assert taken.returncode == 0
    assert is_hash(taken.stdout.decode().strip())


def test_a_file_that_is_no_utf_8_is_named(tmp_path: Path):
    file = tmp_path / "password"
    file.write_bytes(b"p\344ss\n")

    done = shell(
        '$P queue delete mail --password-file "$F"', "admin", F=str(file), LC_ALL="C.UTF-8"
    )

    assert done.returncode == 1
    assert done.stderr.decode() == f"pinlater-admin: {file} is not valid UTF-8\n"


# --- what a terminal shows --------------------------------------------------------------------


@given(st.text(), st.integers(1, 300))
def test_text_is_shown_without_control_characters_and_cut(text, max_chars):
    shown = printable(text, max_chars)

    assert shown.isprintable()
    assert shown.startswith(text[:max_chars]) or not text[:max_chars].isprintable()
    if len(text) > max_chars:
        assert f"({len(text)} characters)" in shown


def test_times_of_a_job_are_shown_as_times():
    options = JobOptions("k", expires_at_ms=2_000, run_after_us=1_000_123, expires_at_us=2_000_123)
    record = JobRecord("q:s1:p1:1", JobState.PENDING, 2, 2, "", 0, 1_000, 0, None, None, options)

    shown = record_text(record)

    assert "  expires at     1970-01-01T00:00:02.000Z" in shown
    assert "000123" not in shown


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
        ("a… (b)".encode() + b"x" * 300, f"a… (b){'x' * 194}… (308 bytes)"),
        ("ü".encode() * 150, "ü" * 150),
        (b"\xff" * 100, "\\xff" * 50 + "… (100 bytes)"),
    ],
)
def test_bodies_by_example(body, shown):
    assert printable_body(body) == shown


@pytest.mark.parametrize(
    ("at_ms", "shown"),
    [(1_700_000_000_123, "2023-11-14T22:13:20.123Z"), (9 * 10**18, "9000000000000000000 ms")],
)
def test_times(at_ms, shown):
    assert shown_time(at_ms) == shown
