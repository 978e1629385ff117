-- What few jobs have (JobOptions): table `options` in the database of a queue in which such a job was
-- ever enqueued. Rows come and go with the jobs, in the same transaction. PinLater need not know it:
-- of a job that it deletes a row is left, whose key counts as free.
--
--   name        the job's key, in UTF-8
--   of_all      1: a key of all queues, which is in table `keys_of_all` as well
--   expires_at  from when on the job is not handed out any more, in ms since the epoch
--   check_at    when maintenance looks at that job next; NULL: never. Of a PENDING job: expires_at
--   end_reason  why the job ended, if that needs saying
--   run_after_us, expires_at_us  both times in microseconds, as the client gave them
CREATE TABLE IF NOT EXISTS {table} (
    local_id   BIGINT UNSIGNED  NOT NULL,
    priority   TINYINT UNSIGNED NOT NULL,
    of_all     TINYINT UNSIGNED NOT NULL,
    name       VARBINARY(200),
    expires_at BIGINT,
    check_at   BIGINT,
    end_reason VARBINARY(20),
    run_after_us  BIGINT,
    expires_at_us BIGINT,
    PRIMARY KEY (local_id, priority),
    UNIQUE INDEX by_name (of_all, name),
    INDEX by_check_at (check_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
