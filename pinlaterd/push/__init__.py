"""The process that pushes jobs to HTTP servers, the downstreams.

main         `pinlaterd push`: wires these together with a consumer (client), which claims jobs
targets      which queues are pushed where, and the request that each job becomes
pusher       hands the jobs of one queue to their downstream
downstream   the HTTP server that jobs are posted to, and what its answers mean
overdue      ends attempts whose callback does not come
"""
