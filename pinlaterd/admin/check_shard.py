"""`pinlater-admin shard check`: whether a shard's store agrees with itself."""

from __future__ import annotations

import json
import sys

import click

from pinlaterd.admin import target
from pinlaterd.client.cli import fail
from pinlaterd.clock import SystemClock
from pinlaterd.config.active import load_active
from pinlaterd.config.layout import ETC
from pinlaterd.engines.registry import make_engine
from pinlaterd.errors import ShardOwned, StorageError
from pinlaterd.lifecycle import ExitCode


@click.command("check")
@click.argument("name")
@click.option("--repair", is_flag=True, help="Mend what is found.")
@target.json_option
@target.deployment_options
def check_shard(*, name: str, repair: bool, as_json: bool) -> None:
    """Compare what the store of shard NAME holds in several places, over all its jobs.

    The shard must be stopped. Exit 1 if anything disagrees and is not repaired.

    \b
    Examples:
      supervisorctl -c etc/supervisord.conf stop shard-1
      pinlater-admin shard check 1
      pinlater-admin shard check 1 --repair
      supervisorctl -c etc/supervisord.conf start shard-1
    """
    target.enter()
    config = load_active(target.directory() / ETC).config
    settings = config.shards.get(name)
    if settings is None:
        fail(f"no shard {name!r}; there are: {', '.join(config.shards) or 'none'}")
    engine = make_engine(settings, config.server)
    try:
        engine.open(SystemClock().now_ms())
        try:
            found = engine.check(repair=repair)
        finally:
            engine.close()
    except ShardOwned as error:
        stop = f"supervisorctl -c etc/supervisord.conf stop shard-{name}"
        fail(f"{error.message}; stop it first: {stop}")
    except StorageError as error:
        fail(error.message)
    if as_json:
        facts = {"shard": name, "repaired": repair, "found": [one._asdict() for one in found]}
        click.echo(json.dumps(facts))
    else:
        for queue, problem, jobs in found:
            click.echo(f"queue {queue}: {jobs:,} {problem}{' (repaired)' if repair else ''}")
        if not found:
            click.echo(f"shard {name} agrees with itself")
    if found and not repair:
        sys.exit(ExitCode.FAILURE)
