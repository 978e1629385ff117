"""Finds the handlers of an application's module, for `pinlater worker`."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from pinlaterd.client import Handlers


class ModuleUnusable(Exception):
    """The message says what was looked for, and what is wrong."""


def load_handlers(target: str) -> Handlers:
    """The Handlers of `MODULE` or `MODULE:NAME`, from the current folder or what is installed."""
    module_name, _, name = target.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.split(".")[0] == error.name.split(".")[0]:
            raise ModuleUnusable(
                f"no module {module_name} in {folder} or among what is installed"
            ) from error
        raise ModuleUnusable(
            f"module {module_name} imports {error.name}, which is missing"
        ) from error
    except Exception as error:
        last = "".join(traceback.format_exception(error, limit=-1)).strip()
        raise ModuleUnusable(f"module {module_name} can't be imported:\n{last}") from error
    if name:
        found = getattr(module, name, None)
        if not isinstance(found, Handlers):
            raise ModuleUnusable(f"module {module_name} has no Handlers called {name}")
        return found
    named = {key: value for key, value in vars(module).items() if isinstance(value, Handlers)}
    if len(set(map(id, named.values()))) == 1:
        return next(iter(named.values()))
    if not named:
        raise ModuleUnusable(
            f"module {module_name} has no Handlers; make one: handlers = Handlers()"
        )
    choices = ", ".join(f"{module_name}:{key}" for key in named)
    raise ModuleUnusable(f"module {module_name} has several Handlers; choose from {choices}")
