-- End whatever lease there is, and note an unclean end: the shard's server has taken another's
-- place, and may lack the last of what an owner did there. Argument: the shard.
-- No owner is harmed: its token stays in the record, and with its next write it has a lease again.

redis.call('DEL', LEASE)
if redis.call('EXISTS', RECORD) == 1 then
  redis.call('HSET', RECORD, 'clean', 0)
end
return { 'OK' }
