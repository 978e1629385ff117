-- A shard of version 1, as .dump shows it: jobs in all states, two queues, one that was deleted.
PRAGMA application_id = 0x504C4A31;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE claims (
    local_id         INTEGER PRIMARY KEY,
    queue            INTEGER NOT NULL,
    priority         INTEGER NOT NULL,
    claimed_at       INTEGER NOT NULL,
    claim_descriptor TEXT NOT NULL
);
INSERT INTO "claims" VALUES(1700000000005,1,1,1700004000,'host:9010:1700000000:worker:5');
INSERT INTO "claims" VALUES(1700000000006,1,1,1700001000,'host:9010:1700000000:worker:6');
INSERT INTO "claims" VALUES(1700000000011,2,1,1700004000,'host:9010:1700000000:svc:é:7');
CREATE TABLE depths (
    queue    INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    state    INTEGER NOT NULL,
    jobs     INTEGER NOT NULL,
    PRIMARY KEY (queue, priority, state)
) WITHOUT ROWID;
INSERT INTO "depths" VALUES(1,1,0,3);
INSERT INTO "depths" VALUES(1,1,1,2);
INSERT INTO "depths" VALUES(1,1,2,3);
INSERT INTO "depths" VALUES(1,1,3,1);
INSERT INTO "depths" VALUES(1,3,0,1);
INSERT INTO "depths" VALUES(2,1,0,0);
INSERT INTO "depths" VALUES(2,1,1,1);
CREATE TABLE ended (
    local_id         INTEGER PRIMARY KEY,
    queue            INTEGER NOT NULL,
    priority         INTEGER NOT NULL,
    state            INTEGER NOT NULL,
    ended_at         INTEGER NOT NULL,
    claim_descriptor TEXT NOT NULL
);
INSERT INTO "ended" VALUES(1700000000001,1,1,2,1700002000,'host:9010:1700000000:worker:1');
INSERT INTO "ended" VALUES(1700000000002,1,1,2,1700002000,'host:9010:1700000000:worker:2');
INSERT INTO "ended" VALUES(1700000000003,1,1,3,1700003000,'host:9010:1700000000:worker:3');
INSERT INTO "ended" VALUES(1700000000004,1,1,2,1700003000,'host:9010:1700000000:worker:4');
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
INSERT INTO "jobs" VALUES(1700000000000,3,1,2,2,1700000000,1700000000,1700000000,'',X'676F6E65');
INSERT INTO "jobs" VALUES(1700000000001,1,1,1,1,1700000000,1700000000,1700000000,'new',X'6A6F622030');
INSERT INTO "jobs" VALUES(1700000000002,1,1,1,1,1700000000,1700000000,1700000000,'new',X'6A6F622031');
INSERT INTO "jobs" VALUES(1700000000003,1,1,1,0,1700000000,1700000000,1700000000,'newwhy',X'6A6F622032');
INSERT INTO "jobs" VALUES(1700000000004,1,1,1,1,1700000000,1700000000,1700000000,'new',X'6A6F622033');
INSERT INTO "jobs" VALUES(1700000000005,1,1,1,1,1700004000,1700000000,1700004000,'new',X'6A6F622034');
INSERT INTO "jobs" VALUES(1700000000006,1,1,1,1,1700000000,1700000000,1700000000,'new',X'6A6F622035');
INSERT INTO "jobs" VALUES(1700000000007,1,3,2,2,1700004000,1700004000,1700004000,'',X'6C6F77');
INSERT INTO "jobs" VALUES(1700000000008,1,1,2,2,1700009000,1700004000,1700004000,'',X'6C61746572');
INSERT INTO "jobs" VALUES(1700000000009,1,1,2,2,1700004000,1700004000,1700004000,'',X'647565');
INSERT INTO "jobs" VALUES(1700000000010,1,1,2,2,1700004000,1700004000,1700004000,'',X'64756520746F6F');
INSERT INTO "jobs" VALUES(1700000000011,2,1,2,2,1700004000,1700004000,1700004000,'',X'616E6F74686572');
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "meta" VALUES('clean',1);
INSERT INTO "meta" VALUES('next_local_id',1700000000012);
INSERT INTO "meta" VALUES('sound',1);
INSERT INTO "meta" VALUES('start_ms',1700000000);
CREATE TABLE pending (
    queue     INTEGER NOT NULL,
    priority  INTEGER NOT NULL,
    run_after INTEGER NOT NULL,
    local_id  INTEGER NOT NULL,
    PRIMARY KEY (queue, priority, run_after, local_id)
) WITHOUT ROWID;
INSERT INTO "pending" VALUES(1,1,1700004000,1700000000009);
INSERT INTO "pending" VALUES(1,1,1700004000,1700000000010);
INSERT INTO "pending" VALUES(1,1,1700009000,1700000000008);
INSERT INTO "pending" VALUES(1,3,1700004000,1700000000007);
INSERT INTO "pending" VALUES(3,1,1700000000,1700000000000);
CREATE TABLE queues (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    name       TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    dropped    INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "queues" VALUES(1,'mail',1700000000,0);
INSERT INTO "queues" VALUES(2,'other',1700000000,0);
INSERT INTO "queues" VALUES(3,'gone',1700000000,1);
CREATE UNIQUE INDEX queues_by_name ON queues (name) WHERE NOT dropped;
CREATE INDEX claims_by_age ON claims (queue, priority, claimed_at);
CREATE INDEX ended_by_age ON ended (queue, state, priority, ended_at);
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
COMMIT;
