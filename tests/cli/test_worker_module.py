"""What `pinlater worker MODULE` takes for its Handlers, and what it says where there are none."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

from pinlaterd.cli.worker import ModuleUnfit, load_handlers

MADE = "from pinlaterd.client import Handlers\n{}\n"
HANDLING = MADE.format("{0} = Handlers()\n{0}.queue('{0}')(print)")
TWO = HANDLING.format("a") + HANDLING.format("b")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes tasks.py; what was imported is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(text: str) -> None:
        (tmp_path / "tasks.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("tasks", None)


@pytest.mark.parametrize(
    ("text", "spelling", "queue"),
    [
        (HANDLING.format("a"), "tasks", "a"),
        (HANDLING.format("a") + "same = a", "tasks", "a"),
        (TWO, "tasks:b", "b"),
    ],
)
def test_the_handlers_are_found(module, tmp_path, text, spelling, queue):
    module(text)

    assert list(load_handlers(spelling, tmp_path).by_queue) == [queue]


@pytest.mark.parametrize(
    ("text", "spelling", "message"),
    [
        (None, "tasks", "there is no module tasks: neither tasks.py nor tasks/ in"),
        ("", "tasks.py", "'tasks.py' is a file; give the module's name: tasks"),
        ("", "./shop/tasks.py", "give the module's name: shop.tasks"),
        ("", "a b", "'a b' is not of the form MODULE or MODULE:NAME"),
        ("import nothing_such", "tasks", "No module named 'nothing_such'"),
        ("def f():\n    1 / 0\nf()", "tasks", 'tasks.py", line 2, in f'),
        ("exit()", "tasks", 'put that under `if __name__ == "__main__":`'),
        ("x = 1", "tasks", "tasks has no Handlers; make one: handlers = Handlers()"),
        (TWO, "tasks", "tasks has several Handlers (a, b); choose one: tasks:a"),
        (TWO, "tasks:c", "c is not there in tasks; it has a, b"),
        ("x = 1", "tasks:x", "x is of type int, no Handlers, in tasks"),
        (MADE.format("a = Handlers()"), "tasks", "the Handlers of tasks handle no queue"),
    ],
)
def test_what_is_wrong_is_said(module, tmp_path, text, spelling, message):
    if text is not None:
        module(text)

    with pytest.raises(ModuleUnfit, match=re.escape(message)):
        load_handlers(spelling, tmp_path)
