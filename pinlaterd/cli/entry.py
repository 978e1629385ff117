"""The installed programs, and Ctrl-C in them: one line and exit 130, never a traceback.

A command's own code gets KeyboardInterrupt (`Interruptible`), so that it can clean up. While
modules are imported before it, and while Python shuts down after it, the process ends at once.
Imports next to nothing, so that little time passes before the handler is there.
"""

from __future__ import annotations

import os
import signal

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_STDERR = 2


class _ExitAtOnce:
    """A handler of SIGINT."""

    def __init__(self, program: str) -> None:
        self._program = program

    def __call__(self, _number: int, _frame: object) -> None:
        told(self._program)
        os._exit(EXIT_INTERRUPTED)


def exit_on_interrupt(program: str) -> None:
    """From now on, except where SIGINT is ignored, as in a background job."""
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
            raise told(self._program)


def told(program: str) -> SystemExit:
    """Print the line; returns what ends the program."""
    os.write(_STDERR, f"{program}: interrupted\n".encode())
    return SystemExit(EXIT_INTERRUPTED)


def pinlaterd() -> None:
    exit_on_interrupt("pinlaterd")
    from pinlaterd.cli.pinlaterd import cli

    cli(prog_name="pinlaterd")


def pinlater() -> None:
    exit_on_interrupt("pinlater")
    from pinlaterd.cli.pinlater import cli

    cli(prog_name="pinlater")


def pinlater_admin() -> None:
    exit_on_interrupt("pinlater-admin")
    from pinlaterd.cli.admin import cli

    cli(prog_name="pinlater-admin")
