-- One shard, version 3. (PRAGMA user_version holds the version, PRAGMA application_id marks the
-- file as ours; both are set by file.py in the transaction that runs this script.)
--
-- The layout serves one access pattern: jobs are enqueued, claimed and ended once, many at a time.
-- A job's row in `jobs`, which carries the body, is written when it is enqueued, and not touched by
-- a claim or a plain acknowledgement. Its state is in `runs`, in one row for all jobs with
-- consecutive local ids that entered that state together: so the cost of a claim or an
-- acknowledgement is that of a row or two, not of as many rows as it has jobs.
--
-- Times are milliseconds since the epoch. States: 0 PENDING, 1 IN_PROGRESS, 2 SUCCEEDED, 3 FAILED.

-- What the shard remembers of itself.
--   next_local_id   no local id from here on was ever given out
--   clean           1 if the last owner closed the file in order, 0 while one is at work or died
--   sound           0 if tables disagreed when it was closed, or had still to be compared
--   start_ms        when the last owner took over
--   fence           the highest number that the shard's fence was raised to
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;

-- Queues by number. A deleted queue is only marked, which hides it and its jobs at once; its rows
-- go in slices later. AUTOINCREMENT: its number is never given to another queue.
CREATE TABLE queues (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    name       TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    dropped    INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX queues_by_name ON queues (name) WHERE NOT dropped;

-- All jobs. Changed only by a checkpoint, a failed attempt, a retry or a status text. `body` stands
-- last, so that the other columns are read without it. `updated_at` is when the job last became
-- PENDING; in other states its run's `at` counts.
CREATE TABLE jobs (
    local_id           INTEGER PRIMARY KEY,
    queue              INTEGER NOT NULL,
    priority           INTEGER NOT NULL,
    attempts_allowed   INTEGER NOT NULL,
    attempts_remaining INTEGER NOT NULL,
    run_after          INTEGER NOT NULL,
    created_at         INTEGER NOT NULL,
    updated_at         INTEGER NOT NULL,
    custom_status      TEXT NOT NULL,
    body               BLOB NOT NULL
);

-- What state jobs are in: those with the local ids from `first_id` to `last_id`. Runs don't overlap,
-- and every job is in exactly one.
--   at            PENDING: run-after, the same as in the jobs' rows. IN_PROGRESS: when they were
--                 claimed or last checkpointed. SUCCEEDED, FAILED: when they ended
--   claimer       NULL while PENDING; else the claim descriptor of the run's first job, the last
--                 claim being kept as a record, up to its number
--   claim_number  the rest of that descriptor; that of each next job is one greater. NULL: the
--                 descriptor ends in no number, and the run has one job
CREATE TABLE runs (
    first_id     INTEGER PRIMARY KEY,
    last_id      INTEGER NOT NULL,
    queue        INTEGER NOT NULL,
    priority     INTEGER NOT NULL,
    state        INTEGER NOT NULL,
    at           INTEGER NOT NULL,
    claimer      TEXT,
    claim_number INTEGER
);

-- The order in which PENDING jobs are handed out, claims time out, garbage is collected and failed
-- jobs are retried. As runs don't overlap, order by `last_id` is order by local id.
CREATE INDEX runs_by_age ON runs (queue, state, priority, at, last_id);

-- A whole job, whatever its state.
CREATE VIEW job_records AS
SELECT
    jobs.local_id,
    jobs.queue,
    jobs.priority,
    coalesce(runs.state, 0) AS state,
    jobs.attempts_allowed,
    jobs.attempts_remaining,
    jobs.custom_status,
    jobs.created_at,
    jobs.run_after,
    CASE WHEN runs.state > 0 THEN runs.at ELSE jobs.updated_at END AS updated_at,
    CASE
        WHEN runs.claim_number IS NULL THEN runs.claimer
        ELSE runs.claimer
            || (runs.claim_number + jobs.local_id - runs.first_id)
    END AS claim_descriptor,
    jobs.body
FROM jobs
LEFT JOIN runs
    ON runs.first_id = (SELECT max(first_id) FROM runs WHERE first_id <= jobs.local_id)
    AND runs.last_id >= jobs.local_id;
