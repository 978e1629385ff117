"""The coordinator: reads the configuration, tells the others which shards there are, and knows
the state of every process.

    main             `pinlaterd coordinator`
    process          wires the parts together, publishes the snapshot
    reload           from changed files to the active configuration
    programs         supervisord's programs, and which to start and stop; keeps them in step
    processes        what processes report, and what `status` and /health make of it
    workers          the callers of the service, as processes know them
    pages            the HTTP pages, with figures in Ostrich's and Prometheus' formats
    sampler          moments, frames and history of this server
    history          rings of figures, and their file
    events           marks: what changed at one time
    overview         frames, history and marks, of one server or of all
    allocator        each router's share of a rate; without sockets and files
    rates            from queues.yaml and the snapshot to grants
    permits          how many jobs of a limited queue each shard may have; without sockets and files
    permit_control   from what is configured and reported to grants of permits

Of a cluster:

    member           the coordinator of one of its servers
    cluster          which shards have a process here; the leader's part
    placement        which server owns which shard; without sockets and files
    zookeeper        the session with ZooKeeper, and the nodes there
    shared_config    the texts of the shared files, and copies in etc/
    peers            messages between coordinators
    server_rates     each server's share of a rate
"""
