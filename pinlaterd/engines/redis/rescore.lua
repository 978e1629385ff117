-- Give jobs that PinLater made scores that order them by id within a millisecond (common.lua), and
-- remove what is no job's number. Arguments: the shard, token, lease in ms, queue, priority, lowest
-- and highest score, offset, limit. Returns OK, how many were looked at.

local problem = begin_write(false)
if problem then
  return problem
end
local queue, priority, low, high, offset, limit = take(), take(), take(), take(), take(), take()
local set = set_key(queue, priority, PENDING)
problem = damage(set, 'zset')
if problem then
  return problem
end
local rows = redis.call('ZRANGEBYSCORE', set, low, high, 'WITHSCORES', 'LIMIT', offset, limit)
for at = 1, #rows, 2 do
  local id, ms = rows[at], ms_of(rows[at + 1])
  if not is_id(id) then
    redis.call('ZREM', set, id)
  elseif score_of(ms, id) ~= tonumber(rows[at + 1]) and ms <= LATEST_ORDERED_MS then
    redis.call('ZADD', set, 'XX', score_of(ms, id), id)
  end
end
return { 'OK', #rows / 2 }
