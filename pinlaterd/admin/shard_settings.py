"""`pinlater-admin shard list`, and the commands that change etc/shards.yaml."""

from __future__ import annotations

import json

import click

from pinlaterd.admin import samples, target
from pinlaterd.admin.frames import ListedShard, shards_of
from pinlaterd.admin.tables import print_table

_json_option = click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")


@click.command("list")
@_json_option
@target.target_options
def list_shards(*, as_json: bool) -> None:
    """Show each shard: where its jobs lie, how it is, how many it holds in each state.

    SCHEDULED are jobs whose run-after is still to come; PENDING are the others that wait.

    \b
    Example:
      pinlater-admin shard list
    """
    found = shards_of(samples.take())
    if as_json:
        click.echo(json.dumps(found))
        return
    columns = ("shard", "engine", "where", "state", "enqueues")
    counts = ("#pending", "#scheduled", "#in progress", "#succeeded", "#failed")
    print_table((*columns, *counts), map(_row, found))


def _row(shard: ListedShard) -> tuple[object, ...]:
    jobs = shard["jobs"]
    return (
        shard["name"],
        shard["engine"],
        shard["where"] or "-",
        f"{shard['state']}, ailing" if shard["ailing"] else shard["state"],
        "no (dequeue-only)" if shard["dequeue_only"] else "yes",
        jobs["pending"],
        jobs["scheduled"],
        jobs["in_progress"],
        jobs["succeeded"],
        jobs["failed"],
    )
