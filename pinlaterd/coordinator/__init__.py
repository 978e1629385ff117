"""The coordinator: reads the configuration, tells the others which shards there are, and knows
how everybody is.

    plan, shares    pure: which programs to start and stop; who gets how much of a rate
    membership      which other servers there are
    supervisord     programs, through supervisord's XML-RPC
    roster          what processes report: their states and figures
    status, http    what the outside gets to see
    main            the process

Live reload, rate limits and failover build on `plan`, `shares` and `membership`.
"""
