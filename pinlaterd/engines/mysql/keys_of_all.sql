-- The queues of jobs that hold keys of all queues, in UTF-8: table `keys_of_all` in the database
-- plm_<shard>, once any queue has a table of keys. Each is in the table of its queue's keys as well, and
-- counts only if it is there.
CREATE TABLE IF NOT EXISTS {table} (
    name  VARBINARY(200) NOT NULL,
    queue VARBINARY(64)  NOT NULL,
    PRIMARY KEY (name)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
