"""One shard: the one process that owns one store, and serves the Thrift calls on its jobs.

process       `pinlaterd shard NAME`: wires the parts together
loop          wait -> take what is there -> service -> send replies; other work between
service       calls in, answers out, one commit for many calls; no sockets
batches       what has arrived is decoded, and becomes batches, each one commit
validation    what a caller may ask: all rules, before anything is stored
operations    enqueue, ack, checkpoint, release: each checks its call, builds its store
              operation, and turns the result into the answer
dequeue       the same for dequeues, by the ready index
bulk          the other calls: queues, look-ups, counts, scans, retries, deletes
state         what all parts share
ready         which jobs are ready
permits       how many jobs of each limited queue may be in one state
leases        claims whose time-out is shorter than their queue's
timekeeping   how old claims are, by the time for which the shard served
failures      failed attempts by what they said, and the work of each source
health        whether the store can be relied on; queues that somebody else has locked
maintenance   time-outs, garbage, gauges
tasks         work in slices between commits, and searches
searcher      a process beside the shard for reads of unbounded cost
"""
