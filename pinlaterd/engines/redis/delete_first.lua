-- Delete the first jobs of a state: the first to be handed out, or the oldest. Arguments: the
-- shard, token, lease in ms, queue, state, limit, the time in ms that they have to be before (or
-- ''), priorities. Returns OK, then priority and id of each.

local problem = begin_write(false)
if problem then
  return problem
end
local queue, state, limit, before = take(), take(), take_number(), take_number()
local most = '+inf'
if before then
  most = below((window(before)))
end
local deleted = { 'OK' }
while taken < #ARGV and limit > 0 do
  local priority = take()
  local set = set_key(queue, priority, state)
  if not damage(set, 'zset') then
    limit = limit - visit_first(set, queue, '-inf', most, limit, function(id)
      redis.call('ZREM', set, id)
      remove_job(queue, id)
      deleted[#deleted + 1] = priority
      deleted[#deleted + 1] = id
    end)
  end
end
return deleted
