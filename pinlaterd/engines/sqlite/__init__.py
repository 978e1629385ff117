"""The embedded default engine: one SQLite file a shard.

    schema.sql   every table, what is in it and why
    schema.py    opens such a file, or says why it is not one of ours; migrations
    lock.py      sole ownership: flock on FILE.lock
    store.py     the owning connection: transactions, faults, queue ids, local ids
    snapshot.py  what jobs are counted in, beside the owner
    check.py     whether each job is in exactly one state, and how to make it so
    batch.py     what `apply` does to the tables within its one commit
    engine.py    SqliteEngine: the StorageEngine contract
    searcher.py  SqliteSearcher: counts and scans on a read-only connection in another process

sqlite3 and its exceptions stop at this package.
"""
