"""Handlers in processes on a real service: what they answer, how they end, what becomes of jobs.

What the handlers do is in `process_handlers`; a job's body tells them. Where time-outs matter, jobs
are taken away by another hand instead, so that no outcome depends on how fast this machine is.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest

from pinlaterd.client import (
    Client,
    Ending,
    Handlers,
    Job,
    JobState,
    Outcome,
    ProcessDied,
    ProcessNotStarted,
    RunningJob,
    Worker,
    constant,
    never,
)
from pinlaterd.client.handlers import ProcessPlace
from tests.client.process_handlers import Evil, Unpicklable, handle
from tests.client.working import (
    books,
    handlers_of,
    have_ended,
    is_gone,
    records_of,
    running,
    take_away,
)
from tests.shared_service import SHORT_CLAIMS_QUEUE

pytestmark = pytest.mark.service

ROOT = Path(__file__).parents[2]


def in_processes(queue: str, **options) -> Handlers:
    return handlers_of(queue, handle, run_in="processes", **{"concurrency": 1, **options})


def children() -> set[int]:
    """The processes of handlers that this process has, be they just starting or at work."""
    return {
        child.pid
        for child in psutil.Process().children()
        if any(known in _command_of(child) for known in ("spawn_main", "pinlaterd: worker "))
    }


def _command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def test_the_life_of_jobs_in_a_process(client, queue, wait_until):
    """All in one child: it lives on whatever its handler returns or raises."""
    handlers = in_processes(queue, retry={Unpicklable: never})
    errors: list[BaseException] = []
    seen: list[tuple[int, bytes, Outcome]] = []

    @handlers.on_error
    def on_error(job: RunningJob, error: BaseException) -> None:
        errors.append(error)

    @handlers.after
    def after(job: RunningJob, outcome: Outcome) -> None:
        seen.append((os.getpid(), job.body, outcome))

    bodies = [b"pid", b"retry", b"discard", b"later", b"raise because", b"save"]
    descriptors = client.enqueue(queue, bodies)
    with running(Worker(client, handlers, max_wait_ms=100)):
        wait_until(lambda: have_ended(client, descriptors), seconds=60)
        wait_until(lambda: client.count(queue, JobState.SUCCEEDED) == 5)
    assert not children()

    pid, retried, discarded, later, failed, saved = records_of(client, descriptors)
    child_pid = pid.custom_status
    assert int(child_pid) != os.getpid()
    assert (retried.custom_status, retried.attempts_remaining) == ("not yet; done", 1)
    assert (discarded.state, discarded.custom_status) == (JobState.FAILED, "no such user")
    assert later.custom_status == f"later; {child_pid}"
    assert (later.attempts_allowed, later.attempts_remaining) == (5, 5)
    assert failed.state is JobState.FAILED
    assert failed.custom_status.startswith("Unpicklable: because (7) (process_handlers.py:")
    assert failed.custom_status.endswith(
        f" in do_raise < process_handlers.py:{handle.__code__.co_firstlineno + 2} in handle)"
    )
    chained = saved.custom_status.removeprefix("chained ").removesuffix(f"; {child_pid}")
    assert records_of(client, [chained])[0].custom_status == child_pid

    [error] = errors
    assert type(error) is Unpicklable
    assert str(error) == "because (7)"
    assert "in do_raise" in str(error.__cause__)
    assert {where for where, _, _ in seen} == {os.getpid()}
    # Hooks run in the worker, and see the body that the child has saved.
    assert (b"pid", Ending.RETRIED) in [(body, outcome.ending) for _, body, outcome in seen]


def test_an_exception_whose_traceback_can_not_be_shown_fails_that_attempt_alone(
    queue, work_until_ended
):
    seen: list[BaseException] = []
    handlers = in_processes(queue, retry=never)
    handlers.on_error(lambda job, error: seen.append(error))
    evil, pid = work_until_ended(handlers, queue, [Job(b"raise_evil"), Job(b"pid")])

    assert [type(error) for error in seen] == [Evil]
    assert evil.state is JobState.FAILED
    assert evil.custom_status.startswith("Evil (process_handlers.py:")
    assert pid.state is JobState.SUCCEEDED


def test_a_handler_that_ends_its_process_fails_that_attempt_alone(client, queue, work_until_ended):
    dead: list[BaseException] = []
    handlers = in_processes(queue, retry={ProcessDied: constant(0)})
    handlers.on_error(lambda job, error: dead.append(error))
    crashing = [b"exit 3", b"signal %d" % signal.SIGSEGV, b"signal %d" % signal.SIGKILL]
    jobs = [*(Job(body, attempts_allowed=1) for body in crashing), Job(b"exit 0"), Job(b"pid")]
    *crashed, twice, whole = work_until_ended(handlers, queue, jobs)

    assert [record.custom_status for record in crashed] == [
        "ProcessDied: the handler's process ended with exit status 3",
        "ProcessDied: the handler's process was ended by signal 11 (SIGSEGV)",
        "ProcessDied: the handler's process was ended by signal 9 (SIGKILL)",
    ]
    assert twice.custom_status.count("ended with exit status 0") == 2
    assert {(r.state, r.attempts_remaining) for r in (*crashed, twice)} == {(JobState.FAILED, 0)}
    assert (whole.state, whole.attempts_remaining) == (JobState.SUCCEEDED, 2)
    assert [type(error) for error in dead] == [ProcessDied] * 5


@pytest.mark.parametrize(
    ("fork", "said", "said_next"),
    [
        pytest.param(b"fork", "from the process", r"\d+", id="by Python"),
        # A copy that Python does not know of answers: what its original says comes too late.
        pytest.param(
            b"fork_in_c",
            "from the copy",
            "ProcessDied: the handler's process answered for another job, and was killed",
            id="in C",
        ),
    ],
)
def test_a_copy_that_a_handler_makes_answers_for_no_other_job(
    client, queue, wait_until, fork, said, said_next
):
    forks = client.enqueue(queue, [fork])
    with running(Worker(client, in_processes(queue), max_wait_ms=100)):
        wait_until(lambda: have_ended(client, forks), seconds=60)
        asks = client.enqueue(queue, [Job(b"pid", attempts_allowed=1)])
        wait_until(lambda: have_ended(client, asks), seconds=60)

    [forked, asked] = records_of(client, forks + asks)
    assert forked.custom_status == said
    assert re.fullmatch(said_next, asked.custom_status)


def test_what_nobody_foresaw_ends_the_worker_and_costs_no_attempt(client, queue, monkeypatch):
    def break_down(place: ProcessPlace, job: RunningJob) -> Outcome:
        raise MemoryError("of a place")

    monkeypatch.setattr(ProcessPlace, "run", break_down)
    seen: list[Ending] = []
    handlers = in_processes(queue)
    handlers.after(lambda job, outcome: seen.append(outcome.ending))
    descriptors = client.enqueue(queue, [b"pid"])

    with pytest.raises(MemoryError, match="of a place"):
        Worker(client, handlers, max_wait_ms=100).run()

    assert books(client, descriptors) == {("PENDING", 2): 1}
    assert seen == [Ending.POSTPONED]
    assert not children()


def test_what_kills_an_idle_process_costs_no_job_an_attempt(client, queue, wait_until):
    first = client.enqueue(queue, [b"pid"])
    with running(Worker(client, in_processes(queue), max_wait_ms=100)):
        wait_until(lambda: have_ended(client, first), seconds=60)
        pid = int(records_of(client, first)[0].custom_status)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_gone(pid))
        second = client.enqueue(queue, [b"pid"])
        wait_until(lambda: have_ended(client, second), seconds=60)

    assert books(client, first + second) == {("SUCCEEDED", 2): 2}


def test_a_handler_that_takes_longer_than_it_may_is_killed(queue, tmp_path, work_until_ended):
    handlers = in_processes(queue, time_limit_seconds=0.3, retry={TimeoutError: never})
    pid_file = tmp_path / "pid"
    [record] = work_until_ended(handlers, queue, [Job(b"hang %s" % os.fsencode(pid_file))])

    assert not pid_file.exists() or is_gone(int(pid_file.read_text()))
    assert record.custom_status == (
        "TimeoutError: the handler took longer than 0.3 s; its process was killed"
    )
    assert record.state is JobState.FAILED


@pytest.mark.parametrize("heeds", [True, False], ids=["heeds", "hangs"])
def test_a_claim_that_is_lost_is_told_to_the_process_or_ends_it(
    client, tmp_path, wait_until, monkeypatch, heeds
):
    """Another hand takes the job away while its first run lasts; the second run ends it."""
    if not heeds:
        monkeypatch.setattr("pinlaterd.client.processes.LOST_GRACE_SECONDS", 0.1)
    client.create_queue(SHORT_CLAIMS_QUEUE)
    pid_file = tmp_path / "pid"
    what = "wait_until_lost" if heeds else "hang_once"
    descriptors = client.enqueue(SHORT_CLAIMS_QUEUE, [f"{what} {pid_file}".encode()])
    runs: list[RunningJob] = []
    handlers = in_processes(SHORT_CLAIMS_QUEUE)
    handlers.before(runs.append)
    worker = Worker(client, handlers, max_wait_ms=100)
    with running(worker):
        wait_until(pid_file.exists, seconds=60)
        pid = int(pid_file.read_text())
        take_away(client, runs[0])
        wait_until(lambda: have_ended(client, descriptors), seconds=60)
        wait_until(lambda: worker.queue_figures()[0].claims_lost == 1)
        wait_until(lambda: worker.queue_figures()[0].runs.endings[Ending.LOST] == 1)
        assert is_gone(pid) is not heeds

    assert Path(f"{pid_file}.told").exists() is heeds
    assert books(client, descriptors) == {("SUCCEEDED", 2): 1}
    assert records_of(client, descriptors)[0].custom_status == "second"


def test_what_still_runs_when_the_grace_is_over_is_killed_and_handed_back(
    client, queue, tmp_path, wait_until
):
    pid_files = [tmp_path / "a", tmp_path / "b"]
    descriptors = client.enqueue(queue, [b"hang %s" % os.fsencode(path) for path in pid_files])
    handlers = in_processes(queue, concurrency=2)
    with running(Worker(client, handlers, max_wait_ms=100, grace_seconds=0)):
        wait_until(lambda: all(path.exists() for path in pid_files), seconds=60)

    assert all(is_gone(int(path.read_text())) for path in pid_files)
    assert not children()
    assert books(client, descriptors) == {("PENDING", 2): 2}


# --- a whole program ------------------------------------------------------------------------

PROGRAM = """
from pinlaterd.client import Client, Handlers, RunningJob, Worker
from tests.client import process_handlers

handlers = Handlers()

class Mine(Exception):
    pass

@handlers.queue({queue!r}, run_in="processes", concurrency=3)
def work(job: RunningJob) -> object:
    if job.body == b"mine":
        raise Mine("of the program")
    return process_handlers.handle(job)

@handlers.on_error
def show(job: RunningJob, error: BaseException) -> None:
    print(type(error) is Mine, flush=True)

{guard}Worker(Client(port={port}), handlers, max_wait_ms=100, grace_seconds={grace_seconds}).run()
"""


@pytest.fixture
def start_program(service, queue, tmp_path):
    """Start a script whose own functions are the handlers, as a user writes it."""
    started: list[subprocess.Popen[str]] = []

    def start(
        *prefix: str, grace_seconds: float, guard: str = 'if __name__ == "__main__": '
    ) -> subprocess.Popen[str]:
        path = tmp_path / "program.py"
        path.write_text(
            PROGRAM.format(queue=queue, guard=guard, port=service.port, grace_seconds=grace_seconds)
        )
        started.append(
            subprocess.Popen(
                [*prefix, sys.executable, str(path)],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                process_group=0,
                # Tests may run under nohup, which would be inherited.
                preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def started_by(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_ctrl_c_ends_a_script_in_order_and_what_runs_is_finished(
    client, queue, start_program, tmp_path, wait_until
):
    program = start_program(grace_seconds=60)
    go = tmp_path / "go"
    failed = client.enqueue(queue, [Job(b"mine", attempts_allowed=1)])
    wait_until(lambda: have_ended(client, failed), seconds=60)
    waiting = client.enqueue(queue, [b"wait_for %s" % os.fsencode(go)] * 2)
    wait_until(lambda: len(list(tmp_path.glob("go.*"))) == 2, seconds=60)
    all_of_it, threads = started_by(program), psutil.Process(program.pid).num_threads()

    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    for child in all_of_it:  # and as a supervisor that signals every process of a service
        child.send_signal(signal.SIGTERM)
    # Python may see the signal half a second later. Then the thread of the idle place ends.
    wait_until(lambda: psutil.Process(program.pid).num_threads() < threads, seconds=60)
    unbegun = client.enqueue(queue, [b"pid"] * 3)
    go.touch()

    output, errors = program.communicate(timeout=60)
    assert (program.returncode, output) == (0, "True\n")
    assert errors.endswith("Mine: of the program\n")  # the job that failed, and nothing after it
    wait_until(lambda: all(is_gone(child.pid) for child in all_of_it))
    assert books(client, waiting + unbegun) == {("SUCCEEDED", 2): 2, ("PENDING", 2): 3}


def test_where_standard_streams_are_closed_nothing_of_ours_has_their_numbers(
    client, queue, start_program, wait_until
):
    descriptors = client.enqueue(queue, [b"streams"])
    program = start_program("sh", "-c", 'exec "$@" <&- >&- 2>&-', "-", grace_seconds=0)
    wait_until(lambda: have_ended(client, descriptors), seconds=60)
    program.terminate()

    assert program.wait(60) == 0
    assert records_of(client, descriptors)[0].custom_status == "/dev/null /dev/null /dev/null"


@pytest.mark.parametrize(
    ("grace_seconds", "signals", "state"),
    [
        pytest.param(0, [signal.SIGTERM], "PENDING", id="stopped"),
        pytest.param(0, [signal.SIGHUP], "PENDING", id="its terminal is closed"),
        pytest.param(0, [signal.SIGQUIT], "PENDING", id="told to quit"),
        pytest.param(600, [signal.SIGTERM, signal.SIGINT], "PENDING", id="stopped by two signals"),
        pytest.param(600, [signal.SIGKILL], "IN_PROGRESS", id="killed"),
    ],
)
def test_no_process_outlives_its_worker(
    client, queue, start_program, tmp_path, wait_until, grace_seconds, signals, state
):
    program = start_program(grace_seconds=grace_seconds)
    pid_files = [tmp_path / "a", tmp_path / "b"]
    descriptors = client.enqueue(queue, [b"hang %s" % os.fsencode(path) for path in pid_files])
    wait_until(lambda: all(path.exists() for path in pid_files), seconds=60)
    all_of_it = started_by(program)
    assert {int(path.read_text()) for path in pid_files} < {child.pid for child in all_of_it}

    for number in signals:
        program.send_signal(number)

    program.communicate(timeout=60)
    wait_until(lambda: all(is_gone(child.pid) for child in all_of_it))
    assert program.returncode == (-signal.SIGKILL if state == "IN_PROGRESS" else 0)
    assert books(client, descriptors) == {(state, 2): 2}


def test_a_script_without_a_guard_is_told_of_it(start_program):
    program = start_program(grace_seconds=0, guard="")

    _, errors = program.communicate(timeout=60)
    assert program.returncode == 1
    assert 'put that under `if __name__ == "__main__":`' in errors
    assert "no process can run the handler of queue" in errors.splitlines()[-1]
    assert "what it printed to stderr tells why" in errors.splitlines()[-1]


# --- what can't be run in processes ---------------------------------------------------------


def test_what_no_process_can_find_is_refused_before_anything_is_claimed(client, queue):
    def local(job: RunningJob) -> None: ...

    for function in (local, lambda job: None):
        handlers = handlers_of(queue, function, run_in="processes")
        with pytest.raises(
            ValueError, match=f"handler of queue '{queue}' can't be found .* top level"
        ):
            Worker(client, handlers)
    with pytest.raises(ValueError, match="set_up_process can't be found"):
        Worker(client, in_processes(queue), set_up_process=lambda: None)


def fail_to_set_up() -> None:
    raise OSError("no such device")


def test_a_process_that_can_not_begin_ends_the_worker_and_costs_no_attempt(client, queue):
    descriptors = client.enqueue(queue, [b"pid"] * 3)
    worker = Worker(
        client, in_processes(queue, concurrency=2), max_wait_ms=100, set_up_process=fail_to_set_up
    )

    with pytest.raises(ProcessNotStarted, match=rf"(?s)queue '{queue}'.*OSError: no such device$"):
        worker.run()

    assert not children()
    assert books(client, descriptors) == {("PENDING", 2): 3}


def hang_at_start(began: Path) -> None:
    began.touch()
    threading.Event().wait()


def test_a_worker_can_be_stopped_while_its_processes_hang_at_their_start(
    client, queue, tmp_path, wait_until
):
    descriptors = client.enqueue(queue, [b"pid"])
    began = tmp_path / "began"
    worker = Worker(
        client, in_processes(queue), max_wait_ms=100, set_up_process=partial(hang_at_start, began)
    )
    with running(worker):
        wait_until(began.exists, seconds=60)
        assert children()

    assert not children()
    assert books(client, descriptors) == {("PENDING", 2): 1}


def test_a_client_goes_along():
    with Client(["a:1", "b"], 2, source="me", max_connections=3) as client:
        copy = pickle.loads(pickle.dumps(client))
    assert copy.address == client.address == "a:1, b:2"
    assert copy.max_connections == client.max_connections
