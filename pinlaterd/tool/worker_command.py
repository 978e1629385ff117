"""The command `pinlater worker`: runs the handlers that a module declares."""

from __future__ import annotations

import logging

import click

from pinlaterd.client import Client, Worker
from pinlaterd.client.cli import check_service, fail
from pinlaterd.config.schema import ServerSettings
from pinlaterd.tool.modules import ModuleUnusable, load_handlers

_SERVER = ServerSettings()


@click.command()
@click.argument("module", metavar="MODULE[:NAME]")
@click.option("--host", default=_SERVER.host, show_default=True, help="The service's host.")
@click.option("--port", default=_SERVER.port, show_default=True, help="Thrift port.")
@click.option(
    "--queue", "queues", multiple=True, metavar="NAME", help="Only this queue; may be repeated."
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Jobs of a queue that run at a time, where its handler does not say.",
)
@click.option(
    "--grace-seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="How long running jobs may go on after SIGTERM or Ctrl-C.",
)
@click.option("--create-queues", is_flag=True, help="Make the queues that are not there.")
def worker(
    *,
    module: str,
    host: str,
    port: int,
    queues: tuple[str, ...],
    concurrency: int,
    grace_seconds: float,
    create_queues: bool,
) -> None:
    """Work on the queues whose handlers a Python module declares (docs/worker.md).

    The module is looked for in the current folder first. It declares one Handlers object, or :NAME
    says which. SIGTERM and Ctrl-C stop the worker in order, a second one at once.

    \b
    Examples:
      pinlater worker tasks
      pinlater worker shop.tasks:mail_handlers --queue mail --concurrency 32
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with Client(host, port) as client:
        try:
            handlers = load_handlers(module)
            runner = Worker(
                client,
                handlers,
                queues=queues or None,
                concurrency=concurrency,
                grace_seconds=grace_seconds,
            )
        except (ModuleUnusable, ValueError) as error:
            fail(str(error))
        check_service(client)
        names = sorted(queues or handlers.by_queue)
        if create_queues:
            for name in names:
                client.create_queue(name)
        click.echo(f"working on {', '.join(names)} at {client.address}", err=True)
        runner.run()
