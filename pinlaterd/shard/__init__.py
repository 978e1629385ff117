"""One shard: the one process that owns one store, and serves the Thrift calls on its jobs.

main        wires the parts together and runs them
loop        wait -> take what is there -> service -> send replies; slices of other work between
service     calls in, answers out, one commit for many calls; no sockets
reception   decodes a call, and finds out what it takes to answer it
validation  what a caller may ask
planning    from a call of the job path to the Work that its commit takes
works       what each kind of call puts into the commit, and answers once that is durable
dequeues    the same for dequeues, which choose their jobs by the ready index
inquiries   the other calls: queues, look-ups, counts, scans, retries, deletes
ready       which jobs are ready;  fresh: bodies of jobs just enqueued
tasks       work in slices between commits: retries, deletes, look-ups, searches, upkeep
search      the searcher: a process beside the shard for reads of unbounded cost
"""
