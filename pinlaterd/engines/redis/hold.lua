-- Take a shard from its owner without becoming one, and keep others from it for a time: its server
-- is about to be replaced. Arguments: the shard, a token that names us, for how many ms.
-- The owner finds with its next write that it was deposed. What is held is free after that time.

local token, held_ms = take(), take()
if redis.call('EXISTS', RECORD) == 1 then
  redis.call('HSET', RECORD, 'owner', token)
end
redis.call('SET', LEASE, token, 'PX', held_ms)
return { 'OK' }
