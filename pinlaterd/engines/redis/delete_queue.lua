-- Arguments: the shard, token, lease in ms, queue, the most priorities there may be. The queue's
-- sets are renamed, so that its jobs are in no state from now on; vacuum.lua removes them. A lean
-- queue goes at once.

local problem = begin_write(false)
if problem then
  return problem
end
local queue, most_priorities = take(), take_number()
problem = damage(queues_key(queue), 'zset')
if problem then
  return problem
end
redis.call('ZREM', queues_key(queue), queue)
if is_lean(queue) then
  -- Redis frees them beside its work.
  redis.call('UNLINK', jobs_key(queue), claims_key(queue), updates_key(queue))
end
for priority = 1, most_priorities do
  for _, state in ipairs({ PENDING, IN_PROGRESS, SUCCEEDED, FAILED }) do
    local set = set_key(queue, priority, state)
    if is_lean(queue) then
      redis.call('UNLINK', set)
    elseif redis.call('EXISTS', set) == 1 then
      -- The record may have been evicted: a set that is not emptied yet keeps its key.
      local number = number_in(redis.call('HGET', RECORD, 'dropped'), 0, MOST_EXACT / 2) or 0
      local dropped
      repeat
        number = number + 1
        dropped = string.format('%s_%s.%.0f', DROPPED, queue, number)
      until redis.call('EXISTS', dropped) == 0
      redis.call('HSET', RECORD, 'dropped', string.format('%.0f', number))
      redis.call('RENAME', set, dropped)
      redis.call('RPUSH', DROPPED, dropped)
    end
  end
end
return { 'OK' }
