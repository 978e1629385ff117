"""The command lines `pinlaterd`, `pinlater-admin` and `pinlater`. Nothing else imports them.

    command          what all have in common: failures, questions, options; which service is meant;
                     jobs, times and tables as text
    pinlaterd        a deployment's life, and the processes that supervisord runs
    admin            pinlater-admin: queues, jobs, status, config check, hash-password, restart
    shards           its shards; the wait until the service follows an edit of etc/
    servers          the servers of a cluster
    users            who may use the HTTP interface, and for what
    job_types        the job types of Rickover's interface
    service_status   what the coordinator says of the service; pinlater-admin top
    record           what has happened: events, audit, history
    job_find         jobs by name, or by what is in their bodies
    operations       the dashboard's operations; job restore
    drain            empties a shard; moves its scheduled jobs
    failover         a replica becomes the master
    pinlater         single calls; enqueue, dequeue, check-dequeue
    bench            measurements
    load, callers    the load generator: when calls are made and what they take; the calls
    worker           `pinlater worker`

Here are the installed programs, and Ctrl-C in them: one line and exit 130, never a traceback. A
command's own code gets KeyboardInterrupt (`Interruptible`), so that it can clean up. While modules
are imported before it, and while Python shuts down after it, the process ends at once. So this
imports next to nothing, and little time passes before the handler is there.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_STDERR = 2


class _ExitAtOnce:
    """A handler of SIGINT."""

    def __init__(self, program: str) -> None:
        self._program = program

    def __call__(self, _number: int, _frame: object) -> None:
        interrupted(self._program)
        os._exit(EXIT_INTERRUPTED)


def exit_on_interrupt(program: str) -> None:
    """Handle SIGINT from now on, except where it is ignored, as in a background job."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _ExitAtOnce(program))


class Interruptible:
    """A block in which Ctrl-C raises KeyboardInterrupt, which ends the program if it leaves it."""

    def __init__(self, program: str) -> None:
        self._program = program

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        if isinstance(self._before, _ExitAtOnce):
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(self._before, _ExitAtOnce):
            signal.signal(signal.SIGINT, self._before)
        if isinstance(error, KeyboardInterrupt):
            raise interrupted(self._program)


def interrupted(program: str) -> SystemExit:
    """Print that the program is interrupted; return what ends it."""
    with suppress(OSError):
        os.write(_STDERR, f"{program}: interrupted\n".encode())
    return SystemExit(EXIT_INTERRUPTED)


def run_pinlaterd() -> None:
    _run("pinlaterd", "pinlaterd")


def run_pinlater() -> None:
    _run("pinlater", "pinlater")


def run_pinlater_admin() -> None:
    _run("pinlater-admin", "admin")


def import_program(module: str) -> ModuleType:
    """Import a module with the garbage collector off, and freeze what it allocates."""
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def _run(program: str, module: str) -> None:
    exit_on_interrupt(program)
    try:
        import_program(f"{__name__}.{module}").cli(prog_name=program)
    except ModuleNotFoundError as error:
        if program == "pinlater":  # which needs none of those: it is missing to an application
            raise
        sys.exit(f"{program}: {error}; `pip install 'pinlaterd[server]'` has what a service needs")
