"""The Redis engine: a shard is a set of keys, in PinLater's own layout, in a Redis server.

    common.lua       every key, what is in it and why; what all scripts begin with
    *.lua            one script each; those that write see first that the caller owns the shard
    scripts.py       the scripts as the server runs them
    faults.py        what the server or the connection may answer, in words
    connection.py    one connection that is never silently made again
    sentinel.py      where the server is, by Sentinels
    server_facts.py  what the server says of itself: part of a cluster, a replica, how durable
    owner.py         an owner's name, which tells whether its process runs still
    store.py         ownership: the lease and its token; queue names
    batch.py         a Batch as the arguments of apply.lua, and its answer as a BatchResult
    records.py       a whole job as lookup.lua answers it
    engine.py        RedisEngine: the StorageEngine contract
    replication.py   a server's part in replication
    failover.py      RedisFailover: a replica takes its master's place
    sentinel_failover.py  SentinelFailover: the same where Sentinels choose it
    searcher.py      RedisSearcher: counts and scans on a connection of its own, elsewhere

hiredis, which packs commands and parses answers, and its exceptions stop at this package.
"""
