-- Arguments: the shard, token, lease in ms, queue, now_ms, ids to skip, '1' if the last owner's end
-- was unclean.
-- A queue that is made anew goes on with ids far from those that it gave before: an unclean end
-- in between skipped none in the counter of a queue that was deleted. And such an end may be that of
-- a server that has lost everything: then no counter is left that knows what was given.

local problem = begin_write(false)
if problem then
  return problem
end
problem = damage(QUEUES, 'zset')
if problem then
  return problem
end
local queue, now, skipped, after_unclean_end = take(), take_number(), take(), take() == '1'
local counter = counter_key(queue)
local is_new = redis.call('ZADD', QUEUES, 'NX', now / 1000, queue) == 1
local first = after_unclean_end and unused_id(now) or '0'
if is_new and not redis.call('SET', counter, first, 'NX') then
  redis.pcall('INCRBY', counter, skipped) -- what is no number is told of with the first enqueue
end
return { 'OK' }
