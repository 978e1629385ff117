"""Steps of calls at which a test has a process killed.

The processes of a deployment import pinlaterd from a folder whose sitecustomize.py calls `watch`:
product code knows nothing of it. A file there that bears a step's name holds a pid: the process
that comes to the step first takes the file away, and kills that one, or itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Step(NamedTuple):
    """The moment before or after calls of `function` (MODULE:CLASS.NAME) in processes of `kind`,
    those with arguments of which `concerns` is true."""

    kind: str
    function: str
    after: bool = False
    concerns: Callable[..., bool] = lambda *_: True


def _sends(method: bytes) -> Callable[..., bool]:
    return lambda _link, call, _on_reply: method in call.message


def _answers(method: bytes) -> Callable[..., bool]:
    """Answers that bear jobs, of dequeues."""
    claims = method == b"dequeueJobs"
    return lambda _link, call, reply: method in call.message and (reply.jobs > 0 or not claims)


def _has(operations: str) -> Callable[..., bool]:
    """Commits of such operations; before it is made a commit has none."""
    return lambda commit, *_: bool(getattr(getattr(commit, "batch", None), operations, ()))


def _steps_of_call(doing: str, method: bytes, operations: str) -> dict[str, Step]:
    link, commit = "pinlaterd.wire.link:ShardLink", "pinlaterd.shard.operations:Commit"
    has, answers = _has(operations), _answers(method)
    return {
        f"router sends {doing}": Step("router", f"{link}.call", concerns=_sends(method)),
        f"router has the answer to {doing}": Step("router", f"{link}._tell", False, answers),
        f"router has passed on {doing}": Step("router", f"{link}._tell", True, answers),
        f"shard is about to commit {doing}": Step("shard", f"{commit}.__init__", True, has),
        f"shard has committed {doing}": Step("shard", f"{commit}.hand_over", False, has),
    }


_JOBS = "pinlaterd.http.v1_jobs:JobHandlers"
_POST = "pinlaterd.push.downstream:Downstreams.post"
STEPS = {
    "http is about to enqueue": Step("http", f"{_JOBS}._store"),
    "http has enqueued": Step("http", f"{_JOBS}._store", after=True),
    **_steps_of_call("an enqueue", b"enqueueJobs", "with_options"),
    **_steps_of_call("a claim", b"dequeueJobs", "claims"),
    "push has a job": Step("push", "pinlaterd.push.pusher:Pusher._push"),
    "push is about to post": Step("push", _POST),
    "push has posted": Step("push", _POST, after=True),
    "http is about to end a job": Step("http", f"{_JOBS}._end"),
    **_steps_of_call("an end", b"finishJobs", "finishes"),
    "http has ended a job": Step("http", f"{_JOBS}._end", after=True),
}


ITSELF = 0


def arm(folder: Path, name: str, pid: int) -> Path:
    """Have a process killed at a step; return the file that is there until then."""
    armed = folder / name
    new = armed.with_suffix(".new")
    new.write_text(str(pid))
    return new.rename(armed)


def watch(folder: Path) -> None:
    """Look for files of `folder` at the steps of this process."""
    functions: dict[str, list[str]] = {}
    for name, step in STEPS.items():
        if "pinlaterd" in sys.orig_argv and step.kind in sys.orig_argv:
            functions.setdefault(step.function, []).append(name)
    for function, names in functions.items():
        module, _, path = function.partition(":")
        owner_name, _, attribute = path.partition(".")
        owner = getattr(importlib.import_module(module), owner_name)
        setattr(owner, attribute, _watched(getattr(owner, attribute), names, folder))


def _watched(
    function: Callable[..., Any], names: Sequence[str], folder: Path
) -> Callable[..., Any]:
    def strike(
        arguments: Sequence[Any], *, after: bool, of_before: Collection[str] = ()
    ) -> list[str]:
        """Kill for a step that is armed; return those that the arguments concern."""
        concerned = [
            name
            for name in names
            if (folder / name).exists() and (name in of_before or STEPS[name].concerns(*arguments))
        ]
        for name in concerned:
            if STEPS[name].after is after:
                pid = int((folder / name).read_text())
                (folder / name).unlink()
                os.kill(pid or os.getpid(), signal.SIGKILL)
        return concerned

    @functools.wraps(function)
    def watched(*arguments: Any, **options: Any) -> Any:
        concerned = strike(arguments, after=False)
        result = function(*arguments, **options)
        strike(arguments, after=True, of_before=concerned)
        return result

    @functools.wraps(function)
    async def awaited(*arguments: Any, **options: Any) -> Any:
        concerned = strike(arguments, after=False)
        result = await function(*arguments, **options)
        strike(arguments, after=True, of_before=concerned)
        return result

    return awaited if inspect.iscoroutinefunction(function) else watched
