"""The only ZeroMQ: what processes say to each other, and the ends they say it through.

envelope        many calls between a router and a shard in one message; the shard's end
link            the router's end: a link to each shard, and the calls that wait for answers
connection      a link's connection to where its shard's owner is
key_placement   the placement of keys on shards, on which all processes agree
control         messages between processes and the coordinator, and both ends
process         a process as a part of its deployment: it follows the snapshot, and reports
listeners       listening sockets, handed from one process to the next
shard_caller    a shard called by a command, past the routers
curve           the cluster's key, for connections between servers
"""
