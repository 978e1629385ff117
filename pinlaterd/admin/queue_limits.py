"""`pinlater-admin queue limit|pause|resume`: edits of etc/queues.yaml, that return once it acts."""

from __future__ import annotations

import json
from typing import Any

import click

from pinlaterd.admin import in_force, target
from pinlaterd.config import edit
from pinlaterd.config.layout import ETC
from pinlaterd.errors import ConnectionFailed, PinLaterError
from pinlaterd.model import QUEUE_NAME

_NONE = "none"


class _Rate(click.ParamType[float | None]):
    """Jobs per second, or none."""

    name = "JOBS_PER_SECOND|none"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | None:
        if value == _NONE:
            return None
        try:
            rate = float(value)
        except ValueError:
            rate = -1.0
        if not 0 <= rate < float("inf"):
            self.fail(f"{value!r} is neither a number of jobs per second nor none", param, ctx)
        return rate


def _check_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not QUEUE_NAME.match(value):
        raise click.BadParameter(
            f"{value!r} is no queue name; use letters, digits and underscores", ctx, param
        )
    return value


_name_argument = click.argument("name", callback=_check_name)


# a number below 0 is told to be wrong, and not taken for an option
@click.command(context_settings={"ignore_unknown_options": True})
@_name_argument
@click.argument("rate", type=_Rate(), metavar="JOBS_PER_SECOND|none")
@target.json_option
@target.deployment_options
def limit(*, name: str, rate: float | None, as_json: bool) -> None:
    """Let no more jobs of queue NAME be dequeued in a second, over the whole cluster.

    Fractions are allowed (0.1: one in ten seconds); 0 stops dequeues; none means no limit.

    \b
    Examples:
      pinlater-admin queue limit mail 100
      pinlater-admin queue limit mail none
    """
    was_changed = edit.set_limit(target.directory() / ETC, name, rate)
    shown = "no limit" if rate is None else f"a limit of {rate:g} jobs/s"
    _finish(name, f"queue {name} has {shown}", was_changed=was_changed, as_json=as_json)


@click.command()
@_name_argument
@target.json_option
@target.deployment_options
def pause(*, name: str, as_json: bool) -> None:
    """Let no jobs of queue NAME be dequeued until it is resumed. Its limit is kept.

    \b
    Example:
      pinlater-admin queue pause mail
    """
    was_changed = edit.set_paused(target.directory() / ETC, name, paused=True)
    _finish(name, f"queue {name} is paused", was_changed=was_changed, as_json=as_json)


@click.command()
@_name_argument
@target.json_option
@target.deployment_options
def resume(*, name: str, as_json: bool) -> None:
    """Let jobs of queue NAME be dequeued again, under the limit that it had.

    \b
    Example:
      pinlater-admin queue resume mail
    """
    was_changed = edit.set_paused(target.directory() / ETC, name, paused=False)
    _finish(name, f"queue {name} is resumed", was_changed=was_changed, as_json=as_json)


def _finish(name: str, done: str, *, was_changed: bool, as_json: bool) -> None:
    acts = in_force.say_when_followed(done, was_changed=was_changed)
    _warn_of_unknown(name)
    if as_json:
        facts = edit.limit_settings(target.directory() / ETC, name)
        click.echo(json.dumps({"queue": name, **facts._asdict(), "acts": acts}))


def _warn_of_unknown(name: str) -> None:
    """Settings may come before their queue; mistyped ones look the same, and do nothing."""
    try:
        with target.connect() as client:
            is_known = name in client.queue_names()
    except (PinLaterError, ConnectionFailed):
        return  # whether it is there can't be told now
    if not is_known:
        click.echo(
            f"warning: there is no queue {name} yet; `pinlater-admin queue list` shows those there "
            "are",
            err=True,
        )
