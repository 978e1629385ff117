-- Give up ownership, and note that the end was clean. Arguments: the shard, the token.
-- If the shard has another owner by now, nothing changes.

local token = take()
if redis.call('HGET', RECORD, 'owner') == token then
  redis.call('DEL', LEASE)
  redis.call('HSET', RECORD, 'owner', '', 'clean', 1)
end
return { 'OK' }
