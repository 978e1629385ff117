-- The keys of jobs, in a file in which a job with a key was ever enqueued. Rows come and go with
-- the jobs, in the same commit. They are in the order of the jobs, which go many at a time, too.
CREATE TABLE IF NOT EXISTS keys (
    local_id INTEGER PRIMARY KEY,
    queue    INTEGER NOT NULL,
    key      TEXT NOT NULL,
    UNIQUE (queue, key)
);
