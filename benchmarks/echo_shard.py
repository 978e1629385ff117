"""A shard's process as supervisord would run it, but with an engine that stores nothing.

python -m benchmarks.echo_shard NAME --config DIR/etc
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from benchmarks.echo_engine import EchoEngine
from pinlaterd.config.schema import ServerSettings, ShardSettings
from pinlaterd.engines.base import StorageEngine
from pinlaterd.shard.process import run


def make_echo_engine(_shard: ShardSettings, _server: ServerSettings) -> StorageEngine:
    return EchoEngine()


@click.command()
@click.argument("name")
@click.option("--config", "etc", required=True, type=click.Path(path_type=Path))
def cli(*, name: str, etc: Path) -> None:
    sys.exit(run(name, etc, make_echo_engine))


if __name__ == "__main__":
    cli()
