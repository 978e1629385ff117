-- Delete jobs that are in a state still. Arguments: the shard, token, lease in ms, queue, state,
-- then of each priority and id. Returns OK, then priority and id of those deleted.

local problem = begin_write(false)
if problem then
  return problem
end
local queue, state = take(), take()
local deleted = { 'OK' }
while taken < #ARGV do
  local priority, id = take(), take()
  if redis.pcall('ZREM', set_key(queue, priority, state), id) == 1 and remove_job(queue, id) then
    deleted[#deleted + 1] = priority
    deleted[#deleted + 1] = id
  end
end
return deleted
