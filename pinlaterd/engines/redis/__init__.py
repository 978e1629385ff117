"""The Redis engine: a shard is a set of keys, in PinLater's own layout or a leaner one, in a
Redis server.

    common.lua       every key, what is in it and why; what all scripts begin with
    jobs.lua         jobs of either layout, as scripts reach them
    apply.lua        one batch
    runs.lua         jobs of a lean queue that are in one state together
    owner.lua, reads.lua, slices.lua
                     the other scripts, by what they are for; those that write see first that the
                     caller owns the shard
    scripts          the scripts as the server runs them; jobs and scores as they answer them
    connection       one connection that is never made again; what a server or the way to it may
                     answer, in words
    servers          where the server is, by Sentinels; what it says of itself: part of a cluster,
                     a replica, how durable
    store            Store: ownership, by a lease and its token; queue names
    batch            a Batch as the arguments of apply.lua, and its answer as a BatchResult
    engine           RedisEngine: the StorageEngine contract
    failover         RedisFailover: a replica takes its master's place; SentinelFailover: the same
                     where Sentinels choose it
    searcher         RedisSearcher: counts and scans on a connection of its own, elsewhere

redis-py, and its exceptions, stop at this package.
"""
