-- Arguments: the shard, token, lease in ms, queue, now_ms, ids to skip.
-- A queue that is made anew goes on with ids far from those that it gave before: an unclean end
-- in between skipped none in the counter of a queue that was deleted.

local problem = begin_write(false)
if problem then
  return problem
end
problem = damage(QUEUES, 'zset')
if problem then
  return problem
end
local queue, now, skipped = take(), take_number(), take()
local counter = counter_key(queue)
local is_new = redis.call('ZADD', QUEUES, 'NX', now / 1000, queue) == 1
if is_new and not redis.call('SET', counter, 0, 'NX') then
  redis.pcall('INCRBY', counter, skipped) -- what is no number is told of with the first enqueue
end
return { 'OK' }
