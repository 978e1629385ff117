"""pinlaterd: a durable job queue server, compatible with PinLater's Thrift interface.

    client ──TCP, Thrift──▶ router ──ZeroMQ, the same Thrift bytes──▶ shard 1 ──▶ its store
                              │  └──────────────────────────────────▶ shard 2 ──▶ its store
                              ▲ snapshot: shards, rate shares              ▲
                              └────────── coordinator ─────────────────────┘
                                           ▲ etc/*.yaml   ▼ stats.txt, /metrics, supervisord

A router (`router`) cuts frames from TCP and reads only their heads (`rpc`); it passes the bytes
on over ZeroMQ (`wire`). Each shard process (`shard`) is the one owner of one store (`engines`):
it gathers what arrived while the last commit ran into one new commit, and answers once that is
durable. The coordinator (`coordinator`) reads the configuration (`config`), tells the others
which shards there are, and gathers everybody's figures (`stats`).

Imports go downward only:

    cli                                                       the command lines
    deployment                                                init, up, down
    router | shard | coordinator | http                       the processes
    client                                                    what applications import
    rpc | wire | engines                                      Thrift, ZeroMQ, storage
    config | stats | lifecycle
    model, errors, clock                                      standard library only

docs/architecture.md has the rest.
"""

__version__ = "0.1.0"
