"""The command lines `pinlaterd`, `pinlater-admin` and `pinlater`. Nothing else imports them.

entry             the installed programs; Ctrl-C
command_line      what all have in common: failures, questions, types of arguments
options           options that several commands share; which service is meant
rendering         jobs, times and tables as text

pinlaterd         a deployment's life, and the processes that supervisord runs

admin             pinlater-admin: status, config check, hash-password; its groups are
queues, jobs, shards, restart, top
service_status    what the coordinator says of the service; waits until it follows an edit
frames            rates and depths, from two samples of everybody's figures
drain, moving     empties a shard; moves its scheduled jobs
failover, journal a replica becomes the master; how far that has come

pinlater          the client and load tool: enqueue, dequeue, check-dequeue, single calls
load, issuers, audit
bench, bench_commands, bench_report, callers, pace
worker, reload    `pinlater worker`, started again when its sources change
"""
