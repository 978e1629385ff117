-- What few jobs have (JobOptions), in a file in which such a job was ever enqueued: a row for each
-- of them, which comes and goes with the job, in the same commit. Rows are in the order of the
-- jobs, so that many are written, and deleted, in few pages. The meta rows 'options of QUEUE' tell
-- which queues have any.
--   scope       within which `key` is held once: the job's queue
--   expires_at  from when on the job is not handed out any more
--   check_at    when maintenance looks at that job next; NULL: never. Of a PENDING job: expires_at
--   end_reason  why the job ended, if that needs saying
--   run_after_us, expires_at_us  both times in microseconds, as the client gave them
CREATE TABLE IF NOT EXISTS options (
    local_id   INTEGER PRIMARY KEY,
    queue      INTEGER NOT NULL,
    scope      INTEGER NOT NULL,
    key        TEXT,
    expires_at INTEGER,
    check_at   INTEGER,
    end_reason TEXT,
    run_after_us  INTEGER,
    expires_at_us INTEGER
);
CREATE INDEX IF NOT EXISTS options_to_check ON options (queue, check_at)
WHERE check_at IS NOT NULL;

-- Which jobs may hold a key, by its hash and its scope's (keys.py). A row may be of a job that is gone: what is found here is
-- compared with `options`. It lacks the jobs above the meta row 'hashed_id', which their owner has
-- in memory.
CREATE TABLE IF NOT EXISTS key_hashes (
    key_hash INTEGER NOT NULL,
    local_id INTEGER NOT NULL,
    PRIMARY KEY (key_hash, local_id)
) WITHOUT ROWID;
