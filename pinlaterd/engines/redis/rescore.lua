-- Give jobs that PinLater made scores that order them by id within a millisecond (common.lua).
-- Arguments: the shard, token, lease in ms, queue, priority, lowest and highest score, offset, limit.
-- Returns OK, how many were looked at.

local problem = begin_write(false)
if problem then
  return problem
end
local queue, priority, low, high, offset, limit = take(), take(), take(), take(), take(), take()
local set = set_key(queue, priority, PENDING)
local rows = redis.call('ZRANGEBYSCORE', set, low, high, 'WITHSCORES', 'LIMIT', offset, limit)
for at = 1, #rows, 2 do
  local id = rows[at]
  local score = score_of(ms_of(rows[at + 1]), id)
  if score ~= tonumber(rows[at + 1]) then
    redis.call('ZADD', set, 'XX', score, id)
  end
end
return { 'OK', #rows / 2 }
