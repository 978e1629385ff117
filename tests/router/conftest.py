"""Tests that are coroutines run on the loop of their `site`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "site(shards, **settings): the router's site in this test")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    site: Any = pyfuncitem.funcargs["site"]
    site.runner.run(pyfuncitem.obj(**arguments))
    return True
