"""The coordinator: reads the configuration, tells the others which shards there are, and knows
how everybody is.

    plan, shares    pure: which programs to start and stop; who gets how much of a rate
    membership      which other servers there are
    watch           when files in etc/ have changed
    transition      pure: what should be in force next
    reload          from changed files to what is in force
    programs        the configuration to supervisord's programs
    shard_programs  keeps supervisord in step with it
    supervisord     programs, through supervisord's XML-RPC
    roster          what processes report: their states and figures
    status, http    what the outside gets to see
    main            the process

Rate limits and failover build on `shares`, `membership` and `reload`.
"""
