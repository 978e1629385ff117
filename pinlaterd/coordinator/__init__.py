"""The coordinator: reads the configuration, tells the others which shards there are, and knows
the state of every process.

    reload          from changed files to the active configuration
    programs        pure: the configuration to supervisord's programs, and which to start and stop
    supervisord     programs, through supervisord's XML-RPC; keeps them in step
    registry        what processes report: their states and figures
    status, pages   what the outside gets to see
    allocator       each router's share of a rate; without sockets and files
    rates           from queues.yaml and the server set to grants
    main            the process
"""
