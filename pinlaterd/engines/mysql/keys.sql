-- The keys of jobs, in UTF-8: table `keys` in the database of a queue in which a job with a key was
-- ever enqueued. Rows come and go with the jobs, in the same transaction. PinLater need not know it:
-- what it deletes leaves its key behind, which counts as free.
--   of_all  1: a key of all queues, which is in table `keys_of_all` as well
CREATE TABLE IF NOT EXISTS {table} (
    of_all   TINYINT UNSIGNED NOT NULL,
    name     VARBINARY(200)   NOT NULL,
    priority TINYINT UNSIGNED NOT NULL,
    local_id BIGINT UNSIGNED  NOT NULL,
    PRIMARY KEY (of_all, name),
    INDEX by_job (local_id, priority)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
