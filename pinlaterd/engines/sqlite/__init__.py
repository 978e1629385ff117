"""The embedded default engine: one SQLite file a shard.

    schema.sql   every table, what is in it and why
    runs.py      the states of jobs with consecutive ids, in one row
    file.py      opening such a file, its sole owner, faults as pinlaterd's own
    store.py     the owning connection: transactions, queue ids, local ids
    batch.py     what `apply` does to the tables within its one commit
    claims.py    its claims
    engine.py    SqliteEngine: the StorageEngine contract
    check.py     counting jobs, and whether each is in exactly one run
    searcher.py  SqliteSearcher: counts and scans on a read-only connection in another process

sqlite3 and its exceptions stop at this package.
"""
