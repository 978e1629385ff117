"""What the command lines do to a deployment's folder and its processes.

    files       the files that `init` writes
    service     a deployment that runs, or does not: up, down
    restarts    processes started anew while the service goes on
    orphans     processes that a killed supervisord left behind

Part of the command lines (`pinlaterd init`, `up`, `down`; `pinlater-admin restart`): nothing else
imports it.
"""
