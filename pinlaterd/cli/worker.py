"""The command `pinlater worker`: runs the handlers of a module, for deployment and development.
With --reload it is started again whenever the sources change."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType

import click

from pinlaterd.cli import command
from pinlaterd.client import (
    Client,
    ConnectionFailed,
    Handlers,
    PinLaterError,
    ProcessNotStarted,
    Worker,
)
from pinlaterd.client.handlers import CLEAN_UP_SECONDS, TO_THREAD
from pinlaterd.config.schema import LOG_LEVELS
from pinlaterd.errors import DeploymentError, RequestError, address_of
from pinlaterd.lifecycle import STOP_SIGNALS, ExitCode, StopSignal, end_with_parent, set_up_log

_PAUSE_SECONDS = 1.0
_CONNECTIONS = 16  # for handlers

logger = logging.getLogger(__name__)


@click.command(cls=command.Command)
@click.argument("module", metavar="MODULE[:NAME]")
@command.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="NAME",
    help="A queue to work on; may be given several times  [default: all that have a handler]",
)
@command.option("--create-queues", is_flag=True, help="Make the queues that do not exist.")
@command.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=8,
    help="Jobs of a queue that run at a time, where its handler does not say.",
)
@command.option(
    "--grace-seconds",
    type=command.Amount(command.MAX_SECONDS, least=0),
    default=30.0,
    help="How long jobs may go on after SIGTERM or Ctrl-C before they are released.",
)
@command.option("--reload", is_flag=True, help="Restart when a .py file below this folder changes.")
@command.option("--reload-parent", type=int, hidden=True)
@command.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve Prometheus metrics on this port; 0: on any free one.",
)
@command.option("--metrics-host", default="127.0.0.1", help="Where --metrics-port listens.")
@command.option(
    "--metrics-name",
    "metrics_names",
    multiple=True,
    metavar="NAME",
    help="A name by which scrapers call this machine, unless it has that itself; repeatable.",
)
@command.option("--log-level", type=click.Choice(LOG_LEVELS), default="info")
@command.server_options
def worker(  # noqa: PLR0913  one parameter for each option
    *,
    module: str,
    queues: tuple[str, ...],
    create_queues: bool,
    concurrency: int,
    grace_seconds: float,
    reload: bool,
    reload_parent: int | None,
    metrics_port: int | None,
    metrics_host: str,
    metrics_names: tuple[str, ...],
    log_level: str,
) -> None:
    """Run the handlers of a module until SIGTERM or Ctrl-C.

    MODULE is imported from the current folder, or from what is installed; it has one Handlers, or
    NAME says which. When stopped, jobs that run are finished, jobs that wait are released; a
    second signal releases what still runs, too. A service that is away is waited for.

    Examples:
      pinlater worker tasks
      pinlater worker tasks --reload --create-queues
      pinlater worker shop.tasks:handlers --host queue.example.com --queue mail --concurrency 16
    """
    if reload:
        line = [
            *(sys.executable, "-B"),  # the stamps of .pyc files are too coarse for quick edits
            *("-m", "pinlaterd.cli.pinlater"),
            *(each for each in sys.argv[1:] if each != "--reload"),
            *("--reload-parent", str(os.getpid())),
        ]
        sys.exit(
            run_reloaded(line, Path.cwd(), lambda text: click.echo(f"pinlater: {text}", err=True))
        )
    if reload_parent is not None:
        begin_as_child(reload_parent)
    set_up_log("worker", log_level)
    handlers = load_handlers(module, Path.cwd())
    names = _chosen(handlers, queues)
    with command.connect(max_connections=_CONNECTIONS) as client:
        try:
            made = Worker(
                client,
                handlers,
                queues=names,
                concurrency=concurrency,
                grace_seconds=grace_seconds,
                set_up_process=partial(set_up_log, "worker", log_level),
            )
        except ValueError as error:
            command.fail(f"{module}: {error}")
        with _metrics_served(made, metrics_host, metrics_port, metrics_names):
            if not _queues_are_there(client, names, create=create_queues):
                return  # stopped before there was a service
            logger.info("working on %s of %s", ", ".join(names), client.address)
            try:
                made.run()
            except ProcessNotStarted as error:
                command.fail(str(error))
    logger.info("ended")
    _leave_threads_behind()


def _leave_threads_behind() -> None:
    """End the process although a handler's `asyncio.to_thread` hangs: Python would wait for it."""
    deadline = time.monotonic() + CLEAN_UP_SECONDS
    for thread in threading.enumerate():
        if thread.name.startswith(TO_THREAD):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("a handler's thread still runs; it ends with the process")
                logging.shutdown()
                sys.stdout.flush()
                os._exit(ExitCode.OK)


@contextmanager
def _metrics_served(
    made: Worker, host: str, port: int | None, names: Sequence[str]
) -> Iterator[None]:
    if port is None:
        yield
        return
    from pinlaterd.client.metrics import WorkerMetrics  # it loads a library

    with ExitStack() as stack:
        try:
            url = stack.enter_context(WorkerMetrics(made).served(port, host=host, names=names))
        except OSError as error:
            command.fail(
                f"cannot serve metrics at {address_of(host, port)}: {error.strerror}; "
                "see --metrics-host and --metrics-port"
            )
        logger.info("metrics at %s", url)
        yield


def _chosen(handlers: Handlers, queues: Sequence[str]) -> list[str]:
    known = list(handlers.by_queue)
    if unknown := [name for name in queues if name not in known]:
        raise click.UsageError(
            f"--queue {unknown[0]}: the module has no handler for it; it has {', '.join(known)}"
        )
    return list(dict.fromkeys(queues)) or known


def _queues_are_there(client: Client, names: Sequence[str], *, create: bool) -> bool:
    """Wait for the service, and see to the queues; False if asked to stop before."""
    stop = StopSignal()
    stop.catch()
    try:
        while not stop.requested:
            try:
                missing = sorted({*names} - client.queue_names())
                if missing and not create:
                    command.fail(
                        f"there is no queue {missing[0]} at {client.address}; make it with "
                        f"`pinlater create --queue {missing[0]}`, or give --create-queues"
                    )
                for name in missing:
                    client.create_queue(name)
            except RequestError:
                raise
            except (ConnectionFailed, PinLaterError) as error:
                logger.warning("%s; trying again", error)
                select.select([stop.fileno()], [], [], _PAUSE_SECONDS)
            else:
                break
        return not stop.requested
    finally:
        stop.close()


# --- MODULE[:NAME] ----------------------------------------------------------------------------
# It is an application's own code, so whatever goes wrong as it is imported is shown as a traceback
# of its lines, without ours.

_SPELLING = re.compile(r"(?P<module>\w+(\.\w+)*)(:(?P<name>\w+))?\Z")
_SHOWN_FRAMES = 3


class ModuleUnfit(DeploymentError):
    """The reason why the module can't be run as a worker, and how to mend it."""


def load_handlers(spelling: str, folder: Path) -> Handlers:
    """Load the Handlers named MODULE or MODULE:NAME; `folder` goes before installed modules.

    Raises ModuleUnfit.
    """
    if spelling.endswith(".py") or "/" in spelling:
        name = spelling.removesuffix(".py").strip("./").replace("/", ".")
        raise ModuleUnfit(f"{spelling!r} is a file; give the module's name: {name}")
    match = _SPELLING.match(spelling)
    if match is None:
        raise ModuleUnfit(
            f"{spelling!r} is not of the form MODULE or MODULE:NAME, as in tasks or shop.tasks:mail"
        )
    found = _handlers_of(_import(match["module"], folder), match["name"])
    if not found.by_queue:
        raise ModuleUnfit(
            f"the Handlers of {spelling} handle no queue; put "
            '@handlers.queue("NAME") before a function'
        )
    return found


def _import(name: str, folder: Path) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ModuleUnfit(_failed_import(name, error)) from error
        path = error.name.replace(".", "/")
        raise ModuleUnfit(
            f"there is no module {error.name}: neither {path}.py nor {path}/ in {folder}, and "
            "none that is installed; run this in the folder that holds it"
        ) from error
    except (Exception, SystemExit) as error:
        raise ModuleUnfit(_failed_import(name, error)) from error


def _failed_import(name: str, error: BaseException) -> str:
    """Write the error with the last frames of the application's own code."""
    shown = traceback.TracebackException.from_exception(error)
    own = [
        frame
        for frame in shown.stack
        if not frame.filename.startswith("<frozen ")
        and frame.filename != __file__
        and not frame.filename.startswith(str(Path(importlib.__file__).parent))
    ]
    shown.stack = traceback.StackSummary.from_list(own[-_SHOWN_FRAMES:])
    shown.__cause__ = shown.__context__ = None
    lines = "".join(shown.format()).rstrip()
    hint = ""
    if isinstance(error, SystemExit):
        hint = (
            '\nit ends the program as it is imported; put that under `if __name__ == "__main__":`'
        )
    return f"importing {name} failed:\n{lines}{hint}"


def _handlers_of(module: ModuleType, name: str | None) -> Handlers:
    held = {key: value for key, value in vars(module).items() if isinstance(value, Handlers)}
    names = sorted(held)
    if name is None and len({*map(id, held.values())}) == 1:  # whatever names it has
        return held[names[0]]
    if name in held:
        return held[name]
    if name is not None:
        kind = "is not there"
        if name in vars(module):
            kind = f"is of type {type(vars(module)[name]).__name__}, no Handlers,"
        others = f"; it has {', '.join(names)}" if names else ""
        raise ModuleUnfit(f"{name} {kind} in {module.__name__}{others}")
    if not held:
        raise ModuleUnfit(
            f"{module.__name__} has no Handlers; make one: handlers = Handlers(), from "
            "pinlaterd.client"
        )
    raise ModuleUnfit(
        f"{module.__name__} has several Handlers ({', '.join(names)}); choose one: "
        f"{module.__name__}:{names[0]}"
    )


# --- --reload ---------------------------------------------------------------------------------
# A parent process watches and a child does the work, so that a mistake in the sources ends the
# child alone; the parent shows it and waits for the next change. The files are looked at, not
# subscribed to: that works on every file system (network mounts, containers), needs no library, and
# a look at a thousand files takes a few milliseconds.

_LOOK_SECONDS = 0.25
_NOT_SOURCES = frozenset({"__pycache__", "node_modules"})
_AWAITED = frozenset({*STOP_SIGNALS, signal.SIGCHLD})

Sources = Mapping[str, tuple[int, int]]  # path -> when it was written (ns), its size


def sources(folder: Path) -> Sources:
    """Find every Python source below `folder`, hidden folders and environments left out."""
    found = {}
    for place, folders, files in os.walk(folder):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name[0] != "." and name not in _NOT_SOURCES]
        for name in files:
            if name.endswith(".py") and name[0] != ".":
                path = Path(place, name)
                with suppress(OSError):  # went away meanwhile: seen by its absence
                    status = path.stat()
                    found[str(path)] = status.st_mtime_ns, status.st_size
    return found


def changes(before: Sources, after: Sources) -> list[str]:
    """Return the paths that were written, made or removed, sorted."""
    return sorted(path for path in {*before, *after} if before.get(path) != after.get(path))


def run_reloaded(command: Sequence[str], folder: Path, tell: Callable[[str], None]) -> int:
    """Run a program as a child, end it in order and start it again at each change in `folder`,
    until SIGTERM or SIGINT; returns the exit code of the last child. `tell` shows a line.

    The child is a process group of its own: Ctrl-C reaches the parent alone, which passes each
    signal on as SIGTERM, so that a second one hurries the child as it would without a parent. It
    begins its life with `begin_as_child`. For a main thread that does nothing else: signals stay
    blocked, and are taken one by one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    while True:
        seen = latest = sources(folder)
        changed: list[str] = []
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0) as child:
            stopping, has_ended = False, False
            while not (stopping or changed):
                stopping = _is_told_to_stop()
                if child.poll() is not None and not has_ended:
                    has_ended = True
                    tell(f"ended with {child.returncode}; waiting for a source to change")
                found = sources(folder)
                changed = changes(seen, found) if found == latest else []  # once they stay so
                latest = found
            child.terminate()
            while child.poll() is None:
                if _is_told_to_stop():
                    if stopping:
                        child.terminate()
                    stopping = True
        if stopping:
            return child.returncode if child.returncode >= 0 else ExitCode.FAILURE
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        tell(f"{os.path.relpath(changed[0], folder)}{more} changed; restarting")


def _is_told_to_stop() -> bool:
    """Wait for a moment; return whether it is to stop."""
    got = signal.sigtimedwait(_AWAITED, _LOOK_SECONDS)
    return got is not None and got.si_signo in STOP_SIGNALS


def begin_as_child(parent_pid: int) -> None:
    """Begin as a child: end in order when its parent ends, be it by kill -9, and let the signals in
    that the parent blocked."""
    end_with_parent(parent_pid, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
