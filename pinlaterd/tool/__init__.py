"""`pinlater`: the client and load tool.

`main` is the command line, `load` runs calls in threads and measures them, `issuers` are the
calls, `stamps` the bodies that can be checked when they come out again. May rely on `client`
and below.
"""
