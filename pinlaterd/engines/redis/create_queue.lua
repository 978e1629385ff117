-- Arguments: the shard, token, lease in ms, queue, now_ms.

local problem = begin_write(false)
if problem then
  return problem
end
local queue, now = take(), take_number()
problem = damage(queues_key(queue), 'zset')
if problem then
  return problem
end
if redis.call('ZADD', queues_key(queue), 'NX', now / 1000, queue) == 1 then
  raise_counter(queue, now)
end
return { 'OK' }
