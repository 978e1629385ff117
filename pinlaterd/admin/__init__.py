"""`pinlater-admin`: looking at a service and mending what is in it.

`main` is the command line with `status`, `config check` and `hash-password`; `queues`, `jobs` and
`shards` are its sub-commands; `failover` makes a replica the master, `journal` remembers how far
that has come; `shard_settings`, `queue_limits` edit etc/ and wait until it acts (`in_force`);
`drain` empties a shard, `moving` (with `shard_calls`) moves its scheduled jobs; `top` shows what
`samples` and `frames` make of everybody's figures; `confirm` asks; `target` finds the service of a
deployment, `stats_page` asks its coordinator, `tables` prints. May rely on `client` and below.
"""
