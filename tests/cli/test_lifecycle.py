"""Signals, exit codes and the log, in processes of their own."""

from __future__ import annotations

import re
import select
import signal
import subprocess
import sys
import time

import pytest

from pinlaterd.lifecycle import MIN_LIFE_SECONDS, StopSignal
from tests.cli.program import ROOT

SECONDS = 180.0


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        cwd=ROOT,
        env={"PATH": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


BLOCKING = """
import select
from pinlaterd.lifecycle import StopSignal
stop = StopSignal()
stop.catch()
print("ready")
select.select([stop], [], [])
print("stopping", stop.requested)
"""
IN_AN_EVENT_LOOP = """
import asyncio, uvloop
from pinlaterd.lifecycle import StopSignal
async def main():
    stop = StopSignal()
    stop.catch_in(asyncio.get_running_loop())
    print("ready")
    await stop.wait()
    print("stopping", stop.requested)
asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
"""


@pytest.mark.parametrize(
    ("code", "number"),
    [(BLOCKING, signal.SIGTERM), (BLOCKING, signal.SIGINT), (IN_AN_EVENT_LOOP, signal.SIGTERM)],
)
def test_a_loop_wakes_up_for_a_signal(code, number):
    process = start(code)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    process.send_signal(number)

    assert process.communicate(timeout=SECONDS)[0] == "stopping True\n"
    assert process.returncode == 0


def test_asking_twice_is_asking_once():
    stop = StopSignal()
    try:
        assert select.select([stop], [], [], 0)[0] == []
        stop.set()
        stop.set()
        assert stop.requested
        assert select.select([stop], [], [], 0)[0] == [stop]
    finally:
        stop.close()
        stop.close()


EXIT = (
    "import time; from pinlaterd.lifecycle import exit_process; exit_process(%d, time.monotonic())"
)


@pytest.mark.parametrize(
    ("code", "environment", "lingers"),
    [
        (1, {"SUPERVISOR_ENABLED": "1"}, True),
        (0, {"SUPERVISOR_ENABLED": "1"}, False),
        (3, {}, False),
    ],
)
def test_who_fails_at_once_under_supervisord_stays_a_moment(code, environment, lingers):
    started = time.monotonic()
    process = start(EXIT % code, **environment)

    assert process.wait(SECONDS) == code

    process.communicate()
    assert not lingers or time.monotonic() - started >= MIN_LIFE_SECONDS


LOGGING = """
import logging
from pinlaterd.lifecycle import set_up_log
set_up_log("shard-1", "info")
set_up_log("shard-1", "info")
logging.getLogger("x").debug("unseen")
logging.getLogger("x").warning("queue %s", "a\\n2026-01-01T00:00:00.000Z INFO forged")
"""


HOSTILE = "\x1b[31mred\x07\x9b2J\u202e\u2028\r\n2026-01-01T00:00:00.000Z INFO forged"
ESCAPED = "\\x1b[31mred\\x07\\x9b2J\\u202e\\u2028\\r"
LONGEST = 16 * 1024
RAISING = f"""
import logging, threading
from pinlaterd.lifecycle import set_up_log
set_up_log("shard-1", "info")
text = {HOSTILE!r}
def fail(text):
    raise ValueError(text)
logging.getLogger("x").warning("%s", text)
for each in (text, text + "x" * 60_000_000, "é" * 60_000_000, text + "\\n" * 60_000):
    try:
        fail(each)
    except ValueError:
        logging.getLogger("x").warning("a job failed", exc_info=True)
logging.getLogger("x").warning("%s", "\U0001f600" * 60_000_000)
thread = threading.Thread(target=fail, args=(text,))
thread.start()
thread.join()
fail(text)
"""


def test_no_text_forges_a_record_or_commands_a_terminal_and_lines_are_cut():
    """In messages, tracebacks, and in what ends a thread or the process."""
    process = start(RAISING)

    said = process.communicate(timeout=SECONDS)[1]

    assert process.returncode == 1
    lines = said.splitlines()
    assert [line for line in lines if not line.isprintable()] == []
    assert max(len(line.encode()) for line in lines) < LONGEST
    assert len(said.encode()) < 9 * LONGEST
    records = [line for line in lines if not line.startswith("  ")]
    assert [re.sub(r"^\S+Z ", "", line)[:32] for line in records] == [
        f"WARNING shard-1 {ESCAPED}"[:32],
        *["WARNING shard-1 a job failed"] * 4,
        f"WARNING shard-1 {chr(0x1F600) * 16}",
        "CRITICAL shard-1 a thread ends",
        "CRITICAL shard-1 the process ends"[:32],
    ]
    assert said.count(f"  ValueError: {ESCAPED}\n  2026-01-01T00:00:00.000Z INFO forged") == 5
    assert "characters are left out" in said
    assert re.search(r"… \(600000\d\d characters\)\Z", records[5])


def test_a_record_is_one_line_with_time_level_and_process():
    process = start(LOGGING)

    said = process.communicate(timeout=SECONDS)[1]

    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING shard-1 queue a\\n2026.* forged\n", said
    )


FILES = """
import os, resource
from pinlaterd.lifecycle import allowed_files, begin_process, process_exists
begin_process("test")
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
said = []
print(soft, allowed_files(soft, said.append), allowed_files(hard + 1, said.append), *said)
while True:
    try:
        os.dup(0)
    except OSError:
        break
print(process_exists(os.getpid()), process_exists(os.getppid()), process_exists(2**30))
"""


def test_a_process_may_open_as_many_files_as_the_system_allows_and_goes_on_without_any():
    limits = 'ulimit -n 300 && ulimit -S -n 100 && exec "$@"'
    command = ["sh", "-c", limits, "sh", sys.executable, "-c", FILES]

    done = subprocess.run(command, capture_output=True, text=True, check=True)

    warning = "only 300 files may be open, 301 are wanted; raise `ulimit -n`"
    assert done.stdout.splitlines() == [f"300 300 300 {warning}", "True True False"]
