"""`pinlater-admin server …`: the servers of a cluster."""

from __future__ import annotations

import time

import click

from pinlaterd.cli import command, service_status

_LOOK_SECONDS = 1.0


@click.group(cls=command.Group)
def server() -> None:
    """Look at the servers of a cluster; take one out of service."""


@server.command("list")
@command.files_options
def list_servers() -> None:
    """Show each server: whether it is alive, and which shards it owns.

    Example: pinlater-admin server list
    """
    found = service_status.fetch().get("servers", [])
    command.show(found, lambda: command.print_table(service_status.SERVER_COLUMNS, found))


@server.command()
@click.argument("name")
@click.argument("state", type=click.Choice(["on", "off"]), metavar="on|off")
@click.option("--wait", is_flag=True, help="Return once the server owns no shard.")
@command.files_options
def maintenance(*, name: str, state: str, wait: bool) -> None:
    """Have server NAME own no shards (on), or own some again (off).

    Shards move one by one, at no client's cost. Those that are of that server only stay there.

    Examples:
      pinlater-admin server maintenance jobs-1 on --wait
      pinlater-admin server maintenance jobs-1 off
    """
    from pinlaterd.deployment import cluster

    if wait and state == "off":
        raise click.UsageError("--wait goes with on")
    cluster.set_maintenance(command.directory(), name, on=state == "on")
    if wait:
        with command.waiting("moving shards") as tell:
            while left := cluster.shards_to_leave(command.directory(), name):
                tell(f"moving shards {', '.join(left)}")
                time.sleep(_LOOK_SECONDS)
    left = cluster.shards_to_leave(command.directory(), name) if state == "on" else []
    owns = f", and still owns shards {', '.join(left)}" if left else ""
    facts = {"server": name, "maintenance": state == "on", "shards_to_leave": left}
    command.show(facts, f"server {name}: maintenance is {state}{owns}")


@server.command()
@click.argument("name")
@command.yes_option
@command.files_options
def remove(*, name: str, yes: bool) -> None:
    """Forget server NAME, which is gone for good.

    Refused while it is alive, or shards may be on no other server.

    Example: pinlater-admin server remove jobs-3
    """
    from pinlaterd.deployment import cluster

    command.confirm(f"Forget server {name}?", yes=yes)
    cluster.remove(command.directory(), name)
    command.show({"server": name}, f"server {name} is removed")
