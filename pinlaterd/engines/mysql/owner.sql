-- What a shard remembers of itself, in the database plm_<shard>. Ours alone: PinLater has nothing
-- like it, and ignores it.
--   next_local_id   no local id from here on was ever given out, in any queue or priority
--   start_ms        when the last owner took over
--   fence           the highest number that the shard's fence was raised to
CREATE TABLE IF NOT EXISTS {table} (
    name  VARCHAR(40) NOT NULL,
    value BIGINT      NOT NULL,
    PRIMARY KEY (name)
) ENGINE = InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin
