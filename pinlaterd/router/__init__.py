"""The front: takes Thrift calls, chooses shards, passes bytes through, merges where it must.

    main          `pinlaterd router`: wires the parts together
    service       the operations: receive, route, transfer, reply
    call          a client's call on its way, and whether it may begin
    shards        the shards that a router knows, and the choice among them
    enqueue       enqueues that more than one shard may store
    dequeue       dequeues that take more than one shard, or that wait
    fan_out       calls that several shards answer together
    rate_limits   the router's share of each queue's rate, spent job by job
    callers       the sources that call for jobs

Holds no durable state; any number may run side by side.
"""
