"""One shard: the one process that owns one store, and serves the Thrift calls on its jobs.

process      wires the parts together;  loop: wait -> take what is there -> service ->
             send replies; slices of other work between
service      calls in, answers out, one commit for many calls; no sockets
operations   enqueue, ack, checkpoint, release: each checks its call, builds its store operation,
             and turns the result into the answer;  dequeue: the same, by the ready index
batches      what has arrived is decoded, and becomes batches, each one commit, and what becomes of
             its calls
state        what all parts share;  ready: which jobs are ready;  health: of its store, and locks
bulk         the other calls: queues, look-ups, counts, scans, retries, deletes
maintenance  time-outs, garbage, gauges;  tasks: work in slices between commits, and searches
searcher     a process beside the shard for reads of unbounded cost
"""
