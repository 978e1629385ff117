-- Arguments: the shard, token, lease in ms, queue, now_ms.

local problem = begin_write(false)
if problem then
  return problem
end
problem = damage(QUEUES, 'zset')
if problem then
  return problem
end
local queue, now = take(), take_number()
if redis.call('ZADD', QUEUES, 'NX', now / 1000, queue) == 1 then
  raise_counter(queue, now)
end
return { 'OK' }
