"""`pinlater-admin shard …`."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import IO, Any

import click
from rich.console import Console

from pinlaterd.admin import failover as failovers
from pinlaterd.admin import status_page, target
from pinlaterd.admin.check_shard import check_shard
from pinlaterd.admin.drain import drain
from pinlaterd.admin.failover import FailoverBroken, FailoverRefused, Plan, ShardFailover, Wanted
from pinlaterd.admin.shard_settings import add, dequeue_only, list_shards, remove
from pinlaterd.admin.tables import print_table
from pinlaterd.client.cli import MAX_SECONDS, Amount, fail
from pinlaterd.config.schema import Address
from pinlaterd.engines.failover import Account, ServerFacts
from pinlaterd.errors import StorageError

_SERVE_SECONDS = 60.0


class _HostPort(click.ParamType[Address]):
    name = "HOST:PORT"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Address:
        host, colon, port = str(value).rpartition(":")
        if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            self.fail(f"{value!r} is not HOST:PORT", param, ctx)
        return Address(host.removeprefix("[").removesuffix("]"), int(port))


@click.group()
def shard() -> None:
    """Change the shards of the service."""


for command in (list_shards, check_shard, drain, dequeue_only, add, remove):
    shard.add_command(command)


@shard.command()
@click.argument("name")
@click.option("--to", type=_HostPort(), help="The replica  [default: the shard's slave]")
@click.option(
    "--accept-loss", is_flag=True, help="Also where jobs that were acknowledged could be lost."
)
@click.option("--check", is_flag=True, help="Only say what would be done, or why it is refused.")
@click.option("--yes", is_flag=True, help="Don't ask; needed where nobody can be asked.")
@click.option(
    "--catch-up-seconds",
    type=Amount(MAX_SECONDS, least=0.1),
    default=60.0,
    show_default=True,
    help="The longest that the replica may take to catch up, with writes stopped.",
)
@click.option("--user", help="Who may administer both servers  [default: the shard's user]")
@click.option(
    "--passwd-file", type=click.File("r"), metavar="F|-", help="Its first line is --user's password"
)
@click.option(
    "--replication-user",
    help="As whom the old master replicates from the new one  [default: the shard's user]",
)
@click.option("--replication-passwd-file", type=click.File("r"), metavar="F|-")
@target.json_option
@target.target_options
def failover(
    *,
    name: str,
    to: Address | None,
    accept_loss: bool,
    check: bool,
    yes: bool,
    catch_up_seconds: float,
    as_json: bool,
    **accounts: Any,
) -> None:
    """Make the replica of shard NAME its master, and swap both in etc/shards.yaml.

    All shards on that master go along. Stops writes on the old master, waits until the replica has
    all, makes it writable, and returns once the shards serve from there. Refuses, with the reason,
    where a job that was acknowledged could be lost, as when the master does not answer. A command
    that was broken off is gone on with by giving it again.

    \b
    Examples:
      pinlater-admin shard failover 1 --check
      pinlater-admin shard failover 1
      pinlater-admin shard failover 1 --to db3.example.com:3306 --yes
      pinlater-admin shard failover 1 --accept-loss --yes
    """
    wanted = Wanted(
        name,
        to,
        accept_loss,
        _account("", **accounts),
        _account("replication_", **accounts),
        catch_up_seconds,
    )
    try:
        with (
            failovers.alone(target.directory()),
            contextlib.closing(ShardFailover(target.directory(), wanted)) as one,
        ):
            plan = one.plan()
            if check:
                _show_plan(plan, as_json=as_json)
                return
            if not as_json:
                _show_plan(plan, as_json=False)
            if not yes:
                _ask()
            _carry_out(one, plan, as_json=as_json)
    except (FailoverRefused, StorageError) as error:
        fail(f"refused: {error}")
    except FailoverBroken as error:
        fail(str(error))


def _account(prefix: str, **options: Any) -> Account | None:
    user: str | None = options[f"{prefix}user"]
    passwd_file: IO[str] | None = options[f"{prefix}passwd_file"]
    if user is None:
        if passwd_file is not None:
            option = f"--{prefix}user".replace("_", "-")
            raise click.UsageError(f"whose password is it? Give {option}, too")
        return None
    return Account(user, "" if passwd_file is None else passwd_file.readline().rstrip("\r\n"))


def _ask() -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked whether to do it; give --yes if so")
    click.confirm("Do it?", abort=True, err=True)


def _carry_out(one: ShardFailover, plan: Plan, *, as_json: bool) -> None:
    done: list[str] = []

    def tell(text: str) -> None:
        done.append(text)
        if not as_json:
            click.echo(f"  {text}")

    with Console(stderr=True).status("failing over"):  # on a terminal only
        one.carry_out(tell)
    master = one.successor()
    with Console(stderr=True).status(f"waiting until {master} serves"):
        served = failovers.wait_until_served(status_page.fetch, plan.shards, master, _SERVE_SECONDS)
    if as_json:
        facts = {"shards": plan.shards, "master": str(master), "done": done, "serves": served}
        click.echo(json.dumps(facts))
    elif served:
        click.echo(f"shard {', '.join(plan.shards)} is served from {master}")
    else:
        click.echo(f"no service runs here; shard {', '.join(plan.shards)} will use {master}")


def _show_plan(plan: Plan, *, as_json: bool) -> None:
    found = plan.examination
    if as_json:
        facts = {
            "shards": plan.shards,
            "master": found.master._asdict(),
            "replica": found.replica._asdict(),
            "accepted_risks": plan.risks,
            "remarks": found.remarks,
            "steps": plan.steps,
            "resumed": plan.resumed,
        }
        click.echo(json.dumps(facts))
        return
    if plan.resumed:
        click.echo("A failover that was broken off is gone on with.")
    click.echo(f"Failover of shard {', '.join(plan.shards)}")
    click.echo()
    print_table(
        ("server", "now", "answers", "writable", "replicates from", "position", "behind"),
        [("old master", *_row(found.master)), ("new master", *_row(found.replica))],
    )
    click.echo()
    for risk in plan.risks:
        click.echo(f"accepted: {risk}")
    for remark in found.remarks:
        click.echo(f"mind: {remark}")
    for number, step in enumerate(plan.steps, 1):
        click.echo(f"{number}. {step}")
    click.echo()


def _row(server: ServerFacts) -> tuple[str, ...]:
    writable = "?" if server.writable is None else "yes" if server.writable else "no"
    behind = "" if server.behind_seconds is None else f"{server.behind_seconds:.0f} s"
    return (
        server.address,
        "no" if server.trouble else "yes",
        writable,
        server.replicates_from or "-",
        server.applied or server.written or "?",
        behind or "-",
    )
