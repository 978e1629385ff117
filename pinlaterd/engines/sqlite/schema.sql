-- One shard, version 1. (PRAGMA user_version holds the version, PRAGMA application_id marks the
-- file as ours; both are set by schema.py in the transaction that runs this script.)
--
-- The layout serves one access pattern: a job is enqueued, claimed and ended once, a hundred at a
-- time. So a job's row in `jobs`, which carries the body, is written when it is enqueued and
-- not touched by a claim or a plain acknowledgement. Its state is told by the one small table
-- that holds its id:
--
--     pending   PENDING       claims   IN_PROGRESS       ended   SUCCEEDED or FAILED
--
-- Every job of a queue that is not dropped is in exactly one of the three. Times are
-- milliseconds since the epoch. States: 0 PENDING, 1 IN_PROGRESS, 2 SUCCEEDED, 3 FAILED.

-- What the shard remembers of itself.
--   next_local_id   no local id from here on was ever given out
--   clean           1 if the last owner closed the file in order, 0 while one is at work or died
--   sound           0 if tables disagreed when it was closed, or had still to be compared
--   start_ms        when the last owner took over
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
-- PENDING; in other states their table's own time counts.
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

-- PENDING jobs, in the order in which they are handed out. `run_after` equals the job's own.
CREATE TABLE pending (
    queue     INTEGER NOT NULL,
    priority  INTEGER NOT NULL,
    run_after INTEGER NOT NULL,
    local_id  INTEGER NOT NULL,
    PRIMARY KEY (queue, priority, run_after, local_id)
) WITHOUT ROWID;

-- Jobs IN_PROGRESS. `claimed_at`: when they were claimed or last checkpointed. The index finds
-- claims that timed out without a walk over those that did not.
CREATE TABLE claims (
    local_id         INTEGER PRIMARY KEY,
    queue            INTEGER NOT NULL,
    priority         INTEGER NOT NULL,
    claimed_at       INTEGER NOT NULL,
    claim_descriptor TEXT NOT NULL
);
CREATE INDEX claims_by_age ON claims (queue, priority, claimed_at);

-- Jobs that SUCCEEDED or FAILED, with their last claim as a record. The index gives the oldest
-- first, to those that collect garbage and to retries.
CREATE TABLE ended (
    local_id         INTEGER PRIMARY KEY,
    queue            INTEGER NOT NULL,
    priority         INTEGER NOT NULL,
    state            INTEGER NOT NULL,
    ended_at         INTEGER NOT NULL,
    claim_descriptor TEXT NOT NULL
);
CREATE INDEX ended_by_age ON ended (queue, state, priority, ended_at);

-- How many jobs there are, kept up in the commits that change it: a depth is never counted.
CREATE TABLE depths (
    queue    INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    state    INTEGER NOT NULL,
    jobs     INTEGER NOT NULL,
    PRIMARY KEY (queue, priority, state)
) WITHOUT ROWID;

-- A whole job, whatever its state.
CREATE VIEW job_records AS
SELECT
    jobs.local_id,
    jobs.queue,
    jobs.priority,
    CASE
        WHEN claims.local_id IS NOT NULL THEN 1
        WHEN ended.local_id IS NOT NULL THEN ended.state
        ELSE 0
    END AS state,
    jobs.attempts_allowed,
    jobs.attempts_remaining,
    jobs.custom_status,
    jobs.created_at,
    jobs.run_after,
    coalesce(claims.claimed_at, ended.ended_at, jobs.updated_at) AS updated_at,
    coalesce(claims.claim_descriptor, ended.claim_descriptor) AS claim_descriptor,
    jobs.body
FROM jobs
LEFT JOIN claims ON claims.local_id = jobs.local_id
LEFT JOIN ended ON ended.local_id = jobs.local_id;
