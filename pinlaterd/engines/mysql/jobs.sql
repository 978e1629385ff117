-- The jobs of one priority of one queue: table jobs_p<priority> in database plq_<shard>_<queue>.
-- Names and meanings are PinLater's, so that its tables are served as they stand, and that a
-- PinLater server can go on with ours (where the server's time zone is UTC). Ours are better in this:
--
--   DATETIME(3)      PinLater: TIMESTAMP, which holds whole seconds and ends in January 2038. Not
--                    BIGINT: that would save nothing that can be measured, and NOW() of a PinLater
--                    server or of a hand in the table would be compared with it as a number. All
--                    sessions of ours have time_zone '+00:00': what is stored is UTC.
--   LONGBLOB         PinLater: BLOB, 64 KiB. Bodies up to some KiB lie in the row all the same.
--   utf8mb4_bin      PinLater: the server's default, perhaps latin1. Texts are texts of any kind.
--   pending_since    what updated_at was before the claim, so that a claim that never reached its
--                    worker leaves no trace. PinLater has no such column, and need not know it.
--
-- Two indexes serve all that is not by primary key, and each ends in local_id, the order in which equal
-- times are told apart:
--   by_run_after     what is ready, in the order in which it is handed out (state 0); scans, which
--                    go by run-after downwards in any state
--   by_updated_at    claims that timed out (1), garbage (2, 3), the longest failed (3)
-- PinLater's index on claim_descriptor is not needed: claims are made, and read, by primary key.
-- Each index that a claim or an ack has to change costs, so there is none that could be spared.
--
-- local_id is given by the owner, from one counter for the whole shard (plm_<shard>): inserts need
-- not wait for an AUTO_INCREMENT lock, and no id comes back, neither after a delete nor with a queue
-- of an old name. AUTO_INCREMENT stays for a PinLater server, which relies on it.
--
-- A claim gives each job a descriptor of its own. Measured twice (MariaDB 10.11, 2 shared cores,
-- 200-byte bodies, one flushed transaction; medians of 30 and of 8, in ms for 100 and for 800 jobs):
--
--     one UPDATE a job                                 12.7 to 13.6     82 to 108
--     CASE over the ids, 100 a statement                1.9 to 2.1    16.3 to 17.4
--     CASE over the ids, all in one                     1.9 to 2.0    16.9 to 18.1
--     join with SELECT … UNION ALL                      2.1           19.7 to 20.2
--     join with VALUES (MariaDB's syntax)               2.1 to 2.2    17.5
--     join with JSON_TABLE                              2.1 to 2.2    15.2 to 21.3
--     INSERT … ON DUPLICATE KEY UPDATE                  2.2 to 2.6    15.4 to 16.1
--
-- So what counts is that there is one statement; changing the rows and their two indexes costs the
-- rest. CASE was taken: fastest at 100, among the fastest at 800, the same on both kinds of server,
-- and it can't bring back a job that was deleted, as the last one would.
--
-- An ack that names its claim is compared in the UPDATE itself (statements.by_ids). In µs a job, of
-- 160 and of 800, all on time: 10.4 and 10.2 with a SELECT … FOR UPDATE before, 7.1 and 7.3 without.
--
-- States: 0 PENDING, 1 IN_PROGRESS, 2 SUCCEEDED, 3 FAILED.
CREATE TABLE IF NOT EXISTS {table} (
    local_id           BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
    state              TINYINT         NOT NULL,
    claim_descriptor   VARCHAR(500),
    attempts_allowed   INT             NOT NULL,
    attempts_remaining INT             NOT NULL,
    custom_status      VARCHAR(5000)   NOT NULL DEFAULT '',
    updated_at         DATETIME(3)     NOT NULL DEFAULT CURRENT_TIMESTAMP(3)
                                       ON UPDATE CURRENT_TIMESTAMP(3),
    created_at         DATETIME(3)     NOT NULL,
    run_after          DATETIME(3)     NOT NULL,
    pending_since      DATETIME(3),
    body               LONGBLOB        NOT NULL,
    PRIMARY KEY (local_id),
    INDEX by_run_after (state, run_after, local_id),
    INDEX by_updated_at (state, updated_at, local_id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
