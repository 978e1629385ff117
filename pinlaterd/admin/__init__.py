"""`pinlater-admin`: looking at a service and mending what is in it.

`main` is the command line with `status`, `config check` and `hash-password`; `queues`, `jobs` and
`shards` are its sub-commands; `failover` makes a replica the master, `journal` remembers how far
that has come; `target` finds the service of a deployment, `stats_page` asks its
coordinator, `tables` prints. May rely on `client` and below.
"""
