"""Waits until the service follows what a command has written into etc/.

The coordinator names the files that it has carried out, or refused, by their digest; every process
names the configuration that it follows. A process that is down follows once it starts.

Of what it says against the files, a refused removal concerns that shard alone: all else that they
say is in force. Anything else is a mistake in them, and keeps all three from acting.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console

from pinlaterd.admin import stats_page, target
from pinlaterd.client.cli import fail, printable
from pinlaterd.config.layout import ETC, SHARDS_FILE
from pinlaterd.config.load import ConfigFiles
from pinlaterd.errors import ConnectionFailed

_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.05
_DOWN = ("stopped", "silent")  # a frozen router is held off by the shards, which refuse by then
_MAX_LINE_CHARS = 2000
# as the coordinator says it (`coordinator.reload`)
_REFUSED_REMOVAL = re.compile(rf"{re.escape(str(ETC / SHARDS_FILE))}: shards\.(.+?): not removed: ")


def wait_until_followed() -> Sequence[str] | None:
    """Until every process follows etc/ as it is now; the coordinator's problems with the files.

    None if the coordinator is away: then what was written acts when it is back. Ends the program
    with a message if it takes too long."""
    try:
        with Console(stderr=True).status("waiting until the service follows"):  # on a terminal only
            return _wait(time.monotonic() + _PATIENCE_SECONDS)
    except ConnectionFailed:
        return None


def say_when_followed(done: str, *, was_changed: bool) -> bool:
    """Wait, and tell that `done` is so; False if it is not yet. Fails if it was refused."""
    return tell(done, wait_until_followed(), was_changed=was_changed)


def tell(done: str, problems: Sequence[str] | None, *, was_changed: bool) -> bool:
    """Tell what came of it: as `say_when_followed`, with what `wait_until_followed` returned."""
    if problems is None:
        click.echo(
            f"{done}: it is written, and acts when the coordinator is back; `pinlaterd status` "
            "shows how the service is",
            err=True,
        )
        return False
    against = what_concerns(None, problems)
    if against:
        fail(shown(against))
    for problem in problems:
        click.echo(f"warning: {shown([problem])}", err=True)
    click.echo(f"{done}{'' if was_changed else ' already'}", err=True)
    return True


def what_concerns(shard: str | None, problems: Sequence[str]) -> Sequence[str]:
    """Those of the coordinator's problems that keep an edit from acting: all but the refused
    removals of other shards than `shard`. None: the edit removes none."""
    return [problem for problem in problems if _refused_removal(problem) in (None, shard)]


def _refused_removal(problem: str) -> str | None:
    """The shard that it is about; None if it is about the files as a whole."""
    found = _REFUSED_REMOVAL.match(problem)
    return None if found is None else found[1]


def shown(problems: Sequence[str]) -> str:
    return "; ".join(printable(problem, _MAX_LINE_CHARS) for problem in problems)


def _wait(until: float) -> Sequence[str]:
    while True:
        status = _status()
        if status["config_judged"] == ConfigFiles(target.directory() / ETC).digest:
            late = _late(status)
            if not late:
                problems: Sequence[str] = status["config_problems"]
                return problems
            waits_for = f"{', '.join(late)} has not followed"
        else:
            waits_for = "the coordinator has not carried it out"
        if time.monotonic() >= until:
            fail(
                f"what was written does not act after {_PATIENCE_SECONDS:.0f} s: {waits_for}; "
                "see `pinlater-admin status` and run/log"
            )
        time.sleep(_POLL_SECONDS)


def _late(status: Mapping[str, Any]) -> list[str]:
    return [
        process["name"]
        for process in status["processes"]
        if process["kind"] in ("router", "shard")
        and process["state"] not in _DOWN
        and process["config_version"] < status["config_version"]
    ]


def _status() -> Mapping[str, Any]:
    found: Mapping[str, Any] = stats_page.fetch_json(
        "/status.json", directory=target.directory(), url=target.stats_url()
    )
    return found
