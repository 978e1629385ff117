-- The latest term in which a shard was claimed, where several servers share the shards: one row, in
-- the database plm_<shard>. No transaction on jobs touches it, so that a claim waits for no owner.
CREATE TABLE IF NOT EXISTS {table} (
    id     TINYINT      NOT NULL,
    epoch  BIGINT       NOT NULL,
    server VARCHAR(200) NOT NULL,
    PRIMARY KEY (id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
