"""The process that pushes jobs to HTTP servers, the downstreams.

A worker that runs nothing itself: a consumer (client) claims jobs, and a `pusher` for each queue
hands them to a `downstream`, which reports by a callback how they ended. `targets` says which
queues are pushed where, `overdue` ends attempts whose callback does not come, `main` wires it all
together. May rely on `client` and below.
"""
