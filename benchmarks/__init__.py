"""What pinlaterd costs, measured side by side in one run: `tools/bench`.

    main.py            the command line: which sections, how long, how often
    sections.py        enqueue, dequeue, echo: the whole path against the engine alone
    interference.py    dequeues while others ask for much: slow reader, search, maintenance
    idle.py            a service that nobody calls, and a shard with deep queues
    worker.py          a worker against the same calls by hand, and how soon it begins a job
    targets.py         the figures to reach
    report.py          the table, the JSON file

    deployment.py      a service of its own in a temporary folder, on free ports
    load.py            the load generator: one process, epoll, frames encoded beforehand
    frames.py          those frames, and what is read of the replies
    engine_alone.py    the storage engine called in process with the same batches
    pinlater_statements.py  the same with PinLater's own statements, the baseline for MySQL
    stores.py          where shards keep their jobs: files, or a private server for the run
    echo.py            shards that store nothing
    trivial_server.py  answers every frame with the same bytes: the load generator's own limit
    figures.py         how large the code is: `tools/figures`; call_trace.py, the way of a call

Absolute figures drift with the machine; ratios within one run hold. So what is compared is
measured in turn: engine, whole, engine, whole.
"""
