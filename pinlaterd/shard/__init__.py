"""One shard: the one process that owns one store, and serves the Thrift calls on its jobs.

    loop        wait -> take what is there -> service -> send replies; slices of other work between
    service     the calls of one batch: plan -> one commit -> answers; no sockets, no clock but Clock
    works       what each kind of call puts into the commit, and answers once that is durable
    validation  what a caller may ask
    ready       which jobs are ready;  fresh: bodies of jobs just enqueued
    tasks       work in slices between commits: retries, deletes, look-ups, searches, upkeep
    search      the searcher: a process beside the shard for reads of unbounded cost
"""
