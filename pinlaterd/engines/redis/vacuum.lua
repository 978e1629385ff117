-- Remove up to `limit` jobs of deleted queues. Arguments: the shard, token, lease in ms, limit.
-- Returns OK, how many sets are left.

local problem = begin_write(false)
if problem then
  return problem
end
local limit = take_number()
while limit > 0 do
  local set = redis.call('LINDEX', DROPPED, 0)
  if not set then
    break
  end
  local queue = string.match(string.sub(set, #DROPPED + 2), '^([^.]*)')
  if damage(set, 'zset') then
    redis.call('UNLINK', set) -- what lay in place of a set when its queue was deleted
  end
  local popped = redis.call('ZPOPMIN', set, limit)
  for at = 1, #popped, 2 do
    redis.call('UNLINK', job_key(queue, popped[at]))
  end
  limit = limit - #popped / 2
  if redis.call('EXISTS', set) == 0 then
    redis.call('LPOP', DROPPED)
  end
end
return { 'OK', redis.call('LLEN', DROPPED) }
