"""`pinlater`: the client and load tool.

`main` is the command line, `load` runs calls in threads and counts them, `issuers` are the
calls, `stamps` the bodies that can be checked when they come out again. `bench` measures the calls
of `callers`, `pace` says when they start, `bench_report` what is printed of it, and
`bench_commands` are the command lines of that. May rely on `client` and below.
"""
