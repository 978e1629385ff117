"""What the command lines do to a deployment's folder and its processes.

    files       the files that `init` writes
    service     a deployment that runs, or does not: up, down
    restarts    processes restarted while the service goes on
    orphans     processes that a killed supervisord left behind
    stats_page  what the coordinator answers at its socket, or over HTTP

Part of the command lines: nothing else imports it.
"""
