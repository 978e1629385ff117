"""The engine for MySQL and MariaDB servers: one database a queue, as PinLater laid them out.

    jobs.sql       the table of a queue's priority, the whole layout and why it is so
    options.sql, keys_of_all.sql
                   what few jobs have, a table of a queue; the keys of all queues
    owner.sql      what a shard remembers of itself
    cluster.sql    the latest term in which it was claimed, where several servers share the shards
    connection     one connection: its session's settings, its patience; values as SQL literals, the
                   only place where any becomes part of a statement; faults as our own
    tables         what the tables of a queue can hold, ours and PinLater's; making, counting them
    statements     UPDATE and SELECT of many jobs at once, by primary key; one transaction of them;
                   how a COMMIT ended that was cut off
    ownership      the server's lock that makes an owner, and the record of terms
    store          the owning connection: opening it, ids, transactions
    batch          what `apply` does within its one transaction
    engine         MysqlEngine: the StorageEngine contract
    searcher       MysqlSearcher: counts and scans on a read-only connection in another process
    replication    a server as replication sees it: positions, and whose replica it is
    failover       MysqlFailover: a replica takes its master's place

PyMySQL and its exceptions stop at this package.
"""
