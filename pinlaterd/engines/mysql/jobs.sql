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
--   due_at           run_after of a PENDING job, updated_at of any other. The server keeps it, for
--                    PinLater's statements and a hand's too.
--
--   claim_descriptor while a job is PENDING: blanks, as many as a claim usually has characters, and
--                    claims are filled up to that (their readers trim them); pending_since is never
--                    NULL either. So a claim changes a row in its place. Rows are inserted in order,
--                    which fills their pages: one that grew would split its page. In bytes of redo log
--                    for a job claimed and acknowledged, with bodies of 200 bytes and claims of 64
--                    characters: 3,338 if it grows, 465 in its place, for which its insertion takes
--                    397 instead of 326.
--
-- One index serves all that is not by primary key, for each index that a claim and an ack have to
-- change costs both a third of their time (MariaDB 10.11, a job claimed and acknowledged, in µs of
-- the server: 25.7 with one on run_after and one on updated_at; 16.4 with this one). By state and due_at it finds what is ready, in the
-- order in which it is handed out (state 0), claims that timed out (1), garbage (2, 3), the longest
-- failed (3). local_id is the order in which equal times are told apart. run_after is at its end
-- so that counts and scans of states other than 0 read nothing but the index: they sort, or walk
-- through, all jobs of a state.
-- PinLater's index on claim_descriptor is not needed: claims are made, and read, by primary key.
--
-- local_id is given by the owner, from one counter for the whole shard (plm_<shard>): inserts need
-- not wait for an AUTO_INCREMENT lock, and no id comes back, neither after a delete nor with a queue
-- of an old name. AUTO_INCREMENT stays for a PinLater server, which relies on it.
--
-- A claim gives each job a descriptor of its own. One statement for all: an UPDATE for each job takes
-- five times as long (measured with 100 and 800 jobs). Where the descriptors' numbers grow with the
-- ids, the server counts them up; else it finds each by bisection, ELT(INTERVAL(…)), 7 % of the time
-- less than with CASE (statements.py).
--
-- An ack that names its claim is compared in the UPDATE itself (statements.by_ids). In µs a job, of
-- 160 and of 800, all on time: 10.4 and 10.2 with a SELECT … FOR UPDATE before, 7.1 and 7.3 without.
--
-- States: 0 PENDING, 1 IN_PROGRESS, 2 SUCCEEDED, 3 FAILED.
CREATE TABLE IF NOT EXISTS {table} (
    local_id           BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
    state              TINYINT         NOT NULL,
    claim_descriptor   VARCHAR(500)    DEFAULT '{room}',
    attempts_allowed   INT             NOT NULL,
    attempts_remaining INT             NOT NULL,
    custom_status      VARCHAR(5000)   NOT NULL DEFAULT '',
    updated_at         DATETIME(3)     NOT NULL DEFAULT CURRENT_TIMESTAMP(3)
                                       ON UPDATE CURRENT_TIMESTAMP(3),
    created_at         DATETIME(3)     NOT NULL,
    run_after          DATETIME(3)     NOT NULL,
    pending_since      DATETIME(3)     DEFAULT '2000-01-01',
    due_at             DATETIME(3) AS (IF(state = 0, run_after, updated_at)) STORED,
    body               LONGBLOB        NOT NULL,
    PRIMARY KEY (local_id),
    INDEX by_due_at (state, due_at, local_id, run_after)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
