"""Finding the Handlers of `pinlater worker MODULE[:NAME]`: import, and clear words if it fails.

The module is an application's own code, so whatever goes wrong in it is shown as a traceback of
its lines, without ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from pinlaterd.client.handlers import Handlers

_SPELLING = re.compile(r"(?P<module>\w+(\.\w+)*)(:(?P<name>\w+))?\Z")
_SHOWN_FRAMES = 3


class ModuleUnfit(Exception):
    """What keeps the module from being run as a worker, and how to mend it."""


def load_handlers(spelling: str, folder: Path) -> Handlers:
    """The Handlers that MODULE or MODULE:NAME names; modules in `folder` go before installed ones.

    Raises ModuleUnfit.
    """
    match = _SPELLING.match(spelling)
    if match is None or spelling.endswith(".py"):
        raise ModuleUnfit(_misspelt(spelling))
    module = _import(match["module"], folder)
    found = _handlers_of(module, match["name"])
    if not found.by_queue:
        raise ModuleUnfit(
            f"the Handlers of {spelling} handle no queue; put "
            '@handlers.queue("NAME") before a function'
        )
    return found


def _misspelt(spelling: str) -> str:
    if spelling.endswith(".py") or "/" in spelling:
        name = spelling.removesuffix(".py").strip("./").replace("/", ".")
        return f"{spelling!r} is a file; give the module's name: {name}"
    return f"{spelling!r} is not of the form MODULE or MODULE:NAME, as in tasks or shop.tasks:mail"


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
    """The error with the last frames of the application's own code."""
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
    if name is not None:
        if name not in held:
            kind = (
                f"is of type {type(vars(module)[name]).__name__}, no Handlers,"
                if name in vars(module)
                else "is not there"
            )
            others = f"; it has {', '.join(sorted(held))}" if held else ""
            raise ModuleUnfit(f"{name} {kind} in {module.__name__}{others}")
        return held[name]
    different = {id(value): value for value in held.values()}
    if not different:
        raise ModuleUnfit(
            f"{module.__name__} has no Handlers; make one: handlers = Handlers(), from "
            "pinlaterd.client"
        )
    if len(different) > 1:
        names = sorted(held)
        raise ModuleUnfit(
            f"{module.__name__} has several Handlers ({', '.join(names)}); choose one: "
            f"{module.__name__}:{names[0]}"
        )
    return next(iter(different.values()))
