"""The coordinator: reads the configuration, tells the others which shards there are, and knows
the state of every process.

    reload      from changed files to the active configuration
    programs    supervisord's programs, and which to start and stop; keeps them in step
    processes   what processes report, and what `status` and /health make of it
    pages       the HTTP pages, with figures in Ostrich's and Prometheus' formats
    allocator   each router's share of a rate; without sockets and files
    placement   which server owns which shard of a cluster; without sockets and files
    rates       from queues.yaml and the server set to grants
    main        the process
"""
