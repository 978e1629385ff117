"""What `pinlaterd init`, `up`, `down` do to a deployment's folder and its processes.

    files       the files that `init` writes
    service     a deployment that runs, or does not: up, down
    orphans     processes that a killed supervisord left behind

Part of the command line: nothing else imports it.
"""
