"""The command lines `pinlaterd`, `pinlater-admin` and `pinlater`. Nothing else imports them.

entry             the installed programs; Ctrl-C
command           what all have in common: failures, questions, options; which service is meant;
                  jobs, times and tables as text

pinlaterd         a deployment's life, and the processes that supervisord runs

admin             pinlater-admin: queues, jobs, status, config check, hash-password, restart
shards            its shards; the wait until the service follows an edit of etc/
service_status    what the coordinator says of the service; pinlater-admin top
drain             empties a shard; moves its scheduled jobs
failover          a replica becomes the master

pinlater          single calls; enqueue, dequeue, check-dequeue
bench             measurements
load, callers     the load generator: when calls are made and what they take; the calls
worker            `pinlater worker`
"""
