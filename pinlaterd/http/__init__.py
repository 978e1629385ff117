"""The HTTP interface: a process of its own, and a client of the routers like any other.

main         `pinlaterd http`: wires these together
v2           the calls of /v2: what each takes, does and answers
api          a call as a row of the table of calls
bodies       their JSON, as records that are checked as they are read
problems     errors as RFC 9457 has them (`application/problem+json`)
openapi      the description of all calls
changes      retries and deletes of many jobs, with their preview
gathering    small enqueues that arrive together, as one call
stream       enqueues of any number of jobs, a job a line
pages        the jobs of a queue, page by page
v1           the paths of Rickover's interface, /v1, who may use them, and its job types
v1_jobs      the calls on its jobs
v1_archive   its jobs that have ended
v1_bodies    its JSON
v1_errors    its errors, with the ids that its clients compare
job_types    the registry of job types
"""
