"""The embedded default engine: one SQLite file a shard.

    schema.sql    every table, what is in it and why
    options.sql   the tables of options, which files get with the first job that has any
    options       the options of jobs
    keys          which job holds a key; the table of their hashes
    runs          the states of jobs with consecutive ids, in one row; whether each job is in one
    file          opening such a file, its sole owner, faults as pinlaterd's own
    store         the owning connection: transactions, queue ids, local ids
    batch         what `apply` does to the tables within its one commit
    engine        SqliteEngine: the StorageEngine contract
    searcher      SqliteSearcher: counts and scans on a read-only connection in another process

sqlite3 and its exceptions stop at this package.
"""
