"""A deployment's folder and its processes, as command lines change them.

    files      the files that `init` writes; the lock of the command that is at work
    service    a deployment that runs, or does not: up, down
    restarts   waiting until processes serve; restarting them while the service goes on
    cluster    making a deployment a server of a cluster, or ending that

Part of the command lines: nothing else imports it.
"""
