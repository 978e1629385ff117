-- Remove jobs that a read found evicted. Arguments: the shard, token, lease in ms, queue, then of
-- each priority and id.

local problem = begin_write(false)
if problem then
  return problem
end
local queue = take()
while taken < #ARGV do
  local priority, id = take(), take()
  if not job_exists(queue, id) then
    for _, state in ipairs({ PENDING, IN_PROGRESS, SUCCEEDED, FAILED }) do
      redis.pcall('ZREM', set_key(queue, priority, state), id)
    end
  end
end
return { 'OK' }
