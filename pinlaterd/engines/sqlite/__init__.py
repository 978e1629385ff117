"""The embedded default engine: one SQLite file a shard.

    schema.sql   every table, what is in it and why
    keys.py      the keys of jobs, in a table (keys.sql) that files get with the first of them
    runs.py      the states of jobs with consecutive ids, in one row; whether each job is in one
    file.py      opening such a file, its sole owner, faults as pinlaterd's own
    store.py     the owning connection: transactions, queue ids, local ids
    batch.py     what `apply` does to the tables within its one commit
    engine.py    SqliteEngine: the StorageEngine contract
    searcher.py  SqliteSearcher: counts and scans on a read-only connection in another process

sqlite3 and its exceptions stop at this package.
"""
